"""Spellings of what is done to the scores: masks, softcap, sinks, casts and dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .attention_spellings import (
    HK,
    HQ,
    MASK_DYNAMIC,
    MHA,
    QKV_DYNAMIC,
    TK,
    B,
    G,
    bool_mask,
    case,
    float_mask,
    qkv,
    repeat_kv,
    with_bool,
    with_float,
)

# ---- softmax made of other operations


@case(with_float(**MHA), MASK_DYNAMIC)
def softmax_of_exp_and_sum(q, k, v, m):
    s = q @ k.transpose(-1, -2) * 0.25 + m
    e = torch.exp(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True) @ v


@case(with_bool(**MHA), MASK_DYNAMIC)
def softmax_of_exp_and_sum_unshifted(q, k, v, m):
    e = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~m, -torch.inf).exp()
    return (e / e.sum(-1).unsqueeze(-1)) @ v


@case(with_float(**MHA), MASK_DYNAMIC)
def softmax_by_its_logarithm(q, k, v, m):
    return torch.log_softmax(q @ k.transpose(-1, -2) * 0.25 + m, -1).exp() @ v


@case(with_float(**MHA), MASK_DYNAMIC)
def softmax_by_logsumexp(q, k, v, m):
    s = q @ k.transpose(-1, -2) * 0.25 + m
    return torch.exp(s - s.logsumexp(-1, keepdim=True)) @ v


@case(with_float(**MHA), MASK_DYNAMIC)
def softmax_in_place(q, k, v, m):
    s = q @ k.transpose(-1, -2) * 0.25 + m
    e = (s - s.max(-1, keepdim=True).values).exp_()
    return e.div_(e.sum(-1, keepdim=True)) @ v


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
