// Numbers to codes: the rules of kvq_ops/codecs, operation by operation, so that every byte is the same.
#pragma once
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "decode.h"

namespace kvq {

constexpr float kSmallest = 1e-8f;                       // a smaller largest magnitude counts as this
constexpr float kLargest = kMax * (0.5f - 0.00390625f);  // keeps max - min finite
constexpr int64_t kMaxGroup = 1024;

inline float largest_code(const Side& s) {
  return s.code == FLOAT_E4M3 ? 448.0f : s.code == FLOAT_E5M2 ? 57344.0f : float((1 << (s.bits - 1)) - 1);
}

inline bool finite(uint32_t u) { return (u & 0x7f800000) != 0x7f800000; }

// The largest finite magnitude; magnitudes order as their bits do.
inline float finite_amax(const float* x, int64_t n) {
  uint32_t top = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t u = bits_of(x[i]);
    u = finite(u) ? u & 0x7fffffff : 0;
    top = u > top ? u : top;
  }
  return float_of(top);
}

inline float nan_to_zero(float x) { return x != x ? 0.0f : x; }

// What a group of numbers shares; `byte` where it is not a float.
struct Shared {
  float scale = 0, minimum = 0;
  uint8_t byte = 0;
};

inline float round_parameter(float x, int64_t dtype) {
  return dtype == F16 ? half_to_float(float_to_half(x)) : dtype == BF16 ? bfloat_to_float(float_to_bfloat(x)) : x;
}

// Steps of a scale within [low, high], as stored: modulo 2^bits.
inline void steps(const Side& s, const float* x, int64_t n, float scale, float low, float high, uint8_t* codes) {
  if (scale == 0.0f) {
    std::memset(codes, 0, n);
    return;
  }
  const int32_t keep = (1 << s.bits) - 1;
  for (int64_t i = 0; i < n; ++i) {
    float q = std::nearbyint(nan_to_zero(x[i]) / scale);
    q = q > high ? high : q < low ? low : q;
    codes[i] = uint8_t(int32_t(q) & keep);
  }
}

inline void symmetric(const Side& s, const float* x, int64_t n, float fixed, Shared& p, uint8_t* codes) {
  const float largest = largest_code(s);
  p.scale = fixed;
  if (!s.static_scale) {
    p.scale = std::max(finite_amax(x, n), kSmallest) / largest;
    p.scale = round_parameter(std::min(p.scale, largest_number(s.scale.dtype)), s.scale.dtype);
  }
  steps(s, x, n, p.scale, -largest, largest, codes);
}

inline void asymmetric(const Side& s, const float* x, int64_t n, Shared& p, uint8_t* codes) {
  const float top = float((1 << s.bits) - 1), largest = largest_number(s.scale.dtype);
  float values[kMaxGroup], low = kInf, high = -kInf;
  for (int64_t i = 0; i < n; ++i) {
    const bool ok = finite(bits_of(x[i]));
    const float v = std::min(std::max(nan_to_zero(x[i]), -kLargest), kLargest);
    values[i] = v;
    low = ok && v < low ? v : low;
    high = ok && v > high ? v : high;
  }
  if (high < low) low = high = 0.0f;  // nothing finite has no range
  p.scale = round_parameter(std::min((high - low) / top, largest), s.scale.dtype);
  p.minimum = round_parameter(std::min(std::max(low, -largest), largest) + 0.0f, s.minimum.dtype);  // no -0.0
  if (p.scale == 0.0f) {
    std::memset(codes, 0, n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    float q = std::nearbyint((values[i] - p.minimum) / p.scale);
    q = q > top ? top : q < 0.0f ? 0.0f : q;
    codes[i] = uint8_t(int32_t(q));
  }
}

template <class Cast>
inline void float8(const float* x, int64_t n, float scale, float largest, uint8_t* codes, Cast cast) {
  if (scale == 0.0f) {
    std::memset(codes, 0, n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    float v = nan_to_zero(x[i]) / scale;
    codes[i] = cast(v > largest ? largest : v < -largest ? -largest : v);
  }
}

inline void float8(const Side& s, const float* x, int64_t n, float scale, uint8_t* codes) {
  if (s.code == FLOAT_E4M3) float8(x, n, scale, 448.0f, codes, float_to_e4m3);
  else float8(x, n, scale, 57344.0f, codes, float_to_e5m2);
}

inline void e2m1(const float* x, int64_t n, float scale, uint8_t* codes) {
  if (scale == 0.0f) {
    std::memset(codes, 0, n);
    return;
  }
  for (int64_t i = 0; i < n; ++i) codes[i] = float_to_e2m1(nan_to_zero(x[i]) / scale);
}

inline void nvfp4(const float* x, int64_t n, float g, Shared& p, uint8_t* codes) {
  const float six = 6.0f * g;
  const float amax = finite_amax(x, n);
  float ratio = std::min(six != 0.0f ? amax / six : 0.0f, 448.0f);
  // A block that would be erased takes the smallest scale, where anything in it is nearest to another value than zero then.
  if (g != 0.0f && amax / g > 0x1p-11f) ratio = std::max(ratio, 0x1p-9f);
  p.byte = float_to_e4m3(ratio);
  e2m1(x, n, e4m3_to_float(p.byte) * g, codes);
}

inline void mx(const Side& s, const float* x, int64_t n, Shared& p, uint8_t* codes) {
  const float amax = finite_amax(x, n);
  int exponent = -127;
  if (amax > 0.0f) {
    std::frexp(amax, &exponent);
    exponent = std::clamp(exponent - 1 - (s.code == TABLE4 ? 2 : 8), -127, 127);
  }
  p.byte = uint8_t(exponent + 127);
  const float scale = e8m0_to_float(p.byte);
  if (s.code == TABLE4) e2m1(x, n, scale, codes);
  else float8(s, x, n, scale, codes);
}

// The number of the nearest of ascending entries; a value on a midpoint takes the lower one.
inline void nearest(const Side& s, const float* z, int64_t n, const float* table, uint8_t* codes) {
  float midpoints[15];
  const int entries = 1 << s.bits;
  for (int i = 0; i + 1 < entries; ++i) midpoints[i] = (table[i + 1] + table[i]) * 0.5f;
  for (int64_t i = 0; i < n; ++i) {
    int code = 0;
    for (int j = 0; j + 1 < entries; ++j) code += z[i] > midpoints[j];
    codes[i] = uint8_t(code);
  }
}

constexpr float kQuarter = kMax / 4;  // max - min and x - centre stay finite

inline float within(float x, float largest) { return std::min(std::max(nan_to_zero(x), -largest), largest); }

// Codes of a vector by a codebook, with a centre and half-range of the vector, or of each of its channels.
inline void codebook(const Side& s, int64_t h, const float* x, int64_t n, const float* table, Shared& p, uint8_t* codes) {
  float z[kMaxDim];
  if (!s.static_scale) {
    float low = kInf, high = -kInf;
    for (int64_t i = 0; i < n; ++i) {
      if (!finite(bits_of(x[i]))) continue;
      low = std::min(low, within(x[i], kQuarter)), high = std::max(high, within(x[i], kQuarter));
    }
    if (high < low) low = high = 0.0f;
    p.minimum = round_parameter(within((high + low) * 0.5f, 65504.0f) + 0.0f, F16);
    p.scale = round_parameter(std::min((high - low) * 0.5f, 65504.0f), F16);
  }
  for (int64_t i = 0; i < n; ++i) {
    const float centre = s.static_scale ? load_static(s.minimum, h, i) : p.minimum;
    const float range = s.static_scale ? load_static(s.scale, h, i) : p.scale;
    z[i] = range != 0.0f ? (within(x[i], kQuarter) - centre) / range : 0.0f;
  }
  nearest(s, z, n, table, codes);
}

inline void normed(const Side& s, const float* x, int64_t n, const float* table, Shared& p, uint8_t* codes) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += double(within(x[i], kQuarter)) * double(within(x[i], kQuarter));
  p.scale = round_parameter(float(std::min(std::sqrt(sum), 65504.0)), F16);
  const float root = float(std::sqrt(double(n)));
  float z[kMaxDim];
  for (int64_t i = 0; i < n; ++i) z[i] = p.scale != 0.0f ? within(x[i], kQuarter) * root / p.scale : 0.0f;
  nearest(s, z, n, table, codes);
}

// Codes of one group of head h; `fixed` is the static scale, where there is one.
inline void encode_group(const Side& s, int64_t h, const float* x, int64_t n, float fixed, const float* table, Shared& p,
                         uint8_t* codes) {
  switch (s.rule) {
    case SYMMETRIC:
      if (s.zero_point.dtype == NONE) {
        symmetric(s, x, n, fixed, p, codes);
      } else {
        const float zero = load_static(s.zero_point, h, 0);
        steps(s, x, n, fixed, -zero, float((1 << s.bits) - 1) - zero, codes);
      }
      break;
    case ASYMMETRIC: asymmetric(s, x, n, p, codes); break;
    case FLOAT8:
      p.scale = s.static_scale ? fixed : std::max(finite_amax(x, n), kSmallest) / largest_code(s);
      float8(s, x, n, p.scale, codes);
      break;
    case NVFP4: nvfp4(x, n, fixed, p, codes); break;
    case MX: mx(s, x, n, p, codes); break;
    case CODEBOOK: codebook(s, h, x, n, table, p, codes); break;
    case NORMED: normed(s, x, n, table, p, codes); break;
  }
}

// Eight codes of 3 bits make three bytes, little-endian; others share a byte, the lowest index in the lowest bits.
inline void pack(const uint8_t* codes, int64_t n, int64_t bits, uint8_t* out) {
  if (bits == 8) {
    std::memcpy(out, codes, n);
  } else if (bits == 4) {
    for (int64_t i = 0; i < n / 2; ++i) out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
  } else if (bits == 2) {
    for (int64_t i = 0; i < n / 4; ++i)
      out[i] = uint8_t(codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6);
  } else {
    for (int64_t i = 0; i < n / 8; ++i) {
      uint32_t word = 0;
      for (int j = 0; j < 8; ++j) word |= uint32_t(codes[8 * i + j]) << (3 * j);
      for (int j = 0; j < 3; ++j) out[3 * i + j] = uint8_t(word >> (8 * j));
    }
  }
}

// Takes the outliers of a vector out: their places become NaN. See kvq_ops/codecs/outliers.py.
inline void take_outliers(const Side& s, int64_t h, float* x, int16_t* index, float* value) {
  const int64_t dim = s.dim, value_dtype = s.outlier_value.dtype;
  float centre = 0.0f;
  if (s.centred == 1) {
    float sorted[kMaxDim];
    int64_t n = 0;
    for (int64_t d = 0; d < dim; ++d)
      if (x[d] == x[d]) sorted[n++] = x[d];
    if (n) {
      std::nth_element(sorted, sorted + (n - 1) / 2, sorted + n);
      centre = std::min(std::max(sorted[(n - 1) / 2], -kMax), kMax);
    }
  }
  float distance[kMaxDim];
  for (int64_t d = 0; d < dim; ++d) {
    float far = std::fabs(s.centred ? x[d] - (s.centred == 1 ? centre : load_static(s.minimum, h, d)) : x[d]);
    if (s.centred == 2 && far != 0.0f) far /= load_static(s.scale, h, d);
    distance[d] = far != far ? -1.0f : far;
  }
  int16_t order[kMaxDim];
  std::iota(order, order + dim, int16_t(0));
  // Equal distances: the lower index is farther.
  std::partial_sort(order, order + s.outliers, order + dim, [&](int16_t i, int16_t j) {
    return distance[i] != distance[j] ? distance[i] > distance[j] : i < j;
  });
  std::sort(order, order + s.outliers);
  const float largest = largest_number(value_dtype);
  for (int64_t k = 0; k < s.outliers; ++k) {
    index[k] = order[k];
    value[k] = std::min(std::max(finite_number(x[order[k]], F32), -largest), largest);
    x[order[k]] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace kvq
