"""Caches whose newest and first tokens are exact: they grow at their end, and are never wrong elsewhere."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvq_ops
from kvq_ops import QuantizedKV, cache, errors, window
from kvq_ops.axes import dense_shape, from_canonical, to_canonical
from kvq_ops.formats import get_format
from kvq_ops.handle import planned_bytes, storage_bytes
from kvq_ops.stacked import StackedKV
from tests.handle.shadow import at, planes_of, same_planes
from tests.ops.windows import check

NAMES = (
    "test_keys_g8r8",
    "test_keys_g8r5s3",
    "int8_per_token_head+recent8+sink4",
    "int4_group32+outlier5%+recent2",
    "nvfp4+sink2",
)
AXES = ("bhtd", "bthd", "bhdt", "htd", "thbd")
B, H, T, D = 3, 2, 29, 16


def text(axes: str = "bhtd", tokens: int = T, seed: int = 0) -> Tensor:
    """Random tokens; those of one seed start alike whatever their number."""
    batch = B if "b" in axes else 1
    x = torch.randn((T, batch, H, D), generator=torch.Generator().manual_seed(seed))[:tokens]
    return from_canonical(x.permute(1, 2, 0, 3).contiguous(), axes)


def empty(name: str, axes: str = "bhtd", tokens: int = T) -> QuantizedKV:
    batch = B if "b" in axes else 1
    handle = QuantizedKV.empty(dense_shape((batch, H, tokens, D), axes), name, axes=axes)
    for i in handle.format.static_planes:
        handle.store[i].fill_(0.003)
    return handle


def filled(name: str, tokens: int = T, axes: str = "bhtd", capacity: int = T, seed: int = 0) -> QuantizedKV:
    handle = empty(name, axes, capacity)
    x = to_canonical(text(axes, tokens, seed), axes)
    kvq_ops.append_(handle.store, torch.arange(tokens), x, name)
    return handle


def exact(handle: QuantizedKV, lengths: list[int], context: str = "", seed: int = 0) -> None:
    """What was written is held as the oracle says; scales that span tokens are compared by another test."""
    if not handle.format.static_planes:
        check(handle.store, handle.format.name, text(seed=seed), lengths, context)


# ------------------------------------------------------------------------------------------------------------- appends

Write = Callable[[Any, str, int, Tensor], Any]


def _put(index: Callable[[int], Any], squeeze: bool = False) -> Write:
    def write(x: Any, axes: str, t: int, v: Tensor) -> None:
        x[at(axes, t=index(t))] = v.squeeze(axes.index("t")) if squeeze else v

    return write


APPENDS: dict[str, Write] = {
    "index_copy_": lambda x, a, t, v: x.index_copy_(a.index("t"), torch.tensor([t]), v),
    "int": _put(lambda t: t, squeeze=True),
    "negative int": _put(lambda t: t - T, squeeze=True),
    "slice": _put(lambda t: slice(t, t + 1)),
    "tensor": _put(lambda t: torch.tensor([t])),
    "0-D tensor": _put(lambda t: torch.tensor(t), squeeze=True),
    "list": _put(lambda t: [t]),
    "mask": _put(lambda t: torch.arange(T) == t),
    "narrow": lambda x, a, t, v: x.narrow(a.index("t"), t, 1).copy_(v),
    "select": lambda x, a, t, v: x.select(a.index("t"), t).copy_(v.squeeze(a.index("t"))),
    "half": lambda x, a, t, v: x.narrow(a.index("t"), t, 1).copy_(v.double()),
    "transposed": lambda x, a, t, v: x.movedim(a.index("t"), 0).index_copy_(0, torch.tensor([t]), v.movedim(a.index("t"), 0)),
    "detached": lambda x, a, t, v: x.detach().unsqueeze(0)[0].index_copy_(a.index("t"), torch.tensor([t]), v),
}  # fmt: skip


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("how", APPENDS)
def test_every_spelling_appends(how: str, axes: str) -> None:
    for name in NAMES[1:3]:
        handle, x = empty(name, axes), text(axes)
        for t in range(21):
            APPENDS[how](handle, axes, t, x.narrow(axes.index("t"), t, 1))
        assert same_planes(planes_of(handle), planes_of(filled(name, 21, axes))), name


@pytest.mark.parametrize("name", NAMES)
def test_rows_append_on_their_own(name: str) -> None:
    x, handle = text(), empty(name)
    lengths = [4, 0, 9]
    for row, length in enumerate(lengths):
        if length:
            handle[row, :, :length] = x[row, :, :length]
    while max(lengths) < T:
        rows, at = torch.arange(B), torch.tensor(lengths)
        handle[rows, :, at] = x[rows, :, at]
        lengths = [n + 1 for n in lengths]
    exact(handle, lengths, "every row a token")
    handle[torch.tensor([1, 0]), :, torch.tensor([lengths[1], lengths[0]])] = torch.stack(
        [x[1, :, lengths[1]], x[0, :, lengths[0]]]
    )
    exact(handle, [lengths[0] + 1, lengths[1] + 1, lengths[2]], "two rows")
    part = handle[:1]
    part[:, :, lengths[0] + 1 :] = x[:1, :, lengths[0] + 1 :]
    exact(handle, [T, lengths[1] + 1, T], "through a view of a row")


def test_a_view_of_tokens_shows_what_was_written() -> None:
    handle = filled("int4_group32+outlier5%+recent2", 9)
    view = handle[:, :, 9:12]
    assert not view.any()
    new = torch.randn(B, H, 3, D)
    view.copy_(new)
    assert torch.equal(view + 0, handle[:, :, 9:12] + 0) and torch.equal(view[:, :, 1:] + 0, new[:, :, 1:])
    handle[:, :, 12] = 0.5
    assert (handle.dequantize()[:, :, 12] == 0.5).all() and handle.length.tolist() == [13] * B


REFUSED: dict[str, Callable[[QuantizedKV, Tensor], Any]] = {
    "a token in the middle": lambda x, v: x.index_copy_(2, torch.tensor([5]), v),
    "int in the middle": lambda x, v: x.__setitem__((slice(None), slice(None), 5), v[:, :, 0]),
    "slice in the middle": lambda x, v: x[:, :, 5:6].copy_(v),
    "tensor in the middle": lambda x, v: x.__setitem__((slice(None), slice(None), torch.tensor([5])), v),
    "a gap": lambda x, v: x.index_copy_(2, torch.tensor([22]), v),
    "int after a gap": lambda x, v: x.__setitem__((slice(None), slice(None), 23), v[:, :, 0]),
    "out of order": lambda x, v: x.index_copy_(2, torch.tensor([22, 21]), v.expand(-1, -1, 2, -1)),
    "every second": lambda x, v: x[:, :, 21:25:2].copy_(v),
    "past the end": lambda x, v: x.index_copy_(2, torch.tensor([T]), v),
    "one head": lambda x, v: x[:, 0].index_copy_(1, torch.tensor([21]), v[:, 0]),
    "heads": lambda x, v: x[:, 1:].index_copy_(2, torch.tensor([21]), v[:, 1:]),
    "heads of a slice": lambda x, v: x[:, :, 21:22][:, 1:].copy_(v[:, 1:]),
    "head of a slice": lambda x, v: x[:, 1:, 21:22].copy_(v[:, 1:]),
    "channels": lambda x, v: x[..., 3:].copy_(torch.zeros(B, H, T, D - 3)),
    "a row of tokens twice": lambda x, v: x.index_put_(
        (torch.tensor([1, 1]), torch.tensor([0, 1]), torch.tensor([21, 22])), v[0, :2, 0]
    ),
    "one row twice": lambda x, v: x.__setitem__(
        (torch.tensor([1, 1]), slice(None), torch.tensor([21, 22])), v[:2, :, 0]
    ),
    "one row in the middle": lambda x, v: x.__setitem__((1, slice(None), 4), v[1, :, 0]),
    "rows in the middle": lambda x, v: x.__setitem__((torch.tensor([1]), slice(None), torch.tensor([4])), v[:1, :, 0]),
    "added": lambda x, v: x[:, :, 21:22].add_(v),
    "another dtype": lambda x, v: x.index_copy_(2, torch.tensor([21]), v.double()),
    "another shape": lambda x, v: x[:, :, 21:23].copy_(v.expand(-1, -1, 4, -1)),
    "heads from a cache": lambda x, v: x[:, :1].copy_(filled(x.format.name, 3)[:, :1]),
}  # fmt: skip


@pytest.mark.parametrize("how", REFUSED)
def test_other_writes_are_one_clear_error_and_change_nothing(how: str) -> None:
    for name in ("test_keys_g8r5s3", "int8_per_token_head+recent8+sink4"):
        handle = filled(name, 21)
        before = planes_of(handle)
        with pytest.raises((errors.KVQError, IndexError)) as raised:
            REFUSED[how](handle, torch.randn(B, H, 1, D))
        if isinstance(raised.value, errors.KVQError):
            assert "got:" in str(raised.value) and "allowed:" in str(raised.value)
        assert same_planes(planes_of(handle), before)


def test_rewriting_the_end_takes_tokens_back() -> None:
    """What is written over reaches to the end, so that nothing is lost."""
    for name in NAMES:
        handle, x = filled(name, 12, seed=1), text()
        handle[:, :, 0:12] = x[:, :, :12]
        exact(handle, [12] * B)
        handle[:, :, 10:14] = x[:, :, 10:14]
        assert handle.length.tolist() == [14] * B


# --------------------------------------------------------------------------------------------------------------- reads

TOKEN_READS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda x: x[:, :, 3:17],
    "strided": lambda x: x[:, :, ::3],
    "int": lambda x: x[:, :, 20],
    "negative": lambda x: x[..., -1, :],
    "index": lambda x: x[:, :, torch.tensor([20, 3, 3])],
    "index_select": lambda x: x.index_select(2, torch.tensor([4, 19])),
    "roll": lambda x: x.roll(-3, 2),
    "flip": lambda x: x.flip(2),
    "split": lambda x: torch.cat(x.split(7, 2)[::-1], 2),
    "split sizes": lambda x: x.split([9, 20], 2)[1],
    "chunk": lambda x: x.chunk(3, 2)[1],
    "unbind": lambda x: torch.stack(x.unbind(2), 1),
    "narrow": lambda x: x.narrow(2, 1, 9),
    "cat": lambda x: torch.cat([x, torch.ones(B, H, 4, D)], 2),
    "cat of itself": lambda x: torch.cat([x, x], 2),
    "slice_scatter": lambda x: torch.slice_scatter(x, torch.ones(B, H, 8, D), 2, 21, 29),
    "select_scatter": lambda x: torch.select_scatter(x, torch.ones(B, H, D), 2, 21),
    "rolled twice": lambda x: x.roll((1, 1), (1, 2)),
    "view": lambda x: x.reshape(B, H, -1)[:, :, 40:],
    "matmul": lambda x: torch.ones(B, H, 2, D) @ x.transpose(-1, -2),
    "slice of a row": lambda x: x[1, :, 5:],
    "slice of heads": lambda x: x[:, 1:, 5:],
    "permuted": lambda x: x.permute(2, 0, 1, 3)[4:9],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", TOKEN_READS)
def test_moves_along_tokens_read_decoded_values(how: str, name: str) -> None:
    handle = filled(name, 21)
    before = planes_of(handle)
    dense = handle.dequantize()
    got, want = TOKEN_READS[how](handle), TOKEN_READS[how](dense)
    if how.endswith("_scatter"):
        # A new cache, into which the tokens were appended.
        kept = got.format.window - got.format.token_group
        assert (
            isinstance(got, QuantizedKV)
            and torch.equal((got + 0)[:, :, 29 - kept : 29], want[:, :, 29 - kept : 29])
            or kept == 0
        )
        want = got.dequantize()
    assert got.shape == want.shape and torch.equal(got + 0, want)
    assert same_planes(planes_of(handle), before)


MOVES: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x[1:],
    "row": lambda x: x[2],
    "row index": lambda x: x[torch.tensor([2, 0, 0])],
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 1])),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "cat": lambda x: torch.cat([x[2:], x, x[:1]], 0),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "split": lambda x: x.split(2)[1],
    "heads": lambda x: x[:, 1:],
    "head": lambda x: x[:, 0],
    "flip of heads": lambda x: x.flip(1),
    "cat of heads": lambda x: torch.cat([x[:, 1:], x[:, :1], x], 1),
    "permute": lambda x: x.permute(2, 0, 3, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "detach": lambda x: x.detach(),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", MOVES)
def test_moves_of_rows_and_heads_move_codes(how: str, name: str) -> None:
    handle = filled(name, 21)
    handle[:1, :, 21:24] = text()[:1, :, 21:24]  # ragged
    before = planes_of(handle)
    got, want = MOVES[how](handle), MOVES[how](handle.dequantize())
    if how != "contiguous":
        assert isinstance(got, QuantizedKV)
    assert got.shape == want.shape and torch.equal(got + 0, want)
    assert same_planes(planes_of(handle), before)
    if isinstance(got, QuantizedKV) and how not in ("heads", "head"):
        # It goes on growing as it should.
        canonical = to_canonical(got.dequantize(), got.axes)
        position = got.length.unsqueeze(1).clone()
        new = torch.randn(canonical.shape[0], canonical.shape[1], 1, D)
        kvq_ops.append_(got.store, position, new, name)
        again = to_canonical(got.dequantize(), got.axes)
        assert (
            torch.equal(again[torch.arange(len(position)), :, position[:, 0]], new[:, :, 0])
            or not get_format(name).recent
        )


def test_heads_of_caches_that_do_not_match_are_joined_decoded() -> None:
    a, b = filled("test_keys_g8r8", 21), filled("test_keys_g8r8", 17, seed=1)
    got = torch.cat([a, b], 1)
    assert not isinstance(got, QuantizedKV)
    assert torch.equal(got, torch.cat([a.dequantize(), b.dequantize()], 1))


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
    for shape in ((1, 1, 1, 64), (2, 3, 45, 32), (1, 2, 0, 16), (0, 2, 9, 16)):
        for dtype in (torch.float32, torch.float16):
            handle = QuantizedKV.empty(shape, name, dtype=dtype)
            real = sum(plane.untyped_storage().nbytes() for plane in handle.store)
            assert planned_bytes(shape, name, dtype) == handle.nbytes == storage_bytes([handle]) == real
    fmt = get_format(name)
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
