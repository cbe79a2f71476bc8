"""Number formats of the machine: rounding to and from small floats, as the PTX ISA defines ``cvt``.

Everything is a table or exact float64 arithmetic; the tests compare it with torch's own conversions over all bit patterns.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "bf16_bits",
    "bf16_values",
    "f16_bits",
    "f16_values",
    "flush",
    "fma32",
    "fma64",
    "small_bits",
]

_POSITIVE_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([_POSITIVE_E2M1, -_POSITIVE_E2M1]).astype(np.float32)


def _table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    codes = np.arange(1 << (exponent_bits + mantissa_bits))
    exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return np.concatenate([value, -value]).astype(np.float32)


E4M3 = _table(4, 3, 7)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _table(5, 2, 15)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan

# Kind: (values by code, number of finite non-negative codes, code of NaN without its sign, bit of the sign).
_SMALL = {
    "e2m1": (E2M1, 8, 7, 3),
    "e4m3": (E4M3, 0x7F, 0x7F, 7),
    "e5m2": (E5M2, 0x7C, 0x7F, 7),
}


def small_bits(x: np.ndarray, kind: str) -> np.ndarray:
    """``cvt.rn.satfinite``: nearest, ties to the even code, saturating; NaN becomes a positive NaN, or 6 in e2m1."""
    table, count, nan, sign = _SMALL[kind]
    positive = table[:count].astype(np.float64)
    middles = (positive[:-1] + positive[1:]) / 2
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(x.astype(np.float64))
    code = np.searchsorted(middles, magnitude, side="left")
    inside = np.minimum(code, count - 2)
    tie = (code < count - 1) & (middles[inside] == magnitude) & (code % 2 == 1)
    code = (code + tie) | (np.signbit(x).astype(np.int64) << sign)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def f16_values(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def f16_bits(x: np.ndarray, *, saturate: bool = False) -> np.ndarray:
    if saturate:
        x = np.where(np.isnan(x), x, np.clip(x, -65504.0, 65504.0))
    with np.errstate(over="ignore"):
        half = x.astype(np.float16)
    return np.where(np.isnan(half), np.uint16(0x7FFF), half.view(np.uint16))


def flush(x: np.ndarray) -> np.ndarray:
    """``.ftz``: fp32 subnormals become zeros of their sign."""
    tiny = np.abs(x) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), x), x) if tiny.any() else x


def fma32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` rounded once. The product is exact in float64; their sum is repaired where it would round twice."""
    product = a.astype(np.float64) * b.astype(np.float64)
    wide = np.asarray(product + c)
    bits = wide.view(np.uint64)
    # Only a float64 half way between two fp32 numbers (normal or, at most as many bits, subnormal) can go wrong.
    suspicious = np.isfinite(wide) & ((bits & np.uint64(0xFFFFFFF)) == 0)
    if suspicious.any():
        back = wide - product
        lost = (product - (wide - back)) + (c - back)
        even = (bits & np.uint64(1)) == 0
        # Round to odd: the truncated sum with its last bit set stands for whatever was lost.
        up = suspicious & (lost != 0) & even & ((lost > 0) == (wide > 0))
        down = suspicious & (lost != 0) & even & ((lost > 0) != (wide > 0))
        bits = np.where(up, bits + np.uint64(1), np.where(down, bits - np.uint64(1), bits))
        wide = bits.view(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        return wide.astype(np.float32)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    def halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = x * (2.0**27 + 1)
        high = wide - (wide - x)
        return high, x - high

    product, (a1, a2), (b1, b2) = a * b, halves(a), halves(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def fma64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """``a * b + c`` rounded once, where nothing overflows or is subnormal on the way (Boldo and Melquiond 2008, "Emulation of a
    FMA and correctly-rounded sums: proved algorithms using rounding to odd")."""
    high, low = _two_product(a, b)
    middle, rest = _two_sum(c, low)
    top, tail = _two_sum(high, middle)
    small, lost = _two_sum(rest, tail)
    bits = small.view(np.uint64)
    even = (lost != 0) & ((bits & np.uint64(1)) == 0)
    toward = np.where((lost > 0) == (small > 0), 1, -1).astype(np.int64)
    odd = np.where(even, (bits.view(np.int64) + toward).view(np.uint64), bits).view(np.float64)
    return np.where(np.isfinite(top), top + odd, a * b + c)
