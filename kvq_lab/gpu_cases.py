"""Every kernel against the oracle: codes bit by bit, decoded numbers and attention within roundings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import kvq_ops
from kvq_lab import gpu_oracle as oracle
from kvq_lab.gpu_rows import Case, Row, attempt
from kvq_ops import reference
from kvq_ops.calibration import fit
from kvq_ops.formats import Format, KVFormat, get_format, names, parse_kv_format
from kvq_ops.handle import QuantizedKV

KERNELS = "triton"


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where kernels run, and how large what they get may be.

    Attributes:
        device: ``cuda``, or ``cpu`` for Triton's interpreter.
        tokens: of a cache in correctness checks.
        dtypes: of queries and keys; the interpreter has no right bfloat16.
    """

    device: str
    tokens: int = 300
    heads: int = 8
    kv_heads: int = 2
    head_dims: tuple[int, ...] = (64, 128)
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16, torch.float32)

    @staticmethod
    def interpreter() -> Machine:
        return Machine("cpu", tokens=19, heads=4, head_dims=(32,), dtypes=(torch.float32, torch.float16))


# ------------------------------------------------------------------------------------------------------------- stores


def calibration(row: Format, x: Tensor) -> dict[str, Tensor] | None:
    """What a format wants fitted beforehand."""
    if not row.calibrated:
        return None
    half = x.shape[-1] // 2
    return fit(x.float(), row, inv_freq=10000.0 ** (-torch.arange(half) / half))


def empty(row: Format, like: Tensor, tokens: int) -> list[Tensor]:
    """An empty store on the CPU for caches like ``like [B, H, N, D]``, calibrated where it has to be."""
    batch, heads, _, dim = like.shape
    shape = (batch, heads, tokens, dim)
    return list(QuantizedKV.empty(shape, row, dtype=like.dtype, static=calibration(row, like)).store)


def filled(row: Format, x: Tensor) -> list[Tensor]:
    """A store on the CPU that holds ``x``, by the torch codec."""
    store = empty(row, x, x.shape[2])
    with kvq_ops.use_implementation("torch"):
        kvq_ops.append_(store, torch.arange(x.shape[2]), x, row.name)
    return store


def moved(store: Sequence[Tensor], device: str) -> list[Tensor]:
    return [plane.clone() if device == "cpu" else plane.to(device) for plane in store]


def pages_of(row: Format, store: Sequence[Tensor], size: int) -> tuple[list[Tensor], Tensor]:
    """A store cut into pages of ``size`` tokens, in no order, and the table that says which is where."""
    batch, _, tokens, _ = row.logical_shape(store)
    blocks = -(-tokens // size)
    order = torch.randperm(batch * blocks, generator=torch.Generator().manual_seed(3))
    table = order.view(batch, blocks)
    pages = []
    for plane, tensor in zip(row.planes, store, strict=True):
        if plane.name == "length":
            pages.append(torch.full((batch * blocks,), size, dtype=torch.int64))
        elif not plane.per_token:
            pages.append(tensor.clone())
        else:
            width = (0, 0) * (tensor.dim() - 3) + (0, blocks * size - tokens)
            cut = torch.nn.functional.pad(tensor, width).unflatten(2, (blocks, size)).transpose(1, 2)
            page = torch.empty_like(cut.flatten(0, 1).contiguous())
            page[order] = cut.flatten(0, 1)
            pages.append(page)
    return pages, table.int()


def paged(row: Format) -> bool:
    """Whether a format fits pages."""
    return not row.windowed and row.token_group == 1


def random(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -------------------------------------------------------------------------------------------------------------- codes


def codes(machine: Machine, row: Format, dtype: torch.dtype, dim: int) -> Row:
    """``quantize``, ``append_`` in three parts and ``paged_append_``: each plane equal to the torch codec's on the CPU."""

    def check(found: Row) -> Row:
        tokens = machine.tokens
        x = random((2, machine.kv_heads, tokens, dim), dtype)
        cuts = [0, tokens // 2, tokens - 2, tokens]
        want = empty(row, x, tokens + 3)
        have = moved(want, machine.device)
        for first, last in zip(cuts, cuts[1:], strict=False):
            at, part = torch.arange(first, last), x[:, :, first:last]
            with kvq_ops.use_implementation("torch"):
                kvq_ops.append_(want, at, part, row.name)
            with kvq_ops.use_implementation(KERNELS):
                kvq_ops.append_(have, at.to(machine.device), part.to(machine.device), row.name)
        wrong = unequal(row, have, want, "append_")
        if not row.calibrated:
            with kvq_ops.use_implementation("torch"):
                want = kvq_ops.quantize(x, row.name)
            with kvq_ops.use_implementation(KERNELS):
                have = kvq_ops.quantize(x.to(machine.device), row.name)
            wrong = wrong or unequal(row, have, want, "quantize")
        if paged(row):
            want, table = pages_of(row, empty(row, x, tokens), 16)
            want[-1].zero_()
            have = moved(want, machine.device)
            at = torch.arange(tokens).expand(2, tokens).contiguous()
            with kvq_ops.use_implementation("torch"):
                kvq_ops.paged_append_(want, table, at, x, row.name)
            with kvq_ops.use_implementation(KERNELS):
                kvq_ops.paged_append_(
                    have, table.to(machine.device), at.to(machine.device), x.to(machine.device), row.name
                )
            wrong = wrong or unequal(row, have, want, "paged_append_")
        return found.refuse("wrong", wrong) if wrong else found

    return attempt(Row("codes", f"{row.name} {short(dtype)} D={dim}", format=row.name), check)


def unequal(row: Format, have: Sequence[Tensor], want: Sequence[Tensor], what: str) -> str:
    """Which planes are not the same bit by bit, and in how many items."""
    said = []
    for plane, a, b in zip(row.planes, have, want, strict=True):
        a = a.cpu()
        same = a == b
        if b.is_floating_point():
            same = same | (a.isnan() & b.isnan())
        if a.dtype != b.dtype or not bool(same.all()):
            said.append(f"{plane.name}: {int((~same).sum())} of {same.numel()} differ")
    return f"{what}: {'; '.join(said)}" if said else ""


def short(dtype: torch.dtype) -> str:
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def dequantize(machine: Machine, row: Format, dtype: torch.dtype, dim: int) -> Row:
    """Decoded numbers, from codes that the torch codec made."""

    def check(found: Row) -> Row:
        kept = torch.float32 if not row.lossless else dtype
        store = filled(row, random((2, machine.kv_heads, machine.tokens, dim), kept))
        expected = oracle.decoded(reference.decode_store(store, row).float(), dtype, row)
        with kvq_ops.use_implementation(KERNELS):
            got = kvq_ops.dequantize(moved(store, machine.device), row.name, dtype)
        return held(found, expected, got)

    return attempt(Row("dequantize", f"{row.name} to {short(dtype)} D={dim}", format=row.name), check)


def held(row: Row, expected: oracle.Expected, got: Tensor) -> Row:
    wrong, row.error, row.allowed = expected.compare(got)
    return row.refuse("wrong", wrong) if wrong else row


# ---------------------------------------------------------------------------------------------------------- attention


def variants(machine: Machine, tokens: int, queries: int) -> dict[str, oracle.Options]:
    """What attention may be asked to do."""
    made = torch.Generator().manual_seed(5)
    mask = torch.rand(2, 1, queries, tokens, generator=made) < 0.7
    bias = torch.randn(1, machine.heads, queries, tokens, generator=made)
    sinks = torch.randn(machine.heads, generator=made)
    return {
        "plain": oracle.Options(),
        "causal": oracle.Options(causal=True),
        "mask": oracle.Options(mask=mask),
        "bias+softcap": oracle.Options(mask=bias, softcap=20.0),
        "window+sinks": oracle.Options(causal=True, window=tokens // 2 + 1, sinks=sinks),
    }


def attention(
    machine: Machine,
    pair: KVFormat,
    variant: str,
    *,
    queries: int,
    dtype: torch.dtype,
    dim: int,
    size: int = 0,
) -> Row:
    """Attention over stores of unequal length, or over pages of ``size`` tokens."""

    def check(found: Row) -> Row:
        tokens = machine.tokens
        shape = (2, machine.kv_heads, tokens, dim)
        options = variants(machine, -(-tokens // size) * size if size else tokens, queries)[variant]
        query = random((2, machine.heads, queries, dim), dtype, 7)
        stores = [filled(row, random(shape, dtype, seed)) for row, seed in ((pair.key, 8), (pair.value, 9))]
        # A window of exact tokens has no rows of unequal length: how much is coded goes with the length.
        ragged = not (pair.key.windowed or pair.value.windowed)
        length = torch.tensor([tokens, max(queries, tokens - 5) if ragged else tokens])
        exact = [
            reference.decode_store(store, row).float()
            for row, store in zip((pair.key, pair.value), stores, strict=True)
        ]
        if size:
            exact = [torch.nn.functional.pad(x, (0, 0, 0, -(-tokens // size) * size - tokens)) for x in exact]
        u = oracle.unit(dtype, bfloat16_stored=pair.lossless)
        if not pair.lossless and (pair.key.lossless or pair.value.lossless):
            u = max(u, oracle.unit(dtype, bfloat16_stored=True))
        key, value = exact
        expected = oracle.attention(query, key, value, length, options, u=u, dtype=dtype)
        return held(found, expected, _by_kernels(machine, pair, query, stores, length, options, size))

    where = f"pages of {size}" if size else "contiguous"
    name = f"{pair} {variant} N={queries} {short(dtype)} D={dim} {where}"
    return attempt(Row("attention", name, format=str(pair)), check)


def _by_kernels(
    machine: Machine,
    pair: KVFormat,
    query: Tensor,
    stores: Sequence[list[Tensor]],
    length: Tensor,
    options: oracle.Options,
    size: int,
) -> Tensor:
    extra: dict[str, Any] = {
        k: v.to(machine.device) if isinstance(v, Tensor) else v for k, v in options.given().items()
    }
    query = query.to(machine.device)
    with kvq_ops.use_implementation(KERNELS):
        if size:
            cut = [
                pages_of(row, store, size) for row, store in zip((pair.key, pair.value), stores, strict=True)
            ]
            keys, values = (moved(pool, machine.device) for pool, _ in cut)
            table = cut[0][1].to(machine.device)
            return kvq_ops.paged_attention(
                query,
                keys,
                values,
                table,
                length.to(machine.device),
                pair.key.name,
                pair.value.name,
                **extra,
            )
        for store in stores:
            store[-1].copy_(length)
        keys, values = (moved(store, machine.device) for store in stores)
        return kvq_ops.attention(query, keys, values, pair.key.name, pair.value.name, **extra)


# --------------------------------------------------------------------------------------------------------------- list

HEADLINE = ("int8_per_token_head", "fp8_per_token_head", "int4_group32", "nvfp4", "kivi4")
"""The formats that are timed; they are also checked before all others."""

MORE = (
    *(
        "none",
        "turbo4",
        "nuq4",
        "kivi2",
        "mxfp8",
        "mxfp4",
        "int8_per_channel",
        "turbo3",
        "fp8_e5m2",
        "int3_group32",
    ),
    *(
        "int2_group32",
        "fp8_per_head",
        "fp8_e4m3",
        "int4_per_token_head",
        "nuq3",
        "nuq2",
        "turbo2",
        "int4_group64",
    ),
    *("int4_group32+outlier2%", "int4_group32+hadamard", "kivi4+recent16+sink4"),
)


def correctness(machine: Machine) -> list[Case]:
    """Cases in groups by format, the formats that are timed first."""
    cases = []
    # Compiled one after the other, a kernel takes a second or so.
    per_row = 2.5 if machine.device == "cuda" else 0.7
    for at, name in enumerate((*HEADLINE, *MORE)):
        pair = parse_kv_format(name)
        worth = 100.0 - at
        rows = list(dict.fromkeys((pair.key, pair.value)))
        cases.append(
            Case("codes", name, functools.partial(_codes, machine, rows), per_row * 6 * len(rows), worth + 1)
        )
        cases.append(
            Case("attention", name, functools.partial(_attention, machine, pair), per_row * 8, worth)
        )
    return cases


def _codes(machine: Machine, rows: Sequence[Format]) -> Iterator[Row]:
    for row in rows:
        for at, dtype in enumerate(machine.dtypes):
            dim = machine.head_dims[at % len(machine.head_dims)]
            yield codes(machine, row, dtype, dim)
            yield dequantize(machine, row, dtype, dim)


def _attention(machine: Machine, pair: KVFormat) -> Iterator[Row]:
    dims, dtypes = machine.head_dims, machine.dtypes
    one: Callable[..., Row] = functools.partial(attention, machine, pair)
    for at, variant in enumerate(variants(machine, 4, 1)):
        queries = (1, 5, 1, 3, 1)[at % 5]
        yield one(variant, queries=queries, dtype=dtypes[at % len(dtypes)], dim=dims[at % len(dims)])
    many = 90 if machine.device == "cuda" else 17
    yield one("causal", queries=many, dtype=dtypes[0], dim=dims[-1])
    if paged(pair.key) and paged(pair.value):
        for size in (16, 128) if machine.device == "cuda" else (8,):
            yield one("causal", queries=1, dtype=dtypes[0], dim=dims[-1], size=size)


def untested() -> list[str]:
    """Listed formats that no case names; a test holds this to be empty."""
    named = {
        row
        for name in (*HEADLINE, *MORE)
        for pair in [parse_kv_format(name)]
        for row in (pair.key, pair.value)
    }
    return [name for name in names() if get_format(name) not in named]
