"""Small kernels whose machine code is known, by which the tests of offline compilation check their own eyes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def copy_kernel(X, Y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at))


@triton.jit
def hold_kernel(X, Y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at)
    tl.store(Y + at, x - tl.sum(x))


@triton.jit
def dot_kernel(A, B, OUT, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(OUT + at, tl.dot(tl.load(A + at), tl.load(B + at)))


def copy(dtype: str, offset: int = 0) -> None:
    x, y = (torch.zeros(4096 + offset, dtype=getattr(torch, dtype))[offset:] for _ in range(2))
    copy_kernel[(1,)](x, y, 4096, num_warps=4)


def hold(size: int) -> None:
    x = torch.zeros(size)
    hold_kernel[(1,)](x, x, size, num_warps=1)


def dot(size: int) -> None:
    a = torch.zeros(size, size, dtype=torch.float16)
    dot_kernel[(1,)](a, a, torch.empty(size, size), size, num_warps=4)


def fail() -> None:
    raise ValueError("no such launch")
