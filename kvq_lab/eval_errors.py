"""Errors of each layer and head: of stored keys and values and of attention's output, by source; and keys' outlier channels.

Everything is measured at the attention calls of one pass of the unquantized model, so each layer sees exact inputs and errors do
not add up along the layers. The keys and values of a layer are written into a real cache, and read back.

Attention's output is computed four times for the last queries: with exact numbers (a), with what the cache would return if
codes were real numbers (b), with what it returns (c), all three in float64, and by the operator from the codes (d). The
differences ``b - a``, ``c - b`` and ``d - c`` are what scale, rounding and accumulation in fp32 contribute; they add up to
``d - a``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kvq_ops
from kvq_lab.eval_caches import Contender
from kvq_lab.eval_models import Subject
from kvq_lab.eval_outliers import KeyStatistics, channel_statistics
from kvq_lab.eval_sources import without_rounding
from kvq_lab.evaluate import AttentionError
from kvq_ops.errors import ShapeError

QUERIES = 64
"""The last queries of the text; the cache is as they find it."""

SOURCES = ("total", "scale", "rounding")


def relative(error: Tensor, exact: Tensor) -> float:
    """|error| / |exact| over everything; 0 where both are 0."""
    wanted = exact.double().norm().item()
    got = error.double().norm().item()
    return got / wanted if wanted else (0.0 if got == 0 else float("inf"))


def _by_head(error: Tensor, exact: Tensor) -> list[float]:
    return [relative(error[:, h], exact[:, h]) for h in range(exact.shape[1])]


@dataclasses.dataclass
class Side:
    """Keys or values of one layer: exact, as read back, and as read back if codes were real numbers (where that is known)."""

    exact: Tensor
    read: Tensor
    unrounded: Tensor | None

    @staticmethod
    def of(handle: Any, exact: Tensor) -> Side:
        read = handle.dequantize()
        return Side(exact, read, without_rounding(exact, handle.store, handle.format, read))

    def errors(self) -> dict[str, Any]:
        """Relative errors: in all, by source, and by head."""
        exact = self.exact.double()
        total = self.read.double() - exact
        found: dict[str, Any] = {"total": relative(total, exact), "heads": _by_head(total, exact)}
        if self.unrounded is None:
            return found | {"scale": None, "rounding": None}
        between = self.unrounded.double()
        return found | {
            "scale": relative(between - exact, exact),
            "rounding": relative(self.read.double() - between, exact),
        }


def attend(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float | None) -> Tensor:
    """Attention in float64 with kv heads repeated; ``allowed`` is boolean or added to the scores."""
    repeats = query.shape[1] // key.shape[1]
    mask = allowed if allowed.dtype is torch.bool else allowed.double()
    return F.scaled_dot_product_attention(
        query.double(),
        key.double().repeat_interleave(repeats, 1),
        value.double().repeat_interleave(repeats, 1),
        attn_mask=mask,
        scale=scale,
    )


def last_rows(mask: Tensor | None, causal: bool, queries: int, tokens: int, rows: int) -> Tensor:
    """The mask ``[.., .., rows, tokens]`` of the last ``rows`` queries of an attention call."""
    if mask is not None:
        return mask.expand(*mask.shape[:-2], queries, tokens)[..., -rows:, :]
    if causal:
        # As scaled_dot_product_attention does it: the first query stands at the first token.
        return torch.ones(queries, tokens, dtype=torch.bool).tril()[None, None, -rows:]
    return torch.ones(1, 1, rows, tokens, dtype=torch.bool)


class LayerErrors(AttentionError):
    """While entered, measures every attention call of a model with every cache; see the module.

    Attributes:
        layers: for each cache a list with one entry a layer.
        statistics: of the keys of each layer.
    """

    def __init__(self, subject: Subject, contenders: Sequence[Contender], tokens: int) -> None:
        super().__init__({})
        self.caches = {c.name: c.new_cache(1, tokens) for c in contenders}
        self.layers: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contenders}
        self.statistics: list[KeyStatistics] = []
        self.tokens = tokens

    def _measure(self, exact, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **named):
        site, scale = self.sites, named.get("scale")
        self.sites += 1
        rows = min(QUERIES, query.shape[2])
        allowed = last_rows(attn_mask, is_causal, query.shape[2], key.shape[2], rows)
        query = query[:, :, -rows:]
        reference: Tensor | None = None
        for name, cache in self.caches.items():
            heads = _kv_heads(cache, site, key)
            keys, values = (t[:, :: t.shape[1] // heads] for t in (key, value))
            if len(self.statistics) == site:
                self.statistics.append(channel_statistics(keys))
            if reference is None:
                reference = attend(query, keys, values, allowed, scale)
            cache.update(keys.clone(), values.clone(), site)
            layer = cache.layers[site]
            k, v = Side.of(layer.keys, keys), Side.of(layer.values, values)
            self.layers[name].append(
                {
                    "key": k.errors() | self.statistics[site].errors(k.read.double() - keys.double()),
                    "value": v.errors(),
                    "attention": self._attention(layer, query, k, v, allowed, scale, reference),
                }
            )

    def _attention(self, layer, query, k: Side, v: Side, allowed, scale, a: Tensor) -> dict[str, Any]:
        c = attend(query, k.read, v.read, allowed, scale)
        d = kvq_ops.attention(
            query,
            layer.keys.store,
            layer.values.store,
            layer.keys.format_name,
            layer.values.format_name,
            mask=allowed,
            scale=scale,
        ).double()
        found: dict[str, Any] = {
            "total": relative(d - a, a),
            "accumulation": relative(d - c, a),
            "heads": _by_head(d - a, a),
        }
        if k.unrounded is None or v.unrounded is None:
            return found | {"scale": None, "rounding": None}
        b = attend(query, k.unrounded, v.unrounded, allowed, scale)
        return found | {"scale": relative(b - a, a), "rounding": relative(c - b, a)}


def _kv_heads(cache: Any, site: int, key: Tensor) -> int:
    """Kv heads of a layer's cache: attention may be called with each repeated for its group of queries."""
    layer = cache.layers[site] if site < len(cache.layers) else None
    handle = getattr(layer, "keys", None)
    if handle is None or key.shape[1] % handle.shape[1] or handle.shape[3] != key.shape[3]:
        raise ShapeError(
            f"errors at attention call {site}",
            got=f"keys {tuple(key.shape)}, cached as {tuple(handle.shape) if handle is not None else 'nothing'}",
            allowed="models that cache the keys they attend to, one attention call a layer",
            do="leave this part out with --no-errors",
        )
    return handle.shape[1]


def _stored_tokens(cache: Any, wanted: int) -> int:
    """Tokens that every layer can hold at once: a sliding layer holds its window."""
    return min([wanted, *(layer.max_cache_len for layer in cache.layers if hasattr(layer, "max_cache_len"))])


def layer_errors(
    subject: Subject, contenders: Sequence[Contender], ids: Tensor
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """Errors of every layer by cache, and what the keys' channels look like.

    Args:
        contenders: our caches.
        ids: text ``[1, T]``; cut to what the smallest sliding window holds.

    Raises:
        ShapeError: for models whose attention is not one call of ``scaled_dot_product_attention`` a layer.
    """
    from kvq_lab.eval_outliers import describe

    if not contenders:
        return {}, {}
    tokens = min(_stored_tokens(c.new_cache(1, ids.shape[1]), ids.shape[1]) for c in contenders)
    with LayerErrors(subject, contenders, tokens) as measured, torch.no_grad():
        subject.model(ids[:, :tokens], use_cache=False)
    if not measured.sites:
        raise ShapeError(
            "errors of layers",
            got="no call of scaled_dot_product_attention",
            allowed="models that attend through it",
            do="load the model with attn_implementation='sdpa', or leave this part out with --no-errors",
        )
    return measured.layers, describe(measured.statistics) | {"tokens": tokens}
