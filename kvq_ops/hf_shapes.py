"""Which shapes the keys and values of a Hugging Face model have, from its configuration alone.

Most configurations say it in three fields. Where they may mean something else (latent attention, multi-query, group counts under
names of their own) the model is built without memory, on the ``meta`` device, and asked.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any

import torch

__all__ = ["Shape", "kv_shapes"]

Shape = tuple[tuple[int, int], tuple[int, int]]
"""Heads and channels of the keys, then of the values."""

_UNUSUAL = ("kv_lora_rank", "qk_head_dim", "v_head_dim", "multi_query", "num_kv_heads", "attn_config")

_known: dict[str, list[Shape | None]] = {}


def kv_shapes(config: Any, layers: int) -> list[Shape | None]:
    """The shape that each of ``layers`` layers caches; ``None`` where the first states must tell.

    Args:
        config: of the model; of one with several parts, all of it.
    """
    text = config.get_text_config(decoder=True)
    parts = list(getattr(text, "per_layer_config", None) or ())
    if not any(getattr(text, name, None) is not None for name in _UNUSUAL):
        return [_plain(part) for part in (parts if len(parts) == layers else [text] * layers)]
    key = f"{type(text).__name__} {layers} {text.to_json_string(use_diff=False)}"
    if key not in _known:
        _known[key] = _asked(text, layers)
    return _known[key]


def _plain(config: Any) -> Shape | None:
    heads = getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    if head_dim is None and hidden and heads:
        head_dim = hidden // heads
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int):
        return None
    return (kv_heads, head_dim), (kv_heads, head_dim)


def _asked(text: Any, layers: int) -> list[Shape | None]:
    """What a model without memory caches for one token."""
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import StaticCache

    cache = StaticCache(config=text, max_cache_len=1)
    # Models may do after the attention what has no meaning without values; what was cached until then is enough.
    with contextlib.suppress(Exception), torch.no_grad():
        with torch.device("meta"):
            # Grouped matrix products of experts know bfloat16 alone there.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(text), dtype=torch.bfloat16).eval()
        token = torch.zeros(1, 1, dtype=torch.long, device="meta")
        model(token, use_cache=True, **{cache_argument(model): cache})
    shapes: list[Shape | None] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            shapes.append(None)
        else:
            shapes.append(((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])))
    # Where it stopped early: layers of one kind are alike.
    kinds = getattr(text, "layer_types", None) or [""] * layers
    by_kind = {kind: shape for kind, shape in zip(kinds, shapes, strict=True) if shape is not None}
    return [by_kind.get(kind) if shape is None else shape for kind, shape in zip(kinds, shapes, strict=True)]


def cache_argument(model: Any) -> str:
    """What this transformers calls the cache argument of ``forward``; it was renamed in 5.2x."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
