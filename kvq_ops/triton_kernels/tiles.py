"""Loading a tile of stored tokens inside of a kernel: codes, scales and whatever else a format has, as numbers.

A tile is

    numbers [BN, DT], factor [BN], low [BN]:    value[n, d] = numbers[n, d] * factor[n] + low[n]

so that what all channels of a token share never touches the tile: attention multiplies scores, or weights, by ``factor`` and adds
``low`` once for each token. Numbers are fp32, or fp16 where tensor cores take them (``COMPUTE``). In fp16 nothing overflows and
nothing but tiny numbers beside large ones is lost:

* codes that share a scale for each token are whole numbers up to 255 or float8, which fp16 holds exactly;
* where channels have scales of their own (groups, blocks, per channel), or come exact, a token is divided by a power of two near
  the largest magnitude it can have, which becomes its ``factor``. A number is then off by at most one rounding of fp16 for each
  operation, and by 2**-25 of the token's largest.

All functions here take

* ``side``: planes with strides, see :mod:`.sides`;
* ``place``: which tokens, see :mod:`.rows`;
* ``tile``, a tuple of constants ``(DIM, DT, BN, SPEC, COMPUTE, ASM, NATIVE, SCATTERED)``: channels; the same filled up to a
  power of two with whatever codes of zero stand for; tokens; the format (:func:`.sides.packed_spec`); 0 for fp32 numbers, 1
  for fp16, 2 for bf16 (plainly stored bf16 only); whether PTX may be used; whether there are float8 conversions; whether
  tokens lie in rows of their own;
* ``BOUND``: whether only live tokens may be read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import spec as _spec
from .numbers import channel_signs, hadamard, power_below
from .rotary import load_rotary
from .rows import at_rows, load_rows
from .scaled import scaled_codes
from .sides import CHANNELS_AT, LOG_AT, MINIMUM_AT, OUTLIERS_AT, ROTARY_AT, ROTATION_AT, SINKS_AT, WINDOWED_AT

__all__ = ["load_any", "load_coded"]

_EXACT = tl.constexpr(_spec.EXACT)


@triton.jit
def load_coded(side, place, tile: tl.constexpr, BOUND: tl.constexpr):
    """A tile of coded (or plainly stored) tokens, see the module."""
    DIM: tl.constexpr = tile[0]
    DT: tl.constexpr = tile[1]
    BN: tl.constexpr = tile[2]
    SPEC: tl.constexpr = tile[3]
    COMPUTE: tl.constexpr = tile[4]
    SCATTERED: tl.constexpr = tile[7]
    if SPEC & 15 == _EXACT:
        codes = side[0]
        ones = tl.full((BN,), 1.0, tl.float32)
        low = tl.zeros((BN,), tl.float32)
        x = load_rows(at_rows(codes, place, SCATTERED), place[4], DIM, DT, 1, BOUND)
        if COMPUTE == 0:
            return x.to(tl.float32), ones, low
        elif COMPUTE == 2 or x.dtype == tl.float16:
            return x, ones, low
        else:
            numbers, factor = normalised(x.to(tl.float32))
            return numbers, factor, low
    elif (SPEC >> ROTARY_AT.value) & 1:
        numbers, factor = load_rotary(side, place, tile, BOUND)
        return numbers, factor, tl.zeros((BN,), tl.float32)
    elif ((SPEC >> OUTLIERS_AT.value) & 1023) > 0 and COMPUTE != 0:
        # An outlier may be any number of times as large as what the codes hold.
        x, factor, low = scaled_codes(side, place, tile, 0, BOUND)
        numbers, factor = normalised(x)
        return numbers, factor, low
    else:
        return scaled_codes(side, place, tile, COMPUTE, BOUND)


@triton.jit
def normalised(x):
    """fp32 ``[BN, D]`` as fp16 times a power of two for each row."""
    power, inverse = power_below(tl.max(tl.abs(x), 1))
    return (x * inverse[:, None]).to(tl.float16), power


@triton.jit
def exact_numbers(
    rows, held, DIM: tl.constexpr, DT: tl.constexpr, BN: tl.constexpr, ROTATE: tl.constexpr, LOG: tl.constexpr
):
    """Tokens that wait to be coded, fp32 ``[BN, DT]``: NaN reads as zero, an infinity as the largest number."""
    x = load_rows(rows, held, DIM, DT, 1, True)
    wide = x.to(tl.float32)
    TOP: tl.constexpr = (
        65504.0
        if x.dtype == tl.float16
        else (3.3895313892515355e38 if x.dtype == tl.bfloat16 else 3.4028234663852886e38)
    )
    wide = tl.where(wide == wide, tl.minimum(tl.maximum(wide, -TOP), TOP), 0.0)
    if ROTATE != 0:
        NORM: tl.constexpr = (1 << LOG) ** -0.5
        if ROTATE == 2:
            wide *= channel_signs(tl.arange(0, DT))[None, :]
        wide = hadamard(wide, BN, DT, LOG, NORM)
    return wide


@triton.jit
def load_turned(side, place, tile: tl.constexpr, ROTATED: tl.constexpr):
    """:func:`load_coded` with bounds; rotated back unless ``ROTATED``."""
    DT: tl.constexpr = tile[1]
    BN: tl.constexpr = tile[2]
    SPEC: tl.constexpr = tile[3]
    ROTATION: tl.constexpr = (SPEC >> ROTATION_AT.value) & 3
    numbers, factor, low = load_coded(side, place, tile, True)
    if ROTATION != 0 and not ROTATED and not ((SPEC >> ROTARY_AT.value) & 1):
        x = numbers * factor[:, None]
        if ((SPEC >> MINIMUM_AT.value) & 1) and ((SPEC >> CHANNELS_AT.value) & 2047) == 0:
            x += low[:, None]
        # What lies beyond the last channel stays out of the others: they are rotated in blocks.
        LOG: tl.constexpr = (SPEC >> LOG_AT.value) & 15
        x = hadamard(x, BN, DT, LOG, (1 << LOG) ** -0.5)
        if ROTATION == 2:
            x *= channel_signs(tl.arange(0, DT))[None, :]
        return x, tl.full((BN,), 1.0, tl.float32), tl.zeros((BN,), tl.float32)
    else:
        return numbers, factor, low


@triton.jit
def load_any(side, place, window, first_tokens, tile: tl.constexpr, ROTATED: tl.constexpr):
    """As :func:`load_coded` with bounds for any tokens, those of a window that are exact included.

    Args:
        window: tokens in the ring.
        first_tokens: how many first tokens are exact.
        ROTATED: stay in the space in which tokens are coded, and rotate exact ones into it. Otherwise, in fp32, rotate back.
    """
    SPEC: tl.constexpr = tile[3]
    if (SPEC >> WINDOWED_AT.value) & 1:
        DIM: tl.constexpr = tile[0]
        DT: tl.constexpr = tile[1]
        BN: tl.constexpr = tile[2]
        COMPUTE: tl.constexpr = tile[4]
        ROTATION: tl.constexpr = (SPEC >> ROTATION_AT.value) & 3
        TURN: tl.constexpr = ROTATION if ROTATED and not ((SPEC >> ROTARY_AT.value) & 1) else 0
        LOG: tl.constexpr = (SPEC >> LOG_AT.value) & 15
        (codes, scale, outer, minimum, zero_point, codebook, turns, position, index, value,
         recent, first, coded, length) = side  # fmt: skip
        row, head, slot, rel, live = place
        token = slot + rel
        count = tl.load(coded + row)
        held = live & (token < tl.load(length + row))
        ours = live & (token < count)
        numbers, factor, low = load_turned(side, (row, head, slot, rel, ours), tile, ROTATED)
        waits = held & (token >= count) & (token < count + window)
        ring = at_rows(recent, (row, head, 0, token % window, waits), False)
        x = exact_numbers(ring, waits, DIM, DT, BN, TURN, LOG)
        if (SPEC >> SINKS_AT.value) & 1:
            start = held & (token < first_tokens)
            y = exact_numbers(
                at_rows(first, (row, head, 0, token, start), False), start, DIM, DT, BN, TURN, LOG
            )
            x = tl.where(start[:, None], y, x)
            waits = waits | start
        # What is neither coded nor waits reads as zero.
        exact = waits | ~ours
        if COMPUTE == 0:
            numbers = tl.where(exact[:, None], x, numbers)
            factor = tl.where(exact, 1.0, factor)
        else:
            x, power = normalised(x)
            numbers = tl.where(exact[:, None], x, numbers)
            factor = tl.where(exact, power, factor)
        return numbers, factor, tl.where(exact, 0.0, low)
    else:
        return load_turned(side, place, tile, ROTATED)
