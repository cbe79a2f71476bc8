// Arguments of the entry points that are not attention.
#pragma once
#include "params.h"

namespace kvq {

struct AppendArgs {
  Side side;
  Plane x;         // [B, H, N, D]
  Plane position;  // b and t strides; NONE: 0..N-1
  int64_t count, threads;
};

struct DequantizeArgs {
  Side side;
  char* out;  // contiguous [B, H, T, D]
  int64_t dtype, threads;
};

}  // namespace kvq

extern "C" int64_t kvq_attention(const kvq::AttentionArgs* args);
extern "C" int64_t kvq_append(const kvq::AppendArgs* args);
extern "C" int64_t kvq_dequantize(const kvq::DequantizeArgs* args);
