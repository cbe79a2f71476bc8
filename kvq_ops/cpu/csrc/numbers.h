// Scalar conversions between number types; every rounding is to nearest, ties to even.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "params.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvq {

inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();

inline float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#elif defined(__aarch64__)
  __fp16 x;
  std::memcpy(&x, &h, 2);
  return x;
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
  float x = float_of(magnitude << 13) * 0x1p112f;  // exact, subnormal numbers included
  return float_of(bits_of(x) | sign);
#endif
}

inline uint16_t float_to_half(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#elif defined(__aarch64__)
  const __fp16 y = __fp16(x);
  uint16_t h;
  std::memcpy(&h, &y, 2);
  return h;
#else
  uint32_t u = bits_of(x), sign = u >> 16 & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (u >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (u < 0x38800000) return uint16_t(sign | (bits_of(float_of(u) + 0.5f) - bits_of(0.5f)));
  u += 0xfff + (u >> 13 & 1);
  return uint16_t(sign | (u - 0x38000000) >> 13);
#endif
}

inline float bfloat_to_float(uint16_t h) { return float_of(uint32_t(h) << 16); }

inline uint16_t float_to_bfloat(float x) {
  uint32_t u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// For |x| <= 448, or <= 57344: no overflow is possible.
inline uint8_t float_to_e4m3(float x) {
  uint32_t u = bits_of(x), sign = u >> 24 & 0x80;
  u &= 0x7fffffff;
  if (u < 0x3c800000) return uint8_t(sign | (bits_of(float_of(u) + 0x1p14f) - bits_of(0x1p14f)));  // below 2^-6
  u += 0x7ffff + (u >> 20 & 1);
  return uint8_t(sign | (u - 0x3c000000) >> 20);
}

inline uint8_t float_to_e5m2(float x) {
  uint32_t u = bits_of(x), sign = u >> 24 & 0x80;
  u &= 0x7fffffff;
  if (u < 0x38800000) return uint8_t(sign | (bits_of(float_of(u) + 0x1p7f) - bits_of(0x1p7f)));  // below 2^-14
  u += 0xfffff + (u >> 21 & 1);
  return uint8_t(sign | (u - 0x38000000) >> 21);
}

inline float e5m2_to_float(uint8_t c) { return half_to_float(uint16_t(c << 8)); }

inline float e4m3_to_float(uint8_t c) {
  if ((c & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  return half_to_float(uint16_t((c & 0x80) << 8 | (c & 0x7f) << 7)) * 256.0f;
}

inline float e8m0_to_float(uint8_t c) { return c ? float_of(uint32_t(c) << 23) : 0x1p-127f; }

// Nearest e2m1 code; a tie goes to the even code, and everything beyond 5 is 6.
inline uint8_t float_to_e2m1(float x) {
  float m = std::fabs(x);
  int code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  return uint8_t(code | (bits_of(x) >> 28 & 8));
}

inline float load_number(const char* p, int64_t dtype) {
  switch (dtype) {
    case F32: { float x; std::memcpy(&x, p, 4); return x; }
    case F64: { double x; std::memcpy(&x, p, 8); return float(x); }
    case F16: { uint16_t x; std::memcpy(&x, p, 2); return half_to_float(x); }
    case BF16: { uint16_t x; std::memcpy(&x, p, 2); return bfloat_to_float(x); }
    case E4M3: return e4m3_to_float(uint8_t(*p));
    case E5M2: return e5m2_to_float(uint8_t(*p));
    case E8M0: return e8m0_to_float(uint8_t(*p));
    case I8: return float(int8_t(*p));
    default: return float(uint8_t(*p));
  }
}

inline void store_number(char* p, int64_t dtype, float x) {
  switch (dtype) {
    case F32: std::memcpy(p, &x, 4); break;
    case F64: { double y = x; std::memcpy(p, &y, 8); break; }
    case F16: { uint16_t y = float_to_half(x); std::memcpy(p, &y, 2); break; }
    case BF16: { uint16_t y = float_to_bfloat(x); std::memcpy(p, &y, 2); break; }
    default: *p = char(uint8_t(x)); break;
  }
}

inline float largest_number(int64_t dtype) {
  return dtype == F16 ? 65504.0f : dtype == BF16 ? float_of(0x7f7f0000) : kMax;
}

// NaN reads as zero, an infinity as the largest number of the dtype.
inline float finite_number(float x, int64_t dtype) {
  if (x != x) return 0.0f;
  float top = largest_number(dtype);
  return x > top ? top : x < -top ? -top : x;
}

// The integer `i` elements into a plane of 32 or 64 bits.
inline int64_t load_integer(const Plane& p, int64_t i) {
  return p.dtype == I32 ? reinterpret_cast<const int32_t*>(p.data)[i] : reinterpret_cast<const int64_t*>(p.data)[i];
}

inline int64_t load_index(const Plane& p, int64_t i) { return load_integer(p, i * p.b); }

inline float load_static(const Plane& p, int64_t h, int64_t d) {
  return load_number(p.data + (h * p.h + d * p.d) * item_size(p.dtype), p.dtype);
}

// Butterflies in a fixed order, neighbours first, and the factor last, so that every backend rounds alike.
inline void hadamard(float* x, int64_t channels) {
  int64_t n = channels & -channels;
  float factor = float(std::pow(double(n), -0.5));
  for (int64_t block = 0; block < channels; block += n) {
    float* y = x + block;
    for (int64_t half = 1; half < n; half *= 2)
      for (int64_t i = 0; i < n; i += 2 * half)
        for (int64_t j = i; j < i + half; ++j) {
          float low = y[j], high = y[j + half];
          y[j] = low + high;
          y[j + half] = low - high;
        }
    for (int64_t i = 0; i < n; ++i) y[i] *= factor;
  }
}

// -1 or 1 for a channel: the top bit of a hash of its number, see kvq_ops/codecs/rotation.py.
inline float sign_of(int64_t channel) {
  uint32_t h = uint32_t(channel + 1) * 0x9E3779B9u;
  h = (h ^ h >> 16) * 0x85EBCA6Bu;
  h = (h ^ h >> 13) * 0xC2B2AE35u;
  return h >> 31 ? -1.0f : 1.0f;
}

inline void flip_signs(float* x, int64_t dim) {
  for (int64_t d = 0; d < dim; ++d) x[d] *= sign_of(d);
}

// Into the space in which vectors are coded, and back.
inline void rotate(float* x, int64_t dim, int64_t kind) {
  if (kind == 2) flip_signs(x, dim);
  if (kind) hadamard(x, dim);
}

inline void unrotate(float* x, int64_t dim, int64_t kind) {
  if (kind) hadamard(x, dim);
  if (kind == 2) flip_signs(x, dim);
}

}  // namespace kvq
