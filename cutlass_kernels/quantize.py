"""Encode vectors and write them into a store or into pages: one body, for every format and every way to say where they go.

A vector of ``head_dim`` channels is coded by ``lanes`` neighbouring threads, a unit of channels each (see ``coding``), which
share a largest magnitude by shuffles where the format has a scale for the vector. On the processor of this machine the same
body runs in a loop over units; without neighbours to ask, it looks at the whole vector for the largest magnitude.

Scales that span tokens are fitted by a launch before: ``measure`` leaves the bits of the largest magnitude, and every thread
of ``encode`` makes the same scale of them. One thread stores it; whoever reads it early sees zero and computes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32

from . import blocks
from .blocks import Index, View, first, view
from .build import HOST, stream
from .coding import CODINGS
from .conversions import choose, conversions_for

__all__ = ["make_encode", "make_measure"]

THREADS = 128
_SMALLEST_AMAX = 1e-8


class Sizes(NamedTuple):
    """``heads`` and ``tokens`` of x, ``rows`` of both and batch; tokens of a store's row or a page, rows or pages, blocks."""

    rows: Int32
    heads: Int32
    tokens: Int32
    room: Int32
    slots: Int32
    blocks: Int32


class Target(NamedTuple):
    """Where tokens go. ``None`` for what the format or the operator does not have."""

    sizes: Sizes
    position: Any
    table: Any
    codes: Any
    scales: Any
    static: Any
    seen: Any
    length: Any


class Shape(NamedTuple):
    """What a kernel is compiled for."""

    coding: str
    head_dim: int
    lanes: int
    wide: bool
    fit: bool
    target: str


def _coordinates(sizes: Sizes, row):
    """Batch, head and token of a row of ``x``."""
    row, tokens, heads = row.to(Uint32), sizes.tokens.to(Uint32), sizes.heads.to(Uint32)
    outer = row // tokens
    return (outer // heads).to(Int32), (outer % heads).to(Int32), (row % tokens).to(Int32)


def _place(where: Target, b, t):
    """Whether a token is written, and where: row or page of the store, and token in it."""
    sizes = where.sizes
    if where.position is None:
        return Boolean(True), b, t
    position = where.position.at(b, t)
    room = sizes.room.to(Int64)
    if where.table is None:
        return (position >= Int64(0)) & (position < room), b, position.to(Int32)
    # Beyond the table nothing may be read.
    live = (position >= Int64(0)) & (position < room * sizes.blocks.to(Int64))
    held = choose(live, position, Int64(0)).to(Uint32)
    page = where.table.at(b, (held // sizes.room.to(Uint32)).to(Int32))
    live = live & (page >= Int64(0)) & (page < sizes.slots.to(Int64))
    return live, page.to(Int32), (held % sizes.room.to(Uint32)).to(Int32)


@cute.jit
def _raise(pointer, value, shape: cutlass.Constexpr):
    """What ``pointer`` points to becomes the larger of itself and ``value``."""
    if value > first(pointer)[0]:
        if cutlass.const_expr(shape.target == HOST):
            first(pointer)[0] = value
        else:
            cute.arch.atomic_max(pointer, value)


def _unit(x: View, shape: Shape, b, h, t, lane):
    """The unit of a thread: its index, whether there is such a one, where its vector starts, and its numbers."""
    coding = CODINGS[shape.coding]
    count = shape.head_dim // coding.unit
    width = x.pointer.dtype.width // 8
    start = x.row(b, h, t, 16 // width if shape.wide else 1)
    unit, there = lane, Boolean(True)
    if count < shape.lanes:
        # A thread too many takes the last unit once more: it reads what is there, and changes no maximum.
        there = lane < Int32(count)
        unit = choose(there, lane, Int32(count - 1))
    offset = cute.assume(unit * Int32(coding.unit), divby=coding.unit)
    return unit, there, start, blocks.load_unit(start + offset, coding.unit, wide=shape.wide)


@cute.jit
def _largest_of_vector(start, shape: cutlass.Constexpr):
    bits = Uint32(0)
    for channel in range(shape.head_dim):
        bits = blocks.larger(blocks.largest_magnitude([first(start, channel)[0].to(Float32)]), bits)
    return bits


def _share(bits, start, shape: Shape):
    """The largest magnitude of the whole vector, from those of its units. All threads of a warp have to come here."""
    if shape.target == HOST:
        return _largest_of_vector(start, shape)
    return blocks.largest_in_group(bits, shape.lanes)


@cute.jit
def measure_row(x: View, where: Target, row: Int32, lane: Int32, inside: Boolean, shape: cutlass.Constexpr):
    """Leave the bits of the largest magnitude of a vector in ``seen``, unless the scale is there already."""
    coding = CODINGS[shape.coding]
    b, h, t = _coordinates(where.sizes, row)
    live, slot, at = _place(where, b, t)
    index = h if coding.scale == "head" else Int32(0)
    bits = Uint32(0)
    if live & inside & (first(where.static, index)[0] == Float32(0.0)):
        _, _, _, values = _unit(x, shape, b, h, t, lane)
        bits = blocks.largest_magnitude(values)
    if cutlass.const_expr(shape.target != HOST):
        bits = blocks.largest_in_group(bits, shape.lanes)
    if (lane == Int32(0)) | Boolean(shape.target == HOST):
        _raise(where.seen + index, bits.to(Int32), shape)


@cute.jit
def encode_row(x: View, where: Target, row: Int32, lane: Int32, inside: Boolean, shape: cutlass.Constexpr):
    """Encode the unit of a vector that a thread has, and write it. All threads of a warp have to come here."""
    coding, cvt = CODINGS[shape.coding], conversions_for(shape.target)
    b, h, t = _coordinates(where.sizes, row)
    live, slot, at = _place(where, b, t)
    live = live & inside
    unit, there, start, values = _unit(x, shape, b, h, t, lane)
    leads = lane == Int32(0)

    scale = None
    if cutlass.const_expr(coding.scale == "token"):
        amax = _share(blocks.largest_magnitude(values), start, shape).bitcast(Float32)
        scale = blocks.larger(amax, Float32(_SMALLEST_AMAX)) / Float32(coding.largest)
        if live & leads:
            first(where.scales.row(slot, h, at))[0] = scale
    elif cutlass.const_expr(coding.fitted):
        index = h if coding.scale == "head" else Int32(0)
        known = first(where.static, index)[0]
        scale = known
        if cutlass.const_expr(shape.fit):
            unset = known == Float32(0.0)
            fitted = blocks.fitted_scale(coding, first(where.seen, index)[0].to(Uint32))
            scale = choose(unset, fitted, known)
            writes = inside & (row == h * where.sizes.tokens) & (h == index) & leads
            if writes & unset:
                first(where.static, index)[0] = scale

    words, byte = blocks.encode_unit(coding, values, scale, cvt)
    if live & there:
        codes = where.codes.row(slot, h, at, coding.access if shape.wide else 1)
        offset = cute.assume(unit * Int32(coding.unit_bytes), divby=coding.unit_bytes)
        blocks.store_words(codes + offset, words, wide=shape.wide)
        if cutlass.const_expr(coding.scale_bytes):
            first(where.scales.row(slot, h, at) + unit)[0] = byte.to(Uint8)

    if cutlass.const_expr(where.length is not None):  # noqa: SIM102 - one is known while tracing, the other is not
        if live & leads & (h == Int32(0)):
            _raise(where.length + slot, (at + Int32(1)).to(Int64), shape)


def _vector_and_lane(index, shape: Shape):
    index = index.to(Uint32)
    return (index // Uint32(shape.lanes)).to(Int32), (index % Uint32(shape.lanes)).to(Int32)


@cute.kernel
def _rows_kernel(x: View, where: Target, body: cutlass.Constexpr, shape: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row, lane = _vector_and_lane(block * THREADS + thread, shape)
    inside = row < where.sizes.rows
    # Threads beyond the last row work on it too, since a shuffle needs whole warps, and write nothing.
    row = choose(inside, row, where.sizes.rows - 1)
    body(x, where, row, lane, inside, shape)


def _target(x, codes, scales, static, seen, length, position, table) -> Target:
    batch, heads, tokens = x.shape[0], x.shape[1], x.shape[2]
    blocks_of_table = 0 if table is None else table.shape[1]
    sizes = (batch * heads * tokens, heads, tokens, codes.shape[2], codes.shape[0], blocks_of_table)
    return Target(
        Sizes(*map(Int32, sizes)),
        None if position is None else Index(position.iterator, *map(Int64, position.stride)),
        None if table is None else Index(table.iterator, *map(Int64, table.stride)),
        view(codes),
        None if scales is None else view(scales),
        *(None if vector is None else vector.iterator for vector in (static, seen, length)),
    )


@cute.jit
def launch(
    x: cute.Tensor,
    codes: cute.Tensor,
    scales,
    static,
    seen,
    length,
    position,
    table,
    body: cutlass.Constexpr,
    shape: cutlass.Constexpr,
    stream,
):
    """``measure_row`` or ``encode_row`` for every row of ``x``, on a GPU."""
    where = _target(x, codes, scales, static, seen, length, position, table)
    _rows_kernel(view(x), where, body, shape).launch(
        grid=(cute.ceil_div(where.sizes.rows * shape.lanes, THREADS), 1, 1),
        block=(THREADS, 1, 1),
        stream=stream,
    )


@cute.jit
def loop(
    x: cute.Tensor,
    codes: cute.Tensor,
    scales,
    static,
    seen,
    length,
    position,
    table,
    body: cutlass.Constexpr,
    shape: cutlass.Constexpr,
):
    """The same on the processor of this machine."""
    where = _target(x, codes, scales, static, seen, length, position, table)
    for index in range(where.sizes.rows * shape.lanes):
        row, lane = _vector_and_lane(index, shape)
        body(view(x), where, row, lane, Boolean(True), shape)


def _make(body, target: str, coding: str, dtype: str, head_dim: int, wide: bool, position, table, fit: bool):
    row = CODINGS[coding]
    units = head_dim // row.unit
    # A shuffle goes among a power of two of threads.
    lanes = units if target == HOST else 1 << (units - 1).bit_length()
    shape = Shape(coding, head_dim, lanes, wide, fit, target)
    kind = blocks.FLOATS[dtype]
    integers = {"int32": Int32, "int64": Int64}
    multiple = 16 // (kind.width // 8) if wide else 1
    octets = row.access if wide else 1

    def vector(kind, there):
        return blocks.tensor(kind, 1, target) if there else None

    def integer_table(name):
        return None if name is None else blocks.tensor(integers[name], 2, target, last=False)

    arguments = (
        blocks.tensor(kind, 4, target, multiple=multiple, align=16 if wide else None),
        blocks.tensor(Uint8, 4, target, multiple=octets, align=octets),
        blocks.scale_tensor(row, target),
        vector(Float32, row.fitted),
        vector(Int32, fit),
        vector(Int64, position is not None),
        integer_table(position),
        integer_table(table),
        body,
        shape,
    )
    return (loop, arguments) if target == HOST else (launch, (*arguments, stream()))


def make_encode(target: str, **shape):
    """What to compile for ``encode``; see ``operators`` for the shape class."""
    return _make(encode_row, target, **shape)


def make_measure(target: str, **shape):
    """What to compile for ``measure``."""
    return _make(measure_row, target, **shape)
