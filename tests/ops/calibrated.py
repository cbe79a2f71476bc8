"""Formats that are calibrated, and samples to fit them to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvq_ops.calibration import fit
from kvq_ops.formats import get_format

SCALED = (
    "fp8_e4m3+static",
    "fp8_per_head+static",
    "nvfp4+static",
    "int8_per_tensor+static",
    "int4_per_head+static",
)
CODEBOOKS = ("nuq4_keys", "nuq3_values", "nuq2_keys+outlier1%")
CALIBRATED = (*SCALED, *CODEBOOKS, "fp8_e4m3+static+recent2", "nuq4_values+sink2", "fp8_e5m2+hadamard+static")
D = 16


def sample(heads: int = 2, tokens: int = 40) -> Tensor:
    return torch.randn(2, heads, tokens, D) * torch.linspace(0.5, 3, heads).view(1, -1, 1, 1)


def fitted(name: str, heads: int = 2, **given: Any) -> dict[str, Tensor]:
    return fit(sample(heads), get_format(name), **given)
