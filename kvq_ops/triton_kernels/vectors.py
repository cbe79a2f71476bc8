"""Vectors before they are coded, inside of Triton kernels: turned back, rotated, relieved of outliers."""

from __future__ import annotations

import triton
import triton.language as tl

from .floats import finite_or_zero, nan_to_zero, product
from .numbers import channel_signs, hadamard
from .places import load_numbers

__all__ = ["prepared", "take_outliers"]

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


@triton.jit
def rotate(
    x,
    channel,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    LOG: tl.constexpr,
    NORM: tl.constexpr,
    KIND: tl.constexpr,
):
    """Vectors ``[ROWS, WIDTH]`` as ``kvq_ops.codecs.rotation`` rotates them; infinite results stay."""
    if KIND == 2:
        x = x * channel_signs(channel)[None, :]
    x = hadamard(x, ROWS, WIDTH, LOG, 1.0)
    return product(x, tl.full([1, 1], NORM, tl.float32))


@triton.jit
def _lower_median(x, present):
    """Of each row the lower median of what is ``present`` and not NaN, within the finite range; zero where there is nothing."""
    bits = x.to(tl.int32, bitcast=True)
    there = present & ((bits & 0x7FFFFFFF) <= 0x7F800000)
    # Numbers in the order of these integers, found bit by bit: the largest with at most ``rank`` numbers below it.
    key = (bits ^ tl.where(bits < 0, -1, -2147483648)).to(tl.uint32, bitcast=True).to(tl.int64)
    key = tl.where(there, key, 1 << 32)
    count = tl.sum(there.to(tl.int32), 1)
    rank = tl.maximum(count - 1, 0) // 2
    found = count.to(tl.int64) * 0
    for i in range(32):
        candidate = found | (tl.full([1], 1, tl.int64) << (31 - i))
        below = tl.sum((key < candidate[:, None]).to(tl.int32), 1)
        found = tl.where(below <= rank, candidate, found)
    found = found.to(tl.uint32).to(tl.int32, bitcast=True)
    median = (found ^ tl.where(found < 0, -2147483648, -1)).to(tl.float32, bitcast=True)
    median = tl.minimum(tl.maximum(median, -LARGEST_FLOAT), LARGEST_FLOAT)
    return tl.where(count > 0, median, 0.0)


@triton.jit
def take_outliers(
    x,
    channel,
    centre,
    half_range,
    INDEX,
    VALUE,
    index_at,
    value_at,
    index_step,
    value_step,
    keep,
    COUNT: tl.constexpr,
    CENTRED: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    STORE: tl.constexpr,
):
    """Put NaN in the places of the ``COUNT`` values of each vector that lie farthest out, and store them.

    See ``kvq_ops.codecs.outliers``.

    Args:
        x: fp32 ``[R, WIDTH]``.
        centre, half_range: of channels, fp32 ``[R, WIDTH]``, where ``CENTRED`` is 2.
        index_at, value_at: offsets of the first index and value of each vector.
        LARGEST: number that the plane of values holds.
    """
    present = channel[None, :] < DIM
    if CENTRED == 1:
        away = tl.abs(x - _lower_median(x, present)[:, None])
    elif CENTRED == 2:
        away = tl.abs(x - centre)
        away = tl.where(away == 0.0, 0.0, tl.div_rn(away, half_range))
    else:
        away = tl.abs(x)
    away = tl.where(away != away, -1.0, away)
    away = tl.where(present & (x == x), away, tl.where(present, -1.0, -3.0))
    taken = away < -4.0
    for _ in range(COUNT):
        farthest = tl.max(away, 1)
        first = tl.min(tl.where(away == farthest[:, None], channel[None, :], WIDTH), 1)
        this = channel[None, :] == first[:, None]
        taken = taken | this
        away = tl.where(this, -2.0, away)
    if STORE:
        # One after the other, so that no address depends on the values: graphs would take what gives them for written.
        value = tl.minimum(tl.maximum(nan_to_zero(x), -LARGEST), LARGEST)
        rest = taken
        for k in range(COUNT):
            first = tl.min(tl.where(rest, channel[None, :], WIDTH), 1)
            this = channel[None, :] == first[:, None]
            rest = rest & (channel[None, :] != first[:, None])
            tl.store(INDEX + index_at + k * index_step, first.to(tl.int16), mask=keep)
            kept = tl.sum(tl.where(this, value, -0.0), 1)
            tl.store(VALUE + value_at + k * value_step, kept.to(VALUE.dtype.element_ty), mask=keep)
    return tl.where(taken, float("nan"), x)


@triton.jit
def prepared(
    b,
    h,
    i,
    position,
    start,
    live,
    X,
    x_b,
    x_h,
    x_t,
    x_d,
    RING,
    ring_b,
    ring_h,
    ring_t,
    ring_d,
    COS,
    SIN,
    angle_b,
    angle_t,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    ROTARY: tl.constexpr,
    ROTATION: tl.constexpr,
    LOG: tl.constexpr,
    NORM: tl.constexpr,
):
    """Whole vectors ``[ROWS, WIDTH]`` in the space in which they are coded; zero beyond ``DIM`` and where not ``live``."""
    channel = tl.arange(0, WIDTH)
    mask = live[:, None] & (channel < DIM)[None, :]
    x = load_numbers(
        b,
        h,
        i,
        position,
        start,
        channel[None, :],
        mask,
        X,
        x_b,
        x_h,
        x_t,
        x_d,
        RING,
        ring_b,
        ring_h,
        ring_t,
        ring_d,
        WINDOW,
    )
    if ROTARY:
        HALF: tl.constexpr = DIM // 2
        upper = channel >= HALF
        partner = tl.where(upper, channel - HALF, channel + HALF)
        y = load_numbers(
            b,
            h,
            i,
            position,
            start,
            partner[None, :],
            mask,
            X,
            x_b,
            x_h,
            x_t,
            x_d,
            RING,
            ring_b,
            ring_h,
            ring_t,
            ring_d,
            WINDOW,
        )
        at = (b.to(tl.int64) * angle_b + i.to(tl.int64) * angle_t)[:, None] + tl.where(
            upper, channel - HALF, channel
        )[None, :]
        cos = tl.load(COS + at, mask=mask, other=1.0)
        sin = tl.load(SIN + at, mask=mask, other=0.0)
        sin = tl.where(upper[None, :], -sin, sin)
        x = product(finite_or_zero(x), cos) + product(finite_or_zero(y), sin)
    if ROTATION:
        x = rotate(finite_or_zero(x), channel, ROWS, WIDTH, LOG, NORM, ROTATION)
    return x
