"""Decode attention: every format by every implementation that serves it, against what PyTorch users have otherwise."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kvq_ops
from kvq_lab.bench_bandwidth import cache_bytes
from kvq_lab.bench_rows import Row
from kvq_lab.bench_timing import Contender, Expected
from kvq_ops import reference, registry
from kvq_ops.calibration import fit
from kvq_ops.formats import Format, KVFormat
from kvq_ops.handle import QuantizedKV, storage_bytes
from kvq_ops.registry import Implementation, Request

BASE = "SDPA bfloat16"
# Tokens that static scales and codebooks are fitted to; the data are random, so more would change nothing.
FITTED = 256
MOST_COPIES = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads and channels of the attention that is measured."""

    batch: int = 1
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def row(self, part: str, name: str, **further: Any) -> Row:
        return Row(part, name, **dataclasses.asdict(self), **further)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Random query ``[B, Hq, N, D]``, keys and values ``[B, Hkv, T, D]``, all fp32."""

    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def random(shape: Shape, tokens: int, queries: int = 1, seed: int = 0) -> Inputs:
        made = torch.Generator().manual_seed(seed)
        kv = (shape.batch, shape.kv_heads, tokens, shape.head_dim)
        query = torch.randn(shape.batch, shape.query_heads, queries, shape.head_dim, generator=made)
        return Inputs(query, torch.randn(kv, generator=made), torch.randn(kv, generator=made))


# -- stores -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Stored:
    """Keys and values in their formats, as the operators take them."""

    pair: KVFormat
    key: list[Tensor]
    value: list[Tensor]

    @property
    def nbytes(self) -> int:
        return storage_bytes([*self.key, *self.value])

    def clone(self) -> Stored:
        return Stored(self.pair, [t.clone() for t in self.key], [t.clone() for t in self.value])

    def attention(self, query: Tensor, **options: Any) -> Tensor:
        """By the operator, as a model calls it."""
        return kvq_ops.attention(
            query, self.key, self.value, self.pair.key.name, self.pair.value.name, **options
        )

    def exact(self, query: Tensor, **options: Any) -> Tensor:
        """In float64, by the definition."""
        return reference.attention(
            query, self.key, self.value, self.pair.key, self.pair.value, **options, compute=torch.float64
        )


def store(
    pair: KVFormat, inputs: Inputs, *, length: int | None = None, dtype: torch.dtype = torch.float32
) -> Stored:
    """Keys and values in ``pair``, the first ``length`` tokens filled; what a format wants calibrated is fitted to them."""
    return Stored(
        pair,
        _store_side(pair.key, inputs.key.to(dtype), length),
        _store_side(pair.value, inputs.value.to(dtype), length),
    )


def _store_side(row: Format, x: Tensor, length: int | None) -> list[Tensor]:
    static = None
    if row.calibrated:
        half = x.shape[-1] // 2
        inv_freq = 10000.0 ** (-torch.arange(half) / half)
        static = fit(x[:, :, :FITTED], row, inv_freq=inv_freq)
    return list(QuantizedKV.from_dense(x, row, length=length, static=static).store)


def copies(nbytes: int, cold: int | None = None) -> int:
    """How many copies of so many bytes no cache can hold (``cold`` bytes are too many for one), at most ``MOST_COPIES``."""
    cold = 2 * cache_bytes() if cold is None else cold
    return max(1, min(MOST_COPIES, math.ceil(cold / max(nbytes, 1))))


# -- implementations ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Serving:
    """An implementation that serves a request, and whether it is the one that users get."""

    implementation: Implementation
    chosen: bool

    def attention(self, stored: Stored, query: Tensor, **options: Any) -> Tensor:
        if self.chosen:
            return stored.attention(query, **options)
        # Not by use_implementation: to force one clears what the registry remembers, for the next one's call too.
        found: Tensor = self.implementation.run(
            query, stored.key, stored.value, stored.pair.key, stored.pair.value, **_all_options(options)
        )
        return found


def _all_options(options: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "mask": None,
        "causal": False,
        "scale": None,
        "window": 0,
        "softcap": 0.0,
        "sinks": None,
        "use_length": True,
    }
    return plain | options


def serving(
    op: str, formats: tuple[Format, ...], head_dim: int, dtype: torch.dtype, notes: set[str] | None = None
) -> list[Serving]:
    """Every implementation of an operator that serves these formats on this CPU, the preferred first.

    Args:
        notes: takes up why one does not, other than being made for another device.
    """
    request = Request(op, "cpu", formats, (head_dim,) * len(formats), dtype)
    found: list[Serving] = []
    for row in registry.implementations(op):
        reason = row.refuses(request)
        if reason is None:
            found.append(Serving(row, not found))
        elif notes is not None and not reason.startswith("tensors on"):
            notes.add(f"{row.name} does not serve {', '.join(dict.fromkeys(map(str, formats)))}: {reason}")
    return found


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- contenders ---------------------------------------------------------------------------------------------------------


def sdpa_limit(query: Tensor, key: Tensor, value: Tensor) -> Tensor | float:
    """What SDPA in 16 bits may be off by more than its output's rounding.

    Its weights, which sum to 1, are rounded before they meet the values: eps / 2 of each, so at most eps / 2 of the largest
    value, and as much again where scores are rounded, times the largest score.
    """
    if query.dtype is torch.float32:
        return 0.0
    eps = torch.finfo(query.dtype).eps
    group = query.shape[1] // key.shape[1]
    scores = query.float() @ key.float().repeat_interleave(group, 1).transpose(-1, -2)
    largest = scores.abs().amax((-1, -2), keepdim=True) * query.shape[-1] ** -0.5
    top = value.float().abs().amax(2, keepdim=True).repeat_interleave(group, 1)
    return (eps * (1 + largest) * top).double()


def sdpa(shape: Shape, inputs: Inputs, dtype: torch.dtype, part: str = "decode") -> Contender:
    """PyTorch's own attention over a dense cache, grouped heads and all."""
    query, key, value = (x.to(dtype) for x in (inputs.query, inputs.key, inputs.value))
    exact = kvq_ops.parse_kv_format("none")
    stored = store(exact, inputs, dtype=dtype)
    row = shape.row(
        part,
        f"SDPA {short(dtype)}",
        implementation="torch SDPA",
        dtype=short(dtype),
        queries=query.shape[2],
        tokens=key.shape[2],
        allocated=key.shape[2],
        checked="float64",
        bytes=storage_bytes([key, value]),
    )

    def calls() -> Iterator[Callable[[], Tensor]]:
        for _ in range(copies(storage_bytes([key, value]))):
            yield functools.partial(
                F.scaled_dot_product_attention,
                query,
                key.clone(),
                value.clone(),
                enable_gqa=shape.query_heads != shape.kv_heads,
            )

    expected = Expected.of(stored.exact(query), dtype, sdpa_limit(query, key, value))
    return Contender(row, list(calls()), expected)


def decode_contenders(
    shape: Shape,
    inputs: Inputs,
    pair: KVFormat,
    dtype: torch.dtype,
    notes: set[str],
    names: Sequence[str] = (),
) -> list[Contender]:
    """One format by every implementation that serves it (and is in ``names``, if any are), and dequantized before every step."""
    query = inputs.query.to(dtype)
    # What a format keeps exact has the dtype of the model.
    stored = store(pair, inputs, dtype=dtype)
    clones = [stored] + [stored.clone() for _ in range(copies(stored.nbytes) - 1)]
    expected = Expected.of(stored.exact(query), dtype)

    def row(name: str, implementation: str) -> Row:
        return shape.row(
            "decode",
            name,
            format=str(pair),
            implementation=implementation,
            dtype=short(dtype),
            queries=1,
            tokens=inputs.key.shape[2],
            allocated=inputs.key.shape[2],
            checked="float64",
            bytes=stored.nbytes,
        )

    found = []
    for one in serving("attention", (pair.key, pair.value), shape.head_dim, dtype, notes):
        name = one.implementation.name
        if names and name not in names:
            continue
        calls = [functools.partial(one.attention, clone, query) for clone in clones]
        found.append(Contender(row(f"{pair} {name}", name), calls, expected))
    if not pair.lossless:
        found.append(_dequantized(shape, clones, query, row(f"{pair} dequantize+SDPA", "dequantize+SDPA")))
    return found


def _dequantized(shape: Shape, clones: Sequence[Stored], query: Tensor, row: Row) -> Contender:
    def dense(stored: Stored) -> tuple[Tensor, Tensor]:
        return (
            kvq_ops.dequantize(stored.key, stored.pair.key.name, query.dtype),
            kvq_ops.dequantize(stored.value, stored.pair.value.name, query.dtype),
        )

    def run(stored: Stored) -> Tensor:
        key, value = dense(stored)
        return F.scaled_dot_product_attention(
            query, key, value, enable_gqa=shape.query_heads != shape.kv_heads
        )

    # What it reads is rounded to the dtype of the query first, which is its definition and not its error.
    key, value = dense(clones[0])
    exact = store(kvq_ops.parse_kv_format("none"), Inputs(query, key, value), dtype=query.dtype)
    expected = Expected.of(exact.exact(query), query.dtype, sdpa_limit(query, key, value))
    return Contender(row, [functools.partial(run, stored) for stored in clones], expected)


# -- torchao ------------------------------------------------------------------------------------------------------------


def _uint8(x: Tensor) -> tuple[Tensor, float, int]:
    """Codes, scale and zero point of one asymmetric 8-bit grid over a tensor."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    scale = max((high - low) / 255, 1e-12)
    zero = round(-low / scale)
    return (torch.round(x / scale) + zero).clamp(0, 255).to(torch.uint8), scale, zero


def torchao_int8(shape: Shape, inputs: Inputs) -> Contender:
    """torchao's attention over 8-bit queries, keys and values.

    One scale for a tensor, weights and output rounded to 8 bits as well. Its kernel has no grouped heads, so keys and values
    are repeated for each query head. Where it is missing, the row says why.
    """
    row = shape.row(
        "decode",
        "torchao int8 SDPA",
        format="uint8, one scale for each tensor",
        implementation="torchao",
        dtype="uint8",
        queries=1,
        tokens=inputs.key.shape[2],
        allocated=inputs.key.shape[2],
    )
    try:
        importlib.import_module("torchao.ops")
    except Exception as error:  # it is another package's import, which fails in ways of its own
        row.refuse(
            "not run: torchao is not installed: pip install 'kvq-ops[peers]'"
            if isinstance(error, ModuleNotFoundError) and error.name == "torchao"
            else f"not run: torchao cannot be imported: {type(error).__name__}: {error}"
        )
        return Contender(row, [])
    group = shape.query_heads // shape.kv_heads
    wide = (inputs.query, *(x.repeat_interleave(group, 1) for x in (inputs.key, inputs.value)))
    codes, scales, zeros = zip(*(_uint8(x) for x in wide), strict=True)
    query, key, value = (
        (c.double() - zero) * scale for c, scale, zero in zip(codes, scales, zeros, strict=True)
    )
    weights = torch.softmax(query @ key.transpose(-1, -2) * shape.head_dim**-0.5, -1)
    exact = weights @ value
    _, out_scale, out_zero = _uint8(exact)
    weight_scale = float(weights.max()) / 255
    row.bytes, row.checked = storage_bytes(codes[1:]), "float64"
    # Each weight and the output are rounded to the nearest of their grid; twice that, for a kernel that rounds elsewhere.
    limit = weight_scale * value.abs().sum(2, keepdim=True) + out_scale
    expected = Expected(exact, limit + 1e-5, torch.float64)

    def call(k: Tensor, v: Tensor) -> Tensor:
        numbers = [n for pair in zip(scales, zeros, strict=True) for n in pair]
        found: Tensor = torch.ops.torchao.qscaled_dot_product(
            codes[0], k, v, None, 0.0, False, None, *numbers, weight_scale, 0, out_scale, out_zero
        )
        return found

    calls = [functools.partial(call, codes[1].clone(), codes[2].clone()) for _ in range(copies(row.bytes))]
    contender = Contender(row, calls, expected, lambda got: (got.double() - out_zero) * out_scale)
    try:
        calls[0]()
    except NotImplementedError:  # wheels without the kernel declare it all the same
        row.refuse(
            "not run: this build of torchao has no such kernel for CPUs: build it from its sources with USE_CPU_KERNELS=1"
        )
        return Contender(row, [])
    except Exception as error:
        row.refuse(f"not run: {type(error).__name__}: {' '.join(str(error).split())[:160]}")
        return Contender(row, [])
    return contender
