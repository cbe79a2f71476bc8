"""What stored codes stand for before any scale, as tiles, inside of kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from . import spec as _spec
from .numbers import (
    byte_half,
    e2m1_half,
    e4m3_half,
    e5m2_half,
    look_up,
    nibbles_half,
    normal_entry,
    normal_half,
    quarters_half,
    signed_byte_half,
    threes_half,
    weave4,
    weave8,
    whole_half,
)
from .rows import load_rows

__all__ = ["plain_numbers", "small_codes"]

_SIGNED = tl.constexpr(_spec.SIGNED)
_UNSIGNED = tl.constexpr(_spec.UNSIGNED)
_SHIFTED = tl.constexpr(_spec.SHIFTED)
_E4M3 = tl.constexpr(_spec.E4M3)
_E5M2 = tl.constexpr(_spec.E5M2)
_E2M1 = tl.constexpr(_spec.E2M1)
_TABLE = tl.constexpr(_spec.TABLE)
_NORMAL = tl.constexpr(_spec.NORMAL)


@triton.jit
def words_of_eight(rows, live, DIM: tl.constexpr, DT: tl.constexpr, BOUND: tl.constexpr):
    """Eight 3-bit codes each, int32 ``[BN, DT // 8]``."""
    w = load_rows(rows, live, DIM // 8, DT // 8, 3, BOUND).to(tl.int32)
    w |= load_rows(rows + 1, live, DIM // 8, DT // 8, 3, BOUND).to(tl.int32) << 8
    return w | (load_rows(rows + 2, live, DIM // 8, DT // 8, 3, BOUND).to(tl.int32) << 16)


@triton.jit
def small_codes(rows, live, DIM: tl.constexpr, DT: tl.constexpr, BITS: tl.constexpr, BOUND: tl.constexpr):
    """Packed codes as int32 ``[BN, DT]``."""
    if BITS == 8:
        return load_rows(rows, live, DIM, DT, 1, BOUND).to(tl.int32)
    elif BITS == 4:
        b = load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND).to(tl.int32)
        return tl.interleave(b & 15, b >> 4)
    elif BITS == 2:
        b = load_rows(rows, live, DIM // 4, DT // 4, 1, BOUND).to(tl.int32)
        return weave4(b & 3, (b >> 2) & 3, (b >> 4) & 3, b >> 6)
    else:
        w = words_of_eight(rows, live, DIM, DT, BOUND)
        return weave8(
            w & 7, (w >> 3) & 7, (w >> 6) & 7, (w >> 9) & 7, (w >> 12) & 7, (w >> 15) & 7, (w >> 18) & 7, w >> 21
        )  # fmt: skip


@triton.jit
def table_numbers(codes, codebook, BITS: tl.constexpr, CODE: tl.constexpr, ASM: tl.constexpr):
    if CODE == _NORMAL:
        return normal_entry(codes, BITS)
    else:
        return look_up(codebook, codes, ASM)


@triton.jit
def plain_numbers(
    rows,
    live,
    zero,
    codebook,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    BOUND: tl.constexpr,
    ASM: tl.constexpr,
    NATIVE: tl.constexpr,
    HALF_TABLE: tl.constexpr,
):
    """What codes stand for before any scale, ``[BN, DT]``.

    fp16, but for entries of a table, which are fp32 unless ``HALF_TABLE``; e4m3 (unless ``NATIVE``) times 2**-8, e2m1 times
    2**-14.
    """
    if CODE == _E4M3:
        return e4m3_half(load_rows(rows, live, DIM, DT, 1, BOUND), ASM, NATIVE)
    elif CODE == _E5M2:
        return e5m2_half(load_rows(rows, live, DIM, DT, 1, BOUND))
    elif CODE == _E2M1:
        low, high = e2m1_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND), ASM)
        return tl.interleave(low, high)
    elif CODE == _NORMAL and BITS == 4 and ASM and HALF_TABLE:
        low, high = normal_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND))
        return tl.interleave(low, high)
    elif CODE == _NORMAL and BITS == 3 and ASM and HALF_TABLE:
        a, b, c, d, e, f, g, h = threes_half(words_of_eight(rows, live, DIM, DT, BOUND), True)
        return weave8(a, b, c, d, e, f, g, h)
    elif ((CODE == _SIGNED) | (CODE == _UNSIGNED)) and BITS == 3 and ASM:
        FLIPPED: tl.constexpr = 0x924924 if CODE == _SIGNED else 0
        a, b, c, d, e, f, g, h = threes_half(words_of_eight(rows, live, DIM, DT, BOUND) ^ FLIPPED, False)
        x = weave8(a, b, c, d, e, f, g, h)
        return x - 4.0 if CODE == _SIGNED else x
    elif (CODE == _TABLE) | (CODE == _NORMAL):
        x = table_numbers(small_codes(rows, live, DIM, DT, BITS, BOUND), codebook, BITS, CODE, ASM)
        return x.to(tl.float16) if HALF_TABLE else x
    elif CODE == _SHIFTED:
        codes = small_codes(rows, live, DIM, DT, BITS, BOUND)
        return whole_half((codes + zero) & ((1 << BITS) - 1), zero)
    elif CODE == _SIGNED:
        if BITS == 8:
            return signed_byte_half(load_rows(rows, live, DIM, DT, 1, BOUND), ASM)
        elif BITS == 4:
            low, high = nibbles_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND) ^ 0x88, ASM)
            return tl.interleave(low - 8.0, high - 8.0)
        else:
            HALF: tl.constexpr = 1 << (BITS - 1)
            codes = small_codes(rows, live, DIM, DT, BITS, BOUND)
            return whole_half(codes ^ HALF, HALF)
    elif BITS == 8:
        return byte_half(load_rows(rows, live, DIM, DT, 1, BOUND), ASM)
    elif BITS == 4:
        low, high = nibbles_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND), ASM)
        return tl.interleave(low, high)
    elif BITS == 2:
        a, b, c, d = quarters_half(load_rows(rows, live, DIM // 4, DT // 4, 1, BOUND), ASM)
        return weave4(a, b, c, d)
    else:
        return whole_half(small_codes(rows, live, DIM, DT, BITS, BOUND), 0)
