"""Rotation of vectors before they are coded.

``hadamard``: ``y = x H`` with the Sylvester matrix divided by ``sqrt(n)``, so that it is its own inverse. A head_dim that is no
power of two is rotated in blocks of the largest power of two that divides it. Sums are taken as butterflies in a fixed order, in
fp32: neighbours first, then ever farther apart, and the factor ``1 / sqrt(n)`` last.

``random_hadamard``: signs of channels are flipped before that, by a pattern that is fixed for all time (:func:`signs`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["block_size", "hadamard", "rotate", "signs", "unrotate"]


def block_size(head_dim: int) -> int:
    """The largest power of two that divides ``head_dim``."""
    return head_dim & -head_dim


def hadamard(x: Tensor) -> Tensor:
    """Rotate the last axis; applying it twice gives ``x`` back, up to rounding."""
    channels = x.shape[-1]
    n = block_size(channels)
    y = x.unflatten(-1, (-1, n))
    half = 1
    while half < n:
        pairs = y.unflatten(-1, (-1, 2, half))
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        half *= 2
    rotated: Tensor = y.flatten(-2) * (n**-0.5)
    return rotated


@functools.cache
def sign_pattern(head_dim: int) -> tuple[float, ...]:
    """``1.0`` or ``-1.0`` for each channel: the top bit of a hash of its number.

    ``h = (i + 1) * 0x9E3779B9``, ``h ^= h >> 16``, ``h *= 0x85EBCA6B``, ``h ^= h >> 13``, ``h *= 0xC2B2AE35`` modulo ``2^32``:
    any backend can compute it, and no generator's version matters.
    """
    pattern = []
    for i in range(head_dim):
        h = (i + 1) * 0x9E3779B9 & 0xFFFFFFFF
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        pattern.append(-1.0 if h >> 31 else 1.0)
    return tuple(pattern)


def signs(head_dim: int, device: torch.device) -> Tensor:
    """fp32 ``[D]``, see :func:`sign_pattern`."""
    return torch.tensor(sign_pattern(head_dim), dtype=torch.float32, device=device)


def rotate(x: Tensor, kind: str) -> Tensor:
    """Into the space in which a format of this rotation codes vectors; lengths and dot products stay."""
    if kind == "random_hadamard":
        x = x * signs(x.shape[-1], x.device).to(x.dtype)
    return hadamard(x)


def unrotate(x: Tensor, kind: str) -> Tensor:
    """Back from there."""
    x = hadamard(x)
    return x * signs(x.shape[-1], x.device).to(x.dtype) if kind == "random_hadamard" else x
