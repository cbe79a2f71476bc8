"""Keys as they were before rotary position embedding.

Rotary embedding turns each pair of channels ``(c, c + D / 2)`` by ``position * inv_freq[c]``, which spreads what is constant in a
channel over the pair. A format with the planes ``inv_freq`` and ``position`` turns keys back before it codes them, and forward
when it reads them. The position is the slot that a token was written to, and moves with its codes. What was turned back by some
position is turned forward by the same, so that the rotation costs nothing in itself; but ranges of channels were fitted to keys
at their own positions. In rows that are padded on the left slots run ahead of positions, and keys leave those ranges: pad on
the right, or use another format. Where ``inv_freq`` is zero nothing is turned.

Sines and cosines are computed in float64 and rounded, so that backends agree on them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def turn(x: Tensor, position: Tensor, inv_freq: Tensor, *, back: bool = False) -> Tensor:
    """Turn fp32 ``x [B, H, N, D]`` by ``position``, integers ``[B, 1, N]`` or ``[1, 1, N]``, or back.

    Args:
        inv_freq: fp32 ``[D / 2]``, radians for each step.
    """
    angle = position.double().unsqueeze(-1) * inv_freq.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    if back:
        sin = -sin
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
