"""Tiles of codes with scales, inside of kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from . import spec as _spec
from .numbers import e4m3_half, power_below
from .rows import at_rows, load_groups, load_rows, load_tokens, spread_groups, spread_tokens
from .sides import (
    BITS_AT,
    CHANNELS_AT,
    KIND_AT,
    MINIMUM_AT,
    OUTER_AT,
    OUTLIERS_AT,
    SHIFT_AT,
    STATIC_AT,
    TOKENS_AT,
)
from .stored import plain_numbers

__all__ = ["put_outliers", "scaled_codes"]

_SHIFTED = tl.constexpr(_spec.SHIFTED)
_E4M3 = tl.constexpr(_spec.E4M3)
_E2M1 = tl.constexpr(_spec.E2M1)
_TABLE = tl.constexpr(_spec.TABLE)
_NORMAL = tl.constexpr(_spec.NORMAL)
_SCALE_E4M3 = tl.constexpr(_spec.SCALE_E4M3)
_SCALE_E8M0 = tl.constexpr(_spec.SCALE_E8M0)


@triton.jit
def scaled_codes(side, place, tile: tl.constexpr, COMPUTE: tl.constexpr, BOUND: tl.constexpr):
    """``load_coded`` for codes with scales and nothing before or behind them but outliers; fp32 numbers with ``COMPUTE`` 0."""
    DIM: tl.constexpr = tile[0]
    DT: tl.constexpr = tile[1]
    BN: tl.constexpr = tile[2]
    SPEC: tl.constexpr = tile[3]
    ASM: tl.constexpr = tile[5]
    NATIVE: tl.constexpr = tile[6]
    SCATTERED: tl.constexpr = tile[7]
    CODE: tl.constexpr = SPEC & 15
    BITS: tl.constexpr = (SPEC >> BITS_AT.value) & 15
    KIND: tl.constexpr = (SPEC >> KIND_AT.value) & 3
    STATIC: tl.constexpr = (SPEC >> STATIC_AT.value) & 1
    MINIMUM: tl.constexpr = (SPEC >> MINIMUM_AT.value) & 1
    OUTER: tl.constexpr = (SPEC >> OUTER_AT.value) & 1
    OUTLIERS: tl.constexpr = (SPEC >> OUTLIERS_AT.value) & 1023
    CHANNELS: tl.constexpr = (SPEC >> CHANNELS_AT.value) & 2047
    TOKENS: tl.constexpr = (SPEC >> TOKENS_AT.value) & 2047
    ALIGN: tl.constexpr = 1 << ((SPEC >> SHIFT_AT.value) & 3)

    (codes, scale, outer, minimum, zero_point, codebook, turns, position, index, value,
     recent, first, coded, length) = side  # fmt: skip
    row, head, slot, rel, live = place
    ones = tl.full((BN,), 1.0, tl.float32)
    low = tl.zeros((BN,), tl.float32)
    zero = 0
    if CODE == _SHIFTED:
        zero = tl.load(zero_point[0] + head * zero_point[1]).to(tl.int32)
    numbers = plain_numbers(
        at_rows(codes, place, SCATTERED), live, zero, codebook, DIM, DT, CODE, BITS, BOUND, ASM, NATIVE, COMPUTE != 0
    )  # fmt: skip
    # What numbers have to be multiplied by beside their scale, and the largest they can be.
    UNIT: tl.constexpr = 256.0 if CODE == _E4M3 and not NATIVE else (16384.0 if CODE == _E2M1 else 1.0)
    FOLDED: tl.constexpr = UNIT if COMPUTE != 0 else 1.0
    TOP: tl.constexpr = (
        448.0 if CODE == _E4M3 else (6.0 if CODE == _E2M1 else (4.0 if CODE == _TABLE else (1 << BITS) * 1.0))
    )
    if COMPUTE == 0:
        # At the edges of fp32 a scale times UNIT is beyond them, where a number times UNIT is what the code stands for.
        numbers = numbers.to(tl.float32) * UNIT
    factor = ones
    if CODE == _NORMAL:
        # Vectors have the length that is stored, whatever the length of their entries.
        wide = tl.where((tl.arange(0, DT) < DIM)[None, :], numbers.to(tl.float32), 0.0)
        square = tl.sum(wide * wide, 1)
        norm = load_tokens(at_rows(scale, place, SCATTERED), live, BOUND)
        factor = norm.to(tl.float32) / tl.sqrt(square)
    elif STATIC:
        factor = ones * (tl.load(scale[0] + head * scale[2]).to(tl.float32) * FOLDED)
    elif CHANNELS == 0:
        factor = load_tokens(at_rows(scale, place, SCATTERED), live, BOUND).to(tl.float32) * FOLDED
        if MINIMUM:
            low = load_tokens(at_rows(minimum, place, SCATTERED), live, BOUND).to(tl.float32)
    else:
        scale = (scale[0], scale[1] * ALIGN, scale[2] * ALIGN, scale[3] * ALIGN)
        minimum = (minimum[0], minimum[1] * ALIGN, minimum[2] * ALIGN, minimum[3] * ALIGN)
        if TOKENS > 1:
            s, m = load_channel_scales(scale, minimum, place, DIM, DT, BN, TOKENS, MINIMUM, BOUND)
            # Here one row of scales, or one for each so many tokens, stands for all of them until it is spread.
            SPAN: tl.constexpr = BN if TOKENS % BN == 0 else (TOKENS if BN % TOKENS == 0 else 1)
            if COMPUTE != 0:
                largest = tl.max(tl.abs(s), 1) * TOP
                if MINIMUM:
                    largest += tl.max(tl.abs(m), 1)
                power, inverse = power_below(largest)
                s = (s * inverse[:, None]).to(tl.float16)
                m = (m * inverse[:, None]).to(tl.float16)
                factor = tl.reshape(tl.broadcast_to(power[:, None], (BN // SPAN, SPAN)), (BN,))
            numbers *= spread_tokens(s, BN // SPAN, SPAN, DT)
            if MINIMUM:
                numbers += spread_tokens(m, BN // SPAN, SPAN, DT)
        else:
            WHOLE: tl.constexpr = CHANNELS & (CHANNELS - 1) == 0
            EACH: tl.constexpr = CHANNELS if CHANNELS < DT else DT
            # Groups that are no power of two are spread by an index for each channel.
            COUNT: tl.constexpr = (DIM + EACH - 1) // EACH if WHOLE else DIM
            PADDED: tl.constexpr = DT // EACH if WHOLE else DT
            s = load_groups(
                at_rows(scale, place, SCATTERED), live, DIM, DT, CHANNELS, COUNT, PADDED, WHOLE, BOUND
            )
            m = s
            if MINIMUM:
                m = load_groups(
                    at_rows(minimum, place, SCATTERED), live, DIM, DT, CHANNELS, COUNT, PADDED, WHOLE, BOUND
                ).to(tl.float32)
            if KIND == _SCALE_E4M3:
                s = e4m3_half(s, False, False)
                outside = 1.0
                if OUTER:
                    outside = tl.load(outer).to(tl.float32)
                if COMPUTE == 0:
                    s = s.to(tl.float32) * 256.0 * outside
                else:
                    # Products of e2m1 and e4m3 are exact in fp16, 2**-14 and 2**6 times what they are.
                    s *= 16384.0
                    factor = ones * (outside * 256.0)
            elif KIND == _SCALE_E8M0:
                exponent = s.to(tl.int32)
                if COMPUTE == 0:
                    s = two_to(exponent)
                else:
                    top = tl.max(exponent, 1)
                    s = (two_to(tl.maximum(exponent - top[:, None] + 127, 0)) * UNIT).to(tl.float16)
                    factor = two_to(top)
            elif COMPUTE != 0:
                s = s.to(tl.float32)
                largest = tl.abs(s) * TOP
                if MINIMUM:
                    largest += tl.abs(m)
                power, inverse = power_below(tl.max(largest, 1))
                s = (s * inverse[:, None]).to(tl.float16)
                m = (m * inverse[:, None]).to(tl.float16)
                factor = power
            else:
                s = s.to(tl.float32)
            if WHOLE:
                numbers *= spread_groups(s, BN, PADDED, EACH)
                if MINIMUM:
                    numbers += spread_groups(m, BN, PADDED, EACH)
            else:
                numbers *= s
                if MINIMUM:
                    numbers += m
    if OUTLIERS > 0:
        numbers = numbers * factor[:, None]
        if MINIMUM and CHANNELS == 0:
            numbers += low[:, None]
        numbers = put_outliers(
            numbers, index, value, place, tl.arange(0, DT), OUTLIERS, SCATTERED, BOUND
        )  # fmt: skip
        factor = ones
        low = tl.zeros((BN,), tl.float32)
    if COMPUTE != 0:
        numbers = numbers.to(tl.float16)
    return numbers, factor, low


@triton.jit
def two_to(exponent):
    """fp32 ``2**(exponent - 127)`` for whole numbers 0..254."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_channel_scales(
    scale,
    minimum,
    place,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    BN: tl.constexpr,
    TOKENS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BOUND: tl.constexpr,
):
    """fp32 scale and minimum of each channel: one row for each group of tokens where groups and tiles fit, else one a token."""
    row, head, slot, rel, live = place
    if TOKENS % BN == 0 or BN % TOKENS == 0:
        GROUPS: tl.constexpr = 1 if TOKENS % BN == 0 else BN // TOKENS
        group = tl.arange(0, GROUPS)
        channel = tl.arange(0, DT)
        inside = (channel < DIM)[None, :]
        if BOUND:
            inside = inside & (tl.max(tl.reshape(live.to(tl.int32), (GROUPS, BN // GROUPS)), 1) > 0)[:, None]
        at = scale[0] + (row * scale[1] + head * scale[2] + (slot // TOKENS) * scale[3])
        s = tl.load(at + (group * scale[3])[:, None] + channel[None, :], mask=inside, other=0).to(tl.float32)
        m = s
        if MINIMUM:
            at = minimum[0] + (row * minimum[1] + head * minimum[2] + (slot // TOKENS) * minimum[3])
            m = tl.load(at + (group * minimum[3])[:, None] + channel[None, :], mask=inside, other=0)
            m = m.to(tl.float32)
        return s, m
    else:
        place = (row, head, 0, (slot + rel) // TOKENS, live)
        s = load_rows(at_rows(scale, place, False), live, DIM, DT, 1, BOUND).to(tl.float32)
        m = s
        if MINIMUM:
            m = load_rows(at_rows(minimum, place, False), live, DIM, DT, 1, BOUND).to(tl.float32)
        return s, m


@triton.jit
def put_outliers(
    x, index, value, place, channel, OUTLIERS: tl.constexpr, SCATTERED: tl.constexpr, BOUND: tl.constexpr
):
    """fp32 ``x [BN, DT]``, of channels ``channel [DT]``, with the values that were kept exactly in their places."""
    live = place[4]
    index_rows = at_rows(index, place, SCATTERED)
    value_rows = at_rows(value, place, SCATTERED)
    for k in tl.static_range(OUTLIERS):
        where = load_tokens(index_rows + k, live, BOUND).to(tl.int32)
        exact = load_tokens(value_rows + k, live, BOUND).to(tl.float32)
        here = channel[None, :] == where[:, None]
        if BOUND:
            here = here & live[:, None]
        x = tl.where(here, exact[:, None], x)
    return x
