// Where the time of decode attention goes, in kernels compiled with -DKVQ_PROFILE; elsewhere nothing of this is left.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#if defined(KVQ_PROFILE) && defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace kvq {

enum Stage { PREPARE, SCORES, SOFTMAX, VALUES, MERGE, kStages };

#if defined(KVQ_PROFILE)

inline int64_t ticks() {
#if defined(__x86_64__)
  return int64_t(__rdtsc());
#else
  return std::chrono::steady_clock::now().time_since_epoch().count();
#endif
}

inline std::atomic<int64_t> spent[kStages];

struct Laps {
  int64_t at = ticks();
  void lap(Stage stage) {
    const int64_t now = ticks();
    spent[stage].fetch_add(now - at, std::memory_order_relaxed);
    at = now;
  }
};

#else

struct Laps {
  void lap(Stage) {}
};

#endif

}  // namespace kvq

#if defined(KVQ_PROFILE)
// The ticks of every stage since the last call, and after them those of a million cycles.
extern "C" int64_t kvq_profile(int64_t* out) {
  for (int i = 0; i < kvq::kStages; ++i) out[i] = kvq::spent[i].exchange(0);
  int64_t best = INT64_MAX;
  for (int repeat = 0; repeat < 20; ++repeat) {
    const int64_t begin = kvq::ticks();
    uint64_t x = 1;
    // Additions that wait for each other take a cycle each.
    for (int i = 0; i < 1000000; i += 10) {
#define KVQ_ADD asm volatile("" : "+r"(x)); x += 3;
      KVQ_ADD KVQ_ADD KVQ_ADD KVQ_ADD KVQ_ADD KVQ_ADD KVQ_ADD KVQ_ADD KVQ_ADD KVQ_ADD
#undef KVQ_ADD
    }
    const int64_t taken = kvq::ticks() - begin;
    best = taken < best ? taken : best;
  }
  out[kvq::kStages] = best;
  return 0;
}
#endif
