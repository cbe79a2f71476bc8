"""Writes into a cache, through every view that there is, against a dense shadow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import QuantizedKV, errors
from tests.handle.shadow import ALL, AXES, FORMATS, Pair, at, planes_of, same_planes, shape_of


def put(index: Any) -> Callable[[Any, Tensor], None]:
    def write(x: Any, v: Tensor) -> None:
        x[index] = v

    return write


@dataclass
class Write:
    """A write that both caches understand.

    Attributes:
        run: ``run(axes)`` gives the operation, the shape of its values, and their axes.
        needs: letters that the cache must have.
    """

    name: str
    run: Callable[[str], tuple[Callable[[Any, Tensor], Any], list[int], str]]
    needs: str = "t"


def tokens(index: Any, count: int, name: str) -> Write:
    return Write(name, lambda a: (put(at(a, t=index)), shape_of(a, t=count), a))


def single(letter: str, index: Any, name: str) -> Write:
    """An index that removes an axis."""

    def run(axes: str) -> Any:
        rest = axes.replace(letter, "")
        return put(at(axes, **{letter: index})), shape_of(rest), rest

    return Write(name, run, letter)


def through(name: str, view: Callable[[Any, str], Any], needs: str = "t") -> Write:
    """``copy_`` into a view; its shape tells that of the values."""

    def run(axes: str) -> Any:
        probe = view(torch.empty(shape_of(axes)), axes)
        # Follow the channel axis by a tensor that differs along it alone.
        channels = torch.arange(4.0).reshape([4 if c == "d" else 1 for c in axes]).expand(shape_of(axes))
        followed = view(channels, axes)
        axis = next(
            d
            for d in range(followed.dim())
            if followed.shape[d] == 4 and not torch.equal(followed.select(d, 0), followed.select(d, 1))
        )
        names = "".join("d" if d == axis else "1" for d in range(followed.dim()))
        return (lambda x, v: view(x, axes).copy_(v)), list(probe.shape), names

    return Write(name, run, needs)


def _adjacent(axes: str) -> bool:
    return abs(axes.index("b") - axes.index("t")) == 1


def rows_and_positions(name: str, rows: Any, positions: Any) -> Write:
    def run(axes: str) -> Any:
        r, p = torch.as_tensor(rows), torch.as_tensor(positions)
        rest = axes.replace("b", "").replace("t", "")
        lead = min(axes.index("b"), axes.index("t")) if _adjacent(axes) else 0
        index_shape = list(torch.broadcast_shapes(r.shape, p.shape))
        sizes = shape_of(rest)
        names = rest[:lead] + "1" * len(index_shape) + rest[lead:]
        return put(at(axes, b=r, t=p)), sizes[:lead] + index_shape + sizes[lead:], names

    return Write(name, run, "bt")


def dim(axes: str, letter: str) -> int:
    return axes.index(letter)


WRITES = [
    Write(
        "index_copy_",
        lambda a: (lambda x, v: x.index_copy_(dim(a, "t"), torch.tensor([5, 0, 3]), v), shape_of(a, t=3), a),
    ),
    Write(
        "index_copy_ negative dim",
        lambda a: (
            lambda x, v: x.index_copy_(dim(a, "t") - len(a), torch.tensor([7]), v),
            shape_of(a, t=1),
            a,
        ),
    ),
    Write(
        "index_copy_ rows",
        lambda a: (lambda x, v: x.index_copy_(dim(a, "b"), torch.tensor([2, 0]), v), shape_of(a, b=2), a),
        "b",
    ),
    tokens(torch.tensor([2, 6]), 2, "tensor index"),
    tokens(torch.tensor([2, 6], dtype=torch.int32), 2, "int32 index"),
    tokens([1, 4, 5], 3, "list index"),
    tokens(torch.tensor([-1, -8]), 2, "negative tensor index"),
    tokens(torch.tensor([-2]), 1, "one negative position"),
    single("t", 3, "int"),
    single("t", -1, "negative int"),
    single("t", torch.tensor(4), "0-D tensor"),
    single("b", 1, "one row"),
    single("h", -1, "one head"),
    tokens(slice(2, 5), 3, "slice"),
    tokens(slice(-3, None), 3, "slice from the end"),
    tokens(slice(1, 8, 3), 3, "slice with a step"),
    tokens(torch.tensor([True, False, True, False, False, True, False, True]), 4, "mask of tokens"),
    Write(
        "2-D positions",
        lambda a: (
            put(at(a, t=torch.tensor([[0, 5], [7, 1]]))),
            [n for c in a for n in ([2, 2] if c == "t" else shape_of(c))],
            "".join("tt" if c == "t" else c for c in a),
        ),
    ),
    rows_and_positions("a position for each row", [0, 1, 2], [4, 0, 7]),
    rows_and_positions("some rows", [2, 0], [3, 3]),
    rows_and_positions("negative rows and positions", [-1, -3], [-1, -8]),
    rows_and_positions("positions [B, N]", [[0], [1], [2]], [[0, 1], [4, 5], [6, 2]]),
    rows_and_positions("one row, many positions", [1], [0, 3, 6]),
    Write("rows by index", lambda a: (put(at(a, b=torch.tensor([2, 0]))), shape_of(a, b=2), a), "b"),
    Write(
        "mask of rows", lambda a: (put(at(a, b=torch.tensor([True, False, True]))), shape_of(a, b=2), a), "b"
    ),
    Write("whole", lambda a: (lambda x, v: x.copy_(v), shape_of(a), a)),
    Write("ellipsis", lambda a: (put(...), shape_of(a), a)),
    Write("broadcast rows", lambda a: (lambda x, v: x.copy_(v), shape_of(a, b=1), a), "b"),
    Write(
        "broadcast heads in a slice", lambda a: (put(at(a, t=slice(0, 2))), shape_of(a, t=2, h=1), a), "ht"
    ),
    Write(
        "broadcast values at positions", lambda a: (put(at(a, t=torch.tensor([1, 2]))), shape_of(a, t=1), a)
    ),
    through("nested slices", lambda x, a: x[at(a, t=slice(1, 7))][at(a, t=slice(2, 5))]),
    through("nested slices with steps", lambda x, a: x[at(a, t=slice(1, 8, 2))][at(a, t=slice(1, 4, 2))]),
    through("slice of a slice at an int", lambda x, a: x[at(a, t=slice(2, 7))][at(a, t=-1)]),
    through("narrow", lambda x, a: x.narrow(dim(a, "t"), 2, 3)),
    through("select", lambda x, a: x.select(dim(a, "t"), 6)),
    through("chunk", lambda x, a: x.chunk(3, dim(a, "t"))[2]),
    through("split", lambda x, a: x.split([1, 4, 3], dim(a, "t"))[1]),
    through("unbind", lambda x, a: x.unbind(dim(a, "t"))[5]),
    through("rows then tokens", lambda x, a: x[at(a, b=slice(1, 3))][at(a, t=slice(4, 6))], "bt"),
    through("tokens then rows", lambda x, a: x[at(a, t=slice(4, 6))][at(a, b=slice(1, 3))], "bt"),
    through(
        "tokens, rows, tokens, heads",
        lambda x, a: x[at(a, t=slice(1, 7))][at(a, b=slice(0, 2))][at(a, t=slice(1, 3))][
            at(a, h=slice(1, 2))
        ],
        "bht",
    ),
    through("one token of one row of one head", lambda x, a: x[at(a, b=2, h=1, t=3)], "bht"),
    through("token first, then the first axis", lambda x, a: x.select(dim(a, "t"), 3)[-1], "bt"),
    through("reversed axes", lambda x, a: x.permute(*reversed(range(x.dim())))),
    through(
        "slice of transposed",
        lambda x, a: x.transpose(dim(a, "t"), dim(a, "d"))[
            at(a.replace("t", "?").replace("d", "t").replace("?", "d"), t=slice(2, 4))
        ],
    ),
    through("transposed slice", lambda x, a: x[at(a, t=slice(2, 4))].transpose(0, -1)),
    through("unsqueeze", lambda x, a: x.unsqueeze(1)[at("".join([a[0], "1", *a[1:]]), t=slice(3, 6))]),
    through("squeeze of one head", lambda x, a: x[at(a, h=slice(0, 1))].squeeze(dim(a, "h")), "ht"),
    through("squeeze of one token", lambda x, a: x[at(a, t=slice(4, 5))].squeeze(dim(a, "t"))),
    through("detach and alias", lambda x, a: x.detach().data[at(a, t=slice(0, 3))]),
    through("same view", lambda x, a: x.view(*x.shape).view([-1, *x.shape[1:]])[at(a, t=1)]),
    through("expand to the same", lambda x, a: x.expand(*x.shape)[at(a, t=slice(5, 6))]),
    through("contiguous of what is contiguous", lambda x, a: x.contiguous()[at(a, t=slice(5, 7))]),
]


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.name)
def test_write(write: Write, axes: str) -> None:
    if not set(write.needs) <= set(axes):
        return  # nothing to write to
    pair = Pair("int8_per_token_head", axes)
    op, shape, names = write.run(axes)
    before = pair.dense.clone()
    pair.write(op, shape, names)
    pair.check()
    assert not torch.equal(before, pair.dense)


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.name)
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "int8_per_token_head"])
def test_write_in_every_format(write: Write, name: str) -> None:
    pair = Pair(name)
    op, shape, names = write.run("bhtd")
    pair.write(op, shape, names)
    pair.check()


@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.name)
def test_write_is_seen_through_views_taken_before(write: Write) -> None:
    def views(x: Any) -> list[Any]:
        return [
            x[:, :, 1:6],
            x[:, :, 1:8:2],
            x[1],
            x[:, 0],
            x.transpose(1, 2),
            x[:, :, 3],
            x[1:, :, 2:5][:, 1:],
        ]

    pair = Pair("int4_group32")
    taken, dense = views(pair.handle), views(pair.dense)
    op, shape, names = write.run("bhtd")
    pair.write(op, shape, names)
    for view, expected in zip(taken, dense, strict=True):
        assert isinstance(view, QuantizedKV)
        assert torch.equal(view.dequantize(), expected)


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("write", WRITES, ids=lambda w: w.name)
def test_write_in_every_grad_mode(write: Write, grad_mode: Any) -> None:
    pair = Pair("int8_per_token_head")
    op, shape, names = write.run("bhtd")
    with grad_mode():
        pair.write(op, shape, names)
    pair.check()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "erase",
    [
        lambda x: x.zero_(),
        lambda x: x.fill_(0),
        lambda x: x.fill_(torch.tensor(0.0)),
        lambda x: x.__setitem__(..., 0),
        lambda x: x[:, :, 2:5].zero_(),
        lambda x: x[1].zero_(),
        lambda x: x[:, 1].zero_(),
        lambda x: x[1:, :1, ::3].zero_(),
        lambda x: x.__setitem__((ALL, ALL, slice(6, 8)), 0.0),
        lambda x: x.__setitem__((ALL, ALL, torch.tensor([3, 5])), 0.0),
    ],
)
def test_zero_spoils_nothing_else(erase: Any, name: str) -> None:
    pair = Pair(name)
    erase(pair.handle)
    erase(pair.dense)
    pair.check()


@pytest.mark.parametrize("name", FORMATS)
def test_fill_with_a_number(name: str) -> None:
    pair = Pair(name)
    filled = pair.handle[:, :, 2:4]
    filled.fill_(0.5)
    pair.dense[:, :, 2:4] = 0.5
    raw = torch.full((1, 1, 1, 4), 0.5)
    expected = kvq_ops.QuantizedKV.from_dense(raw, name) if not pair.handle.format.static_planes else None
    if expected is not None:
        pair.dense[:, :, 2:4] = expected.dequantize()
        pair.check()
    else:
        torch.testing.assert_close(pair.handle.dequantize()[:, :, 4:], pair.dense[:, :, 4:], rtol=0, atol=0)
        assert (filled.dequantize() - 0.5).abs().max() < 0.1


def test_length_follows_writes() -> None:
    x = QuantizedKV.empty((3, 2, 8, 4), "int8_per_token_head")
    one = torch.randn(3, 2, 1, 4)
    assert x.length.tolist() == [0, 0, 0]
    part, head, row = x[:, :, 2:7], x[:, 1:], x[1:2]
    part[:, :, 1:2] = one
    assert x.length.tolist() == [4, 4, 4] and part.length.tolist() == [2, 2, 2]
    row[:, :, 5:6] = one[:1]
    assert x.length.tolist() == [4, 6, 4] and part.length.tolist() == [2, 4, 2] and row.length.tolist() == [6]
    x[torch.tensor([0, 2]), :, torch.tensor([4, 7])] = torch.randn(2, 2, 4)
    assert x.length.tolist() == [5, 6, 8]
    head.zero_()
    assert x.length.tolist() == [5, 6, 8]
    row.zero_()
    assert x.length.tolist() == [5, 0, 8] and part.length.tolist() == [3, 0, 5]
    part[:, :, ::2][2:, :, -1:] = one[:1]
    assert x.length.tolist() == [5, 0, 8]
    x[:, :, 1::3][1:2, :, :2] = one[:1]
    assert x.length.tolist() == [5, 5, 8]
    x.zero_()
    assert x.length.tolist() == [0, 0, 0]


BAD = {
    "index_fill_": lambda x: x.index_fill_(2, torch.tensor([1]), 0.0),
    "masked_fill_": lambda x: x.masked_fill_(torch.ones(x.shape, dtype=torch.bool), 0.0),
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(2),
    "iadd on a slice": lambda x: x[:, :, 2:4].__iadd__(1),
    "index_add_": lambda x: x.index_add_(2, torch.tensor([0]), torch.ones(3, 2, 1, 4)),
    "accumulate": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1, 2, 8, 4), accumulate=True),
    "scatter_": lambda x: x.scatter_(2, torch.zeros(3, 2, 1, 4, dtype=torch.long), 1.0),
    "channels": lambda x: x.__setitem__((..., slice(0, 2)), 1.0),
    "one channel": lambda x: x.__setitem__((..., 0), 1.0),
    "channel index": lambda x: x.__setitem__((..., torch.tensor([0, 1])), torch.ones(3, 2, 8, 2)),
    "heads by index": lambda x: x.__setitem__((ALL, torch.tensor([0])), torch.ones(3, 1, 8, 4)),
    "mixed view": lambda x: x.view(6, 8, 4).copy_(torch.ones(6, 8, 4)),
    "mixed view, fill": lambda x: x.flatten(0, 1).zero_(),
    "view of a mixed view": lambda x: x.view(6, 8, 4)[0].t()[1].fill_(1),
    "expanded": lambda x: x[:1].expand(3, 2, 8, 4).copy_(torch.ones(3, 2, 8, 4)),
    "out=": lambda x: torch.add(torch.ones(3, 2, 8, 4), 1, out=x),
    "out= of a mixed view": lambda x: torch.neg(torch.ones(6, 8, 4), out=x.view(6, 8, 4)),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "mask of values": lambda x: x.__setitem__(torch.ones(3, 2, 8, 4, dtype=torch.bool), 1.0),
    "uniform_": lambda x: x.uniform_(),
    "data =": lambda x: setattr(x, "data", torch.zeros(3, 2, 8, 4)),
    "resize_": lambda x: x.resize_(1),
    "mask that does not fit": lambda x: x.__setitem__((ALL, ALL, torch.ones(7, dtype=torch.bool)), 1.0),
    "as_strided of a part": lambda x: x[:, :, 2:].as_strided((4,), (1,)),
    "wrong dtype": lambda x: x.index_copy_(2, torch.tensor([1]), torch.ones(3, 2, 1, 4, dtype=torch.float16)),
    "wrong dtype, put": lambda x: x.__setitem__(
        (ALL, ALL, torch.tensor([1])), torch.ones(3, 2, 1, 4, dtype=torch.bfloat16)
    ),
    "wrong heads": lambda x: x.index_copy_(2, torch.tensor([1]), torch.ones(3, 1, 1, 4)),
    "wrong channels": lambda x: x.__setitem__((ALL, ALL, slice(0, 1)), torch.ones(3, 2, 1, 5)),
    "wrong count": lambda x: x.index_copy_(2, torch.tensor([1, 2]), torch.ones(3, 2, 1, 4)),
    "beyond the end": lambda x: x.index_copy_(2, torch.tensor([7, 8]), torch.ones(3, 2, 2, 4)),
    "beyond the end, put": lambda x: x.__setitem__((ALL, ALL, torch.tensor([8])), 1.0),
    "too negative": lambda x: x.__setitem__((ALL, ALL, torch.tensor([-9])), 1.0),
    "beyond a slice, inside the cache": lambda x: x[:, :, 2:5].index_copy_(
        2, torch.tensor([3]), torch.ones(3, 2, 1, 4)
    ),
    "rows beyond": lambda x: x.__setitem__((torch.tensor([3]), ALL, torch.tensor([0])), torch.ones(1, 2, 4)),
    "row position too negative": lambda x: x.__setitem__(
        (torch.tensor([0]), ALL, torch.tensor([-10])), torch.ones(1, 2, 4)
    ),
    "row position beyond a slice": lambda x: x[:, :, 2:5].__setitem__(
        (torch.tensor([0]), ALL, torch.tensor([3])), torch.ones(1, 2, 4)
    ),
    "rows of index_copy_ beyond": lambda x: x.index_copy_(0, torch.tensor([3]), torch.ones(1, 2, 8, 4)),
    "select beyond": lambda x: x.select(2, 8),
    "narrow beyond": lambda x: x.narrow(2, 6, 3),
    "values that do not broadcast": lambda x: x.copy_(torch.ones(2, 2, 8, 4)),
    "a gradient": lambda x: x.copy_(torch.ones(3, 2, 8, 4, requires_grad=True)),
}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["int8_per_token_head", "nvfp4"])
@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_written_raises_and_changes_nothing(bad: str, name: str, mode: Any) -> None:
    if bad == "a gradient" and mode is not torch.enable_grad:
        pytest.skip("gradients do not matter in this mode")
    x = Pair(name).handle
    before = planes_of(x)
    with mode(), pytest.raises((errors.KVQError, IndexError, RuntimeError)) as raised:
        BAD[bad](x)
    assert same_planes(before, planes_of(x)), raised.value
    assert x.shape == (3, 2, 8, 4)


def test_messages_say_what_to_do() -> None:
    x = QuantizedKV.empty((3, 2, 8, 4), "int8_per_token_head")
    with pytest.raises(errors.UnsupportedWriteError, match="do: "):
        x.mul_(2)
    with pytest.raises(errors.UnsupportedWriteError, match="do: "):
        x.view(6, 8, 4).zero_()
    with pytest.raises(errors.DtypeError, match=r"got: +torch.float16[\s\S]*allowed: torch.float32"):
        x[:, :, torch.tensor([0])] = torch.ones(3, 2, 1, 4, dtype=torch.float16)
    with pytest.raises(errors.CapacityError, match=r"allowed: 0\.\.7"):
        x.index_copy_(2, torch.tensor([8]), torch.ones(3, 2, 1, 4))


def test_d12_capacity_edges() -> None:
    """Ninth write into a cache of eight; nothing to write; no rows; no tokens."""
    pair = Pair("int4_group32")
    before = planes_of(pair.handle)
    with pytest.raises(errors.CapacityError):
        pair.handle.index_copy_(2, torch.tensor([8]), torch.randn(3, 2, 1, 4))
    pair.handle.index_copy_(2, torch.empty(0, dtype=torch.long), torch.empty(3, 2, 0, 4))
    pair.handle[:, :, 8:] = torch.empty(3, 2, 0, 4)
    pair.handle[:, :, torch.empty(0, dtype=torch.long)] = torch.empty(3, 2, 0, 4)
    pair.handle[torch.empty(0, dtype=torch.long), :, torch.empty(0, dtype=torch.long)] = torch.empty(0, 2, 4)
    assert same_planes(before, planes_of(pair.handle))
    for shape in ((0, 2, 8, 4), (3, 2, 0, 4), (3, 0, 8, 4)):
        for name in FORMATS:
            empty = QuantizedKV.empty(shape, name)
            empty.copy_(torch.empty(shape))
            empty.zero_()
            empty[:, :, :1].fill_(1.0)
            assert empty.dequantize().shape == shape
            assert empty.transpose(1, 2).contiguous().shape == (shape[0], shape[2], shape[1], 4)
            assert torch.cat([empty, empty], 2).shape == (shape[0], shape[1], 2 * shape[2], 4)


def test_b5_values_that_need_a_gradient() -> None:
    x = QuantizedKV.empty((3, 2, 8, 4), "int8_per_token_head")
    k = torch.randn(3, 2, 1, 4, requires_grad=True)
    at_one = torch.tensor([1])
    writes = [
        lambda v: x.index_copy_(2, at_one, v),
        lambda v: x.__setitem__((ALL, ALL, at_one), v),
        lambda v: x[:, :, 1:2].copy_(v),
        lambda v: torch.cat([x, v], 2),
        lambda v: x.__setitem__((torch.arange(3), ALL, torch.tensor([1, 1, 1])), v.squeeze(2)),
    ]
    for write in writes:
        with pytest.raises(errors.GradientError, match="inference only"):
            write(k * 2)
        with torch.no_grad():
            write(k * 2)
        write((k * 2).detach())
    with pytest.raises(errors.GradientError):
        x.requires_grad_()
    with pytest.raises(errors.GradientError):
        x.requires_grad = True
    with pytest.raises(errors.GradientError):
        torch.nn.Parameter(x)
    assert torch.nn.Parameter(x, requires_grad=False) is not None
    # What is read is a constant; queries get their gradient.
    q = torch.randn(3, 2, 1, 4, requires_grad=True)
    (q @ x.transpose(2, 3)).sum().backward()
    assert torch.equal(q.grad, torch.ones(3, 2, 1, 8) @ x.dequantize())


def test_e5_padding_rows_of_nan_spoil_no_other_token() -> None:
    """What fully masked rows leave behind is stored finite, and alone."""
    for name in FORMATS:
        if name == "none":
            continue
        pair = Pair(name)
        expected = pair.dense.clone()
        bad = torch.randn(3, 2, 2, 4)
        bad[0] = float("nan")
        bad[1, :, :, 0] = float("inf")
        pair.handle[:, :, 3:5] = bad
        read = pair.handle.dequantize()
        assert read.isfinite().all()
        assert torch.equal(read[:, :, :3], expected[:, :, :3]) and torch.equal(
            read[:, :, 5:], expected[:, :, 5:]
        )
        assert (read[0, :, 3:5] == 0).all()


def test_checked_mode_looks_at_every_kind_of_write() -> None:
    x = Pair("int8_per_token_head").handle
    before = planes_of(x)
    bad = torch.full((3, 2, 1, 4), float("nan"))
    with kvq_ops.checked():
        for write in (
            lambda: x.index_copy_(2, torch.tensor([0]), bad),
            lambda: x[:, :, :1].copy_(bad),
            lambda: x.__setitem__((torch.arange(3), ALL, torch.arange(3)), bad[:, :, 0]),
            lambda: x.index_copy_(0, torch.tensor([0]), bad[:1].expand(1, 2, 8, 4)),
            lambda: torch.cat([x, bad], 2),
        ):
            with pytest.raises(errors.NonFiniteError):
                write()
    assert same_planes(before, planes_of(x))
