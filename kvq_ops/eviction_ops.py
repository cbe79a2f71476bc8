"""Weighing and dropping tokens as operators, so that captured graphs can do it.

    kvq::keep_tokens_(Tensor(a!) cache, Tensor kept) -> ()
    kvq::attention_mass(Tensor query, Tensor key, int heads, Tensor? mask, bool causal, float? scale) -> (Tensor, Tensor)
    kvq::scores_mass(Tensor scores, Tensor? probabilities, int heads, int tokens, float floor) -> (Tensor, Tensor)

``cache`` is dense, or a ``QuantizedKV``, whose codes then move; ``kept`` says which slots stay, ``[B, H, K]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .eviction import keep_tokens_
from .handle import QuantizedKV
from .handle_ops import _HANDLERS

__all__ = ["attention_mass", "scores_mass"]

_ELEMENTS = 1 << 24
"""Probabilities held at once; longer prompts are cut along the queries."""

_lib = torch.library.Library("kvq", "FRAGMENT")
_lib.define("keep_tokens_(Tensor(a!) cache, Tensor kept) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
_lib.define(
    "attention_mass(Tensor query, Tensor key, int heads, Tensor? mask, bool causal, float? scale) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_lib.define(
    "scores_mass(Tensor scores, Tensor? probabilities, int heads, int tokens, float floor) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _dense(cache: Tensor, kept: Tensor) -> None:
    moved = cache.gather(2, kept.unsqueeze(3).expand(*kept.shape, cache.shape[3]))
    cache.zero_()
    cache[:, :, : kept.shape[2]] = moved


def _quantized(cache: QuantizedKV, kept: Tensor) -> None:
    keep_tokens_(cache, cache, kept)


_lib.impl("keep_tokens_", _dense, "CompositeExplicitAutograd")


@torch.library.register_fake("kvq::keep_tokens_", lib=_lib)
def _(cache: Tensor, kept: Tensor) -> None:
    return None


def attention_mass(
    query: Tensor,
    key: Tensor,
    heads: int,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """How much attention each key receives.

    Args:
        query: ``[B, Hq, R, D]``.
        key: ``[B, H or Hq, T, D]``.
        heads: kv heads ``H``; the query heads of one follow each other.
        mask: broadcastable to ``[B, Hq, R, T]``; bool (True may attend) or floating (added to the scores).
        causal: query ``i`` sees no key after ``i``.

    Returns:
        fp32 ``[B, H, T]``: the softmax summed over queries and query heads, without queries that may attend to nothing.
        bool ``[B, T]``: keys that some query may attend to.
    """
    batch, query_heads, rows, _ = query.shape
    tokens = key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mass = query.new_zeros(batch, heads, tokens, dtype=torch.float32)
    visible = torch.zeros(batch, tokens, dtype=torch.bool, device=query.device)
    transposed = key.float().transpose(2, 3)
    step = max(1, _ELEMENTS // max(1, batch * query_heads * tokens))
    for start in range(0, rows, step):
        part = query[:, :, start : start + step].float()
        grouped = part.reshape(batch, key.shape[1], -1, part.shape[3])
        scores = (grouped @ transposed * scale).view(batch, query_heads, -1, tokens)
        closed = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=query.device)
        if mask is not None:
            piece = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            piece = piece[:, :, start : start + step] if piece.shape[2] != 1 else piece
            if piece.dtype == torch.bool:
                closed = ~piece
            else:
                scores = scores + piece.float()
                closed = piece <= torch.finfo(piece.dtype).min / 2
        if causal:
            at = torch.arange(start, start + part.shape[2], device=query.device).unsqueeze(1)
            closed = closed | (torch.arange(tokens, device=query.device) > at)
        closed = closed.expand(batch, -1, part.shape[2], tokens)
        weights = scores.masked_fill(closed, -torch.inf).softmax(-1)
        weights = weights.masked_fill(closed.all(-1, keepdim=True), 0.0)
        mass += weights.unflatten(1, (heads, -1)).sum((2, 3))
        visible |= (~closed).flatten(1, 2).any(1)
    return mass, visible


def scores_mass(
    scores: Tensor, probabilities: Tensor | None, heads: int, tokens: int, floor: float
) -> tuple[Tensor, Tensor]:
    """As :func:`attention_mass`, from scores that are masked already.

    Args:
        scores: ``[B, Hq, R, T + S]``; the last ``S`` columns are learned sinks, which nothing is stored for.
        probabilities: their softmax, if it is known.
        tokens: ``T``.
        floor: what is not above it is masked.
    """
    probabilities = scores.float().softmax(-1) if probabilities is None else probabilities
    open_ = scores[..., :tokens] > floor
    weights = probabilities[..., :tokens].float() * open_.any(-1, keepdim=True)
    return weights.unflatten(1, (heads, -1)).sum((2, 3)), open_.flatten(1, 2).any(1)


_lib.impl("attention_mass", attention_mass, "CompositeExplicitAutograd")


@torch.library.register_fake("kvq::attention_mass", lib=_lib)
def _(
    query: Tensor, key: Tensor, heads: int, mask: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    batch, tokens = query.shape[0], key.shape[2]
    mass = query.new_empty(batch, heads, tokens, dtype=torch.float32)
    return mass, query.new_empty(batch, tokens, dtype=torch.bool)


_lib.impl("scores_mass", scores_mass, "CompositeExplicitAutograd")


@torch.library.register_fake("kvq::scores_mass", lib=_lib)
def _(
    scores: Tensor, probabilities: Tensor | None, heads: int, tokens: int, floor: float
) -> tuple[Tensor, Tensor]:
    mass = scores.new_empty(scores.shape[0], heads, tokens, dtype=torch.float32)
    return mass, scores.new_empty(scores.shape[0], tokens, dtype=torch.bool)


_HANDLERS[torch.ops.kvq.keep_tokens_.default] = _quantized
