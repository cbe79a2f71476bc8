"""Caches whose newest and first tokens are exact: they grow at their end, and are never wrong elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import QuantizedKV, errors
from kvq_ops.axes import to_canonical
from kvq_ops.formats import get_format
from tests.handle.shadow import at, planes_of, same_planes
from tests.handle.windowed import AXES, NAMES, B, D, H, T, empty, exact, filled, text

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
