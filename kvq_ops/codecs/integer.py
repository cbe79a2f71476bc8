"""Integer codes of 2, 3, 4 or 8 bits, symmetric or asymmetric, with scales for a tensor, a head, a token and head, a group of
channels, or a channel over a group of tokens.

Symmetric: ``s = max(amax, 1e-8) / L`` with ``L = 2^(b-1) - 1``, ``q = clamp(round(x / s), -L, L)``, ``x' = q s``; codes below 8
bits are stored in two's complement.

Asymmetric: ``s = (max - min) / (2^b - 1)`` and ``m = min``, ``q = clamp(round((x - m) / s), 0, 2^b - 1)``, ``x' = q s + m``; a
group without spread has ``s = 0`` and every code 0.

Asymmetric with one scale for many tokens: zero has to be a value, since slots that hold no token read as zero. The range is
widened to include it, ``z = round(-min / s)`` is an integer, ``q = clamp(round(x / s) + z, 0, 2^b - 1)``, ``x' = (q - z) s``;
stored is ``q - z`` modulo ``2^b``. Such scales, and symmetric ones, are fitted to the first tokens that are not all zero, or
set beforehand.

A scale or minimum of 16 bits is rounded *first*, and codes are computed with the rounded number. What 16 bits cannot hold
saturates and stays finite, and a value beyond ``LARGEST`` (just under half of the fp32 range) is coded as that.
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
    if fmt.group is not None:
        return {}
    per_head = fmt.planes[fmt.index("scale")].axes == "H"
    x = finite_or_zero(x)
    shape, axes = ((x.shape[1],), (0, 2, 3)) if per_head else ((1,), (0, 1, 2, 3))
    if x.numel() == 0:
        low = high = x.new_zeros(shape)
    else:
        low, high = x.amin(axes).reshape(shape), x.amax(axes).reshape(shape)
    if "zero_point" not in fmt._index:
        amax = torch.maximum(high, -low)
        scale = divide(amax.clamp_min(SMALLEST_AMAX), _largest(fmt))
        return {"scale": torch.where(amax > 0, scale, 0.0)}
    low, high = low.clamp(-LARGEST, 0.0), high.clamp(0.0, LARGEST)
    top = 2**fmt.bits - 1
    scale = divide((high - low).clamp_min(SMALLEST_AMAX), top)
    scale = torch.where(high > low, scale, 0.0)
    return {"scale": scale, "zero_point": safe_divide(-low, scale).round().clamp(0, top) + 0.0}  # no -0.0


def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if "minimum" in fmt._index:
        return _encode_asymmetric(x, fmt)
    largest = _largest(fmt)
    if fmt.group is None:
        steps = safe_divide(nan_to_zero(x), static["scale"].view(1, -1, 1, 1)).round()
        low, high = -largest, largest
        if "zero_point" in static:
            zero = static["zero_point"].view(1, -1, 1, 1)
            steps = torch.minimum(torch.maximum(steps, -zero), 2**fmt.bits - 1 - zero)
            low, high = -(2**fmt.bits), 2**fmt.bits
        return {"codes": _stored(steps.clamp(low, high), fmt)}
    groups, put_back = _groups(x, fmt)
    parameter = fmt.planes[fmt.index("scale")].dtype
    assert parameter is not None
    scale = divide(finite_or_zero(groups).abs().amax(-1).clamp_min(SMALLEST_AMAX), largest)
    scale = scale.clamp_max(torch.finfo(parameter).max).to(parameter)
    steps = safe_divide(nan_to_zero(groups), scale.float().unsqueeze(-1)).round()
    return {"codes": _stored(put_back(steps.clamp(-largest, largest)), fmt), "scale": scale}


def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    scale = planes["scale"].float()
    if "minimum" in planes:
        groups, put_back = _groups(unpack(planes["codes"], fmt.bits).float(), fmt)
        return put_back(groups * scale.unsqueeze(-1) + planes["minimum"].float().unsqueeze(-1))
    if fmt.group is None:
        zero = planes["zero_point"].view(1, -1, 1, 1) if "zero_point" in planes else None
        return _steps(planes["codes"], fmt, zero) * scale.view(1, -1, 1, 1)
    groups, put_back = _groups(_steps(planes["codes"], fmt), fmt)
    return put_back(groups * scale.unsqueeze(-1))


def _largest(fmt: Format) -> int:
    """The largest symmetric code."""
    return int(2 ** (fmt.bits - 1) - 1)


def _stored(steps: Tensor, fmt: Format) -> Tensor:
    """Whole numbers of steps as stored codes: int8, or packed modulo ``2^b``."""
    if fmt.planes[0].dtype is torch.int8:
        return steps.to(torch.int8)
    return pack((steps.to(torch.int16) & (2**fmt.bits - 1)).to(torch.uint8), fmt.bits)


def _steps(codes: Tensor, fmt: Format, zero: Tensor | None = None) -> Tensor:
    """The way back: fp32, in ``-zero..2^b - 1 - zero``, or in two's complement."""
    if fmt.planes[0].dtype is torch.int8:
        return codes.float()
    q = unpack(codes, fmt.bits).float()
    span = 2**fmt.bits
    return torch.where(q >= (span // 2 if zero is None else span - zero), q - span, q)


def _groups(x: Tensor, fmt: Format, fill: float = 0.0) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """``x [B, H, T, D]`` with the members of a group along a last axis, shaped like the scales before it; and the way back."""
    tokens, channels = x.shape[2], x.shape[3]
    if fmt.token_group > 1:
        groups = grouped(x.transpose(2, 3), fmt.token_group, fill).transpose(2, 3)
        return groups, lambda y: y.transpose(2, 3).flatten(3)[..., :tokens].transpose(2, 3)
    if fmt.group == 0:
        if "D" in fmt.planes[fmt.index("scale")].axes:
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
    # Of 0.0 and -0.0 either may be the minimum, depending on the order of a reduction: 0.0 is stored.
    minimum = (low.clamp(-largest, largest) + 0.0).to(parameter)
    values, put_back = _groups(x, fmt)
    offset = values - minimum.float().unsqueeze(-1)
    codes = safe_divide(offset, scale.float().unsqueeze(-1)).round().clamp(0, top).to(torch.uint8)
    return {"codes": pack(put_back(codes), fmt.bits), "scale": scale, "minimum": minimum}
