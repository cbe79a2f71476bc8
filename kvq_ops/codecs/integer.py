"""Integer codes: symmetric int8 for a token and head, asymmetric small codes for groups of channels.

Symmetric: ``s = max(amax, 1e-8) / 127``, ``q = clamp(round(x / s), -127, 127)``, ``x' = q s``.
Asymmetric: ``s = (max - min) / (2^b - 1)`` and ``m = min`` are rounded to 16 bits *first*, then
``q = clamp(round((x - m) / s), 0, 2^b - 1)`` with the rounded values, ``x' = q s + m``; a group without spread has ``s = 0``
and every code 0. A minimum or range that 16 bits cannot hold saturates and stays finite, and a value beyond ``LARGEST``
(just under half of the fp32 range) is coded as that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..formats import Format
from .numeric import SMALLEST_AMAX, divide, finite_or_zero, grouped, nan_to_zero, safe_divide
from .packing import pack, unpack

LARGEST = torch.finfo(torch.float32).max * (0.5 - 2**-8)
"""Keeps ``max - min`` finite, and the top code too when a bfloat16 scale was rounded up."""


def calibrate(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    return {}


def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if "minimum" in fmt._index:
        return _encode_asymmetric(x, fmt)
    groups, put_back = _groups(x, fmt)
    scale = divide(finite_or_zero(groups).abs().amax(-1).clamp_min(SMALLEST_AMAX), 127)
    codes = (nan_to_zero(groups) / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
    return {"codes": put_back(codes), "scale": scale}


def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    q = planes["codes"] if "minimum" not in planes else unpack(planes["codes"], fmt.bits)
    groups, put_back = _groups(q.float(), fmt)
    scale = planes["scale"].float().unsqueeze(-1)
    if "minimum" not in planes:
        return put_back(groups * scale)
    return put_back(groups * scale + planes["minimum"].float().unsqueeze(-1))


def _groups(x: Tensor, fmt: Format, fill: float = 0.0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``x [B, H, T, D]`` with the members of a group along a last axis, shaped like the scales before it; and the way back."""
    tokens, channels = x.shape[2], x.shape[3]
    if fmt.token_group > 1:
        groups = grouped(x.transpose(2, 3), fmt.token_group, fill).transpose(2, 3)
        return groups, lambda y: y.transpose(2, 3).flatten(3)[..., :tokens].transpose(2, 3)
    if fmt.group == 0:
        if "minimum" in fmt._index:
            return x.unsqueeze(-2), lambda y: y.squeeze(-2)
        return x, lambda y: y
    assert fmt.group
    return grouped(x, fmt.group, fill), lambda y: y.flatten(-2)[..., :channels]


def _encode_asymmetric(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    top = 2**fmt.bits - 1
    parameter = fmt.planes[fmt.index("scale")].dtype
    assert parameter is not None
    largest = torch.finfo(parameter).max
    ok = x.isfinite()
    x = nan_to_zero(x).clamp(-LARGEST, LARGEST)
    high = _groups(torch.where(ok, x, -torch.inf), fmt, -torch.inf)[0].amax(-1)
    low = _groups(torch.where(ok, x, torch.inf), fmt, torch.inf)[0].amin(-1)
    # A group of NaN and infinities alone has no range of its own.
    empty = high < low
    high, low = high.masked_fill(empty, 0.0), low.masked_fill(empty, 0.0)
    scale = divide(high - low, top).clamp_max(largest).to(parameter)
    minimum = low.clamp(-largest, largest).to(parameter)
    values, put_back = _groups(x, fmt)
    offset = values - minimum.float().unsqueeze(-1)
    codes = safe_divide(offset, scale.float().unsqueeze(-1)).round().clamp(0, top).to(torch.uint8)
    return {"codes": pack(put_back(codes), fmt.bits), "scale": scale, "minimum": minimum}
