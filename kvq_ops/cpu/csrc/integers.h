// Attention of a few query rows over codes that are integers, a tile at a time; nothing where the processor has no products for it.
#pragma once
#include "integer_keys.h"
#include "integer_values.h"

namespace kvq {

#if defined(KVQ_INTEGER)

class Integers {
 public:
  Integers(const AttentionArgs& a, int64_t b, int64_t h, int64_t rows)
      : key_(a.key), value_(a.value), b_(b), h_(h), rows_(rows), k_(codes_of(a.key)), v_(codes_of(a.value)) {}

  static int64_t size(const AttentionArgs& a, int64_t rows) {  // floats
    const Codes k = codes_of(a.key), v = codes_of(a.value);
    int64_t floats = kRun * std::max(k.blocks, v.blocks) * 16 + 64;
    if (k.planes) floats += Digits::size(k, rows + kMost) + Digits::room(k) + Spread::size(a.key, k);
    if (v.planes) floats += Weights::size() + Spread::size(a.value, v) + rows * v.blocks * v.planes * 64;
    return floats + 16 * 16;
  }

  // `memory` has room for size() floats; query[row][ld].
  void prepare(float* memory, const float* query, int64_t ld) {
    const auto take = [&](int64_t floats) {
      float* p = memory;
      memory += (floats + 15) / 16 * 16;
      return p;
    };
    copy_ = reinterpret_cast<uint8_t*>(take(kRun * std::max(k_.blocks, v_.blocks) * 16));
    if (k_.planes) {
      by_k_.place(key_, k_, take(Spread::size(key_, k_)));
      const int64_t parts = k_.planes == 1 ? 2 * k_.blocks : by_k_.halves == 2 ? 1 : 2;
      float* room = take(Digits::room(k_));
      for (int64_t r = 0; r < rows_; r += kMost) {
        const int64_t now = std::min<int64_t>(kMost, rows_ - r);
        digits_[r / kMost].fill(k_, query + r * ld, ld, key_.dim, now, parts, take(Digits::size(k_, now)), room);
      }
    }
    if (v_.planes) {
      by_v_.place(value_, v_, take(Spread::size(value_, v_)));
      weights_.digits = reinterpret_cast<uint8_t*>(take(Weights::size()));
      sums_ = take(rows_ * wide());
      std::fill(sums_, sums_ + rows_ * wide(), 0.0f);
    }
  }

  // Steps of `ahead` in the products with keys and with values of `tokens` tokens.
  int64_t key_steps(int64_t tokens) const { return k_.packs(tokens) * 2 * k_.blocks * ((rows_ + kMost - 1) / kMost); }
  int64_t value_steps(int64_t tokens) const { return v_.packs(tokens) * 2 * v_.blocks * v_.planes * ((rows_ + kMost - 1) / kMost); }

  // s[row][ld] of a tile, scales applied; false where its keys have to be decoded.
  bool scores(int64_t t0, int64_t n, const float* scale, float* s, int64_t ld, Ahead& ahead) {
    if (!copy_ || !k_.planes || !all_coded(key_, b_, t0, n)) return false;
    Rows found;
    find_rows(key_, k_, b_, h_, t0, n, copy_, found);
    if (k_.planes > 1) by_k_.fill(key_, k_, b_, h_, t0, n);
    for (int64_t r = 0; r < rows_; r += kMost) {
      const Digits& q = digits_[r / kMost];
      each_code(k_, q.rows, [&](auto code, auto count) {
        integer_scores<typename decltype(code)::type, decltype(count)::value>(
            k_, found, k_.packs(n), q, scale, by_k_, s + r * ld, ld, ahead);
      });
    }
    return true;
  }

  // Adds s[row][ld] times the values of a run of tokens to the sums; false where the values have to be decoded.
  bool values(int64_t t0, int64_t n, const float* scale, const float* s, int64_t lds, bool coarse, Ahead& ahead) {
    if (!copy_ || !v_.planes || !all_coded(value_, b_, t0, n)) return false;
    if (v_.planes > 1 ? !by_v_.fill(value_, v_, b_, h_, t0, n) : *std::min_element(scale, scale + n) < 0.0f) return false;
    Rows found;
    find_rows(value_, v_, b_, h_, t0, n, copy_, found);
    for (int64_t r = 0; r < rows_; r += kMost)
      each_code(v_, std::min<int64_t>(kMost, rows_ - r), [&](auto code, auto count) {
        using Code = typename decltype(code)::type;
        constexpr int R = decltype(count)::value;
        const float* p = s + r * lds;
        if (coarse) integer_values<Code, R, 1>(v_, found, v_.packs(n), p, lds, by_v_, weights_, sums_ + r * wide(), wide(), ahead);
        else integer_values<Code, R, 0>(v_, found, v_.packs(n), p, lds, by_v_, weights_, sums_ + r * wide(), wide(), ahead);
      });
    return true;
  }

  // Whether values() applies scales itself, so that they need not be in the weights.
  bool scales_values() const { return sums_ && v_.planes > 1; }
  float* sums() const { return sums_; }
  int64_t wide() const { return v_.blocks * v_.planes * 64; }
  void add_to(int64_t row, float* out) const { in_order(v_, value_.dim, sums_ + row * wide(), out); }

 private:
  template <class T>
  struct Type {
    using type = T;
  };

  template <class Use>
  static void each_code(const Codes& c, int64_t rows, const Use& use) {
    const auto with_rows = [&](auto code) {
      switch (rows) {
        case 1: return use(code, std::integral_constant<int, 1>{});
        case 2: return use(code, std::integral_constant<int, 2>{});
        case 3: return use(code, std::integral_constant<int, 3>{});
        default: return use(code, std::integral_constant<int, 4>{});
      }
    };
    if (c.planes == 1) with_rows(Type<Planes<1>>{});
    else if (c.planes == 2) with_rows(Type<Planes<2>>{});
    else with_rows(Type<Planes<4>>{});
  }

  const Side &key_, &value_;
  int64_t b_, h_, rows_;
  Codes k_, v_;
  Digits digits_[2];
  Spread by_k_, by_v_;
  Weights weights_;
  uint8_t* copy_ = nullptr;
  float* sums_ = nullptr;
};

#else

class Integers {
 public:
  Integers(const AttentionArgs&, int64_t, int64_t, int64_t) {}
  static int64_t size(const AttentionArgs&, int64_t) { return 0; }
  void prepare(float*, const float*, int64_t) {}
  int64_t key_steps(int64_t) const { return 0; }
  int64_t value_steps(int64_t) const { return 0; }
  bool scores(int64_t, int64_t, const float*, float*, int64_t, Ahead&) { return false; }
  bool values(int64_t, int64_t, const float*, const float*, int64_t, bool, Ahead&) { return false; }
  bool scales_values() const { return false; }
  float* sums() const { return nullptr; }
  int64_t wide() const { return 0; }
  void add_to(int64_t, float*) const {}
};

#endif

}  // namespace kvq
