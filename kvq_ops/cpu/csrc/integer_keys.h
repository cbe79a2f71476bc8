// Scores of a few query rows with keys whose codes are integers, see integer.h.
#pragma once
#include "ahead.h"
#include "integer.h"

#if defined(KVQ_INTEGER)
namespace kvq {

// Query rows as digits, in the order in which key codes come. A flush is what is summed up before a scale applies: all blocks, one, or
// a half of one.
struct Digits {
  int8_t* query = nullptr;   // [block][half][j][plane][row][digit][64]
  int32_t* start = nullptr;  // [flush][row][digit][16]: what the bias of the codes adds to a sum, taken off beforehand
  float* sums = nullptr;     // [flush][row][16]: the sums of the channels
  float unit[kMost];
  int64_t rows = 0, span = 0, flushes = 0;

  static int64_t size(const Codes& c, int64_t rows) {  // floats
    return c.blocks * rows * 2 * (2 * c.planes * kDigits + kDigits + 1) * 16 + 64;
  }
  static int64_t room(const Codes& c) { return c.blocks * c.planes * 64 * 2 + 64; }

  // q[row][ld], for flushes of `parts` halves of blocks; `room` is free afterwards.
  void fill(const Codes& c, const float* q, int64_t ld, int64_t dim, int64_t count, int64_t parts, float* memory, float* room) {
    rows = count, span = parts, flushes = c.blocks * 2 / span;
    query = reinterpret_cast<int8_t*>(memory), memory += c.blocks * 4 * c.planes * rows * kDigits * 16;
    start = reinterpret_cast<int32_t*>(memory), memory += flushes * rows * kDigits * 16;
    sums = memory;
    const int64_t bytes = c.blocks * 64, all = bytes * c.planes;
    int8_t* digits = reinterpret_cast<int8_t*>(room + all);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t plane = 0; plane < c.planes; ++plane)
        for (int64_t i = 0; i < bytes; ++i) {
          const int64_t channel = c.byte(i) * c.planes + plane;
          room[plane * bytes + i] = channel < dim ? q[r * ld + channel] : 0.0f;
        }
      unit[r] = to_digits(room, all, digits);
      __m512i ones[kDigits], bias[kDigits];
      for (int64_t part = 0; part < c.blocks * 2; ++part) {
        if (part % span == 0)
          for (int i = 0; i < kDigits; ++i) ones[i] = bias[i] = _mm512_setzero_si512();
        for (int64_t v = 0; v < 2 * c.planes; ++v)
          for (int64_t i = 0; i < kDigits; ++i) {
            const __m512i row = _mm512_loadu_si512(digits + i * all + v % c.planes * bytes + part / 2 * 64);
            const int64_t j = part % 2 * 2 + v / c.planes;
            const __m512i x = _mm512_permutexvar_epi32(
                _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12), _mm512_set1_epi32(int(j))), row);
            _mm512_store_si512(query + (((part * 2 * c.planes + v) * rows + r) * kDigits + i) * 64, x);
            add_products(ones[i], _mm512_set1_epi8(1), x);
            add_products(bias[i], _mm512_set1_epi8(char(c.bias)), x);
          }
        if (part % span != span - 1) continue;
        const int64_t at = part / span * rows + r;
        for (int64_t i = 0; i < kDigits; ++i)
          _mm512_store_si512(start + (at * kDigits + i) * 16, _mm512_sub_epi32(_mm512_setzero_si512(), bias[i]));
        store(sums + at * 16, joined(ones));
      }
    }
  }
};

// Sums over lanes of two vectors for each of two rows: [row][4 tokens of u = 0, 4 of u = 1].
inline __m512 over_lanes(__m512 a0, __m512 a1, __m512 b0, __m512 b1) {
  const __m512 a = _mm512_add_ps(_mm512_shuffle_f32x4(a0, a1, 0x44), _mm512_shuffle_f32x4(a0, a1, 0xee));
  const __m512 b = _mm512_add_ps(_mm512_shuffle_f32x4(b0, b1, 0x44), _mm512_shuffle_f32x4(b0, b1, 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Of a quad of folded rows, the sums over the lanes of each token, in the order of tokens: 4 times as many as a row has tokens.
struct Unfold {
  __m512i order{};
  int64_t fold = 1;
  void fill(const Codes& c) {
    fold = c.fold;
    alignas(64) int32_t index[16];
    for (int64_t lane = 0; lane < 4; ++lane)
      for (int64_t i = 0; i < 4; ++i) index[c.token(lane, i)] = int32_t(4 * lane + i);
    order = _mm512_load_si512(index);
  }
  void put(__m512 x, float unit, float* s) const {
    if (fold == 2) x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
    x = _mm512_mul_ps(_mm512_permutexvar_ps(order, x), _mm512_set1_ps(unit));
    if (fold == 2) _mm256_storeu_ps(s, _mm512_castps512_ps256(x));
    else store(s, x);
  }
};

// s[r][t] = unit[r] * sum_d q[r][d] k[t][d], times the scale of the token; or, with groups, over what scales and minima make of k.
template <class Code, int R>
KVQ_KERNEL void integer_scores(const Codes& c, const Rows& rows, int64_t packs, const Digits& q, const float* scale,
                               const Spread& spread, float* s, int64_t lds, Ahead& ahead) {
  constexpr bool GROUPS = Code::GROUPS;
  const Code code(c);
  Unfold unfold;
  if (GROUPS) unfold.fill(c);
  for (int64_t pack = 0; pack < packs; ++pack) {
    const uint8_t* base = rows.packs[pack];
    const int64_t stride = rows.strides[pack];
    const int8_t* x = q.query;
    alignas(64) float total[R][2][16];
    for (int64_t flush = 0, part = 0; flush < q.flushes; ++flush) {
      __m512i sum[2][R][kDigits];
      KVQ_UNROLL for (int r = 0; r < R; ++r)
        KVQ_UNROLL for (int i = 0; i < kDigits; ++i)
          sum[0][r][i] = sum[1][r][i] = _mm512_load_si512(q.start + ((flush * R + r) * kDigits + i) * 16);
      for (const int64_t end = part + q.span; part < end; ++part) {
        __m512i v[2][2];
        ahead.step(ahead.keys);
        KVQ_UNROLL for (int u = 0; u < 2; ++u) {
          const uint8_t* p = base + u * kQuad * stride + part / 2 * 64;
          const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + stride);
          const __m512i e = _mm512_loadu_si512(p + 2 * stride), f = _mm512_loadu_si512(p + 3 * stride);
          const bool high = part % 2;
          const __m512i ab = high ? _mm512_unpackhi_epi32(a, b) : _mm512_unpacklo_epi32(a, b);
          const __m512i ef = high ? _mm512_unpackhi_epi32(e, f) : _mm512_unpacklo_epi32(e, f);
          v[u][0] = _mm512_unpacklo_epi64(ab, ef);
          v[u][1] = _mm512_unpackhi_epi64(ab, ef);
        }
        KVQ_UNROLL for (int j = 0; j < 2; ++j)
          each_plane<Code::P>([&](auto plane) __attribute__((always_inline)) {
            const __m512i k0 = code.template key<decltype(plane)::value>(v[0][j]);
            const __m512i k1 = code.template key<decltype(plane)::value>(v[1][j]);
            KVQ_UNROLL for (int r = 0; r < R; ++r)
              KVQ_UNROLL for (int i = 0; i < kDigits; ++i, x += 64) {
                const __m512i y = _mm512_load_si512(x);
                add_products(sum[0][r][i], k0, y);
                add_products(sum[1][r][i], k1, y);
              }
          });
      }
      if constexpr (GROUPS) {
        const float* by = spread.scale_at(flush) + pack * 32;
        const float* low = spread.minimum_at(flush) + pack * 32;
        KVQ_UNROLL for (int r = 0; r < R; ++r)
          KVQ_UNROLL for (int u = 0; u < 2; ++u) {
            vf y = flush ? load(total[r][u]) : vf{};
            y = fma(joined(sum[u][r]), load(by + u * 16), y);
            if (spread.low) y = fma(load(q.sums + (flush * R + r) * 16), load(low + u * 16), y);
            store(total[r][u], y);
          }
      } else {
        KVQ_UNROLL for (int r = 0; r < R; ++r)
          KVQ_UNROLL for (int u = 0; u < 2; ++u) store(total[r][u], joined(sum[u][r]));
      }
    }
    if (GROUPS && unfold.fold > 1) {
      KVQ_UNROLL for (int r = 0; r < R; ++r)
        KVQ_UNROLL for (int u = 0; u < 2; ++u) unfold.put(load(total[r][u]), q.unit[r], s + r * lds + (pack * 2 + u) * kQuad * unfold.fold);
      continue;
    }
    KVQ_UNROLL for (int r = 0; r < R; r += 2) {
      constexpr int last = R - 1;
      const int o = r < last ? r + 1 : r;
      __m512 y = over_lanes(load(total[r][0]), load(total[r][1]), load(total[o][0]), load(total[o][1]));
      if (!GROUPS) y = _mm512_mul_ps(y, _mm512_broadcast_f32x8(_mm256_loadu_ps(scale + pack * kPack)));
      const __m256 low = _mm256_mul_ps(_mm512_castps512_ps256(y), _mm256_set1_ps(q.unit[r]));
      const __m256 high = _mm256_mul_ps(_mm512_extractf32x8_ps(y, 1), _mm256_set1_ps(q.unit[o]));
      _mm256_storeu_ps(s + r * lds + pack * kPack, low);
      _mm256_storeu_ps(s + o * lds + pack * kPack, high);
    }
  }
}

}  // namespace kvq
#endif
