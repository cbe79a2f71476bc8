"""Eviction in compiled steps: against H2O in plain torch, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")


from kvq_ops import errors, hf_runs  # noqa: E402
from kvq_ops.eviction import Eviction  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf.evicting import EVICTION, SPLITS, assert_same_tokens, llama, make, plain, steps  # noqa: E402
from tests.hf.h2o import H2O  # noqa: E402
from tests.hf.models import prompt  # noqa: E402
from tests.ops import windows  # noqa: E402, F401  registers formats of small groups

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def compiled(user: Any, **options: Any) -> Any:
    import passes

    torch._dynamo.utils.counters.clear()
    passes.clear_report()
    return torch.compile(user, backend="kvq", fullgraph=True, options={"lower": "eager", **options})


def settle(cache: Any) -> None:
    """Drop what compiled steps left to the next one."""
    for layer in cache.layers:
        if leaving := layer._leaving(1):
            layer._drop(leaving)


@pytest.mark.parametrize("slack", [1, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_compiled_steps_equal_h2o(attention: str, slack: int) -> None:
    """Three graphs at most, attention over codes in all of them, nothing left."""
    import passes

    eviction = Eviction(12, sinks=2, recent=4, slack=slack)
    ids, sizes = prompt(2, 45), [9, *[1] * 36]
    cache = make(eviction=eviction, batch_size=2)
    got = steps(compiled(llama(attention)), cache, ids, sizes)
    report = passes.report()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(report.graphs) <= 4
    assert report.found == report.rewritten and all(graph.rewritten == 2 for graph in report.graphs)
    assert all(layer.held <= layer.keys.shape[2] == 12 + slack for layer in cache.layers)
    settle(cache)
    for row in range(2):
        want, twin = plain(ids[row], sizes, eviction)
        torch.testing.assert_close(got[row], want, rtol=1e-4, atol=1e-4)
        assert_same_tokens(cache, row, twin)
    assert cache.evicted == [45 - cache.layers[0].held] * 2 and cache.evicted[0] >= 45 - 12 - slack


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_compiled_steps_after_an_eager_prompt_with_padding(attention: str) -> None:
    ids, sizes = prompt(3, 45), [20, *[1] * 25]
    mask = torch.ones_like(ids)
    for row, pads in enumerate((0, 5, 16)):
        ids[row, :pads], mask[row, :pads] = 0, 0
    user, cache = llama(attention), make(eviction=Eviction(12, 2, 4, 3))
    step = compiled(user)
    first = steps(user, cache, ids[:, :20], sizes[:1], mask[:, :20])

    parts = []
    for n in range(20, 45):
        position = (mask[:, : n + 1].cumsum(1) - 1)[:, -1:]
        parts.append(
            step(
                input_ids=ids[:, n : n + 1],
                attention_mask=mask[:, : n + 1],
                position_ids=position,
                past_key_values=cache,
            ).logits
        )
    got = torch.cat([first, *parts], 1)
    settle(cache)
    for row, pads in enumerate((0, 5, 16)):
        want, twin = plain(ids[row], sizes, Eviction(12, 2, 4, 3), pads)
        torch.testing.assert_close(got[row, pads:], want, rtol=1e-4, atol=1e-4)
        assert_same_tokens(cache, row, twin)


@pytest.mark.parametrize("spec", ["key=fp8_e4m3,value=int4_group32", "test_keys_g8r8"])
def test_compiled_graphs_move_codes(spec: str) -> None:
    eviction = Eviction(48, 3, 16, 5)
    ids, sizes = prompt(1, 80), [40, *[1] * 40]
    caches = [make(spec, eviction, limit=200) for _ in range(2)]
    steps(compiled(llama("sdpa")), caches[0], ids, sizes)
    steps(llama("sdpa"), caches[1], ids, sizes)
    settle(caches[0])
    a, b = (cache.layers[0] for cache in caches)
    assert a.held == b.held and a.dropped > 0
    for mine, other in ((a.keys, b.keys), (a.values, b.values)):
        for name, new, old in zip(mine.plane_names(), mine.store, other.store, strict=True):
            # The ring of exact tokens has no meaning beyond what it holds.
            assert name == "recent" or torch.equal(new, old), name
        assert torch.equal(mine.dequantize(), other.dequantize())


def test_the_lightest_kept_instead_is_seen_in_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, sizes = prompt(1, 34), SPLITS[0]
    right, _ = plain(ids[0], sizes, EVICTION)
    choose = hf_runs.choose_tokens
    monkeypatch.setattr(
        hf_runs, "choose_tokens", lambda mass, *args, **kwargs: choose(1e3 - mass, *args, **kwargs)
    )
    got = steps(compiled(llama("sdpa")), make(), ids, sizes)[0]
    assert (got - right).abs().max() > 0.1


def test_compiled_attention_that_is_not_understood_is_an_error() -> None:
    layer = make().layers[0]

    def step(new: Tensor) -> Tensor:
        keys, _ = layer.update(new, new)
        return torch.sigmoid(new @ keys.transpose(2, 3))

    run = torch.compile(step, backend="eager")
    run(torch.zeros(1, 2, 1, 8))
    with pytest.raises(errors.UnsupportedWriteError, match="attn_implementation"):
        run(torch.zeros(1, 2, 1, 8))


def test_inductor_carries_it_out() -> None:
    """One layer, eight steps, each of which drops a token."""
    ids = prompt(1, 20)
    user = llama("sdpa")
    user.model.layers = user.model.layers[:1]
    user.config.num_hidden_layers = 1
    cache = QuantizedCache(user.config, "none", 100, eviction=EVICTION)
    got = [steps(user, cache, ids[:, :13], [13])]
    got.append(steps(torch.compile(user, backend="kvq", fullgraph=True), cache, ids[:, 13:], [1] * 7))
    e = EVICTION
    twin = H2O(user, e.budget, e.sinks, e.recent)
    want = torch.cat([twin.step(part.tolist()) for part in ids[0].split([13, *[1] * 7])])
    torch.testing.assert_close(torch.cat(got, 1)[0], want, rtol=1e-4, atol=1e-4)
    settle(cache)
    assert_same_tokens(cache, 0, twin)
