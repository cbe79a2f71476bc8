"""Values that are awkward to quantize, by kind."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tests.ops import checks

HEAD_DIMS = (64, 80, 100)

# Halfway between neighbouring codes, once values are divided by a scale of 1 (e4m3, e2m1) or 2**-7 (e5m2).
_E4M3, _E5M2 = (checks.MAGNITUDES[t].astype(np.float64) for t in (torch.float8_e4m3fn, torch.float8_e5m2))
FLOAT8_TIES = np.concatenate([(_E4M3[1:] + _E4M3[:-1]) / 2, (_E5M2[60:] + _E5M2[59:-1]) / 2 / 128])
E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def _choice(values: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    table = torch.tensor(values, dtype=torch.float64)
    return table[torch.randint(len(table), shape)] * (torch.randint(2, shape) * 2 - 1)


def int8_ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randint(-254, 255, shape) / 2
    x[..., 0] = 127
    return x


def int4_ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randint(0, 31, shape) / 2
    x[..., 0::8], x[..., 1::8] = 0, 15
    return x


def float8_ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = _choice(FLOAT8_TIES, shape)
    x[..., 0] = 448
    return x


def e2m1_ties(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = _choice(E2M1_TIES, shape)
    x[..., 0::16] = 6
    x *= 2.0 ** (torch.arange(shape[-1]) // 16 % 6)
    x[..., 0] = 448 * 6  # makes the scale of the tensor 1
    return x


def _huge(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = (torch.rand(shape, dtype=torch.float64) * 2 - 1) * torch.finfo(dtype).max
    x[..., 3], x[..., 7] = torch.finfo(dtype).max, torch.finfo(dtype).min
    return x


def _outlier(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape)
    x[..., 5] = 3e4
    return x


KINDS: dict[str, Callable[[tuple[int, ...], torch.dtype], Tensor]] = {
    "random": lambda shape, dtype: torch.randn(shape),
    "int8_ties": int8_ties,
    "int4_ties": int4_ties,
    "float8_ties": float8_ties,
    "e2m1_ties": e2m1_ties,
    "zero": lambda shape, dtype: torch.zeros(shape),
    "negative_zero": lambda shape, dtype: torch.full(shape, -0.0),
    "constant": lambda shape, dtype: torch.full(shape, 3.0),
    "subnormal": lambda shape, dtype: (
        torch.randint(-3, 4, shape).double() * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    ),
    "tiny": lambda shape, dtype: torch.randn(shape) * 1e-6,
    "huge": _huge,
    "all_positive": lambda shape, dtype: torch.rand(shape) + 5,
    "all_negative": lambda shape, dtype: -torch.rand(shape) - 5,
    "one_outlier": _outlier,
}


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return KINDS[kind](shape, dtype).to(dtype)
