// Keys as they were before rotary position embedding, see kvq_ops/codecs/rotary.py.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "pages.h"

namespace kvq {

constexpr int64_t kPage = 1024;  // positions in a page of sines

// Sines and cosines of every position that was met, for one set of frequencies; computed in double precision once, since they cost
// more than all else.
struct Sines {
  std::vector<float> frequencies;
  std::vector<std::unique_ptr<float[]>> pages;  // [kPage][2][channels]

  const float* at(int64_t position) const {
    return pages[position / kPage].get() + position % kPage * 2 * int64_t(frequencies.size());
  }
  void reach(int64_t position) {
    const int64_t channels = int64_t(frequencies.size());
    if (int64_t(pages.size()) <= position / kPage) pages.resize(position / kPage + 1);
    std::unique_ptr<float[]>& page = pages[position / kPage];
    if (page) return;
    page.reset(new float[kPage * 2 * channels]);
    for (int64_t i = 0; i < kPage; ++i)
      for (int64_t c = 0; c < channels; ++c) {
        const double angle = double(position / kPage * kPage + i) * double(frequencies[c]);
        page[(i * 2) * channels + c] = float(std::cos(angle));
        page[(i * 2 + 1) * channels + c] = float(std::sin(angle));
      }
  }
};

// Positions up to `last` of the frequencies of a store. Pages stay where they are, so that other threads may read on.
inline const Sines& sines_of(const Side& s, int64_t last) {
  static std::mutex lock;
  static std::vector<std::unique_ptr<Sines>> all;
  std::lock_guard<std::mutex> guard(lock);
  const int64_t channels = s.dim / 2;
  std::vector<float> wanted(channels);
  for (int64_t c = 0; c < channels; ++c) wanted[c] = load_static(s.inv_freq, 0, c);
  Sines* found = nullptr;
  for (auto& one : all)
    if (one->frequencies.size() == wanted.size() &&
        std::memcmp(one->frequencies.data(), wanted.data(), channels * 4) == 0)
      found = one.get();
  if (!found) {
    all.emplace_back(new Sines);
    found = all.back().get();
    found->frequencies = wanted;
    found->pages.reserve(1 << 16);  // 64 million positions without moving what others read
  }
  for (int64_t p = 0; p <= last; p += kPage) found->reach(p);
  return *found;
}

// The last position among the first `tokens` of a store with a plane of positions.
inline int64_t last_position(const Side& s, int64_t tokens) {
  int32_t last = 0;
  for (int64_t b = 0; b < s.batch; ++b)
    each_run(s, b, 0, tokens, [&](const Run& run, int64_t) {
      for (int64_t t = run.slot; t < run.slot + run.count; ++t)
        last = std::max(last, *reinterpret_cast<const int32_t*>(at(s.position, run.row, 0, t)));
    });
  return last - 1;
}

inline void find_sines(Side& s, int64_t last) { s.sines = s.position.dtype == NONE ? nullptr : &sines_of(s, last); }

// Turns a vector by its position, or back.
inline void turn_by(const float* sines, float* x, int64_t dim, bool back) {
  const int64_t half = dim / 2;
  for (int64_t c = 0; c < half; ++c) {
    const float low = x[c], high = x[c + half];
    const float cosine = sines[c], sine = back ? -sines[half + c] : sines[half + c];
    x[c] = low * cosine - high * sine;
    x[c + half] = high * cosine + low * sine;
  }
}

}  // namespace kvq
