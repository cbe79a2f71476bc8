"""Rounding to small floats inside of Triton kernels, by operations that are exact everywhere.

Hardware differs: sm_80 has no conversion to float8, sm_89 rounds twice in Triton before 3.9, gfx942 has float8 of another
definition. So codes are made by integer operations on the bits of fp32, ties to even, with the clamps named. Division is IEEE
division. Nothing here can be changed by a compiler that makes one ``fma`` of a product and a sum: where a product that is
added to must be rounded first, it is computed by :func:`product`.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "e4m3_bits",
    "e4m3_number",
    "e2m1_bits",
    "e5m2_bits",
    "finite_or_zero",
    "is_finite",
    "nan_to_zero",
    "power_of_two",
    "product",
    "round_even",
    "safe_divide",
]


@triton.jit
def is_finite(x):
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000


@triton.jit
def finite_or_zero(x):
    return tl.where(is_finite(x), x, 0.0)


@triton.jit
def nan_to_zero(x):
    """Infinities stay, and saturate later."""
    return tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000, 0.0, x)


@triton.jit
def safe_divide(x, scale):
    """``x / scale`` as IEEE divides, and zero where the scale is zero."""
    usable = scale != 0.0
    return tl.where(usable, tl.div_rn(x, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def product(x, y):
    """``x * y`` in fp32, rounded: the exact product in fp64, which no compiler can draw into a sum of fp32 numbers."""
    return (x.to(tl.float64) * y.to(tl.float64)).to(tl.float32)


@triton.jit
def round_even(x, low, high):
    """The nearest whole number within ``low..high`` (whole, at most 2**22), ties to even.

    Clamping comes first, which gives the same, so that the sum with 1.5 * 2**23 meets no product. Beyond it numbers are whole.
    """
    x = tl.minimum(tl.maximum(x, low), high)
    return (x + 12582912.0) - 12582912.0


@triton.jit
def e4m3_bits(x):
    """fp32 -> e4m3fn bits (int32), beyond 448 as 448, NaN as 0x7f."""
    u = x.to(tl.int32, bitcast=True)
    a = u & 0x7FFFFFFF
    clamped = tl.minimum(a, 0x43E00000)
    normal = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # 2**14 has steps of 2**-9, those of subnormal codes: the sum rounds, and its last bits are the code.
    small = (clamped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    bits = tl.where(clamped < 0x3C800000, small, normal)  # 2**-6
    bits = tl.where(a > 0x7F800000, 0x7F, bits)
    return bits | ((u >> 24) & 0x80)


@triton.jit
def e5m2_bits(x):
    """fp32 -> e5m2 bits (int32), beyond 57344 as 57344, NaN as 0x7f."""
    u = x.to(tl.int32, bitcast=True)
    a = u & 0x7FFFFFFF
    clamped = tl.minimum(a, 0x47600000)
    normal = ((clamped + 0xFFFFF + ((clamped >> 21) & 1)) >> 21) - ((127 - 15) << 2)
    small = (clamped.to(tl.float32, bitcast=True) + 128.0).to(
        tl.int32, bitcast=True
    ) - 0x43000000  # steps of 2**-16
    bits = tl.where(clamped < 0x38800000, small, normal)  # 2**-14
    bits = tl.where(a > 0x7F800000, 0x7F, bits)
    return bits | ((u >> 24) & 0x80)


@triton.jit
def e4m3_number(bits):
    """e4m3fn bits (int32, no NaN, sign clear) -> fp32."""
    normal = ((bits << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)
    return tl.where(bits < 8, bits.to(tl.float32) * 0.001953125, normal)


@triton.jit
def e2m1_bits(x):
    """fp32 -> e2m1 code (int32): ties to the even code, beyond 6 as 6. NaN is not expected."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def power_of_two(exponent):
    """``2**exponent`` in fp32 for -127..127, the first of them subnormal."""
    bits = tl.where(exponent < -126, 0x00400000, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)
