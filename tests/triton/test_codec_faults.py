"""Broken twins: what the tests of codes compare must show each fault that is planted here, or they prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from kvq_ops import paged
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import append, fit, floats, places, rules, shapes, vectors, window_append
from kvq_ops.triton_kernels.append import paged_append_
from tests.cpu.stores import empty
from tests.ops.codec_data import make
from tests.triton import interpreter
from tests.triton.stores import assert_same, both

stock_settle, stock_encode, stock_row = places.settle, rules.encode_tile, places.window_row


@triton.jit
def away_from_zero(x, low, high):
    x = tl.minimum(tl.maximum(x, low), high)
    return tl.where(x < 0, -tl.floor(0.5 - x), tl.floor(x + 0.5))


@triton.jit
def unclamped(x, low, high):
    return (x + 12582912.0) - 12582912.0


@triton.jit
def by_reciprocal(x, scale):
    usable = scale != 0.0
    return tl.where(usable, x * tl.div_rn(1.0, tl.where(usable, scale, 1.0)), 0.0)


@triton.jit
def ties_up(x):
    u = x.to(tl.int32, bitcast=True)
    a = tl.minimum(u & 0x7FFFFFFF, 0x43E00000)
    normal = ((a + 0x80000) >> 20) - ((127 - 7) << 3)
    small = (a.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(a < 0x3C800000, small, normal) | ((u >> 24) & 0x80)


@triton.jit
def without_subnormals(bits):
    return ((bits << 20) + ((127 - 7) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def upper_first(codes, ROWS: tl.constexpr, WIDTH: tl.constexpr, SHIFT: tl.constexpr):
    low, high = tl.split(tl.reshape(codes, (ROWS, WIDTH // 2, 2)))
    return high | (low << SHIFT)


@triton.jit
def loose_product(x, y):
    return x * y


@triton.jit
def everything(x):
    return x == x


@triton.jit
def zero_median(x, present):
    return tl.max(x, 1) * 0.0


def swapped(*args: Any) -> Any:
    codes, scale, minimum = stock_encode(*args)
    return codes, minimum, scale


def all_live(*args: Any) -> Any:
    *where, live = stock_settle(*args)
    return (*where, live | (args[0] >= 0))


def no_rolling_back(*args: Any) -> Any:
    start, reopened, target = stock_row(*args)
    coded = args[2]
    return start, coded, tl.maximum(coded, target)


def set_(module: Any, name: str, twin: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(module, name, twin)


# The format in which a fault shows, the kind of numbers, and what is put in the place of what.
FAULTS: dict[str, tuple[str, str, Callable[[pytest.MonkeyPatch], None]]] = {
    "ties away from zero": ("int8_per_token_head", "int8_ties", set_(rules, "round_even", away_from_zero)),
    "ties of 4 bits away from zero": ("int4_group32", "int4_ties", set_(rules, "round_even", away_from_zero)),
    "codes not clamped": ("int8_per_token_head", "infinite", set_(rules, "round_even", unclamped)),
    "division by reciprocal": ("int8_per_token_head", "ties_of_many", set_(rules, "safe_divide", by_reciprocal)),
    "float8 ties up": ("fp8_per_token_head", "float8_ties", set_(rules, "e4m3_bits", ties_up)),
    "block scales without subnormals": ("nvfp4", "e2m1_blocks", set_(rules, "e4m3_number", without_subnormals)),
    "scale and minimum swapped": ("int4_group32", "random", set_(append, "encode_tile", swapped)),
    "nibbles swapped": ("int4_per_token_head", "random", set_(rules, "_pairs", upper_first)),
    "3-bit codes reversed": ("int3_group32", "random", set_(rules, "_pairs", upper_first)),
    "infinity in a scale": ("int8_per_token_head", "infinite", set_(rules, "is_finite", everything)),
    "mask of the tail dropped": ("int8_per_token_head", "random", set_(append, "settle", all_live)),
    "rotary products fused": ("nuq4_keys+outlier3%", "random", set_(vectors, "product", loose_product)),
    "outliers away from zero, not the median": (
        "int4_group32+outlier5%", "all_positive", set_(vectors, "_lower_median", zero_median)
    ),
}  # fmt: skip


def numbers(kind: str) -> torch.Tensor:
    if kind == "infinite":
        x = torch.randn(1, 2, 5, 64)
        x[..., 3] = torch.inf
        return x
    if kind == "e2m1_blocks":  # blocks far below the largest, whose scales are subnormal
        return torch.randn(1, 2, 5, 64) * 2.0 ** (-5 * (torch.arange(64) // 16))
    if kind == "ties_of_many":
        return make("int8_ties", (1, 2, 5, 64)) * torch.tensor([3.0, 7.0, 11.0, 41.0, 47.0]).view(5, 1)
    return make(kind, (1, 2, 5, 64))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, kind, plant = FAULTS[fault]
    monkeypatch.setattr(shapes, "FEW_ROWS", 0)
    torch.manual_seed(11)
    x, position = numbers(kind), torch.arange(5)
    fusing = interpreter.fused() if "fused" in fault else nullcontext()
    with fusing:
        both(*(empty(name, 1, 2, 5, 64) for _ in range(2)), position, x, name)
        plant(monkeypatch)
        with pytest.raises((AssertionError, InterpreterError), match="plane|OutOfBounds"):
            both(*(empty(name, 1, 2, 5, 64) for _ in range(2)), position, x, name)


def test_padding_that_is_written_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = get_format("int8_per_tensor")
    table, at = torch.tensor([[1, 0]]), torch.tensor([[0, -1, 3]])
    x = torch.tensor([1.0, 50.0, 2.0]).view(1, 1, 3, 1) * torch.randn(1, 2, 3, 64)
    want, got = (empty(fmt.name, 2, 2, 2, 64) for _ in range(2))
    paged.append_torch(want, table, at, x, fmt)
    monkeypatch.setattr(append, "settle", all_live)
    with pytest.raises((AssertionError, InterpreterError), match="plane|OutOfBounds"):
        paged_append_(got, table, at, x, fmt)
        assert_same(got, want, fmt)


def test_rolling_back_that_is_forgotten_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "int4_group32+hadamard+outlier5%+recent1"

    def grow() -> None:
        torch.manual_seed(2)
        stores = [empty(name, 1, 2, 16, 64) for _ in range(2)]
        for start, count in ((0, 9), (4, 5)):
            both(*stores, torch.arange(start, start + count), torch.randn(1, 2, count, 64), name)

    grow()
    for module in (fit, places, window_append):
        monkeypatch.setattr(module, "window_row", no_rolling_back)
    with pytest.raises(AssertionError, match="plane"):
        grow()


def test_the_twins_are_near() -> None:
    """Each differs from what it replaces in the very cases that it is about, and gives the same otherwise."""
    assert floats.round_even is not away_from_zero
    x, out = torch.tensor([0.5, 1.5, 2.5, 0.4, -0.6, -3.2, 2.7, 1.0]), torch.empty(2, 8)
    rounding_kernel[(1,)](x, out, 8)
    assert (out[0] != out[1]).tolist() == [True, False, True, False, False, False, False, False]


@triton.jit
def rounding_kernel(X, OUT, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(X + at)
    tl.store(OUT + at, away_from_zero(x, -9.0, 9.0))
    tl.store(OUT + BLOCK + at, round_even(x, -9.0, 9.0))


round_even = floats.round_even
