"""The kernels write the bytes that plain torch writes, whatever the format, shape, layout or order of writes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops.formats import Format, get_format
from tests.cpu.stores import NAMES, empty, fits, implementation, refusal
from tests.ops.checks import DTYPES, copy
from tests.ops.codec_data import KINDS, make


def assert_same(got: list[Tensor], want: list[Tensor], fmt: Format, context: str = "") -> None:
    """Equal planes, signs of zeros included, except that one NaN is like another."""
    for plane, a, b in zip(fmt.planes, got, want, strict=True):
        same = torch.equal(a, b) and (not a.is_floating_point() or torch.equal(a.signbit(), b.signbit()))
        if a.is_floating_point() and not same:
            same = torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
            same &= torch.equal(a.nan_to_num(7.5).signbit(), b.nan_to_num(7.5).signbit())
        assert a.dtype == b.dtype and same, f"{fmt.name} plane {plane.name} {context}"


def both(store: list[Tensor], position: Tensor, x: Tensor, name: str, context: str = "") -> list[Tensor]:
    """``store`` after an append by torch; the same by the kernels is compared with it."""
    fmt, mine = get_format(name), copy(store)
    implementation("append_", "torch").run(store, position, x, fmt)
    implementation("append_", "cpu").run(mine, position, x, fmt)
    assert_same(mine, store, fmt, context)
    return store


def both_read(store: list[Tensor], name: str, dtype: torch.dtype, context: str = "") -> None:
    fmt = get_format(name)
    want = implementation("dequantize", "torch").run(store, fmt, dtype)
    got = implementation("dequantize", "cpu").run(store, fmt, dtype)
    assert got.dtype == dtype and got.shape == want.shape and got.is_contiguous()
    # Rotating numbers near the largest back may overflow, which gives NaN in both.
    assert torch.equal(got.isnan(), want.isnan()), f"{name} as {dtype} {context}"
    assert torch.equal(got.nan_to_num(), want.nan_to_num()), f"{name} as {dtype} {context}"


@pytest.mark.parametrize("name", NAMES)
def test_every_row_is_served(name: str) -> None:
    """A row that falls back to plain torch would pass every other test here."""
    fmt = get_format(name)
    assert [refusal(op, fmt) for op in ("quantize", "dequantize", "append_")] == [None] * 3
    assert refusal("attention", fmt, fmt) is None


@pytest.mark.parametrize("name", NAMES)
def test_bytes_for_every_capability(capability: str, name: str) -> None:
    for dim in (8, 24, 64, 80, 128):
        if fits(get_format(name), dim):
            store = empty(name, 2, 3, 70, dim)
            store = both(
                store, torch.arange(67), torch.randn(2, 3, 67, dim) * 3, name, f"{capability} D={dim}"
            )
            store = both(
                store, torch.arange(67, 70), torch.randn(2, 3, 3, dim), name, f"{capability} D={dim}"
            )
            both_read(store, name, torch.float32, f"{capability} D={dim}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_awkward_values(name: str, kind: str) -> None:
    fmt = get_format(name)
    for dtype in DTYPES:
        x = make(kind, (2, 2, 36, 96 if fits(fmt, 96) else 64), dtype)
        x[0, 0, 3, 5:9] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]).to(dtype)
        x[1, 1, 4] = float("nan")
        store = empty(name, 2, 2, 40, x.shape[-1], dtype)
        if fmt.lossless:
            x = x.nan_to_num()
        both(store, torch.arange(36), x, name, f"{kind} {dtype}")
        for out in (*DTYPES, torch.float64):
            both_read(store, name, out, f"{kind} {dtype}")


@pytest.mark.parametrize("name", [n for n in NAMES if {"minimum", "centre"} & get_format(n)._index.keys()])
def test_a_minimum_of_zero_has_no_sign(capability: str, name: str) -> None:
    """Of 0.0 and -0.0 either may come out of a reduction: the stored one must not depend on that."""
    fmt = get_format(name)
    x = torch.zeros(1, 2, 36, 64)
    x[:, 0] = -0.0
    x[..., 1::2] *= -1
    planes = [
        i for i, plane in enumerate(fmt.planes) if plane.name in ("minimum", "centre") and plane.per_token
    ]
    for by in ("torch", "cpu"):
        store = empty(name, 1, 2, 40, 64)
        implementation("append_", by).run(store, torch.arange(36), x, fmt)
        for i in planes:
            assert not store[i].signbit().any(), f"{name} by {by}"


@pytest.mark.parametrize("dim", [2, 6, 7, 33, 66, 100, 130, 264])
@pytest.mark.parametrize("name", NAMES)
def test_odd_head_dims(name: str, dim: int) -> None:
    if not fits(get_format(name), dim):
        pytest.skip("cannot be packed")
    store = both(empty(name, 1, 2, 37, dim), torch.arange(35), torch.randn(1, 2, 35, dim), name)
    both_read(store, name, torch.bfloat16)


@pytest.mark.parametrize("name", [n for n in NAMES if not get_format(n).windowed])
def test_positions_in_any_order_and_rows_of_their_own(name: str) -> None:
    store = empty(name, 2, 2, 11, 64)
    store = both(store, torch.tensor([4, 2, 9]), torch.randn(2, 2, 3, 64), name)
    store = both(store, torch.tensor([[0, 7], [3, 1]]), torch.randn(2, 2, 2, 64), name)
    store = both(store, torch.tensor([5, 5], dtype=torch.int32), torch.randn(2, 2, 2, 64), name, "twice")
    assert store[-1].tolist() == [10, 10]
    both_read(store, name, torch.float32)


@pytest.mark.parametrize("name", [n for n in NAMES if get_format(n).windowed])
def test_windows_roll_back_and_grow_in_steps(name: str) -> None:
    """Rows of different lengths, steps of one and of many, cuts through groups."""
    torch.manual_seed(3)
    fmt = get_format(name)
    store = empty(name, 2, 2, 300, 64, torch.float16)
    starts = torch.zeros(2, dtype=torch.int64)
    for count in (1, 1, 40, 3, 1, 90, 2, 1, 77):
        position = starts.unsqueeze(1) + torch.arange(count)
        store = both(store, position, torch.randn(2, 2, count, 64).half(), name, f"+{count}")
        both_read(store, name, torch.float16)
        back = (
            torch.tensor([0, 5])
            if count == 3
            else torch.tensor([37, 0])
            if count == 90
            else torch.zeros(2).long()
        )
        starts = (starts + count - back).clamp_min(0)
    assert store[-1].tolist() == starts.tolist() and store[fmt.index("coded")].max() > 0


@pytest.mark.parametrize("name", NAMES)
def test_layouts(name: str) -> None:
    """Tokens before heads in a larger buffer, channels apart, inputs that are views."""
    fmt = get_format(name)
    x = torch.randn(2, 9, 3, 128)[..., ::2].transpose(1, 2)
    plain = empty(name, 2, 3, 12, 64)
    views = []
    for plane in plain:
        if plane.dim() == 4:
            wide = plane.new_full((2, plane.shape[2] + 2, plane.shape[1] + 1, 2 * plane.shape[3]), 1)
            view = wide[:, 1:-1, 1:, ::2].transpose(1, 2)
        else:
            view = plane.new_full((*plane.shape, 2), 1)[..., 0]
        view.copy_(plane)
        views.append(view)
    before = [v._version for v in views]
    for store in (plain, views):
        implementation("append_", "cpu").run(store, torch.arange(9), x, fmt)
    assert all(v._version > b for v, b in zip(views, before, strict=True)), "written planes must look written"
    assert_same(views, plain, fmt)
    both(empty(name, 2, 3, 12, 64), torch.arange(9), x, name)
    got, want = (implementation("dequantize", "cpu").run(s, fmt, torch.float32) for s in (views, plain))
    assert torch.equal(got, want)


def test_a_store_that_was_not_calibrated_is_refused() -> None:
    fmt = get_format("nuq4_keys")
    x = torch.randn(1, 2, 3, 64)
    with kvq_ops.use_implementation("cpu"), pytest.raises(kvq_ops.errors.CalibrationError):
        kvq_ops.append_(fmt.empty_store(1, 2, 4, 64), torch.arange(3), x, "nuq4_keys")
    with kvq_ops.use_implementation("cpu"), pytest.raises(kvq_ops.errors.CalibrationError):
        kvq_ops.quantize(x, "nuq4_keys")
