"""Every spelling of attention becomes one record, and the record alone rebuilds the computation.

Each case is rewritten to a reference attention built from nothing but the record; the graph must then still compute what the
model does.  Masks are random, per batch and per head, so a lost mask, scale or head order fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from passes.attention import near_misses, scan

from .attention_reference import CaptureBackend, exported, found, rewrite_to_reference

B, HQ, HK, D, TQ, TK = 2, 4, 2, 16, 5, 9
G = HQ // HK


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(137)
    torch._dynamo.reset()


def dims() -> tuple[Any, Any]:
    return torch.export.Dim("tq", min=2, max=64), torch.export.Dim("tk", min=2, max=64)


def bool_mask(*lead: int, rows: int = TQ, columns: int = TK) -> Tensor:
    """True attends; no row is empty."""
    mask = torch.rand(*lead, rows, columns) > 0.5
    mask[..., torch.arange(rows), torch.arange(rows) % columns] = True
    return mask


def float_mask(*lead: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*lead, TQ, TK).masked_fill(~bool_mask(*lead), torch.finfo(dtype).min).to(dtype)


def qkv(
    heads: int = HQ, kv: int = HK, tq: int = TQ, tk: int = TK, dtype: torch.dtype = torch.float32, dv: int = D
):
    return (
        torch.randn(B, heads, tq, D, dtype=dtype),
        torch.randn(B, kv, tk, D, dtype=dtype),
        torch.randn(B, kv, tk, dv, dtype=dtype),
    )


def repeat_kv(x: Tensor, n: int) -> Tensor:
    b, h, t, d = x.shape
    return x[:, :, None].expand(b, h, n, t, d).reshape(b, h * n, t, d)


@dataclass
class Case:
    """A spelling with its inputs; ``dynamic`` lists, per input, which dims are (query, key) tokens."""

    name: str
    function: Callable[..., Tensor]
    args: Callable[[], tuple[Any, ...]]
    dynamic: tuple[dict[int, str], ...] | None = None
    want: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5


QKV_DYNAMIC = ({2: "q"}, {2: "k"}, {2: "k"})
MASK_DYNAMIC = (*QKV_DYNAMIC, {2: "q", 3: "k"})
CASES: list[Case] = []


def case(args, dynamic=None, name=None, tolerance=1e-5, **want):
    def add(function):
        CASES.append(Case(name or function.__name__, function, args, dynamic, want, tolerance))
        return function

    return add


def with_bool(heads: int = HQ, **kw: Any):
    return lambda: (*qkv(**kw), bool_mask(B, heads))


def with_float(heads: int = HQ, **kw: Any):
    return lambda: (*qkv(**kw), float_mask(B, heads))


MHA = {"kv": HQ}

# ---- scaled_dot_product_attention in each argument form


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.25, group=1)
def sdpa_plain(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


@case(with_bool(**MHA), MASK_DYNAMIC, scale=0.25)
def sdpa_bool_mask_positional(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m)


@case(with_float(1, **MHA), MASK_DYNAMIC)
def sdpa_float_mask_keyword(q, k, v, m):
    return F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m, dropout_p=0.0)


@case(lambda: (*qkv(**MHA), bool_mask()), (*QKV_DYNAMIC, {0: "q", 1: "k"}))
def sdpa_two_dim_mask(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m)


@case(lambda: qkv(**MHA), QKV_DYNAMIC, causal=True)
def sdpa_causal_top_left(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@case(lambda: qkv(kv=HQ, tq=TK), ({2: "k"}, {2: "k"}, {2: "k"}), causal=True, is_square=True)
def sdpa_causal_square(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, True)


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.3)
def sdpa_scale(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


@case(with_bool(), MASK_DYNAMIC, kv_heads=HK, group=G, repetition="interleaved")
def sdpa_enable_gqa(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)


@case(lambda: (*qkv(kv=1), bool_mask(B, 1)), MASK_DYNAMIC, kv_heads=1, group=HQ)
def sdpa_multi_query_gqa(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True)


@case(with_bool(dv=8), MASK_DYNAMIC, value_dim=8)
def sdpa_other_value_width(q, k, v, m):
    return F.scaled_dot_product_attention(q, repeat_kv(k, G), repeat_kv(v, G), m)


@case(
    lambda: (*(x[:, 0].clone() for x in qkv()), bool_mask(B)),
    ({1: "q"}, {1: "k"}, {1: "k"}, {1: "q", 2: "k"}),
    query_heads=1,
)
def sdpa_three_dims(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m)


@case(with_bool(), MASK_DYNAMIC, kv_heads=HK, group=G)
def sdpa_then_view(q, k, v, m):
    o = F.scaled_dot_product_attention(q, repeat_kv(k, G), repeat_kv(v, G), attn_mask=m)
    return o.transpose(1, 2).contiguous().view(o.shape[0], -1, HQ * D)


# ---- repetition of kv heads


def _attend(q, k, v, m):
    return torch.softmax((q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(~m, -torch.inf), -1) @ v


@case(with_bool(), MASK_DYNAMIC, kv_heads=HK, group=G, repetition="interleaved")
def repeat_by_expand(q, k, v, m):
    return _attend(q, repeat_kv(k, G), repeat_kv(v, G), m)


@case(with_bool(), MASK_DYNAMIC, kv_heads=HK, group=G, repetition="interleaved")
def repeat_by_interleave(q, k, v, m):
    return _attend(q, k.repeat_interleave(G, dim=1), v.repeat_interleave(G, 1), m)


@case(with_bool(), MASK_DYNAMIC, kv_heads=HK, group=G, repetition="tiled")
def repeat_by_tiling(q, k, v, m):
    return _attend(q, k.repeat(1, G, 1, 1), v.tile((1, G, 1, 1)), m)


@case(with_bool(), MASK_DYNAMIC, kv_heads=HK, group=G, repetition="tiled")
def repeat_by_outer_expand(q, k, v, m):
    k, v = (x[:, None].expand(-1, G, -1, -1, -1).flatten(1, 2) for x in (k, v))
    return _attend(q, k, v, m)


@case(lambda: (*qkv(kv=1), bool_mask(B, HQ)), MASK_DYNAMIC, kv_heads=1, group=HQ)
def multi_query_broadcast(q, k, v, m):
    return _attend(q, k, v, m)


@case(lambda: (*qkv(kv=1), bool_mask(B, HQ)), MASK_DYNAMIC, kv_heads=1, group=HQ)
def multi_query_expand(q, k, v, m):
    return _attend(q, k.expand(-1, HQ, -1, -1), v.expand(-1, HQ, -1, -1), m)


@case(with_bool(), MASK_DYNAMIC, kv_heads=HK, group=G, query_heads=HQ, repetition="interleaved")
def grouped_einsum(q, k, v, m):
    q5 = q.unflatten(1, (HK, G))
    s = torch.einsum("bhgtd,bhsd->bhgts", q5, k) * 0.3
    p = s.masked_fill(~m.unflatten(1, (HK, G)), -torch.inf).softmax(-1)
    return torch.einsum("bhgts,bhsd->bhgtd", p, v).flatten(1, 2)


@case(with_float(1), MASK_DYNAMIC, kv_heads=HK, group=G)
def grouped_matmul(q, k, v, m):
    q5 = q.reshape(B, HK, G, -1, D)
    s = q5 @ k.unsqueeze(2).transpose(-1, -2) * 0.25 + m.unsqueeze(2)
    return (s.softmax(-1) @ v.unsqueeze(2)).reshape(B, HQ, -1, D)


@case(with_bool(), None, kv_heads=HK, group=G)
def grouped_rows_in_one_dim(q, k, v, m):
    rows = q.reshape(B, HK, G * TQ, D)
    s = (rows @ k.transpose(-1, -2)).view(B, HQ, TQ, TK) / 4
    p = s.masked_fill(~m, -torch.inf).softmax(-1).view(B, HK, G * TQ, TK)
    return (p @ v).view(B, HQ, TQ, D)


@case(
    lambda: (torch.randn(B, TQ, HQ * D), torch.randn(B, TK, D), torch.randn(B, TK, D)),
    None,
    query_heads=HQ,
    kv_heads=1,
)
def multi_query_rows_by_token(q, k, v):
    s = torch.bmm(q.view(B, TQ * HQ, D), k.transpose(1, 2)).view(B, TQ, HQ, TK) * 0.25
    return torch.bmm(s.softmax(-1).view(B, TQ * HQ, TK), v).view(B, TQ, HQ * D)


# ---- scale in each place


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.3)
def scale_by_mul(q, k, v):
    return (torch.matmul(q, k.transpose(-1, -2)) * 0.3).softmax(-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.25)
def scale_by_div(q, k, v):
    return (torch.matmul(q, k.mT) / math.sqrt(D)).softmax(-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.3)
def scale_on_query(q, k, v):
    return torch.matmul(q * 0.3, k.transpose(-1, -2)).softmax(-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.3)
def scale_on_key(q, k, v):
    return torch.matmul(q, (0.3 * k).transpose(-1, -2)).softmax(-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.25)
def scale_root_on_both(q, k, v):
    root = D**-0.25
    return torch.matmul(q * root, k.transpose(-1, -2) * root).softmax(-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.25)
def scale_by_constant_tensor(q, k, v):
    return (torch.matmul(q, k.transpose(-1, -2)) / torch.full([], D**0.5)).softmax(-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=1.0)
def scale_none(q, k, v):
    return torch.matmul(q, k.transpose(-1, -2)).softmax(-1) @ v


@case(with_float(**MHA), MASK_DYNAMIC, scale=0.25)
def scale_in_place(q, k, v, m):
    s = torch.matmul(q, k.transpose(-1, -2))
    s.mul_(0.25)
    s += m
    return F.softmax(s, dim=-1) @ v


@case(lambda: (*qkv(**MHA), torch.rand(HQ, 1, 1) + 0.5), (*QKV_DYNAMIC, {}), scale=0.25)
def scale_learned_per_head(q, k, v, t):
    return (torch.matmul(q, k.transpose(-1, -2)) / 4 * t).softmax(-1) @ v


@case(lambda: (*qkv(**MHA), torch.rand(HQ, 1, 1) + 0.5), (*QKV_DYNAMIC, {}), scale=1.0)
def scale_divided_by_temperature(q, k, v, t):
    return (torch.matmul(q, k.transpose(-1, -2)) / t).softmax(-1) @ v


# ---- masks


@case(with_float(**MHA), MASK_DYNAMIC)
def mask_added_left(q, k, v, m):
    return (m + q @ k.transpose(-1, -2) * 0.25).softmax(-1) @ v


@case(with_float(1, **MHA), MASK_DYNAMIC)
def mask_added_right(q, k, v, m):
    return (q @ k.transpose(-1, -2) * 0.25 + m).softmax(-1) @ v


@case(with_float(**MHA), MASK_DYNAMIC)
def mask_subtracted(q, k, v, m):
    return (q @ k.transpose(-1, -2) * 0.25 - (-m)).softmax(-1) @ v


@case(with_float(**MHA), MASK_DYNAMIC)
def mask_added_with_alpha(q, k, v, m):
    return torch.add(q @ k.transpose(-1, -2) * 0.25, m, alpha=0.5).softmax(-1) @ v


@case(with_float(**MHA), MASK_DYNAMIC, scale=0.25)
def mask_before_the_scale(q, k, v, m):
    return ((q @ k.transpose(-1, -2) + m) * 0.25).softmax(-1) @ v


@case(with_bool(**MHA), MASK_DYNAMIC, scale=0.25)
def mask_where_before_the_scale(q, k, v, m):
    return (torch.where(m, q @ k.transpose(-1, -2), -torch.inf) / 4).softmax(-1) @ v


@case(with_bool(**MHA), MASK_DYNAMIC)
def mask_where(q, k, v, m):
    return torch.where(m, q @ k.transpose(-1, -2) * 0.25, torch.finfo(torch.float32).min).softmax(-1) @ v


@case(with_bool(**MHA), MASK_DYNAMIC)
def mask_where_constant_tensor(q, k, v, m):
    low = torch.full([], torch.finfo(torch.float32).min)
    return torch.where(m, q @ k.transpose(-1, -2) * 0.25, low).softmax(-1) @ v


@case(with_bool(**MHA), MASK_DYNAMIC)
def mask_where_inverted(q, k, v, m):
    return torch.where(~m, -torch.inf, q @ k.transpose(-1, -2) * 0.25).softmax(-1) @ v


@case(with_bool(1, **MHA), MASK_DYNAMIC)
def mask_filled_in_place(q, k, v, m):
    s = q @ k.transpose(-1, -2) * 0.25
    s.masked_fill_(~m, -torch.inf)
    return s.softmax(-1) @ v


@case(lambda: (*qkv(**MHA), bool_mask(B, 1), float_mask(1, HQ)), (*MASK_DYNAMIC, {2: "q", 3: "k"}))
def mask_several(q, k, v, m, bias):
    s = q @ k.transpose(-1, -2) * 0.25 + bias
    s = s.masked_fill(~m, -1e9)
    return (s + 0.5 * bias).softmax(-1) @ v


@case(lambda: (*qkv(**MHA), bool_mask(B, 1), bool_mask(1, HQ)), (*MASK_DYNAMIC, {2: "q", 3: "k"}))
def mask_two_bools(q, k, v, m, n):
    s = torch.where(m, q @ k.transpose(-1, -2) * 0.25, -torch.inf)
    return s.masked_fill(~n, -torch.inf).softmax(-1) @ v


def _minus_inf_row():
    q, k, v, m = _empty_row()
    return q, k, v, torch.zeros(m.shape).masked_fill(~m, -torch.inf)


@case(lambda: _empty_row(), MASK_DYNAMIC)
def mask_floored_fill(q, k, v, m):
    s = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~m, -torch.inf)
    return torch.clamp(s, min=torch.finfo(s.dtype).min).softmax(-1) @ v


@case(lambda: _minus_inf_row(), MASK_DYNAMIC)
def mask_floored_by_maximum(q, k, v, m):
    s = q @ k.transpose(-1, -2) * 0.25 + m
    return torch.max(s, torch.full([], torch.finfo(torch.float32).min)).softmax(-1) @ v


@case(with_bool(**MHA), MASK_DYNAMIC)
def mask_filled_by_a_tensor(q, k, v, m):
    s = q @ k.transpose(-1, -2) * 0.25
    return s.masked_fill(~m, torch.full([], -1e9)).softmax(-1) @ v


def _empty_row():
    mask = bool_mask(B, 1)
    mask[0, 0, 2] = False
    return (*qkv(**MHA), mask)


@case(_empty_row, MASK_DYNAMIC)
def mask_empty_row_finite_fill(q, k, v, m):
    return torch.where(m, q @ k.transpose(-1, -2) * 0.25, torch.finfo(torch.float32).min).softmax(-1) @ v


@case(_empty_row, MASK_DYNAMIC)
def mask_empty_row_zeroed(q, k, v, m):
    return torch.where(m, q @ k.transpose(-1, -2) * 0.25, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


@case(_empty_row, MASK_DYNAMIC)
def mask_empty_row_sdpa(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m)


@case(lambda: qkv(**MHA), QKV_DYNAMIC)
def mask_sliding_window(q, k, v):
    i = torch.arange(q.shape[-2])[:, None] + 3
    j = torch.arange(k.shape[-2])[None]
    keep = (j <= i) & (i - j < 4)
    return F.scaled_dot_product_attention(q, k, v, keep | (j == 0))


@case(lambda: (*qkv(**MHA), torch.randn(HQ, 1, TK)), (*QKV_DYNAMIC, {2: "k"}))
def bias_alibi(q, k, v, slopes):
    return (q @ k.transpose(-1, -2) * 0.25 + slopes).softmax(-1) @ v


@case(
    lambda: (*qkv(**MHA), torch.randn(32, HQ), float_mask(B, 1)),
    (*QKV_DYNAMIC, {}, {2: "q", 3: "k"}),
    scale=1.0,
)
def bias_t5(q, k, v, table, m):
    distance = torch.arange(k.shape[-2])[None] - torch.arange(q.shape[-2])[:, None]
    bias = F.embedding(distance.clamp(-16, 15) + 16, table).permute(2, 0, 1).unsqueeze(0) + m
    s = torch.matmul(q, k.transpose(3, 2))
    s += bias
    return F.softmax(s.float(), dim=-1).type_as(s) @ v


# ---- softcap


@case(with_float(1, **MHA), MASK_DYNAMIC, softcap=5.0, scale=4.0)
def softcap_gemma(q, k, v, m):
    s = torch.matmul(q, k.transpose(2, 3)) * 4.0
    s = torch.tanh(s / 5.0) * 5.0
    return F.softmax(s + m, dim=-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, softcap=5.0, scale=4.0)
def softcap_in_place(q, k, v):
    s = torch.matmul(q, k.transpose(2, 3)) * 4.0
    s.div_(5.0).tanh_().mul_(5.0)
    return F.softmax(s, dim=-1) @ v


@case(lambda: qkv(**MHA), QKV_DYNAMIC, softcap=7.0, scale=3.5)
def softcap_other_factors(q, k, v):
    return (7.0 * torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5)).softmax(-1) @ v


# ---- sinks


def _sink(q, k, v, m, sinks):
    w = torch.matmul(q, repeat_kv(k, G).transpose(2, 3)) * 0.3 + m
    s = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    joined = torch.cat([w, s], dim=-1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    p = F.softmax(joined, dim=-1, dtype=joined.dtype)
    return torch.matmul(F.dropout(p[..., :-1], p=0.0, training=False), repeat_kv(v, G))


@case(lambda: (*qkv(), float_mask(B, HQ), torch.randn(HQ) * 3), (*MASK_DYNAMIC, {}), kv_heads=HK, group=G)
def sinks_gpt_oss(q, k, v, m, sinks):
    return _sink(q, k, v, m, sinks)


@case(lambda: (*qkv(), float_mask(B, HQ), torch.randn(HQ) * 3), (*MASK_DYNAMIC, {}))
def sinks_first(q, k, v, m, sinks):
    w = torch.matmul(q, repeat_kv(k, G).transpose(2, 3)) * 0.3 + m
    s = sinks.view(1, HQ, 1, 1).expand(B, HQ, w.shape[2], 1)
    p = torch.cat([s, w], dim=-1).softmax(-1)[..., 1:]
    return torch.matmul(p, repeat_kv(v, G))


# ---- casts and dropout


@case(with_float(**MHA), MASK_DYNAMIC)
def softmax_float32_keyword(q, k, v, m):
    s = q @ k.transpose(-1, -2) * 0.25 + m
    return F.dropout(F.softmax(s, dim=-1, dtype=torch.float32).to(q.dtype), 0.1, training=False) @ v


def _half(mask_dtype):
    return lambda: (
        *qkv(dtype=torch.float16, **MHA),
        float_mask(B, HQ, dtype=mask_dtype).clamp_min(-1e4).to(mask_dtype),
    )


@case(_half(torch.float16), MASK_DYNAMIC, tolerance=3e-3)
def half_sdpa(q, k, v, m):
    return F.scaled_dot_product_attention(q, k, v, m)


@case(_half(torch.float32), MASK_DYNAMIC, tolerance=3e-3)
def half_with_float32_mask(q, k, v, m):
    s = (q @ k.transpose(-1, -2)).float() * 0.25 + m
    return s.softmax(-1).to(q.dtype) @ v


@case(_half(torch.float16), MASK_DYNAMIC, tolerance=3e-3)
def half_upcast_operands(q, k, v, m):
    s = q.float() @ k.float().transpose(-1, -2) * 0.25 + m.float()
    return (s.softmax(-1) @ v.float()).to(q.dtype)


@case(lambda: qkv(**MHA), QKV_DYNAMIC)
def dropout_of_zero_in_training(q, k, v):
    return F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.0, training=True) @ v


# ---- contractions


@case(with_bool(**MHA), MASK_DYNAMIC)
def einsum_four_dims(q, k, v, m):
    s = torch.einsum("bhqd,bhkd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bhkd->bhqd", s.masked_fill(~m, -torch.inf).softmax(-1), v)


@case(
    lambda: (*(x.transpose(1, 2) for x in qkv(**MHA)), bool_mask(B, HQ)),
    ({1: "q"}, {1: "k"}, {1: "k"}, {2: "q", 3: "k"}),
    kv_heads=HQ,
    key_roles=("batch", "token", "head", "channel"),
)
def einsum_tokens_first(q, k, v, m):
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    o = torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(~m, -torch.inf).softmax(-1), v)
    return o.reshape(*o.shape[:2], HQ * D)


@case(with_bool(**MHA), MASK_DYNAMIC)
def einsum_ellipsis(q, k, v, m):
    s = torch.einsum("...qd,...kd->...qk", q, k) * 0.25
    return torch.einsum("...qk,...kd->...qd", s.masked_fill(~m, -torch.inf).softmax(-1), v)


@case(with_bool(**MHA), MASK_DYNAMIC)
def einsum_transposed_scores(q, k, v, m):
    s = torch.einsum("bhqd,bhkd->bhkq", q, k) * 0.25
    p = s.masked_fill(~m.transpose(-1, -2), -torch.inf).softmax(-2)
    return torch.einsum("bhkq,bhkd->bhqd", p, v)


@case(with_bool(**MHA), MASK_DYNAMIC, kv_heads=HQ)
def key_times_query(q, k, v, m):
    s = (k @ q.transpose(-1, -2)).transpose(-1, -2) * 0.25
    return s.masked_fill(~m, -torch.inf).softmax(-1) @ v


@case(with_bool(**MHA), MASK_DYNAMIC, kv_heads=HQ)
def output_transposed(q, k, v, m):
    p = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~m, -torch.inf).softmax(-1)
    return v.transpose(-1, -2) @ p.transpose(-1, -2)


@case(with_float(**MHA), MASK_DYNAMIC, kv_heads=HQ)
def bmm_flattened_heads(q, k, v, m):
    q, k, v = (x.reshape(B * HQ, -1, D) for x in (q, k, v))
    s = torch.bmm(q, k.transpose(1, 2)).view(B, HQ, q.shape[1], -1) * 0.25 + m
    p = s.view(B * HQ, q.shape[1], -1).softmax(-1)
    return torch.bmm(p, v).view(B, HQ, -1, D).transpose(1, 2)


@case(lambda: (*qkv(), float_mask(B * HQ)), (*QKV_DYNAMIC, {1: "q", 2: "k"}), kv_heads=HK, group=G)
def bmm_repeated_heads(q, k, v, m):
    q = q.reshape(B * HQ, -1, D)
    k, v = (repeat_kv(x, G).reshape(B * HQ, -1, D) for x in (k, v))
    return torch.bmm((torch.bmm(q, k.transpose(1, 2)) * 0.25 + m).softmax(-1), v)


@case(
    lambda: (*qkv(**MHA), torch.randn(B * HQ, 1, TK), bool_mask(B, 1)),
    (*QKV_DYNAMIC, {2: "k"}, {2: "q", 3: "k"}),
    scale=0.3,
)
def baddbmm_bloom(q, k, v, alibi, m):
    q, k, v = (x.reshape(B * HQ, -1, D) for x in (q, k, v))
    s = alibi.baddbmm(q, k.transpose(-1, -2), beta=0.5, alpha=0.3).view(B, HQ, q.shape[1], -1)
    p = F.softmax(s.masked_fill(~m, -torch.inf), dim=-1, dtype=torch.float32)
    o = torch.bmm(p.view(B * HQ, q.shape[1], -1), v)
    return o.view(B, HQ, -1, D).transpose(1, 2).reshape(B, -1, HQ * D)


@case(lambda: qkv(**MHA), QKV_DYNAMIC, scale=0.3)
def baddbmm_without_bias(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    s = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=0.3)
    return torch.bmm(s.softmax(-1), v).unflatten(0, (B, HQ))


@case(lambda: (torch.randn(B, HQ, D), *qkv()[1:]), ({}, {2: "k"}, {2: "k"}), kv_heads=HK, query_heads=HQ)
def decode_without_token_dim(q, k, v):
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    return torch.einsum("bhs,bhsd->bhd", (torch.einsum("bhd,bhsd->bhs", q, k) * 0.25).softmax(-1), v)


@case(
    lambda: (torch.randn(TQ, D), torch.randn(TK, D), torch.randn(TK, D)),
    ({0: "q"}, {0: "k"}, {0: "k"}),
    query_heads=1,
)
def two_dims_only(q, k, v):
    return torch.mm((torch.mm(q, k.t()) * 0.25).softmax(-1), v)


# ---- layouts of keys and values


@case(
    lambda: (qkv(**MHA)[0], torch.randn(B, HQ, D, TK), torch.randn(B, HQ, TK, D)),
    ({2: "q"}, {3: "k"}, {2: "k"}),
    key_roles=("batch", "head", "channel", "token"),
)
def key_stored_transposed(q, k, v):
    return (q @ k * 0.25).softmax(-1) @ v


@case(
    lambda: (qkv()[0], torch.randn(B, TK, HK, D), torch.randn(B, TK, HK, D), bool_mask(B, HQ)),
    ({2: "q"}, {1: "k"}, {1: "k"}, {2: "q", 3: "k"}),
    key_roles=("batch", "token", "head", "channel"),
    group=G,
)
def key_stored_token_first(q, k, v, m):
    k, v = (repeat_kv(x.transpose(1, 2), G) for x in (k, v))
    return _attend(q, k, v, m)


@case(
    lambda: (qkv()[0], torch.randn(2, B, HK, TK, D), bool_mask(B, HQ)),
    ({2: "q"}, {3: "k"}, {2: "q", 3: "k"}),
    key_roles=("fixed", "batch", "head", "token", "channel"),
    group=G,
)
def key_and_value_in_one_buffer(q, kv, m):
    return F.scaled_dot_product_attention(q, kv[0], kv[1], m, enable_gqa=True)


@case(
    lambda: (torch.randn(B, TQ, D * HQ), torch.randn(B, TK, 2 * HQ * D)),
    ({1: "q"}, {1: "k"}),
    key_roles=("batch", "token", "head+channel"),
)
def key_and_value_packed(q, kv):
    k, v = kv.chunk(2, dim=-1)
    q, k, v = (x.unflatten(-1, (HQ, D)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@case(
    lambda: (qkv()[0], torch.randn(B, TK, 24)),
    ({2: "q"}, {1: "k"}),
    kv_heads=1,
    group=HQ,
    value_dim=D,
    head_dim=24,
)
def latent_shared_by_key_and_value(q, latent):
    q = F.pad(q, (0, 8))
    s = torch.einsum("bhtc,bsc->bhts", q, latent) * 0.2
    return torch.einsum("bhts,bsc->bhtc", s.softmax(-1), latent[..., :D])


@case(
    lambda: (qkv()[0], torch.randn(B, HK, 32, D), torch.randn(B, HK, 32, D)),
    ({2: "q"}, {}, {}),
    key_length=7,
    kv_heads=HK,
)
def key_prefix_of_a_buffer(q, k, v):
    return F.scaled_dot_product_attention(q, k[:, :, 2:9], v.narrow(2, 2, 7), enable_gqa=True)


def _run_all(case_: Case) -> list[Any]:
    return [pytest.param(case_, False, id=case_.name)] + (
        [pytest.param(case_, True, id=case_.name + "-dynamic")] if case_.dynamic is not None else []
    )


def _check(site, want: dict[str, Any]) -> None:
    for name, value in want.items():
        got = site.key.roles if name == "key_roles" else getattr(site, name)
        if isinstance(value, float):
            assert got == pytest.approx(value, rel=1e-6), name
        else:
            assert got == value, name


@pytest.mark.parametrize(("case_", "dynamic"), [p for c in CASES for p in _run_all(c)])
def test_spelling_is_found_and_rebuilt(case_: Case, dynamic: bool) -> None:
    args = case_.args()
    tq, tk = dims()
    shapes = None
    if dynamic:
        assert case_.dynamic is not None
        shapes = [
            {dim: tq if which == "q" else tk for dim, which in entry.items()} or None
            for entry in case_.dynamic
        ]
    graph_module = exported(case_.function, args, shapes)
    site = found(graph_module)
    _check(site, case_.want)
    rewrite_to_reference(graph_module, [site])
    assert not set(site.interior) & set(graph_module.graph.nodes), "the replaced computation is still there"
    expected = case_.function(*args)
    got = graph_module(*args)[0]
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=case_.tolerance, atol=case_.tolerance)


@pytest.mark.parametrize("case_", [c for c in CASES if c.dynamic is not None], ids=lambda c: c.name)
def test_spelling_under_compile(case_: Case) -> None:
    """The same through Dynamo and capture, with the token dims marked dynamic."""
    args = case_.args()
    assert case_.dynamic is not None
    for arg, entry in zip(args, case_.dynamic, strict=True):
        for dim in entry:
            torch._dynamo.mark_dynamic(arg, dim)
    seen: list[Any] = []

    def edit(graph_module):
        site = found(graph_module)
        seen.append(site)
        return rewrite_to_reference(graph_module, [site])

    expected = case_.function(*args)
    with torch.no_grad():
        got = torch.compile(case_.function, backend=CaptureBackend(edit), fullgraph=True)(*args)
    assert len(seen) == 1
    # Compile gives each input its own symbol, so query and key lengths are not provably the same there.
    _check(seen[0], {name: value for name, value in case_.want.items() if name != "is_square"})
    torch.testing.assert_close(got, expected, rtol=case_.tolerance, atol=case_.tolerance)


__all__ = ["near_misses", "scan"]
