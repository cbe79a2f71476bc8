"""Helpers that the number systems share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

SMALLEST_AMAX = 1e-8
"""A group whose largest magnitude is below this is coded as if it were this: scales stay normal numbers."""


def finite_or_zero(x: Tensor) -> Tensor:
    """``x`` with NaN and infinities replaced by zero, for statistics."""
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def nan_to_zero(x: Tensor) -> Tensor:
    """``x`` with NaN replaced by zero; infinities stay and saturate later."""
    return torch.where(x.isnan(), 0.0, x)


def safe_divide(x: Tensor, scale: Tensor) -> Tensor:
    """``x / scale``, and zero where the scale is zero."""
    usable = scale != 0
    return torch.where(usable, x / torch.where(usable, scale, 1.0), 0.0)


def divide(x: Tensor, number: float) -> Tensor:
    """``x / number`` as IEEE divides: on CUDA, ``/`` with a Python number multiplies by its rounded reciprocal."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def grouped(x: Tensor, group: int, fill: float = 0.0) -> Tensor:
    """``[..., D]`` as ``[..., groups, group]``; a last group that is short is filled up with ``fill``."""
    missing = -x.shape[-1] % group
    if missing:
        x = pad(x, (0, missing), value=fill)
    groups: Tensor = x.unflatten(-1, (-1, group))
    return groups


def spread(scale: Tensor, group: int, head_dim: int) -> Tensor:
    """One value per group ``[..., groups]`` repeated for its channels ``[..., D]``."""
    return scale.repeat_interleave(group, -1)[..., :head_dim]
