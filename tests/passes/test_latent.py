"""Latent attention: the latent is stored once, quantized, for keys and values; the rotary part beside it stays exact (E3)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import passes
from kvq_ops.handle import QuantizedKV

from .cache_checks import INT8, assert_quantized, assert_same, compiled
from .cache_decoder import fake_quantize

B, T, HEADS, LATENT, ROTARY, WIDTH = 2, 16, 3, 64, 16, 24
KINDS = ("two_buffers", "one_buffer", "by_hand", "rotary_first", "grouped")


class Latent(nn.Module):
    """Absorbed form: queries attend to the latent itself, which is also what they gather.

    ``fake`` rounds as the store does: the latent alone, or latent and rotary part together where one buffer holds both.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.fake = kind, ""
        self.q = nn.Linear(WIDTH, HEADS * (LATENT + ROTARY), bias=False)
        self.latent_of, self.rotary_of = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, ROTARY)
        self.o = nn.Linear(HEADS * LATENT, WIDTH)
        if kind == "one_buffer":
            self.register_buffer("cache", torch.zeros(B, T, LATENT + ROTARY))
        else:
            self.register_buffer("latent", torch.zeros(B, T, LATENT))
            self.register_buffer("rotary", torch.zeros(B, T, ROTARY))
        self.register_buffer("causal", torch.tril(torch.ones(T, T, dtype=torch.bool)))
        self.eval()

    def rounded(self, x: Tensor) -> Tensor:
        return fake_quantize(x[:, None], self.fake)[:, 0] if self.fake else x

    def update(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """Keys ``[B, T, LATENT + ROTARY]`` and values ``[B, T, LATENT]``."""
        latent, rotary = self.latent_of(x), self.rotary_of(x)
        if self.kind == "one_buffer":
            self.cache[:, position] = self.rounded(torch.cat([latent, rotary], -1))
            return self.cache, self.cache[..., :LATENT]
        self.latent[:, position] = self.rounded(latent)
        self.rotary[:, position] = rotary
        parts = [self.latent, self.rotary]
        return torch.cat(parts[::-1] if self.kind == "rotary_first" else parts, -1), self.latent

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, HEADS, LATENT + ROTARY).transpose(1, 2)
        keys, values = self.update(x, position)
        mask = self.causal[position]
        if self.kind == "by_hand":
            scores = torch.einsum("bhqd,bkd->bhqk", q, keys) * 0.1
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            out = torch.einsum("bhqk,bkc->bhqc", weights, values)
        elif self.kind == "grouped":
            out = F.scaled_dot_product_attention(
                q, keys[:, None], values[:, None], attn_mask=mask, scale=0.1, enable_gqa=True
            )
        else:
            keys, values = (one[:, None].expand(-1, HEADS, -1, -1) for one in (keys, values))
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=0.1)
        return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


def turns() -> list[tuple[Tensor, Tensor]]:
    """Three turns: a prompt, three answers of one token, and so on."""
    generator = torch.Generator().manual_seed(4)
    lengths = [4, 1, 1, 1, 3, 1, 2, 1]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        (torch.randn(B, n, WIDTH, generator=generator), torch.arange(i, i + n))
        for i, n in zip(starts, lengths, strict=True)
    ]


def run(step) -> list[Tensor]:
    with torch.no_grad():
        return [step(x, position) for x, position in turns()]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    passes.clear_report()


@pytest.mark.parametrize("format", ["none", INT8])
@pytest.mark.parametrize("kind", KINDS)
def test_compile(kind: str, format: str) -> None:
    net = Latent(kind)
    dense = run(copy.deepcopy(net))
    rounded = copy.deepcopy(net)
    rounded.fake = "" if format == "none" else format
    want = run(rounded)
    report = passes.quantize_kv_cache_(net, format, turns()[1])
    assert report.rewritten == report.found == 1, report.text()
    stored = "cache" if kind == "one_buffer" else "latent"
    assert [cache.name for cache in report.graphs[0].caches] == [stored]
    assert report.graphs[0].caches[0].bytes == getattr(net, stored).nbytes
    if kind != "one_buffer":
        assert not isinstance(net.rotary, QuantizedKV)
    assert_same(run(copy.deepcopy(net)), want)
    assert_same(run(compiled(net)), want)
    assert passes.report().rewritten == passes.report().found
    if format != "none":
        assert_quantized(want, dense)


@pytest.mark.parametrize("kind", KINDS)
def test_export(kind: str) -> None:
    net = Latent(kind)
    tokens = Dim("tokens", min=1, max=T)
    with torch.no_grad():
        program = torch.export.export(
            copy.deepcopy(net), turns()[4], dynamic_shapes=({1: tokens}, {0: tokens})
        )
    for format in ("none", INT8):
        rounded = copy.deepcopy(net)
        rounded.fake = "" if format == "none" else format
        ours = passes.quantize_exported(program, format)
        stored = "cache" if kind == "one_buffer" else "latent"
        assert stored not in ours.state_dict and f"{stored}_codes" in ours.state_dict
        assert (kind == "one_buffer") or "rotary" in ours.state_dict
        assert_same(run(ours.module()), run(rounded))


def test_rotary_part_is_exact() -> None:
    """A rotary part a thousand times as large would be wrecked by int8 beside the latent; kept apart it costs nothing."""
    net = Latent("two_buffers")
    with torch.no_grad():
        net.rotary_of.weight *= 1000
        net.rotary_of.bias *= 1000
    rounded = copy.deepcopy(net)
    rounded.fake = INT8
    want = run(rounded)
    passes.quantize_kv_cache_(net, INT8, turns()[1])
    for got, one in zip(run(compiled(net)), want, strict=True):
        torch.testing.assert_close(got, one, atol=2e-5, rtol=1e-5)


def test_wrong_parts_are_noticed() -> None:
    """The check itself: rounding the rotary part as well gives other results than what is claimed."""
    net = Latent("two_buffers")
    rounded = copy.deepcopy(net)
    rounded.fake = INT8
    want = run(rounded)
    with torch.no_grad():
        scale = net.rotary_of.weight.abs().amax() / 7
        rounded.rotary_of.weight.copy_((rounded.rotary_of.weight / scale).round() * scale)
    rounded.latent.zero_(), rounded.rotary.zero_()
    assert_quantized(run(rounded), want)


# ----------------------------------------------------------------------------------- expanded and absorbed are the same


class Expanding(nn.Module):
    """Keys and values of all heads are expanded from the latent in every step, or the queries absorb the expansion."""

    def __init__(self, absorbed: bool) -> None:
        super().__init__()
        self.absorbed, self.fake = absorbed, ""
        head = 8
        self.head, self.scale = head, (head + ROTARY) ** -0.5
        self.q = nn.Linear(WIDTH, HEADS * (head + ROTARY), bias=False)
        self.latent_of, self.rotary_of = nn.Linear(WIDTH, LATENT), nn.Linear(WIDTH, ROTARY)
        self.expand = nn.Linear(LATENT, HEADS * 2 * head, bias=False)
        self.o = nn.Linear(HEADS * head, WIDTH)
        self.register_buffer("latent", torch.zeros(B, T, LATENT))
        self.register_buffer("rotary", torch.zeros(B, T, ROTARY))
        self.register_buffer("causal", torch.tril(torch.ones(T, T, dtype=torch.bool)))
        self.eval()

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, HEADS, self.head + ROTARY).transpose(1, 2)
        latent = self.latent_of(x)
        self.latent[:, position] = fake_quantize(latent[:, None], self.fake)[:, 0] if self.fake else latent
        self.rotary[:, position] = self.rotary_of(x)
        mask = self.causal[position]
        if self.absorbed:
            up = self.expand.weight.view(HEADS, 2 * self.head, LATENT)
            plain, turned = q.split([self.head, ROTARY], -1)
            q = torch.cat([plain @ up[:, : self.head], turned], -1)
            keys = torch.cat([self.latent, self.rotary], -1)
            keys, values = (one[:, None].expand(-1, HEADS, -1, -1) for one in (keys, self.latent))
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)
            out = out @ up[:, self.head :].transpose(1, 2)
        else:
            both = self.expand(self.latent).view(batch, T, HEADS, 2 * self.head).transpose(1, 2)
            keys, values = both.split(self.head, -1)
            keys = torch.cat([keys, self.rotary[:, None].expand(-1, HEADS, -1, -1)], -1)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=self.scale)
        return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


@pytest.mark.parametrize("format", ["none", INT8])
def test_absorbed_is_expanded(format: str) -> None:
    """Over three turns; in both forms the latent is stored once, and no head has keys or values of its own."""
    plain = Expanding(absorbed=False)
    rounded = copy.deepcopy(plain)
    rounded.fake = "" if format == "none" else format
    want = run(rounded)
    for absorbed in (False, True):
        net = Expanding(absorbed)
        net.load_state_dict(plain.state_dict())
        report = passes.quantize_kv_cache_(net, format, turns()[1])
        assert report.rewritten == 1, report.text()
        assert [cache.name for cache in report.graphs[0].caches] == ["latent"]
        assert not isinstance(net.rotary, QuantizedKV)
        assert_same(run(copy.deepcopy(net)), want, 2e-6)
        passes.clear_report()
        assert_same(run(compiled(net)), want, 2e-6)
        assert passes.report().rewritten == passes.report().found > 0
        fresh = Expanding(absorbed)
        fresh.load_state_dict(plain.state_dict())
        tokens = Dim("tokens", min=1, max=T)
        with torch.no_grad():
            program = torch.export.export(fresh, turns()[4], dynamic_shapes=({1: tokens}, {0: tokens}))
        ours = passes.quantize_exported(program, format)
        assert "latent" not in ours.state_dict and "rotary" in ours.state_dict
        assert_same(run(ours.module()), want, 2e-6)
