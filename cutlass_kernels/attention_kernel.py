"""Attention of a few queries over a long cache: one CTA takes 16 query rows of a kv head and a stretch of its tokens.

All query heads of a kv head, times the query tokens, are the rows of one matrix, so that a key is read and brought to fp16 once
for all of them. Four warps take tiles of 16 tokens in turn and meet no barrier until the end; each keeps its own largest
score, sum and output, which are then put together in shared memory and leave as one partial result. ``merge`` puts the
partial results of the stretches together.

While a tile is worked on the next one is on its way: keys are loaded into the registers that the scores have just freed, values
into those that the output has. With vectors of 256 there are no registers for that; other warps have to fill the time. A
token at or beyond the end of a stretch is never read; the last one within is, in its place, and gets no weight.

Where values have a scale for each token, fp16 weights could leave their range when they took it in. The logarithm of the scale is
added to the score instead: weights ``2^(s + log2 v - m)`` are at most one, and the sum they are divided by takes ``1 / v`` back.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from . import fragments
from .blocks import View
from .coding import CODINGS
from .conversions import choose
from .tiles import (
    TILE,
    Shape,
    Side,
    Where,
    accumulate,
    find_pages,
    key_counts,
    load_keys,
    load_token_scales,
    load_values,
    number,
    products_of,
    query_fragments,
    query_words,
    rows_of,
    smaller,
    static_scale,
    value_counts,
)  # fmt: skip

__all__ = [
    "ROWS",
    "THREADS",
    "Mask",
    "Numbers",
    "Shape",
    "Side",
    "blocks_of",
    "carveout",
    "shared_bytes",
    "stretch_kernel",
]

ROWS = 16
WARPS = 4
THREADS = 32 * WARPS
_CLOSED = -float("inf")
_LARGEST = 3.4028234e38
_LOG2E = 1.4426950408889634
# A scale of a token at or below this counts as this: its codes are zeros, or as good as that.
_SMALLEST_SCALE = 2.0**-100
# Values of the output that go through shared memory at once, for each lane, and gaps that keep banks apart.
_PIECE = 8
_COLUMN, _ROW = _PIECE + 4, 8 * (_PIECE + 4) + 4


class Mask(NamedTuple):
    """A mask ``[B, Hq, Tq, T]``; the stride of an axis of one is zero."""

    pointer: cute.Pointer
    b: Int64
    h: Int64
    q: Int64
    t: Int64


class Numbers(NamedTuple):
    """Numbers of a launch.

    ``tokens``: room for each sequence. ``group``: query heads of a kv head. ``rows``: ``group`` times ``queries``. ``scale``: of
    the scores, to base 2; with a softcap c, ``2 scale / (c ln 2)``, and ``cap`` is ``c / ln 2``.
    """

    tokens: Int32
    queries: Int32
    group: Int32
    rows: Int32
    splits: Int32
    window: Int32
    scale: Float32
    cap: Float32


def blocks_of(shape: Shape) -> int:
    """CTAs that a processor shall hold, which bounds the registers of a thread: to 168, or 255 where that may not do."""
    return 2 if shape.mask or max(shape.head_dim, shape.value_dim) > 64 else 3


def carveout(shape: Shape) -> int:
    """Percent of what shared memory can be, the rest being L1: what those CTAs take, with the driver's KiB for each.

    It is a hint, and too small a one would keep CTAs out: 12.x has 100 KiB, 9.0 and 10.x have 228.
    """
    capacity = 1024 * (100 if shape.target.startswith("sm_12") else 228)
    taken = blocks_of(shape) * (shared_bytes(shape.head_dim) + 1024)
    return min(100, -(-100 * taken // capacity))


def shared_bytes(head_dim: int) -> int:
    """Shared memory of a CTA: the queries where registers are short, largest scores and sums, a piece of four outputs."""
    queries = head_dim // 16 * 32 * 16 if head_dim > 64 else 0
    return queries + 4 * WARPS * (2 * ROWS + ROWS * _ROW)


# ----------------------------------------------------------------------------------------------------------- softmax


class Row(NamedTuple):
    """One of the lane's two query rows: head, token among the queries, and what its products are multiplied by."""

    head: Int32
    query: Int32
    factor: Float32


def _final_scores(
    products, rows, end, where: Where, base, key_scales, mask, numbers: Numbers, shape: Shape
) -> list:
    """Scores to base 2, -inf where a row may not look."""
    out = []
    for group, four in enumerate(products):
        scored = list(four)
        for e in range(2):
            token = base + Int32(8 * group + 4 * e) + where.t
            inside = token < where.stop
            for r, row in enumerate(rows):
                x = four[2 * r + e] * row.factor
                if CODINGS[shape.keys].scale == "token":
                    x = x * key_scales[2 * group + e]
                if shape.softcap:
                    x = numbers.cap * (
                        Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(fragments.exp2(x) + Float32(1.0))
                    )
                open_ = inside
                newest = end - numbers.queries + row.query
                if shape.causal:
                    open_ = open_ & (token <= newest)
                if shape.window:
                    open_ = open_ & (token > newest - numbers.window)
                if shape.mask:
                    read = smaller(token, where.stop - Int32(1))
                    offset = where.b.to(Int64) * mask.b + row.head.to(Int64) * mask.h
                    offset = offset + row.query.to(Int64) * mask.q + read.to(Int64) * mask.t
                    found = number(mask.pointer, offset)
                    if shape.mask == "bool":
                        open_ = open_ & (found != Uint8(0))
                    else:
                        # The smallest fp32 number is a bias too, and -inf is not what becomes of it. NaN stays.
                        bias = found * Float32(_LOG2E)
                        bias = choose(bias < Float32(-_LARGEST), Float32(-_LARGEST), bias)
                        bias = choose(found == Float32(_CLOSED), Float32(_CLOSED), bias)
                        x = x + bias
                scored[2 * r + e] = choose(open_, x, Float32(_CLOSED))
        out.append(scored)
    return out


def _softmax(scored, value_scales, output, largest, total, shape: Shape) -> list:
    """Weights of a tile, by a largest score so far; the output and the sum so far are brought to the new one."""
    inverse, logs = None, None
    if CODINGS[shape.values].scale == "token":
        inverse, logs = [], []
        for i in range(2 * len(scored)):
            scale = cute.arch.fmax(value_scales[i], Float32(_SMALLEST_SCALE))
            inverse.append(cute.arch.rcp_approx(scale))
            logs.append(fragments.log2(scale))
    weights: list = [[None] * 4 for _ in scored]
    for r in range(2):
        top = Float32(_CLOSED)
        for group, four in enumerate(scored):
            for e in range(2):
                x = four[2 * r + e]
                top = cute.arch.fmax(top, x if logs is None else x + logs[2 * group + e])
        top = cute.arch.fmax(largest[r], fragments.largest_of_quad(top))
        base = fragments.finite_base(top)
        correction = fragments.exp2(largest[r] - base)
        added = Float32(0.0)
        for group, four in enumerate(scored):
            for e in range(2):
                below = four[2 * r + e] - base
                if logs is not None:
                    # Not before: a score that its bias made large would swallow it.
                    below = below + logs[2 * group + e]
                weight = fragments.exp2(below)
                weights[group][2 * r + e] = weight
                added = added + (weight if inverse is None else weight * inverse[2 * group + e])
        largest[r] = top
        total[r] = total[r] * correction + added
        for i in range(shape.value_dim // 8):
            for e in range(2):
                output[4 * i + 2 * r + e] = output[4 * i + 2 * r + e] * correction
    return weights


# ----------------------------------------------------------------------------------------------------------- kernel


@cute.jit
def _stretch(
    query: View,
    keys: Side,
    values: Side,
    mask,
    table,
    partial: cute.Pointer,
    stats: cute.Pointer,
    numbers: Numbers,
    where: Where,
    first_row: Int32,
    start: Int32,
    end: Int32,
    split: Int32,
    shape: cutlass.Constexpr,
):
    """What a CTA does with its stretch ``start .. where.stop``, which is not empty."""
    ahead = cutlass.const_expr(max(shape.head_dim, shape.value_dim) <= 128)
    thread, _, _ = cute.arch.thread_idx()
    warp, lane = thread // 32, thread % 32

    places = []
    for extra in cutlass.range_constexpr(2):
        row = smaller(first_row + where.g + Int32(8 * extra), numbers.rows - Int32(1)).to(Uint32)
        head = (row // numbers.queries.to(Uint32)).to(Int32)
        places.append((where.head * numbers.group + head, row.to(Int32) - head * numbers.queries))
    found, powers = query_fragments(query, [(where.b, head, q) for head, q in places], where.t, shape)
    factor = numbers.scale * static_scale(keys, shape.keys, where.head)
    rows = [Row(head, q, power * factor) for (head, q), power in zip(places, powers, strict=True)]

    smem = getattr(cutlass, "memory", cutlass.utils).SmemAllocator()  # it moved in 4.8
    if cutlass.const_expr(shape.head_dim > 64):
        # All warps need the same rows, and registers are short. Each lane finds its words side by side.
        held = smem.allocate_tensor(
            Uint32, cute.make_layout((shape.head_dim // 16, 32, 4), stride=(128, 4, 1)), 16
        )
        for step in cutlass.range_constexpr(shape.head_dim // 16):
            if warp == step % WARPS:
                for i in cutlass.range_constexpr(4):
                    held[step, lane, i] = found[step][i]
        cute.arch.barrier()
    else:
        held = None
    fragment = functools.partial(query_words, found, held, lane)

    key_words, key_pairs = key_counts(shape)
    octets, scale_count = value_counts(shape)
    pages = cute.make_rmem_tensor((TILE // 8,), Int32)
    k_words = cute.make_rmem_tensor((TILE // 8 * key_words,), Uint32)
    k_scales = cute.make_rmem_tensor((TILE // 8 * max(1, key_pairs),), Uint32)
    k_columns = cute.make_rmem_tensor((TILE // 4,), Float32)
    v_words = cute.make_rmem_tensor((TILE // 4 * octets // 4,), Uint32)
    v_scales = cute.make_rmem_tensor((TILE // 4 * scale_count,), Uint32)
    v_columns = cute.make_rmem_tensor((TILE // 4,), Float32)
    output = cute.make_rmem_tensor((shape.value_dim // 2,), Float32)
    largest = cute.make_rmem_tensor((2,), Float32)
    total = cute.make_rmem_tensor((2,), Float32)
    output.fill(0.0)
    largest.fill(_CLOSED)
    total.fill(0.0)

    key_rows: Any = [rows_of(plane, where, shape) for plane in keys[:2]]
    value_rows: Any = [rows_of(plane, where, shape) for plane in values[:2]]
    base = start + warp * TILE
    step = Int32(TILE * WARPS)
    if cutlass.const_expr(ahead):
        find_pages(table, where, base, pages, shape)
        load_keys(key_rows[0], key_rows[1], where, base, pages, k_words, k_scales, shape)
        load_token_scales(key_rows[1], shape.keys, where, base, pages, k_columns, shape)
        load_values(value_rows[0], value_rows[1], where, base, pages, v_words, v_scales, shape)
        load_token_scales(value_rows[1], shape.values, where, base, pages, v_columns, shape)
    count = (where.stop - base + step - 1) // step
    for turn in range(count):
        at = base + turn * step
        if cutlass.const_expr(not ahead):
            find_pages(table, where, at, pages, shape)
            load_keys(key_rows[0], key_rows[1], where, at, pages, k_words, k_scales, shape)
            load_token_scales(key_rows[1], shape.keys, where, at, pages, k_columns, shape)
        products = products_of(fragment, k_words, k_scales, shape)
        scored = _final_scores(products, rows, end, where, at, k_columns, mask, numbers, shape)
        if cutlass.const_expr(not ahead):
            load_token_scales(value_rows[1], shape.values, where, at, pages, v_columns, shape)
        if cutlass.const_expr(ahead):
            find_pages(table, where, at + step, pages, shape)
            load_keys(key_rows[0], key_rows[1], where, at + step, pages, k_words, k_scales, shape)
            load_token_scales(key_rows[1], shape.keys, where, at + step, pages, k_columns, shape)
        weights = _softmax(scored, v_columns, output, largest, total, shape)
        if cutlass.const_expr(not ahead):
            load_values(value_rows[0], value_rows[1], where, at, pages, v_words, v_scales, shape)
        accumulate(weights, v_words, v_scales, output, shape)
        if cutlass.const_expr(ahead):
            load_values(value_rows[0], value_rows[1], where, at + step, pages, v_words, v_scales, shape)
            load_token_scales(value_rows[1], shape.values, where, at + step, pages, v_columns, shape)

    _put_together(output, largest, total, partial, stats, numbers, where, first_row, split, smem, shape)


@cute.jit
def _put_together(
    output: cute.Tensor,
    largest: cute.Tensor,
    total: cute.Tensor,
    partial: cute.Pointer,
    stats: cute.Pointer,
    numbers: Numbers,
    where: Where,
    first_row: Int32,
    split: Int32,
    smem: cutlass.Constexpr,
    shape: cutlass.Constexpr,
):
    """The partial results of four warps as one, and out of here."""
    thread, _, _ = cute.arch.thread_idx()
    warp = thread // 32
    tops = smem.allocate_tensor(Float32, cute.make_layout((WARPS, ROWS), stride=(ROWS, 1)), 16)
    sums = smem.allocate_tensor(Float32, cute.make_layout((WARPS, ROWS), stride=(ROWS, 1)), 16)
    layout = cute.make_layout((WARPS, ROWS, 8, _PIECE), stride=(ROWS * _ROW, _ROW, _COLUMN, 1))
    box = smem.allocate_tensor(Float32, layout, 16)
    for r in cutlass.range_constexpr(2):
        whole = fragments.sum_of_quad(total[r])
        if where.t == 0:
            tops[warp, where.g + 8 * r] = largest[r]
            sums[warp, where.g + 8 * r] = whole

    # From here on a thread has one row and an eighth of its channels.
    mine, column = thread // 8, thread % 8
    out_row = (
        where.b * (cute.arch.grid_dim()[1] // ((numbers.rows + ROWS - 1) // ROWS)) + where.head
    ) * numbers.rows
    out_row = (out_row + first_row + mine) * numbers.splits + split
    inside = first_row + mine < numbers.rows
    factors = cute.make_rmem_tensor((WARPS,), Float32)
    per_lane = shape.value_dim // 8
    for piece in cutlass.range_constexpr(per_lane // _PIECE):
        for r in cutlass.range_constexpr(2):
            for e in cutlass.range_constexpr(2):
                held = cute.make_rmem_tensor((_PIECE,), Float32)
                for i in cutlass.range_constexpr(_PIECE):
                    held[i] = output[4 * (piece * _PIECE + i) + 2 * r + e]
                cute.autovec_copy(held, box[warp, where.g + 8 * r, 2 * where.t + e, None])
        cute.arch.barrier()
        if cutlass.const_expr(piece == 0):
            top = Float32(_CLOSED)
            for w in cutlass.range_constexpr(WARPS):
                top = cute.arch.fmax(top, tops[w, mine])
            low = fragments.finite_base(top)
            added = Float32(0.0)
            for w in cutlass.range_constexpr(WARPS):
                factors[w] = fragments.exp2(tops[w, mine] - low)
                added = added + sums[w, mine] * factors[w]
            if inside & (column == 0):
                pair = cute.make_tensor(stats + out_row * 2, cute.make_layout(2))
                pair[0] = top
                pair[1] = added
        whole = cute.make_rmem_tensor((_PIECE,), Float32)
        whole.fill(0.0)
        for w in cutlass.range_constexpr(WARPS):
            part = box[w, mine, column, None].load()
            for i in cutlass.range_constexpr(_PIECE):
                whole[i] = whole[i] + part[i] * factors[w]
        if inside:
            offset = out_row.to(Int64) * shape.value_dim + column * per_lane + piece * _PIECE
            target = partial + cute.assume(offset, divby=_PIECE)
            cute.autovec_copy(whole, cute.make_tensor(target, cute.make_layout(_PIECE)))
        if cutlass.const_expr(piece + 1 < per_lane // _PIECE):
            cute.arch.barrier()


@cute.kernel
def stretch_kernel(
    query: View,
    keys: Side,
    values: Side,
    mask,
    table,
    length,
    partial: cute.Pointer,
    stats: cute.Pointer,
    numbers: Numbers,
    shape: cutlass.Constexpr,
):
    """Partial results ``[B, Hkv, rows, splits, Dv]`` (fp32), and for each its largest score and sum.

    Of a split without tokens only those two are written: -inf and zero.

    The grid is splits, kv heads times 16-row parts, batch.
    """
    thread, _, _ = cute.arch.thread_idx()
    split, part, b = cute.arch.block_idx()
    parts = (numbers.rows + ROWS - 1) // ROWS
    head, first_row = part // parts, part % parts * ROWS
    lane = thread % 32
    end = numbers.tokens
    if cutlass.const_expr(length is not None):
        end = smaller(number(length, b).to(Int32), numbers.tokens)
    begin = Int32(0)
    if cutlass.const_expr(shape.window):
        oldest = end - numbers.queries - numbers.window + 1
        begin = choose(oldest > 0, oldest, Int32(0))
    step = TILE * WARPS
    begin = begin // step * step
    steps = (end - begin + step - 1) // step
    each = (steps + numbers.splits - 1) // numbers.splits * step
    start = begin + split * each
    stop = smaller(start + each, end)
    if start < stop:
        where = Where(b, head, stop, lane // 4, lane % 4)
        _stretch(
            query,
            keys,
            values,
            mask,
            table,
            partial,
            stats,
            numbers,
            where,
            first_row,
            start,
            end,
            split,
            shape,
        )
    else:
        if (thread < ROWS) & (first_row + thread < numbers.rows):
            heads = cute.arch.grid_dim()[1] // parts
            row = (b * heads + head) * numbers.rows + first_row + thread
            pair = cute.make_tensor(stats + (row * numbers.splits + split) * 2, cute.make_layout(2))
            pair[0] = Float32(_CLOSED)
            pair[1] = Float32(0.0)
