"""Putting together what programs found that each saw a part of the tokens."""

from __future__ import annotations

import triton
import triton.language as tl

from .numbers import channel_signs, hadamard

__all__ = ["merge_kernel"]

CHUNK = 16
"""Splits that are read at once."""


@triton.jit
def merge_kernel(
    parts,
    states,
    sinks,
    out,
    n_s,
    splits,
    heads,
    queries,
    SINKS: tl.constexpr,
    ROTATION: tl.constexpr,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    LOG: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One query of one head: ``parts [rows, splits, DIM]`` weighted values, ``states [rows, splits, 2]`` maxima (in base 2)
    and sums of weights, to ``out [rows, DIM]``. The values are rotated back if need be.
    """
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, DT)
    top = float("-inf")
    for s in range(0, splits, CHUNK):
        split = s + tl.arange(0, CHUNK)
        at = states + (row * splits + split) * 2
        m = tl.load(at, mask=split < splits, other=float("-inf"))
        top = tl.maximum(top, tl.max(m, 0))
    base = tl.where(top > float("-inf"), top, 0.0)
    if SINKS:
        # A sink counts where the query saw anything at all; its value is zero.
        sink = tl.load(sinks + ((row // queries) % heads) * n_s).to(tl.float32) * 1.4426950408889634
        base = tl.where(sink > base, sink, base)
    total = 0.0
    acc = tl.zeros((DT,), tl.float32)
    for s in range(0, splits, CHUNK):
        split = s + tl.arange(0, CHUNK)
        at = states + (row * splits + split) * 2
        inside = split < splits
        m = tl.load(at, mask=inside, other=float("-inf"))
        weight_sum = tl.load(at + 1, mask=inside, other=0.0)
        # NaN is not zero: it has to come through.
        used = weight_sum != 0.0
        weight = tl.where(used, tl.exp2(m - base), 0.0)
        part = tl.load(
            parts + (row * splits + split)[:, None] * DIM + channel[None, :],
            mask=used[:, None] & (channel < DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(part * weight[:, None], 0)
        total += tl.sum(tl.where(used, weight * weight_sum, 0.0), 0)
    closed = total == 0.0
    if SINKS:
        total += tl.exp2(sink - base)
    acc = tl.where(closed, 0.0, acc / tl.where(closed, 1.0, total))
    if ROTATION != 0:
        acc = tl.reshape(hadamard(acc[None, :], 1, DT, LOG, (1 << LOG) ** -0.5), (DT,))
        if ROTATION == 2:
            acc *= channel_signs(channel)
    tl.store(out + row * DIM + channel, acc.to(out.dtype.element_ty), mask=channel < DIM)
