"""Sizes of tiles, and what launchers tell the kernels that write stores of a format and of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .spec import Spec, plane_of

__all__ = [
    "angles",
    "index_args",
    "power",
    "rows_of_a_program",
    "rule_numbers",
    "tile_rows",
    "vector_numbers",
    "warps",
]

TILE = 2048
"""Numbers that a program holds, where a vector is not longer."""

FEW_ROWS = 512
"""Up to so many rows each program takes one, so that they spread over the processors."""

_TRITON = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
}


def power(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def vector_numbers(spec: Spec, dim: int) -> dict[str, Any]:
    """What kernels need to know of vectors of ``dim`` channels before they are coded."""
    block = dim & -dim
    return {
        "DIM": dim,
        "WIDTH": max(8, power(dim)),
        "ROTATION": spec.rotation,
        "LOG": block.bit_length() - 1,
        "NORM": torch.tensor(block**-0.5).item(),
        "OUTLIERS": spec.outlier_count(dim),
        "CENTRED": spec.centred,
    }


def rule_numbers(spec: Spec, store: Sequence[Tensor], dim: int) -> dict[str, Any]:
    """What kernels need to know of the rule by which numbers become codes."""
    scale = plane_of(store, spec, "scale")[0].dtype
    value = plane_of(store, spec, "outlier_value")[0].dtype
    return {
        "ROOT": torch.tensor(dim**0.5).item(),
        "RULE": spec.rule,
        "CODE": spec.code,
        "BITS": spec.bits or 8,
        "STATIC": spec.static_scale,
        "HAS_ZERO": spec.has_zero,
        "HAS_MINIMUM": spec.has_minimum,
        "PARAMETER": _TRITON.get(scale, tl.float32),
        "LARGEST": torch.finfo(scale).max if scale.is_floating_point else 0.0,
        "LARGEST_VALUE": torch.finfo(value).max if value.is_floating_point else 0.0,
    }


def warps(numbers: int) -> int:
    """Warps for a tile: sixteen numbers for a thread."""
    return max(1, min(8, numbers // 512))


def tile_rows(numbers: int) -> int:
    """Rows of ``numbers`` that make a tile."""
    return max(1, TILE // numbers)


def rows_of_a_program(rows: int, numbers: int) -> int:
    """How many rows of ``numbers`` a program takes."""
    return 1 if rows <= FEW_ROWS else tile_rows(numbers)


def index_args(index: Tensor) -> tuple[Tensor, int, int]:
    """Integers ``[T]``, which serve every row, or ``[B, T]``, as kernels take them."""
    return (index, index.stride(0), index.stride(1)) if index.dim() == 2 else (index, 0, index.stride(0))


def angles(position: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Cosines and sines fp32 ``[B or 1, T, D / 2]`` of tokens at ``position``, and the strides of row and token.

    Computed here, in fp64 as ``kvq_ops.codecs.rotary`` does, once for all heads.
    """
    position = position if position.dim() == 2 else position.unsqueeze(0)
    angle = position.unsqueeze(-1).double() * inv_freq.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    return cos, sin, cos.stride(0) if position.shape[0] > 1 else 0, cos.stride(1)
