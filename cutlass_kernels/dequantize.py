"""Decode a store into a dense tensor: the inverse of ``quantize``, a unit of channels for each thread."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32

from . import blocks
from .blocks import View, first, view
from .build import HOST, stream
from .coding import CODINGS
from .conversions import conversions_for

__all__ = ["make_decode"]

THREADS = 128


class Store(NamedTuple):
    """What is read; ``None`` for what the format does not have."""

    codes: View
    scales: Any
    static: Any


class Shape(NamedTuple):
    """What the kernel is compiled for."""

    coding: str
    head_dim: int
    wide: bool
    target: str


@cute.jit
def decode_one(store: Store, out: View, index: Int32, heads: Int32, tokens: Int32, shape: cutlass.Constexpr):
    """Decode unit ``index`` of ``units`` in all vectors."""
    coding, cvt = CODINGS[shape.coding], conversions_for(shape.target)
    units = shape.head_dim // coding.unit
    index, rows, row_heads = index.to(Uint32), tokens.to(Uint32), heads.to(Uint32)
    unit, row = (index % Uint32(units)).to(Int32), index // Uint32(units)
    t, outer = (row % rows).to(Int32), row // rows
    b, h = (outer // row_heads).to(Int32), (outer % row_heads).to(Int32)

    scale, byte = None, None
    if cutlass.const_expr(coding.scale == "token"):
        scale = first(store.scales.row(b, h, t))[0]
    elif cutlass.const_expr(coding.fitted):
        scale = first(store.static, h if coding.scale == "head" else 0)[0]
    if cutlass.const_expr(coding.scale_bytes):
        byte = first(store.scales.row(b, h, t) + unit)[0].to(Uint32)

    codes = store.codes.row(b, h, t, coding.access if shape.wide else 1)
    offset = cute.assume(unit * Int32(coding.unit_bytes), divby=coding.unit_bytes)
    words = blocks.load_words(codes + offset, coding.unit_bytes // 4, wide=shape.wide)
    values = blocks.decode_unit(coding, words, byte, scale, cvt)
    target = out.row(b, h, t, coding.unit) + cute.assume(unit * Int32(coding.unit), divby=coding.unit)
    blocks.store_numbers(target, values, out.pointer.dtype, cvt)


@cute.kernel
def _decode_kernel(
    store: Store, out: View, count: Int32, heads: Int32, tokens: Int32, shape: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * THREADS + thread
    if index < count:
        decode_one(store, out, index, heads, tokens, shape)


def _prepared(codes, scales, static, out, shape: Shape):
    store = Store(
        view(codes), None if scales is None else view(scales), None if static is None else static.iterator
    )
    batch, heads, tokens = codes.shape[0], codes.shape[1], codes.shape[2]
    units = shape.head_dim // CODINGS[shape.coding].unit
    return store, view(out), Int32(batch * heads * tokens * units), Int32(heads), Int32(tokens)


@cute.jit
def launch(codes: cute.Tensor, scales, static, out: cute.Tensor, shape: cutlass.Constexpr, stream):
    """Decode all vectors on a GPU."""
    store, made, count, heads, tokens = _prepared(codes, scales, static, out, shape)
    _decode_kernel(store, made, count, heads, tokens, shape).launch(
        grid=(cute.ceil_div(count, THREADS), 1, 1), block=(THREADS, 1, 1), stream=stream
    )


@cute.jit
def loop(codes: cute.Tensor, scales, static, out: cute.Tensor, shape: cutlass.Constexpr):
    """The same on the processor of this machine."""
    store, made, count, heads, tokens = _prepared(codes, scales, static, out, shape)
    for index in range(count):
        decode_one(store, made, index, heads, tokens, shape)


def make_decode(target: str, coding: str, dtype: str, head_dim: int, wide: bool):
    """What to compile for ``decode``; see ``operators`` for the shape class."""
    row = CODINGS[coding]
    octets = row.access if wide else 1
    shape = Shape(coding, head_dim, wide, target)
    arguments = (
        blocks.tensor(Uint8, 4, target, multiple=octets, align=octets),
        blocks.scale_tensor(row, target),
        blocks.tensor(Float32, 1, target) if row.fitted else None,
        blocks.tensor(blocks.FLOATS[dtype], 4, target, multiple=row.unit, align=16),
        shape,
    )
    return (loop, arguments) if target == HOST else (launch, (*arguments, stream()))
