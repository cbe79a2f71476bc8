"""Models and caches that evict, and H2O in plain torch beside them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")


from kvq_ops.eviction import Eviction  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf.h2o import H2O  # noqa: E402
from tests.hf.models import config, model  # noqa: E402
from tests.ops import windows  # noqa: E402, F401  registers formats of small groups

EVICTION = Eviction(budget=12, sinks=2, recent=4)
DECODERS = (
    "gpt2",
    "gpt_oss",
    "gemma3",
    "deepseek_v3",
    "opt",
    "falcon_new",
    "falcon_multi_query",
    "gpt_bigcode",
    "qwen3",
)


def llama(attention: str) -> Any:
    twin = copy.deepcopy(model("llama"))
    twin.set_attn_implementation(attention)
    return twin


def make(
    spec: str = "none",
    eviction: Eviction | None = EVICTION,
    limit: int = 100,
    name: str = "llama",
    **kwargs: Any,
) -> Any:
    return QuantizedCache(config(name), spec, limit, eviction=eviction, **kwargs)


def steps(user: Any, cache: Any, ids: Tensor, sizes: list[int], mask: Tensor | None = None) -> Tensor:
    parts, at = [], 0
    for part in ids.split(sizes, 1):
        at += part.shape[1]
        more = {}
        if mask is not None:
            positions = (mask[:, :at].cumsum(1) - 1).clamp_min(0)[:, -part.shape[1] :]
            more = {"attention_mask": mask[:, :at], "position_ids": positions}
        parts.append(user(input_ids=part, past_key_values=cache, use_cache=True, **more).logits)
    return torch.cat(parts, 1)


def plain(
    row: Tensor, sizes: list[int], eviction: Eviction, pads: int = 0, **kwargs: Any
) -> tuple[Tensor, H2O]:
    """What H2O in plain torch makes of one row, whose first ``pads`` tokens are padding."""
    e = eviction
    twin = H2O(model("llama"), e.budget, e.sinks, e.recent, e.slack, pads, **kwargs)
    out, left = [], pads
    for part in row.split(sizes):
        skip = min(left, len(part))
        left -= skip
        out.append(twin.step(part[skip:].tolist()))
    return torch.cat(out), twin


def assert_same_tokens(cache: Any, row: int, twin: H2O) -> None:
    """Each layer and head holds the same tokens, seen in its keys and values, in order; padding in front."""
    for layer, heads, pads in zip(cache.layers, twin.heads, twin.pads, strict=True):
        for h, head in enumerate(heads):
            held = slice(pads, pads + len(head.keys))
            assert layer.held == held.stop
            for handle, mine in ((layer.keys, head.keys), (layer.values, head.values)):
                torch.testing.assert_close(
                    handle.dequantize()[row, h, held], torch.stack(mine), rtol=1e-4, atol=1e-4
                )


SPLITS = ([9, *[1] * 25], [30, *[1] * 8], [1] * 34, [5, 7, 20, 1, 1, 9], [12, 1, 13, 1])


def fingerprint(handle: Any, b: int, h: int, tokens: int) -> list[tuple[Any, ...]]:
    planes = [t for p, t in zip(handle.format.planes, handle.store, strict=True) if p.per_token]
    return [tuple(tuple(t[b, h, n].flatten().tolist()) for t in planes) for n in range(tokens)]
