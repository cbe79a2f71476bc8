"""Launches of attention and dequantize on tensors of real sizes, for offline compilation."""

from __future__ import annotations

from typing import Any

import torch

from kvq_ops.formats import parse_kv_format
from kvq_ops.triton_kernels.attention import attention, paged_attention
from kvq_ops.triton_kernels.dequantize import dequantize as dequantize_


def attend(
    formats: str,
    dtype: str = "float16",
    queries: int = 1,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    tokens: int = 4096,
    page: int = 0,
    mask: str = "",
    **options: Any,
) -> None:
    pair = parse_kv_format(formats)
    kind = getattr(torch, dtype)
    query = torch.empty(2, heads, queries, dim, dtype=kind)
    options.setdefault("causal", True)
    if mask:
        options["mask"] = torch.zeros(2, 1, queries, tokens, dtype=getattr(torch, mask))
    if options.pop("sinks", False):
        options["sinks"] = torch.zeros(heads)
    if page:
        pools = [fmt.empty_store(64, kv_heads, page, dim, dtype=kind) for fmt in (pair.key, pair.value)]
        table = torch.zeros(2, tokens // page, dtype=torch.int32)
        paged_attention(
            query, *pools, table, torch.zeros(2, dtype=torch.int32), pair.key, pair.value, **options
        )
    else:
        stores = [fmt.empty_store(2, kv_heads, tokens, dim, dtype=kind) for fmt in (pair.key, pair.value)]
        attention(query, *stores, pair.key, pair.value, **options)


def dequantize(format: str, dtype: str = "float16", dim: int = 128) -> None:
    fmt = parse_kv_format(format).key
    dequantize_(fmt.empty_store(2, 8, 256, dim), fmt, getattr(torch, dtype))
