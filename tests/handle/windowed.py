"""Caches whose newest and first tokens are exact, for tests: names, contents, and what is right."""

from __future__ import annotations

import torch
from torch import Tensor

import kvq_ops
from kvq_ops import QuantizedKV
from kvq_ops.axes import dense_shape, from_canonical, to_canonical
from tests.ops.windows import check

NAMES = (
    "test_keys_g8r8",
    "test_keys_g8r5s3",
    "int8_per_token_head+recent8+sink4",
    "int4_group32+outlier5%+recent2",
    "nvfp4+sink2",
)
AXES = ("bhtd", "bthd", "bhdt", "htd", "thbd")
B, H, T, D = 3, 2, 29, 16


def text(axes: str = "bhtd", tokens: int = T, seed: int = 0) -> Tensor:
    """Random tokens; those of one seed start alike whatever their number."""
    batch = B if "b" in axes else 1
    x = torch.randn((T, batch, H, D), generator=torch.Generator().manual_seed(seed))[:tokens]
    return from_canonical(x.permute(1, 2, 0, 3).contiguous(), axes)


def empty(name: str, axes: str = "bhtd", tokens: int = T) -> QuantizedKV:
    batch = B if "b" in axes else 1
    handle = QuantizedKV.empty(dense_shape((batch, H, tokens, D), axes), name, axes=axes)
    for i in handle.format.static_planes:
        handle.store[i].fill_(0.003)
    return handle


def filled(name: str, tokens: int = T, axes: str = "bhtd", capacity: int = T, seed: int = 0) -> QuantizedKV:
    handle = empty(name, axes, capacity)
    x = to_canonical(text(axes, tokens, seed), axes)
    kvq_ops.append_(handle.store, torch.arange(tokens), x, name)
    return handle


def exact(handle: QuantizedKV, lengths: list[int], context: str = "", seed: int = 0) -> None:
    """What was written is held as the oracle says; scales that span tokens are compared by another test."""
    if not handle.format.static_planes:
        check(handle.store, handle.format.name, text(seed=seed), lengths, context)
