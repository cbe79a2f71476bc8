// Which tokens a query may see.
#pragma once
#include <algorithm>

#include "params.h"
#include "vec.h"

namespace kvq {

// Tokens [lo, hi) that query i of row b may see by length, causality and window. Both grow with i.
struct Reach {
  int64_t lo, hi;
};

inline int64_t end_of(const AttentionArgs& a, int64_t b) {
  int64_t tokens = a.key.tokens;
  return a.use_length ? std::max<int64_t>(0, std::min(load_index(a.key.length, b), tokens)) : tokens;
}

inline Reach reach_of(const AttentionArgs& a, int64_t end, int64_t i) {
  Reach r{0, end};
  const int64_t own = end - a.queries + i;
  if (a.causal) r.hi = std::max<int64_t>(0, std::min(end, own + 1));
  if (a.window) r.lo = std::min(std::max<int64_t>(0, own - a.window + 1), end);
  return r;
}

inline const char* mask_row(const AttentionArgs& a, int64_t b, int64_t head, int64_t i) {
  return a.mask.data + (b * a.mask.b + head * a.mask.h + i * a.mask.t) * item_size(a.mask.dtype);
}

// The mask of one query as what is added to its scores: -inf where it is closed.
// Returns whether anything is open, and clears `plain` unless everything is zero.
inline bool bias_row(const AttentionArgs& a, int64_t b, int64_t head, int64_t i, int64_t t0, int64_t n, float* out,
                     bool& plain) {
  const char* row = mask_row(a, b, head, i);
  const int64_t step = a.mask.d;
  bool open = false, zero = true;
  if (a.mask.dtype == BOOL) {
    if (step == 1) {
      int64_t count = 0;
      for (int64_t t = 0; t < n; ++t) count += row[t0 + t] != 0;
      for (int64_t t = 0; t < n; ++t) out[t] = row[t0 + t] ? 0.0f : -kInf;
      open = count != 0, zero = count == n;
    } else {
      for (int64_t t = 0; t < n; ++t) {
        const bool o = row[(t0 + t) * step] != 0;
        out[t] = o ? 0.0f : -kInf, open |= o, zero &= o;
      }
    }
  } else if (a.mask.dtype == F32 && step == 1) {
    std::memcpy(out, row + t0 * 4, n * 4);
    int64_t closed = 0, other = 0;
    for (int64_t t = 0; t < n; ++t) closed += out[t] == -kInf, other += out[t] != 0.0f;
    open = closed != n, zero = other == 0;
  } else {
    const int64_t size = item_size(a.mask.dtype) * step;
    for (int64_t t = 0; t < n; ++t) {
      out[t] = load_number(row + (t0 + t) * size, a.mask.dtype);
      open |= out[t] != -kInf, zero &= out[t] == 0.0f;
    }
  }
  if (!zero) plain = false;
  return open;
}

inline bool is_open(const AttentionArgs& a, const char* row, int64_t t) {
  const char* p = row + t * a.mask.d * item_size(a.mask.dtype);
  return a.mask.dtype == BOOL ? *p != 0 : load_number(p, a.mask.dtype) != -kInf;
}

// Narrows [lo, hi) to what the mask opens for any of a few queries, where it does not differ between heads.
inline Reach masked_reach(const AttentionArgs& a, int64_t b, Reach r) {
  if (a.mask.dtype == NONE || a.mask.h != 0 || a.queries > 16) return r;
  Reach found{r.hi, r.lo};
  for (int64_t i = 0; i < (a.mask.t ? a.queries : 1); ++i) {
    const char* row = mask_row(a, b, 0, i);
    if (a.mask.d == 0) {
      if (is_open(a, row, 0)) return r;
      continue;
    }
    int64_t hi = r.hi;
    if (a.mask.dtype == BOOL && a.mask.d == 1) {
      uint64_t word;
      while (hi - 8 >= found.hi && hi - 8 >= r.lo && (std::memcpy(&word, row + hi - 8, 8), word == 0)) hi -= 8;
    }
    while (hi > found.hi && !is_open(a, row, hi - 1)) --hi;
    found.hi = std::max(found.hi, hi);
    int64_t lo = r.lo;
    while (lo < found.lo && !is_open(a, row, lo)) ++lo;
    found.lo = std::min(found.lo, lo);
  }
  return found.lo < found.hi ? found : Reach{0, 0};
}

}  // namespace kvq
