// Vectors of W floats on whatever the compiler was told to use; the rest of the kernels is written in these.
#pragma once
#include <cstdint>
#include <cstring>

#include "numbers.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define KVQ_AVX512 1
#define KVQ_W 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KVQ_AVX2 1
#define KVQ_W 8
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define KVQ_NEON 1
#define KVQ_W 4
#include <arm_neon.h>
#else
#define KVQ_W 4
#endif
#if defined(KVQ_AVX512) || defined(KVQ_AVX2)
#include <immintrin.h>
#endif

// Arrays of vectors stay in registers only where every loop over them is unrolled, in a function of its own.
#if defined(__clang__)
#define KVQ_UNROLL _Pragma("clang loop unroll(full)")
#define KVQ_NO_UNROLL _Pragma("clang loop unroll(disable)")
#else
#define KVQ_UNROLL _Pragma("GCC unroll 16")
#define KVQ_NO_UNROLL _Pragma("GCC unroll 1")
#endif
#define KVQ_KERNEL __attribute__((noinline))

namespace kvq {

constexpr int W = KVQ_W;
typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef float vf_memory __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline vf load(const float* p) { return *reinterpret_cast<const vf_memory*>(p); }
inline void store(float* p, vf x) { *reinterpret_cast<vf_memory*>(p) = x; }
inline vf set1(float x) { return x - vf{}; }

// Where one is NaN, it is either of the two that comes out.
inline vf max(vf a, vf b) {
#if defined(KVQ_NEON)
  return (vf)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}

// a * b + c in one rounding where the processor has it. Nowhere else does the compiler contract: codes have to be the same everywhere.
inline vf fma(vf a, vf b, vf c) {
#if defined(KVQ_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(KVQ_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(KVQ_NEON)
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline float reduce_add(vf x) {
#if defined(KVQ_AVX512)
  return _mm512_reduce_add_ps(x);
#elif defined(KVQ_NEON)
  return vaddvq_f32((float32x4_t)x);
#else
  float s = 0;
  for (int i = 0; i < W; ++i) s += x[i];
  return s;
#endif
}

inline float reduce_max(vf x) {
#if defined(KVQ_AVX512)
  return _mm512_reduce_max_ps(x);
#elif defined(KVQ_NEON)
  return vmaxnmvq_f32((float32x4_t)x);
#else
  float s = x[0];
  for (int i = 1; i < W; ++i) s = x[i] > s ? x[i] : s;
  return s;
#endif
}

// The sums of four vectors.
inline void reduce_add4(vf a, vf b, vf c, vf d, float* out) {
#if defined(KVQ_AVX512)
  __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(KVQ_AVX2)
  __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#elif defined(KVQ_NEON)
  vst1q_f32(out, vpaddq_f32(vpaddq_f32((float32x4_t)a, (float32x4_t)b), vpaddq_f32((float32x4_t)c, (float32x4_t)d)));
#else
  out[0] = reduce_add(a), out[1] = reduce_add(b), out[2] = reduce_add(c), out[3] = reduce_add(d);
#endif
}

// exp(x) for x <= 0 within 2 units in the last place; exactly 0 from -87.3 down, -inf included. NaN stays.
inline vf exp_negative(vf x) {
  vf y = max(x, set1(-88.0f));
  vf shifted = fma(y, set1(1.44269504088896341f), set1(12582912.0f));
  vf n = shifted - 12582912.0f;
  y = fma(n, set1(-0.693359375f), y);
  y = fma(n, set1(2.12194440e-4f), y);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, y, set1(1.3981999507e-3f));
  p = fma(p, y, set1(8.3334519073e-3f));
  p = fma(p, y, set1(4.1665795894e-2f));
  p = fma(p, y, set1(1.6666665459e-1f));
  p = fma(p, y, set1(5.0000001201e-1f));
  p = fma(p, y * y, y) + 1.0f;
  vi bits = (vi)p + ((vi)shifted << 23);
  return x > -87.3f ? (vf)bits : x == x ? vf{} : x;
}

inline vf absolute(vf x) { return (vf)((vi)x & 0x7fffffff); }

// Within 2e-7, and relative to x where x is small.
inline vf tanh_(vf x) {
  vf m = absolute(x), z = x * x;
  vf e = exp_negative(m * -2.0f);
  vf large = (1.0f - e) / (1.0f + e);
  vf p = set1(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  vf small = p * z * m + m;
  vf y = m > 0.625f ? large : small;
  return (vf)((vi)y | ((vi)x & (int32_t)0x80000000));
}

// ------------------------------------------------------------------------------------- W numbers of another type

inline vf from_i8(const uint8_t* p) {
#if defined(KVQ_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(KVQ_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = float(int8_t(p[i]));
  return x;
#endif
}

inline vf from_u8(const uint8_t* p) {
#if defined(KVQ_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(KVQ_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = float(p[i]);
  return x;
#endif
}

inline vf from_half(const uint8_t* p) {
#if defined(KVQ_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(KVQ_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(KVQ_NEON)
  return (vf)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = load_number((const char*)p + 2 * i, F16);
  return x;
#endif
}

inline vf from_bfloat(const uint8_t* p) {
#if defined(KVQ_AVX512)
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#elif defined(KVQ_AVX2)
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
#elif defined(KVQ_NEON)
  return (vf)vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16);
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = load_number((const char*)p + 2 * i, BF16);
  return x;
#endif
}

// Through half precision, whose exponent is wider: shifted in place, an e4m3 number reads 2^8 too small there.
inline vf from_e4m3(const uint8_t* p) {
#if defined(KVQ_AVX512)
  __m256i c = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
  c = _mm256_and_si256(_mm256_slli_epi16(c, 7), _mm256_set1_epi16((short)0xbfff));
  return _mm512_mul_ps(_mm512_cvtph_ps(c), _mm512_set1_ps(256.0f));
#elif defined(KVQ_AVX2)
  __m128i c = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
  c = _mm_and_si128(_mm_slli_epi16(c, 7), _mm_set1_epi16((short)0xbfff));
  return _mm256_mul_ps(_mm256_cvtph_ps(c), _mm256_set1_ps(256.0f));
#elif defined(KVQ_NEON)
  uint32_t word;
  std::memcpy(&word, p, 4);
  const int16x4_t c = vget_low_s16(vshll_n_s8(vreinterpret_s8_u32(vdup_n_u32(word)), 7));
  return (vf)vcvt_f32_f16(vreinterpret_f16_s16(vand_s16(c, vdup_n_s16(int16_t(0xbfff))))) * 256.0f;
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = e4m3_to_float(p[i]);
  return x;
#endif
}

inline vf from_e5m2(const uint8_t* p) {
#if defined(KVQ_AVX512)
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)), 8));
#elif defined(KVQ_AVX2)
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p)), 8));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = e5m2_to_float(p[i]);
  return x;
#endif
}

// Powers of two: the exponent of a float, whose lowest stands for a number that has none.
inline vf from_e8m0(const uint8_t* p) {
#if defined(KVQ_NEON)
  uint32_t word;
  std::memcpy(&word, p, 4);
  const uint32x4_t c = vshlq_n_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(word))))), 23);
  return (vf)vmaxq_u32(c, vdupq_n_u32(0x00400000));
#else
  vf x;
  for (int i = 0; i < W; ++i) x[i] = e8m0_to_float(p[i]);
  return x;
#endif
}

// 4-bit codes of 64 channels, one a byte.
#if defined(KVQ_AVX512)
inline void nibbles64(const uint8_t* p, uint8_t* out) {
  const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p));
  const __m512i both = _mm512_or_si512(words, _mm512_slli_epi16(words, 4));
  _mm512_storeu_si512(out, _mm512_and_si512(both, _mm512_set1_epi8(15)));
}

inline vf from_index(const uint8_t* p, vf table) {
  return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), table);
}
#endif

// W packed codes of BITS bits looked up in a table of 16 entries.
template <int BITS>
inline vf from_table(const uint8_t* p, const float* table) {
#if defined(KVQ_AVX512)
  // Codes 0..7 sit in the first 32 bits; codes 8..15 in the last 32 bits of 2 * BITS bytes.
  uint32_t low, high;
  std::memcpy(&low, p, 4);
  std::memcpy(&high, p + 2 * BITS - 4, 4);
  constexpr int S = 8 * (4 - BITS);
  const __m512i shift = _mm512_setr_epi32(0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS, S,
                                          S + BITS, S + 2 * BITS, S + 3 * BITS, S + 4 * BITS, S + 5 * BITS,
                                          S + 6 * BITS, S + 7 * BITS);
  __m512i word = _mm512_mask_set1_epi32(_mm512_set1_epi32(int(low)), 0xff00, int(high));
  // The permutation reads the low four bits of an index only; a table of shorter codes is periodic.
  return _mm512_permutexvar_ps(_mm512_srlv_epi32(word, shift), _mm512_loadu_ps(table));
#elif defined(KVQ_AVX2)
  uint32_t word = 0;
  std::memcpy(&word, p, BITS);
  const __m256i shift =
      _mm256_setr_epi32(0, BITS, 2 * BITS, 3 * BITS, 4 * BITS, 5 * BITS, 6 * BITS, 7 * BITS);
  __m256i index = _mm256_srlv_epi32(_mm256_set1_epi32(int(word)), shift);
  __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), index);
  if (BITS < 4) return low;
  __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
#else
  vf x;
  uint32_t word = 0;
  std::memcpy(&word, p, (W * BITS + 7) / 8);
  for (int i = 0; i < W; ++i) x[i] = table[word >> (BITS * i) & ((1 << BITS) - 1)];
  return x;
#endif
}

}  // namespace kvq
