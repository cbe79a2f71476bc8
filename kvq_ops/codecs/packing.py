"""Several small codes in a byte, the lowest index in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes below ``2**bits`` ``[..., D]`` to bytes ``[..., D * bits / 8]``, for ``bits`` of 2, 3, 4 or 8.

    Eight 3-bit codes make three bytes, little-endian.
    """
    if bits == 8:
        return codes
    if bits == 3:
        word = codes.unflatten(-1, (-1, 8)).int()
        word = sum((word[..., i] << (3 * i) for i in range(1, 8)), word[..., 0])
        three = torch.stack([(word >> shift) & 255 for shift in (0, 8, 16)], -1)
        return three.to(torch.uint8).flatten(-2)
    per = 8 // bits
    parts = codes.unflatten(-1, (-1, per))
    packed: Tensor = parts[..., 0].clone()
    for i in range(1, per):
        packed |= parts[..., i] << (bits * i)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack`: uint8 ``[..., D]``."""
    if bits == 8:
        return packed
    if bits == 3:
        three = packed.unflatten(-1, (-1, 3)).int()
        word = three[..., 0] | (three[..., 1] << 8) | (three[..., 2] << 16)
        return torch.stack([(word >> shift) & 7 for shift in range(0, 24, 3)], -1).to(torch.uint8).flatten(-2)
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)
