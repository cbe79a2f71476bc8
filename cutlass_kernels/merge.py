"""Put the partial results of the stretches of a sequence together, with the sink, and write the output."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from . import fragments
from .coding import CODINGS
from .conversions import choose

__all__ = ["MergeNumbers", "merge_kernel"]

_LOG2E = 1.4426950408889634


class MergeNumbers(NamedTuple):
    """``heads``: kv heads. The others as in ``attention_kernel.Numbers``."""

    heads: Int32
    queries: Int32
    group: Int32
    rows: Int32
    splits: Int32


def _number(pointer, index=0):
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


@cute.kernel
def merge_kernel(
    partial: cute.Pointer,
    stats: cute.Pointer,
    static,
    sinks,
    out: cute.Pointer,
    numbers: MergeNumbers,
    kind: cutlass.Constexpr,
    value_dim: cutlass.Constexpr,
):
    """One CTA for each query row, one thread for each channel; ``out [B, Hq, Tq, Dv]`` without gaps.

    A partial result whose sum is zero has no output, and none is read. NaN is no zero: queries with NaN in them give NaN.
    """
    channel, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    outer = (row.to(Uint32) // numbers.rows.to(Uint32)).to(Int32)
    inner = row - outer * numbers.rows
    head = outer % numbers.heads
    in_group = (inner.to(Uint32) // numbers.queries.to(Uint32)).to(Int32)
    query = inner - in_group * numbers.queries
    query_head = head * numbers.group + in_group

    top = Float32(-float("inf"))
    if cutlass.const_expr(sinks is not None):
        top = _number(sinks, query_head) * Float32(_LOG2E)
    first = row * numbers.splits
    for split in range(numbers.splits):
        top = cute.arch.fmax(top, _number(stats, (first + split) * 2))
    low = fragments.finite_base(top)
    total = Float32(0.0)
    if cutlass.const_expr(sinks is not None):
        total = fragments.exp2(_number(sinks, query_head) * Float32(_LOG2E) - low)
    value = Float32(0.0)
    for split in range(numbers.splits):
        added = _number(stats, (first + split) * 2 + 1)
        if added != Float32(0.0):
            weight = fragments.exp2(_number(stats, (first + split) * 2) - low)
            total = total + added * weight
            value = value + _number(partial, (first + split).to(Int64) * value_dim + channel) * weight
    if cutlass.const_expr(static is not None):
        value = value * _number(static, head if CODINGS[kind].scale == "head" else 0)
    value = choose(total == Float32(0.0), Float32(0.0), value / total)
    at = (
        (outer // numbers.heads * numbers.heads + head) * numbers.group + in_group
    ) * numbers.queries + query
    target = cute.make_tensor(out + at.to(Int64) * value_dim + channel, cute.make_layout(1))
    target[0] = value.to(out.dtype)
