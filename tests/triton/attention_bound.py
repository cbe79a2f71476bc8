"""How far attention with fp16 (or bf16) queries may lie from float64 attention over the decoded store, computed from the data.

``u`` is half a unit in the last place of fp16 (of bf16, where plainly stored bf16 meets bf16 queries). In the space in which
vectors are coded, with ``m`` what a code of zero stands for:

* a number of a tile differs from the decoded ``k`` by at most ``u (|k - m| + |k|)``, a product and a sum; by
  ``u (2 |k - m| + |m| + |k|)`` where parameters are fp32, which are rounded too; by ``2 u max |k|`` for entries of a table; by
  nothing for integers and float8 with one scale for a token and for nvfp4 and mx blocks. What is exact in the store is rounded
  once. To that comes ``2**-24 max |k|`` where a token is divided by a power of two (subnormal fp16);
* a query that was rotated is rounded once, any other is exact up to ``2**-24 max |q|``;
* so a score moves by at most ``d = |scale| sum (|q| dk + dq (|k| + dk))``, sums in fp32 adding ``2**-22 |scale| sum |q| |k|``,
  and weights by ``tanh(d / 2)`` in total variation (see ``checks.quantization_bound``);
* weights are rounded once where they meet a tile, which holds ``v`` or, where the minimum of a token is added behind it,
  ``v - m``; values differ like keys. If values are rotated back, errors add up like absolute values of the matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvq_ops import reference
from kvq_ops.codecs.rotation import block_size, rotate
from kvq_ops.formats import Format
from kvq_ops.triton_kernels import spec as S
from kvq_ops.triton_kernels.spec import Spec, spec_of

TINY = 2.0**-24


def numbers_error(
    store: Sequence[Tensor], fmt: Format, unit: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Decoded numbers in the space of their codes, how far those of a tile may be off, and what of them is in the tile."""
    spec = spec_of(fmt)
    assert isinstance(spec, Spec)
    x = reference.decode_store(store, fmt, rotated=reference.folds_rotation(fmt)).double()
    largest = x.abs().amax(-1, keepdim=True)
    tile = x.abs()
    if spec.code == S.EXACT:
        error = x.abs() * unit
    elif spec.code in (S.TABLE, S.NORMAL) and not spec.rotary:
        error = 2 * unit * largest.expand_as(x)
    else:
        empty = [torch.zeros_like(store[0]), *store[1:]]
        low = reference.decode_store(empty, fmt, rotated=reference.folds_rotation(fmt)).double()
        scaled, error = (x - low).abs(), x.abs() * unit
        folded = spec.scale_channels == 0 or spec.static_scale
        if not (folded or spec.scale_kind != S.SCALE_FLOAT):
            error += unit * scaled
            parameter = fmt.planes[spec.planes[S.SLOTS.index("scale")]].dtype
            if parameter is torch.float32:
                error += unit * (scaled + low.abs())
        elif not (spec.percent or spec.windowed or spec.rotary):
            error, tile = torch.zeros_like(x), scaled
    if spec.code == S.TABLE and spec.scale_channels == 0:
        tile = 2 * largest.expand_as(x)
    return x.numpy(), (error + TINY * largest).numpy(), tile.numpy()


def half_bound(
    query: Tensor,
    stores: Sequence[Sequence[Tensor]],
    fmts: Sequence[Format],
    want: np.ndarray,
    open_: np.ndarray,
    scale: float,
) -> np.ndarray:
    """``[B, Hq, Tq, Dv]``: what ``|out - want|`` may be, the rounding of the result left out.

    Args:
        open_: bool ``[B, Hq, Tq, T]``, which key each query may see.
    """
    units = [
        2.0**-8
        if fmt.lossless and query.dtype is torch.bfloat16 and store[0].dtype is torch.bfloat16
        else 2.0**-11
        for fmt, store in zip(fmts, stores, strict=True)
    ]
    (k, dk, _), (v, dv, v_tile) = (
        numbers_error(store, fmt, unit) for store, fmt, unit in zip(stores, fmts, units, strict=True)
    )
    q = query.double()
    if reference.folds_rotation(fmts[0]):
        q = rotate(q, fmts[0].rotation)
    q_error = q.abs() * (2.0**-11 if reference.folds_rotation(fmts[0]) else 0) + TINY * q.abs().amax(
        -1, keepdim=True
    )
    group = query.shape[1] // k.shape[1]
    k, dk, v, dv, v_tile = (np.repeat(x, group, 1) for x in (k, dk, v, dv, v_tile))
    a, da = q.abs().numpy(), q_error.numpy()
    turned = (np.swapaxes(x, -1, -2) for x in (dk, np.abs(k) + dk, np.abs(k)))
    by_key, by_query, by_sums = (x @ y for x, y in zip((a, da, a), turned, strict=True))
    moved = abs(scale) * (by_key + by_query + 2.0**-22 * by_sums)
    d = np.where(open_, moved, 0).max(-1, initial=0)[..., None]
    seen = open_[..., None]
    # Rounded weights, and numbers that are off, each at most as much as with all weight on the worst.
    wrong = np.where(seen, (units[1] * v_tile + dv * (1 + units[1]))[:, :, None], 0).max(3, initial=0)
    true = reference.decode_store(stores[1], fmts[1]).double().numpy().repeat(group, 1)
    high = np.where(seen, true[:, :, None], -np.inf).max(3, initial=-np.inf)
    low = np.where(seen, true[:, :, None], np.inf).min(3, initial=np.inf)
    if reference.folds_rotation(fmts[1]):
        n = block_size(v.shape[-1])
        blocks = wrong.reshape(*wrong.shape[:-1], -1, n)
        wrong = np.broadcast_to(blocks.sum(-1, keepdims=True) / n**0.5, blocks.shape).reshape(wrong.shape)
    # Sinks pull towards zero.
    spread = np.maximum(high, 0) - np.minimum(low, 0)
    any_open = open_.any(-1)[..., None]
    return np.where(any_open, np.tanh(d / 2) * np.where(any_open, spread, 0) + wrong, 0) + 1e-5 * (
        1 + np.abs(want)
    )
