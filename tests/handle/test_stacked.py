"""Several caches in one tensor: each index is a cache of its own, and the whole behaves like the dense tensor."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import Tensor, nn

from kvq_ops.errors import FormatError, HeadDimError, KVQError, UnknownFormatError, UnsupportedWriteError
from kvq_ops.handle import QuantizedKV, storage_bytes
from kvq_ops.stacked import StackedKV

INT8 = "int8_per_token_head"
SHAPE, AXES = (2, 2, 1, 2, 6, 16), "llbhtd"
MIXED = ["none", INT8, "fp8_e4m3", "int4_group16"]
LAYOUTS = [
    ("llbhtd", (2, 2, 1, 2, 6, 16)),
    ("blhtd", (2, 3, 2, 6, 16)),
    ("btlhd", (2, 6, 2, 2, 16)),
    ("lbthd", (2, 1, 6, 2, 16)),
    ("bhtld", (1, 2, 6, 2, 16)),
    ("lbtd", (3, 1, 6, 16)),
]


def parts_of(x: Tensor, axes: str) -> list[Tensor]:
    """The dense caches in ``x``, row-major along its ``l`` axes."""
    dims = [dim for dim, letter in enumerate(axes) if letter == "l"]
    moved = x.movedim(dims, list(range(len(dims))))
    return [moved[index] for index in itertools.product(*(range(x.shape[dim]) for dim in dims))]


@pytest.mark.parametrize("format", ["none", INT8, "int4_group16"])
@pytest.mark.parametrize(("axes", "shape"), LAYOUTS)
def test_from_dense_is_each_cache_from_dense(axes: str, shape: tuple[int, ...], format: str) -> None:
    x = torch.randn(shape)
    stack = StackedKV.from_dense(x, format, axes=axes)
    inner = axes.replace("l", "")
    alone = [QuantizedKV.from_dense(part, format, axes=inner) for part in parts_of(x, axes)]
    assert stack.shape == x.shape and stack.dtype == x.dtype and stack.axes == axes
    assert stack.stride() == stack.dequantize().stride() == x.contiguous().stride()
    for mine, other in zip(stack.caches(), alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.store, other.store, strict=True))
    for mine, other in zip(parts_of(stack.dequantize(), axes), alone, strict=True):
        assert torch.equal(mine, other.dequantize())
    assert stack.nbytes == storage_bytes(alone) == storage_bytes([stack])


def test_one_format_each() -> None:
    x = torch.randn(SHAPE)
    stack = StackedKV.from_dense(x, MIXED, axes=AXES)
    assert [part.format.name for part in stack.parts] == MIXED
    assert torch.equal(stack[0, 0].dequantize(), x[0, 0])
    assert not torch.equal(stack[0, 1].dequantize(), x[0, 1])
    assert stack.format_name == ", ".join(MIXED)
    assert [part.format.name for part in StackedKV.empty(SHAPE, MIXED, axes=AXES).parts] == MIXED


def test_lengths() -> None:
    x = torch.randn(SHAPE)
    stack = StackedKV.from_dense(x, INT8, axes=AXES, length=4)
    assert stack.length.tolist() == [[4]] * 4
    assert torch.equal(stack.dequantize()[..., 4:, :], torch.zeros_like(x[..., 4:, :]))
    stack[1, 0][:, :, 5] = 1.0
    assert stack.length.tolist() == [[4], [4], [6], [4]]


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s[0, 1],
        lambda s: s[1][0],
        lambda s: s[:, 1][0],
        lambda s: s[-1, -1],
        lambda s: s[1:, 0],
        lambda s: s[:, :1],
        lambda s: s.unbind(0)[1],
        lambda s: s.unbind(1)[0][1],
        lambda s: s.split(1, 1)[1],
        lambda s: s.chunk(2, 0)[1],
        lambda s: s.narrow(0, 1, 1),
        lambda s: s.select(1, 1).select(0, 0),
        lambda s: s[..., 1:4, :],
        lambda s: s[:, :, 0],
        lambda s: s[0, 1].transpose(1, 2),
        lambda s: s.transpose(3, 4)[1, 1],
        lambda s: s.permute(0, 1, 4, 2, 3, 5)[0, 1],
        lambda s: s.permute(2, 0, 3, 1, 4, 5)[0, 1, :, 0],
        lambda s: s.detach(),
        lambda s: s.clone(),
        lambda s: s[0][0][:, 1],
    ],
)
def test_views_stay_quantized_and_agree_with_dense(read) -> None:
    stack = StackedKV.from_dense(torch.randn(SHAPE), INT8, axes=AXES)
    dense, got = stack.dequantize(), read(stack)
    assert isinstance(got, QuantizedKV)
    assert got.shape == read(dense).shape
    assert torch.equal(got.dequantize(), read(dense))


@pytest.mark.parametrize(
    "read",
    [
        lambda s: s.reshape(4, 1, 2, 6, 16),
        lambda s: s.flatten(0, 1),
        lambda s: s.permute(1, 0, 2, 3, 4, 5),
        lambda s: s.roll(1, 0),
        lambda s: s.index_select(0, torch.tensor([1, 0])),
        lambda s: s[torch.tensor([1])],
        lambda s: s + 1,
        lambda s: s.sum(0),
        lambda s: s[..., :8],
        lambda s: s[::2],
        lambda s: torch.cat([s, s], 0),
        lambda s: torch.stack([s[0, 0], s[1, 1]]),
        lambda s: s.mean(),
        lambda s: s == s,
    ],
)
def test_other_reads_give_decoded_values(read) -> None:
    stack = StackedKV.from_dense(torch.randn(SHAPE), INT8, axes=AXES)
    want, got = read(stack.dequantize()), read(stack)
    got = got.dequantize() if isinstance(got, QuantizedKV) else got
    assert got.shape == want.shape
    torch.testing.assert_close(got + 0, want + 0, atol=0, rtol=0)


def put_index(x: Tensor, new: Tensor) -> None:
    x[1, 0, :, :, torch.tensor([2, 3])] = new


def put_select(x: Tensor, new: Tensor) -> None:
    x[1][0][:, :, 2:4] = new


def put_copy(x: Tensor, new: Tensor) -> None:
    x[1, 0].index_copy_(2, torch.tensor([2, 3]), new)


def put_view(x: Tensor, new: Tensor) -> None:
    part = x.unbind(0)[1].select(0, 0).transpose(1, 2)
    part[:, 2:4] = new.transpose(1, 2)


def put_all(x: Tensor, new: Tensor) -> None:
    x.index_copy_(4, torch.tensor([2, 3]), new.expand(2, 2, *new.shape))


def put_slice(x: Tensor, new: Tensor) -> None:
    x[1:, :1, :, :, 2:4] = new


@pytest.mark.parametrize("format", ["none", INT8])
@pytest.mark.parametrize("put", [put_index, put_select, put_copy, put_view, put_all, put_slice])
def test_writes_reach_the_store(put, format: str) -> None:
    """Right, or refused: never lost, never elsewhere."""
    x, new = torch.randn(SHAPE), torch.randn(1, 2, 2, 16)
    stack = StackedKV.from_dense(x, format, axes=AXES)
    kept = [[plane.clone() for plane in part.store] for part in stack.parts]
    try:
        put(stack, new)
    except UnsupportedWriteError:
        now = [part.store for part in stack.parts]
        assert all(
            torch.equal(a, b)
            for old, part in zip(kept, now, strict=True)
            for a, b in zip(old, part, strict=True)
        )
        assert put in (put_index, put_slice)
        return
    put(x, new)
    want = StackedKV.from_dense(x, format, axes=AXES)
    for mine, other in zip(stack.parts, want.parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.store, other.store, strict=True))


def test_whole_copies_and_zero() -> None:
    x = torch.randn(SHAPE)
    stack, other = StackedKV.empty(SHAPE, MIXED, axes=AXES), StackedKV.from_dense(x, MIXED, axes=AXES)
    stack.copy_(x)
    assert torch.equal(stack.dequantize(), other.dequantize())
    stack.zero_()
    assert not stack.dequantize().any()
    stack.copy_(other)
    assert all(torch.equal(a, b) for a, b in zip(stack.store, other.store, strict=True))
    stack.fill_(0)
    assert not stack.dequantize().any()
    assert other.dequantize().any()


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.mul_(2),
        lambda s: s[0].add_(1),
        lambda s: s.view(-1)[:3].zero_(),
        lambda s: s[0, 0, ..., :8].zero_(),
        lambda s: s.index_copy_(0, torch.tensor([1]), torch.zeros(1, *SHAPE[1:])),
        lambda s: s.permute(1, 0, 2, 3, 4, 5)[0].zero_(),
    ],
)
def test_what_codes_cannot_follow_raises(write) -> None:
    stack = StackedKV.from_dense(torch.randn(SHAPE), INT8, axes=AXES)
    kept = [plane.clone() for plane in stack.store]
    with pytest.raises(KVQError) as error:
        write(stack)
    assert "do:" in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(kept, stack.store, strict=True))


@pytest.mark.parametrize("index", [2, -3])
def test_index_out_of_range(index: int) -> None:
    stack = StackedKV.empty(SHAPE, INT8, axes=AXES)
    with pytest.raises(IndexError):
        stack.select(0, index)


def test_errors_of_making() -> None:
    with pytest.raises(UnknownFormatError):
        StackedKV.empty(SHAPE, "int7", axes=AXES)
    with pytest.raises(FormatError, match="4: one for each cache"):
        StackedKV.empty(SHAPE, [INT8] * 3, axes=AXES)
    with pytest.raises(FormatError):
        StackedKV.empty(SHAPE, INT8, axes="llbhtt")
    with pytest.raises(HeadDimError):
        StackedKV.empty((2, 1, 2, 6, 15), "int4_group32", axes="lbhtd")


def test_copies_files_and_state() -> None:
    stack = StackedKV.from_dense(torch.randn(SHAPE), MIXED, axes=AXES, length=3)
    file = io.BytesIO()
    torch.save(stack, file)
    file.seek(0)
    for other in (copy.deepcopy(stack), torch.load(file)):
        assert isinstance(other, StackedKV) and other.axes == AXES and other.lead == (2, 2)
        assert torch.equal(other.dequantize(), stack.dequantize())
        other[0, 1].zero_()
        assert stack[0, 1].dequantize().any()
    assert copy.copy(stack).parts[0].store[0].data_ptr() == stack.parts[0].store[0].data_ptr()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("caches", StackedKV.empty(SHAPE, MIXED, axes=AXES))

    first, second = Model(), Model()
    first.caches.copy_(stack)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second.caches.dequantize(), first.caches.dequantize())
    half = first.half().caches
    assert isinstance(half, StackedKV) and half.dtype == torch.float16
    assert half[0, 1].format.name == INT8


def test_flatten_and_unflatten() -> None:
    stack = StackedKV.from_dense(torch.randn(SHAPE), MIXED, axes=AXES)
    names, context = stack.__tensor_flatten__()
    inner = {name: getattr(stack, name) for name in names}
    other = StackedKV.__tensor_unflatten__(inner, context, stack.shape, stack.stride())
    assert torch.equal(other.dequantize(), stack.dequantize())
    assert [one.format.name for one in other.parts] == MIXED
    again = stack.with_store([plane.clone() for plane in stack.store])
    assert torch.equal(again.dequantize(), stack.dequantize())
    assert stack.plane_names()[:2] == ["0_0_codes", "0_0_length"]
    assert len(set(stack.plane_names())) == len(stack.plane_names()) == len(stack.store)
    with pytest.raises(KVQError):
        stack.dequantize_canonical()


def test_rows_are_reordered_as_codes() -> None:
    """Beams: all caches of the stack move together, and nothing is coded twice."""
    x = torch.randn(2, 3, 2, 6, 16)
    stack = StackedKV.from_dense(x, INT8, axes="lbhtd")
    moved = stack.index_select(1, torch.tensor([2, 0, 0]))
    assert isinstance(moved, StackedKV)
    for mine, part in zip(moved.parts, stack.parts, strict=True):
        assert torch.equal(mine.store[0], part.store[0][[2, 0, 0]])


def test_inference_mode_and_attention() -> None:
    stack = StackedKV.from_dense(torch.randn(2, 1, 2, 6, 16), INT8, axes="lbhtd")
    q = torch.randn(1, 2, 1, 16)
    dense = stack.dequantize()
    with torch.inference_mode():
        got = torch.nn.functional.scaled_dot_product_attention(q, stack[0], stack[1])
    want = torch.nn.functional.scaled_dot_product_attention(q, dense[0], dense[1])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
