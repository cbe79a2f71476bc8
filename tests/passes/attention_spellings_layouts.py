"""Spellings of the contractions, and layouts of keys and values."""

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
    TQ,
    B,
    D,
    G,
    _attend,
    bool_mask,
    case,
    float_mask,
    qkv,
    repeat_kv,
    with_bool,
    with_float,
)

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
