"""The kernels' source run on this machine's processor: the same bytes as the torch codecs, for data that is awkward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import kvq_ops
from cutlass_kernels import build, checks, operators
from kvq_ops import registry
from kvq_ops.calibration import fit
from kvq_ops.errors import CalibrationError
from kvq_ops.formats import get_format
from tests.cutlass.hosted import BITS, FORMATS, NAME, register_hosted
from tests.ops.checks import assert_same_planes, raw
from tests.ops.codec_data import KINDS, make

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(autouse=True, scope="module")
def hosted() -> Iterator[None]:
    before = {op: list(rows) for op, rows in registry._implementations.items()}
    register_hosted()
    yield
    for op, rows in before.items():
        registry._implementations[op][:] = rows
    registry._choices.clear()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("op", BITS)
def test_every_operator_equals_torch(op: str, name: str) -> None:
    assert checks.operator(op, NAME, [name]) == 2


@pytest.mark.parametrize("name", ["nvfp4", "fp8_per_token_head"])
def test_fp16_and_a_head_dim_that_is_no_power_of_two(name: str) -> None:
    for op in BITS:
        checks.operator(op, NAME, [name], head_dims=(80,), dtypes=(torch.float16,))


@pytest.mark.parametrize("name", FORMATS)
def test_awkward_values(name: str) -> None:
    fmt = get_format(name)
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            x = make(kind, (2, 3, 5, 64), dtype)
            got, want = operators.quantize(x, fmt), registry_torch("quantize")(x, fmt)
            assert_same_planes(got, want, fmt, f"{kind} {dtype}")
            decoded = operators.dequantize(want, fmt, dtype)
            assert torch.equal(raw(decoded), raw(registry_torch("dequantize")(want, fmt, dtype))), kind


def registry_torch(op: str):
    return next(row for row in registry.implementations(op) if row.name == "torch").run


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8_per_token_head"])
def test_strides_and_addresses_that_allow_no_wide_access(name: str) -> None:
    """A view of heads apart, one that begins in the middle of a word, and planes that are slices of larger ones."""
    fmt = get_format(name)
    big = torch.randn(2, 5, 3, 3 * 64 + 2).bfloat16()
    for x in (
        big.transpose(1, 2)[..., 64:128],
        big.transpose(1, 2)[..., 3 : 3 + 64],
        big[..., ::3][..., :64],
    ):
        want = registry_torch("quantize")(x, fmt)
        assert_same_planes(operators.quantize(x, fmt), want, fmt)
        store = fmt.empty_store(*x.shape[:2], 9, 64)
        room = [torch.full((*plane.shape[:-1], plane.shape[-1] + 3), 77).to(plane.dtype) for plane in store]
        for i in fmt.token_planes:
            if store[i].dim() == 4:
                room[i][..., 1:-2] = 0
                store[i] = room[i][..., 1:-2]
        position = torch.arange(2, 2 + x.shape[2])
        operators.append_(store, position, x, fmt)
        for i in fmt.token_planes:
            if name != "nvfp4":  # whose scale of the tensor is the same, the store's codes too
                assert torch.equal(store[i][:, :, position], want[i])
            if store[i].dim() == 4:
                assert bool((room[i][..., 0] == 77).all() and (room[i][..., -2:] == 77).all())
        assert torch.equal(
            raw(operators.dequantize(store, fmt, torch.float32)),
            raw(registry_torch("dequantize")(store, fmt, torch.float32)),
        )


def test_channels_apart_in_the_store() -> None:
    fmt = get_format("nvfp4")
    x = torch.randn(2, 3, 4, 64)
    store, want = fmt.empty_store(2, 3, 4, 64), fmt.empty_store(2, 3, 4, 64)
    store[0] = torch.zeros(2, 3, 32, 4, dtype=torch.uint8).transpose(2, 3)
    for held in (store, want):
        (operators.append_ if held is store else registry_torch("append_"))(held, torch.arange(4), x, fmt)
    assert_same_planes(store, want, fmt)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_per_head", "fp8_e4m3"])
def test_a_scale_that_is_there_stays(name: str) -> None:
    """And is fitted where it is not; per head, one of them may be there and others not."""
    fmt = get_format(name)
    static = fmt.static_planes[0]
    x = torch.randn(2, 3, 4, 64)
    x[:, 1] = 0
    stores = [fmt.empty_store(2, 3, 9, 64) for _ in range(2)]
    for step in (x, x * 100, torch.randn(2, 3, 4, 64)):
        operators.append_(stores[0], torch.arange(4), step, fmt)
        registry_torch("append_")(stores[1], torch.arange(4), step, fmt)
        assert_same_planes(*stores, fmt, "")
    assert bool((stores[0][static] != 0).all())


@pytest.mark.parametrize("name", ["nvfp4+static", "fp8_per_head+static"])
def test_calibrated_scales(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(2, 3, 4, 64)
    stores = [fmt.empty_store(2, 3, 9, 64) for _ in range(2)]
    with pytest.raises(CalibrationError, match="no calibrated"):
        operators.append_(stores[0], torch.arange(4), x, fmt)
    with pytest.raises(CalibrationError):
        operators.quantize(x, fmt)
    for store in stores:
        for plane, value in fit(x, fmt).items():
            store[fmt.index(plane)].copy_(value)
    operators.append_(stores[0], torch.arange(4), x * 3, fmt)
    registry_torch("append_")(stores[1], torch.arange(4), x * 3, fmt)
    assert_same_planes(*stores, fmt, "")


def test_tokens_without_a_place_are_not_written() -> None:
    """On a GPU nobody looks at the values of positions and tables before the kernel does."""
    fmt = get_format("nvfp4")
    x = torch.randn(2, 3, 5, 64)
    store, before = fmt.empty_store(2, 3, 6, 64), fmt.empty_store(2, 3, 6, 64)
    operators.append_(store, torch.tensor([-1, 6, 1 << 32, -(1 << 40), 7]), x, fmt)
    assert_same_planes(store[:2] + store[3:], before[:2] + before[3:], get_format("mxfp4"))
    pages, table = fmt.empty_store(3, 3, 4, 64), torch.tensor([[0, 9, -1], [5, 1, -7]])
    operators.paged_append_(pages, table, torch.tensor([[4, 8, 12, 1 << 33, -3], [0, 1, 9, 99, -1]]), x, fmt)
    assert not any(bool(plane.any()) for plane in (pages[0], pages[1], pages[3]))
    operators.paged_append_(pages, table, torch.tensor([[4, 3, 12, 1 << 33, -3], [0, 5, 9, 99, -1]]), x, fmt)
    assert pages[-1].tolist() == [4, 2, 0]


def test_compile_uses_them() -> None:
    def step(store: list[Tensor], position: Tensor, x: Tensor) -> Tensor:
        kvq_ops.append_(store, position, x * 2, "nvfp4")
        return kvq_ops.dequantize(store, "nvfp4") + 1

    fmt = get_format("nvfp4")
    x = torch.randn(2, 3, 4, 64)
    stores = [fmt.empty_store(2, 3, 9, 64) for _ in range(2)]
    with registry.use_implementation(NAME):
        got = torch.compile(step, fullgraph=True)(stores[0], torch.arange(4), x)
    assert torch.equal(got, step(stores[1], torch.arange(4), x))
    assert_same_planes(*stores, fmt, "")
