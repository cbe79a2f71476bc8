"""The two launches of attention, and what to compile them for."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from . import blocks
from .attention_kernel import (
    ROWS,
    THREADS,
    Mask,
    Numbers,
    Shape,
    Side,
    blocks_of,
    carveout,
    shared_bytes,
    stretch_kernel,
)
from .blocks import Index, view
from .build import stream
from .coding import CODINGS, scale_octets
from .merge import MergeNumbers, merge_kernel

__all__ = ["attend", "make_attention"]


@cute.jit
def attend(
    query: cute.Tensor,
    key_codes: cute.Tensor,
    key_scales,
    key_static,
    value_codes: cute.Tensor,
    value_scales,
    value_static,
    mask,
    table,
    length,
    sinks,
    partial: cute.Tensor,
    stats: cute.Tensor,
    out: cute.Tensor,
    queries: Int32,
    group: Int32,
    splits: Int32,
    tokens: Int32,
    window: Int32,
    scale: Float32,
    cap: Float32,
    shape: cutlass.Constexpr,
    stream,
):
    """``stretch_kernel`` and ``merge_kernel``; the arguments in the order of ``attention.plan``."""
    heads, batch = key_codes.shape[1], query.shape[0]
    rows = group * queries

    def side(codes, scales, static):
        return Side(
            view(codes),
            None if scales is None else view(scales),
            None if static is None else static.iterator,
        )

    stretch_kernel(
        view(query),
        side(key_codes, key_scales, key_static),
        side(value_codes, value_scales, value_static),
        None if mask is None else Mask(mask.iterator, *map(Int64, mask.stride)),
        None if table is None else Index(table.iterator, *map(Int64, table.stride)),
        None if length is None else length.iterator,
        partial.iterator,
        stats.iterator,
        Numbers(tokens, queries, group, rows, splits, window, scale, cap),
        shape,
    ).launch(
        grid=(splits, heads * ((rows + ROWS - 1) // ROWS), batch),
        block=(THREADS, 1, 1),
        smem=shared_bytes(shape.head_dim),
        min_blocks_per_mp=blocks_of(shape),
        preferred_smem_carveout=carveout(shape),
        stream=stream,
    )
    merge_kernel(
        partial.iterator,
        stats.iterator,
        None if value_static is None else value_static.iterator,
        None if sinks is None else sinks.iterator,
        out.iterator,
        MergeNumbers(heads, queries, group, rows, splits),
        shape.values,
        shape.value_dim,
    ).launch(grid=(batch * heads * rows, 1, 1), block=(shape.value_dim, 1, 1), stream=stream)


def _side(coding: str, dim: int, target: str):
    """Stand-ins for codes, scales and static scale of keys or values."""
    row = CODINGS[coding]
    octets = row.lane_octets(dim)
    codes = blocks.tensor(Uint8, 4, target, multiple=octets, align=octets)
    scales = static = None
    if row.scale_bytes:
        octets = scale_octets(dim)
        scales = blocks.tensor(Uint8, 4, target, multiple=octets, align=octets)
    elif row.scale == "token":
        scales = blocks.tensor(Float32, 3, target, last=False)
    if row.fitted:
        static = blocks.tensor(Float32, 1, target)
    return codes, scales, static


def make_attention(target: str, *, dtype: str, length: str | None, table: str | None, sinks: bool, **rest):
    """What to compile: ``rest`` are the fields of ``attention_kernel.Shape``, ``length`` and ``table`` integer types or None."""
    shape = Shape(**rest, target=target)
    kind = {"float32": Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}[dtype]
    integers = {"int32": Int32, "int64": Int64}
    mask = None
    if shape.mask:
        mask = blocks.tensor(Uint8 if shape.mask == "bool" else Float32, 4, target, last=False)
    arguments = (
        blocks.tensor(kind, 4, target, multiple=4, align=4 * (kind.width // 8)),
        *_side(shape.keys, shape.head_dim, target),
        *_side(shape.values, shape.value_dim, target),
        mask,
        None if table is None else blocks.tensor(integers[table], 2, target, last=False),
        None if length is None else blocks.tensor(integers[length], 1, target),
        blocks.tensor(Float32, 1, target) if sinks else None,
        blocks.tensor(Float32, 1, target, align=16),
        blocks.tensor(Float32, 1, target, align=16),
        blocks.tensor(kind, 1, target),
        *(Int32(0) for _ in range(5)),
        Float32(0.0),
        Float32(0.0),
        shape,
        stream(),
    )
    return attend, arguments
