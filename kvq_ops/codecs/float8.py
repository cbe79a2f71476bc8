"""8-bit floats with an fp32 scale for a tensor, a head, or a token and head.

``s = max(amax, 1e-8) / max_code`` with 448 for e4m3 and 57344 for e5m2; ``q = round_to_even(clamp(x / s, -max, max))``,
``x' = q s``. The clamp comes first because a plain cast does not saturate everywhere. Scales that span tokens are fitted
to the first tokens that are not all zero, or set beforehand; while they are unset (zero) all codes are zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..formats import Format
from .numeric import SMALLEST_AMAX, divide, finite_or_zero, nan_to_zero, safe_divide


def _largest(fmt: Format) -> float:
    assert fmt.element is not None
    return torch.finfo(fmt.element).max


def calibrate(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    if fmt.group is not None:
        return {}
    per_head = fmt.planes[fmt.index("scale")].axes == "H"
    magnitude = finite_or_zero(x).abs()
    if x.numel() == 0:
        amax = x.new_zeros(x.shape[1] if per_head else 1)
    else:
        amax = magnitude.amax((0, 2, 3)) if per_head else magnitude.amax().reshape(1)
    scale = divide(amax.clamp_min(SMALLEST_AMAX), _largest(fmt))
    return {"scale": torch.where(amax > 0, scale, 0.0)}


def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    assert fmt.element is not None
    largest = _largest(fmt)
    planes: dict[str, Tensor] = {}
    if fmt.group is None:
        scale = static["scale"]
        wide = scale.view(1, -1, 1, 1)
    else:
        planes["scale"] = divide(finite_or_zero(x).abs().amax(-1).clamp_min(SMALLEST_AMAX), largest)
        wide = planes["scale"].unsqueeze(-1)
    values = safe_divide(nan_to_zero(x), wide).clamp(-largest, largest)
    planes["codes"] = values.to(fmt.element).view(torch.uint8)
    return planes


def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    scale = planes["scale"]
    wide = scale.view(1, -1, 1, 1) if fmt.group is None else scale.unsqueeze(-1)
    assert fmt.element is not None
    return planes["codes"].view(fmt.element).float() * wide
