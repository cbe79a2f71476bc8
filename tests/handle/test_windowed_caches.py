"""Whole caches whose newest and first tokens are exact: copied, cropped, saved, planned, and stacked."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from kvq_ops import QuantizedKV, cache, errors, window
from kvq_ops.axes import from_canonical
from kvq_ops.formats import get_format
from kvq_ops.handle import storage_bytes
from kvq_ops.stacked import StackedKV
from tests.handle.shadow import planes_of, same_planes
from tests.handle.windowed import NAMES, B, D, H, T, empty, exact, filled, text
from tests.ops.windows import check

# -------------------------------------------------------------------------------------------------------------- wholes


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_whole_caches(name: str) -> None:
    source = filled(name, 19)
    source[1:2, :, 19:25] = text()[1:2, :, 19:25]
    for target in (empty(name), filled(name, T, seed=1), source.clone()):
        target.copy_(source)
        assert same_planes(planes_of(target), planes_of(source))
    one = filled(name, 11)[:1]
    target = filled(name, T, seed=1)
    target.copy_(one)
    assert torch.equal(target.dequantize(), one.dequantize().expand(B, -1, -1, -1))
    assert target.length.tolist() == [11] * B
    x = text()
    target.copy_(x)
    exact(target, [T] * B, "from a dense tensor")
    if not target.format.static_planes:
        other = QuantizedKV.from_dense(x, "none", length=torch.tensor([3, T, 12]))
        target.copy_(other)
        exact(target, [3, T, 12], "from a cache of another format")
    target[1:].copy_(source[1:])
    assert target.length.tolist()[1:] == source.length.tolist()[1:]
    assert torch.equal(target.dequantize()[1:], source.dequantize()[1:])
    back = QuantizedKV.empty(x.shape, "none")
    back.copy_(source)
    assert (
        torch.equal(back.dequantize(), source.dequantize()) and back.length.tolist() == source.length.tolist()
    )


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_another_cache(name: str) -> None:
    source, target = filled(name, 19, seed=1)[:2], filled(name, 8)
    kept = target.dequantize()[1]
    target.index_copy_(0, torch.tensor([2, 0]), source)
    assert target.length.tolist() == [19, 8, 19]
    got = target.dequantize()
    assert torch.equal(got[1], kept) and torch.equal(got[[2, 0]], source.dequantize())
    rows = text()[:2]
    target.index_copy_(0, torch.tensor([0, 2]), rows)
    target[1] = text()[1]
    assert target.length.tolist() == [T] * B
    for row, x in ((0, rows[0]), (1, text()[1]), (2, rows[1])):
        if not target.format.static_planes:
            check(target[row : row + 1].store, name, x.unsqueeze(0), [T], f"row {row}")


@pytest.mark.parametrize("name", NAMES)
def test_zeroing(name: str) -> None:
    handle = filled(name, 21)
    handle[1].zero_()
    assert handle.length.tolist() == [21, 0, 21] and not handle.dequantize()[1].any()
    handle[:, 1:].zero_()
    assert not handle.dequantize()[:, 1:].any() and handle.dequantize()[0, 0].any()
    handle.zero_()
    assert not any(plane.any() for plane in handle.store)
    handle.fill_(0)
    handle[:, :, :21] = text()[:, :, :21]
    exact(handle, [21] * B, "filled again")


@pytest.mark.parametrize("name", NAMES)
def test_from_dense_takes_the_filled_tokens_of_each_row(name: str) -> None:
    x = text()
    for length in (None, 0, 13, T, torch.tensor([0, 13, T]), torch.tensor([9, 1, 8], dtype=torch.int32)):
        for axes in ("bhtd", "bthd"):
            handle = QuantizedKV.from_dense(from_canonical(x, axes), name, axes=axes, length=length)
            lengths = torch.as_tensor(T if length is None else length).expand(B).tolist()
            assert handle.length.tolist() == lengths
            if not handle.format.static_planes:
                check(handle.store, name, x, lengths, f"length {length}")


# --------------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("name", NAMES)
def test_d1_crop_reorder_and_repeat(name: str) -> None:
    handle = filled(name, 26)
    dense = handle.dequantize()
    group = handle.format.token_group
    coded = int(handle.plane_coded[0])
    lengths = [26, 13, 3]
    assert cache.crop_(handle, torch.tensor(lengths)) is handle
    assert handle.length.tolist() == lengths
    assert handle.plane_coded.tolist() == [min(coded, n // group * group) for n in lengths]
    got = handle.dequantize()
    for row, n in enumerate(lengths):
        assert torch.equal(got[row, :, :n], dense[row, :, :n]) and not got[row, :, n:].any()
    cache.crop_(handle, 29)
    assert handle.length.tolist() == lengths, "rows that are shorter stay"
    for index in ([2, 0, 0], [1], [0, 0, 1, 1]):
        moved = cache.reorder(handle, index)
        assert moved.length.tolist() == [lengths[i] for i in index]
        assert torch.equal(moved.dequantize(), got[index])
        for plane, new, old in zip(handle.format.planes, moved.store, handle.store, strict=True):
            assert torch.equal(new, old if plane.static else old[index])
    cache.crop_(handle, 0)
    assert not handle.dequantize().any()
    with pytest.raises(errors.UnsupportedWriteError):
        cache.crop_(filled(name)[:, :1], 3)


@pytest.mark.parametrize("name", NAMES)
def test_d1_a_draft_that_is_rejected(name: str) -> None:
    """Draft five, reject three: as if only two had come, but for what the draft made old."""
    for kept in range(1, 20):
        drafted, never, x = filled(name, kept), filled(name, kept), text()
        other = torch.randn(B, H, 3, D)
        drafted[:, :, kept : kept + 5] = torch.cat([x[:, :, kept : kept + 2], other], 2)
        flushed = int(drafted.plane_coded[0])
        cache.crop_(drafted, kept + 2)
        for handle in (drafted, never):
            start = int(handle.length[0])
            handle[:, :, start : kept + 4] = x[:, :, start : kept + 4]
        if flushed == int(filled(name, kept + 2).plane_coded[0]):
            assert torch.equal(drafted.dequantize(), never.dequantize()), kept
            exact(drafted, [kept + 4] * B)
        else:
            step = (never.dequantize() - x).abs().amax() + 0.5
            assert (drafted.dequantize() - never.dequantize()).abs().amax() <= 2 * step


@pytest.mark.parametrize("name", NAMES)
def test_grow_and_go_on(name: str) -> None:
    handle, x = filled(name, 11, capacity=13), text()
    grown = cache.grow(handle, T)
    assert grown.length.tolist() == [11] * B and torch.equal(
        grown.dequantize()[:, :, :13], handle.dequantize()
    )
    grown[:, :, 11:] = x[:, :, 11:]
    exact(grown, [T] * B)
    assert handle.length.tolist() == [11] * B
    assert same_planes(planes_of(cache.grow(handle, 13)), planes_of(handle))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_files_and_copies(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    x = text().to(dtype)
    handle = QuantizedKV.from_dense(x[:, :, :21], name, length=torch.tensor([21, 4, 17]))
    turned = handle.transpose(1, 2)
    cache.save([handle, turned, handle[1:]], tmp_path / "caches")
    a, b, c = cache.load(tmp_path / "caches")
    assert (
        same_planes(planes_of(a), planes_of(handle))
        and torch.equal(b + 0, turned + 0)
        and torch.equal(c + 0, handle[1:] + 0)
    )
    buffer = io.BytesIO()
    torch.save(handle, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(handle),
        copy.copy(handle),
        pickle.loads(pickle.dumps(handle)),
        torch.load(buffer, weights_only=True),
    ):
        assert same_planes(planes_of(other), planes_of(handle)) and other.format == handle.format

    module = nn.Module()
    module.register_buffer("keys", handle)
    twin = copy.deepcopy(module)
    twin.keys.zero_()
    assert handle.dequantize().any()
    twin.load_state_dict(module.state_dict())
    assert same_planes(planes_of(twin.keys), planes_of(handle))
    half = handle.to(torch.float16)
    assert half.store[half.format.index("recent")].dtype == torch.float16 and half.dtype == torch.float16
    assert (half + 0).isfinite().all() and torch.allclose(
        (half + 0).float(), (handle + 0).float(), rtol=2**-7, atol=1e-3
    )


def test_damaged_counts_are_noticed(tmp_path: Path) -> None:
    name = "test_keys_g8r8"
    for value in (-8, 12, 24, 4):
        handle = filled(name, 20)
        handle.plane_coded[1] = value
        cache.save([handle], tmp_path / "caches")
        with pytest.raises(errors.CorruptStoreError, match="header"):
            cache.load(tmp_path / "caches")
    handle = filled(name, 20)
    cache.save([handle], tmp_path / "caches")
    content = torch.load(tmp_path / "caches", weights_only=True)
    content["caches"][0]["store"][handle.format.index("recent")] = handle.plane_recent.half()
    torch.save(content, tmp_path / "caches")
    with pytest.raises(errors.CorruptStoreError, match="float16"):
        cache.load(tmp_path / "caches")


@pytest.mark.parametrize(
    "name", (*NAMES, "kivi4_keys", "kivi2_values", "int8_per_channel", "mxfp4+outlier1%")
)
def test_planned_bytes_are_real(name: str) -> None:
    fmt = get_format(name)
    for shape in ((1, 1, 1, 64), (2, 3, 45, 32), (1, 2, 0, 16), (0, 2, 9, 16)):
        for dtype in (torch.float32, torch.float16):
            handle = QuantizedKV.empty(shape, name, dtype=dtype)
            real = sum(plane.untyped_storage().nbytes() for plane in handle.store)
            assert fmt.nbytes(*shape, dtype) == handle.nbytes == storage_bytes([handle]) == real
    if fmt.windowed:
        exact_bytes = (fmt.window + fmt.sinks) * 2 * 16 * 4
        assert fmt.nbytes(1, 2, 64, 16) >= exact_bytes


# -------------------------------------------------------------------------------------------------------------- stacks


def test_caches_of_a_stack_are_windows_of_their_own() -> None:
    formats = (
        "test_keys_g8r8",
        "int4_group32+outlier5%+recent2",
        "none",
        "int8_per_token_head+recent8+sink4",
    )
    stack = StackedKV.empty((2, 2, B, H, T, D), formats, axes="llbhtd")
    x = torch.stack([text(seed=i) for i in range(4)]).view(2, 2, B, H, T, D)
    for t in range(24):
        stack[0, 0, :, :, t] = x[0, 0, :, :, t]
        stack[0][1][:, :, t : t + 1] = x[0, 1, :, :, t : t + 1]
        stack[1].index_copy_(3, torch.tensor([t]), x[1, :, :, :, t : t + 1])
    for i, name in enumerate(formats):
        part = stack[i // 2, i % 2]
        assert isinstance(part, QuantizedKV) and part.length.tolist() == [24] * B
        if get_format(name).windowed:
            check(part.store, name, x[i // 2, i % 2], [24] * B, f"part {i}")
    assert torch.equal(stack[:, :, :, :, 5:9] + 0, stack.dequantize()[:, :, :, :, 5:9])
    with pytest.raises(errors.UnsupportedWriteError):
        stack[:, :, :, :, 24] = x[:, :, :, :, 24]
    moved = stack.index_select(2, torch.tensor([2, 2]))
    assert torch.equal(moved + 0, stack.dequantize()[:, :, [2, 2]])
    twin = copy.deepcopy(stack)
    twin.zero_()
    assert not (twin + 0).any() and (stack + 0).any()
    dense = StackedKV.from_dense(x, formats, axes="llbhtd", length=11)
    assert all(part.length.tolist() == [11] * B for part in dense.parts)
    assert window.decode_window(dense.parts[0].store, get_format(formats[0])).shape == (B, H, T, D)
