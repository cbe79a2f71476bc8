"""The index space of one attention site, and the views that bring a tensor from one arrangement of it to another.

Each digit of an index (batch, kv head, query head within its group, query token, key token, channel) is a ``Var``.  A
tensor of the site is described by the vars of each of its dims, outermost first; ``rearrange`` then emits the reshape,
permute and expand between two such descriptions, as einops does from names.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx import Graph, Node

from .layout_nodes import shape_of, tensor_of
from .layout_sizes import LayoutError, Size, divide, known_equal, product, same_shape

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Var:
    """One digit of the index space: ``size`` steps of ``stride`` within a label of the contractions."""

    label: str
    size: Size
    stride: Size

    def __repr__(self) -> str:
        return f"{self.label}/{self.stride}:{self.size}"


Dims: TypeAlias = "tuple[tuple[Var, ...], ...]"


def refine(left: list[Size], right: list[Size]) -> list[Size]:
    """Common refinement of two mixed-radix splits (outermost first) of one size."""
    a = [s for s in left if not known_equal(s, 1)]
    b = [s for s in right if not known_equal(s, 1)]
    out: list[Size] = []
    while a and b:
        x, y = a.pop(), b.pop()
        if known_equal(x, y):
            out.append(x)
            continue
        rest = divide(x, y)
        if rest is not None:
            out.append(y)
            a.append(rest)
            continue
        rest = divide(y, x)
        if rest is None:
            raise LayoutError(f"digits of size {x} and {y} do not nest")
        out.append(x)
        b.append(rest)
    if a or b:
        raise LayoutError(f"splits {left} and {right} are not of one size")
    return out[::-1] or [1]


class Space:
    """Labels with their sizes, refined by cuts until every tensor's dims are whole runs of digits."""

    def __init__(self) -> None:
        self.sizes: dict[str, list[Size]] = {}
        self._vars: dict[str, tuple[Var, ...]] = {}

    def add(self, label: str, size: Size) -> None:
        self.sizes.setdefault(label, [size])

    def total(self, label: str) -> Size:
        return product(self.sizes[label])

    def cut(self, label: str, sizes: Sequence[Size], stride: Size = 1) -> None:
        """Ask that the digits of ``label`` from ``stride`` upwards split as ``sizes``.  Raises ``LayoutError``."""
        outer = divide(self.total(label), product(sizes) * stride)
        if outer is None:
            raise LayoutError(f"digits {list(sizes)} do not divide {self.total(label)}")
        self.sizes[label] = refine(self.sizes[label], [outer, *sizes, stride])

    def vars(self, label: str) -> tuple[Var, ...]:
        if label not in self._vars:
            stride: Size = 1
            found: list[Var] = []
            for size in reversed(self.sizes[label]):
                found.append(Var(label, size, stride))
                stride = stride * size
            self._vars[label] = tuple(reversed(found))
        return self._vars[label]

    def run(self, label: str, size: Size, stride: Size) -> tuple[Var, ...]:
        """The vars that make up one atom of ``label``."""
        if known_equal(self.total(label), size):
            return self.vars(label)
        found: list[Var] = []
        total: Size = 1
        for var in reversed(self.vars(label)):
            if known_equal(total, size):
                break
            if found or known_equal(var.stride, stride):
                found.append(var)
                total = total * var.size
        if not known_equal(total, size):
            raise LayoutError(f"no digits of {label} make up {size} steps of {stride}")
        return tuple(reversed(found))


# ---- emission


def emit(graph: Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Node:
    """A new call at the graph's insertion point, with its metadata computed on the fake values."""
    node = graph.call_function(target, args, kwargs or {})
    values = torch.fx.node.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    mode = detect_fake_mode([n.meta.get("val") for n in node.all_input_nodes])
    if mode is None:
        mode = _mode_of(graph)
    # Composite operators in Python keep symbolic sizes; matmul in C++ turns them into numbers on torch 2.11.
    with mode, enable_python_dispatcher(), torch.no_grad():
        node.meta["val"] = target(*values[0], **values[1])
    return node


def _mode_of(graph: Graph) -> Any:
    """Fake mode for calls without tensor inputs (arange)."""
    mode = detect_fake_mode([n.meta.get("val") for n in graph.nodes if n.op == "placeholder"])
    if mode is None:
        raise ValueError(
            "the graph carries no fake tensors; capture it with torch.export or passes.capture first"
        )
    return mode


class Sizes:
    """Turns symbolic sizes into graph values by finding a tensor dim that has this size."""

    def __init__(self, graph: Graph, nodes: Iterable[Node]) -> None:
        self.graph = graph
        self.nodes = list(nodes)

    def value(self, size: Size) -> Any:
        """An int, or a node giving the size.  Raises ``LayoutError`` if no tensor of the site shows it."""
        if isinstance(size, int):
            return size
        fixed = size.node.maybe_as_int()
        if fixed is not None:
            return fixed
        for node in self.nodes:
            value = node.meta.get("val")
            if isinstance(value, SymInt) and known_equal(value, size):
                return node
        for find in (_equal_dim, _factor_dim):
            found = find(self.nodes, size)
            if found is not None:
                node, dim, factor = found
                length = emit(self.graph, aten.sym_size.int, (node, dim))
                return length if factor == 1 else emit(self.graph, operator.floordiv, (length, factor))
        raise LayoutError(f"no tensor shows the symbolic size {size}")

    def shape(self, sizes: Sequence[Size]) -> list[Any]:
        return [self.value(size) for size in sizes]


def _equal_dim(nodes: list[Node], size: Size) -> tuple[Node, int, int] | None:
    for node in nodes:
        value = tensor_of(node)
        for dim, length in enumerate(value.shape if value is not None else ()):
            if known_equal(length, size):
                return node, dim, 1
    return None


def _factor_dim(nodes: list[Node], size: Size) -> tuple[Node, int, int] | None:
    for node in nodes:
        value = tensor_of(node)
        for dim, length in enumerate(value.shape if value is not None else ()):
            factor = divide(length, size)
            if isinstance(factor, SymInt):
                factor = factor.node.maybe_as_int()
            if factor is not None:
                return node, dim, factor
    return None


def reshape(graph: Graph, sizes: Sizes, node: Node, shape: Sequence[Size]) -> Node:
    if same_shape(shape_of(node), shape):
        return node
    return emit(graph, aten.reshape.default, (node, sizes.shape(shape)))


def rearrange(
    graph: Graph,
    sizes: Sizes,
    node: Node,
    have: Dims,
    want: Dims,
    drop: Callable[[Var], bool] = lambda var: False,
) -> Node:
    """Bring ``node``, whose dims are the vars ``have``, to dims ``want``.

    A wanted dim none of whose vars the node has gets size 1; one that it has in part is expanded.  Vars that the node has
    and nobody wants must be of size 1, or repetitions for which ``drop`` says that one index stands for all.
    """
    flat = [var for dim in have for var in dim]
    wanted = [var for dim in want for var in dim]
    node = reshape(graph, sizes, node, [var.size for var in flat])
    for position in range(len(flat) - 1, -1, -1):
        var = flat[position]
        if var in wanted:
            continue
        if not (known_equal(var.size, 1) or drop(var)):
            raise LayoutError(f"{node.name} has a dim of size {var.size} that the result does not")
        node = emit(graph, aten.select.int, (node, position, 0))
        flat.pop(position)
    kept = [var for var in wanted if var in flat]
    order = [flat.index(var) for var in kept]
    if order != sorted(order):
        node = emit(graph, aten.permute.default, (node, order))
    partial = [any(var in kept for var in dim) for dim in want]
    units: list[Size] = [
        var.size if var in kept else 1 for dim, part in zip(want, partial, strict=True) if part for var in dim
    ]
    full: list[Size] = [var.size for dim, part in zip(want, partial, strict=True) if part for var in dim]
    if not same_shape(units, full):
        node = reshape(graph, sizes, node, units)
        node = emit(graph, aten.expand.default, (node, sizes.shape(full)))
    return reshape(
        graph,
        sizes,
        node,
        [product(v.size for v in d) if p else 1 for d, p in zip(want, partial, strict=True)],
    )


def match_strides(graph: Graph, node: Node, like: Tensor) -> Node:
    """A node with the memory order of ``like``, copied only if it has another (views downstream may rely on it)."""
    value = tensor_of(node)
    assert value is not None
    if all(
        known_equal(size, 1) or known_equal(new, old)
        for size, new, old in zip(value.shape, value.stride(), like.stride(), strict=True)
    ):
        return node
    order = _memory_order(like)
    if order is None:
        return node
    back = [order.index(dim) for dim in range(len(order))]
    node = emit(graph, aten.permute.default, (node, order)) if order != sorted(order) else node
    node = emit(graph, aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    return emit(graph, aten.permute.default, (node, back)) if order != sorted(order) else node


def _memory_order(like: Tensor) -> list[int] | None:
    """Dims from the outermost in memory to the innermost, or None if the tensor is not dense."""
    left = list(range(like.dim()))
    order: list[int] = []
    length: Size = 1
    while left:
        ones = [d for d in reversed(left) if known_equal(like.shape[d], 1)]
        inner = ones[:1] or [d for d in reversed(left) if known_equal(like.stride(d), length)][:1]
        if not inner:
            return None
        order.append(inner[0])
        left.remove(inner[0])
        length = length * like.shape[inner[0]]
    return order[::-1]
