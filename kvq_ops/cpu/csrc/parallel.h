// A loop over items that threads take one by one.
//
// Threads are kept, and sleep between loops. Nobody waits for a thread that has not begun: on a busy machine the caller then does
// the work alone, where an OpenMP region would spin at its end until every thread was given a core.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

namespace kvq {

struct Job {
  std::atomic<int64_t> next{0}, done{0}, helpers;
  int64_t items;
  const void* body;
  void (*call)(const void*, int64_t);

  // `body` lives until all items are done, so it is only touched for an item.
  void work() {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
      call(body, i);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

class Pool {
 public:
  // Never destroyed, since its threads are not either.
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }
  void run(const std::shared_ptr<Job>& job, int64_t helpers) {
    {
      std::lock_guard<std::mutex> guard(lock_);
      for (; started_ < helpers; ++started_) std::thread([this] { serve(); }).detach();
      job_ = job;
      ++posted_;
    }
    wake_.notify_all();
    job->work();
    while (job->done.load(std::memory_order_acquire) < job->items) std::this_thread::yield();
  }

 private:
  void serve() {
    uint64_t seen = 0;
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> guard(lock_);
        wake_.wait(guard, [&] { return posted_ != seen; });
        seen = posted_;
        job = job_;
      }
      if (job->helpers.fetch_sub(1, std::memory_order_relaxed) > 0) job->work();
    }
  }
  std::mutex lock_;
  std::condition_variable wake_;
  std::shared_ptr<Job> job_;
  uint64_t posted_ = 0;
  int64_t started_ = 0;
};

template <class Body>
void parallel(int64_t items, int64_t threads, const Body& body) {
  if (threads > items) threads = items;
  if (threads <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  auto job = std::make_shared<Job>();
  job->helpers = threads - 1, job->items = items, job->body = &body;
  job->call = [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); };
  Pool::instance().run(job, threads - 1);
}

}  // namespace kvq
