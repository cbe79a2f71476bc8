"""Loading a tile of stored tokens inside of a kernel: codes, scales and whatever else a format has, as numbers.

One side of an attention (its keys or its values) is a tuple of pointers and strides, made by :func:`side_args` and taken apart
where it is used; what kind of format it is, a kernel knows from one whole number, made by :func:`packed_spec`. A tile is

    numbers [BN, DT], factor [BN], low [BN]:    value[n, d] = numbers[n, d] * factor[n] + low[n]

so that what all channels of a token share never touches the tile: attention multiplies scores, or weights, by ``factor`` and adds
``low`` once for each token. Numbers are fp32, or fp16 where tensor cores take them (``COMPUTE``). In fp16 nothing overflows and
nothing but tiny numbers beside large ones is lost:

* codes that share a scale for each token are whole numbers up to 255 or float8, which fp16 holds exactly;
* where channels have scales of their own (groups, blocks, per channel), or come exact, a token is divided by a power of two near
  the largest magnitude it can have, which becomes its ``factor``. A number is then off by at most one rounding of fp16 for each
  operation, and by 2**-25 of the token's largest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from . import spec as _spec
from .numbers import (
    byte_half,
    channel_signs,
    circle,
    e2m1_half,
    e4m3_half,
    e5m2_half,
    hadamard,
    hadamard_matrix,
    nibbles_half,
    normal_entry,
    normal_half,
    power_below,
    quarters_half,
    signed_byte_half,
    weave4,
    weave8,
)
from .spec import Spec

__all__ = ["find_rows", "load_any", "load_coded", "rotation_log", "side_args"]

_EXACT = tl.constexpr(_spec.EXACT)
_SIGNED = tl.constexpr(_spec.SIGNED)
_SHIFTED = tl.constexpr(_spec.SHIFTED)
_E4M3 = tl.constexpr(_spec.E4M3)
_E5M2 = tl.constexpr(_spec.E5M2)
_E2M1 = tl.constexpr(_spec.E2M1)
_TABLE = tl.constexpr(_spec.TABLE)
_NORMAL = tl.constexpr(_spec.NORMAL)
_SCALE_E4M3 = tl.constexpr(_spec.SCALE_E4M3)
_SCALE_E8M0 = tl.constexpr(_spec.SCALE_E8M0)

# --------------------------------------------------------------------------------------------- what a launcher passes

# Planes in the order of ``SLOTS`` with the strides that kernels take.
_TAKEN = (
    ("codes", "bht"),
    ("scale", "bht"),
    ("outer", ""),
    ("minimum", "bht"),
    ("zero_point", "h"),
    ("codebook", ""),
    ("inv_freq", ""),
    ("position", "bt"),
    ("outlier_index", "bht"),
    ("outlier_value", "bht"),
    ("recent", "bht"),
    ("sinks", "bht"),
    ("coded", ""),
    ("length", ""),
)
_SCALE_SLOT, _MINIMUM_SLOT = (_spec.SLOTS.index(name) for name in ("scale", "minimum"))
_SCALE_AT, _MINIMUM_AT = (
    sum(1 + len(axes) for _, axes in _TAKEN[:slot]) for slot in (_SCALE_SLOT, _MINIMUM_SLOT)
)


@functools.cache
def _plan(spec: Spec) -> tuple[tuple[int, tuple[int | None, ...], bool], ...]:
    """For each plane that kernels take: its index in a store, which strides it needs, whether its last axis must be dense."""
    plan = []
    for slot, taken in _TAKEN:
        at = _spec.SLOTS.index(slot)
        index = spec.planes[at]
        names = spec.axes[at].replace("N", "T" if "BH" in spec.axes[at] else "N")
        axes = tuple(
            names.index(axis.upper()) if index != _spec.ABSENT and axis.upper() in names else None
            for axis in taken
        )
        plan.append((index, axes, names[-1] in "DNB" or names == "1"))
    return tuple(plan)


def side_args(store: Sequence[Tensor], spec: Spec, dim: int) -> tuple[list[Tensor | int], int]:
    """The planes of a store as a kernel takes them, and what it has to know of their format.

    Kernels want the last axis of a plane dense; others are copied here.
    """
    args: list[Tensor | int] = []
    # Strides of groups' parameters are small. What all are multiples of is told apart, so that loads can be wide.
    shift = 3 if spec.scale_channels > 0 and not spec.static_scale else 0
    for at, (index, axes, dense) in enumerate(_plan(spec)):
        if index == _spec.ABSENT:
            args.append(store[0])
            args += [0] * len(axes)
            continue
        tensor = store[index]
        strides = tensor.stride()
        if dense and strides[-1] != 1 and tensor.shape[-1] > 1:
            tensor = tensor.contiguous()
            strides = tensor.stride()
        taken = [0 if axis is None else strides[axis] for axis in axes]
        if shift and at in (_SCALE_SLOT, _MINIMUM_SLOT):
            for stride in taken:
                while stride % (1 << shift):
                    shift -= 1
        args.append(tensor)
        args += taken
    if shift:
        for at in (_SCALE_AT, _MINIMUM_AT):
            args[at + 1 : at + 4] = [stride >> shift for stride in args[at + 1 : at + 4]]
    return args, packed_spec(spec, dim, shift)


def packed_spec(spec: Spec, dim: int, shift: int) -> int:
    """What a kernel has to know of a format, in one number; fields as taken apart in :func:`scaled_codes`.

    Args:
        shift: strides of the parameters of groups are passed divided by two to this power.
    """
    fields = (
        (spec.code, 4),
        (spec.bits or 8, 4),
        (spec.scale_kind, 2),
        (spec.static_scale, 1),
        (spec.has_minimum, 1),
        (spec.rotary, 1),
        (spec.windowed, 1),
        (int(spec.sinks > 0), 1),
        (spec.rotation, 2),
        (int(spec.planes[_spec.SLOTS.index("outer")] != _spec.ABSENT), 1),
        (spec.outlier_count(dim), 10),
        (spec.scale_channels, 11),
        (spec.scale_tokens, 11),
        (rotation_log(dim), 4),
        (shift, 2),
    )
    packed = at = 0
    for value, bits in fields:
        assert 0 <= value < 1 << bits
        packed |= value << at
        at += bits
    return packed


def rotation_log(dim: int) -> int:
    """The binary logarithm of how many channels are rotated together."""
    return (dim & -dim).bit_length() - 1


# ----------------------------------------------------------------------------------------------------------- in kernels


@triton.jit
def find_rows(
    block_table, t_b, t_n, b, start, n, live, PAGE: tl.constexpr, BN: tl.constexpr, SCATTERED: tl.constexpr
):
    """Where tokens ``start + n`` of sequence ``b`` lie: row, first slot, and tokens relative to it.

    ``SCATTERED``: looked up for each of them, where ``live``; otherwise a page holds a whole tile.
    """
    if PAGE == 0:
        return b, start, n
    elif SCATTERED:
        token = start + n
        page = tl.load(block_table + b * t_b + (token // PAGE) * t_n, mask=live, other=0).to(tl.int64)
        return page, start * 0, token % PAGE
    else:
        page = tl.load(block_table + b * t_b + (start // PAGE) * t_n).to(tl.int64)
        return page, start % PAGE, n


@triton.jit
def at_rows(ptr, row, head, slot, rel, b, h, t, SCATTERED: tl.constexpr):
    """Pointers ``[BN]`` to tokens ``slot + rel`` of rows ``row`` (one for all, or one for each: ``SCATTERED``)."""
    if SCATTERED:
        return ptr + (row * b + head * h + rel * t)
    else:
        return (ptr + (row * b + head * h + slot * t)) + rel * t


@triton.jit
def load_rows(rows, live, COUNT: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr, BOUND: tl.constexpr):
    """``[BN, PADDED]``: every ``STEP``-th of ``COUNT * STEP`` items of each row, zeros beyond."""
    column = tl.arange(0, PADDED)
    at = rows[:, None] + (column * STEP)[None, :]
    if BOUND and COUNT != PADDED:
        return tl.load(at, mask=live[:, None] & (column < COUNT)[None, :], other=0)
    elif BOUND:
        return tl.load(at, mask=live[:, None], other=0)
    elif COUNT != PADDED:
        return tl.load(at, mask=(column < COUNT)[None, :], other=0)
    else:
        return tl.load(at)


@triton.jit
def load_tokens(rows, live, BOUND: tl.constexpr):
    if BOUND:
        return tl.load(rows, mask=live, other=0)
    else:
        return tl.load(rows)


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
        w = load_rows(rows, live, DIM // 8, DT // 8, 3, BOUND).to(tl.int32)
        w |= load_rows(rows + 1, live, DIM // 8, DT // 8, 3, BOUND).to(tl.int32) << 8
        w |= load_rows(rows + 2, live, DIM // 8, DT // 8, 3, BOUND).to(tl.int32) << 16
        return weave8(
            w & 7, (w >> 3) & 7, (w >> 6) & 7, (w >> 9) & 7, (w >> 12) & 7, (w >> 15) & 7, (w >> 18) & 7, w >> 21
        )  # fmt: skip


@triton.jit
def table_numbers(codes, codebook, BITS: tl.constexpr, CODE: tl.constexpr):
    if CODE == _NORMAL:
        return normal_entry(codes, BITS)
    else:
        return tl.load(codebook + codes)


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
    elif (CODE == _TABLE) | (CODE == _NORMAL):
        x = table_numbers(small_codes(rows, live, DIM, DT, BITS, BOUND), codebook, BITS, CODE)
        return x.to(tl.float16) if HALF_TABLE else x
    elif CODE == _SHIFTED:
        codes = small_codes(rows, live, DIM, DT, BITS, BOUND)
        return (((codes + zero) & ((1 << BITS) - 1)) - zero).to(tl.float16)
    elif CODE == _SIGNED:
        if BITS == 8:
            return signed_byte_half(load_rows(rows, live, DIM, DT, 1, BOUND), ASM)
        elif BITS == 4:
            low, high = nibbles_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND) ^ 0x88, ASM)
            return tl.interleave(low - 8.0, high - 8.0)
        else:
            HALF: tl.constexpr = 1 << (BITS - 1)
            codes = small_codes(rows, live, DIM, DT, BITS, BOUND)
            return ((codes ^ HALF) - HALF).to(tl.float16)
    elif BITS == 8:
        return byte_half(load_rows(rows, live, DIM, DT, 1, BOUND), ASM)
    elif BITS == 4:
        low, high = nibbles_half(load_rows(rows, live, DIM // 2, DT // 2, 1, BOUND), ASM)
        return tl.interleave(low, high)
    elif BITS == 2:
        a, b, c, d = quarters_half(load_rows(rows, live, DIM // 4, DT // 4, 1, BOUND), ASM)
        return weave4(a, b, c, d)
    else:
        return small_codes(rows, live, DIM, DT, BITS, BOUND).to(tl.float16)


@triton.jit
def spread_groups(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """``[ROWS, GROUPS]`` repeated along channels, ``[ROWS, GROUPS * EACH]``; without an index for each channel."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, EACH)), (ROWS, GROUPS * EACH))


@triton.jit
def spread_tokens(x, GROUPS: tl.constexpr, EACH: tl.constexpr, DT: tl.constexpr):
    """``[GROUPS, DT]`` repeated along tokens, ``[GROUPS * EACH, DT]``."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], (GROUPS, EACH, DT)), (GROUPS * EACH, DT))


@triton.jit
def two_to(exponent):
    """fp32 ``2**(exponent - 127)`` for whole numbers 0..254."""
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_coded(
    side,
    row,
    head,
    slot,
    rel,
    live,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    BN: tl.constexpr,
    SPEC: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASM: tl.constexpr,
    NATIVE: tl.constexpr,
    SCATTERED: tl.constexpr,
    BOUND: tl.constexpr,
):
    """A tile of coded (or plainly stored) tokens, see the module.

    Args:
        side: from :func:`side_args`.
        row: int64, the batch row or page: one for all tokens, or one for each (``SCATTERED``).
        slot: the first token of the tile in its row.
        rel: int64 ``[BN]``, tokens relative to ``slot``.
        live: bool ``[BN]``, which tokens to read; others give zeros. Used with ``BOUND`` only.
        DIM: channels; ``DT``: the same, filled up to a power of two with whatever codes of zero stand for.
        COMPUTE: 0 for fp32 numbers, 1 for fp16, 2 for bf16 (plainly stored bf16 only).
    """
    (codes, c_b, c_h, c_t, scale, s_b, s_h, s_t, outer, minimum, m_b, m_h, m_t, zero_point, z_h, codebook,
     inv_freq, position, p_b, p_t, index, i_b, i_h, i_t, value, v_b, v_h, v_t,
     recent, r_b, r_h, r_t, first, f_b, f_h, f_t, coded, length) = side  # fmt: skip
    CODE: tl.constexpr = SPEC & 15
    BITS: tl.constexpr = (SPEC >> 4) & 15
    ROTARY: tl.constexpr = (SPEC >> 12) & 1
    ROTATION: tl.constexpr = (SPEC >> 15) & 3
    OUTLIERS: tl.constexpr = (SPEC >> 18) & 1023
    LOG: tl.constexpr = (SPEC >> 50) & 15

    if CODE == _EXACT:
        ones = tl.full((BN,), 1.0, tl.float32)
        low = tl.zeros((BN,), tl.float32)
        rows = at_rows(codes, row, head, slot, rel, c_b, c_h, c_t, SCATTERED)
        x = load_rows(rows, live, DIM, DT, 1, BOUND)
        if COMPUTE == 0:
            return x.to(tl.float32), ones, low
        elif COMPUTE == 2 or codes.dtype.element_ty == tl.float16:
            return x, ones, low
        else:
            numbers, factor = normalised(x.to(tl.float32))
            return numbers, factor, low
    elif ROTARY:
        x = load_rotary(
            at_rows(codes, row, head, slot, rel, c_b, c_h, c_t, SCATTERED), head, scale, s_h, minimum, m_h, codebook, inv_freq,
            at_rows(position, row, 0, slot, rel, p_b, 0, p_t, SCATTERED),
            at_rows(index, row, head, slot, rel, i_b, i_h, i_t, SCATTERED),
            at_rows(value, row, head, slot, rel, v_b, v_h, v_t, SCATTERED),
            live, DIM, DT, BN, BITS, OUTLIERS, ROTATION, LOG, BOUND,
        )  # fmt: skip
        low = tl.zeros((BN,), tl.float32)
        if COMPUTE == 0:
            return x, tl.full((BN,), 1.0, tl.float32), low
        else:
            numbers, factor = normalised(x)
            return numbers, factor, low
    elif OUTLIERS > 0 and COMPUTE != 0:
        # An outlier may be any number of times as large as what the codes hold.
        x, factor, low = scaled_codes(
            side, row, head, slot, rel, live, DIM, DT, BN, SPEC, 0, ASM, NATIVE, SCATTERED, BOUND
        )  # fmt: skip
        numbers, factor = normalised(x)
        return numbers, factor, low
    else:
        return scaled_codes(
            side, row, head, slot, rel, live, DIM, DT, BN, SPEC, COMPUTE, ASM, NATIVE, SCATTERED, BOUND
        )  # fmt: skip


@triton.jit
def scaled_codes(
    side,
    row,
    head,
    slot,
    rel,
    live,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    BN: tl.constexpr,
    SPEC: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASM: tl.constexpr,
    NATIVE: tl.constexpr,
    SCATTERED: tl.constexpr,
    BOUND: tl.constexpr,
):
    """:func:`load_coded` for codes with scales and nothing before or behind them but outliers."""
    (codes, c_b, c_h, c_t, scale, s_b, s_h, s_t, outer, minimum, m_b, m_h, m_t, zero_point, z_h, codebook,
     inv_freq, position, p_b, p_t, index, i_b, i_h, i_t, value, v_b, v_h, v_t,
     recent, r_b, r_h, r_t, first, f_b, f_h, f_t, coded, length) = side  # fmt: skip
    CODE: tl.constexpr = SPEC & 15
    BITS: tl.constexpr = (SPEC >> 4) & 15
    KIND: tl.constexpr = (SPEC >> 8) & 3
    STATIC: tl.constexpr = (SPEC >> 10) & 1
    MINIMUM: tl.constexpr = (SPEC >> 11) & 1
    OUTER: tl.constexpr = (SPEC >> 17) & 1
    OUTLIERS: tl.constexpr = (SPEC >> 18) & 1023
    CHANNELS: tl.constexpr = (SPEC >> 28) & 2047
    TOKENS: tl.constexpr = (SPEC >> 39) & 2047
    ALIGN: tl.constexpr = 1 << ((SPEC >> 54) & 3)

    rows = at_rows(codes, row, head, slot, rel, c_b, c_h, c_t, SCATTERED)
    ones = tl.full((BN,), 1.0, tl.float32)
    low = tl.zeros((BN,), tl.float32)
    zero = 0
    if CODE == _SHIFTED:
        zero = tl.load(zero_point + head * z_h).to(tl.int32)
    numbers = plain_numbers(rows, live, zero, codebook, DIM, DT, CODE, BITS, BOUND, ASM, NATIVE, COMPUTE != 0)
    # What numbers have to be multiplied by beside their scale, and the largest they can be.
    UNIT: tl.constexpr = 256.0 if CODE == _E4M3 and not NATIVE else (16384.0 if CODE == _E2M1 else 1.0)
    TOP: tl.constexpr = (
        448.0 if CODE == _E4M3 else (6.0 if CODE == _E2M1 else (4.0 if CODE == _TABLE else (1 << BITS) * 1.0))
    )
    if COMPUTE == 0:
        numbers = numbers.to(tl.float32)
    factor = ones
    if CODE == _NORMAL:
        # Vectors have the length that is stored, whatever the length of their entries.
        wide = tl.where((tl.arange(0, DT) < DIM)[None, :], numbers.to(tl.float32), 0.0)
        square = tl.sum(wide * wide, 1)
        norm = load_tokens(at_rows(scale, row, head, slot, rel, s_b, s_h, s_t, SCATTERED), live, BOUND)
        factor = norm.to(tl.float32) / tl.sqrt(square)
    elif STATIC:
        factor = ones * (tl.load(scale + head * s_h).to(tl.float32) * UNIT)
    elif CHANNELS == 0:
        share = load_tokens(at_rows(scale, row, head, slot, rel, s_b, s_h, s_t, SCATTERED), live, BOUND)
        factor = share.to(tl.float32) * UNIT
        if MINIMUM:
            below = at_rows(minimum, row, head, slot, rel, m_b, m_h, m_t, SCATTERED)
            low = load_tokens(below, live, BOUND).to(tl.float32)
    elif TOKENS > 1:
        s_b, s_h, s_t, m_b, m_h, m_t = (
            s_b * ALIGN,
            s_h * ALIGN,
            s_t * ALIGN,
            m_b * ALIGN,
            m_h * ALIGN,
            m_t * ALIGN,
        )
        s, m = load_channel_scales(
            at_rows(scale, row, head, 0, (slot + rel) // TOKENS, s_b, s_h, s_t, False),
            at_rows(minimum, row, head, 0, (slot + rel) // TOKENS, m_b, m_h, m_t, False),
            (scale + (row * s_b + head * s_h + (slot // TOKENS) * s_t)), s_t,
            (minimum + (row * m_b + head * m_h + (slot // TOKENS) * m_t)), m_t,
            live, DIM, DT, BN, TOKENS, MINIMUM, BOUND,
        )  # fmt: skip
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
        s_b, s_h, s_t, m_b, m_h, m_t = (
            s_b * ALIGN,
            s_h * ALIGN,
            s_t * ALIGN,
            m_b * ALIGN,
            m_h * ALIGN,
            m_t * ALIGN,
        )
        WHOLE: tl.constexpr = CHANNELS & (CHANNELS - 1) == 0
        EACH: tl.constexpr = CHANNELS if CHANNELS < DT else DT
        # Groups that are no power of two are spread by an index for each channel.
        COUNT: tl.constexpr = (DIM + EACH - 1) // EACH if WHOLE else DIM
        PADDED: tl.constexpr = DT // EACH if WHOLE else DT
        s = load_groups(
            at_rows(scale, row, head, slot, rel, s_b, s_h, s_t, SCATTERED),
            live, DIM, DT, CHANNELS, COUNT, PADDED, WHOLE, BOUND,
        )  # fmt: skip
        m = s
        if MINIMUM:
            m = load_groups(
                at_rows(minimum, row, head, slot, rel, m_b, m_h, m_t, SCATTERED),
                live, DIM, DT, CHANNELS, COUNT, PADDED, WHOLE, BOUND,
            ).to(tl.float32)  # fmt: skip
        if KIND == _SCALE_E4M3:
            # Products of e2m1 and e4m3 are exact in fp16, 2**-14 and 2**6 times what they are.
            s = e4m3_half(s, False, False) * 16384.0
            outside = 1.0
            if OUTER:
                outside = tl.load(outer).to(tl.float32)
            if COMPUTE == 0:
                s = s.to(tl.float32) * 256.0 * outside
            else:
                factor = ones * (outside * 256.0)
        elif KIND == _SCALE_E8M0:
            exponent = s.to(tl.int32)
            if COMPUTE == 0:
                s = two_to(exponent) * UNIT
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
            numbers,
            at_rows(index, row, head, slot, rel, i_b, i_h, i_t, SCATTERED),
            at_rows(value, row, head, slot, rel, v_b, v_h, v_t, SCATTERED),
            live, tl.arange(0, DT), OUTLIERS, BOUND,
        )  # fmt: skip
        factor = ones
        low = tl.zeros((BN,), tl.float32)
    if COMPUTE != 0:
        numbers = numbers.to(tl.float16)
    return numbers, factor, low


@triton.jit
def normalised(x):
    """fp32 ``[BN, D]`` as fp16 times a power of two for each row."""
    power, inverse = power_below(tl.max(tl.abs(x), 1))
    return (x * inverse[:, None]).to(tl.float16), power


@triton.jit
def load_groups(
    rows,
    live,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    CHANNELS: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    WHOLE: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Parameters of groups of channels: ``[BN, groups]``, or for groups that are no power of two ``[BN, DT]``."""
    if WHOLE:
        return load_rows(rows, live, COUNT, PADDED, 1, BOUND)
    else:
        channel = tl.arange(0, DT)
        inside = (channel < DIM)[None, :]
        if BOUND:
            inside = inside & live[:, None]
        return tl.load(rows[:, None] + (channel // CHANNELS)[None, :], mask=inside, other=0)


@triton.jit
def load_channel_scales(
    scale_rows,
    minimum_rows,
    scale,
    s_t,
    minimum,
    m_t,
    live,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    BN: tl.constexpr,
    TOKENS: tl.constexpr,
    MINIMUM: tl.constexpr,
    BOUND: tl.constexpr,
):
    """fp32 scale and minimum of each channel: one row for each group of tokens where groups and tiles fit, else one a token."""
    channel = tl.arange(0, DT)
    if TOKENS % BN == 0 or BN % TOKENS == 0:
        GROUPS: tl.constexpr = 1 if TOKENS % BN == 0 else BN // TOKENS
        group = tl.arange(0, GROUPS)
        inside = (channel < DIM)[None, :]
        if BOUND:
            inside = inside & (tl.max(tl.reshape(live.to(tl.int32), (GROUPS, BN // GROUPS)), 1) > 0)[:, None]
        s = tl.load(scale + (group * s_t)[:, None] + channel[None, :], mask=inside, other=0).to(tl.float32)
        m = s
        if MINIMUM:
            m = tl.load(minimum + (group * m_t)[:, None] + channel[None, :], mask=inside, other=0).to(
                tl.float32
            )
        return s, m
    else:
        s = load_rows(scale_rows, live, DIM, DT, 1, BOUND).to(tl.float32)
        m = s
        if MINIMUM:
            m = load_rows(minimum_rows, live, DIM, DT, 1, BOUND).to(tl.float32)
        return s, m


@triton.jit
def put_outliers(x, index_rows, value_rows, live, channel, OUTLIERS: tl.constexpr, BOUND: tl.constexpr):
    """fp32 ``x [BN, DT]``, of channels ``channel [DT]``, with the values that were kept exactly in their places."""
    for k in tl.static_range(OUTLIERS):
        index = load_tokens(index_rows + k, live, BOUND).to(tl.int32)
        value = load_tokens(value_rows + k, live, BOUND).to(tl.float32)
        here = channel[None, :] == index[:, None]
        if BOUND:
            here = here & live[:, None]
        x = tl.where(here, value[:, None], x)
    return x


@triton.jit
def channel_numbers(
    rows,
    head,
    scale,
    s_h,
    minimum,
    m_h,
    codebook,
    index_rows,
    value_rows,
    live,
    channel,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Codebook numbers with a centre and half-range for each channel, at any ``channel [DT]``, fp32."""
    inside = channel < DIM
    there = inside[None, :]
    if BOUND:
        there = there & live[:, None]
    bit = channel * BITS
    at = rows[:, None] + (bit // 8)[None, :]
    word = tl.load(at, mask=there, other=0).to(tl.int32)
    if BITS == 3:
        straddles = (bit % 8 > 5)[None, :]
        word |= tl.load(at + 1, mask=there & straddles, other=0).to(tl.int32) << 8
    codes = (word >> (bit % 8)[None, :]) & ((1 << BITS) - 1)
    half_range = tl.load(scale + head * s_h + channel, mask=inside, other=0).to(tl.float32)
    centre = tl.load(minimum + head * m_h + channel, mask=inside, other=0).to(tl.float32)
    x = tl.load(codebook + codes) * half_range[None, :] + centre[None, :]
    return put_outliers(x, index_rows, value_rows, live, channel, OUTLIERS, BOUND)


@triton.jit
def load_rotary(
    rows,
    head,
    scale,
    s_h,
    minimum,
    m_h,
    codebook,
    inv_freq,
    position_rows,
    index_rows,
    value_rows,
    live,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    BN: tl.constexpr,
    BITS: tl.constexpr,
    OUTLIERS: tl.constexpr,
    ROTATION: tl.constexpr,
    LOG: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Keys that were coded as they were before rotary embedding, turned by their positions, fp32 ``[BN, DT]``."""
    channel = tl.arange(0, DT)
    HALF: tl.constexpr = DIM // 2
    partner = tl.where(channel < HALF, channel + HALF, channel - HALF)
    x = channel_numbers(
        rows, head, scale, s_h, minimum, m_h, codebook, index_rows, value_rows, live, channel, DIM, BITS, OUTLIERS, BOUND
    )  # fmt: skip
    if ROTATION == 0:
        y = channel_numbers(
            rows, head, scale, s_h, minimum, m_h, codebook, index_rows, value_rows, live, partner, DIM, BITS, OUTLIERS, BOUND
        )  # fmt: skip
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
    # Turns are counted in 2**-64 and wrap around, so that no position is too large for them; the upper half is kept.
    pair = tl.where(channel < HALF, channel, channel - HALF)
    frequency = tl.load(inv_freq + pair, mask=channel < DIM, other=0.0).to(tl.float64) * 0.15915494309189535
    step = ((frequency - tl.floor(frequency)) * 1152921504606846976.0).to(tl.int64) << 4
    upper, lower = (step >> 32).to(tl.int32).to(tl.uint32, bitcast=True), step.to(tl.uint32)
    slot = load_tokens(position_rows, live, BOUND).to(tl.int32)
    times = tl.broadcast_to((slot - 1).to(tl.uint32, bitcast=True)[:, None], (BN, DT))
    sine, cosine = circle(
        times * upper[None, :] + tl.umulhi(times, tl.broadcast_to(lower[None, :], (BN, DT)))
    )
    sine = tl.where((channel < HALF)[None, :], -sine, sine)
    x = x * cosine + y * sine
    return tl.where((slot > 0)[:, None], x, 0.0)


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
def load_turned(
    side,
    row,
    head,
    slot,
    rel,
    live,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    BN: tl.constexpr,
    SPEC: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASM: tl.constexpr,
    NATIVE: tl.constexpr,
    SCATTERED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """:func:`load_coded` with bounds; rotated back unless ``ROTATED``."""
    ROTATION: tl.constexpr = (SPEC >> 15) & 3
    numbers, factor, low = load_coded(
        side, row, head, slot, rel, live, DIM, DT, BN, SPEC, COMPUTE, ASM, NATIVE, SCATTERED, True
    )  # fmt: skip
    if ROTATION != 0 and not ROTATED and not ((SPEC >> 12) & 1):
        x = numbers * factor[:, None]
        if ((SPEC >> 11) & 1) and ((SPEC >> 28) & 2047) == 0:
            x += low[:, None]
        # What lies beyond the last channel stays out of the others: they are rotated in blocks.
        LOG: tl.constexpr = (SPEC >> 50) & 15
        x = hadamard(x, BN, DT, LOG, (1 << LOG) ** -0.5)
        if ROTATION == 2:
            x *= channel_signs(tl.arange(0, DT))[None, :]
        return x, tl.full((BN,), 1.0, tl.float32), tl.zeros((BN,), tl.float32)
    else:
        return numbers, factor, low


@triton.jit
def load_any(
    side,
    row,
    head,
    slot,
    rel,
    live,
    window,
    first_tokens,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    BN: tl.constexpr,
    SPEC: tl.constexpr,
    COMPUTE: tl.constexpr,
    ASM: tl.constexpr,
    NATIVE: tl.constexpr,
    SCATTERED: tl.constexpr,
    ROTATED: tl.constexpr,
):
    """As :func:`load_coded` for any tokens, those of a window that are exact included.

    Args:
        window: tokens in the ring.
        first_tokens: how many first tokens are exact.
        ROTATED: stay in the space in which tokens are coded, and rotate exact ones into it. Otherwise, in fp32, rotate back.
    """
    WINDOWED: tl.constexpr = (SPEC >> 13) & 1
    SINKS: tl.constexpr = (SPEC >> 14) & 1
    ROTATION: tl.constexpr = (SPEC >> 15) & 3
    if WINDOWED:
        (codes, c_b, c_h, c_t, scale, s_b, s_h, s_t, outer, minimum, m_b, m_h, m_t, zero_point, z_h, codebook,
         inv_freq, position, p_b, p_t, index, i_b, i_h, i_t, value, v_b, v_h, v_t,
         recent, r_b, r_h, r_t, first, f_b, f_h, f_t, coded, length) = side  # fmt: skip
        TURN: tl.constexpr = ROTATION if ROTATED and not ((SPEC >> 12) & 1) else 0
        LOG: tl.constexpr = (SPEC >> 50) & 15
        token = slot + rel
        count = tl.load(coded + row)
        held = live & (token < tl.load(length + row))
        ours = live & (token < count)
        numbers, factor, low = load_turned(
            side, row, head, slot, rel, ours, DIM, DT, BN, SPEC, COMPUTE, ASM, NATIVE, SCATTERED, ROTATED
        )  # fmt: skip
        waits = held & (token >= count) & (token < count + window)
        x = exact_numbers(
            at_rows(recent, row, head, 0, token % window, r_b, r_h, r_t, False), waits, DIM, DT, BN, TURN, LOG
        )
        if SINKS:
            start = held & (token < first_tokens)
            y = exact_numbers(
                at_rows(first, row, head, 0, token, f_b, f_h, f_t, False), start, DIM, DT, BN, TURN, LOG
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
        return load_turned(
            side, row, head, slot, rel, live, DIM, DT, BN, SPEC, COMPUTE, ASM, NATIVE, SCATTERED, ROTATED
        )  # fmt: skip
