"""Tiles of keys that were coded as they were before rotary embedding, turned by their positions, inside of kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import channel_signs, circle, hadamard, hadamard_matrix, look_up, power_below
from .rows import at_rows, load_tokens
from .scaled import put_outliers
from .sides import BITS_AT, LOG_AT, OUTLIERS_AT, ROTARY_AT, ROTATION_AT
from .stored import small_codes

__all__ = ["turn_steps", "load_rotary"]


@triton.jit
def channel_numbers(
    side,
    place,
    channel,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    SCATTERED: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Codebook numbers with a centre and half-range for each channel, at any ``channel [DT]``, fp32."""
    (codes, scale, outer, minimum, zero_point, codebook, turns, position, index, value,
     recent, first, coded, length) = side  # fmt: skip
    row, head, slot, rel, live = place
    inside = channel < DIM
    there = inside[None, :]
    if BOUND:
        there = there & live[:, None]
    bit = channel * BITS
    at = at_rows(codes, place, SCATTERED)[:, None] + (bit // 8)[None, :]
    word = tl.load(at, mask=there, other=0).to(tl.int32)
    if BITS == 3:
        straddles = (bit % 8 > 5)[None, :]
        word |= tl.load(at + 1, mask=there & straddles, other=0).to(tl.int32) << 8
    entry = (word >> (bit % 8)[None, :]) & ((1 << BITS) - 1)
    half_range = tl.load(scale[0] + head * scale[2] + channel, mask=inside, other=0).to(tl.float32)
    centre = tl.load(minimum[0] + head * minimum[2] + channel, mask=inside, other=0).to(tl.float32)
    x = tl.load(codebook + entry) * half_range[None, :] + centre[None, :]
    return put_outliers(x, index, value, place, channel, OUTLIERS, SCATTERED, BOUND)


@triton.jit
def half_numbers(
    side,
    place,
    share,
    tile: tl.constexpr,
    FROM: tl.constexpr,
    HALF: tl.constexpr,
    OUTLIERS: tl.constexpr,
    BOUND: tl.constexpr,
):
    """The same times ``share`` at the ``HALF`` channels from ``FROM`` on, a power of two; their codes are loaded in one go."""
    SPEC: tl.constexpr = tile[3]
    SCATTERED: tl.constexpr = tile[7]
    BITS: tl.constexpr = (SPEC >> BITS_AT.value) & 15
    (codes, scale, outer, minimum, zero_point, codebook, turns, position, index, value,
     recent, first, coded, length) = side  # fmt: skip
    row, head, slot, rel, live = place
    channel = FROM + tl.arange(0, HALF)
    entry = small_codes(at_rows(codes, place, SCATTERED) + FROM * BITS // 8, live, HALF, HALF, BITS, BOUND)
    half_range = tl.load(scale[0] + head * scale[2] + channel).to(tl.float32) * share
    centre = tl.load(minimum[0] + head * minimum[2] + channel).to(tl.float32) * share
    x = look_up(codebook, entry, tile[5]) * half_range[None, :] + centre[None, :]
    return put_outliers(x, index, value, place, channel, OUTLIERS, SCATTERED, BOUND)


@triton.jit
def turn_steps(inv_freq, scale, minimum, codebook, DIM: tl.constexpr, DT: tl.constexpr, SPEC: tl.constexpr):
    """By how much channels turn with each position, in ``2**-64`` of a turn, as an upper and a lower uint32: for one channel of
    each pair where halves of ``DIM`` are loaded, else for all ``DT``. Sums wrap around, so no position is too large. And the
    largest that a coded key can be, from half-ranges and centres of its head, to which ``scale`` and ``minimum`` point.
    """
    if (SPEC >> ROTARY_AT.value) & 1:
        HALVES: tl.constexpr = DIM == DT
        HALF: tl.constexpr = DIM // 2
        channel = tl.arange(0, DT // 2 if HALVES else DT)
        pair = tl.where(channel < HALF, channel, channel - HALF)
        inside = channel < DIM
        frequency = tl.load(inv_freq + pair, mask=inside, other=0.0).to(tl.float64) * 0.15915494309189535
        step = ((frequency - tl.floor(frequency)) * 1152921504606846976.0).to(tl.int64) << 4
        entry = tl.max(tl.abs(tl.load(codebook + tl.arange(0, 1 << ((SPEC >> BITS_AT.value) & 15)))), 0)
        bound = entry * 0.0
        if HALVES:
            for half in tl.static_range(2):
                at = half * HALF + channel
                bound += tl.abs(tl.load(scale + at).to(tl.float32)) * entry
                bound += tl.abs(tl.load(minimum + at).to(tl.float32))
        upper = (step >> 32).to(tl.int32).to(tl.uint32, bitcast=True)
        return upper, step.to(tl.uint32), tl.max(bound, 0) if HALVES else bound
    else:
        return inv_freq, inv_freq, inv_freq


@triton.jit
def turned(turns, at, BN: tl.constexpr, WIDTH: tl.constexpr, FAST: tl.constexpr):
    """Sine and cosine for tokens at positions ``at - 1``, ``[BN, WIDTH]``."""
    times = tl.broadcast_to((at - 1).to(tl.uint32, bitcast=True)[:, None], (BN, WIDTH))
    lower = tl.broadcast_to(turns[1][None, :], (BN, WIDTH))
    return circle(times * turns[0][None, :] + tl.umulhi(times, lower), FAST)


@triton.jit
def load_rotary(side, place, tile: tl.constexpr, BOUND: tl.constexpr):
    """Keys as they are attended to: numbers and factors as of a tile."""
    DIM: tl.constexpr = tile[0]
    DT: tl.constexpr = tile[1]
    BN: tl.constexpr = tile[2]
    SPEC: tl.constexpr = tile[3]
    COMPUTE: tl.constexpr = tile[4]
    ASM: tl.constexpr = tile[5]
    SCATTERED: tl.constexpr = tile[7]
    BITS: tl.constexpr = (SPEC >> BITS_AT.value) & 15
    OUTLIERS: tl.constexpr = (SPEC >> OUTLIERS_AT.value) & 1023
    ROTATION: tl.constexpr = (SPEC >> ROTATION_AT.value) & 3
    LOG: tl.constexpr = (SPEC >> LOG_AT.value) & 15
    HALF: tl.constexpr = DIM // 2
    FAST: tl.constexpr = ASM and COMPUTE != 0
    (codes, scale, outer, minimum, zero_point, codebook, turns, position, index, value,
     recent, first, coded, length) = side  # fmt: skip
    # Positions are counted from one; where nothing was stored there is zero.
    at = load_tokens(at_rows(position, place, SCATTERED), place[4], BOUND).to(tl.int32)
    there = at > 0
    if DIM == DT:
        # Where coded keys are the parts that are turned, it is known how large they can be.
        KNOWN: tl.constexpr = OUTLIERS == 0 and ROTATION == 0
        share = 1.0
        if COMPUTE != 0 and KNOWN:
            power, share = power_below(turns[2])
        a = half_numbers(side, place, share, tile, 0, HALF, OUTLIERS, BOUND)
        b = half_numbers(side, place, share, tile, HALF, HALF, OUTLIERS, BOUND)
        if ROTATION != 0:
            x = tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (BN, DT))
            x = hadamard(x, BN, DT, LOG, (1 << LOG) ** -0.5)
            if ROTATION == 2:
                x *= channel_signs(tl.arange(0, DT))[None, :]
            a, b = tl.split(tl.permute(tl.reshape(x, (BN, 2, HALF)), (0, 2, 1)))
        sine, cosine = turned(turns, at, BN, HALF, FAST)
        x = a * cosine - b * sine
        y = b * cosine + a * sine
        if COMPUTE == 0:
            x = tl.where(there[:, None], x, 0.0)
            y = tl.where(there[:, None], y, 0.0)
            factor = tl.full((BN,), 1.0, tl.float32)
        else:
            if not KNOWN:
                power, share = power_below(tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 1))
                x *= share[:, None]
                y *= share[:, None]
            x = x.to(tl.float16)
            y = y.to(tl.float16)
            factor = tl.where(there, power, 0.0)
        return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), (BN, DT)), factor
    else:
        channel = tl.arange(0, DT)
        partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
        x = channel_numbers(side, place, channel, DIM, BITS, OUTLIERS, SCATTERED, BOUND)
        if ROTATION == 0:
            y = channel_numbers(side, place, partner, DIM, BITS, OUTLIERS, SCATTERED, BOUND)
        else:
            NORM: tl.constexpr = (1 << LOG) ** -0.5
            x = tl.where((channel < DIM)[None, :], x, 0.0)
            own = hadamard_matrix(channel[:, None], channel[None, :], LOG, NORM)
            other = hadamard_matrix(channel[:, None], partner[None, :], LOG, NORM)
            if ROTATION == 2:
                own *= channel_signs(channel)[None, :]
                other *= channel_signs(partner)[None, :]
            y = tl.dot(x, other, input_precision="ieee")
            x = tl.dot(x, own, input_precision="ieee")
        sine, cosine = turned(turns, at, BN, DT, FAST)
        sine = tl.where((channel < HALF)[None, :], -sine, sine)
        x = tl.where(there[:, None], x * cosine + y * sine, 0.0)
        if COMPUTE == 0:
            return x, tl.full((BN,), 1.0, tl.float32)
        else:
            power, inverse = power_below(tl.max(tl.abs(x), 1))
            return (x * inverse[:, None]).to(tl.float16), power
