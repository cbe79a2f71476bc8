"""Copies, files, modules: what else happens to tensors that are buffers of a model."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvq_ops import QuantizedKV, errors
from kvq_ops.formats import get_format
from kvq_ops.handle import dense_bytes, storage_bytes
from tests.handle.shadow import FORMATS, Pair, planes_of, same_planes

EVERY = (*FORMATS, "fp8_e5m2", "fp8_per_head", "int2_group32", "int4_per_token_head+outlier10%")


class Attention(nn.Module):
    """A module with two cache buffers."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=dtype))
        for side in ("keys", "values"):
            self.register_buffer(side, QuantizedKV.empty((2, 2, 8, 4), name, dtype=dtype))

    def fill(self) -> Attention:
        for cache in (self.keys, self.values):
            cache[:, :, :5] = torch.randn(2, 2, 5, 4).to(cache.dtype)
        return self


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_torch(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("axes", ["bhtd", "bthd"])
@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_torch, lambda x: x.clone()])
def test_copies_keep_every_byte(way: Any, axes: str, name: str) -> None:
    x = Pair(name, axes).handle
    y = way(x)
    assert type(y) is QuantizedKV and same_planes(planes_of(x), planes_of(y))
    assert (y.format, y.axes, y.order, y.dtype, y.stride()) == (
        x.format,
        x.axes,
        x.order,
        x.dtype,
        x.stride(),
    )
    before = planes_of(x)
    y.zero_()
    assert same_planes(before, planes_of(x))
    view = way(x.transpose(0, 1)[1:, :, 2:4])
    assert torch.equal(view.dequantize(), x.dequantize().transpose(0, 1)[1:, :, 2:4])
    view[...] = 1.0
    assert same_planes(before, planes_of(x))


def test_a_pickled_slice_leaves_the_rest_behind() -> None:
    x = QuantizedKV.empty((1, 1, 4096, 16), "int8_per_token_head")
    assert len(pickle.dumps(x[:, :, :4])) < 8192 < len(pickle.dumps(x))


def test_copy_copy_is_an_alias() -> None:
    pair = Pair("int8_per_token_head")
    copied = copy.copy(pair.handle[:, :, 2:4])
    raw, stored = pair.values([3, 2, 2, 4], "bhtd")
    copied.copy_(raw)
    pair.dense[:, :, 2:4] = stored
    pair.check()


def test_deepcopy_keeps_views_views() -> None:
    """Two names of one cache, and a slice of it, stay so in the copy."""
    x = Pair("int8_per_token_head").handle
    module = nn.Module()
    module.register_buffer("a", x)
    module.register_buffer("b", x)
    module.register_buffer("part", x[:, :, 2:5])
    module.register_buffer("turned", x.transpose(1, 2))
    twin = copy.deepcopy(module)
    assert twin.a is twin.b
    twin.part[:, :, 1:2] = torch.ones(3, 2, 1, 4)
    assert (twin.a.dequantize()[:, :, 3] == 1).all() and (twin.turned.dequantize()[:, 3] == 1).all()
    assert not (x.dequantize()[:, :, 3] == 1).any()
    assert storage_bytes([twin.a, twin.part, twin.turned]) == x.nbytes


@pytest.mark.parametrize("name", EVERY)
def test_to_keeps_codes_and_fp32_scales(name: str) -> None:
    x = Pair(name).handle
    for dtype in (torch.float16, torch.bfloat16):
        y = x.to(dtype)
        assert isinstance(y, QuantizedKV) and y.dtype == dtype
        for plane, a, b in zip(x.format.planes, x.store, y.store, strict=True):
            assert torch.equal(a, b) if plane.dtype is not None else torch.equal(a.to(dtype), b)
        expected = (
            torch.ops.kvq.dequantize(x.store, name, dtype) if name != "none" else x.dequantize().to(dtype)
        )
        assert torch.equal(y.dequantize(), expected)
        assert x.to(torch.float32) is x and x.cpu() is x
    with pytest.raises(errors.DtypeError, match="dequantize"):
        x.double()
    assert torch.equal(x.dequantize().double(), x.to(torch.float32).dequantize().double())
    assert type(x.int()) is Tensor
    meta = x.to("meta")
    assert (
        isinstance(meta, QuantizedKV) and meta.device.type == "meta" and meta.store[0].device.type == "meta"
    )


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "nvfp4"])
def test_modules_convert(name: str, mode: Any) -> None:
    module = Attention(name).fill()
    codes = planes_of(module.keys)
    with mode():
        module.bfloat16()
    assert isinstance(module.keys, QuantizedKV) and module.keys.dtype == torch.bfloat16
    if name != "none":
        assert same_planes(codes, planes_of(module.keys))
    with mode():
        module.half().float()
    assert module.keys.dtype == torch.float32 and isinstance(module.values, QuantizedKV)
    assert list(module.state_dict()) == ["weight", "keys", "values"]
    with pytest.raises(errors.DtypeError):
        module.double()


@pytest.mark.parametrize("name", EVERY)
def test_state_dict_round_trip(name: str) -> None:
    module = Attention(name).fill()
    state = through_torch(module.state_dict())
    fresh = Attention(name)
    address = [plane.data_ptr() for plane in fresh.keys.store]
    assert fresh.load_state_dict(state, strict=True) == ([], [])
    assert same_planes(planes_of(module.keys), planes_of(fresh.keys))
    assert fresh.keys.length.tolist() == [5, 5]
    assert address == [plane.data_ptr() for plane in fresh.keys.store], "loading works in place"
    assigned = Attention(name)
    assigned.load_state_dict(through_torch(module.state_dict()), assign=True)
    assert same_planes(planes_of(module.values), planes_of(assigned.values))


def test_state_dict_of_another_format_is_coded_anew() -> None:
    exact = Attention("none").fill()
    for name in EVERY:
        other = Attention(name)
        other.load_state_dict(exact.state_dict())
        assert other.keys.format.name == name and other.keys.length.tolist() == [5, 5]
        expected = QuantizedKV.from_dense(exact.keys.dequantize(), name)
        assert torch.equal(other.keys.dequantize(), expected.dequantize())
        # And back, without loss.
        back = Attention("none")
        back.load_state_dict(other.state_dict())
        assert torch.equal(back.keys.dequantize(), other.keys.dequantize())
    plain = {"weight": torch.ones(1), "keys": torch.randn(2, 2, 8, 4), "values": torch.randn(2, 2, 8, 4)}
    exact.load_state_dict(plain)
    assert torch.equal(exact.keys.dequantize(), plain["keys"]) and exact.keys.length.tolist() == [8, 8]


def test_state_dict_of_another_size_raises_and_changes_nothing() -> None:
    module = Attention("int8_per_token_head").fill()
    before = planes_of(module.keys)
    state = module.state_dict() | {"keys": QuantizedKV.empty((2, 2, 9, 4), "int8_per_token_head")}
    with pytest.raises(RuntimeError, match="size mismatch"):
        module.load_state_dict(state)
    assert same_planes(before, planes_of(module.keys))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("cut", ["whole", "tokens", "rows", "heads", "rows and tokens"])
def test_copy_between_caches_of_one_format(cut: str, name: str) -> None:
    """Codes are carried over; where a part would need other static scales, only that part is coded anew."""
    pick = {
        "whole": lambda x: x,
        "tokens": lambda x: x[:, :, 2:5],
        "rows": lambda x: x[1:],
        "heads": lambda x: x[:, 1:],
        "rows and tokens": lambda x: x[:2, :, ::3],
    }[cut]
    x, y = Pair(name).handle, Pair(name).handle
    old, new = x.dequantize(), y.dequantize()
    pick(x).copy_(pick(y))
    got = x.dequantize()
    assert torch.equal(pick(got), pick(new)) or (cut != "whole" and x.format.static_planes)
    assert (pick(got) - pick(new)).abs().max() <= (pick(new).abs().max() + pick(old).abs().max()) / 4
    pick(got).zero_()
    pick(old).zero_()
    assert torch.equal(got, old), "nothing outside of the part changed"


def test_copy_between_caches_of_other_kinds() -> None:
    x = Pair("int8_per_token_head").handle
    for y in (
        QuantizedKV.empty((3, 2, 8, 4), "int4_group32"),
        QuantizedKV.empty((3, 2, 8, 4), "none", dtype=torch.bfloat16),
        QuantizedKV.empty((3, 2, 8, 4), "int8_per_token_head", dtype=torch.float16),
    ):
        y.copy_(x)
        expected = QuantizedKV.from_dense(x.dequantize().to(y.dtype), y.format)
        if y.format == x.format:
            assert same_planes(planes_of(x)[:2], planes_of(y)[:2])
        else:
            assert torch.equal(y.dequantize(), expected.dequantize())
    wide = QuantizedKV.empty((3, 2, 8, 4), "int8_per_token_head")
    wide.copy_(x[:1])
    assert torch.equal(wide.dequantize(), x.dequantize()[:1].expand(3, 2, 8, 4))
    wide.zero_()
    wide.copy_(x[:, :, 3:4])
    assert torch.equal(wide.dequantize(), x.dequantize()[:, :, 3:4].expand(3, 2, 8, 4))
    assert wide.length.tolist() == [8] * 3
    # Two axes that happen to be as long: places count, not letters.
    square = QuantizedKV.from_dense(torch.randn(1, 4, 4, 4), "none")
    other = QuantizedKV.empty((1, 4, 4, 4), "none")
    other.copy_(square.transpose(1, 2))
    assert torch.equal(other.dequantize(), square.dequantize().transpose(1, 2))


def test_copy_of_overlapping_slices() -> None:
    pair = Pair("int8_per_token_head")
    pair.handle[:, :, 1:].copy_(pair.handle[:, :, :-1])
    pair.dense[:, :, 1:] = pair.dense[:, :, :-1].clone()
    pair.check()
    pair.handle.copy_(pair.handle)
    pair.check()


def test_flatten_and_unflatten_give_the_same_cache() -> None:
    x = Pair("nvfp4", "bthd").handle
    for handle in (x, x[:, 2:5], x.transpose(1, 2)):
        names, context = handle.__tensor_flatten__()
        hash(context)
        inner = {name: getattr(handle, name) for name in names}
        y = QuantizedKV.__tensor_unflatten__(inner, context, handle.shape, handle.stride())
        assert y.shape == handle.shape and y.stride() == handle.stride() and y.axes == handle.axes
        assert torch.equal(y.dequantize(), handle.dequantize()) and torch.equal(y.length, handle.length)


def test_bytes_planned_and_real() -> None:
    for name in EVERY:
        x = QuantizedKV.empty((2, 5, 16, 32), name, dtype=torch.float16, axes="bthd")
        fmt = get_format(name)
        planes = zip(fmt.plane_shapes(2, 16, 5, 32), fmt.plane_dtypes(torch.float16), strict=True)
        assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in planes) == x.nbytes
        assert dense_bytes(x) == 2 * 5 * 16 * 32 * 2
    assert storage_bytes([x, x[:, 1:], torch.zeros(3)]) == x.nbytes + 12
    assert storage_bytes([torch.empty(5, device="meta"), torch.empty(7, device="meta")]) == 48


def test_no_dense_copy_outlives_a_write() -> None:
    shape = (3, 2, 61, 4)
    x = QuantizedKV.empty(shape, "int8_per_token_head")
    x[:, :, :7] = torch.randn(3, 2, 7, 4)
    x.transpose(1, 2)[:, 9:11] = torch.randn(3, 2, 2, 4)
    (x @ x.mT).sum()
    assert not live_dense(x.numel())
    control = torch.zeros(shape)
    assert live_dense(x.numel()) == [control.shape], "the search must be able to find one"


def live_dense(numel: int) -> list[torch.Size]:
    gc.collect()
    plain = [t for t in gc.get_objects() if type(t) is Tensor]
    return [t.shape for t in plain if t.numel() == numel and t.is_floating_point()]


def test_stored_planes_that_are_wrong_are_refused() -> None:
    x = Pair("int8_per_token_head").handle
    rebuild, (store, name, axes, dtype, order) = x.__reduce_ex__(2)
    with pytest.raises(errors.CorruptStoreError):
        rebuild([store[0].float(), *store[1:]], name, axes, dtype, order)
    with pytest.raises(errors.CorruptStoreError):
        rebuild(store[:2], name, axes, dtype, order)
    with pytest.raises(errors.UnknownFormatError):
        rebuild(store, "int8_per_tokn", axes, dtype, order)
    with pytest.raises(errors.FormatError):
        rebuild(store, name, "bhtt", dtype, order)
    with pytest.raises(errors.CorruptStoreError):
        rebuild(store, name, axes, dtype, "bh")


def test_exchange_and_sharing_reach_no_memory_that_is_not_there() -> None:
    x = Pair("int8_per_token_head").handle
    for view in (x, x[:, :, 1:3], x.flatten(0, 1)):
        copied = torch.from_dlpack(view)
        assert type(copied) is Tensor and torch.equal(copied, view + 0)
        copied.zero_()
    assert x.dequantize().any()
    assert not x.is_shared()
    assert x.share_memory_() is x and x.is_shared() and all(plane.is_shared() for plane in x.store)
    assert Attention("nvfp4").share_memory().keys.is_shared()


def test_repr_and_names() -> None:
    x = QuantizedKV.empty((1, 2, 3, 4), "int4_group32", dtype=torch.bfloat16)
    assert (
        repr(x)
        == "QuantizedKV(int4_group32, shape=(1, 2, 3, 4), axes='bhtd', dtype=torch.bfloat16, device=cpu)"
    )
    assert str(x) == repr(x) == f"{x}"
