// Products with int8 codes as they are, by the integer dot products of AVX-512 VNNI. Queries and weights become 24-bit integers, in three
// bytes, which is as exact as fp32; scales are applied to the sums.
#pragma once
#include "decode.h"

#if defined(KVQ_AVX512) && defined(__AVX512VNNI__)
#define KVQ_INTEGER 1

namespace kvq {

constexpr int kDigits = 3;

inline int64_t blocks_of(int64_t dim) { return (dim + 63) / 64; }  // of 64 channels

// A row of numbers as integers times `unit`, in three digits of base 256 between -128 and 127: out[digit][64 * blocks].
struct Digits {
  float unit;
  int32_t sum[kDigits];
};

// `x` may be read to the end of a vector; what is there beyond `dim` is zero.
inline Digits to_digits(const float* x, int64_t dim, int8_t* out) {
  const int64_t stride = blocks_of(dim) * 64;
  vf most{};
  vf nothing{};  // NaN once a number is not finite, which digits cannot say
  for (int64_t d = 0; d < dim; d += W) most = max(most, absolute(load(x + d))), nothing += load(x + d) * 0.0f;
  const float top = reduce_max(most);
  constexpr float kTop = 8290000.0f;  // below 127 * (2^16 + 2^8 + 1)
  const bool usable = top > 1e-30f && top < kInf;
  const vf scale = set1(usable ? kTop / top : 0.0f);
  std::memset(out, 0, kDigits * stride);
  __m512i sum[kDigits] = {};
  for (int64_t d = 0; d < dim; d += W) {
    __m512i q = _mm512_cvtps_epi32(load(x + d) * scale);
    for (int i = 0; i < kDigits; ++i) {
      const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * stride + d), _mm512_cvtepi32_epi8(digit));
      sum[i] = _mm512_add_epi32(sum[i], digit);
      q = _mm512_srai_epi32(_mm512_sub_epi32(q, digit), 8);
    }
  }
  Digits made{(usable ? top / kTop : 0.0f) + reduce_add(nothing), {}};
  for (int i = 0; i < kDigits; ++i) made.sum[i] = _mm512_reduce_add_epi32(sum[i]);
  return made;
}

// Rows of a tile, 64 bytes a block; a copy where they do not lie side by side, or with zeros where tokens or channels are missing.
struct Rows {
  const uint8_t* data;
  int64_t stride;
};

inline Rows whole_rows(const Side& s, int64_t b, int64_t h, int64_t t0, int64_t n, uint8_t* copy) {
  const int64_t bytes = blocks_of(s.dim) * 64;
  if (n == kTile && bytes == s.dim) {
    const Run run = run_of(s, b, t0, n);
    if (run.count == n) return {reinterpret_cast<const uint8_t*>(at(s.codes, run.row, h, run.slot)), s.codes.t};
  }
  each_run(s, b, t0, n, [&](const Run& run, int64_t i) {
    for (int64_t t = 0; t < run.count; ++t) {
      uint8_t* row = copy + (i + t) * bytes;
      std::memcpy(row, at(s.codes, run.row, h, run.slot + t), s.dim);
      std::memset(row + s.dim, 0, bytes - s.dim);
    }
  });
  std::memset(copy + n * bytes, 0, (kTile - n) * bytes);
  return {copy, bytes};
}

// Four channels of 64 tokens side by side, plus 128: out[channel / 4][token][4].
KVQ_KERNEL inline void turn_tile(const Rows& rows, int64_t dim, uint8_t* out, Ahead& ahead) {
  const __m512i flip = _mm512_set1_epi8(char(0x80));
  for (int64_t block = 0; block < blocks_of(dim); ++block)
    for (int64_t t0 = 0; t0 < kTile; t0 += 16) {
      __m512i a[16], b[16];
      for (int i = 0; i < 8; ++i) ahead.step();
      KVQ_UNROLL for (int i = 0; i < 16; ++i)
        a[i] = _mm512_xor_si512(_mm512_loadu_si512(rows.data + (t0 + i) * rows.stride + block * 64), flip);
      KVQ_UNROLL for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
      }
      KVQ_UNROLL for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
      }
      KVQ_UNROLL for (int j = 0; j < 4; ++j) {
        const __m512i p = _mm512_shuffle_i32x4(a[j], a[j + 4], 0x44), q = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0x44);
        const __m512i u = _mm512_shuffle_i32x4(a[j], a[j + 4], 0xee), v = _mm512_shuffle_i32x4(a[j + 8], a[j + 12], 0xee);
        b[j] = _mm512_shuffle_i32x4(p, q, 0x88), b[j + 4] = _mm512_shuffle_i32x4(p, q, 0xdd);
        b[j + 8] = _mm512_shuffle_i32x4(u, v, 0x88), b[j + 12] = _mm512_shuffle_i32x4(u, v, 0xdd);
      }
      KVQ_UNROLL for (int i = 0; i < 16; ++i)
        _mm512_store_si512(out + ((block * 16 + i) * kTile + t0) * 4, b[i]);
    }
}

inline __m512i spread4(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

// Four products of bytes, u unsigned and x signed, added to every sum. Written out, since compilers move what is in registers anyway.
inline void add_products(__m512i& sum, __m512i u, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u), "v"(x)); }

inline __m512 joined(const __m512i* digits) {
  __m512 x = _mm512_cvtepi32_ps(digits[0]);
  x = _mm512_fmadd_ps(_mm512_cvtepi32_ps(digits[1]), _mm512_set1_ps(256.0f), x);
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(digits[2]), _mm512_set1_ps(65536.0f), x);
}

// s[r][t] = unit[r] * sum_d q[r][d] k[t][d] * scale[t] over a turned tile.
template <int R>
KVQ_KERNEL void integer_scores(const uint8_t* turned, const int8_t* q, int64_t ldq, const Digits* digits, int64_t dim,
                               const float* scale, float* s, Ahead& ahead) {
  const int64_t stride = blocks_of(dim) * 64;
  const int64_t steps = (dim + 3) / 4;
  for (int64_t t0 = 0; t0 < kTile; t0 += 32) {
    __m512i sum[2][R][kDigits];
    KVQ_UNROLL for (int r = 0; r < R; ++r)
      KVQ_UNROLL for (int i = 0; i < kDigits; ++i)
        sum[0][r][i] = sum[1][r][i] = _mm512_set1_epi32(-128 * digits[r].sum[i]);
    const uint8_t* k = turned + t0 * 4;
    for (int64_t d = 0; d < steps; ++d, k += kTile * 4) {
      const __m512i k0 = _mm512_load_si512(k), k1 = _mm512_load_si512(k + 64);
      ahead.step();
      KVQ_UNROLL for (int r = 0; r < R; ++r)
        KVQ_UNROLL for (int i = 0; i < kDigits; ++i) {
          const __m512i x = spread4(q + r * ldq + i * stride + d * 4);
          add_products(sum[0][r][i], k0, x);
          add_products(sum[1][r][i], k1, x);
        }
    }
    KVQ_UNROLL for (int r = 0; r < R; ++r)
      KVQ_UNROLL for (int half = 0; half < 2; ++half) {
        const int64_t t = t0 + 16 * half;
        store(s + r * kTile + t, joined(sum[half][r]) * digits[r].unit * load(scale + t));
      }
  }
}

inline void integer_scores(int64_t rows, const uint8_t* turned, const int8_t* q, int64_t ldq, const Digits* digits,
                           int64_t dim, const float* scale, float* s, Ahead& ahead) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) integer_scores<4>(turned, q + r * ldq, ldq, digits + r, dim, scale, s + r * kTile, ahead);
  switch (rows - r) {
    case 3: integer_scores<3>(turned, q + r * ldq, ldq, digits + r, dim, scale, s + r * kTile, ahead); break;
    case 2: integer_scores<2>(turned, q + r * ldq, ldq, digits + r, dim, scale, s + r * kTile, ahead); break;
    case 1: integer_scores<1>(turned, q + r * ldq, ldq, digits + r, dim, scale, s + r * kTile, ahead); break;
  }
}

// Four tokens of a channel side by side: out[block][token / 4][4 vectors], channels of a block in the order of unpacking.
KVQ_KERNEL inline void braid_tile(const Rows& rows, int64_t dim, uint8_t* out, Ahead& ahead) {
  for (int64_t block = 0; block < blocks_of(dim); ++block)
    for (int64_t t = 0; t < kTile; t += 4, out += 256) {
      const uint8_t* p = rows.data + t * rows.stride + block * 64;
      ahead.step();
      ahead.step();
      const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + rows.stride);
      const __m512i c = _mm512_loadu_si512(p + 2 * rows.stride), d = _mm512_loadu_si512(p + 3 * rows.stride);
      const __m512i ab = _mm512_unpacklo_epi8(a, b), AB = _mm512_unpackhi_epi8(a, b);
      const __m512i cd = _mm512_unpacklo_epi8(c, d), CD = _mm512_unpackhi_epi8(c, d);
      _mm512_store_si512(out, _mm512_unpacklo_epi16(ab, cd));
      _mm512_store_si512(out + 64, _mm512_unpackhi_epi16(ab, cd));
      _mm512_store_si512(out + 128, _mm512_unpacklo_epi16(AB, CD));
      _mm512_store_si512(out + 192, _mm512_unpackhi_epi16(AB, CD));
    }
}

// Weights of a row as 24-bit integers times the result: out[token / 4][digit or nothing][4 tokens].
// A coarse row is rounded to its two upper digits.
inline float weight_digits(const float* p, bool coarse, uint8_t* out) {
  vf top = load(p);
  for (int64_t t = W; t < kTile; t += W) top = max(top, load(p + t));
  const float most = reduce_max(top);
  constexpr float kTop = 16777000.0f;  // below 2^24 after rounding
  const __m512 scale = _mm512_set1_ps(most > 1e-30f ? kTop / most : 0.0f);
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  for (int64_t t = 0; t < kTile; t += W) {
    __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(load(p + t), scale));
    if (coarse) q = _mm512_min_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(128)), _mm512_set1_epi32(0xffffff));
    _mm512_store_si512(out + t * 4, _mm512_shuffle_epi8(q, order));
  }
  return most > 1e-30f ? most / kTop : 0.0f;
}

// acc[r][d] += unit[r] * sum_t p[r][t] v[t][d] over a braided tile.
template <int R, int FIRST>
KVQ_KERNEL void integer_values(const uint8_t* braided, const uint8_t* p, const float* unit, int64_t dim, float* acc,
                               int64_t ld, Ahead& ahead) {
  for (int64_t block = 0; block < blocks_of(dim); ++block, braided += kTile * 64) {
    alignas(64) float part[R][4][16];
    for (int64_t half = 0; half < 4; half += 2) {
      __m512i sum[2][R][kDigits];
      KVQ_UNROLL for (int r = 0; r < R; ++r)
        KVQ_UNROLL for (int i = 0; i < kDigits; ++i) sum[0][r][i] = sum[1][r][i] = _mm512_setzero_si512();
      const uint8_t *v = braided + half * 64, *weights = p;
      for (int64_t t = 0; t < kTile / 4; ++t, v += 256, weights += 16) {
        const __m512i v0 = _mm512_load_si512(v), v1 = _mm512_load_si512(v + 64);
        ahead.step();
        KVQ_UNROLL for (int r = 0; r < R; ++r)
          KVQ_UNROLL for (int i = FIRST; i < kDigits; ++i) {
            const __m512i x = spread4(weights + r * kTile * 4 + i * 4);
            add_products(sum[0][r][i], x, v0);
            add_products(sum[1][r][i], x, v1);
          }
      }
      KVQ_UNROLL for (int r = 0; r < R; ++r)
        KVQ_UNROLL for (int j = 0; j < 2; ++j) store(part[r][half + j], joined(sum[j][r]));
    }
    KVQ_UNROLL for (int r = 0; r < R; ++r) {
      // Lane l of vector j holds channels 16 l + 4 j.
      const __m512 x0 = load(part[r][0]), x1 = load(part[r][1]), x2 = load(part[r][2]), x3 = load(part[r][3]);
      const __m512 y0 = _mm512_shuffle_f32x4(x0, x1, 0x44), y1 = _mm512_shuffle_f32x4(x2, x3, 0x44);
      const __m512 y2 = _mm512_shuffle_f32x4(x0, x1, 0xee), y3 = _mm512_shuffle_f32x4(x2, x3, 0xee);
      const __m512 z[4] = {_mm512_shuffle_f32x4(y0, y1, 0x88), _mm512_shuffle_f32x4(y0, y1, 0xdd),
                           _mm512_shuffle_f32x4(y2, y3, 0x88), _mm512_shuffle_f32x4(y2, y3, 0xdd)};
      float* out = acc + r * ld + block * 64;
      const vf u = set1(unit[r]);
      KVQ_UNROLL for (int j = 0; j < 4; ++j)
        if (block * 64 + j * W < ld) store(out + j * W, fma(z[j], u, load(out + j * W)));
    }
  }
}

inline void integer_values(int64_t rows, const uint8_t* braided, const float* s, uint8_t* digits, int64_t dim,
                           float* acc, int64_t ld, bool coarse, Ahead& ahead) {
  float unit[4];
  for (int64_t r = 0; r < rows; r += 4) {
    const int64_t now = std::min<int64_t>(4, rows - r);
    for (int64_t i = 0; i < now; ++i) unit[i] = weight_digits(s + (r + i) * kTile, coarse, digits + i * kTile * 4);
    switch (now) {
      case 4: if (coarse) integer_values<4, 1>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        else integer_values<4, 0>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        break;
      case 3: if (coarse) integer_values<3, 1>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        else integer_values<3, 0>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        break;
      case 2: if (coarse) integer_values<2, 1>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        else integer_values<2, 0>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        break;
      default: if (coarse) integer_values<1, 1>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        else integer_values<1, 0>(braided, digits, unit, dim, acc + r * ld, ld, ahead);
        break;
    }
  }
}

}  // namespace kvq
#endif
