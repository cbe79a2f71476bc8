"""Formats with exact tokens on layers that slide: the same as a layer that keeps everything behind a window mask."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvq_ops import errors  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf.models import config, model, prompt  # noqa: E402
from tests.hf.test_windowed_cache import FakeWindows, run  # noqa: E402
from tests.ops import windows  # noqa: E402, F401  registers formats of small groups

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")

MODELS = ("mistral", "gemma3", "gpt_oss")
SPECS = (
    "int8_per_token_head+recent3",
    "int4_group32+recent6+sink2",
    "test_keys_g8r8",
    "key=test_keys_g8r5s3,value=int4_group32+recent2",
    "key=none,value=test_keys_g8r0",
    "int4_group32+recent20",
    "kivi4+recent8",
)
SIZES = ([11, *[1] * 40], [3, 3, 3, 2, *[1] * 30], [5, 30, 1, 1, 9, 1], [26, 1, 3, 20, 1])


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@functools.cache
def one_layer(name: str) -> Any:
    """The model up to its first layer, which slides. What that one codes depends on the text alone: no rounding flips a code."""
    twin = copy.deepcopy(model(name))
    twin.model.layers = twin.model.layers[:1]
    twin.config.num_hidden_layers = 1
    if getattr(twin.config, "layer_types", None):
        twin.config.layer_types = twin.config.layer_types[:1]
    return twin


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", MODELS)
def test_d8_equals_a_window_mask_over_the_whole_cache(name: str, spec: str, sizes: list[int]) -> None:
    """Each step as if everything so far were quantized at once and seen through a window of eight; memory stays bounded."""
    ids = prompt(2, sum(sizes))
    user = one_layer(name)
    cache = QuantizedCache(user.config, spec, max_cache_len=64, batch_size=2)
    bytes_before = cache.nbytes
    got = run(user, cache, ids, sizes)
    want = run(user, FakeWindows(cache), ids, sizes)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert cache.nbytes == bytes_before
    assert cache.nbytes == sum(h.format.nbytes(*h.shape, h.dtype) for h in cache.handles())
    for layer, sliding in zip(cache.layers, cache.is_sliding, strict=True):
        if sliding:
            row = [layer.kv_format.key, layer.kv_format.value]
            bound = max(7, *(r.recent + r.sinks + r.token_group for r in row)) + max(16, 2 * layer.unit)
            assert layer.held <= layer.keys.shape[2] <= bound
            assert layer.keys.length.tolist() == layer.values.length.tolist() == [layer.held] * 2
            assert layer.dropped % layer.unit == 0
    if "int4_group32+recent6" in spec:
        assert (got - model(name)(ids).logits).abs().max() > 1e-3, (
            "quantization must show, or this compares nothing"
        )


@pytest.mark.parametrize(
    ("name", "spec"),
    [*(("mistral", spec) for spec in SPECS[:5]), ("gemma3", SPECS[6]), ("gpt_oss", SPECS[1])],
)
def test_d8_compiled_steps_equal_eager_ones(name: str, spec: str) -> None:
    """A prompt that fits, single steps that fill and drop, and a second prompt: attention reads codes in all of them."""
    import passes

    passes.clear_report()
    user, ids, sizes = one_layer(name), prompt(2, 110), [9, *[1] * 95, 6]
    caches = [QuantizedCache(user.config, spec, max_cache_len=128, batch_size=2) for _ in range(2)]
    step = torch.compile(user, backend="kvq", fullgraph=True, options={"lower": "eager"})
    got, want = run(step, caches[0], ids, sizes), run(user, caches[1], ids, sizes)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    a, b = (cache.layers[0] for cache in caches)
    assert a.dropped == b.dropped > 0
    for mine, other in ((a.keys, b.keys), (a.values, b.values)):
        assert torch.equal(mine.dequantize(), other.dequantize())
    report = passes.report()
    assert report.found == report.rewritten and len(report.graphs) <= 5


def test_d8_a_compiled_prompt_that_overflows_is_refused() -> None:
    cache = QuantizedCache(config("gemma3"), "int8_per_token_head+recent3", 64)
    step = torch.compile(model("gemma3"), backend="kvq", options={"lower": "eager"})
    with pytest.raises(errors.UnsupportedWriteError, match="longer prompts"):
        run(step, cache, prompt(1, 40), [40])


def test_a_window_that_is_one_token_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = QuantizedCache(config("mistral"), SPECS[0], max_cache_len=64)
    for layer in cache.layers:
        layer.reach -= 1
    ids = prompt(1, 51)
    got = run(model("mistral"), cache, ids, SIZES[0])
    want = run(model("mistral"), FakeWindows(cache), ids, SIZES[0])
    assert (got - want).abs().max() > 1e-2


@pytest.mark.parametrize("spec", SPECS)
def test_codes_are_those_of_a_cache_that_drops_nothing(spec: str) -> None:
    """First layers depend on the text alone; the other cache has a window that is never left."""
    ids = prompt(2, 110)
    cache = QuantizedCache(config("gemma3"), spec, max_cache_len=128)
    text = copy.deepcopy(config("gemma3"))
    text.sliding_window = 128
    whole = QuantizedCache(text, spec, max_cache_len=128)
    for part in ids.split([20, *[1] * 25, 10, 55], 1):
        for each in (cache, whole):
            model("gemma3")(input_ids=part, past_key_values=each)
        mine, other = cache.layers[0], whole.layers[0]
        first, seen = mine.dropped, mine.get_seq_length()
        assert other.dropped == 0
        for a, b in ((mine.keys, other.keys), (mine.values, other.values)):
            tokens = slice(first + (a.format.sinks if first else 0), seen)
            held = slice(tokens.start - first, seen - first)
            assert torch.equal(a.dequantize()[:, :, held], b.dequantize()[:, :, tokens])
            coded = int(a.plane_coded[0]) if a.format.windowed else seen - first
            assert not a.format.windowed or coded + first == int(b.plane_coded[0])
            for plane, new, old in zip(a.format.planes, a.store, b.store, strict=True):
                if plane.per_token:
                    g = plane.tokens
                    assert torch.equal(new[:, :, : coded // g], old[:, :, first // g : (first + coded) // g])
    assert cache.layers[0].dropped > 0


@pytest.mark.parametrize("name", MODELS)
def test_a_window_that_nothing_leaves_is_exact(name: str) -> None:
    ids = prompt(2, 21)
    more: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24}
    for options in ({}, {"num_beams": 3}):
        cache = QuantizedCache(config(name), "int4_group32+recent64", 64)
        got = model(name).generate(ids, past_key_values=cache, **more, **options)
        assert torch.equal(got, model(name).generate(ids, **more, **options))
    first = model(name).generate(
        ids, past_key_values=(cache := QuantizedCache(config(name), "kivi4+recent8", 64)), **more
    )
    cache.reset()
    assert not any(plane.any() for h in cache.handles() for plane in h.store)
    assert torch.equal(model(name).generate(ids, past_key_values=cache, **more), first)


def test_left_padding() -> None:
    """A row with padding in front, alone and beside a longer one."""
    ids = prompt(2, 40)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    spec = "int8_per_token_head+recent3"
    caches = [QuantizedCache(config("gemma3"), one, 64) for one in (spec, spec, "none")]
    apart, cost = [], []
    at = 0
    for part in ids.split([12, *[1] * 28], 1):
        at += part.shape[1]
        positions = (mask[:, :at].cumsum(1) - 1).clamp_min(0)[:, -part.shape[1] :]
        both = model("gemma3")(
            input_ids=part, attention_mask=mask[:, :at], position_ids=positions, past_key_values=caches[0]
        ).logits
        own = part[:1, max(0, 9 - (at - part.shape[1])) :]
        alone, exact = (model("gemma3")(input_ids=own, past_key_values=c).logits for c in caches[1:])
        apart.append(both[:1, -own.shape[1] :] - alone)
        cost.append(alone - exact)
    # A code that a rounding tipped costs less than coding does at all.
    assert torch.cat(apart, 1).norm() < torch.cat(cost, 1).norm() / 2


def test_drafts_until_a_token_is_gone() -> None:
    cache = QuantizedCache(config("gemma3"), "int8_per_token_head+recent3", 64)
    never = copy.deepcopy(cache)
    ids = prompt(1, 30)
    run(model("gemma3"), cache, ids[:, :12], [8, 4])
    cache.crop(-4)
    run(model("gemma3"), never, ids[:, :8], [8])
    got = run(model("gemma3"), cache, ids[:, 8:], [1] * 22)
    want = run(model("gemma3"), never, ids[:, 8:], [1] * 22)
    unquantized = QuantizedCache(config("gemma3"), "none", 64)
    exact = run(model("gemma3"), unquantized, ids, [8, *[1] * 22])[:, 8:]
    # Tokens that were coded meanwhile stay coded: some more are, which cannot cost more than that all are.
    assert 0 < (got - want).norm() < (want - exact).norm()
    assert cache.layers[0].dropped > 0 and not cache.is_croppable
    with pytest.raises(errors.UnsupportedWriteError, match="window of 8"):
        cache.crop(-1)
    with pytest.raises(errors.CapacityError):
        cache.crop(1)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_their_own_way(way: Any) -> None:
    cache = QuantizedCache(config("gemma3"), "test_keys_g8r8", 64)
    run(model("gemma3"), cache, prompt(1, 40), [30, 10])
    twin = way(cache)
    assert torch.equal(*(run(model("gemma3"), c, prompt(1, 9), [1] * 9) for c in (cache, twin)))
    assert torch.equal(cache.layers[0].keys + 0, twin.layers[0].keys + 0)


def test_d9_sliding_layers_see_their_window_and_full_layers_everything() -> None:
    ids = prompt(1, 60)
    other = ids.clone()
    other[0, 0] = (ids[0, 0] - 3 + 1) % 61 + 3
    caches = []
    for tokens in (ids, other):
        cache = QuantizedCache(config("gemma3"), "int8_per_token_head+recent3", max_cache_len=64)
        run(model("gemma3"), cache, tokens, [1] * 60)
        caches.append(cache)
    sliding, full = ([c.layers[i].keys.dequantize() for c in caches] for i in (0, 1))
    assert torch.equal(*sliding) and not torch.equal(*full)


def test_layers_that_slide_beside_another_state_name_the_way_out() -> None:
    from transformers.cache_utils import LinearAttentionAndStaticSlidingWindowAttentionLayer

    from kvq_ops.formats import parse_kv_format
    from kvq_ops.hf import _check_windows

    layer = LinearAttentionAndStaticSlidingWindowAttentionLayer(max_cache_len=16, sliding_window=8)
    with pytest.raises(errors.FormatError, match="layers={'hybrid': 'int4_group32'}"):
        _check_windows([layer], [parse_kv_format("kivi4")], ["hybrid"])
    _check_windows([layer], [parse_kv_format("int4_group32")], ["hybrid"])
