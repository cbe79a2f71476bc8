"""Hadamard rotation of vectors before they are coded.

``y = x H`` with the Sylvester matrix divided by ``sqrt(n)``, so that it is its own inverse. A head_dim that is no power of two is
rotated in blocks of the largest power of two that divides it. Sums are taken as butterflies in a fixed order, in fp32: neighbours
first, then ever farther apart, and the factor ``1 / sqrt(n)`` last.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
