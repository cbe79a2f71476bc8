"""Attention as PyTorch's own modules write it: flex_attention and nn.MultiheadAttention."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from passes.attention import find_attention, near_misses

from .attention_reference import CaptureBackend, exported, found, rewrite_to_reference

B, HQ, HK, T, D = 2, 4, 2, 128, 16


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(137)
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def qkv(kv: int = HK) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, HQ, T, D), torch.randn(B, kv, T, D), torch.randn(B, kv, T, D)


def masked(mask_mod, heads=None):
    return create_block_mask(mask_mod, B, heads, T, T, device="cpu")


def flex_plain(q, k, v, bias, keep):
    return flex_attention(q, k, v, enable_gqa=True, scale=0.3)


def flex_causal(q, k, v, bias, keep):
    return flex_attention(q, k, v, block_mask=masked(lambda b, h, i, j: i >= j), enable_gqa=True)


def flex_window_or_first(q, k, v, bias, keep):
    def mod(b, h, i, j):
        return ((i - j).abs() < 9) | (j == h)

    return flex_attention(q, k, v, block_mask=masked(mod, HQ), enable_gqa=True)


def flex_looked_up_mask(q, k, v, bias, keep):
    return flex_attention(q, k, v, block_mask=masked(lambda b, h, i, j: keep[b, i, j]), enable_gqa=True)


def flex_bias(q, k, v, bias, keep):
    return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + bias[h, i, j], enable_gqa=True)


def flex_alibi(q, k, v, bias, keep):
    return flex_attention(
        q, k, v, score_mod=lambda s, b, h, i, j: s - (h + 1) * 0.01 * (i - j).abs(), enable_gqa=True
    )


def flex_softcap_and_everything(q, k, v, bias, keep):
    def score_mod(s, b, h, i, j):
        return torch.tanh(s / 5.0) * 5.0 + bias[h, i, j]

    return flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=masked(lambda b, h, i, j: keep[b, i, j]),
        enable_gqa=True,
        scale=2.0,
    )


def flex_where_in_score_mod(q, k, v, bias, keep):
    def score_mod(s, b, h, i, j):
        return torch.where(i >= j, s, -float("inf"))

    return flex_attention(q, k, v, score_mod=score_mod, enable_gqa=True)


FLEX = [
    flex_plain, flex_causal, flex_window_or_first, flex_looked_up_mask, flex_bias, flex_alibi, flex_softcap_and_everything,
    flex_where_in_score_mod,
]  # fmt: skip


def flex_args():
    keep = torch.rand(B, T, T) > 0.5
    keep |= torch.eye(T, dtype=torch.bool)
    return (*qkv(), torch.randn(HQ, T, T), keep)


@pytest.mark.parametrize("function", FLEX, ids=lambda f: f.__name__)
@pytest.mark.parametrize("door", ["export", "compile"])
def test_flex_attention(function, door: str) -> None:
    args = flex_args()
    expected = function(*args)
    seen = []

    def edit(graph_module):
        site = found(graph_module)
        seen.append(site)
        return rewrite_to_reference(graph_module, [site])

    with torch.no_grad():
        if door == "export":
            got = edit(exported(function, args))(*args)[0]
        else:
            got = torch.compile(function, backend=CaptureBackend(edit), fullgraph=True)(*args)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    (site,) = seen
    assert site.kv_heads == HK and site.group == HQ // HK
    assert site.softcap == (5.0 if function is flex_softcap_and_everything else 0.0)
    assert bool(site.terms) == (function is not flex_plain)


@pytest.mark.parametrize(
    ("score_mod", "reason"),
    [
        (lambda s, b, h, i, j: s * (h + 1), "multiplies the score"),
        (lambda s, b, h, i, j: torch.relu(s), "relu"),
        (lambda s, b, h, i, j: torch.where(s > 0, s, -float("inf")), "depends on the score"),
    ],
    ids=["factor", "relu", "own-mask"],
)
def test_flex_attention_refused(score_mod, reason: str) -> None:
    args = qkv(HQ)
    graph_module = exported(lambda q, k, v: flex_attention(q, k, v, score_mod=score_mod), args)
    assert find_attention(graph_module) == []
    (miss,) = near_misses(graph_module)
    assert reason in miss.reason


def test_flex_attention_with_its_logsumexp_read() -> None:
    graph_module = exported(lambda q, k, v: flex_attention(q, k, v, return_lse=True), qkv(HQ))
    (miss,) = near_misses(graph_module)
    assert "more of flex_attention than its output" in miss.reason


# ---- nn.MultiheadAttention and layers made of it


class Self(nn.Module):
    def __init__(self, batch_first: bool, bias_kv: bool = False, weights: bool = False) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=batch_first, add_bias_kv=bias_kv, dropout=0.1)
        self.weights = weights

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x, x, x, attn_mask=mask, need_weights=self.weights)[0]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_multihead_attention(batch_first: bool, weights: bool, kind: str) -> None:
    module = Self(batch_first, weights=weights).eval()
    x = torch.randn(3, 5, 32) if batch_first else torch.randn(5, 3, 32)
    mask = torch.rand(5, 5) > 0.6
    mask &= ~torch.eye(5, dtype=torch.bool)
    mask = mask if kind == "bool" else torch.randn(5, 5)
    with torch.no_grad():
        expected = module(x, mask)
        graph_module = torch.export.export(module, (x, mask)).module()
        site = found(graph_module)
        assert (site.batch, site.query_heads, site.kv_heads, site.head_dim) == (3, 4, 4, 8)
        rewrite_to_reference(graph_module, [site])
        torch.testing.assert_close(graph_module(x, mask), expected, rtol=1e-5, atol=1e-5)


def test_multihead_attention_of_unequal_widths() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(32, 4, kdim=12, vdim=20, batch_first=True)

        def forward(self, x: Tensor, k: Tensor, v: Tensor, pad: Tensor) -> Tensor:
            return self.inner(x, k, v, key_padding_mask=pad, need_weights=False)[0]

    module = Cross().eval()
    pad = torch.zeros(3, 7, dtype=torch.bool)
    pad[1, 4:] = True
    args = (torch.randn(3, 5, 32), torch.randn(3, 7, 12), torch.randn(3, 7, 20), pad)
    with torch.no_grad():
        expected = module(*args)
        graph_module = torch.export.export(module, args).module()
        site = found(graph_module)
        assert (site.query_length, site.key_length) == (5, 7) and len(site.terms) == 1
        rewrite_to_reference(graph_module, [site])
        torch.testing.assert_close(graph_module(*args), expected, rtol=1e-5, atol=1e-5)


def test_transformer_decoder_layer() -> None:
    module = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True).eval()
    args = (torch.randn(2, 5, 32), torch.randn(2, 7, 32))
    with torch.no_grad():
        expected = module(*args)
        graph_module = torch.export.export(module, args).module()
        sites = find_attention(graph_module)
        assert [site.key_length for site in sites] == [5, 7]
        rewrite_to_reference(graph_module, sites)
        torch.testing.assert_close(graph_module(*args), expected, rtol=1e-5, atol=1e-5)


def test_scale_held_in_a_lifted_constant() -> None:
    """torch.export lifts a tensor constant to an input; its value is given by ``constants``."""

    class Scaled(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.softmax(q @ k.transpose(-1, -2) / torch.tensor(5.0), -1) @ v

    program = torch.export.export(Scaled(), tuple(torch.randn(2, 3, 4, 8) for _ in range(3)))
    names = {
        spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target is not None
    }
    constants = {
        name: program.constants[target] for name, target in names.items() if target in program.constants
    }
    (site,) = find_attention(program.graph_module, constants)
    assert site.scale == pytest.approx(0.2)
    (unknown,) = find_attention(program.graph_module)
    assert unknown.scale == 1.0 and len(unknown.factors) == 1
