"""The format ``none``: values as they are. It carries structure tests, where any difference is a fault."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..formats import Format


def calibrate(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    return {}


def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {"codes": x}


def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    return planes["codes"]
