// Where the tokens of a sequence lie: side by side in its row of a store, or in pages of a pool that a table names.
#pragma once
#include <algorithm>

#include "numbers.h"

namespace kvq {

// Tokens that lie side by side: `count` of them from `slot` on, in row `row` of the planes.
struct Run {
  int64_t row, slot, count;
};

// The first tokens of t .. t + n of sequence b that lie side by side. A token without a page, which no result depends on, is read
// in page 0.
inline Run run_of(const Side& s, int64_t b, int64_t t, int64_t n) {
  if (s.table_of_pages.dtype == NONE) return {b, t, n};
  const Plane& p = s.table_of_pages;
  const int64_t block = t / s.page_tokens, slot = t - block * s.page_tokens;
  const int64_t page = load_integer(p, b * p.b + block * p.t);
  return {std::max<int64_t>(page, 0), slot, std::min(n, s.page_tokens - slot)};
}

// Calls `use(run, i)` for the runs of tokens t .. t + n; the run starts at the i-th of them.
template <class Use>
inline void each_run(const Side& s, int64_t b, int64_t t, int64_t n, const Use& use) {
  for (int64_t i = 0; i < n;) {
    const Run run = run_of(s, b, t + i, n - i);
    use(run, i);
    i += run.count;
  }
}

}  // namespace kvq
