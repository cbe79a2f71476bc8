"""What the corrected interpreter computes is what torch computes, and what stock Triton gets wrong is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.triton import interpreter

BLOCK = 1024
TYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.int8: tl.int8,
    torch.int32: tl.int32,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def cast_kernel(X, Y, count, SOURCE: tl.constexpr, TARGET: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < count, other=0).to(SOURCE, bitcast=True)
    y = x.to(TARGET)
    if TARGET.primitive_bitwidth == 8:
        y = y.to(tl.uint8, bitcast=True)
    tl.store(Y + at, y, mask=at < count)


@triton.jit
def arithmetic_kernel(X, Y, OUT, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x, y = tl.load(X + at), tl.load(Y + at)
    if OP == "add":
        out = x + y
    elif OP == "mul":
        out = x * y
    elif OP == "sub_of_products":
        out = x * y - y * y
    elif OP == "fma":
        out = tl.fma(x, y, x)
    elif OP == "max":
        out = tl.maximum(x, y)
    elif OP == "less":
        out = tl.where(x < y, x, y)
    elif OP == "neg":
        out = -x
    tl.store(OUT + at, out)


@triton.jit
def reduce_kernel(X, OUT, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OP: tl.constexpr):
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    x = tl.load(X + row[:, None] * COLUMNS + column[None, :])
    tl.store(OUT + row, tl.max(x, 1) if OP == "max" else tl.sum(x, 1))


@triton.jit
def dot_kernel(A, B, OUT, N: tl.constexpr, ACC: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(OUT + at, tl.dot(tl.load(A + at), tl.load(B + at), out_dtype=ACC))


@triton.jit
def reach_kernel(X, Y, first, count, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    open_ = at < count
    if WHAT == "load":
        tl.store(Y + at, tl.load(X + first + at, mask=open_, other=0))
    elif WHAT == "store":
        tl.store(X + first + at, tl.load(Y + at), mask=open_)
    else:
        tl.atomic_max(X + first + at, tl.load(Y + at), mask=open_)


def cast(x: Tensor, target: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=target)
    byte = _BITS.get(target.itemsize) if target.itemsize == 1 else target
    raw = x.view(_BITS[x.element_size()])
    grid = (triton.cdiv(x.numel(), BLOCK),)
    cast_kernel[grid](raw, out.view(byte), x.numel(), TYPES[x.dtype], TYPES[target], BLOCK)
    return out


def numbers(dtype: torch.dtype) -> Tensor:
    """All of a dtype with 16 bits or fewer; of fp32 random bits, every number of the others and its neighbours."""
    bits = {1: torch.uint8, 2: torch.int16}.get(dtype.itemsize)
    if bits is not None:
        span = 1 << 8 * dtype.itemsize
        return torch.arange(span).to(bits).view(dtype)
    some = torch.randint(-(2**31), 2**31, (20000,)).int().view(torch.float32)
    near = torch.cat([numbers(d).float() for d in (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)])
    middles = (near[1:] + near[:-1]) / 2
    steps = [middles.nextafter(torch.tensor(far)) for far in (-torch.inf, torch.inf)]
    return torch.cat([some, near, middles, *steps])


def same(got: Tensor, want: Tensor) -> None:
    nan = got.float().isnan()
    assert torch.equal(nan, want.float().isnan())
    kind = _BITS[got.element_size()]
    bad = (got.view(kind) != want.view(kind)) & ~nan
    assert not bad.any(), f"{int(bad.sum())} of {bad.numel()} differ"


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2])
def test_conversions(source: torch.dtype, target: torch.dtype) -> None:
    if source is not target:
        x = numbers(source)
        same(cast(x, target), x.to(target))


@pytest.mark.parametrize("target", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("source", FLOATS)
def test_casts_to_float8_saturate(source: torch.dtype, target: torch.dtype) -> None:
    x = numbers(source)
    largest = torch.finfo(target).max
    want = torch.where(x.isnan(), x, x.clamp(-largest, largest)).to(target)
    same(cast(x, target), want)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_bf16_from_integers_and_back(dtype: torch.dtype) -> None:
    x = torch.randint(
        -(2**31) if dtype is torch.int32 else -128, 2**31 if dtype is torch.int32 else 128, (999,)
    ).to(dtype)
    same(cast(x, torch.bfloat16), x.to(torch.bfloat16))
    whole = torch.randint(-120, 120, (999,)).to(torch.bfloat16)
    assert torch.equal(cast(whole, dtype), whole.to(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["add", "mul", "sub_of_products", "max", "less", "neg"])
def test_arithmetic_rounds_each_operation(op: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(2, BLOCK).mul(3).to(dtype)
    out = torch.empty_like(x)
    arithmetic_kernel[(1,)](x, y, out, op, BLOCK)
    want = {
        "add": lambda: x + y,
        "mul": lambda: x * y,
        "sub_of_products": lambda: x * y - y * y,
        "max": lambda: torch.maximum(x, y),
        "less": lambda: torch.where(x < y, x, y),
        "neg": lambda: -x,
    }[op]()
    same(out, want)


@pytest.mark.parametrize("dtype", FLOATS)
def test_fma_rounds_once(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, BLOCK).to(dtype)
    out = torch.empty_like(x)
    arithmetic_kernel[(1,)](x, y, out, "fma", BLOCK)
    wide = x.numpy().astype(np.longdouble) if dtype is torch.float32 else x.double().numpy()
    exact = (
        wide * y.double().numpy() + wide
    )  # 64 bits hold these sums, up to a rounding that fp32 does not see
    same(out, torch.from_numpy(exact.astype(np.float64)).to(torch.float32).to(dtype))


def test_fused_products_differ_as_compiled_ones_may() -> None:
    x, y = torch.randn(2, BLOCK)
    out = torch.empty_like(x)
    with interpreter.fused():
        arithmetic_kernel[(1,)](x, y, out, "sub_of_products", BLOCK)
    apart = x * y - y * y
    once = (x.double() * y.double() - (y * y).double()).float()
    other = ((x * y).double() - y.double() * y.double()).float()
    assert (out != apart).any() and ((out == once) | (out == other)).all()


@pytest.mark.parametrize("op", ["sum", "max"])
def test_bf16_reductions(op: str) -> None:
    x = torch.randn(4, 16).to(torch.bfloat16)
    out = torch.empty(4, dtype=torch.bfloat16)
    reduce_kernel[(1,)](x, out, 4, 16, op)
    wide = x.float()
    same(out, (wide.amax(1) if op == "max" else wide.sum(1)).to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
def test_dot(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16).mul(40).to(dtype)
    kind = torch.int32 if dtype is torch.int8 else torch.float32
    out = torch.empty(16, 16, dtype=kind)
    dot_kernel[(1,)](a, b, out, 16, TYPES[kind])
    torch.testing.assert_close(out, (a.double() @ b.double()).to(kind), rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("what", ["load", "store", "atomic operation"])
@pytest.mark.parametrize("first, count", [(0, 17), (-1, 1), (16, 1), (9, 8)])
def test_an_access_out_of_bounds_is_an_error(what: str, first: int, count: int) -> None:
    x, y = torch.zeros(16, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    reach_kernel[(1,)](x, y, 0, 16, what, 32)
    with pytest.raises(triton.runtime.errors.InterpreterError, match=f"OutOfBounds.*{what} of 1 of"):
        reach_kernel[(1,)](x, y, first, count, what, 32)
    reach_kernel[(1,)](x, y, 16, 0, what, 32)


def test_types_made_quickly_are_those_of_the_stock_classes() -> None:
    """Twice each: the first answer is computed and the second one looked up."""
    shapes = ([16], [4, 8], [tl.constexpr(4), tl.constexpr(8)], tl.tuple([4, 8]), [1, 2, 1])
    for shape in shapes * 2:
        for element in (tl.float32, tl.bfloat16, tl.int1, tl.pointer_type(tl.uint8)):
            want = tl.block_type.__new__(tl.block_type)
            interpreter._stock_block_type(want, element, shape)
            got = tl.block_type(element, shape)
            assert (got, got.name, list(got.shape), got.numel) == (
                want,
                want.name,
                list(want.shape),
                want.numel,
            )
            assert interpreter._numpy_type(got) == interpreter._stock_numpy_type(want)
            stock = tl.tensor.__new__(tl.tensor)
            interpreter._stock_tensor(stock, None, want)
            mine = tl.tensor(None, got)
            assert list(mine.shape) == list(stock.shape) and mine.numel == stock.numel
            assert mine.dtype == stock.dtype and mine.type == stock.type
    with pytest.raises(ValueError):
        tl.block_type(tl.float32, [3])
    with pytest.raises(TypeError):
        tl.block_type(tl.float32, [])
