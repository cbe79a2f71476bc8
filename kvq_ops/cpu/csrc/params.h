// What Python hands over: flat structs of 64-bit numbers, in the order in which kvq_ops/cpu/params.py packs them.
#pragma once
#include <cstdint>

namespace kvq {

enum DType : int64_t { NONE = 0, F32, F16, BF16, F64, I8, U8, E4M3, E5M2, E8M0, I16, I32, I64, BOOL };

// How one stored code becomes a number, before scale and minimum.
enum Code : int64_t {
  EXACT = 0,   // a float of the dtype of the plane
  INT8,        // two's complement
  UINT8,       // 0..255
  FLOAT_E4M3,
  FLOAT_E5M2,
  TABLE4,      // packed codes of 4, 3 or 2 bits, looked up in a table
  TABLE3,
  TABLE2,
  INDEX,       // what packed codes become where a kernel spreads them first, one a byte
};

// Which rule makes codes from numbers.
enum Rule : int64_t { COPY = 0, SYMMETRIC, ASYMMETRIC, FLOAT8, NVFP4, MX, CODEBOOK, NORMED };

struct Plane {
  char* data;
  int64_t dtype;               // NONE: there is no such plane
  int64_t b, h, t, d;          // strides in elements; 0 along an axis that the plane does not have
};

// One store of keys or of values.
struct Side {
  int64_t code, rule, bits;
  int64_t scale_tokens;        // tokens that share a scale, along the token axis of the plane
  int64_t scale_channels;      // channels that share a scale; 0: all
  int64_t rotation;            // 0 none, 1 Hadamard, 2 the same after flipping signs
  int64_t outliers;            // exact values of each vector
  int64_t window, recent, sinks;  // tokens in the ring (0: no ring), kept exact, kept exact at the start
  int64_t static_scale;        // the scale has no token axis
  int64_t calibrated;          // static planes are set beforehand
  int64_t centred;             // outliers lie far from: 0 zero, 1 the median, 2 the centre of their channel
  int64_t batch, heads, tokens, dim;
  Plane codes, scale, outer, minimum, outlier_index, outlier_value, ring, sink, coded, length;
  Plane zero_point, codebook, inv_freq, position;
  const float* table;          // 16 entries, periodic where codes are shorter than 4 bits
  const struct Sines* sines;   // of the positions in use; filled in here
  Plane table_of_pages;        // b and t strides; NONE: a row of the planes holds a sequence. Else batch and tokens are those of
  int64_t page_tokens;         // the table, rows of the planes are pages of so many tokens, and attention's length is [batch]
};

struct AttentionArgs {
  Side key, value;
  Plane query, mask, sinks;
  char* out;                   // contiguous [B, Hq, Tq, Dv], dtype of the query
  int64_t query_heads, queries, causal, window, use_length, threads;
  double scale, softcap;
};

inline int64_t item_size(int64_t dtype) {
  switch (dtype) {
    case F64: case I64: return 8;
    case F32: case I32: return 4;
    case F16: case BF16: case I16: return 2;
    default: return 1;
  }
}

inline char* at(const Plane& p, int64_t b, int64_t h, int64_t t, int64_t d = 0) {
  return p.data + (b * p.b + h * p.h + t * p.t + d * p.d) * item_size(p.dtype);
}

inline int64_t bytes_of(int64_t bits, int64_t channels) { return channels * bits / 8; }

}  // namespace kvq
