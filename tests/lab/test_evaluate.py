"""The evaluation, on toy models whose right answers are known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from kvq_lab import evaluate
from kvq_lab.evaluate import (
    AttentionError,
    Quality,
    interleaved,
    live_bytes,
    log_probabilities,
    score,
    stream_logits,
)

VOCABULARY = 11


class CachedToy:
    """Next-token logits from the mean embedding of all tokens so far, kept in a cache."""

    def __init__(self, noise: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.embed = torch.randn(VOCABULARY, 6, generator=generator)
        self.noise = noise
        self.cache: list[torch.Tensor] = []
        self.starts: list[tuple[int, int]] = []

    def __call__(self, ids: torch.Tensor, start: int) -> torch.Tensor:
        assert start == len(self.cache), "positions must follow on"
        self.starts.append((start, ids.shape[1]))
        rows = []
        for token in ids[0]:
            self.cache.append(self.embed[token] * (1 + self.noise))
            rows.append(torch.stack(self.cache).mean(0) @ self.embed.T)
        return torch.stack(rows)[None]


IDS = torch.randint(0, VOCABULARY, (1, 21), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_streaming_equals_one_pass_for_any_chunk(chunk: int) -> None:
    whole = CachedToy()(IDS[:, :-1], 0)[:, 8:]
    parts = list(stream_logits(CachedToy(), IDS, 8, chunk))
    assert torch.equal(torch.cat([logits for logits, _ in parts], 1), whole)
    assert torch.equal(torch.cat([targets for _, targets in parts], 1), IDS[:, 9:])


def test_streaming_runs_the_context_once_and_then_chunks() -> None:
    toy = CachedToy()
    list(stream_logits(toy, IDS, 8, 5))
    assert toy.starts == [(0, 8), (8, 5), (13, 5), (18, 2)]


@pytest.mark.parametrize(("context", "chunk"), [(0, 4), (4, 0), (20, 4)])
def test_streaming_refuses_what_scores_nothing(context: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="at least"):
        next(stream_logits(CachedToy(), IDS, context, chunk))


def test_metrics_equal_their_definitions() -> None:
    logits, exact = torch.randn(2, 70, VOCABULARY), torch.randn(2, 70, VOCABULARY)
    targets = torch.randint(0, VOCABULARY, (2, 70))
    quality = Quality()
    got, want = log_probabilities(logits), log_probabilities(exact)
    quality.add(got[:, :33], want[:, :33], targets[:, :33])
    quality.add(got[:, 33:], want[:, 33:], targets[:, 33:])
    got, want = logits.double().flatten(0, 1), exact.double().flatten(0, 1)
    loss = F.cross_entropy(got, targets.flatten()).item()
    loss_exact = F.cross_entropy(want, targets.flatten()).item()
    kl = F.kl_div(got.log_softmax(-1), want.softmax(-1), reduction="batchmean").item()
    assert quality.tokens == 140
    assert quality.perplexity == pytest.approx(math.exp(loss), rel=1e-12)
    assert quality.perplexity_change == pytest.approx(math.exp(loss - loss_exact) - 1, rel=1e-9)
    assert quality.kl == pytest.approx(kl, rel=1e-12)
    assert quality.agreement == (got.argmax(-1) == want.argmax(-1)).double().mean().item()


def test_kl_is_finite_where_the_reference_rules_tokens_out() -> None:
    exact = torch.tensor([[0.0, 1.0, -math.inf]])
    quality = Quality()
    logits = torch.tensor([[0.0, 1.0, -2.0]])
    quality.add(log_probabilities(logits), log_probabilities(exact), torch.tensor([1]))
    kept = torch.tensor([0.0, 1.0]).double().softmax(-1)
    given = torch.tensor([0.0, 1.0, -2.0]).double().softmax(-1)[:2]
    assert quality.kl == pytest.approx((kept * (kept / given).log()).sum().item(), rel=1e-12)


def test_small_kl_survives_the_sum() -> None:
    # In fp32 a KL of this size would drown in the rounding of the log-probabilities.
    exact = torch.randn(400, 500, generator=torch.Generator().manual_seed(0))
    shifted = exact.clone()
    shifted[:, 0] += 1e-4
    quality = Quality()
    targets = torch.zeros(400, dtype=torch.long)
    quality.add(log_probabilities(shifted), log_probabilities(exact), targets)
    share = exact.double().softmax(-1)[:, 0]
    moved = (shifted.double() - exact.double())[:, 0]
    expected = (share * (1 - share) * moved.square() / 2).mean().item()
    assert quality.kl == pytest.approx(expected, rel=1e-3)


def test_the_error_bar_covers_noise_but_not_an_effect() -> None:
    quality = Quality(tokens=1000, differences=[0.1, -0.1] * 500)
    assert quality.perplexity_change == pytest.approx(0.0, abs=1e-12)
    assert quality.perplexity_change_error == pytest.approx(0.1 / math.sqrt(999), rel=1e-9)
    worse = Quality(tokens=1000, differences=[0.12, 0.08] * 500)
    assert worse.perplexity_change > 10 * worse.perplexity_change_error
    assert math.isnan(Quality(tokens=1, differences=[0.1]).perplexity_change_error)


def test_score_compares_in_lockstep() -> None:
    told: list[int] = []
    steps = {"exact": CachedToy(), "noisy": CachedToy(0.5), "same": CachedToy()}
    results = score(steps, "exact", IDS, 8, 5, told.append)
    assert told == [5, 5, 2]
    assert results["exact"].tokens == 12
    assert results["same"].kl == 0.0 == results["exact"].kl
    assert results["same"].agreement == 1.0
    assert results["same"].perplexity_change == 0.0
    assert results["noisy"].kl > 0.01
    assert results["noisy"].perplexity != results["exact"].perplexity


def test_scoring_may_stop_early_for_all_alike() -> None:
    steps = {"exact": CachedToy(), "noisy": CachedToy(0.5)}
    results = score(steps, "exact", IDS, 8, 3, enough=lambda: len(steps["noisy"].cache) > 12)
    assert {name: quality.tokens for name, quality in results.items()} == {"exact": 6, "noisy": 6}


def test_score_needs_its_reference() -> None:
    with pytest.raises(ValueError, match="'none' is none of"):
        score({"exact": CachedToy()}, "none", IDS, 8, 5)


class Wrapper(torch.Tensor):
    """A wrapper subclass with two inner tensors, as a quantized handle is."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func)


class Slotted:
    __slots__ = ("tensor", "unset")


def test_live_bytes_counts_each_storage_once_and_whole() -> None:
    base = torch.zeros(4, 8)
    views = SimpleNamespace(layers=[base[0], {"v": base[1:], "again": (base,)}])
    assert live_bytes(views) == 4 * 8 * 4
    assert live_bytes(views, base, torch.zeros(3, dtype=torch.int8)) == 4 * 8 * 4 + 3


def test_live_bytes_looks_into_wrappers_and_slots() -> None:
    handle = Wrapper(torch.zeros(2, 6, dtype=torch.int8), torch.zeros(2))
    assert live_bytes(handle) == 12 + 8
    handle.dense = torch.zeros(2, 6)  # a dense copy kept beside the codes must show
    assert live_bytes([handle]) == 12 + 8 + 48
    slotted = Slotted()
    slotted.tensor = torch.zeros(5)
    assert live_bytes(slotted) == 20


def test_live_bytes_leaves_modules_alone_unless_asked() -> None:
    module = torch.nn.Linear(3, 3)
    cache = SimpleNamespace(model=module, keys=torch.zeros(2), library=torch)
    cache.itself = cache
    assert live_bytes(cache) == 8
    assert live_bytes(module) == (9 + 3) * 4


def test_live_bytes_of_many_short_lived_objects() -> None:
    # Containers made while walking could take over each other's ids.
    assert live_bytes([SimpleNamespace(t=torch.zeros(1)) for _ in range(300)]) == 1200


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.scaled_dot_product_attention(first, k, v, attn_mask=None, scale=0.3)


def _round(x: torch.Tensor, site: int = 0) -> torch.Tensor:
    return (x * 4).round() / 4


def test_attention_error_measures_each_site_on_exact_inputs() -> None:
    q, k, v = torch.randn(3, 2, 4, 9, 16).unbind()
    same = (lambda x, site: x, lambda x, site: x)
    model = Attention()
    expected = model(q, k, v)
    with AttentionError({"round": (_round, _round), "same": same}) as measured:
        assert torch.equal(model(q, k, v), expected)
    assert measured.sites == 2
    first = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    changed = F.scaled_dot_product_attention(first, _round(k), _round(v), scale=0.3)
    relative = ((changed - expected).norm() / expected.norm()).item()
    assert measured.errors["round"][1].relative_l2 == pytest.approx(relative, rel=1e-5)
    assert measured.relative_l2("same") == 0.0


def test_attention_error_knows_keys_from_values() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    formats = {"keys": (_round, lambda x, site: x), "values": (lambda x, site: x, _round)}
    with AttentionError(formats) as measured:
        exact = F.scaled_dot_product_attention(query=q, key=k, value=v)
    only_values = F.scaled_dot_product_attention(q, k, _round(v))
    relative = ((only_values - exact).norm() / exact.norm()).item()
    assert measured.relative_l2("values") == pytest.approx(relative, rel=1e-5)
    assert measured.relative_l2("keys") != measured.relative_l2("values")


def test_attention_error_ends_with_its_block_and_says_when_it_saw_nothing() -> None:
    measured = AttentionError({"round": (_round, _round)})
    with measured:
        torch.ones(2) + 1
    F.scaled_dot_product_attention(*torch.randn(3, 1, 1, 2, 4).unbind())
    assert measured.sites == 0
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        measured.relative_l2("round")


def test_a_zero_output_has_no_relative_error() -> None:
    assert evaluate.SiteError(0, 0.0, 0.0).relative_l2 == 0.0
    assert evaluate.SiteError(0, 1.0, 0.0).relative_l2 == math.inf


def test_interleaving_rotates_and_takes_medians() -> None:
    now = [0.0]
    calls: list[str] = []
    # The machine is twice as slow in round 2 for everyone, and "b" hiccups once.
    durations = {"a": iter([9, 2, 4, 2]), "b": iter([9, 1, 2, 40])}

    def variant(name: str):
        def run() -> None:
            calls.append(name)
            now[0] += next(durations[name])

        return run

    timings = interleaved({n: variant(n) for n in "ab"}, rounds=3, clock=lambda: now[0])
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert timings["a"].samples == (2, 4, 2)
    assert timings["a"].ratio == 1.0
    assert timings["b"].seconds == 2
    assert timings["b"].ratio == 2.0


def test_interleaving_needs_something_to_time() -> None:
    with pytest.raises(ValueError, match="a round and a variant"):
        interleaved({}, rounds=3)
