"""A dense cache beside a handle: the same operation runs on both, and what is written passes through quantization first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import kvq_ops
from kvq_ops import QuantizedKV
from kvq_ops.axes import dense_shape
from kvq_ops.codecs import decode, encode

# Formats whose codes of a token depend on that token alone; static scales are set by the first contents.
FORMATS = (
    "none",
    "int8_per_token_head",
    "fp8_per_token_head",
    "int4_group32",
    "fp8_e4m3",
    "nvfp4",
    "turbo4",
    "int4_per_tensor",
)
AXES = ("bhtd", "bthd", "bhdt", "thbd", "htd", "btd", "td", "b1htd")
SIZES = {"b": 3, "h": 2, "t": 8, "d": 4}
ALL = slice(None)


def at(axes: str, **indices: Any) -> tuple[Any, ...]:
    """An index tuple that gives each named axis its index."""
    return tuple(indices.get(letter, ALL) for letter in axes)


def shape_of(axes: str, **sizes: int) -> list[int]:
    return [{**SIZES, "1": 1, **sizes}[letter] for letter in axes]


def quantized(x: Tensor, axes: str, store: list[Tensor], name: str) -> Tensor:
    """``x``, whose channels lie on the axis ``d`` of ``axes``, after a trip through the codes of ``name``."""
    fmt = kvq_ops.get_format(name)
    last = x.movedim(axes.index("d"), -1)
    flat = last.reshape(1, 1, -1, last.shape[-1])
    token, static = encode(flat, fmt, store)
    planes = [t if t is not None else s for t, s in zip(token, static, strict=True)]
    planes[-1] = torch.full((1,), flat.shape[2])
    back = decode([p for p in planes if p is not None], fmt).to(x.dtype)
    return back.reshape(last.shape).movedim(-1, axes.index("d"))


class Pair:
    """A handle and its dense shadow.

    Attributes:
        handle, dense: equal as long as every operation was right.
    """

    def __init__(self, name: str, axes: str = "bhtd", dtype: torch.dtype = torch.float32) -> None:
        self.name, self.axes, self.dtype = name, axes, dtype
        sizes = {k: v for k, v in SIZES.items() if k in axes}
        canonical = tuple(sizes.get(letter, 1) for letter in "bhtd")
        first = torch.randn(dense_shape(canonical, axes)).to(dtype)
        self.handle = QuantizedKV.from_dense(first, name, axes=axes)
        self.dense = self.handle.dequantize().clone()
        self.root = self.handle

    def values(self, shape: list[int], axes: str) -> tuple[Tensor, Tensor]:
        """New values, and what a cache should hold after they are written."""
        x = torch.randn(shape).to(self.dtype)
        return x, quantized(x, axes, self.root.store, self.name)

    def write(self, op: Callable[[Any, Tensor], Any], shape: list[int], axes: str) -> None:
        raw, stored = self.values(shape, axes)
        op(self.handle, raw)
        op(self.dense, stored)

    def check(self) -> None:
        assert self.handle.shape == self.dense.shape
        torch.testing.assert_close(self.handle.dequantize(), self.dense, rtol=0, atol=0, equal_nan=True)


def planes_of(handle: QuantizedKV) -> list[Tensor]:
    return [plane.clone() for plane in handle.store]


def same_planes(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True))
