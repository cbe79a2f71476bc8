// Conversions as CUDA's own headers do them on a host.
#include <cstdint>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

extern "C" {
void to_e4m3(const float* x, uint8_t* out, long n) {
  for (long i = 0; i < n; i++) out[i] = __nv_cvt_float_to_fp8(x[i], __NV_SATFINITE, __NV_E4M3);
}
void to_e2m1(const float* x, uint8_t* out, long n) {
  for (long i = 0; i < n; i += 2)
    out[i / 2] = __nv_cvt_float2_to_fp4x2(float2{x[i], x[i + 1]}, __NV_E2M1, cudaRoundNearest);
}
void from_e4m3(const uint8_t* x, float* out, long n) {
  for (long i = 0; i < n; i++) {
    __nv_fp8_e4m3 value;
    value.__x = x[i];
    out[i] = float(value);
  }
}
void from_e2m1(const uint8_t* x, float* out, long n) {
  for (long i = 0; i < 2 * n; i++) {
    __nv_fp4_e2m1 value;
    value.__x = (x[i / 2] >> (4 * (i % 2))) & 15;
    out[i] = float(value);
  }
}
}
