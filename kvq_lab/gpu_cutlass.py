"""The CUTLASS kernels on the GPU that is there: by Blackwell's instructions, or their portable arm elsewhere.

The registry prefers these kernels on Blackwell alone, so they are called directly here. On CPU tensors the same source runs in
host code, which is how this file is tested.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

import kvq_ops
from kvq_lab import gpu_oracle as oracle
from kvq_lab.gpu_cases import Machine, empty, held, moved, pages_of, random, short, unequal
from kvq_lab.gpu_rows import Row, attempt
from kvq_ops import reference
from kvq_ops.formats import Format, get_format

FORMATS = ("nvfp4", "fp8_per_token_head", "fp8_per_head", "fp8_e4m3", "mxfp4", "mxfp8")
ATTENDED = FORMATS[:4]
NAME = "CUTLASS kernels"


def check(machine: Machine) -> Iterator[Row]:
    """Codes equal to the torch codec's bit by bit; attention as in float64, where the GPU has the instructions."""
    from cutlass_kernels import build

    if (reason := build.why_not()) is not None:
        yield Row("codes", NAME, "not run", reason)
        return
    dim = machine.head_dims[-1]
    for name in FORMATS:
        for dtype in machine.dtypes[:2]:
            yield codes(machine, get_format(name), dtype, dim)
    if machine.device == "cuda":
        if torch.cuda.get_device_capability() < (9, 0):
            yield Row("attention", NAME, "not run", "made for compute capability 9.0 and later")
            return
        for name in ATTENDED:
            yield attention(machine, get_format(name), dim)


def codes(machine: Machine, row: Format, dtype: torch.dtype, dim: int) -> Row:
    """``quantize``, ``append_`` in two parts, ``paged_append_`` and ``dequantize``."""
    found = Row("codes", f"CUTLASS {row.name} {short(dtype)} D={dim}", format=row.name)
    return attempt(found, functools.partial(_code, machine, row, dtype, dim))


def _code(machine: Machine, row: Format, dtype: torch.dtype, dim: int, found: Row) -> Row:
    from cutlass_kernels import operators

    tokens = machine.tokens
    x = random((2, machine.kv_heads, tokens, dim), dtype)
    want = empty(row, x, tokens + 3)
    have = moved(want, machine.device)
    for first, last in ((0, tokens // 2), (tokens // 2, tokens)):
        at, part = torch.arange(first, last), x[:, :, first:last]
        with kvq_ops.use_implementation("torch"):
            kvq_ops.append_(want, at, part, row.name)
        operators.append_(have, at.to(machine.device), part.to(machine.device), row)
    wrong = unequal(row, have, want, "append_")
    with kvq_ops.use_implementation("torch"):
        whole = kvq_ops.quantize(x, row.name)
        decoded = kvq_ops.dequantize(whole, row.name, torch.float32)
    made = operators.quantize(x.to(machine.device), row)
    wrong = wrong or unequal(row, made, whole, "quantize")
    if not wrong and not torch.equal(operators.dequantize(made, row, torch.float32).cpu(), decoded):
        wrong = "dequantize: differs"
    pages, table = pages_of(row, empty(row, x, tokens), 16)
    pages[-1].zero_()
    copied = moved(pages, machine.device)
    at = torch.arange(tokens).expand(2, tokens).contiguous()
    with kvq_ops.use_implementation("torch"):
        kvq_ops.paged_append_(pages, table, at, x, row.name)
    operators.paged_append_(
        copied, table.to(machine.device), at.to(machine.device), x.to(machine.device), row
    )
    wrong = wrong or unequal(row, copied, pages, "paged_append_")
    return found.refuse("wrong", wrong) if wrong else found


def attention(machine: Machine, row: Format, dim: int) -> Row:
    """Decoding over rows of unequal length, in fp16."""
    found = Row("attention", f"CUTLASS {row.name} {short(torch.float16)} D={dim}", format=row.name)
    return attempt(found, functools.partial(_attend, machine, row, dim))


def _attend(machine: Machine, row: Format, dim: int, found: Row) -> Row:
    from cutlass_kernels import attention as launcher

    dtype, tokens = torch.float16, machine.tokens
    query = random((2, machine.heads, 1, dim), dtype, 7)
    with kvq_ops.use_implementation("torch"):
        stores = [
            kvq_ops.quantize(random((2, machine.kv_heads, tokens, dim), dtype, s), row.name) for s in (8, 9)
        ]
    length = torch.tensor([tokens, tokens - 5])
    for store in stores:
        store[-1].copy_(length)
    key, value = (reference.decode_store(store, row).float() for store in stores)
    expected = oracle.attention(
        query, key, value, length, oracle.Options(causal=True), u=oracle.unit(dtype), dtype=dtype
    )
    got = launcher.attention(
        query.to(machine.device),
        moved(stores[0], machine.device),
        moved(stores[1], machine.device),
        row,
        row,
        causal=True,
    )
    return held(found, expected, got)
