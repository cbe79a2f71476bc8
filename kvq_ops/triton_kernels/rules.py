"""Numbers to codes inside of Triton kernels: the rules of ``kvq_ops.codecs``, operation by operation.

A tile ``[M, G]`` holds in each row the numbers that share a scale: a group of channels, a whole vector, or one channel of a group
of tokens. Whatever the format, :func:`encode_tile` gives codes as whole numbers and the parameters of each row, and
:func:`store_codes` packs them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import spec
from .floats import (
    e2m1_bits,
    e4m3_bits,
    e4m3_number,
    e5m2_bits,
    is_finite,
    nan_to_zero,
    power_of_two,
    round_even,
    safe_divide,
)

__all__ = ["encode_tile", "static_parameters", "store_codes"]

SYMMETRIC = tl.constexpr(spec.SYMMETRIC)
ASYMMETRIC = tl.constexpr(spec.ASYMMETRIC)
FLOAT8 = tl.constexpr(spec.FLOAT8)
NVFP4 = tl.constexpr(spec.NVFP4)
MX = tl.constexpr(spec.MX)
CODEBOOK = tl.constexpr(spec.CODEBOOK)
NORMED = tl.constexpr(spec.NORMED)
E4M3 = tl.constexpr(spec.E4M3)
E5M2 = tl.constexpr(spec.E5M2)
E2M1 = tl.constexpr(spec.E2M1)

SMALLEST = tl.constexpr(1e-8)  # a smaller largest magnitude counts as this
INTEGER_EDGE = tl.constexpr(3.4028234663852886e38 * (0.5 - 2**-8))  # keeps max - min finite
CODEBOOK_EDGE = tl.constexpr(3.4028234663852886e38 / 4)
LARGEST_HALF = tl.constexpr(65504.0)

# Midpoints above zero between the entries of the tables for N(0, 1), rounded to fp32 as those of kvq_ops.codecs.codebook are.
NORMAL_MIDPOINTS_2 = tl.constexpr((0.9815987944602966,))
NORMAL_MIDPOINTS_3 = tl.constexpr((0.5005497336387634, 1.049957275390625, 1.7479274272918701))
NORMAL_MIDPOINTS_4 = tl.constexpr(
    (
        0.25822165608406067, 0.5224037170410156, 0.7995498180389404, 1.0992858409881592,
        1.4371387958526611, 1.843531847000122, 2.400803327560425,
    )
)  # fmt: skip


@triton.jit
def _largest_code(CODE: tl.constexpr, BITS: tl.constexpr):
    if CODE == E4M3:
        return 448.0
    elif CODE == E5M2:
        return 57344.0
    elif CODE == E2M1:
        return 6.0
    else:
        return (1 << (BITS - 1)) - 1.0


@triton.jit
def _amax(x, finite):
    return tl.max(tl.where(finite, tl.abs(x), 0.0), 1)


@triton.jit
def _extremes(x, finite, EDGE: tl.constexpr):
    """Lowest and highest of the ``finite`` values of each row, within ``EDGE``; zeros where there are none."""
    x = tl.minimum(tl.maximum(x, -EDGE), EDGE)
    low = tl.min(tl.where(finite, x, float("inf")), 1)
    high = tl.max(tl.where(finite, x, float("-inf")), 1)
    empty = high < low
    return tl.where(empty, 0.0, low), tl.where(empty, 0.0, high)


@triton.jit
def _normal_codes(z, BITS: tl.constexpr):
    midpoints: tl.constexpr = (
        NORMAL_MIDPOINTS_2 if BITS == 2 else NORMAL_MIDPOINTS_3 if BITS == 3 else NORMAL_MIDPOINTS_4
    )
    code = (z > 0.0).to(tl.int32)
    for i in tl.static_range((1 << (BITS - 1)) - 1):
        code += (z > midpoints[i]).to(tl.int32) + (z > -midpoints[i]).to(tl.int32)
    return code


@triton.jit
def encode_tile(
    x,
    valid,
    fixed,
    second,
    BOOK,
    book_step,
    ROOT: tl.constexpr,
    RULE: tl.constexpr,
    CODE: tl.constexpr,
    BITS: tl.constexpr,
    STATIC: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    PARAMETER: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Codes of a tile.

    Args:
        x: fp32 ``[M, G]``; NaN counts as zero and enters no scale.
        valid: which of ``x`` exist.
        fixed: the static scale (fp32, ``[M, 1]`` or ``[M, G]``), or nvfp4's scale of the tensor.
        second: the static zero point or centre.
        BOOK: entries of a codebook, ``book_step`` apart.
        ROOT: square root of the channels.
        PARAMETER, LARGEST: dtype of scale and minimum, and its largest number.

    Returns:
        int32 codes ``[M, G]`` (packed ones modulo ``2^BITS``), and fp32 scale and minimum ``[M]``, which the dtypes of their
        planes hold exactly; scales that are bytes as numbers 0..255.
    """
    finite = is_finite(x) & valid
    x = nan_to_zero(x)
    scale = tl.zeros([x.shape[0]], tl.float32)
    minimum = scale
    if RULE == SYMMETRIC or RULE == FLOAT8:  # noqa: SIM109  kernels have no tuples of constants
        largest = _largest_code(CODE, BITS)
        if STATIC:
            wide = fixed
        else:
            scale = tl.div_rn(
                tl.maximum(_amax(x, finite), SMALLEST), tl.full(scale.shape, largest, tl.float32)
            )
            scale = tl.minimum(scale, LARGEST).to(PARAMETER).to(tl.float32)
            wide = scale[:, None]
        q = safe_divide(x, wide)
        if RULE == FLOAT8:
            codes = e4m3_bits(q) if CODE == E4M3 else e5m2_bits(q)
        elif HAS_ZERO:
            codes = round_even(q, -second, (1 << BITS) - 1.0 - second).to(tl.int32)
        else:
            codes = round_even(q, -largest, largest).to(tl.int32)
    elif RULE == ASYMMETRIC:
        low, high = _extremes(x, finite, INTEGER_EDGE)
        top = (1 << BITS) - 1.0
        scale = tl.minimum(tl.div_rn(high - low, tl.full(scale.shape, top, tl.float32)), LARGEST)
        scale = scale.to(PARAMETER).to(tl.float32)
        minimum = tl.minimum(tl.maximum(low, -LARGEST), LARGEST).to(PARAMETER).to(tl.float32)
        x = tl.minimum(tl.maximum(x, -INTEGER_EDGE), INTEGER_EDGE)
        codes = round_even(safe_divide(x - minimum[:, None], scale[:, None]), 0.0, top).to(tl.int32)
    elif RULE == NVFP4:
        # A block that would be erased takes the smallest scale, where anything in it is nearest to another value than zero then.
        amax = _amax(x, finite)
        g = tl.max(fixed, 1)
        ratio = tl.minimum(safe_divide(amax, 6.0 * g), 448.0)
        ratio = tl.where(safe_divide(amax, g) > 2.0**-11, tl.maximum(ratio, 2.0**-9), ratio)
        byte = e4m3_bits(ratio)
        scale = byte.to(tl.float32)
        codes = e2m1_bits(safe_divide(x, (e4m3_number(byte) * g)[:, None]))
    elif RULE == MX:
        amax = _amax(x, finite)
        emax = 2 if CODE == E2M1 else 8
        # Zero and subnormal numbers have an exponent field of 0, and end at -127 as they should.
        exponent = (amax.to(tl.int32, bitcast=True) >> 23) - 127 - emax
        exponent = tl.minimum(tl.maximum(exponent, -127), 127)
        scale = (exponent + 127).to(tl.float32)
        # A power of two: the product with its reciprocal is the quotient.
        q = x * power_of_two(-exponent)[:, None]
        codes = e2m1_bits(q) if CODE == E2M1 else (e4m3_bits(q) if CODE == E4M3 else e5m2_bits(q))
    elif RULE == CODEBOOK:
        if STATIC:
            centre = second
            half_range = fixed
        else:
            low, high = _extremes(x, finite, CODEBOOK_EDGE)
            middle = tl.minimum(tl.maximum((high + low) * 0.5, -LARGEST_HALF), LARGEST_HALF)
            minimum = middle.to(tl.float16).to(tl.float32)
            scale = tl.minimum((high - low) * 0.5, LARGEST_HALF).to(tl.float16).to(tl.float32)
            centre = minimum[:, None]
            half_range = scale[:, None]
        x = tl.minimum(tl.maximum(x, -CODEBOOK_EDGE), CODEBOOK_EDGE)
        z = safe_divide(x - centre, half_range)
        codes = tl.zeros(x.shape, tl.int32)
        for i in tl.static_range((1 << BITS) - 1):
            below = tl.load(BOOK + i * book_step)
            above = tl.load(BOOK + (i + 1) * book_step)
            codes += (z > (above + below) * 0.5).to(tl.int32)
    else:  # NORMED
        x = tl.minimum(tl.maximum(x, -CODEBOOK_EDGE), CODEBOOK_EDGE)
        wide64 = tl.where(valid, x, 0.0).to(tl.float64)
        # In fp64 the order of the sum does not show.
        norm = tl.sqrt(tl.sum(wide64 * wide64, 1))
        scale = tl.minimum(norm, 65504.0).to(tl.float32).to(tl.float16).to(tl.float32)
        codes = _normal_codes(safe_divide(x * ROOT, scale[:, None]), BITS)
    if BITS < 8:
        codes = codes & ((1 << BITS) - 1)
    return codes, scale, minimum


@triton.jit
def static_parameters(
    low, high, RULE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr
):
    """Scale and zero point of numbers within ``low..high``, which holds zero; a scale of zero where there is nothing else."""
    if HAS_ZERO:
        top = (1 << BITS) - 1.0
        low = tl.maximum(low, -INTEGER_EDGE)
        high = tl.minimum(high, INTEGER_EDGE)
        scale = tl.div_rn(tl.maximum(high - low, SMALLEST), tl.full(low.shape, top, tl.float32))
        scale = tl.where(high > low, scale, 0.0)
        return scale, round_even(safe_divide(-low, scale), 0.0, top)
    else:
        largest = 2688.0 if RULE == NVFP4 else _largest_code(CODE, BITS)  # 448 * 6
        amax = tl.maximum(high, -low)
        scale = tl.div_rn(tl.maximum(amax, SMALLEST), tl.full(low.shape, largest, tl.float32))
        return tl.where(amax > 0.0, scale, 0.0), amax * 0.0


# ------------------------------------------------------------------------------------------------------------ packing


@triton.jit
def _pairs(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    """Neighbours joined, the first in the lower bits: ``[ROWS, WIDTH]`` to half the width."""
    low, high = tl.split(tl.reshape(codes, (ROWS, WIDTH // 2, 2)))
    return low | (high << SHIFT)


@triton.jit
def _bytes_mask(at, members, keep, PER: tl.constexpr, WHOLE: tl.constexpr):
    """Which of the bytes ``at`` of each row to store. Of whole rows only ``keep`` may count, or stores become narrow."""
    mask = tl.broadcast_to(keep[:, None], (keep.shape[0], at.shape[0]))
    if not WHOLE:
        mask = mask & (at[None, :] * PER < members)
    return mask


@triton.jit
def store_codes(
    codes,
    to,
    step,
    members,
    keep,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Store codes ``[ROWS, WIDTH]``, packed along the second axis.

    Args:
        to: pointers to the first byte of each row.
        step: elements between bytes.
        members: codes of a row that exist, ``[ROWS, 1]`` or a number; of rows that are kept, all where ``WHOLE``.
        keep: which rows to store.
    """
    if BITS == 8:
        at = tl.arange(0, WIDTH)
        mask = _bytes_mask(at, members, keep, 1, WHOLE)
        tl.store(to[:, None] + at[None, :].to(tl.int64) * step, codes.to(to.dtype.element_ty), mask=mask)
    elif BITS == 3:
        word = _pairs(_pairs(_pairs(codes, ROWS, WIDTH, 3), ROWS, WIDTH // 2, 6), ROWS, WIDTH // 4, 12)
        at = tl.arange(0, WIDTH // 8)
        mask = _bytes_mask(at, members, keep, 8, WHOLE)
        for k in tl.static_range(3):
            byte = ((word >> (8 * k)) & 255).to(tl.uint8)
            tl.store(to[:, None] + (at[None, :].to(tl.int64) * 3 + k) * step, byte, mask=mask)
    else:
        byte = _pairs(codes, ROWS, WIDTH, BITS)
        if BITS == 2:
            byte = _pairs(byte, ROWS, WIDTH // 2, 4)
        PER: tl.constexpr = 8 // BITS
        at = tl.arange(0, WIDTH // PER)
        mask = _bytes_mask(at, members, keep, PER, WHOLE)
        tl.store(to[:, None] + at[None, :].to(tl.int64) * step, byte.to(tl.uint8), mask=mask)
