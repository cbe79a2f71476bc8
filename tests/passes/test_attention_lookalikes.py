"""What must not match, or must stay right: look-alikes of attention, tied sizes, and refusals that name their node."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.attention import find_attention, near_misses

from .attention_reference import exported, found, is_plain, rewrite_to_reference

B, H, T, D = 2, 4, 8, 16


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(137)


def qkv(h: int = H, t: int = T, d: int = D, tq: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, h, tq or t, d), torch.randn(B, h, t, d), torch.randn(B, h, t, d)


def scores(q, k):
    return q @ k.transpose(-1, -2) * 0.25


def refusal(function, *args):
    """The one near miss of a function without sites."""
    graph_module = exported(function, args)
    assert find_attention(graph_module) == []
    (miss,) = near_misses(graph_module)
    return miss


def rebuilt(function, *args):
    """The one site of a function, after checking that its record rebuilds the function."""
    graph_module = exported(function, args)
    site = found(graph_module)
    rewrite_to_reference(graph_module, [site])
    torch.testing.assert_close(graph_module(*args)[0], function(*args), rtol=1e-5, atol=1e-5)
    return site


# ---- refused, with the node in the way


def test_softmax_over_queries() -> None:
    miss = refusal(lambda q, k, v: scores(q, k).softmax(-2) @ v, *qkv())
    assert "does not sum over the keys alone" in miss.reason and miss.node.name.startswith("matmul")


def masked_after_exp(s):
    e = s.exp()
    e.mul_(s > 0)
    return e / e.sum(-1, keepdim=True)


def summed_elsewhere(s):
    return s.exp() / (s + 1).exp().sum(-1, keepdim=True)


def scaled_after_logsumexp(s):
    total = s.logsumexp(-1, keepdim=True)
    s.mul_(2.0)
    return torch.exp(s - total)


LOOK_LIKE_SOFTMAX = {
    "scaled between logsumexp and difference": scaled_after_logsumexp,
    "masked between exp and sum": masked_after_exp,
    "sum of another exp": summed_elsewhere,
    "sum over everything": lambda s: s.exp() / s.exp().sum(),
    "sum over two dims": lambda s: (e := s.exp()) / e.sum((-2, -1), keepdim=True),
    "sum over queries, kept by a broadcast": lambda s: (e := s.exp()) / e.sum(-2).unsqueeze(-1),
    "floor of the quotient": lambda s: torch.div(
        e := s.exp(), e.sum(-1, keepdim=True), rounding_mode="floor"
    ),
    "logarithm alone": lambda s: s.log_softmax(-1),
    "difference times two": lambda s: torch.sub(s, s.logsumexp(-1, keepdim=True), alpha=2).exp(),
    "sigmoid": torch.sigmoid,
}


@pytest.mark.parametrize("weights", LOOK_LIKE_SOFTMAX.values(), ids=LOOK_LIKE_SOFTMAX)
def test_what_looks_like_a_softmax(weights) -> None:
    graph_module = exported(lambda q, k, v: weights(scores(q, k)) @ v, qkv())
    assert find_attention(graph_module) == []


def test_scores_written_unread_between_logsumexp_and_difference() -> None:
    """A write that nobody reads by name: what is subtracted is of the scores before it, what it is subtracted from after."""
    graph_module = exported(lambda q, k, v: scaled_after_logsumexp(scores(q, k)) @ v, qkv())
    (write,) = (node for node in graph_module.graph.nodes if str(node.target) == "aten.mul_.Tensor")
    write.replace_all_uses_with(write.args[0])
    graph_module.recompile()
    assert find_attention(graph_module) == []


def test_softmax_of_exp_and_sum_over_queries() -> None:
    miss = refusal(lambda q, k, v: ((e := scores(q, k).exp()) / e.sum(-2, keepdim=True)) @ v, *qkv())
    assert "does not sum over the keys alone" in miss.reason


def test_softmax_over_heads() -> None:
    miss = refusal(lambda q, k, v: scores(q, k).softmax(1) @ v, *qkv())
    assert "query and key share" in miss.reason


def test_probabilities_returned() -> None:
    def function(q, k, v):
        p = scores(q, k).softmax(-1)
        return p @ v, p

    miss = refusal(function, *qkv())
    assert miss.node.op == "output" and "besides the product with the values" in miss.reason


def test_probabilities_averaged_by_multihead_attention() -> None:
    attention = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    miss = refusal(lambda x: attention(x, x, x, need_weights=True), x)
    assert "besides" in miss.reason


def test_dead_probabilities_do_not_count() -> None:
    def function(q, k, v):
        p = scores(q, k).softmax(-1)
        p.mean(1)
        return p @ v

    rebuilt(function, *qkv())


def test_classifier_head() -> None:
    miss = refusal(lambda x, w: F.linear(x, w).softmax(-1), torch.randn(2, 16), torch.randn(10, 16))
    assert miss.node.name.startswith("linear") and not miss.likely


def test_gate_over_a_parameter_is_exact_if_found() -> None:
    """A soft lookup is attention on a parameter; it may be found, but must rebuild."""
    rebuilt(
        lambda x, w, v: (x @ w).softmax(-1) @ v, torch.randn(2, 16), torch.randn(16, 10), torch.randn(10, 4)
    )


def test_training_dropout() -> None:
    miss = refusal(lambda q, k, v: F.dropout(scores(q, k).softmax(-1), 0.5, training=True) @ v, *qkv())
    assert miss.node.name.startswith("dropout") and "random" in miss.reason


def test_training_dropout_in_sdpa() -> None:
    miss = refusal(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), *qkv())
    assert "random" in miss.reason


@pytest.mark.parametrize("name", ["relu", "sigmoid", "exp", "square"])
def test_unknown_operation_between(name: str) -> None:
    miss = refusal(
        lambda q, k, v: (getattr(torch, name)(scores(q, k)) + 1.0 * q[:, :, :1, :1]).softmax(-1) @ v, *qkv()
    )
    assert (
        miss.node.target.overloadpacket.__name__ in (name, "pow")
        and "not understood" in miss.reason
        and miss.likely
    )


def test_unknown_operation_after_the_softmax() -> None:
    miss = refusal(lambda q, k, v: torch.relu(scores(q, k).softmax(-1) - 0.1) @ v, *qkv())
    assert miss.node.name.startswith("sub")


def test_mask_before_softcap() -> None:
    mask = torch.randn(T, T)
    miss = refusal(lambda q, k, v, m: (5 * torch.tanh((scores(q, k) + m) / 5)).softmax(-1) @ v, *qkv(), mask)
    assert miss.node.name.startswith("tanh") and "already masked" in miss.reason


def test_fill_that_does_not_exclude() -> None:
    miss = refusal(
        lambda q, k, v, m: scores(q, k).masked_fill(m, -3.0).softmax(-1) @ v, *qkv(), torch.rand(T, T) > 0.5
    )
    assert "-3.0" in miss.reason and miss.node.name.startswith("masked_fill")


def test_fill_scaled_until_it_does_not_exclude() -> None:
    mask = torch.rand(T, T) > 0.5
    miss = refusal(
        lambda q, k, v, m: (scores(q, k).masked_fill(m, -1e4) * 0.001).softmax(-1) @ v, *qkv(), mask
    )
    assert "no longer excludes" in miss.reason and miss.node.name.startswith("mul")


def test_floor_that_bounds_real_scores() -> None:
    miss = refusal(lambda q, k, v: scores(q, k).clamp(min=-2.0).softmax(-1) @ v, *qkv())
    assert "-2.0" in miss.reason and miss.node.name.startswith("clamp")
    miss = refusal(lambda q, k, v: scores(q, k).clamp(-1e9, 5.0).softmax(-1) @ v, *qkv())
    assert "bounded above" in miss.reason


def test_masked_scores_negated() -> None:
    mask = torch.rand(T, T) > 0.5
    miss = refusal(
        lambda q, k, v, m: (scores(q, k).masked_fill(m, -torch.inf) * -1.0).softmax(-1) @ v, *qkv(), mask
    )
    assert "sign" in miss.reason


def test_factor_that_varies_along_keys() -> None:
    miss = refusal(lambda q, k, v, m: (scores(q, k) * m).softmax(-1) @ v, *qkv(), torch.rand(T))
    assert "varies along the keys" in miss.reason


def test_factor_after_mask() -> None:
    miss = refusal(
        lambda q, k, v, m, t: ((scores(q, k) + m) * t).softmax(-1) @ v,
        *qkv(),
        torch.randn(T, T),
        torch.rand(H, 1, 1),
    )
    assert "after a mask" in miss.reason


def test_scores_written_through_a_view() -> None:
    def function(q, k, v):
        s = scores(q, k)
        s[..., 0].fill_(-100.0)
        return s.softmax(-1) @ v

    miss = refusal(function, *qkv())
    assert "through another view" in miss.reason


def test_sinks_kept_after_softmax() -> None:
    def function(q, k, v, s):
        joined = torch.cat([scores(q, k), s.view(1, H, 1, 1).expand(B, H, T, 1)], -1)
        return joined.softmax(-1) @ torch.cat([v, torch.ones(B, H, 1, D)], 2)

    assert "sinks" in refusal(function, *qkv(), torch.randn(H)).reason


def test_sinks_that_vary_by_token() -> None:
    def function(q, k, v, s):
        joined = torch.cat([scores(q, k), s], -1)
        return joined.softmax(-1)[..., :-1] @ v

    assert "no value per head" in refusal(function, *qkv(), torch.randn(B, H, T, 1)).reason


def test_scaling_after_the_sinks() -> None:
    def function(q, k, v, s):
        joined = torch.cat([scores(q, k), s.view(1, H, 1, 1).expand(B, H, T, 1)], -1) * 0.5
        return joined.softmax(-1)[..., :-1] @ v

    miss = refusal(function, *qkv(), torch.randn(H))
    assert "together with the sinks" in miss.reason


def test_keys_overwritten_between_read_and_output() -> None:
    """The keys are read through a copy, then the buffer changes before the attention ends."""

    def function(q, k, v):
        seen = k.transpose(1, 2).contiguous().transpose(1, 2)
        s = scores(q, seen)
        k.zero_()
        return s.softmax(-1) @ v

    assert "writes into" in refusal(function, *qkv()).reason


def test_mask_overwritten_before_the_output() -> None:
    def function(q, k, v, m):
        s = scores(q, k) + m
        m.zero_()
        return s.softmax(-1) @ v

    assert "writes into" in refusal(function, *qkv(), torch.randn(T, T)).reason


def test_write_before_the_read_is_seen() -> None:
    """A write through a view before the keys are read belongs to them."""

    def function(q, k, v, new, position):
        view = k.transpose(1, 2)
        k.index_copy_(2, position, new)
        return F.scaled_dot_product_attention(q, view.transpose(1, 2), v)

    q, k, v = qkv()
    args = (q, k, v, torch.randn(B, H, 1, D), torch.tensor([3]))
    graph_module = exported(function, args)
    site = found(graph_module)
    assert site.key.source.op == "placeholder"
    rewrite_to_reference(graph_module, [site])
    once = [a.clone() for a in args]
    torch.testing.assert_close(graph_module(*once)[0], function(*args), rtol=1e-5, atol=1e-5)


# ---- tied sizes and confusing layouts


def attend(q, k, v):
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


def test_keys_reshaped_over_heads_and_tokens() -> None:
    """[B, H, T, D] viewed as [B, T, H, D] mixes heads and tokens: no plain source, but the record stays exact."""

    def function(q, k, v):
        wrong = k.reshape(B, T, H, D).transpose(1, 2)
        return attend(q, wrong, v)

    site = rebuilt(function, *qkv())
    assert not is_plain(site.key) and is_plain(site.value)


def test_keys_reshaped_where_sizes_do_not_nest() -> None:
    def function(q, k, v):
        return attend(q, k.reshape(B, 9, 4, D).transpose(1, 2), v)

    site = rebuilt(function, *qkv(h=4, t=9))
    assert not is_plain(site.key)
    assert site.key.stopped is not None and "reshape" in site.key.stopped


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tied_sizes(size: int) -> None:
    """T = H = D: only structure tells them apart."""
    q, k, v = (torch.randn(B, size, size, size) for _ in range(3))
    plain = rebuilt(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v, q, k, v)
    assert plain.key.roles == ("batch", "head", "token", "channel")
    token_first = rebuilt(lambda q, k, v: attend(q, k.transpose(1, 2), v.transpose(1, 2)), q, k, v)
    assert token_first.key.roles == token_first.value.roles == ("batch", "token", "head", "channel")
    transposed = rebuilt(lambda q, k, v: (q @ k).softmax(-1) @ v.transpose(-1, -2), q, k, v)
    assert transposed.key.roles == ("batch", "head", "channel", "token")
    assert transposed.value.roles == ("batch", "head", "channel", "token")


def test_tied_batch_too() -> None:
    q, k, v = (torch.randn(4, 4, 4, 4) for _ in range(3))
    site = rebuilt(
        lambda q, k, v: torch.einsum("hqbt,hqtd->hqbd", torch.einsum("hqbd,hqtd->hqbt", q, k).softmax(-1), v),
        q,
        k,
        v,
    )
    assert site.key.roles == ("batch", "head", "token", "channel")
    site = rebuilt(
        lambda q, k, v: torch.einsum("hbqt,thbd->qbhd", torch.einsum("qbhd,thbd->hbqt", q, k).softmax(-1), v),
        q,
        k,
        v,
    )
    assert site.key.axis("token") == 0 and site.key.axis("channel") == 3


def test_keys_and_values_swapped() -> None:
    site = rebuilt(lambda q, k, v: F.scaled_dot_product_attention(q, v, k), *qkv())
    assert site.key.source.name.endswith("2") and site.value.source.name.endswith("1")


def test_keys_are_values() -> None:
    site = rebuilt(lambda q, k: F.scaled_dot_product_attention(q, k, k), *qkv()[:2])
    assert site.key.source is site.value.source


def test_every_second_key() -> None:
    site = rebuilt(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, ::2], v[:, :, ::2]), *qkv())
    assert not site.key.path and site.key.source is site.key.node


def test_values_of_other_heads_are_refused() -> None:
    def function(q, k, v):
        return attend(q, k, v.expand(-1, H, -1, -1))

    q, k, v = qkv()
    assert "differently over the heads" in refusal(function, q, k, v[:, :1]).reason


def test_cast_that_loses_bits_ends_the_walk() -> None:
    site = rebuilt(lambda q, k, v: attend(q, k.to(torch.bfloat16).float(), v), *qkv())
    assert site.key.source.target is torch.ops.aten.to.dtype


def test_two_additive_contractions_take_the_first() -> None:
    """Relative positions as a second product: one of them is the key, the other a mask."""

    def function(q, k, v, r):
        return ((q @ k.transpose(-1, -2) + q @ r.transpose(-1, -2)) * 0.25).softmax(-1) @ v

    site = rebuilt(function, *qkv(), torch.randn(1, H, T, D))
    assert site.key.source.name == "args_1" or site.key.source.name.endswith("_1")


def test_two_layers_are_two_sites() -> None:
    def function(q, k, v, m):
        once = F.scaled_dot_product_attention(q, k, v, m)
        return attend(once, v, k)

    args = (*qkv(), torch.randn(B, 1, T, T))
    graph_module = exported(function, args)
    sites = find_attention(graph_module)
    assert len(sites) == 2 and [len(s.terms) for s in sites] == [1, 0]
    rewrite_to_reference(graph_module, sites)
    torch.testing.assert_close(graph_module(*args)[0], function(*args), rtol=1e-5, atol=1e-5)


def test_description() -> None:
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 9, 16), torch.randn(2, 2, 9, 8)
    graph_module = exported(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True, is_causal=True), (q, k, v)
    )
    assert found(graph_module).describe() == (
        "scaled_dot_product_attention: B=2 Hq=4 Hkv=2 Tq=5 Tk=9, D=16 Dv=8, scale=0.25, interleaved heads, "
        "causal from the top left"
    )


# ---- the proof itself: a record that loses a part must fail


@pytest.mark.parametrize("lost", ["mask", "scale", "softcap", "sinks", "causal"])
def test_a_broken_record_is_noticed(lost: str) -> None:
    def function(q, k, v, m, s):
        w = 5.0 * torch.tanh(q @ k.transpose(-1, -2) * 2.0 / 5.0) + m
        joined = torch.cat([w, s.view(1, H, 1, 1).expand(B, H, T, 1)], -1)
        return joined.softmax(-1)[..., :-1] @ v

    def causal(q, k, v, m, s):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    function = causal if lost == "causal" else function
    args = (*qkv(), torch.randn(B, H, T, T), torch.randn(H))
    graph_module = exported(function, args)
    site = found(graph_module)
    if lost == "mask":
        site.terms.clear()
    elif lost == "sinks":
        site.sinks = None
    elif lost == "causal":
        site.causal = False
    else:
        setattr(site, lost, getattr(site, lost) * 1.1)
    rewrite_to_reference(graph_module, [site])
    assert not torch.allclose(graph_module(*args)[0], function(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_single_key_with_sinks_and_temperature(first: bool) -> None:
    """With one key every column could be the sinks; only the walk to the product tells which is."""

    def function(q, k, v, s, t):
        parts = [scores(q, k) * t, s.view(1, H, 1, 1).expand(B, H, T, 1)]
        p = torch.cat(parts[::-1] if first else parts, -1).softmax(-1)
        return (p[..., 1:] if first else p[..., :-1]) @ v

    q = qkv()[0]
    k, v = qkv(t=1)[1:]
    site = rebuilt(function, q, k, v, torch.randn(H), torch.rand(H, 1, 1) + 0.5)
    assert site.sinks is not None and len(site.factors) == 1
