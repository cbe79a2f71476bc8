"""Latent attention that expands cached latents: which forms are read from the cache, and which are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import passes
from kvq_ops.errors import NothingRewrittenError
from passes.latent import absorb

B, H, T, R, ROPE, K, V, HIDDEN = 2, 3, 11, 8, 4, 5, 6, 16
INT8 = "int8_per_token_head"


class Latent(nn.Module):
    """One layer of latent attention; the options change one thing each."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

        self.options = options
        self.register_buffer("latents", torch.zeros(B, 1, T, R))
        self.register_buffer("others", torch.zeros(B, 1, T, R))
        self.register_buffer("turned", torch.zeros(B, 1, T, ROPE))
        self.down, self.rope = draw(R, HIDDEN), draw(ROPE, HIDDEN)
        self.query = draw(H * (K + ROPE), HIDDEN)
        self.up, self.bias = draw(H * (K + V), R), draw(H * (K + V))
        for name in ("down", "rope", "query", "up", "bias"):
            setattr(self, name, nn.Parameter(getattr(self, name), requires_grad=False))

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        """``x [B, N, HIDDEN]`` at ``position [N]``."""
        options, n = self.options, x.shape[1]
        latents = self.latents.index_copy_(2, position, (x @ self.down.T).unsqueeze(1))
        turned = self.turned.index_copy_(2, position, (x @ self.rope.T).unsqueeze(1))
        if options.get("fresh"):
            latents = latents * 1.5  # not what the cache holds
        bias = self.bias if options.get("bias") else None
        both = nn.functional.linear(latents, self.up, bias).view(B, T, H, K + V).transpose(1, 2)
        keys, values = both.split([K, V], -1)
        if options.get("two_latents"):
            others = self.others.index_copy_(2, position, (x @ self.down.T).unsqueeze(1).cos())
            values = nn.functional.linear(others, self.up).view(B, T, H, K + V).transpose(1, 2)[..., K:]
        parts = [keys, turned.expand(-1, H, -1, -1)]
        if options.get("rope_first"):
            parts.reverse()
        if options.get("gap"):
            joined = torch.zeros(B, H, T, K + ROPE)
            joined[..., :K].copy_(keys)
        elif options.get("cat", True):
            joined = torch.cat(parts, -1)
        else:
            joined = keys.new_empty(B, H, T, K + ROPE)
            joined[..., : parts[0].shape[-1]].copy_(parts[0])
            joined[..., parts[0].shape[-1] :].copy_(parts[1])
        query = (x @ self.query.T).view(B, n, H, -1).transpose(1, 2)
        mask = torch.arange(T) <= position[:, None]
        if options.get("by_hand"):
            scores = query @ joined.transpose(-1, -2) * 0.3
            scores = scores.masked_fill(~mask, -torch.inf)
            out = scores.softmax(-1) @ values
        else:
            out = nn.functional.scaled_dot_product_attention(query, joined, values, attn_mask=mask, scale=0.3)
        return out.transpose(1, 2).reshape(B, n, -1)


def steps(module: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        module(torch.randn(B, 2, HIDDEN, generator=generator), torch.arange(at, at + 2)) for at in (0, 2, 4)
    ]


def export(**options: Any) -> torch.export.ExportedProgram:
    arguments = (torch.zeros(B, 2, HIDDEN), torch.arange(2))
    return torch.export.export(Latent(**options).eval(), arguments, strict=True)


def furthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("rope_first", [False, True])
@pytest.mark.parametrize("cat", [False, True])
def test_e3_expanded_latents_are_read_from_the_cache(cat: bool, rope_first: bool, by_hand: bool) -> None:
    program = export(cat=cat, rope_first=rope_first, by_hand=by_hand)
    wanted = steps(Latent(cat=cat, rope_first=rope_first, by_hand=by_hand))
    exact = passes.quantize_exported(program, "none")
    assert passes.report().graphs[-1].rewritten == 1
    assert {name for name in exact.state_dict if name.startswith(("latents", "turned"))} == {
        "latents_codes",
        "latents_length",
        "turned",
    }, "the latent is stored once, the rotary part as it was"
    error = furthest(steps(exact.module()), wanted)
    assert error <= 1e-5
    coded = furthest(steps(passes.quantize_exported(program, INT8).module()), wanted)
    assert 10 * error < coded < 0.05
    # Nothing as large as the expanded keys is computed any more.
    largest = max((node.meta["val"].numel() for node in exact.graph.nodes if _is_step(node)), default=0)
    assert largest < B * H * T * (K + V)


def _is_step(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)


@pytest.mark.parametrize("option", ["bias", "two_latents", "fresh", "gap"])
def test_look_alikes_are_left_as_they_are(option: str) -> None:
    program = export(**{option: True})
    with pytest.raises(NothingRewrittenError):
        passes.quantize_exported(program, "none")
    left = passes.quantize_exported(program, "none", allow_unrewritten=True)
    (site,) = (site for site in passes.report().graphs[-1].sites if not site.rewritten)
    assert site.reason
    assert furthest(steps(left.module()), steps(Latent(**{option: True}))) <= 1e-6


def test_graphs_without_latents_stay_the_same_object() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("k", torch.zeros(1, 2, 4, 8))

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            k = self.k.index_copy_(2, position, x)
            return nn.functional.scaled_dot_product_attention(x, k, k)

    program = torch.export.export(Plain(), (torch.zeros(1, 2, 1, 8), torch.tensor([0])))
    assert absorb(program.graph_module) is program.graph_module
