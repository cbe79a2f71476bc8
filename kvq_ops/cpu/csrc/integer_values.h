// Weighted sums, for a few query rows, of values whose codes are integers, see integer.h.
#pragma once
#include "ahead.h"
#include "integer.h"

#if defined(KVQ_INTEGER)
namespace kvq {

// Weights of R rows as 24-bit integers, of which a coarse tile keeps the two upper digits. Without groups a vector of a quad holds the
// digits of its tokens, [quad][row][4 digits][4 tokens]; with groups every digit has a vector, [quad][row][digit][lane][4 times 4
// tokens], because lanes have scales of their own.
struct Weights {
  uint8_t* digits = nullptr;
  float unit[kMost];

  static int64_t size() { return kRun / kQuad * kMost * kDigits * 16; }  // floats
};

constexpr float kTopWeight = 16777000.0f;  // below 2^24 after rounding

inline __m512i weight_integers(__m512 x, __m512 scale, bool coarse) {
  const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(x, scale));
  return coarse ? _mm512_min_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), _mm512_set1_epi32(0xffffff)) : q;
}

// p[r][lds], the scales of tokens in them.
template <int R>
KVQ_KERNEL void plain_weights(const float* p, int64_t lds, int64_t packs, bool coarse, Weights& w) {
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  KVQ_UNROLL for (int r = 0; r < R; ++r, p += lds) {
    vf top = load(p);
    for (int64_t t = W; t < packs * kPack; t += W) top = max(top, load(p + t));
    const float most = reduce_max(top);
    w.unit[r] = most > 1e-30f ? most / kTopWeight : 0.0f;
    const __m512 scale = _mm512_set1_ps(most > 1e-30f ? kTopWeight / most : 0.0f);
    for (int64_t t = 0; t < packs * kPack; t += W) {
      const __m512i q = _mm512_shuffle_epi8(weight_integers(load(p + t), scale, coarse), order);
      uint8_t* out = w.digits + (t / kQuad * R + r) * 16;
      _mm_store_si128(reinterpret_cast<__m128i*>(out), _mm512_castsi512_si128(q));
      _mm_store_si128(reinterpret_cast<__m128i*>(out + R * 16), _mm512_extracti32x4_epi32(q, 1));
      _mm_store_si128(reinterpret_cast<__m128i*>(out + R * 32), _mm512_extracti32x4_epi32(q, 2));
      _mm_store_si128(reinterpret_cast<__m128i*>(out + R * 48), _mm512_extracti32x4_epi32(q, 3));
    }
  }
}

// Weights of the tokens of a quad of rows, in the lanes that hold those tokens.
struct Quads {
  __m512i order{};
  int64_t tokens = kQuad;
  void fill(const Codes& c) {
    tokens = kQuad * c.fold;
    alignas(64) int32_t index[16];
    for (int64_t i = 0; i < 16; ++i) index[i] = int32_t(c.token(i / 4, i % 4));
    order = _mm512_load_si512(index);
  }
  __m512 load(const float* p, int64_t quad) const {
    if (tokens == kQuad) return _mm512_broadcast_f32x4(_mm_loadu_ps(p + quad * kQuad));
    return _mm512_permutexvar_ps(order, _mm512_maskz_loadu_ps(__mmask16((1 << tokens) - 1), p + quad * tokens));
  }
};

// p[r][lds] times the scales of one flush.
template <int R>
KVQ_KERNEL void group_weights(const Quads& quads, const float* p, int64_t lds, int64_t packs, bool coarse, const float* by, Weights& w) {
  const __m512i order[kDigits] = {_mm512_set1_epi32(0x0c080400), _mm512_set1_epi32(0x0d090501), _mm512_set1_epi32(0x0e0a0602)};
  KVQ_UNROLL for (int r = 0; r < R; ++r, p += lds) {
    vf top{};
    for (int64_t i = 0; i < packs * 2; ++i) top = max(top, _mm512_mul_ps(quads.load(p, i), load(by + i * 16)));
    const float most = reduce_max(top);
    w.unit[r] = most > 1e-30f ? most / kTopWeight : 0.0f;
    const __m512 scale = _mm512_set1_ps(most > 1e-30f ? kTopWeight / most : 0.0f);
    for (int64_t i = 0; i < packs * 2; ++i) {
      const __m512i q = weight_integers(_mm512_mul_ps(quads.load(p, i), load(by + i * 16)), scale, coarse);
      uint8_t* out = w.digits + (i * R + r) * kDigits * 64;
      KVQ_UNROLL for (int d = 0; d < kDigits; ++d) _mm512_store_si512(out + d * 64, _mm512_shuffle_epi8(q, order[d]));
    }
  }
}

// acc[r][2 vectors] += unit[r] * sum_t p[r][t] v[t] for planes `plane` and the next of one j, or for j and the next where a byte holds one
// code.
template <class Code, int R, int FIRST, int J>
KVQ_KERNEL void integer_pass(const Codes& c, const Rows& rows, int64_t packs, int64_t block, int plane, const Weights& w, float* acc,
                             int64_t ld, Ahead& ahead) {
  constexpr bool GROUPS = Code::GROUPS;
  const Code code(c);
  __m512i sum[2][R][kDigits];
  KVQ_UNROLL for (int r = 0; r < R; ++r)
    KVQ_UNROLL for (int i = 0; i < kDigits; ++i) sum[0][r][i] = sum[1][r][i] = _mm512_setzero_si512();
  const uint8_t* weights = w.digits;
  for (int64_t pack = 0; pack < packs; ++pack) {
    const int64_t stride = rows.strides[pack];
    const uint8_t* p = rows.packs[pack] + block * 64;
    ahead.step(ahead.values);
    KVQ_NO_UNROLL for (int u = 0; u < 2; ++u, p += kQuad * stride) {
      const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + stride);
      const __m512i e = _mm512_loadu_si512(p + 2 * stride), f = _mm512_loadu_si512(p + 3 * stride);
      const __m512i ab = J < 2 ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
      const __m512i ef = J < 2 ? _mm512_unpacklo_epi8(e, f) : _mm512_unpackhi_epi8(e, f);
      __m512i v0, v1;
      if constexpr (Code::P == 1) {
        v0 = _mm512_unpacklo_epi16(ab, ef), v1 = _mm512_unpackhi_epi16(ab, ef);
      } else {
        __m512i x = J % 2 ? _mm512_unpackhi_epi16(ab, ef) : _mm512_unpacklo_epi16(ab, ef);
        if (Code::P == 4) x = _mm512_srl_epi16(x, _mm_cvtsi32_si128(2 * plane));
        v0 = code.template value<0>(x), v1 = code.template value<1>(x);
      }
      KVQ_UNROLL for (int r = 0; r < R; ++r) {
        KVQ_UNROLL for (int i = FIRST; i < kDigits; ++i) {
          const __m512i x = GROUPS ? _mm512_load_si512(weights + i * 64) : spread4(weights + i * 4);
          add_products(sum[0][r][i], x, v0);
          add_products(sum[1][r][i], x, v1);
        }
        weights += GROUPS ? kDigits * 64 : 16;
      }
    }
  }
  KVQ_UNROLL for (int r = 0; r < R; ++r) {
    const vf u = set1(w.unit[r]);
    KVQ_UNROLL for (int v = 0; v < 2; ++v)
      store(acc + r * ld + v * 16, fma(joined(sum[v][r]), u, load(acc + r * ld + v * 16)));
  }
}

// The minima of one flush, which every channel of a lane has: sum_t p[r][t] minimum[t].
template <int R>
KVQ_KERNEL void group_minima(const Quads& quads, const float* p, int64_t lds, int64_t packs, const float* low, int64_t vectors, float* acc,
                             int64_t ld) {
  vf sum[R];
  KVQ_UNROLL for (int r = 0; r < R; ++r) sum[r] = vf{};
  for (int64_t i = 0; i < packs * 2; ++i)
    KVQ_UNROLL for (int r = 0; r < R; ++r) sum[r] = fma(quads.load(p + r * lds, i), load(low + i * 16), sum[r]);
  KVQ_UNROLL for (int r = 0; r < R; ++r) {
    sum[r] = _mm512_add_ps(sum[r], _mm512_permute_ps(sum[r], 0xb1));
    sum[r] = _mm512_add_ps(sum[r], _mm512_permute_ps(sum[r], 0x4e));
    for (int64_t v = 0; v < vectors; ++v) store(acc + r * ld + v * 16, load(acc + r * ld + v * 16) + sum[r]);
  }
}

template <class Code, int R, int FIRST, int HALF>
inline void half_passes(const Codes& c, const Rows& rows, int64_t packs, int64_t block, const Weights& w, float* acc, int64_t ld,
                        Ahead& ahead) {
  for (int plane = 0; plane < Code::P; plane += 2, acc += 32) {
    integer_pass<Code, R, FIRST, 2 * HALF>(c, rows, packs, block, plane, w, acc, ld, ahead);
    if constexpr (Code::P > 1)
      integer_pass<Code, R, FIRST, 2 * HALF + 1>(c, rows, packs, block, plane, w, acc + Code::P * 16, ld, ahead);
  }
}

// acc[r][block][j][plane][16] += sum_t p[r][t] v[t] over a run of tokens.
template <class Code, int R, int FIRST>
void integer_values(const Codes& c, const Rows& rows, int64_t packs, const float* p, int64_t lds, const Spread& spread, Weights& w, float* acc,
                    int64_t ld, Ahead& ahead) {
  constexpr int P = Code::P;
  Quads quads;
  if (Code::GROUPS) quads.fill(c);
  else plain_weights<R>(p, lds, packs, FIRST > 0, w);
  for (int64_t block = 0; block < c.blocks; ++block)
    for (int half = 0; half < 2; ++half, acc += 2 * P * 16) {
      if constexpr (Code::GROUPS) {
        const int64_t flush = block * spread.halves + (spread.halves == 2 ? half : 0);
        if (half < spread.halves) group_weights<R>(quads, p, lds, packs, FIRST > 0, spread.scale_at(flush), w);
        if (spread.low) group_minima<R>(quads, p, lds, packs, spread.minimum_at(flush), 2 * P, acc, ld);
      }
      if (half) half_passes<Code, R, FIRST, 1>(c, rows, packs, block, w, acc, ld, ahead);
      else half_passes<Code, R, FIRST, 0>(c, rows, packs, block, w, acc, ld, ahead);
    }
}

// Adds acc[block][j][plane][lane][4] to out[channel].
inline void in_order(const Codes& c, int64_t dim, const float* acc, float* out) {
  for (int64_t block = 0; block < c.blocks; ++block)
    for (int64_t j = 0; j < 4; ++j)
      for (int64_t plane = 0; plane < c.planes; ++plane)
        for (int64_t lane = 0; lane < 4; ++lane)
          for (int64_t i = 0; i < 4; ++i, ++acc) {
            const int64_t channel = c.planes * c.byte(64 * block + 16 * lane + 4 * j + i) + plane;
            if (channel < dim) out[channel] += *acc;
          }
}

}  // namespace kvq
#endif
