"""The smallest kernels that append to a store and read it, to see what becomes of kernels in graphs, whatever ours look like."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kvq_ops.registry import Implementation, register
from kvq_ops.triton_kernels.launching import callable_of

FORMAT = "int8_per_token_head"


@triton.jit
def standin_write(Codes, Scale, Length, X, Position, heads, capacity, D: tl.constexpr):
    row = tl.program_id(0)
    channel = tl.arange(0, D)
    at = tl.load(Position)
    x = tl.load(X + row * D + channel).to(tl.float32)
    scale = tl.max(tl.abs(x), 0) / 127.0
    tl.store(Codes + (row * capacity + at) * D + channel, (x / scale).to(tl.int8))
    tl.store(Scale + row * capacity + at, scale)
    tl.atomic_max(Length + row // heads, at + 1)


@triton.jit
def standin_read(Query, Codes, Scale, Values, ValueScale, Length, Out, group, capacity, D: tl.constexpr):
    row = tl.program_id(0)
    channel = tl.arange(0, D)
    query = tl.load(Query + row * D + channel).to(tl.float32)
    base = row // group * capacity
    total = tl.zeros([D], tl.float32)
    for at in range(0, tl.load(Length)):
        key = tl.load(Codes + (base + at) * D + channel).to(tl.float32) * tl.load(Scale + base + at)
        value = tl.load(Values + (base + at) * D + channel).to(tl.float32) * tl.load(ValueScale + base + at)
        total += tl.sum(query * key, 0) * value
    tl.store(Out + row * D + channel, total)


def append_(store: list[Tensor], position: Tensor, x: Tensor, fmt: Any) -> None:
    codes, scale, length = store
    batch, heads, _, dim = x.shape
    kernel = callable_of(standin_write)
    kernel[(batch * heads,)](codes, scale, length, x.contiguous(), position, heads, codes.shape[2], D=dim)


def attention(
    query: Tensor, key: list[Tensor], value: list[Tensor], key_format: Any, value_format: Any, **options: Any
) -> Tensor:
    batch, heads, tokens, dim = query.shape
    out = query.new_empty(query.shape)
    group, capacity = heads // key[0].shape[1], key[0].shape[2]
    callable_of(standin_read)[(batch * heads * tokens,)](
        *(query, key[0], key[1], value[0], value[1], key[2], out, group, capacity), D=dim, num_warps=1
    )
    return out


def install() -> None:
    """In place of the kernels of this package."""
    for op, run in (("append_", append_), ("attention", attention)):
        register(Implementation("triton", op, run, _refuses, priority=20, inlined=True))


def _refuses(request: Any) -> str | None:
    return None if request.device == "cuda" else f"tensors on {request.device}"
