"""Rounding inside of kernels is that of torch, for every number that matters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_ops.codecs.block_scaled import e2m1_codes
from kvq_ops.triton_kernels import floats
from tests.triton import interpreter

BLOCK = 4096
e4m3_bits, e5m2_bits, e2m1_bits = floats.e4m3_bits, floats.e5m2_bits, floats.e2m1_bits
e4m3_number, power_of_two = floats.e4m3_number, floats.power_of_two
round_even, nan_to_zero, product = floats.round_even, floats.nan_to_zero, floats.product
finite_or_zero, safe_divide = floats.finite_or_zero, floats.safe_divide


@triton.jit
def apply_kernel(X, Y, OUT, count, WHAT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + at, mask=at < count, other=0)
    y = tl.load(Y + at, mask=at < count, other=1)
    if WHAT == "e4m3":
        out = e4m3_bits(x)
    elif WHAT == "e5m2":
        out = e5m2_bits(x)
    elif WHAT == "e2m1":
        out = e2m1_bits(x)
    elif WHAT == "number":
        out = e4m3_number(x)
    elif WHAT == "power":
        out = power_of_two(x)
    elif WHAT == "round":
        out = round_even(x * y, -127.0, 127.0)
    elif WHAT == "nan":
        out = nan_to_zero(x)
    elif WHAT == "finite":
        out = finite_or_zero(x)
    elif WHAT == "divide":
        out = safe_divide(x, y)
    else:
        out = product(x, y) + x
    tl.store(OUT + at, out, mask=at < count)


def apply(what: str, x: Tensor, dtype: torch.dtype, y: Tensor | None = None) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    grid: Any = (triton.cdiv(x.numel(), BLOCK),)
    apply_kernel[grid](x, torch.ones_like(x) if y is None else y, out, x.numel(), what, BLOCK)
    return out


def numbers() -> Tensor:
    """All of fp16 and bf16, the middles between neighbours of small formats, and the fp32 numbers next to those."""
    every = torch.arange(1 << 16).to(torch.int16)
    wide = torch.cat([every.view(d).float() for d in (torch.float16, torch.bfloat16)])
    small = [
        torch.arange(256).to(torch.uint8).view(d).float() for d in (torch.float8_e4m3fn, torch.float8_e5m2)
    ]
    small.append(torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, 8]))
    ascending = [values[values.isfinite()].sort().values for values in small]
    middles = torch.cat([(values[1:] + values[:-1]) / 2 for values in ascending])
    middles = torch.cat([middles, -middles])
    ends = torch.tensor([torch.inf, -torch.inf])
    return torch.cat([wide, middles, *(middles.nextafter(end) for end in ends)])


@pytest.mark.parametrize("what, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_float8(what: str, dtype: torch.dtype) -> None:
    x = numbers()
    largest = torch.finfo(dtype).max
    got, nan = apply(what, x, torch.int32), x.isnan()
    assert torch.equal(got[~nan], x[~nan].clamp(-largest, largest).to(dtype).view(torch.uint8).int())
    assert bool(((got[nan] & 127) == 127).all())


def test_e2m1() -> None:
    x = nan_free(numbers())
    assert torch.equal(apply("e2m1", x, torch.int32), e2m1_codes(x).int())


def nan_free(x: Tensor) -> Tensor:
    return x[~x.isnan()]


def test_the_way_back() -> None:
    bits = torch.arange(127, dtype=torch.int32)
    want = bits.to(torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(apply("number", bits, torch.float32), want)
    exponent = torch.arange(-127, 128, dtype=torch.int32)
    want = torch.ldexp(torch.ones(255, dtype=torch.float64), exponent).float()
    assert torch.equal(apply("power", exponent, torch.float32), want)


def test_rounding_and_division() -> None:
    x = nan_free(numbers())
    halves = torch.arange(-300, 300) / 2
    for values in (x, halves):
        assert torch.equal(apply("round", values, torch.float32), values.round().clamp(-127, 127))
    y = torch.randn(x.shape)
    y[::7] = 0
    want = torch.where(y != 0, x / torch.where(y != 0, y, 1.0), 0.0)
    got = apply("divide", x, torch.float32, y)
    assert torch.equal(got.nan_to_num(), want.nan_to_num()) and torch.equal(got.isnan(), want.isnan())


def test_values_that_are_not_finite() -> None:
    x = numbers()
    assert torch.equal(apply("nan", x, torch.float32), torch.where(x.isnan(), 0.0, x))
    assert torch.equal(apply("finite", x, torch.float32), torch.where(x.isfinite(), x, 0.0))


def test_products_and_rounding_stand_up_to_fusing() -> None:
    x, y = torch.randn(2, BLOCK)
    ties = torch.randint(-200, 200, (BLOCK,)) / 2
    with interpreter.fused():
        assert torch.equal(apply("product", x, torch.float32, y), x * y + x)
        third = torch.full_like(ties, 1 / 3)
        assert torch.equal(apply("round", ties, torch.float32, third), (ties * third).round())
