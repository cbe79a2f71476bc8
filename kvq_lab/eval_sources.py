"""Where a stored tensor's error comes from: its scales, or the rounding of its codes.

*Scale* is what would remain if codes were real numbers: with the stored scale and minimum, rounded to their dtype as they are,
a value inside of the range that codes span comes back exactly, and one outside is clipped to its end. *Rounding* is the rest.
Where values are rotated before they are coded both are told apart in the rotated domain, which changes no length. So the two
add up, as vectors and, since a clipped value has no rounding error, in squares too (except where a vector's length is stored, and
real codes would have the right direction at the wrong length).

The range is found by decoding the store with every code in turn, which asks a codec nothing but ``decode``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_ops.codecs import codec_for, prepare
from kvq_ops.codecs.rotary import turn
from kvq_ops.codecs.rotation import unrotate
from kvq_ops.formats import Format

_MOST_BITS = 4


def _bare(fmt: Format) -> Format:
    return fmt.base or fmt


def _decode_codes(store: Sequence[Tensor], base: Format) -> Tensor:
    """What the codes say, before outliers are put in and the rotation is undone."""
    planes = {plane.name: tensor for plane, tensor in zip(base.planes, store, strict=True)}
    return codec_for(base).decode(planes, base)


def _extreme_codes(codes: Tensor, base: Format) -> list[Tensor]:
    """Stores' code planes that together contain the smallest and the largest code of each value."""
    if base.element is not None:
        largest = torch.tensor([torch.finfo(base.element).max, -torch.finfo(base.element).max])
        return [torch.full_like(codes, int(b)) for b in largest.to(base.element).view(torch.uint8)]
    if base.bits == 8:
        return [torch.full_like(codes, 127), torch.full_like(codes, -127)]
    filled = []
    for code in range(2**base.bits):
        # A repeated code, little-endian: 8 codes fill whole bytes at any width.
        bits = sum(code << (base.bits * i) for i in range(8))
        pattern = torch.tensor(list(bits.to_bytes(base.bits, "little")), dtype=torch.uint8)
        filled.append(pattern.repeat(-(-codes.shape[-1] // base.bits))[: codes.shape[-1]].expand_as(codes))
    return filled


def code_range(store: Sequence[Tensor], fmt: Format) -> tuple[Tensor, Tensor] | None:
    """The smallest and the largest value ``[B, H, T, D]`` that the codes of each place can say, in the domain they are coded in.

    Args:
        store: planes of ``fmt``, or of its base.

    Returns:
        ``None`` for codes whose meaning is not known to be one for each place: ranges of those are no ranges of values.
    """
    base = _bare(fmt)
    if base.codec not in ("integer", "float8") and base.bits > _MOST_BITS and base.element is None:
        return None
    if store[0].dtype not in (torch.uint8, torch.int8):
        return None
    low = high = None
    for codes in _extreme_codes(store[0], base):
        said = _decode_codes([codes, *store[1:]], base)
        low = said if low is None else torch.minimum(low, said)
        high = said if high is None else torch.maximum(high, said)
    if low is None or high is None:
        return None
    said = _decode_codes(store, base)
    return (low, high) if bool(((said >= low) & (said <= high)).all()) else None


def without_rounding(x: Tensor, store: Sequence[Tensor], fmt: Format, decoded: Tensor) -> Tensor | None:
    """``x [B, H, T, D]`` as it would come back if codes were real numbers; ``None`` where that cannot be told.

    Args:
        store: the planes of ``fmt`` that hold ``x``.
        decoded: what they read as.
    """
    if fmt.lossless:
        return decoded
    base = _bare(fmt)
    base_store = [*store[: len(base.planes) - 1], store[-1]]
    planes = {plane.name: tensor for plane, tensor in zip(base.planes, base_store, strict=True)}
    position = planes.get("position")
    turned = prepare(x, base, planes, position)
    if "norm" in planes:
        length = turned.double().norm(dim=-1, keepdim=True)
        longer = planes["norm"].double().unsqueeze(-1) / length
        clipped = (turned.double() * torch.where(length > 0, longer, 0.0)).float()
    else:
        span = code_range(base_store, fmt)
        if span is None:
            return None
        clipped = turned.clamp(*span)
    if base.outliers:
        index = planes["outlier_index"].long()
        clipped = clipped.scatter(-1, index, turned.gather(-1, index))
    if base.rotation:
        clipped = unrotate(clipped, base.rotation)
    if position is not None:
        clipped = turn(clipped, position - 1, planes["inv_freq"])
    if fmt.windowed:
        token = torch.arange(x.shape[2], device=x.device)
        coded = (token >= fmt.sinks) & (token < store[fmt.index("coded")].unsqueeze(1))
        clipped = torch.where(coded[:, None, :, None], clipped, decoded)
    return clipped
