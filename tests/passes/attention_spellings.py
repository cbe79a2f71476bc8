"""Spellings of attention, each with inputs and what a scan has to find in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

B, HQ, HK, D, TQ, TK = 2, 4, 2, 16, 5, 9
G = HQ // HK


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
