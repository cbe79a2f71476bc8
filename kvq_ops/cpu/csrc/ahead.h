// Fetching memory into the cache while something else is computed.
#pragma once

namespace kvq {

// Pieces of memory, fetched one after the other, some lines at a time: a core waits for a limited number of lines at once, so steps are
// spread evenly over the work. `keys`, `softmax` and `values` are the lines of a step of each.
struct Ahead {
  static constexpr int kPieces = 8;
  int keys = 0, softmax = 0, values = 0;

  // At most kPieces, before the first step.
  void add(const char* first, const char* last) {
    if (first >= last) return;
    pieces_[count_++] = {first, last};
    lines_ += (last - first + 63) / 64;
    if (count_ == 1) next_ = first, end_ = last, at_ = 1;
  }
  long lines() const { return lines_; }
  void step(int lines) {
    if (next_ >= end_) return;
    for (int i = 0; i < lines; ++i, next_ += 64) __builtin_prefetch(next_, 0, 2);
    if (next_ >= end_ && at_ < count_) next_ = pieces_[at_].first, end_ = pieces_[at_++].last;
  }

 private:
  const char *next_ = nullptr, *end_ = nullptr;
  int at_ = 0, count_ = 0;
  long lines_ = 0;
  struct { const char *first, *last; } pieces_[kPieces];
};

}  // namespace kvq
