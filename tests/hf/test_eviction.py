"""Eviction in QuantizedCache: against H2O in plain torch, and what it promises about memory and positions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import torch.nn.functional as F  # noqa: E402

from kvq_ops import eviction_ops, hf_runs  # noqa: E402
from kvq_ops.eviction import Eviction  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf.evicting import (  # noqa: E402
    DECODERS,
    EVICTION,
    SPLITS,
    assert_same_tokens,
    fingerprint,
    llama,
    make,
    plain,
    steps,
)
from tests.hf.h2o import H2O  # noqa: E402
from tests.hf.models import config, model, prompt  # noqa: E402
from tests.ops import windows  # noqa: E402, F401  registers formats of small groups

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("slack", [1, 5])
@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_equals_h2o_in_plain_torch(attention: str, sizes: list[int], slack: int) -> None:
    eviction = Eviction(12, sinks=2, recent=4, slack=slack)
    ids = prompt(2, sum(sizes))
    cache = make(eviction=eviction)
    got = steps(llama(attention), cache, ids, sizes)
    for row in range(2):
        want, twin = plain(ids[row], sizes, eviction)
        torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-4)
        assert_same_tokens(cache, row, twin)
        layers = [[tuple(h.positions) for h in heads] for heads in twin.heads]
        assert len({head for heads in layers for head in heads}) > 1, (
            "heads must differ for this to compare anything"
        )
    assert cache.evicted == [sum(sizes) - cache.layers[0].held] * 2 and cache.evicted[0] >= 10
    assert int(cache.get_seq_length()) == sum(sizes)


def test_the_lightest_kept_instead_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, sizes = prompt(1, 34), SPLITS[0]
    right, _ = plain(ids[0], sizes, EVICTION)
    wrong, twin = plain(ids[0], sizes, EVICTION, lightest=True)
    choose = hf_runs.choose_tokens
    monkeypatch.setattr(
        hf_runs, "choose_tokens", lambda mass, *args, **kwargs: choose(1e3 - mass, *args, **kwargs)
    )
    cache = make()
    got = steps(llama("sdpa"), cache, ids, sizes)[0]
    assert (got - right).abs().max() > 0.1
    torch.testing.assert_close(got, wrong, rtol=1e-4, atol=1e-4)
    assert_same_tokens(cache, 0, twin)


@pytest.mark.parametrize("sizes", [[15, *[1] * 16], [9, *[1] * 20], [6, 6, 3, 14, 1, 1]])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_on_the_left_is_never_heavy_and_goes_first(attention: str, sizes: list[int]) -> None:
    ids = prompt(3, sum(sizes))
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 5, 8)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    cache = make()
    got = steps(llama(attention), cache, ids, sizes, mask)
    for row, pads in enumerate((0, 5, 8)):
        want, twin = plain(ids[row], sizes, EVICTION, pads)
        torch.testing.assert_close(got[row, pads:], want, rtol=1e-4, atol=1e-4)
        assert_same_tokens(cache, row, twin)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generate_goes_on_beyond_the_budget(attention: str) -> None:
    ids, new = prompt(2, 20), 15
    cache = make("none")
    user = llama(attention)
    got = user.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, past_key_values=cache
    )
    for row in range(2):
        twin = H2O(model("llama"), 12, 2, 4)
        text = ids[row].tolist()
        logits = twin.step(text)
        for _ in range(new):
            text.append(int(logits[-1].argmax()))
            logits = twin.step(text[-1:])
        assert got[row].tolist() == text
    assert cache.evicted == [22, 22]
    assert repr(cache).endswith("evicted 22 of 34 tokens for a budget of 12)")


@pytest.mark.parametrize("name", DECODERS)
def test_both_ways_of_seeing_attention_agree(name: str) -> None:
    """Softmax of the model's own, and a product beside scaled_dot_product_attention; nothing changes before the budget."""
    ids = prompt(2, 34)
    caches, logits = [], []
    for attention in ("eager", "sdpa"):
        twin = copy.deepcopy(model(name))
        try:
            twin.set_attn_implementation(attention)
        except ValueError:
            continue
        cache = make(name=name)
        logits.append(steps(twin, cache, ids, SPLITS[0]))
        caches.append(cache)
        wide = make(eviction=Eviction(90), name=name)
        torch.testing.assert_close(steps(twin, wide, ids, SPLITS[0]), twin(ids).logits, rtol=1e-3, atol=1e-3)
        assert wide.evicted == [0, 0] and max(cache.evicted) == 22
        assert (logits[-1] - twin(ids).logits).abs().max() > 1e-2
        for evicted, sliding in zip(cache.evicted, cache.is_sliding, strict=True):
            assert evicted == (0 if sliding else 22)
    if len(logits) == 2:
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
        for a, b in zip(*(cache.layers for cache in caches), strict=True):
            if hasattr(a, "mass"):
                torch.testing.assert_close(a.mass, b.mass, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "spec", ["none", "int8_per_token_head", "int4_group32", "fp8_e4m3", "nvfp4", "int4_group32+recent3+sink1"]
)
def test_g6_memory_is_that_of_the_budget_at_every_step(spec: str) -> None:
    cache = make(spec, limit=10_000)
    want = sum(h.format.nbytes(2, 2, 13, 8, h.dtype) for h in make(spec).handles())
    want += 2 * (2 * 2 * 13 * 4 + 2 * 13)  # mass and marks of padding
    for part in prompt(2, 40).split([20, *[1] * 20], 1):
        llama("sdpa")(input_ids=part, past_key_values=cache)
        assert cache.nbytes == want
        for layer in cache.layers:
            assert layer.held <= 12 and layer.keys.shape[2] == layer.values.shape[2] == 13
            assert layer.keys.length.tolist() == layer.values.length.tolist() == [layer.held] * 2
    full = make(spec, None, limit=10_000, batch_size=2)
    assert cache.nbytes < full.nbytes / 100


@pytest.mark.parametrize(
    "spec",
    [
        "int8_per_token_head",
        "int4_group32",
        "fp8_e4m3",
        "key=int3_group32,value=nvfp4",
        "int2_group32+hadamard",
    ],
)
def test_codes_move_and_are_never_coded_twice(spec: str) -> None:
    """What the first layer holds are codes of the cache that drops nothing: its keys and values depend on the text alone."""
    # No token twice: values carry no positions.
    ids = torch.stack([torch.randperm(61)[:34] + 3 for _ in range(2)])
    evicting, whole = make(spec), make(spec, None)
    before = None
    for part in ids.split(SPLITS[0], 1):
        llama("sdpa")(input_ids=part, past_key_values=evicting)
        llama("sdpa")(input_ids=part, past_key_values=whole)
        layer, full = evicting.layers[0], whole.layers[0]
        for mine, theirs in ((layer.keys, full.keys), (layer.values, full.values)):
            for plane, tensor, other in zip(mine.format.planes, mine.store, theirs.store, strict=True):
                if plane.static:
                    assert torch.equal(tensor, other)
        # Each held token is one of the whole cache, with the same codes in every plane.
        for handle, other in ((layer.keys, full.keys), (layer.values, full.values)):
            seen = int(whole.get_seq_length())
            for b in range(2):
                for h in range(2):
                    mine = fingerprint(handle, b, h, layer.held)
                    theirs = fingerprint(other, b, h, seen)
                    at = [theirs.index(token) for token in mine]
                    assert at == sorted(at) and at[-4:] == [*range(seen - 4, seen)] and at[:2] == [0, 1]
        before = layer.held
    assert before == 12


@pytest.mark.parametrize("spec", ["none", "int8_per_token_head", "int4_group32"])
@pytest.mark.parametrize("attention", ["sdpa", "softmax"])
def test_a_needle_that_was_attended_to_survives_and_one_that_was_not_is_gone(
    spec: str, attention: str
) -> None:
    """Two odd values far back; every query looks for one of them."""
    torch.manual_seed(3)
    cache = make(spec, limit=500)
    layer = cache.layers[0]
    direction = F.normalize(torch.randn(8), dim=0)
    keys, values = 0.1 * torch.randn(1, 2, 300, 8), torch.zeros(1, 2, 300, 8)
    heavy, light = 37, 61
    keys[:, :, heavy] = 6 * direction
    keys[:, :, light] = -6 * direction
    values[:, :, heavy, 0], values[:, :, light, 1] = 5.0, 5.0

    def attend(query: Tensor, n: int) -> Tensor:
        k, v = layer.update(keys[:, :, n : n + 1], values[:, :, n : n + 1])
        bias = torch.where(torch.arange(k.shape[2]) < layer.held, 0.0, -torch.inf).expand(1, 1, 1, -1)
        if attention == "sdpa":
            return F.scaled_dot_product_attention(query, k, v, bias)
        return (query @ k.transpose(2, 3) * 8**-0.5 + bias).softmax(-1) @ v

    for n in range(299):
        attend(4 * direction.expand(1, 2, 1, 8), n)
    assert layer.held == 12 and cache.evicted[0] == 287
    torch.testing.assert_close(
        attend(9 * direction.expand(1, 2, 1, 8), 299)[0, 0, 0, :2],
        torch.tensor([5.0, 0.0]),
        rtol=0.02,
        atol=0.02,
    )
    decoded = layer.values.dequantize()
    assert (decoded[0, :, :12, 0] > 4.9).any(1).all() and (decoded[0, :, :12, 1] < 0.1).all()


def test_off_unless_asked_for() -> None:
    cache = QuantizedCache(config("llama"), "int8_per_token_head", 64)
    assert cache.eviction is None and cache.evicted == [0, 0] and "evict" not in repr(cache)
    assert [type(layer).__name__ for layer in cache.layers] == ["QuantizedStaticLayer"] * 2
    ids = prompt(2, 34)
    steps(model("llama"), cache, ids, SPLITS[1][:1] + [4])
    assert cache.layers[0].keys.length.tolist() == [34, 34]


@pytest.mark.parametrize(
    "spec",
    [
        "test_keys_g8r8",
        "key=test_keys_g8r5s3,value=int4_group32",
        "key=none,value=int8_per_token_head+recent6",
    ],
)
def test_formats_with_groups_and_windows_drop_whole_groups(spec: str) -> None:
    eviction = Eviction(budget=48, sinks=3, recent=16, slack=1)
    cache, whole = make(spec, eviction, limit=200), make(spec, None, limit=200)
    unit = cache.layers[0].unit
    ids = prompt(1, 130)
    for part in ids.split([60, *[1] * 50, 11, 9], 1):
        llama("eager")(input_ids=part, past_key_values=cache)
        llama("eager")(input_ids=part, past_key_values=whole)
        layer, full = cache.layers[0], whole.layers[0]
        assert 48 - unit < layer.held <= 48 and layer.dropped % unit == 0
        for mine, other in ((layer.keys, full.keys), (layer.values, full.values)):
            mine, other = (h.dequantize() for h in (mine, other))
            for h in range(2):
                tokens = {tuple(t.tolist()) for t in other[0, h]}
                assert all(tuple(t.tolist()) in tokens for t in mine[0, h, : layer.held])
                # The first and the newest, exact ones among them, read as they do in the whole cache.
                assert torch.equal(mine[0, h, :3], other[0, h, :3])
                seen = int(whole.get_seq_length())
                assert torch.equal(mine[0, h, layer.held - 16 : layer.held], other[0, h, seen - 16 : seen])


def test_layers_of_unequal_groups_drop_equally_many() -> None:
    cache = make("int8_per_token_head", Eviction(48, 3, 16), limit=200, layers={1: "test_keys_g8r8"})
    out = steps(llama("sdpa"), cache, prompt(1, 90), [50, *[1] * 40])
    assert out.isfinite().all() and cache.evicted[0] == cache.evicted[1] > 0


def test_rows_are_reordered_with_what_they_weigh() -> None:
    ids = prompt(2, 20)
    user = llama("sdpa")

    def generate(cache: Any, **kwargs: Any) -> Tensor:
        return user.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            past_key_values=cache,
            **kwargs,
        )

    plain = user.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, num_beams=3
    )
    assert torch.equal(generate(make(eviction=Eviction(90)), num_beams=3), plain)
    assert generate(make(), num_beams=3).shape == plain.shape
    cache = make()
    steps(user, cache, ids, [20])
    twin = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    got = steps(user, cache, ids.flip(0), [1] * 20)
    torch.testing.assert_close(got.flip(0), steps(user, twin, ids, [1] * 20))
    cache.batch_repeat_interleave(2)
    assert cache.layers[0].mass.shape[0] == 4
    cache.batch_select_indices(torch.tensor([0]))
    assert steps(user, cache, ids[:1, :1], [1]).isfinite().all()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_and_reset(way: Any) -> None:
    ids = prompt(1, 34)
    cache = make("int4_group32")
    first = steps(llama("sdpa"), cache, ids, SPLITS[0])
    twin = way(cache)
    assert twin.evicted == cache.evicted and repr(twin) == repr(cache)
    assert torch.equal(*(steps(llama("sdpa"), c, ids[:, :3], [3]) for c in (cache, twin)))
    cache.reset()
    assert cache.evicted == [0, 0] and int(cache.get_seq_length()) == 0
    assert not any(t.any() for layer in cache.layers for t in (layer.mass, layer.real, *layer.keys.store))
    assert torch.equal(steps(llama("sdpa"), cache, ids, SPLITS[0]), first)


# ------------------------------------------------------------------------------------------------- the mass by itself


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal"])
@pytest.mark.parametrize("rows", [1, 7])
def test_mass_equals_the_softmax_summed(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction_ops, "_ELEMENTS", 2 * 4 * 9 * 3)  # three queries at a time
    query, key = torch.randn(2, 4, rows, 8), torch.randn(2, 2, 9, 8)
    open_ = torch.rand(2, 1, rows, 9) < 0.6
    open_[0, 0, 0] = False
    causal = kind == "causal"
    mask = {
        "bool": open_,
        "float": torch.where(open_, torch.randn(2, 1, rows, 9), torch.finfo(torch.float32).min),
    }.get(kind)
    got, visible = eviction_ops.attention_mass(query, key, 2, mask, causal)
    want = torch.zeros(2, 2, 9)
    for b in range(2):
        for h in range(4):
            for i in range(rows):
                scores = key[b, h // 2] @ query[b, h, i] * 8**-0.5
                may = torch.ones(9, dtype=torch.bool) if mask is None else open_[b, 0, i]
                may = torch.arange(9) <= i if causal else may
                if kind == "float":
                    scores = scores + mask[b, 0, i]
                if may.any():
                    want[b, h // 2] += scores.masked_fill(~may, -torch.inf).softmax(0)
                    assert visible[b][may].all()
    torch.testing.assert_close(got, want)


def test_generate_evicts_by_itself_when_told_to() -> None:
    """``use_quantized_cache_(eviction=)``: the tokens are those of a cache that was passed in."""
    from kvq_ops.hf_generate import use_quantized_cache_

    twin = copy.deepcopy(model("llama"))
    passed = QuantizedCache(twin.config, "int8_per_token_head", 64, eviction=EVICTION)
    options = {"max_new_tokens": 20, "do_sample": False}
    want = twin.generate(prompt(1, 11), past_key_values=passed, **options)
    use_quantized_cache_(twin, "int8_per_token_head", eviction=EVICTION)
    got = twin.generate(prompt(1, 11), return_dict_in_generate=True, **options)
    assert torch.equal(got.sequences, want)
    assert got.past_key_values.evicted == passed.evicted != [0] * 2
