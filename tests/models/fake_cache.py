"""Caches of transformers whose tokens go through int8 and back, in plain torch: what a quantized cache must come to."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def through_int8(x: Tensor) -> Tensor:
    """``x`` after one int8 code for each channel and one scale for each token and head."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
    return (x / scale).round().clamp(-127, 127) * scale


def _parts(cache: Any) -> list[Any]:
    if hasattr(cache, "self_attention_cache"):
        return [*cache.self_attention_cache.layers, *cache.cross_attention_cache.layers]
    return list(cache.layers)


def make_fake_(cache: Any, *, exact_values: bool = False) -> Any:
    """Let a static cache of transformers, with what it holds, go through int8 from now on."""
    for layer in _parts(cache):
        _make_fake_layer_(layer, exact_values)
        if layer.is_initialized:
            layer.keys.copy_(through_int8(layer.keys))
            if not exact_values:
                layer.values.copy_(through_int8(layer.values))
    return cache


def _make_fake_layer_(layer: Any, exact_values: bool) -> None:
    kind = type(layer)

    def update(self: Any, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        coded = through_int8(keys), values if exact_values else through_int8(values)
        # A prompt longer than the window of an empty layer is attended before it is stored.
        early = getattr(self, "cumulative_length_int", 1) == 0 and keys.shape[-2] > self.max_cache_len
        stored = kind.update(self, *coded, *args, **kwargs)
        return (keys, values) if early else stored

    layer.__class__ = type(f"Fake{kind.__name__}", (kind,), {"update": update, "_layer_type": None})
