"""Calls of the launchers that write stores, for offline compilation."""

from __future__ import annotations

import torch

from kvq_ops.formats import get_format
from kvq_ops.triton_kernels.append import append_, paged_append_
from kvq_ops.triton_kernels.encode import quantize
from tests.cpu.stores import empty


def append(name: str, tokens: int, dim: int = 128, dtype: str = "bfloat16", ragged: bool = False) -> None:
    """``tokens`` for each of 8 heads of 4 rows."""
    kind = getattr(torch, dtype)
    store = empty(name, 4, 8, tokens + 512, dim, kind)
    x = torch.zeros(4, tokens, 8, dim, dtype=kind).transpose(1, 2)
    position = torch.arange(tokens)
    append_(store, position.expand(4, tokens).contiguous() if ragged else position, x, get_format(name))


def paged(name: str, tokens: int, dim: int = 128, dtype: str = "bfloat16") -> None:
    kind = getattr(torch, dtype)
    pages = empty(name, 64, 8, 16, dim, kind)
    x = torch.zeros(4, 8, tokens, dim, dtype=kind)
    table = torch.arange(64, dtype=torch.int32).view(4, 16)
    paged_append_(pages, table, torch.arange(tokens).expand(4, tokens).contiguous(), x, get_format(name))


def full(name: str, tokens: int, dim: int = 128, dtype: str = "bfloat16") -> None:
    quantize(torch.zeros(4, 8, tokens, dim, dtype=getattr(torch, dtype)), get_format(name))
