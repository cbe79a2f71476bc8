// A loop over items that threads take one by one.
//
// The threads are those of the OpenMP runtime that PyTorch has loaded: between PyTorch's own loops they wait on their cores, awake, where
// threads of ours would first have to be woken and then share those cores with them. The runtime is found by name in the process, since
// linking one could bring in another. Without it, and in the child of a process that had used it (which inherits no threads, and GNU's
// runtime would wait for them), threads of our own do it; they sleep between loops, and nobody waits for one that has not begun.
#pragma once
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>

namespace kvq {

struct Job {
  int64_t items;
  const void* body;
  void (*call)(const void*, int64_t);
  std::atomic<int64_t> next{0}, done{0}, helpers{0};

  Job(int64_t items, const void* body, void (*call)(const void*, int64_t)) : items(items), body(body), call(call) {}

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
  // Never destroyed, since its threads are not either. A forked child begins anew: it has none of the threads, and one of them may have
  // held the lock.
  static Pool& instance() {
    static std::atomic<Pool*> pool{[] {
      pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
      return new Pool;
    }()};
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

// GOMP_parallel(body, its argument, threads, flags), which LLVM's and Intel's runtimes have on Linux too.
using Region = void (*)(void (*)(void*), void*, unsigned, unsigned);

inline Region openmp() {
  static std::atomic<Region> region{[] {
    pthread_atfork(nullptr, nullptr, [] { region = nullptr; });
    return reinterpret_cast<Region>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  }()};
  return region;
}

template <class Body>
void parallel(int64_t items, int64_t threads, const Body& body) {
  if (items <= 1 || threads <= 1) {
    for (int64_t i = 0; i < items; ++i) body(i);
    return;
  }
  const auto call = [](const void* b, int64_t i) { (*static_cast<const Body*>(b))(i); };
  if (const Region region = openmp()) {
    Job job{items, &body, call};
    // As many threads as PyTorch's loops have, even where there is less to do: GNU's runtime ends those that a smaller team has no use for.
    region([](void* j) { static_cast<Job*>(j)->work(); }, &job, unsigned(threads), 0);
    return;
  }
  const int64_t helpers = std::min(threads, items) - 1;
  auto job = std::make_shared<Job>(items, &body, call);
  job->helpers = helpers;
  Pool::instance().run(job, helpers);
}

}  // namespace kvq
