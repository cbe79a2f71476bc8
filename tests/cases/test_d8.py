"""D8: prompts and steps through a sliding window shorter than both, in every format that may slide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers.cache_utils import StaticCache, StaticSlidingWindowLayer  # noqa: E402

from kvq_ops import dequantize, quantize  # noqa: E402
from kvq_ops.formats import parse_kv_format  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.cases.every import SPECS  # noqa: E402
from tests.hf.models import model, prompt  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

WINDOW = 4


def _alone(spec: str) -> bool:
    """Whether a token's codes depend on that token alone, so that quantizing each state as it comes is a reference."""
    pair = parse_kv_format(spec)
    return not any(row.windowed or row.static_planes for row in (pair.key, pair.value))


ALONE = tuple(spec for spec in SPECS if _alone(spec))


def narrow(name: str) -> Any:
    """The toy model with a window of four; gpt_oss has learned sinks, mistral has none."""
    twin = copy.deepcopy(model(name))
    twin.config.sliding_window = WINDOW
    for module in twin.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = WINDOW
    return twin


class Reference(StaticCache):
    """A cache of twice the tokens whose states pass through the codes first; the model's own mask does the window."""

    def __init__(self, config: Any, spec: str) -> None:
        super().__init__(config=config, max_cache_len=24)
        self.pair = parse_kv_format(spec)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        layer = self.layers[layer_idx]
        # transformers attends to a prompt that overflows an empty window before it stores it.
        sliding = isinstance(layer, StaticSlidingWindowLayer)
        unstored = sliding and not layer.cumulative_length_int and key.shape[2] > layer.max_cache_len
        states = [
            dequantize(quantize(x, row.name), row.name, x.dtype)
            for x, row in ((key, self.pair.key), (value, self.pair.value))
        ]
        out = super().update(*states, layer_idx, *args, **kwargs)
        return (key, value) if unstored else out


@torch.no_grad()
def logits(twin: Any, cache: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat([twin(input_ids=part, past_key_values=cache).logits for part in ids.split(sizes, 1)], 1)


@pytest.mark.parametrize("sizes", [[11], [3, 3, 3, 2]], ids=["at once", "in threes"])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
@pytest.mark.parametrize("spec", ALONE)
def test_d8_a_window_of_four_under_a_prompt_of_eleven(spec: str, name: str, sizes: list[int]) -> None:
    twin, ids = narrow(name), prompt(2, 17)
    steps = [*sizes, *[1] * 6]
    cache = QuantizedCache(twin.config, spec, max_cache_len=24)
    got = logits(twin, cache, ids, steps)
    want = logits(twin, Reference(twin.config, spec), ids, steps)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    sliding = [layer.keys.shape[2] for layer, is_ in zip(cache.layers, cache.is_sliding, strict=True) if is_]
    assert sliding and set(sliding) == {WINDOW}, "storage is bounded by the window"
    if spec == "none":
        # Window-masked attention without any cache; a wider window is something else.
        whole = twin(input_ids=ids).logits.detach()
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(name)(input_ids=ids).logits.detach(), whole, rtol=1e-3, atol=1e-3)


# A format that must be calibrated holds nothing before, sliding or not.
OTHERS = tuple(s for s in SPECS if s not in ALONE and not parse_kv_format(s).needs_calibration)


@pytest.mark.parametrize("spec", OTHERS)
def test_d8_formats_whose_scales_span_tokens_slide_too(spec: str) -> None:
    """A cache takes the tokens past its window and stays bounded; tests/hf holds windowed ones against their definition."""
    twin = narrow("mistral")
    pair = parse_kv_format(spec)
    cache = QuantizedCache(twin.config, spec, max_cache_len=24)
    assert logits(twin, cache, prompt(2, 17), [11, *[1] * 6]).isfinite().all()
    before = cache.nbytes
    assert logits(twin, cache, prompt(2, 5), [1] * 5).isfinite().all()
    assert cache.nbytes == before, "storage does not grow with what was seen"
    if not any(row.windowed for row in (pair.key, pair.value)):
        assert {layer.keys.shape[2] for layer in cache.layers if layer.is_sliding} == {WINDOW}
