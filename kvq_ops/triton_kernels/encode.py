"""``quantize``: a whole tensor into a new store."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import Format
from ..registry import implementations
from .append import append_vectors, known_spec
from .window_append import append_window

__all__ = ["quantize"]


def quantize(x: Tensor, fmt: Format) -> list[Tensor]:
    """``kvq::quantize``."""
    if fmt.calibrated:  # there is nothing that was calibrated, and that is said there
        return next(row for row in implementations("quantize") if row.name == "torch").run(x, fmt)
    batch, heads, tokens, dim = x.shape
    store = []
    for plane, shape, dtype in zip(
        fmt.planes, fmt.plane_shapes(batch, heads, tokens, dim), fmt.plane_dtypes(x.dtype), strict=True
    ):
        whole = plane.per_token and not fmt.windowed
        store.append(x.new_empty(shape, dtype=dtype) if whole else x.new_zeros(shape, dtype=dtype))
    if not fmt.windowed:
        store[-1].fill_(tokens)
    if x.numel():
        spec = known_spec(fmt)
        if spec.windowed:
            append_window(store, torch.arange(tokens, device=x.device), x, spec)
        else:
            append_vectors(store, spec, x, None, None, tokens, False)
    return store
