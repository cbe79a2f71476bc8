// Codes of at most 8 bits that stand for integers, as they meet the integer dot products of AVX-512 VNNI. Queries and weights become
// 24-bit integers, in three bytes, which is as exact as fp32; scales are applied to the sums.
//
// A row is cut into blocks of 64 bytes, and a byte holds P codes: its planes. Byte 16 L + 4 j + e of a block lies in lane L of the
// vector, 128 bits wide, and nothing below moves bytes between lanes: dwords (of keys) or bytes (of values) of four tokens are
// interleaved within a lane, which is cheap, and lanes are told apart until the end, which is where groups of channels have their
// own scales. Channel P (64 block + 16 L + 4 j + e) + p is what plane p of that byte holds.
//
// Rows of 32 or 16 bytes are folded: a vector holds those of 2 or 4 tokens that follow each other, in its lanes, and is a row below.
#pragma once
#include <type_traits>

#include "decode.h"

#if defined(KVQ_AVX512) && defined(__AVX512VNNI__)
#define KVQ_INTEGER 1

namespace kvq {

constexpr int kDigits = 3;
constexpr int kQuad = 4;                // rows whose codes lie in a lane together
constexpr int kPack = 8;                // rows that are found by one pointer
constexpr int kMost = 4;                // query rows of a product at once
constexpr int kFold = 4;                // tokens in a row, at most
constexpr int64_t kRun = 2 * kTile;     // tokens of values in a product, at most
constexpr int64_t kPacks = kRun / kPack;

// What the codes of a side are made of. `planes` 0: they are no integers.
struct Codes {
  int64_t planes = 0, bytes = 0, blocks = 0, bias = 0, fold = 1;
  float factor = 1.0f;                  // what an integer is times to be the number it stands for
  alignas(16) int8_t table[16];         // integers of packed codes

  int64_t packs(int64_t tokens) const { return (tokens + kPack * fold - 1) / (kPack * fold); }
  // Of a quad, the token that lane `lane` holds in its i-th place.
  int64_t token(int64_t lane, int64_t i) const { return i * fold + lane * fold / 4; }
  // The byte of a token's codes that lies in a row at byte `i`.
  int64_t byte(int64_t i) const { return fold == 1 ? i : i % bytes; }
};

// Keys are unsigned to the processor: integers plus the bias. Values are signed.
template <int PLANES>
struct Planes {
  static constexpr int P = PLANES;
  static constexpr bool GROUPS = P > 1;  // scales may be those of groups of channels
  __m512i keys, values;
  explicit Planes(const Codes& c) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(c.table));
    values = _mm512_broadcast_i32x4(table);
    keys = P == 1 ? _mm512_set1_epi8(char(0x80)) : _mm512_add_epi8(values, _mm512_set1_epi8(char(c.bias)));
  }
  template <int PLANE>
  static __m512i index(__m512i x) {
    constexpr int bits = 8 / P;
    return _mm512_and_si512(_mm512_srli_epi16(x, PLANE * bits), _mm512_set1_epi8((1 << bits) - 1));
  }
  template <int PLANE>
  __m512i key(__m512i x) const {
    if constexpr (P == 1) return _mm512_xor_si512(x, keys);
    else return _mm512_shuffle_epi8(keys, index<PLANE>(x));
  }
  template <int PLANE>
  __m512i value(__m512i x) const {
    if constexpr (P == 1) return x;
    else return _mm512_shuffle_epi8(values, index<PLANE>(x));
  }
};

// Whether attention may use the codes of a side as integers; its scales are those of a token, or of whole half lanes.
inline Codes codes_of(const Side& s) {
  Codes c;
  const int64_t planes = s.code == INT8 ? 1 : s.code == TABLE4 ? 2 : s.code == TABLE2 ? 4 : 0;
  if (!planes) return c;
  const bool grouped = planes > 1 && !s.static_scale && s.scale_channels % (8 * planes) == 0;
  if (s.codes.d != 1 || s.outliers || s.scale_tokens != 1 || s.rule == NORMED || s.position.dtype != NONE ||
      s.codebook.dtype != NONE || s.zero_point.dtype != NONE || !(folds(s) || grouped))
    return c;
  c.bias = 128;
  if (planes > 1) {
    c.factor = 0.5f, c.bias = 0;  // tables may hold halves
    for (int i = 0; i < 16; ++i) {
      const float x = 2.0f * s.table[i];
      if (!(x >= -60.0f && x <= 60.0f) || x != std::nearbyint(x)) return c;
      c.table[i] = int8_t(x);
      c.bias = std::max<int64_t>(c.bias, -c.table[i]);
    }
  }
  c.planes = planes;
  c.bytes = bytes_of(s.bits, s.dim);
  c.blocks = (c.bytes + 63) / 64;
  if (planes > 1 && (c.bytes == 32 || c.bytes == 16)) c.fold = 64 / c.bytes;
  return c;
}

// A row of numbers as integers times `unit`, in three digits of base 256 between -128 and 127: out[digit][count].
// NaN once a number is not finite, which digits cannot say. `count` is a multiple of W.
inline float to_digits(const float* x, int64_t count, int8_t* out) {
  vf most{}, nothing{};
  for (int64_t d = 0; d < count; d += W) most = max(most, absolute(load(x + d))), nothing += load(x + d) * 0.0f;
  const float top = reduce_max(most);
  constexpr float kTop = 8290000.0f;  // below 127 * (2^16 + 2^8 + 1)
  const bool usable = top > 1e-30f && top < kInf;
  const vf scale = set1(usable ? kTop / top : 0.0f);
  for (int64_t d = 0; d < count; d += W) {
    __m512i q = _mm512_cvtps_epi32(load(x + d) * scale);
    for (int i = 0; i < kDigits; ++i) {
      const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * count + d), _mm512_cvtepi32_epi8(digit));
      q = _mm512_srai_epi32(_mm512_sub_epi32(q, digit), 8);
    }
  }
  return (usable ? top / kTop : 0.0f) + reduce_add(nothing);
}

// Rows of a run of tokens, a pointer for every kPack of them; a copy where those do not lie side by side, or with zeros where tokens or
// bytes are missing.
struct Rows {
  const uint8_t* packs[kPacks];
  int64_t strides[kPacks];
};

inline void find_rows(const Side& s, const Codes& c, int64_t b, int64_t h, int64_t t0, int64_t n, uint8_t* copy, Rows& rows) {
  const int64_t wide = c.blocks * 64 / c.fold, tokens = kPack * c.fold;
  for (int64_t p = 0; p * tokens < n; ++p, copy += tokens * wide) {
    const int64_t here = std::min<int64_t>(tokens, n - p * tokens);
    if (here == tokens && wide == c.bytes && (c.fold == 1 || s.codes.t == wide)) {
      const Run run = run_of(s, b, t0 + p * tokens, tokens);
      if (run.count == tokens) {
        rows.packs[p] = reinterpret_cast<const uint8_t*>(at(s.codes, run.row, h, run.slot));
        rows.strides[p] = s.codes.t * c.fold;
        continue;
      }
    }
    each_run(s, b, t0 + p * tokens, here, [&](const Run& run, int64_t i) {
      for (int64_t t = 0; t < run.count; ++t) {
        uint8_t* row = copy + (i + t) * wide;
        std::memcpy(row, at(s.codes, run.row, h, run.slot + t), c.bytes);
        std::memset(row + c.bytes, 0, wide - c.bytes);
      }
    });
    std::memset(copy + here * wide, 0, (tokens - here) * wide);
    rows.packs[p] = copy, rows.strides[p] = wide * c.fold;
  }
}

// Scales and minima of groups of channels, spread as the lanes of the sums: [flush][quad][lane][token]. A flush
// is a block, or where groups are shorter than a lane a half of one: j < 2, then j >= 2.
struct Spread {
  float *scale = nullptr, *minimum = nullptr, *rows = nullptr;
  int64_t halves = 1;
  bool low = false;

  static int64_t size(const Side& s, const Codes& c) {  // floats
    return c.blocks * 2 * kRun * 4 * 2 + (kRun + kPack * kFold) * groups_of(s) + 64;
  }
  void place(const Side& s, const Codes& c, float* memory) {
    scale = memory, minimum = scale + c.blocks * 2 * kRun * 4, rows = minimum + c.blocks * 2 * kRun * 4;
    halves = s.scale_channels % (16 * c.planes) ? 2 : 1, low = s.minimum.dtype != NONE;
  }
  float* scale_at(int64_t flush) const { return scale + flush * kRun * 4; }
  float* minimum_at(int64_t flush) const { return minimum + flush * kRun * 4; }

  void put(const Side& s, const Codes& c, const float* from, int64_t groups, int64_t n, float* out) const {
    const int64_t channels = s.scale_channels ? s.scale_channels : s.dim;
    const int64_t quads = c.packs(n) * kPack / kQuad, numbers = kQuad * c.fold * groups;
    for (int64_t block = 0; block < c.blocks; ++block)
      for (int64_t half = 0; half < halves; ++half) {
        alignas(64) int32_t index[16];
        for (int64_t i = 0; i < 16; ++i) {
          const int64_t g = std::min(groups - 1, c.planes * c.byte(64 * block + 16 * (i / 4) + 8 * half) / channels);
          index[i] = int32_t(c.token(i / 4, i % 4) * groups + g);
        }
        const __m512i which = _mm512_load_si512(index);
        float* to = out;
        for (int64_t q = 0; q < quads; ++q, to += 16) {
          const float* row = from + q * numbers;
          if (numbers <= 16) store(to, _mm512_permutexvar_ps(which, load(row)));
          else if (numbers <= 32) store(to, _mm512_permutex2var_ps(load(row), which, load(row + 16)));
          else store(to, _mm512_i32gather_ps(which, row, 4));
        }
        out += kRun * 4;
      }
  }
  // False where a scale is no positive number, which products with weights cannot take.
  bool fill(const Side& s, const Codes& c, int64_t b, int64_t h, int64_t t0, int64_t n) {
    const int64_t groups = groups_of(s);
    const auto gather = [&](const Plane& p, float factor, float* out) {
      each_run(s, b, t0, n, [&](const Run& run, int64_t i) {
        load_parameters(p, run.row, h, run.slot, run.count, groups, factor, rows + i * groups);
      });
      std::fill(rows + n * groups, rows + (n + kPack * c.fold) * groups + W, 0.0f);  // read, and of no consequence
      put(s, c, rows, groups, n, out);
    };
    gather(s.scale, outer_scale(s) * c.factor, scale);
    vf worst{};
    for (int64_t i = 0; i < n * groups; i += W) {
      const vf x = load(rows + i);
      worst = max(worst, x >= 0.0f && x < kInf ? vf{} : set1(1.0f));
    }
    const bool good = reduce_max(worst) == 0.0f;
    if (low) gather(s.minimum, 1.0f, minimum);
    return good;
  }
};

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

// Calls `use` with PLANE from 0 on, as a constant.
template <int N, class Use>
inline __attribute__((always_inline)) void each_plane(const Use& use) {
  if constexpr (N >= 1) use(std::integral_constant<int, 0>{});
  if constexpr (N >= 2) use(std::integral_constant<int, 1>{});
  if constexpr (N >= 4) use(std::integral_constant<int, 2>{}), use(std::integral_constant<int, 3>{});
}

}  // namespace kvq
#endif
