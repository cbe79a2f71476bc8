"""Codes that are the numbers of entries in a table.

``nuq``: a table for each layer, of its keys or of its values, and a centre and half-range in fp16 for each channel (keys, fitted
beforehand) or each token and head (values, at the write). ``z = (x - centre) / half_range`` with the fp16 numbers, the code is
that of the nearest entry, ``x' = entry * half_range + centre``. A half-range of zero gives ``z = 0``. After KVQuant (Hooper et
al., 2024).

``turbo``: vectors are rotated by ``random_hadamard``, after which their channels are close to normally distributed whatever they
were before, so that one table serves all: the entries that minimise the squared error for N(0, 1) (Lloyd 1982, Max 1960).
``n = fp16(|x|)``, ``z = x sqrt(D) / n``, the code is that of the nearest entry, and what is read has exactly the length ``n``:
``x' = entry * n / |entries|``. After TurboQuant (Zandieh et al., 2025).

Entries ascend. The nearest is found by the midpoints ``(a + b) / 2`` in fp32; a value on a midpoint takes the lower entry.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..formats import Format
from .numeric import nan_to_zero, safe_divide
from .packing import pack, unpack

_HALF_MAX = 65504.0
_LARGEST = torch.finfo(torch.float32).max / 4
"""Beyond this ``max - min`` and ``x - centre`` would be infinite."""

# The positive halves. Each entry is the mean of N(0, 1) between the midpoints around it.
_LLOYD_MAX = {
    2: (0.452780034636492, 1.5104176084990955),
    3: (0.24509417894422167, 0.7560052812058773, 1.3439092785049998, 2.1519457045369874),
    4: (
        0.128395029851147, 0.3880482994902902, 0.6567591185324634, 0.9423404564869613,
        1.2562311973471771, 1.6180463860218827, 2.0690172265313866, 2.7325895709951632,
    ),
}  # fmt: skip


def _normal_table(bits: int) -> tuple[float, ...]:
    half = _LLOYD_MAX[bits]
    return (*(-entry for entry in reversed(half)), *half)


def calibrate(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    return {}


def _table(fmt: Format, planes: Mapping[str, Tensor], device: torch.device) -> Tensor:
    if "norm" in fmt._index:
        return torch.tensor(_normal_table(fmt.bits), dtype=torch.float32, device=device)
    return planes["codebook"]


def nearest(z: Tensor, table: Tensor) -> Tensor:
    """uint8 numbers of the nearest of ascending entries."""
    midpoints = (table[1:] + table[:-1]) * 0.5
    return torch.bucketize(z, midpoints).to(torch.uint8)


def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    table = _table(fmt, static, x.device)
    ok = x.isfinite()
    x = nan_to_zero(x).clamp(-_LARGEST, _LARGEST)
    planes: dict[str, Tensor] = {}
    if "norm" in fmt._index:
        # In float64 the order of the sum does not show.
        norm = x.double().square().sum(-1).sqrt().clamp_max(_HALF_MAX).half()
        planes["norm"] = norm
        z = safe_divide(x * x.shape[-1] ** 0.5, norm.float().unsqueeze(-1))
    else:
        if fmt.group == 0:
            high = torch.where(ok, x, -torch.inf).amax(-1)
            low = torch.where(ok, x, torch.inf).amin(-1)
            empty = high < low
            high, low = high.masked_fill(empty, 0.0), low.masked_fill(empty, 0.0)
            planes["centre"], planes["half_range"] = middle(low, high)
        centre, half_range = _wide(planes or static)
        z = safe_divide(x - centre, half_range)
    planes["codes"] = pack(nearest(z, table), fmt.bits)
    return planes


def middle(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """fp16 centre and half-range of what lies between ``low`` and ``high``."""
    centre = (((high + low) * 0.5).clamp(-_HALF_MAX, _HALF_MAX) + 0.0).half()  # no -0.0, as for a minimum
    return centre, ((high - low) * 0.5).clamp_max(_HALF_MAX).half()


def _wide(planes: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Centre and half-range in fp32, broadcastable to ``[B, H, T, D]``."""
    centre, half_range = planes["centre"].float(), planes["half_range"].float()
    if centre.dim() == 2:  # of channels, [H, D]
        return centre[None, :, None], half_range[None, :, None]
    return centre.unsqueeze(-1), half_range.unsqueeze(-1)


def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    codes = unpack(planes["codes"], fmt.bits)
    entries = _table(fmt, planes, codes.device)[codes.int()]
    if "norm" in fmt._index:
        length = entries.double().square().sum(-1, keepdim=True).sqrt()
        return entries * (planes["norm"].double().unsqueeze(-1) / length).float()
    centre, half_range = _wide(planes)
    return entries * half_range + centre


def fit_channels(x: Tensor) -> dict[str, Tensor]:
    """fp16 centre and half-range of what is finite in each channel of ``x [B, H, T, D]``, ``[H, D]``."""
    ok = x.isfinite()
    high = torch.where(ok, x, -torch.inf).amax((0, 2))
    low = torch.where(ok, x, torch.inf).amin((0, 2))
    empty = high < low
    centre, half_range = middle(low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0))
    return {"centre": centre, "half_range": half_range}


def normalized(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> Tensor:
    """What the entries of a ``nuq`` codebook stand for: NaN where ``x`` is not finite or has no range."""
    if fmt.group == 0:
        ok = x.isfinite()
        high = torch.where(ok, x, -torch.inf).amax(-1)
        low = torch.where(ok, x, torch.inf).amin(-1)
        centre, half_range = middle(low.nan_to_num(posinf=0.0), high.nan_to_num(neginf=0.0))
        static = {"centre": centre, "half_range": half_range}
    wide_centre, wide_range = _wide(static)
    z = (x - wide_centre) / wide_range
    return torch.where(z.isfinite(), z, torch.nan)
