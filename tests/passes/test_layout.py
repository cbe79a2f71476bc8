"""The layout algebra against the tensors themselves: a layout must say where every element of a view came from."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from passes.layout import Atom, Layout, trace_layout
from passes.layout_nodes import constant_value, op_name
from passes.layout_sizes import LayoutError, divide, known_equal

from .attention_reference import exported


def gather(layout: Layout, source: Tensor) -> Tensor:
    """The tensor a layout describes, element by element from its source."""
    shape = [int(size) for size in layout.shape]
    flat = []
    for index in itertools.product(*(range(size) for size in shape)):
        place = [int(start) for start in layout.starts]
        for value, dim in zip(index, layout.dims, strict=True):
            for atom in reversed(dim):
                digit, value = value % int(atom.size), value // int(atom.size)
                if atom.axis is not None:
                    place[atom.axis] += digit * int(atom.stride)
        flat.append(source[tuple(place)])
    return torch.stack(flat).reshape(shape) if flat else torch.empty(shape)


def traced(function: Callable[..., Any], *args: Tensor, dynamic: Any = None) -> tuple[Any, Node]:
    graph_module = exported(function, args, dynamic)
    output = next(n for n in graph_module.graph.nodes if n.op == "output").args[0][0]
    return trace_layout(output), output


def check(function: Callable[[Tensor], Tensor], *shape: int) -> Any:
    """The trace of a view chain, after comparing it with the real result; it must reach the input."""
    source = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    trace, _ = traced(function, source)
    assert trace.source.op == "placeholder", trace.stopped
    torch.testing.assert_close(gather(trace.layout, source), function(source), rtol=0, atol=0)
    return trace


CHAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "permute": lambda x: x.permute(0, 2, 1, 3),
    "transpose": lambda x: x.transpose(-1, 1),
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(1, -1),
    "movedim-lists": lambda x: torch.movedim(x, (0, 1), (2, 0)),
    "swapaxes": lambda x: x.swapaxes(1, 2),
    "unsqueeze": lambda x: x.unsqueeze(-2),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "squeeze-all": lambda x: x[:, :1, None].squeeze(),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1),
    "expand-lead": lambda x: x.expand(2, 2, 4, 6, 8),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "repeat_kv": lambda x: x[:, :, None].expand(2, 4, 3, 6, 8).reshape(2, 12, 6, 8),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat-lead": lambda x: x.repeat(2, 1, 1, 3, 1),
    "tile": lambda x: x.tile(2, 1),
    "view-split": lambda x: x.view(2, 4, 6, 2, 4),
    "view-merge": lambda x: x.view(8, 6, 8),
    "view-across": lambda x: x.view(2, 8, 3, 8),
    "view-through-two-axes": lambda x: x.view(2, 2, 12, 8),
    "transpose-then-reshape": lambda x: x.transpose(1, 2).reshape(2, 6, 32),
    "and-back": lambda x: x.transpose(1, 2).reshape(2, 6, 32).view(2, 6, 4, 8).transpose(1, 2),
    "flatten": lambda x: x.flatten(1, 2),
    "unflatten": lambda x: x.unflatten(-1, (2, -1)),
    "slice": lambda x: x[:, 1:3],
    "slice-negative": lambda x: x[..., -3:-1],
    "slice-step": lambda x: x[:, :, ::2],
    "slice-merged-outer": lambda x: x.flatten(1, 2)[:, 6:18],
    "narrow": lambda x: x.narrow(2, 1, 4),
    "select": lambda x: x[1, :, 2],
    "select-negative": lambda x: x.select(1, -1),
    "select-merged": lambda x: x.flatten(1, 2)[:, 13],
    "chunk": lambda x: x.chunk(2, dim=-1)[1],
    "split": lambda x: x.split([1, 3], dim=1)[1],
    "split-equal": lambda x: x.split(2, dim=2)[2],
    "unbind": lambda x: x.unbind(1)[2],
    "tensor_split": lambda x: x.tensor_split(2, dim=1)[0],
    "contiguous": lambda x: x.transpose(1, 2).contiguous().clone(),
    "detach": lambda x: x.detach().transpose(0, 1),
    "packed": lambda x: x.permute(0, 2, 1, 3).reshape(2, 6, 32).view(2, 6, 2, 2, 8).permute(2, 0, 3, 1, 4)[1],
    "dropout": lambda x: torch.nn.functional.dropout(x.mT, 0.5, training=False),
    "size-one-dims": lambda x: x[:, :1].reshape(2, 1, 1, 48).view(2, 6, 1, 8),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain_reaches_its_source(name: str) -> None:
    check(CHAINS[name], 2, 4, 6, 8)


@pytest.mark.parametrize("seed", range(12))
def test_random_chains(seed: int) -> None:
    """Random chains of movements; those that regroup sizes that do not nest are cut, the rest must agree everywhere."""

    def chain(x: Tensor) -> Tensor:
        local = random.Random(seed)
        for _ in range(local.randint(3, 6)):
            step = local.randrange(6)
            dim = local.randrange(x.dim())
            if step == 0:
                order = list(range(x.dim()))
                local.shuffle(order)
                x = x.permute(order)
            elif step == 1 and x.shape[dim] % 2 == 0:
                x = x.unflatten(dim, (2, -1))
            elif step == 2 and x.dim() > 1:
                at = local.randrange(x.dim() - 1)
                x = x.flatten(at, at + 1)
            elif step == 3 and x.numel() < 200:
                x = x.repeat_interleave(2, dim)
            elif step == 4 and x.shape[dim] > 2:
                x = x.narrow(dim, 1, x.shape[dim] - 1)
            else:
                x = x.unsqueeze(dim)
        return x

    source = torch.arange(2 * 4 * 6, dtype=torch.float32).reshape(2, 4, 6)
    trace, _ = traced(chain, source)
    whole = chain(source)
    if trace.source.op == "placeholder":
        torch.testing.assert_close(gather(trace.layout, source), whole, rtol=0, atol=0)
    else:
        assert trace.stopped is not None


def test_reshape_that_mixes_axes_is_exact_or_refused() -> None:
    trace = check(lambda x: x.view(2, 8, 4, 8), 2, 4, 8, 8)
    assert {atom.axis for atom in trace.layout.dims[1]} == {1, 2}
    source = torch.zeros(2, 4, 9, 8)
    trace, output = traced(lambda x: x.reshape(2, 9, 4, 8).transpose(1, 2), source)
    assert op_name(trace.source) == "reshape" and "share no whole factor" in str(trace.stopped)
    assert trace.path == (output,)


def test_slice_across_the_digits_of_a_merged_dim_is_refused() -> None:
    trace, _ = traced(lambda x: x.flatten(1, 2)[:, 1:5].unsqueeze(0), torch.zeros(2, 4, 6))
    assert op_name(trace.source) == "slice" and "across the digits" in str(trace.stopped)


def test_writes_and_cat_stop_the_walk() -> None:
    def function(x, y, position):
        x = x.index_copy(1, position, y)
        return torch.cat([x, y], 1).transpose(0, 1)

    trace, _ = traced(function, torch.zeros(2, 4), torch.ones(2, 1), torch.tensor([1]))
    assert op_name(trace.source) == "cat" and trace.stopped is None

    def in_place(x, y, position):
        x.index_copy_(1, position, y)
        return x.index_put((position, position), y[0]).transpose(0, 1)

    trace, _ = traced(in_place, torch.zeros(2, 4), torch.ones(2, 1), torch.tensor([1]))
    assert op_name(trace.source) == "index_put"


def test_casts_are_followed_while_they_round_once() -> None:
    trace, _ = traced(
        lambda x: x.transpose(0, 1).float().to(torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16)
    )
    assert trace.source.op == "placeholder" and trace.casts == (torch.bfloat16, torch.float32)
    trace, _ = traced(lambda x: x.to(torch.bfloat16).float(), torch.zeros(2, 3))
    assert trace.source.op == "call_function" and trace.casts == (torch.float32,)
    trace, _ = traced(lambda x: x.float() * 1.0, torch.zeros(2, 3, dtype=torch.int64))
    assert trace.source.op == "call_function"


def test_scale_is_recorded_on_request() -> None:
    graph_module = exported(lambda x: (x.transpose(0, 1) * 3.0 / 2.0).unsqueeze(0), (torch.zeros(2, 3),))
    output = next(n for n in graph_module.graph.nodes if n.op == "output").args[0][0]
    assert op_name(trace_layout(output).source) == "div"
    trace = trace_layout(output, through_scale=True)
    assert trace.source.op == "placeholder" and trace.scale == 1.5


@pytest.mark.parametrize("divided_by", [2.0, torch.full([], 2.0).sqrt()])
def test_constants_are_folded(divided_by: Any) -> None:
    def function(x):
        return x / (2.0 if isinstance(divided_by, float) else torch.full([], 2.0).sqrt())

    graph_module = exported(function, (torch.zeros(2),))
    node = next(n for n in graph_module.graph.nodes if op_name(n) == "div")
    assert constant_value(node.args[1]) == pytest.approx(float(divided_by))
    assert constant_value(node.args[0]) is None


def symbols() -> tuple[Any, Any]:
    """Two symbolic sizes of one graph."""
    dims = torch.export.Dim("a", min=2, max=64), torch.export.Dim("b", min=2, max=64)
    graph_module = exported(lambda x: x + 1, (torch.zeros(3, 5),), [{0: dims[0], 1: dims[1]}])
    return tuple(next(iter(graph_module.graph.nodes)).meta["val"].shape)


def test_symbolic_sizes_are_never_guessed() -> None:
    a, b = symbols()
    assert known_equal(a * 4, 4 * a) and not known_equal(a, b) and not known_equal(a, 3)
    assert known_equal(divide(a * 4, a) or 0, 4) and known_equal(divide(a * b * 2, b) or 0, a * 2)
    assert divide(a, b) is None and divide(a, 2) is None
    layout = Layout.identity((a, 4, b))
    merged = layout.reshape((a * 4, b)).reshape((a, 2, 2, b))
    assert [len(dim) for dim in merged.dims] == [1, 1, 1, 1] and merged.dims[1][0].stride == 2
    with pytest.raises(LayoutError, match="share no whole factor"):
        layout.reshape((b, 4, a))


def test_symbolic_chain() -> None:
    t = torch.export.Dim("t", min=2, max=64)
    trace, _ = traced(
        lambda x: x.view(2, -1, 4, 8).transpose(1, 2)[:, :, None].expand(-1, -1, 3, -1, -1).flatten(1, 2),
        torch.zeros(2, 5, 32),
        dynamic=[{1: t}],
    )
    heads = trace.layout.dims[1]
    assert trace.source.op == "placeholder" and [atom.axis for atom in heads] == [2, None]
    assert [[atom.axis for atom in dim] for dim in trace.layout.dims[2:]] == [[1], [2]]


def test_spans() -> None:
    layout = Layout.identity((4, 6))
    assert layout.is_full(1)
    part = layout.slice(1, 2, 3)
    assert part.span(1) == (2, 3) and not part.is_full(1)
    assert layout.slice(1, 0, 3, 2).span(1) is None
    assert layout.permute([1, 0]).is_full(0)
    assert layout.interleave(0, 2).dims[0] == (Atom(4, 0, 1), Atom(2, None, 0))
    assert layout.repeat(0, 2).dims[0] == (Atom(2, None, 0), Atom(4, 0, 1))
