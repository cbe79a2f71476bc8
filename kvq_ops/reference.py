"""``append_`` and ``attention`` in plain torch, for any device and format: the meaning of the operators.

Kernels are measured against this file. ``attention(..., compute=torch.float64)`` is the oracle of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .codecs import decode, encode
from .codecs.rotation import rotate, unrotate
from .formats import Format
from .options import Options
from .window import append_window_, decode_window

_SCORE_ELEMENTS = 1 << 24
"""Scores held at once; longer prefills are cut along the queries."""


def quantize(x: Tensor, fmt: Format) -> list[Tensor]:
    """A full store holding ``x [B, H, T, D]``."""
    if fmt.windowed:
        store = fmt.empty_store(*x.shape, dtype=x.dtype, device=x.device)
        append_(store, torch.arange(x.shape[2], device=x.device), x, fmt)
        return store
    token, static = encode(x, fmt)
    length = torch.full((x.shape[0],), x.shape[2], dtype=torch.int64, device=x.device)
    planes = [t if t is not None else s for t, s in zip(token, static, strict=True)]
    planes[-1] = length
    return [plane.contiguous() for plane in planes if plane is not None]


def append_(store: Sequence[Tensor], position: Tensor, x: Tensor, fmt: Format) -> None:
    """Encode ``x [B, H, T, D]`` and write its tokens at ``position``: ``[T]``, or ``[B, T]`` for ragged rows."""
    if x.numel() == 0:
        return
    position = position.long()
    if fmt.windowed:
        start = (position if position.dim() == 2 else position.unsqueeze(0))[:, 0]
        append_window_(store, start.expand(x.shape[0]), x, fmt)
        return
    token, static = encode(x, fmt, store, position)
    rows = None
    if position.dim() == 2:
        rows = torch.arange(x.shape[0], device=x.device).unsqueeze(1)
    for plane, new, kept in zip(store, token, static, strict=True):
        if kept is not None:
            plane.copy_(kept)
        elif new is not None:
            _write_tokens(plane, rows, position, new.to(plane.dtype))
    length = store[-1]
    length.copy_(torch.maximum(length, position.amax(-1) + 1))


def _write_tokens(plane: Tensor, rows: Tensor | None, position: Tensor, new: Tensor) -> None:
    if rows is None:
        plane.index_copy_(2, position, new)
    else:
        plane.transpose(1, 2)[rows, position] = new.transpose(1, 2)


def decode_store(store: Sequence[Tensor], fmt: Format, *, rotated: bool = False) -> Tensor:
    """A store as fp32 (or its own dtype, when lossless) ``[B, H, T, D]``, exact tokens in their places.

    Args:
        rotated: leave vectors in the space in which the format codes them.
    """
    return (decode_window if fmt.windowed else decode)(store, fmt, rotated=rotated)


def attention(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key_format: Format,
    value_format: Format,
    *,
    use_length: bool = True,
    compute: torch.dtype = torch.float32,
    **given: Any,
) -> Tensor:
    """Attention over the decoded stores; arguments as in ``kvq::attention``.

    Args:
        compute: dtype of all arithmetic; float64 makes this the oracle.
        given: ``Options``.

    Returns:
        ``[B, Hq, Tq, Dv]`` in the dtype of ``query`` (float64 when ``compute`` is float64).
    """
    mask, causal, scale, window, softcap, sinks = Options(**given)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tokens = key_store[0].shape[2]
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    used = _tokens_in_reach(tokens, key_store[-1], mask, use_length)
    key_store = _first_tokens(key_store, key_format, used)
    value_store = _first_tokens(value_store, value_format, used)
    if mask is not None and mask.shape[-1] != 1:
        mask = mask[..., :used]
    length = key_store[-1] if use_length else None
    # Rotating the query and the output is cheaper than rotating every key and value back. The oracle takes the long way.
    fold_key = folds_rotation(key_format) and compute is not torch.float64
    fold_value = folds_rotation(value_format) and compute is not torch.float64
    key = decode_store(key_store, key_format, rotated=fold_key).to(compute)
    value = decode_store(value_store, value_format, rotated=fold_value).to(compute)
    out_dtype = query.dtype if compute is not torch.float64 else compute
    query = query.to(compute)
    if fold_key:
        query = rotate(query, key_format.rotation)
    if sinks is not None:
        sinks = sinks.to(compute)

    rows = max(1, _SCORE_ELEMENTS // max(1, query.shape[0] * query.shape[1] * used))
    parts = []
    for start in range(0, query.shape[2], rows):
        stop = min(start + rows, query.shape[2])
        allowed, bias = _mask_terms(
            mask, query.shape[2], (start, stop), used, tokens, length, causal, window, query.device
        )
        parts.append(_attend(query[:, :, start:stop], key, value, allowed, bias, scale, softcap, sinks))
    if not parts:
        return query.new_empty((*query.shape[:3], value.shape[-1]), dtype=out_dtype)
    out = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    return (unrotate(out, value_format.rotation) if fold_value else out).to(out_dtype)


def folds_rotation(fmt: Format) -> bool:
    """Whether attention may work in the rotated space: not where each key is turned by its position after that."""
    return bool(fmt.rotation) and "position" not in fmt._index


def _tokens_in_reach(tokens: int, length: Tensor, mask: Tensor | None, use_length: bool) -> int:
    """How many leading tokens any query may attend to; where asking costs a device synchronisation, all of them."""
    if length.device.type != "cpu" or tokens == 0:
        return tokens
    used = tokens
    if use_length:
        used = min(used, int(length.max()) if length.numel() else 0)
    if mask is not None and mask.shape[-1] == tokens and mask.numel():
        open_ = mask if mask.dtype == torch.bool else mask != -torch.inf
        reachable = open_.reshape(-1, tokens).any(0).nonzero()
        used = min(used, int(reachable[-1]) + 1 if len(reachable) else 0)
    return used


def _first_tokens(store: Sequence[Tensor], fmt: Format, used: int) -> list[Tensor]:
    return [
        tensor[:, :, : -(-used // plane.tokens)] if plane.per_token else tensor
        for plane, tensor in zip(fmt.planes, store, strict=True)
    ]


def _mask_terms(
    mask: Tensor | None,
    queries: int,
    chunk: tuple[int, int],
    used: int,
    tokens: int,
    length: Tensor | None,
    causal: bool,
    window: int,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """What may be attended (bool) and what is added to the scores, each broadcastable to ``[B, Hq, chunk, used]``.

    Args:
        mask: four axes, each full or 1.
    """
    allowed = bias = None
    if mask is not None:
        if mask.shape[2] != 1:
            mask = mask[:, :, chunk[0] : chunk[1]]
        if mask.dtype == torch.bool:
            allowed = mask
        else:
            bias = mask
    if length is None and not causal and not window:
        return allowed, bias
    key_index = torch.arange(used, device=device)
    end = torch.full((1,), tokens, device=device) if length is None else length
    end = end.view(-1, 1, 1, 1)
    inside = key_index < end
    if causal or window:
        newest = end - queries + torch.arange(*chunk, device=device).view(1, 1, -1, 1)
        if causal:
            inside = inside & (key_index <= newest)
        if window:
            inside = inside & (key_index > newest - window)
    return (inside if allowed is None else inside & allowed), bias


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    batch, heads, rows, _ = query.shape
    kv_heads, tokens, value_dim = value.shape[1:]
    if tokens == 0 or batch == 0 or heads == 0:
        # A sink has no value, so that it leaves zeros too.
        return query.new_zeros(batch, heads, rows, value_dim)
    group = heads // kv_heads
    if not softcap and sinks is None and query.dtype is torch.float32:
        mask = bias.to(query.dtype) if bias is not None else allowed
        if bias is not None and allowed is not None:
            mask = torch.where(allowed, bias.to(query.dtype), -torch.inf)
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=group != 1)
        return out if mask is None else _zero_closed_rows(out, mask)
    grouped_query = query.reshape(batch, kv_heads, group * rows, query.shape[-1])
    scores = (grouped_query @ key.transpose(-1, -2) * scale).view(batch, heads, rows, tokens)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.view(1, -1, 1, 1))
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.view(1, -1, 1, 1) - top)
    weights = weights / total.masked_fill(total == 0, 1.0)
    weights = weights.view(batch, kv_heads, group * rows, tokens)
    return (weights @ value).view(batch, heads, rows, value_dim)


def _zero_closed_rows(out: Tensor, mask: Tensor) -> Tensor:
    """Zeros in rows that may attend to nothing, whatever the library does there."""
    open_ = mask if mask.dtype == torch.bool else mask != -torch.inf
    return out.masked_fill(~open_.any(-1, keepdim=True), 0.0)
