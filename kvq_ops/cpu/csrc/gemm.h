// Small matrix products on tiles that lie in cache.
#pragma once
#include "vec.h"

namespace kvq {

// C[m][n] (+)= sum_k A(m, k) B[k][n] for MR rows and NR vectors, A(m, k) at a[m * am + k * ak].
template <int MR, int NR, bool ADD>
KVQ_KERNEL void micro(int64_t depth, const float* a, int64_t am, int64_t ak, const float* b, int64_t ldb, float* c,
                  int64_t ldc) {
  vf sum[MR][NR];
  KVQ_UNROLL for (int i = 0; i < MR; ++i)
    KVQ_UNROLL for (int j = 0; j < NR; ++j) sum[i][j] = ADD ? load(c + i * ldc + j * W) : vf{};
  for (int64_t k = 0; k < depth; ++k, b += ldb, a += ak) {
    vf row[NR];
    KVQ_UNROLL for (int j = 0; j < NR; ++j) row[j] = load(b + j * W);
    KVQ_UNROLL for (int i = 0; i < MR; ++i) {
      const vf x = set1(a[i * am]);
      KVQ_UNROLL for (int j = 0; j < NR; ++j) sum[i][j] = fma(x, row[j], sum[i][j]);
    }
  }
  KVQ_UNROLL for (int i = 0; i < MR; ++i)
    KVQ_UNROLL for (int j = 0; j < NR; ++j) store(c + i * ldc + j * W, sum[i][j]);
}

// Accumulators that fit in the registers: 6 rows of 4 vectors of 32 registers, 3 of 16.
#if defined(KVQ_AVX512) || defined(KVQ_NEON)
constexpr int kRows = 6;
#else
constexpr int kRows = 3;
#endif
constexpr int kVectors = 4;

template <int NR, bool ADD>
inline void strip(int64_t rows, int64_t depth, const float* a, int64_t am, int64_t ak, const float* b, int64_t ldb,
                  float* c, int64_t ldc) {
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    micro<kRows, NR, ADD>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc);
  if constexpr (kRows > 4)
    for (; m + 4 <= rows; m += 4) micro<4, NR, ADD>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc);
  for (; m + 2 <= rows; m += 2) micro<2, NR, ADD>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc);
  if (m < rows) micro<1, NR, ADD>(depth, a + m * am, am, ak, b, ldb, c + m * ldc, ldc);
}

// C[rows][vectors * W] (+)= A B.
template <bool ADD>
inline void product(int64_t rows, int64_t vectors, int64_t depth, const float* a, int64_t am, int64_t ak,
                    const float* b, int64_t ldb, float* c, int64_t ldc) {
  int64_t j = 0;
  for (; j + kVectors <= vectors; j += kVectors)
    strip<kVectors, ADD>(rows, depth, a, am, ak, b + j * W, ldb, c + j * W, ldc);
  for (; j < vectors; ++j) strip<1, ADD>(rows, depth, a, am, ak, b + j * W, ldb, c + j * W, ldc);
}

// S[r][t] = q[r] . k[t] for a few rows: sums along the channels, T tokens at a time so that the adds overlap.
template <int R, int T>
KVQ_KERNEL void dots(const float* q, int64_t ldq, const float* k, int64_t ldk, int64_t dim, int64_t tokens, float* s,
                 int64_t lds) {
  static_assert(R * T % 4 == 0);
  int64_t t = 0;
  for (; t < tokens; t += T) {  // tiles have room for whole steps
    vf sum[R][T];
    KVQ_UNROLL for (int r = 0; r < R; ++r)
      KVQ_UNROLL for (int u = 0; u < T; ++u) sum[r][u] = vf{};
    for (int64_t d = 0; d < dim; d += W) {
      vf row[T];
      KVQ_UNROLL for (int u = 0; u < T; ++u) row[u] = load(k + (t + u) * ldk + d);
      KVQ_UNROLL for (int r = 0; r < R; ++r) {
        const vf x = load(q + r * ldq + d);
        KVQ_UNROLL for (int u = 0; u < T; ++u) sum[r][u] = fma(x, row[u], sum[r][u]);
      }
    }
    KVQ_UNROLL for (int r = 0; r < R; ++r) {
      if constexpr (T % 4 == 0) {
        KVQ_UNROLL for (int u = 0; u < T; u += 4)
          reduce_add4(sum[r][u], sum[r][u + 1], sum[r][u + 2], sum[r][u + 3], s + r * lds + t + u);
      } else {
        KVQ_UNROLL for (int u = 0; u < T; ++u) s[r * lds + t + u] = reduce_add(sum[r][u]);
      }
    }
  }
}

inline void few_dots(int64_t rows, const float* q, int64_t ldq, const float* k, int64_t ldk, int64_t dim,
                     int64_t tokens, float* s, int64_t lds) {
  int64_t r = 0;
#if defined(KVQ_AVX512) || defined(KVQ_NEON)
  for (; r + 4 <= rows; r += 4) dots<4, 4>(q + r * ldq, ldq, k, ldk, dim, tokens, s + r * lds, lds);
#endif
  for (; r + 2 <= rows; r += 2) dots<2, 4>(q + r * ldq, ldq, k, ldk, dim, tokens, s + r * lds, lds);
  if (r < rows) dots<1, 8>(q + r * ldq, ldq, k, ldk, dim, tokens, s + r * lds, lds);
}

}  // namespace kvq
