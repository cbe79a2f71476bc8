"""Rotating vectors into the space in which a format codes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import callable_of
from .numbers import channel_signs, hadamard
from .sides import rotation_log

__all__ = ["rotated"]


@triton.jit
def rotate_kernel(
    x,
    out,
    s_b,
    s_h,
    s_t,
    s_d,
    heads,
    tokens,
    SIGNS: tl.constexpr,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    LOG: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    token, rest = at % tokens, at // tokens
    channel = tl.arange(0, DT)
    row = x + (rest // heads) * s_b + (rest % heads) * s_h + token * s_t
    y = tl.load(row + channel * s_d, mask=channel < DIM, other=0.0).to(tl.float32)
    if SIGNS:
        y *= channel_signs(channel)
    y = hadamard(y[None, :], 1, DT, LOG, (1 << LOG) ** -0.5)
    tl.store(out + at * DIM + channel[None, :], y, mask=(channel < DIM)[None, :])


def rotated(x: Tensor, rotation: int) -> Tensor:
    """``x [B, H, T, D]`` rotated as ``kvq_ops.codecs.rotation`` does (1: Hadamard, 2: after flipping signs), fp32, contiguous."""
    batch, heads, tokens, dim = x.shape
    out = torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format)
    callable_of(rotate_kernel)[(batch * heads * tokens,)](
        x,
        out,
        *x.stride(),
        heads,
        tokens,
        SIGNS=int(rotation == 2),
        DIM=dim,
        DT=triton.next_power_of_2(dim),
        LOG=rotation_log(dim),
        num_warps=1,
    )
    return out
