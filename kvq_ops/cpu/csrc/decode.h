// Stored tokens to fp32, a tile at a time. The numbers are those of kvq_ops/codecs, one rounding for each operation there.
#pragma once
#include <algorithm>

#include "neon.h"
#include "rotary.h"
#include "vec.h"

namespace kvq {

constexpr int64_t kTile = 64;     // tokens in a tile
constexpr int64_t kMaxDim = 1024;  // channels that scratch memory is made for; Python refuses more

inline int64_t padded(int64_t channels) { return (channels + W - 1) / W * W; }

// Whether a scale of a token (or of more) applies to all its channels, so that attention may apply it to scores and weights.
inline bool folds(const Side& s) {
  return s.code != EXACT && s.rule != NORMED && s.scale_channels == 0 && s.minimum.dtype == NONE &&
         s.scale_tokens == 1 && !s.outliers;
}

// Whether tokens t0..t0+n are all in codes, none of them exact.
inline bool all_coded(const Side& s, int64_t b, int64_t t0, int64_t n) {
  return !s.window || (t0 >= s.sinks && t0 + n <= load_index(s.coded, b));
}

inline float outer_scale(const Side& s) { return s.outer.dtype == NONE ? 1.0f : load_number(s.outer.data, s.outer.dtype); }

inline float scale_of(const Side& s, int64_t b, int64_t h, int64_t t) {
  float x = load_number(at(s.scale, b, h, t / s.scale_tokens), s.scale.dtype);
  return s.outer.dtype == NONE ? x : x * outer_scale(s);
}

// W codes at channel j * W. `row` may be read to the end of the vector.
template <int CODE>
inline vf get(const Side& s, const uint8_t* row, int64_t j) {
  if constexpr (CODE == INT8) return from_i8(row + j * W);
  if constexpr (CODE == UINT8) return from_u8(row + j * W);
  if constexpr (CODE == FLOAT_E4M3) return from_e4m3(row + j * W);
  if constexpr (CODE == FLOAT_E5M2) return from_e5m2(row + j * W);
  if constexpr (CODE == TABLE4) return from_table<4>(row + j * W * 4 / 8, s.table);
  if constexpr (CODE == TABLE3) {
    if constexpr (W < 8) {  // four 3-bit codes may straddle bytes in the middle
      vf x;
      for (int i = 0; i < W; ++i) {
        int64_t bit = 3 * (j * W + i), byte = bit / 8;
        uint32_t word = row[byte];
        if (bit % 8 > 5) word |= uint32_t(row[byte + 1]) << 8;
        x[i] = s.table[word >> bit % 8 & 7];
      }
      return x;
    } else {
      return from_table<3>(row + j * W * 3 / 8, s.table);
    }
  }
#if defined(KVQ_AVX512)
  if constexpr (CODE == INDEX) return from_index(row + j * W, load(s.table));
#endif
  if constexpr (CODE == TABLE2) return from_table<2>(row + j * W * 2 / 8, s.table);
}

// Reads the codes of a row, `STEP` vectors at a time.
#if defined(KVQ_NEON)
template <int CODE>
struct Reader {
  static constexpr int STEP = 4;
  Entries table{};
  explicit Reader(const Side& s) {
    if (CODE == TABLE4 || CODE == TABLE3 || CODE == TABLE2) table = entries_of(s.table);
  }
  void operator()(const Side&, const uint8_t* row, int64_t j, vf* x) const { get16<CODE>(row, j / STEP, table, x); }
};
#else
template <int CODE>
struct Reader {
  static constexpr int STEP = 1;
  explicit Reader(const Side&) {}
  void operator()(const Side& s, const uint8_t* row, int64_t j, vf* x) const { *x = get<CODE>(s, row, j); }
};
#endif

// out[j] = use(j / SHARE * SHARE, number j) for the vectors of a row.
template <int SHARE, int CODE, class Use>
inline __attribute__((always_inline)) void each_vector(const Reader<CODE> read, const Side& s, const uint8_t* row, float* out,
                                                       const Use& use) {
  constexpr int STEP = Reader<CODE>::STEP;
  const int64_t vectors = padded(s.dim) / W;
  int64_t j = 0;
  for (; j + STEP <= vectors; j += STEP) {
    vf x[STEP];
    read(s, row, j, x);
    KVQ_UNROLL for (int k = 0; k < STEP; ++k) x[k] = use(j + k / SHARE * SHARE, x[k]);
    KVQ_UNROLL for (int k = 0; k < STEP; ++k) store(out + (j + k) * W, x[k]);
  }
  if (STEP == 1 || j == vectors) return;
  vf rest[STEP];
  read(s, row, j, rest);  // of a copy, which goes on behind its end
  for (int k = 0; j + k < vectors; ++k) store(out + (j + k) * W, use(j + k / SHARE * SHARE, rest[k]));
}

// Groups of channels of a token, each with a scale of its own.
inline int64_t groups_of(const Side& s) { return s.scale_channels ? (s.dim + s.scale_channels - 1) / s.scale_channels : 1; }

// Row `index` of a plane of parameters as one number for each channel.
inline void spread_row(const Plane& p, int64_t b, int64_t h, int64_t t, int64_t channels, int64_t dim, float factor,
                       float* out) {
  const char* row = at(p, b, h, t);
  const int64_t step = p.d * item_size(p.dtype);
  if (channels == 1 && p.d == 1 && p.dtype == F16) {
    int64_t d = 0;
    for (; d + W <= dim; d += W) store(out + d, from_half((const uint8_t*)row + 2 * d) * factor);
    for (; d < dim; ++d) out[d] = load_number(row + 2 * d, F16) * factor;
    return;
  }
  const int64_t wide = channels ? channels : dim;
  for (int64_t d = 0, g = 0; d < dim; d += wide, ++g) {
    float x = load_number(row + g * step, p.dtype) * factor;
    for (int64_t i = d, end = std::min(d + wide, dim); i < end; ++i) out[i] = x;
  }
}

// Whether attention may stay in the space in which vectors are coded: not where each is turned by its position after that.
inline bool turns(const Side& s) { return s.rotation && s.position.dtype == NONE; }

// Parameters of the tokens of a tile as fp32, [n][groups].
template <int64_t DTYPE>
void load_numbers(const Plane& p, int64_t b, int64_t h, int64_t t0, int64_t n, int64_t groups, float factor, float* out) {
  const char* row = at(p, b, h, t0);
  const int64_t size = item_size(DTYPE);
  if (p.t == groups && (p.d == 1 || groups == 1)) {  // they lie side by side
    const int64_t count = n * groups;
    int64_t i = 0;
    for (; i + W <= count; i += W) {
      const uint8_t* from = reinterpret_cast<const uint8_t*>(row) + i * size;
      vf x;
      if (DTYPE == F32) x = load(reinterpret_cast<const float*>(from));
      else if (DTYPE == F16) x = from_half(from);
      else if (DTYPE == BF16) x = from_bfloat(from);
      else if (DTYPE == E4M3) x = from_e4m3(from);
      else x = from_e8m0(from);
      store(out + i, x * factor);
    }
    for (; i < count; ++i) out[i] = load_number(row + i * size, DTYPE) * factor;
    return;
  }
  for (int64_t t = 0; t < n; ++t, row += p.t * size)
    for (int64_t g = 0; g < groups; ++g) *out++ = load_number(row + g * p.d * size, DTYPE) * factor;
}

inline void load_parameters(const Plane& p, int64_t b, int64_t h, int64_t t0, int64_t n, int64_t groups, float factor,
                            float* out) {
  switch (p.dtype) {
    case F32: return load_numbers<F32>(p, b, h, t0, n, groups, factor, out);
    case F16: return load_numbers<F16>(p, b, h, t0, n, groups, factor, out);
    case BF16: return load_numbers<BF16>(p, b, h, t0, n, groups, factor, out);
    case E4M3: return load_numbers<E4M3>(p, b, h, t0, n, groups, factor, out);
    default: return load_numbers<E8M0>(p, b, h, t0, n, groups, factor, out);
  }
}

// Scale and minimum of the tokens of a tile. Either one number for each 2^shift vectors, [n][groups]; or, where groups are
// none of whole vectors or span tokens, one for each channel, of one token or group of tokens at a time.
struct Parameters {
  alignas(64) float scale[kTile * kMaxDim / 16], minimum[kTile * kMaxDim / 16];
  int64_t groups = 0, shift = 0, current = -1;

  Parameters(const Side& s, int64_t b, int64_t h, int64_t t0, int64_t n) {
    if (s.scale.dtype == NONE || s.static_scale || s.scale_tokens > 1) return;
    const int64_t vectors = s.scale_channels / W;
    if (s.scale_channels == 0) shift = 32;
    else if (s.scale_channels % W == 0 && (vectors & (vectors - 1)) == 0) while (int64_t(1) << shift < vectors) ++shift;
    else return;
    groups = groups_of(s);
    if (groups > kMaxDim / 16) {
      groups = 0;
      return;
    }
    load_parameters(s.scale, b, h, t0, n, groups, outer_scale(s), scale);
    if (s.minimum.dtype != NONE) load_parameters(s.minimum, b, h, t0, n, groups, 1.0f, minimum);
  }
  void spread(const Side& s, int64_t b, int64_t h, int64_t t) {
    const int64_t group = s.static_scale ? 0 : t / s.scale_tokens;
    if (current == group) return;
    current = group;
    spread_row(s.scale, b, h, group, s.scale_channels, s.dim, outer_scale(s), scale);
    if (s.minimum.dtype != NONE) spread_row(s.minimum, b, h, group, s.scale_channels, s.dim, 1.0f, minimum);
  }
};

// Token `i` of a tile, `t` of the store.
template <int CODE, bool PLAIN>
inline void decode_row(const Reader<CODE>& read, const Side& s, const uint8_t* row, int64_t b, int64_t h, int64_t t, int64_t i,
                       float* out, Parameters& p) {
  if (PLAIN) return each_vector<1>(read, s, row, out, [](int64_t, vf x) { return x; });
  const bool low = s.minimum.dtype != NONE;
  if (p.groups) {
    const float *scale = p.scale + i * p.groups, *minimum = p.minimum + i * p.groups;
    const int64_t shift = p.shift;
    const auto scaled = [=](int64_t j, vf x) { return x * set1(scale[j >> shift]); };
    const auto affine = [=](int64_t j, vf x) { return x * set1(scale[j >> shift]) + set1(minimum[j >> shift]); };
    constexpr int STEP = Reader<CODE>::STEP;
    if (STEP > 1 && int64_t(STEP) >> shift <= 1) {  // vectors that are read at once have one scale
      if (low) each_vector<STEP>(read, s, row, out, affine);
      else each_vector<STEP>(read, s, row, out, scaled);
    } else {
      if (low) each_vector<1>(read, s, row, out, affine);
      else each_vector<1>(read, s, row, out, scaled);
    }
    return;
  }
  p.spread(s, b, h, t);
  if (low) {
    each_vector<1>(read, s, row, out, [&](int64_t j, vf x) { return x * load(p.scale + j * W) + load(p.minimum + j * W); });
  } else {
    each_vector<1>(read, s, row, out, [&](int64_t j, vf x) { return x * load(p.scale + j * W); });
  }
}

inline void exact_row(const Plane& p, const char* row, int64_t dim, float* out) {
  if (p.d == 1) {
    int64_t d = 0;
    if (p.dtype == F32) {
      std::memcpy(out, row, dim * 4);
      return;
    }
    if (p.dtype == F16)
      for (; d + W <= dim; d += W) store(out + d, from_half((const uint8_t*)row + 2 * d));
    if (p.dtype == BF16)
      for (; d + W <= dim; d += W) store(out + d, from_bfloat((const uint8_t*)row + 2 * d));
    for (; d < dim; ++d) out[d] = load_number(row + d * item_size(p.dtype), p.dtype);
    return;
  }
  const int64_t step = p.d * item_size(p.dtype);
  for (int64_t d = 0; d < dim; ++d) out[d] = load_number(row + d * step, p.dtype);
}

// The table of a store: that of its format, its own, or one that codes were shifted in by a zero point.
inline const float* table_of(const Side& s, int64_t h, float* made) {
  const int64_t entries = int64_t(1) << s.bits;
  if (s.codebook.dtype == NONE && (s.zero_point.dtype == NONE || s.bits == 8)) return s.table;
  const float zero = s.zero_point.dtype == NONE ? 0.0f : load_static(s.zero_point, h, 0);
  for (int64_t i = 0; i < 16; ++i) {
    const int64_t q = i % entries;
    if (s.codebook.dtype != NONE) made[i] = load_static(s.codebook, 0, q);
    else made[i] = float(q) >= float(entries) - zero ? float(q - entries) : float(q);
  }
  return made;
}

// Brings a vector of table entries to its length, in double precision so that the order of the sum does not show.
inline void give_length(const Side& s, int64_t b, int64_t h, int64_t t, float* x) {
  double part[8] = {};
  int64_t d = 0;
  for (; d + 8 <= s.dim; d += 8)
    for (int i = 0; i < 8; ++i) part[i] += double(x[d + i]) * double(x[d + i]);
  for (; d < s.dim; ++d) part[0] += double(x[d]) * double(x[d]);
  double sum = 0;
  for (double y : part) sum += y;
  const float factor = float(double(load_number(at(s.scale, b, h, t), s.scale.dtype)) / std::sqrt(sum));
  for (d = 0; d < s.dim; ++d) x[d] *= factor;
}

template <int CODE, bool PLAIN>
KVQ_KERNEL void decode_rows(const Side& given, int64_t b, int64_t h, int64_t t0, int64_t n, float* out, int64_t ld) {
  Side s = given;
  float table[16];
  s.table = table_of(given, h, table);
  const Reader<CODE> read(s);
  Parameters p(s, b, h, t0, PLAIN ? 0 : n);
  // A row whose end is no end of a vector, or whose bytes lie apart, is copied, so that nothing beyond it is read.
  alignas(64) uint8_t copy[kMaxDim + 64];
  const int64_t bytes = bytes_of(s.bits, s.dim);
  const bool shifted = CODE == UINT8 && s.zero_point.dtype != NONE;
  const bool apart = s.codes.d != 1 || s.dim % 16 != 0 || shifted;
  const float zero = shifted ? load_static(s.zero_point, h, 0) : 0.0f;
  if (apart) std::memset(copy + bytes, 0, 64);
  for (int64_t t = t0; t < t0 + n; ++t, out += ld) {
    const char* row = at(s.codes, b, h, t);
    if (apart) {
      if (s.codes.d == 1) std::memcpy(copy, row, bytes);
      else for (int64_t i = 0; i < bytes; ++i) copy[i] = uint8_t(row[i * s.codes.d]);
      if (shifted) for (int64_t i = 0; i < bytes; ++i) copy[i] = uint8_t(copy[i] + uint8_t(zero));
      row = reinterpret_cast<const char*>(copy);
    }
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(row);
#if defined(KVQ_AVX512)
    if constexpr (CODE == INDEX) {
      for (int64_t d = 0; d < s.dim; d += 64) nibbles64(codes + d / 2, copy + d);
      codes = copy;
    }
#endif
    if (shifted || s.rule == NORMED) {
      decode_row<CODE, true>(read, s, codes, b, h, t, t - t0, out, p);
      if (s.rule == NORMED) give_length(s, b, h, t, out);
      const float scale = shifted && !PLAIN ? scale_of(s, b, h, t) : 1.0f;
      if (shifted) for (int64_t d = 0; d < s.dim; ++d) out[d] = (out[d] - zero) * scale;
    } else {
      decode_row<CODE, PLAIN>(read, s, codes, b, h, t, t - t0, out, p);
    }
    // Codes beyond the last channel are zero, but what they stand for is not.
    for (int64_t d = s.dim; d < padded(s.dim); ++d) out[d] = 0.0f;
  }
}

// Tokens of a format with a window that are not coded: the newest, the first, and those that are not there.
inline void put_exact(const Side& s, int64_t b, int64_t h, int64_t t0, int64_t n, float* out, int64_t ld, bool rotated) {
  const int64_t coded = load_index(s.coded, b), length = load_index(s.length, b);
  for (int64_t t = t0; t < t0 + n; ++t) {
    float* row = out + (t - t0) * ld;
    const Plane* from = nullptr;
    int64_t slot = 0;
    if (t < s.sinks && t < length) from = &s.sink, slot = t;
    else if (t >= coded && t < length && t < coded + s.window) from = &s.ring, slot = t % s.window;
    else if (t < coded) continue;
    if (!from) {
      std::memset(row, 0, s.dim * 4);
      continue;
    }
    exact_row(*from, at(*from, b, h, slot), s.dim, row);
    for (int64_t d = 0; d < s.dim; ++d) row[d] = finite_number(row[d], from->dtype);
    if (rotated) rotate(row, s.dim, s.rotation);
  }
}

// Tokens t0..t0+n of row b as fp32 rows of `ld` numbers, channels beyond the last zero. With `plain` a scale that folds is left
// out; with `rotated` vectors stay in the space in which they are coded.
inline void decode_run(const Side& s, int64_t b, int64_t h, int64_t t0, int64_t n, float* out, int64_t ld, bool plain,
                        bool rotated) {
  if (s.code == EXACT) {
    for (int64_t t = 0; t < n; ++t) {
      exact_row(s.codes, at(s.codes, b, h, t0 + t), s.dim, out + t * ld);
      for (int64_t d = s.dim; d < padded(s.dim); ++d) out[t * ld + d] = 0.0f;
    }
    return;
  }
#define KVQ_CASE(CODE)                                                     \
  case CODE:                                                               \
    if (plain) decode_rows<CODE, true>(s, b, h, t0, n, out, ld);           \
    else decode_rows<CODE, false>(s, b, h, t0, n, out, ld);                \
    break;
#if defined(KVQ_AVX512)
  const int64_t code = s.code == TABLE4 && s.dim % 64 == 0 && s.codes.d == 1 ? int64_t(INDEX) : s.code;
#else
  const int64_t code = s.code;
#endif
  switch (code) {
#if defined(KVQ_AVX512)
    KVQ_CASE(INDEX)
#endif
    KVQ_CASE(INT8)
    KVQ_CASE(UINT8)
    KVQ_CASE(FLOAT_E4M3)
    KVQ_CASE(FLOAT_E5M2)
    KVQ_CASE(TABLE4)
    KVQ_CASE(TABLE3)
    KVQ_CASE(TABLE2)
  }
#undef KVQ_CASE
  for (int64_t t = 0; s.outliers && t < n; ++t)
    for (int64_t k = 0; k < s.outliers; ++k) {
      int16_t index;
      std::memcpy(&index, at(s.outlier_index, b, h, t0 + t, k), 2);
      if (index >= 0 && index < s.dim)
        out[t * ld + index] = load_number(at(s.outlier_value, b, h, t0 + t, k), s.outlier_value.dtype);
    }
  if (s.position.dtype != NONE) {
    for (int64_t t = 0; t < n; ++t) {
      const int32_t slot = *reinterpret_cast<const int32_t*>(at(s.position, b, 0, t0 + t));
      unrotate(out + t * ld, s.dim, s.rotation);
      if (slot <= 0) std::memset(out + t * ld, 0, s.dim * 4);
      else turn_by(s.sines->at(slot - 1), out + t * ld, s.dim, false);
    }
  } else if (s.rotation && !rotated) {
    for (int64_t t = 0; t < n; ++t) unrotate(out + t * ld, s.dim, s.rotation);
  }
  if (s.window) put_exact(s, b, h, t0, n, out, ld, rotated && turns(s));
}

// The same of sequence b, wherever its tokens lie.
inline void decode_tile(const Side& s, int64_t b, int64_t h, int64_t t0, int64_t n, float* out, int64_t ld, bool plain,
                        bool rotated) {
  each_run(s, b, t0, n, [&](const Run& run, int64_t i) {
    decode_run(s, run.row, h, run.slot, run.count, out + i * ld, ld, plain, rotated);
  });
}

}  // namespace kvq
