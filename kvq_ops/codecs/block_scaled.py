"""4-bit floats in small blocks, each with a float8 scale (NVFP4).

e2m1 codes 0..7 are the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. For each 16 channels
``sf = e4m3(amax / (6 g))`` and ``q = e2m1(x / (sf g))``; ``x' = q sf g``. ``g`` is the ``decode_scale`` of the tensor (what a
reader multiplies by, not its reciprocal); unless it was set beforehand it is fitted to the first tokens that are not all zero:
``g = amax / (448 * 6)``.

Where ``amax / (6 g)`` rounds to zero, at ``2^-10`` or below, the block would be erased. It takes the smallest scale ``2^-9``
instead, as long as anything in it is nearest to a value other than zero then: half a step of that scale is ``2^-11 g``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..formats import Format
from .numeric import SMALLEST_AMAX, divide, finite_or_zero, grouped, nan_to_zero, safe_divide, spread
from .packing import pack, unpack

LARGEST_SCALE, LARGEST_CODE = 448.0, 6.0
_SMALLEST_SCALE = 2.0**-9
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def e2m1_codes(x: Tensor) -> Tensor:
    """uint8 codes of the nearest e2m1 values: ties to the even code, saturating at 6."""
    magnitude = x.abs()
    code = torch.signbit(x).to(torch.uint8) << 3
    for below, midpoint in enumerate(_MIDPOINTS):
        # A tie goes up exactly where the code above the midpoint is the even one.
        code += (magnitude >= midpoint) if below % 2 else (magnitude > midpoint)
    return code


def e2m1_values(codes: Tensor) -> Tensor:
    """fp32 values of e2m1 codes."""
    table = torch.tensor(
        _MAGNITUDES + tuple(-m for m in _MAGNITUDES), dtype=torch.float32, device=codes.device
    )
    return table[codes.int()]


def calibrate(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    if "decode_scale" not in fmt._index:
        return {}
    if x.numel() == 0:
        return {"decode_scale": x.new_zeros(1)}
    amax = finite_or_zero(x).abs().amax().reshape(1)
    scale = divide(amax.clamp_min(SMALLEST_AMAX), LARGEST_SCALE * LARGEST_CODE)
    return {"decode_scale": torch.where(amax > 0, scale, 0.0)}


def encode(x: Tensor, fmt: Format, static: Mapping[str, Tensor]) -> dict[str, Tensor]:
    assert fmt.group
    if "exponent" in fmt._index:
        return _encode_mx(x, fmt)
    g = static["decode_scale"]
    amax = grouped(finite_or_zero(x).abs(), fmt.group).amax(-1)
    ratio = safe_divide(amax, LARGEST_CODE * g).clamp_max(LARGEST_SCALE)
    ratio = torch.where(safe_divide(amax, g) > _SMALLEST_SCALE / 4, ratio.clamp_min(_SMALLEST_SCALE), ratio)
    scale = ratio.to(torch.float8_e4m3fn)
    wide = spread(scale.float() * g, fmt.group, x.shape[-1])
    return {
        "codes": pack(e2m1_codes(safe_divide(nan_to_zero(x), wide)), 4),
        "block_scale": scale.view(torch.uint8),
    }


def decode(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    assert fmt.group
    if "exponent" in planes:
        return _decode_mx(planes, fmt)
    values = e2m1_values(unpack(planes["codes"], 4))
    scale = planes["block_scale"].view(torch.float8_e4m3fn).float() * planes["decode_scale"]
    return values * spread(scale, fmt.group, values.shape[-1])


def _encode_mx(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    """OCP MX: ``e = floor(log2 amax) - emax`` for each block, stored as ``e + 127``; ``q = round(x / 2^e)``, saturating."""
    assert fmt.group
    largest, emax = (LARGEST_CODE, 2) if fmt.element is None else (torch.finfo(fmt.element).max, 8)
    amax = grouped(finite_or_zero(x).abs(), fmt.group).amax(-1)
    # frexp gives amax = m 2^e with m in [0.5, 1), so that floor(log2 amax) is e - 1, exactly.
    exponent = torch.where(amax > 0, torch.frexp(amax).exponent - 1 - emax, -127).clamp(-127, 127)
    wide = spread(_power_of_two(exponent), fmt.group, x.shape[-1])
    values = (nan_to_zero(x) / wide).clamp(-largest, largest)
    codes = pack(e2m1_codes(values), 4) if fmt.element is None else values.to(fmt.element).view(torch.uint8)
    return {"codes": codes, "exponent": (exponent + 127).to(torch.uint8)}


def _decode_mx(planes: Mapping[str, Tensor], fmt: Format) -> Tensor:
    assert fmt.group
    codes = planes["codes"]
    values = e2m1_values(unpack(codes, 4)) if fmt.element is None else codes.view(fmt.element).float()
    scale = _power_of_two(planes["exponent"].int() - 127)
    return values * spread(scale, fmt.group, values.shape[-1])


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` in fp32, exact down to the subnormal ``2**-127``."""
    return torch.ldexp(torch.ones((), dtype=torch.float32, device=exponent.device), exponent.float())
