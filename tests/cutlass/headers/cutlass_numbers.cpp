// Conversions by the number types of CUTLASS's C++ headers.
#include <cstdint>
#include <cutlass/float8.h>
#include <cutlass/float_subbyte.h>

extern "C" {
void to_e4m3(const float* x, uint8_t* out, long n) {
  for (long i = 0; i < n; i++) out[i] = cutlass::float_e4m3_t(x[i]).raw();
}
void to_e2m1(const float* x, uint8_t* out, long n) {
  for (long i = 0; i < n; i += 2)
    out[i / 2] = (cutlass::float_e2m1_t(x[i]).raw() & 15) | (cutlass::float_e2m1_t(x[i + 1]).raw() << 4);
}
void from_e4m3(const uint8_t* x, float* out, long n) {
  for (long i = 0; i < n; i++) out[i] = float(cutlass::float_e4m3_t::bitcast(x[i]));
}
void from_e2m1(const uint8_t* x, float* out, long n) {
  for (long i = 0; i < 2 * n; i++) out[i] = float(cutlass::float_e2m1_t::bitcast((x[i / 2] >> (4 * (i % 2))) & 15));
}
}
