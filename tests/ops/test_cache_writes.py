"""What ``append_`` promises: scales fitted once, codes that depend on their token alone, planned bytes, capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops.formats import Format, get_format
from tests.ops import checks
from tests.ops.checks import DTYPES, F32, LISTED, NAMES, PER_TOKEN, STATIC

# ----------------------------------------------------------------------------------------------------- static scales


def assert_static(store: Sequence[Tensor], fmt: Format, want: dict[str, np.ndarray], why: str = "") -> None:
    for i in fmt.static_planes:
        plane = fmt.planes[i].name
        assert np.array_equal(store[i].numpy(), want[plane]), f"{plane} {why}"


@pytest.mark.parametrize("name", STATIC)
def test_static_scales_are_fitted_once_and_kept(name: str) -> None:
    fmt = get_format(name)
    store = fmt.empty_store(1, 2, 6, 64)
    assert not any(store[i].any() for i in fmt.static_planes), "an unset scale is zero, never 1.0"
    kvq_ops.append_(store, torch.tensor([0]), torch.zeros(1, 2, 1, 64), name)
    assert not any(store[i].any() for i in fmt.static_planes), "zeros are nothing to fit a scale to"
    assert not kvq_ops.dequantize(store, name).any()

    first = torch.randn(1, 2, 2, 64) * 3
    kvq_ops.append_(store, torch.tensor([1, 2]), first, name)
    fitted = checks.first_fit(fmt, first)
    assert_static(store, fmt, fitted)
    assert (store[fmt.static_planes[0]] != 1.0).all()

    louder = torch.randn(1, 2, 2, 64) * 100
    kvq_ops.append_(store, torch.tensor([3, 4]), louder, name)
    assert_static(store, fmt, fitted, "the scale moved under tokens already coded")
    want = checks.expected(fmt, louder, fitted)
    for i in fmt.token_planes:
        assert np.array_equal(checks.array(store[i])[:, :, 3:5], want[fmt.planes[i].name])
    assert np.array_equal(
        checks.decoded(fmt, store)[:, :, 1:3], checks.decoded(fmt, kvq_ops.quantize(first, name))
    )


@pytest.mark.parametrize("name", STATIC)
def test_a_preset_scale_is_kept(name: str) -> None:
    fmt = get_format(name)
    store = fmt.empty_store(1, 2, 4, 64)
    preset = {}
    for i in fmt.static_planes:
        # A scale; where there is a zero point too, a small whole number.
        store[i].fill_(1.0 if fmt.planes[i].name == "zero_point" else 0.037)
        preset[fmt.planes[i].name] = store[i].numpy().copy()
    x = torch.randn(1, 2, 4, 64)
    kvq_ops.append_(store, torch.arange(4), x, name)
    assert_static(store, fmt, preset)
    checks.assert_planes(store, fmt, checks.expected(fmt, x, preset), "preset")


def test_heads_are_fitted_apart() -> None:
    fmt = get_format("fp8_per_head")
    store = fmt.empty_store(1, 2, 4, 64)
    x = torch.randn(1, 2, 2, 64)
    x[:, 1] = 0
    kvq_ops.append_(store, torch.tensor([0, 1]), x, "fp8_per_head")
    scale = store[1].clone()
    assert scale[0] > 0 and scale[1] == 0
    louder = torch.randn(1, 2, 2, 64) * 50
    kvq_ops.append_(store, torch.tensor([2, 3]), louder, "fp8_per_head")
    assert store[1][0] == scale[0] and store[1][1] == F32(louder[:, 1].abs().max()) / F32(448)


@pytest.mark.parametrize("name", STATIC)
def test_all_nan_fits_nothing(name: str) -> None:
    fmt = get_format(name)
    store = fmt.empty_store(1, 1, 2, 64)
    kvq_ops.append_(store, torch.tensor([0]), torch.full((1, 1, 1, 64), math.nan), name)
    assert not any(store[i].any() for i in fmt.static_planes)
    assert not kvq_ops.dequantize(store, name).any()


# ------------------------------------------------------------------------------------------- chunks, rows and padding


def _append_in(sizes: list[int], x: Tensor, name: str, preset: list[Tensor] | None = None) -> list[Tensor]:
    fmt = get_format(name)
    batch, heads, tokens, head_dim = x.shape
    store = fmt.empty_store(batch, heads, tokens, head_dim)
    if preset is not None:
        for i in fmt.static_planes:
            store[i].copy_(preset[i])
    start = 0
    for size in sizes:
        kvq_ops.append_(store, torch.arange(start, start + size), x[:, :, start : start + size], name)
        start += size
    assert start == tokens
    return store


SEVENS = [7] * 6 + [1]


@pytest.mark.parametrize("name", NAMES)
def test_codes_do_not_depend_on_chunks(name: str) -> None:
    """Formats whose scale spans tokens promise this for a scale that is set; unset, the first chunk decides it."""
    fmt = get_format(name)
    x = torch.randn(2, 2, 43, 32)
    whole = kvq_ops.quantize(x, name)
    preset = whole if name in STATIC else None
    for sizes in ([43], [1] * 43, SEVENS):
        checks.assert_same_planes(_append_in(sizes, x, name, preset), whole, fmt, f"chunks of {sizes[0]}")
    if name in STATIC:
        assert_static(_append_in(SEVENS, x, name), fmt, checks.first_fit(fmt, x[:, :, :7]))


@pytest.mark.parametrize("name", PER_TOKEN)
def test_D5_neighbours_and_padding_do_not_enter_a_row(name: str) -> None:
    """Lengths 9 and 5 in one batch, padding of 1e3 on either side, the neighbour 100 times as loud."""
    fmt = get_format(name)
    row = torch.randn(1, 2, 5, 32)
    loud = torch.randn(1, 2, 9, 32) * 100
    alone = kvq_ops.quantize(row, name)
    padding = torch.full((1, 2, 4, 32), 1e3)
    for side, padded, at in (
        ("right", torch.cat([row, padding], 2), 0),
        ("left", torch.cat([padding, row], 2), 4),
    ):
        both = kvq_ops.quantize(torch.cat([loud, padded]), name)
        for i in fmt.token_planes:
            assert torch.equal(both[i][1:, :, at : at + 5], alone[i]), f"{side} {fmt.planes[i].name}"
    # Ragged: each row at its own positions, only real tokens given.
    store = fmt.empty_store(2, 2, 9, 32)
    for t in range(5):
        token = torch.cat([loud[:, :, t : t + 1], row[:, :, t : t + 1]])
        kvq_ops.append_(store, torch.tensor([[t + 4], [t]]), token, name)
    for i in fmt.token_planes:
        assert torch.equal(store[i][1:, :, :5], alone[i]), fmt.planes[i].name
    assert store[-1].tolist() == [9, 5]


@pytest.mark.parametrize("name", STATIC)
def test_D5_tensor_scales_are_the_documented_exception(name: str) -> None:
    """A scale that spans tokens is fitted to the whole first write, padding and neighbours included; a set scale frees it."""
    fmt = get_format(name)
    index = fmt.static_planes[0]
    row = torch.randn(1, 2, 5, 32)
    both = torch.cat([row * 100, row])
    alone, batch = kvq_ops.quantize(row, name), kvq_ops.quantize(both, name)
    assert (batch[index] > alone[index]).all()
    store = fmt.empty_store(2, 2, 5, 32)
    for i in fmt.static_planes:
        store[i].copy_(alone[i])
    kvq_ops.append_(store, torch.arange(5), both, name)
    for i in fmt.token_planes:
        assert torch.equal(store[i][1:], alone[i])


# ---------------------------------------------------------------------------------------------------- ------- bytes


@pytest.mark.parametrize("name", NAMES)
def test_planned_bytes_are_real_bytes(name: str) -> None:
    fmt = get_format(name)
    for *sizes, head_dim in (
        (1, 1, 1, 64),
        (2, 4, 16, 32),
        (3, 5, 7, 100),
        (1, 3, 11, 42),
        (2, 1, 0, 80),
        (0, 2, 3, 64),
    ):
        shape = (*sizes, *checks.head_dims(fmt, head_dim))
        for dtype in DTYPES:
            made = fmt.empty_store(*shape, dtype=dtype)
            coded = kvq_ops.quantize(torch.randn(shape, dtype=dtype), name)
            for store in (made, coded):
                assert sum(p.untyped_storage().nbytes() for p in store) == fmt.nbytes(*shape, dtype), (
                    shape,
                    dtype,
                )


@pytest.mark.parametrize("name", NAMES)
def test_bits_per_value_is_the_limit_of_many_tokens(name: str) -> None:
    fmt = get_format(name)
    for head_dim in checks.head_dims(fmt, 64, 100):
        grown = fmt.nbytes(1, 2, 1001, head_dim) - fmt.nbytes(1, 2, 1, head_dim)
        assert fmt.bits_per_value(head_dim) == pytest.approx(grown * 8 / (1000 * 2 * head_dim), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- positions


@pytest.mark.parametrize("name", LISTED)
def test_D12_the_ninth_write_into_eight_is_refused(name: str) -> None:
    fmt = get_format(name)
    store = fmt.empty_store(2, 2, 8, 64)
    for t in range(8):
        kvq_ops.append_(store, torch.tensor([t]), torch.randn(2, 2, 1, 64), name)
    before = checks.copy(store)
    with pytest.raises(kvq_ops.errors.CapacityError, match="0..7"):
        kvq_ops.append_(store, torch.tensor([8]), torch.randn(2, 2, 1, 64), name)
    with pytest.raises(kvq_ops.errors.CapacityError):
        kvq_ops.append_(store, torch.tensor([[7, 0], [6, 8]]), torch.randn(2, 2, 2, 64), name)
    checks.assert_same_planes(store, before, fmt)


@pytest.mark.parametrize("name", LISTED)
def test_D12_appending_nothing_changes_nothing(name: str) -> None:
    fmt = get_format(name)
    store = kvq_ops.quantize(torch.randn(2, 2, 4, 64), name)
    before = checks.copy(store)
    kvq_ops.append_(store, torch.zeros(0, dtype=torch.int64), torch.zeros(2, 2, 0, 64), name)
    checks.assert_same_planes(store, before, fmt)
    empty = fmt.empty_store(0, 2, 4, 64)
    kvq_ops.append_(empty, torch.tensor([1]), torch.zeros(0, 2, 1, 64), name)
    assert kvq_ops.dequantize(empty, name).shape == (0, 2, 4, 64)


@pytest.mark.parametrize("name", LISTED)
def test_writing_a_filled_position_replaces_it(name: str) -> None:
    fmt = get_format(name)
    x, y = torch.randn(2, 2, 4, 64), torch.randn(2, 2, 1, 64)
    store = kvq_ops.quantize(x, name)
    static = {fmt.planes[i].name: checks.array(store[i]).copy() for i in fmt.static_planes}
    kvq_ops.append_(store, torch.tensor([1]), y, name)
    x[:, :, 1:2] = y
    checks.assert_planes(store, fmt, checks.expected(fmt, x, static or None), "replaced")
    assert store[-1].tolist() == [4, 4], "length counts the furthest token"


@pytest.mark.parametrize("name", LISTED)
def test_positions_may_be_int32_and_ragged(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(2, 2, 2, 64)
    stores = []
    for position in (
        torch.tensor([3, 1]),
        torch.tensor([3, 1], dtype=torch.int32),
        torch.tensor([[3, 1], [3, 1]]),
    ):
        stores.append(fmt.empty_store(2, 2, 5, 64))
        kvq_ops.append_(stores[-1], position, x, name)
    checks.assert_same_planes(stores[1], stores[0], fmt)
    checks.assert_same_planes(stores[2], stores[0], fmt)
