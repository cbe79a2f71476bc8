"""Crop, reorder, grow, save and load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_ops import QuantizedKV, cache, errors
from tests.handle.shadow import FORMATS, Pair, planes_of, same_planes

EVERY = (*FORMATS, "fp8_per_head", "fp8_e5m2", "int2_group32", "int4_per_token_head+outlier10%")


def filled(name: str, tokens: int, seed: int = 0, **kwargs: Any) -> QuantizedKV:
    """Three rows of the same random tokens, whatever their number."""
    x = torch.randn((3, 2, 11, 4), generator=torch.Generator().manual_seed(seed))
    handle = QuantizedKV.empty((3, 2, 11, 4), name, **kwargs)
    for t in range(tokens):
        handle[:, :, t : t + 1] = x[:, :, t : t + 1]
    return handle


@pytest.mark.parametrize("name", EVERY)
def test_d1_rollback_equals_never_drafted(name: str) -> None:
    """Draft five tokens, reject three: the cache is byte for byte the one that saw only two."""
    drafted = cache.crop_(filled(name, 11), 8)
    assert same_planes(planes_of(drafted), planes_of(filled(name, 8)))
    assert drafted.length.tolist() == [8, 8, 8]
    token = torch.randn(3, 2, 1, 4)
    again, never = filled(name, 11), filled(name, 8)
    cache.crop_(again, 8)
    again.index_copy_(2, torch.tensor([8]), token)
    never.index_copy_(2, torch.tensor([8]), token)
    assert same_planes(planes_of(again), planes_of(never))


@pytest.mark.parametrize("name", EVERY)
def test_d1_crop_of_each_row(name: str) -> None:
    x = filled(name, 9)
    before = x.dequantize()
    cache.crop_(x, torch.tensor([4, 11, 0]))
    assert x.length.tolist() == [4, 9, 0]
    after = x.dequantize()
    assert torch.equal(after[0, :, :4], before[0, :, :4]) and not after[0, :, 4:].any()
    assert torch.equal(after[1], before[1]) and not after[2].any()
    cache.crop_(x[1:2], 3)
    assert x.length.tolist() == [4, 3, 0] and not x.dequantize()[1, :, 3:].any()


@pytest.mark.parametrize("name", EVERY)
def test_d1_reorder_select_repeat(name: str) -> None:
    x = filled(name, 9)
    x[torch.tensor([1]), :, torch.tensor([10])] = torch.randn(1, 2, 4)
    for index in ([2, 0, 0], [1], [0, 0, 1, 1, 2, 2], []):
        moved = cache.reorder(x, index)
        assert moved.length.tolist() == x.length[index].tolist() if index else moved.shape[0] == 0
        for plane, new, old in zip(x.format.planes, moved.store, x.store, strict=True):
            assert torch.equal(new, old if plane.static else old[index])
        selected = x.index_select(0, torch.tensor(index, dtype=torch.long))
        assert same_planes(planes_of(moved), planes_of(selected))
    moved = cache.reorder(x, torch.tensor([2, 1, 0]))
    moved.zero_()
    assert x.dequantize().any()


@pytest.mark.parametrize("name", EVERY)
def test_grow_keeps_codes(name: str) -> None:
    x = filled(name, 9)
    grown = cache.grow(x, 20)
    assert grown.shape == (3, 2, 20, 4) and grown.length.tolist() == [9] * 3
    assert torch.equal(grown.dequantize()[:, :, :11], x.dequantize())
    assert same_planes(planes_of(cache.grow(x, 11)), planes_of(x))
    grown.index_copy_(2, torch.tensor([19]), torch.randn(3, 2, 1, 4))
    assert x.length.tolist() == [9] * 3
    turned = cache.grow(x.transpose(1, 2), 16)
    assert turned.shape == (3, 16, 2, 4) and not turned.is_contiguous()


def test_wrong_arguments_change_nothing() -> None:
    x = filled("int8_per_token_head", 9)
    before = planes_of(x)
    for call, error in (
        (lambda: cache.crop_(x, 12), errors.CapacityError),
        (lambda: cache.crop_(x, -1), errors.CapacityError),
        (lambda: cache.crop_(x, torch.tensor([1, 2])), errors.ShapeError),
        (lambda: cache.crop_(x, 1.5), errors.ShapeError),
        (lambda: cache.crop_(x[:, :, 1:], 1), errors.UnsupportedWriteError),
        (lambda: cache.crop_(x[:, 1:], 1), errors.UnsupportedWriteError),
        (lambda: cache.reorder(x, [3]), errors.CapacityError),
        (lambda: cache.reorder(x, [-1]), errors.CapacityError),
        (lambda: cache.reorder(x, torch.tensor([[0]])), errors.ShapeError),
        (lambda: cache.reorder(x, torch.tensor([0.0])), errors.ShapeError),
        (lambda: cache.grow(x, 10), errors.CapacityError),
        (lambda: cache.grow(x, 12.0), errors.CapacityError),
    ):
        with pytest.raises(error, match="got:"):
            call()
    assert same_planes(before, planes_of(x))


# ------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_every_format(tmp_path: Path, dtype: torch.dtype) -> None:
    handles = [
        filled(name, 7, dtype=dtype)
        if dtype == torch.float32
        else QuantizedKV.from_dense(torch.randn(2, 3, 5, 4).to(dtype), name, axes="bthd")
        for name in EVERY
    ]
    path = tmp_path / "cache.kvq"
    cache.save(handles, path)
    loaded = cache.load(path)
    assert len(loaded) == len(handles)
    for a, b in zip(handles, loaded, strict=True):
        assert same_planes(planes_of(a), planes_of(b))
        assert (a.format, a.axes, a.order, a.dtype, a.stride()) == (
            b.format,
            b.axes,
            b.order,
            b.dtype,
            b.stride(),
        )
        b.zero_()
    assert os.listdir(tmp_path) == ["cache.kvq"]
    cache.save([], path)
    assert cache.load(path) == []


def test_save_of_a_slice_is_small(tmp_path: Path) -> None:
    x = QuantizedKV.empty((1, 1, 4096, 32), "none")
    cache.save([x[:, :, 8:10]], tmp_path / "part")
    assert (tmp_path / "part").stat().st_size < 8192
    assert cache.load(tmp_path / "part")[0].shape == (1, 1, 2, 32)


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cache.kvq"
    x = filled("nvfp4", 5)
    cache.save([x], path)
    content = path.read_bytes()

    def torn(value: Any, file: Any) -> None:
        file.write(b"half a file")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="no space left"):
        cache.save([x], path)
    with pytest.raises(errors.CorruptStoreError):
        cache.save([torch.zeros(3)], path)  # type: ignore[list-item]
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["cache.kvq"]


def _damage(change: Any) -> Any:
    def write(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)

    return write


def _flip_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[:64] = bytes(64)
    path.write_bytes(bytes(content))


DAMAGE = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one byte short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a cache\n" * 40),
    "overwritten header": _flip_bytes,
    "another object": lambda path: torch.save({"weight": torch.ones(3)}, path),
    "a list": lambda path: torch.save([1, 2], path),
    "version": _damage(lambda c: c.update(version=99)),
    "unknown format": _damage(lambda c: c["caches"][0].update(format="int7_per_tokn")),
    "another format": _damage(lambda c: c["caches"][0].update(format="int4_group32")),
    "missing plane": _damage(lambda c: c["caches"][0]["store"].pop()),
    "missing field": _damage(lambda c: c["caches"][0].pop("axes")),
    "wrong plane": _damage(lambda c: c["caches"][0]["store"].__setitem__(1, torch.ones(1))),
    "wrong length": _damage(lambda c: c["caches"][0]["store"].__setitem__(-1, torch.tensor([12, 0, 0]))),
    "wrong axes": _damage(lambda c: c["caches"][0].update(axes="bhd")),
    "wrong order": _damage(lambda c: c["caches"][0].update(order="bhtdd")),
    "wrong dtype": _damage(lambda c: c["caches"][0].update(dtype="int8")),
    "no such dtype": _damage(lambda c: c["caches"][0].update(dtype="float7")),
    "dtype of another type": _damage(lambda c: c["caches"][0].update(dtype=3)),
    "store of another type": _damage(lambda c: c["caches"][0].update(store=[1, 2, 3])),
    "caches of another type": _damage(lambda c: c.update(caches=3)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_give_one_clear_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.kvq"
    x = filled("int8_per_token_head", 5)
    before = planes_of(x)
    cache.save([x], path)
    DAMAGE[damage](path)
    with pytest.raises(errors.CorruptStoreError, match=r"cache\.kvq[\s\S]*got: ") as raised:
        cache.load(path)
    assert "weights_only" not in str(raised.value)
    assert same_planes(before, planes_of(x))


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "owned"),)

    path = tmp_path / "evil"
    torch.save({"kind": "kvq.cache", "version": 1, "caches": [Evil()]}, path)
    with pytest.raises(errors.CorruptStoreError):
        cache.load(path)
    assert not (tmp_path / "owned").exists()


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cache.load(tmp_path / "nothing")


def test_pair_is_what_it_says() -> None:
    """The shadow itself must notice a difference."""
    pair = Pair("int8_per_token_head")
    pair.dense[0, 0, 0, 0] += 1
    with pytest.raises(AssertionError):
        pair.check()
