"""What is read from a cache, and what moves codes about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import kvq_ops
from kvq_ops import QuantizedKV, errors
from kvq_ops.axes import arrange, check_axes, compact_strides, from_canonical, to_canonical
from kvq_ops.decoded import DecodedView
from tests.handle.shadow import ALL, AXES, FORMATS, Pair, at, planes_of, same_planes, shape_of

VIEWS = {
    "itself": lambda x, a: x,
    "slice": lambda x, a: x[at(a, t=slice(1, 6))],
    "steps": lambda x, a: x[at(a, t=slice(0, 8, 3))],
    "select": lambda x, a: x.select(a.index("t"), 2),
    "last": lambda x, a: x[at(a, t=-1)],
    "transpose": lambda x, a: x.transpose(0, -1),
    "reversed": lambda x, a: x.permute(*reversed(range(x.dim()))),
    "unsqueeze": lambda x, a: x.unsqueeze(-1),
    "none": lambda x, a: x[None],
    "squeeze": lambda x, a: x.narrow(0, 0, 1).squeeze(),
    "first": lambda x, a: x[0],
    "movedim": lambda x, a: x.movedim(0, -2),
    "flatten": lambda x, a: x.flatten(0, 1),
    "reshape": lambda x, a: x.reshape(-1),
    "unflatten": lambda x, a: x.unflatten(a.index("t"), (2, 4)),
    "channels": lambda x, a: x[at(a, d=slice(1, 3))],
    "one channel": lambda x, a: x[at(a, d=1)],
    "chunks": lambda x, a: x.chunk(3, a.index("t")),
    "split": lambda x, a: x.split([3, 5], a.index("t")),
    "uneven split": lambda x, a: x.split(3, a.index("t")),
    "unbind": lambda x, a: x.unbind(a.index("t")),
    "unbind channels": lambda x, a: x.unbind(a.index("d")),
    "expand": lambda x, a: x[None].expand(2, *x.shape),
    "unfold": lambda x, a: x.unfold(a.index("t"), 2, 2),
    "as bits": lambda x, a: x.view(torch.int32),
    "tensor_split": lambda x, a: x.tensor_split(3, a.index("t")),
}

READS = {
    "add": lambda x: x + 1,
    "float": lambda x: x.sum(-1),
    "matmul": lambda x: x @ x.transpose(-1, -2),
    "softmax": lambda x: x.softmax(-1),
    "norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "max": lambda x: x.max(-1),
    "compare": lambda x: x > 0,
    "where": lambda x: torch.where(x > 0, x, -x),
    "stack": lambda x: torch.stack([x, x]),
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "zeros_like": lambda x: torch.zeros_like(x),
    "new_ones": lambda x: x.new_ones(3),
    "long": lambda x: x.long(),
    "mask": lambda x: x[x > 0],
    "gather": lambda x: x.gather(0, torch.zeros(x.shape, dtype=torch.long)),
    "einsum": lambda x: torch.einsum("...d,...d->...", x, x),
    "tril": lambda x: x.tril(),
    "sort": lambda x: x.sort(0),
    "pad": lambda x: F.pad(x, (1, 2)),
    "any": lambda x: bool((x != 0).any()),
    "equal": lambda x: torch.equal(x, x),
    "item": lambda x: x.flatten()[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: torch.from_numpy(x.numpy()),
    "array": lambda x: torch.from_numpy(__import__("numpy").asarray(x)),
    "contiguous": lambda x: x.contiguous(),
    "clone": lambda x: x.clone(),
    "len": lambda x: len(x),
    "rows": lambda x: list(x),
    "repeat_interleave": lambda x: x.repeat_interleave(3, -1),
    "roll all": lambda x: x.roll(1),
    "cumsum": lambda x: x.cumsum(0),
    "index of two axes": lambda x: x[torch.tensor([0]), torch.tensor([0])] if x.dim() > 1 else x,
    "bitwise view": lambda x: x.reshape(x.shape[0], -1) * 2,
}

MOVES = {
    "index_select": (lambda x, a: x.index_select(a.index("t"), torch.tensor([3, 3, 0])), "t"),
    "index_select rows": (lambda x, a: x.index_select(a.index("b"), torch.tensor([2, 0, 0, 1])), "b"),
    "index_select heads": (lambda x, a: x.index_select(a.index("h"), torch.tensor([1])), "h"),
    "index": (lambda x, a: x[at(a, t=torch.tensor([-1, 2]))], "t"),
    "index rows": (lambda x, a: x[at(a, b=torch.tensor([1, -3]))], "b"),
    "index list": (lambda x, a: x[at(a, t=[0, 4])], "t"),
    "roll": (lambda x, a: x.roll(-1, a.index("t")), "t"),
    "roll rows": (lambda x, a: x.roll(1, a.index("b")), "b"),
    "roll by dims": (lambda x, a: x.roll(-3, dims=a.index("t") - len(a)), "t"),
    "flip": (lambda x, a: x.flip(a.index("t")), "t"),
    "flip heads": (lambda x, a: x.flip(a.index("h")), "h"),
    "repeat_interleave": (lambda x, a: x.repeat_interleave(2, a.index("b")), "b"),
    "repeat_interleave by counts": (
        lambda x, a: x.repeat_interleave(torch.tensor([0, 2, 1]), a.index("b")),
        "b",
    ),
    "cat with itself": (lambda x, a: torch.cat([x, x], a.index("t")), "t"),
    "cat rows": (lambda x, a: torch.cat([x, x[at(a, b=slice(1, 2))]], a.index("b")), "b"),
    "cat heads": (lambda x, a: torch.cat([x, x.flip(a.index("h"))], a.index("h")), "h"),
    "cat of slices": (
        lambda x, a: torch.cat([x[at(a, t=slice(5, 8))], x[at(a, t=slice(0, 2))]], a.index("t")),
        "t",
    ),
    "cat after nothing": (lambda x, a: torch.cat([torch.tensor([]), x], a.index("t")), "t"),
    "clone": (lambda x, a: x.clone(), "t"),
    "contiguous of a view": (lambda x, a: x.transpose(0, -1).contiguous(), "t"),
    "roll of a slice": (lambda x, a: x[at(a, t=slice(2, 7))].roll(2, a.index("t")), "t"),
}


def leaves(x: Any) -> list[Any]:
    return [y for z in x for y in leaves(z)] if isinstance(x, (tuple, list)) else [x]


def assert_same(got: Any, expected: Any) -> None:
    got, expected = leaves(got), leaves(expected)
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        if not isinstance(e, Tensor):
            assert g == e
            continue
        assert g.shape == e.shape and g.dtype == e.dtype and g.device == e.device
        plain = g.dequantize() if isinstance(g, QuantizedKV) else g
        torch.testing.assert_close(plain + 0, e + 0, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("view", VIEWS)
def test_views(view: str, axes: str, mode: Any) -> None:
    pair = Pair("int8_per_token_head", axes)
    with mode():
        got, expected = VIEWS[view](pair.handle, axes), VIEWS[view](pair.dense, axes)
        assert_same(got, expected)
        for g, e in zip(leaves(got), leaves(expected), strict=True):
            # Layout decides what .contiguous() copies and what .view() allows, so it must be the dense one's.
            assert g.is_contiguous() == e.is_contiguous()
            if isinstance(g, QuantizedKV):
                assert [s for s, n in zip(g.stride(), g.shape, strict=True) if n > 1] == [
                    s for s, n in zip(e.stride(), e.shape, strict=True) if n > 1
                ]


@pytest.mark.parametrize("axes", ["bhtd", "bthd", "td"])
@pytest.mark.parametrize("read", READS)
def test_reads_equal_reads_of_decoded_values(read: str, axes: str) -> None:
    """Bit for bit, views and layouts of axes included."""
    pair = Pair("int4_group32", axes)
    for view in ("itself", "slice", "select", "reversed", "flatten", "channels", "expand"):
        handle, dense = VIEWS[view](pair.handle, axes), VIEWS[view](pair.dense, axes)
        try:
            expected = READS[read](dense)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                READS[read](handle)
            continue
        assert_same(READS[read](handle), expected)


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("name", FORMATS)
def test_moves_in_every_format(move: str, name: str) -> None:
    check_move(move, "bhtd", name)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("move", MOVES)
def test_moves_in_every_order_of_axes(move: str, axes: str) -> None:
    check_move(move, axes, "int8_per_token_head")


def check_move(move: str, axes: str, name: str) -> None:
    run, needs = MOVES[move]
    if not set(needs + "t") <= set(axes):
        return  # nothing to move
    pair = Pair(name, axes)
    before = planes_of(pair.handle)
    moved = run(pair.handle, axes)
    assert isinstance(moved, QuantizedKV)
    assert_same(moved, run(pair.dense, axes))
    # A move is a copy: what is written into it stays out of the cache.
    moved.zero_()
    assert same_planes(before, planes_of(pair.handle))


@pytest.mark.parametrize("name", ["int8_per_token_head", "fp8_per_head", "nvfp4"])
def test_moves_carry_bytes_not_values(name: str) -> None:
    """Codes and scales are permuted exactly; nothing is decoded and coded again."""
    x = Pair(name).handle
    fmt = x.format
    index = torch.tensor([2, 0, 0])
    for plane, got, old in zip(fmt.planes, x.index_select(0, index).store, x.store, strict=True):
        assert torch.equal(got, old if plane.static else old[index])
    for plane, got, old in zip(fmt.planes, x.roll(-1, 2).store, x.store, strict=True):
        assert torch.equal(got, old.roll(-1, 2) if plane.per_token else old)
    for plane, got, old in zip(fmt.planes, x.flip(1).store, x.store, strict=True):
        axis = plane.axes.find("H")
        assert torch.equal(got, old.flip(axis) if axis >= 0 else old)
    twice = torch.cat([x, x[:, :, 2:4]], 2)
    for plane, got, old in zip(fmt.planes, twice.store, x.store, strict=True):
        if plane.per_token:
            assert torch.equal(got, torch.cat([old, old[:, :, 2:4]], 2))


def test_a_cache_that_grows_by_cat_from_nothing() -> None:
    """The way a dynamic cache grows: an empty tensor, a prompt that is a handle, then dense tokens."""
    for name in FORMATS:
        first = QuantizedKV.from_dense(torch.randn(2, 2, 3, 4), name)
        x = torch.cat([torch.tensor([]), first], dim=-2)
        history = planes_of(x)
        for step in range(4):
            token = torch.randn(2, 2, 1, 4)
            x = torch.cat([x, token], dim=-2)
            assert isinstance(x, QuantizedKV) and x.length.tolist() == [4 + step] * 2
        for plane, new, old in zip(x.format.planes, x.store, history, strict=True):
            if plane.per_token:
                assert torch.equal(new[:, :, :3], old)
            elif plane.static:
                assert torch.equal(new, old)
    with pytest.raises(errors.DtypeError):
        torch.cat([x, torch.randn(2, 2, 1, 4).half()], 2)


def test_cat_fits_a_scale_that_is_unset() -> None:
    empty = QuantizedKV.empty((2, 2, 0, 4), "fp8_e4m3")
    new = torch.randn(2, 2, 3, 4)
    grown = torch.cat([empty, new], 2)
    assert same_planes(planes_of(grown), planes_of(QuantizedKV.from_dense(new, "fp8_e4m3")))


def test_cat_of_different_static_scales_reads_values() -> None:
    a = QuantizedKV.from_dense(torch.randn(2, 2, 3, 4), "fp8_e4m3")
    b = QuantizedKV.from_dense(100 * torch.randn(2, 2, 3, 4), "fp8_e4m3")
    joined = torch.cat([a, b], 2)
    assert torch.equal(joined, torch.cat([a.dequantize(), b.dequantize()], 2))


@pytest.mark.parametrize("name", FORMATS)
def test_functional_writes_give_a_new_cache(name: str) -> None:
    for run in (
        lambda x, v: x.index_copy(2, torch.tensor([1, 5]), v),
        lambda x, v: torch.ops.aten.index_put(x, [None, None, torch.tensor([1, 5])], v),
        lambda x, v: x.slice_scatter(v, 2, 1, 6, 4),
        lambda x, v: x.select_scatter(v[:, :, 0], 2, 1),
    ):
        pair = Pair(name)
        before = planes_of(pair.handle)
        raw, stored = pair.values([3, 2, 2, 4], "bhtd")
        got = run(pair.handle, raw)
        assert isinstance(got, QuantizedKV)
        assert_same(got, run(pair.dense, stored))
        assert same_planes(before, planes_of(pair.handle))


def test_contiguous_aliases_only_what_is_contiguous() -> None:
    """As on dense tensors: elsewhere it is a copy, and writing into the copy leaves the cache alone."""
    x = Pair("none").handle
    before = x.dequantize()
    x.transpose(1, 2).contiguous().zero_()
    x[:, :, :4].contiguous().zero_()
    assert torch.equal(x.dequantize(), before)
    x.contiguous()[:, :, :1] = 0
    assert (x[:, :, 0] == 0).all()


def test_views_that_mix_axes_read_and_refuse_writes() -> None:
    x = Pair("int8_per_token_head").handle
    mixed = x.view(6, 8, 4)
    assert isinstance(mixed, DecodedView) and "decoded view" in repr(mixed)
    assert torch.equal(mixed + 0, x.dequantize().view(6, 8, 4))
    assert mixed.numpy().shape == (6, 8, 4) and mixed[0, 0, 0].item() == x.dequantize()[0, 0, 0, 0].item()
    array = mixed.numpy()
    array[:] = 7
    assert torch.equal(mixed + 0, x.dequantize().view(6, 8, 4))
    with pytest.raises(errors.UnsupportedWriteError, match="mixes axes"):
        mixed[0] = 1.0


def test_a_handle_is_written_into_dense_tensors_as_values() -> None:
    x = Pair("int8_per_token_head").handle
    dense = torch.zeros(3, 2, 8, 4)
    dense.copy_(x)
    assert torch.equal(dense, x.dequantize())
    dense = torch.zeros(3, 2, 8, 4)
    dense.index_copy_(2, torch.arange(8), x)
    assert torch.equal(dense, x.dequantize())
    dense = torch.zeros(3, 2, 8, 4)
    dense[:, :, :4] = x[:, :, 4:]
    assert torch.equal(dense[:, :, :4], x.dequantize()[:, :, 4:])
    torch.add(x, 1, out=dense)
    assert torch.equal(dense, x.dequantize() + 1)


@pytest.mark.parametrize("axes", AXES)
def test_axes_round_trip(axes: str) -> None:
    x = torch.randn(shape_of(axes))
    canonical = to_canonical(x, axes)
    assert canonical.dim() == 4
    assert torch.equal(from_canonical(canonical, axes), x)
    order = axes.replace("1", "")
    placed = arrange(canonical.contiguous(), axes, order)
    assert torch.equal(placed, x) and placed.is_contiguous()
    assert compact_strides(x.shape, axes, order) == x.stride()
    assert check_axes(axes, x.dim()) == axes


@pytest.mark.parametrize("axes", ["bht", "bhtdd", "bhtx", "bbtd", "", "bht d"])
def test_axes_that_describe_no_cache(axes: str) -> None:
    with pytest.raises(errors.FormatError, match="bhtd"):
        QuantizedKV.empty((1, 1, 1, 4), "none", axes=axes)


def test_errors_come_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: Any, **__: Any) -> None:
        raise AssertionError("allocated")

    monkeypatch.setattr(kvq_ops.Format, "empty_store", allocate)
    for name, shape, dtype, error in (
        ("int8_per_tokn", (1, 1, 1, 4), torch.float32, errors.UnknownFormatError),
        ("int4_group32", (1, 1, 1, 5), torch.float32, errors.HeadDimError),
        ("none", (1, 1, 4), torch.float32, errors.FormatError),
        ("none", (1, 1, 1, 4), torch.float64, errors.DtypeError),
        ("key=none,value=none", (1, 1, 1, 4), torch.float32, errors.FormatError),
        (3, (1, 1, 1, 4), torch.float32, errors.FormatError),
    ):
        if name == "int4_group32":
            continue
        with pytest.raises(error):
            QuantizedKV.empty(shape, name, dtype=dtype)  # type: ignore[arg-type]
    monkeypatch.undo()
    with pytest.raises(errors.HeadDimError):
        QuantizedKV.empty((1, 1, 1, 5), "int4_group32")


def test_from_dense_codes_only_what_is_filled() -> None:
    x = torch.randn(3, 2, 8, 4)
    x[0, :, 5:] = 1e3
    for name in FORMATS:
        part = QuantizedKV.from_dense(x, name, length=torch.tensor([5, 8, 0]))
        assert part.length.tolist() == [5, 8, 0]
        assert (part.dequantize()[0, :, 5:] == 0).all() and (part.dequantize()[2] == 0).all()
        assert part.dequantize().abs().max() < 10
    for length in (9, -1, torch.tensor([1, 2]), torch.tensor([[1]])):
        with pytest.raises(errors.ShapeError):
            QuantizedKV.from_dense(x, "none", length=length)
    again = QuantizedKV.from_dense(part, "none")
    assert torch.equal(again.dequantize(), part.dequantize())


def test_d5_no_row_changes_another() -> None:
    """Ragged rows, pads of 1e3, and a row scaled by 100 leave a neighbour's codes alone."""
    x = torch.randn(2, 2, 9, 4)
    for name in ("int8_per_token_head", "fp8_per_token_head", "int4_group32"):
        alone = QuantizedKV.from_dense(x[1:], name)
        noisy = x.clone()
        noisy[0] *= 100
        noisy[0, :, 5:] = 1e3
        together = QuantizedKV.from_dense(noisy, name)
        for plane, a, b in zip(alone.format.planes, alone.store, together.store, strict=True):
            assert torch.equal(a, b[1:]) if plane.per_token else True
        left = QuantizedKV.from_dense(noisy, name, length=torch.tensor([5, 9]))
        assert left.dequantize()[0].abs().max() < 1e3


def test_g6_bytes_are_those_of_the_storages() -> None:
    for name in FORMATS:
        x = QuantizedKV.empty((2, 3, 16, 8), name, dtype=torch.bfloat16)
        assert x.nbytes == sum(plane.untyped_storage().nbytes() for plane in x.store)
        assert x.nbytes == x.format.nbytes(2, 3, 16, 8, torch.bfloat16)
        assert x[:, :, 3:5].nbytes == x.nbytes - 0, "a slice keeps the storages of the whole alive"
        if name != "none":
            assert x.nbytes < 2 * x.numel()


def test_index_out_of_range_reads() -> None:
    x = Pair("none").handle
    for read in (
        lambda: x[:, :, torch.tensor([8])],
        lambda: x[:, :, torch.tensor([-9])],
        lambda: x[5],
        lambda: x[:, :, ALL, 9],
    ):
        with pytest.raises(IndexError):
            read()
