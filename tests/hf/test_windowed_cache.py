"""QuantizedCache in formats with exact tokens: generation, beams, drafts, compiled steps, and layers that slide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers.cache_utils import StaticCache  # noqa: E402

from kvq_ops import dequantize, quantize  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf.models import config, model, prompt  # noqa: E402
from tests.ops import windows  # noqa: E402, F401  registers formats of small groups

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

SPECS = (
    "kivi4+recent8",
    "int8_per_token_head+recent8",
    "key=kivi2+recent4,value=int4_group32+sink4",
    "kivi4",
)
LENGTH = 64


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class FakeWindows(StaticCache):
    """A static cache that shows what a store holds after each step: everything is quantized from the start each time."""

    def __init__(self, spec: QuantizedCache) -> None:
        super().__init__(config=config("llama"), max_cache_len=LENGTH)
        self.spec = spec.format
        self.seen: dict[int, list[Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        super().update(key_states, value_states, layer_idx, *args, **kwargs)
        old = self.seen.get(layer_idx)
        new = [key_states, value_states]
        whole = new if old is None else [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
        self.seen[layer_idx] = whole
        out = []
        for x, row in zip(whole, (self.spec.key, self.spec.value), strict=True):
            dense = torch.zeros(*x.shape[:2], LENGTH, x.shape[3])
            dense[:, :, : x.shape[2]] = dequantize(quantize(x, row.name), row.name)
            out.append(dense)
        return tuple(out)


def run(step: Any, cache: Any, ids: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat(
        [step(input_ids=part, past_key_values=cache, use_cache=True).logits for part in ids.split(sizes, 1)],
        1,
    )


@pytest.mark.parametrize(
    ("how", "spec"), [*(("eager", spec) for spec in SPECS), ("compiled", SPECS[0]), ("compiled", SPECS[2])]
)
def test_steps_equal_quantizing_everything_anew(how: str, spec: str) -> None:
    """Prefill, single steps and a second prompt: at each, as if all tokens so far were quantized at once."""
    cache = QuantizedCache(config("llama"), spec, max_cache_len=LENGTH, batch_size=2)
    step: Any = model("llama")
    if how == "compiled":
        step = torch.compile(step, backend="kvq", fullgraph=True, options={"lower": "eager"})
    ids, sizes = prompt(2, 58), [30, *[1] * 12, 9, 7]
    got = run(step, cache, ids, sizes)
    want = run(model("llama"), FakeWindows(cache), ids, sizes)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for handle in cache.handles():
        fmt = handle.format
        assert handle.length.tolist() == [58, 58]
        assert (
            handle.plane_coded.tolist() == [max(0, 58 - fmt.recent) // fmt.token_group * fmt.token_group] * 2
        )
    assert cache.nbytes == sum(h.format.nbytes(*h.shape, h.dtype) for h in cache.handles())


@pytest.mark.parametrize("spec", SPECS[:3])
def test_generation_with_rows_beams_and_a_second_turn(spec: str) -> None:
    ids = prompt(2, 21)

    def generate(**kwargs: Any) -> Tensor:
        made = model("llama").generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24, **kwargs
        )
        return made

    cache = QuantizedCache(config("llama"), spec, LENGTH)
    first = generate(past_key_values=cache)
    cache.reset()
    assert not any(plane.any() for h in cache.handles() for plane in h.store)
    assert torch.equal(generate(past_key_values=cache), first)
    # A window that nothing leaves is exact, whatever lies behind it; rows are reordered with it.
    wide = (
        spec.replace("+recent8", "+recent64").replace("+recent4", "+recent64").replace("+sink4", "+recent64")
    )
    for more in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        cache = QuantizedCache(config("llama"), wide, LENGTH)
        assert torch.equal(generate(past_key_values=cache, **more), generate(**more))
        cache = QuantizedCache(config("llama"), spec, LENGTH)
        assert generate(past_key_values=cache, **more).shape[1] == 45


def test_d1_drafts_that_are_rejected() -> None:
    spec = "key=test_keys_g8r8,value=none"
    cache = QuantizedCache(config("llama"), spec, LENGTH, batch_size=2)
    ids = prompt(2, 42)
    never = copy.deepcopy(cache)
    run(model("llama"), cache, ids[:, :32], [32])
    run(model("llama"), cache, prompt(2, 5), [5])
    cache.crop(-5)
    got = run(model("llama"), cache, ids[:, 32:], [1] * 10)
    run(model("llama"), never, ids[:, :32], [32])
    assert torch.equal(got, run(model("llama"), never, ids[:, 32:], [1] * 10))
    for a, b in zip(cache.handles(), never.handles(), strict=True):
        assert torch.equal(a + 0, b + 0)
    assert next(cache.handles()).plane_coded.tolist() == [32, 32]
