"""A small layout algebra: a node described as a pure view of the node its elements come from.

Attention reads keys and values through permutes, reshapes, slices and head repetitions.  Matching those by template never
ends, so each is applied to a ``Layout`` instead: every dim of the node is a tuple of *atoms*, outermost first, and an atom
``(size, axis, stride)`` says that its digit moves ``stride`` elements along ``axis`` of the source (``axis`` is ``None``
for a repetition that moves nowhere).  The idea follows CuTe's nested layouts, kept per source axis so that two axes of
equal size are never confused.  Sizes may be symbolic; every comparison must be provable and nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .layout_nodes import arguments, constant_value, op_name, shape_of, size_value, tensor_of, words
from .layout_sizes import LayoutError, Size, divide, known_equal, product, same_shape

Dim: TypeAlias = "tuple[Atom, ...]"


@dataclass(frozen=True)
class Atom:
    """One digit of a dim: ``size`` steps of ``stride`` elements along source ``axis`` (None: a repetition)."""

    size: Size
    axis: int | None
    stride: Size = 1


@dataclass(frozen=True)
class Layout:
    """Where each element of a node lies in its source.

    Element ``(i0, i1, ...)`` has, along source axis ``a``, the index ``starts[a]`` plus the sum of ``digit * stride`` over
    the atoms on that axis.  An axis without atoms is fixed at ``starts[a]``.
    """

    dims: tuple[Dim, ...]
    source_shape: tuple[Size, ...]
    starts: tuple[Size, ...]

    @staticmethod
    def identity(shape: Sequence[Size]) -> Layout:
        dims = tuple((Atom(size, axis, 1),) for axis, size in enumerate(shape))
        return Layout(dims, tuple(shape), (0,) * len(shape))

    @property
    def shape(self) -> tuple[Size, ...]:
        return tuple(product(atom.size for atom in dim) for dim in self.dims)

    def is_full(self, axis: int) -> bool:
        span = self.span(axis)
        return span is not None and known_equal(span[0], 0) and known_equal(span[1], self.source_shape[axis])

    def span(self, axis: int) -> tuple[Size, Size] | None:
        """``(start, length)`` if the atoms on ``axis`` tile one contiguous range, else None."""
        atoms = [a for dim in self.dims for a in dim if a.axis == axis and not known_equal(a.size, 1)]
        length: Size = 1
        while atoms:
            inner = next((a for a in atoms if known_equal(a.stride, length)), None)
            if inner is None:
                return None
            atoms.remove(inner)
            length = length * inner.size
        return self.starts[axis], length

    # ---- movement operations; each gives the layout of the result or raises LayoutError

    def permute(self, order: Sequence[int]) -> Layout:
        return replace(self, dims=tuple(self.dims[i] for i in order))

    def unsqueeze(self, dim: int) -> Layout:
        return replace(self, dims=self.dims[:dim] + ((),) + self.dims[dim:])

    def drop(self, dims: Iterable[int]) -> Layout:
        """Remove dims of size 1."""
        gone = set(dims)
        return replace(self, dims=tuple(d for i, d in enumerate(self.dims) if i not in gone))

    def expand(self, shape: Sequence[Size]) -> Layout:
        lead = len(shape) - len(self.dims)
        out: list[Dim] = [(Atom(size, None, 0),) for size in shape[:lead]]
        for size, new, dim in zip(self.shape, shape[lead:], self.dims, strict=True):
            if known_equal(size, new):
                out.append(dim)
            elif known_equal(size, 1):
                out.append((Atom(new, None, 0),))
            else:
                raise LayoutError(f"expands a dim of size {size} to {new}")
        return replace(self, dims=tuple(out))

    def repeat(self, dim: int, times: Size) -> Layout:
        """Whole copies one after the other (``Tensor.repeat``): the repetition is the outer digit."""
        return self._with_dim(dim, (Atom(times, None, 0), *self.dims[dim]))

    def interleave(self, dim: int, times: Size) -> Layout:
        """Each index repeated in place (``repeat_interleave``): the repetition is the inner digit."""
        return self._with_dim(dim, (*self.dims[dim], Atom(times, None, 0)))

    def slice(self, dim: int, start: Size, size: Size, step: Size = 1) -> Layout:
        """``size`` indices of ``dim`` from ``start`` on (not negative), ``step`` apart."""
        atoms = self.dims[dim]
        if known_equal(start, 0) and known_equal(size, self.shape[dim]) and known_equal(step, 1):
            return self
        if not atoms:
            raise LayoutError("slices a dim of size 1")
        head, rest = atoms[0], atoms[1:]
        if rest:
            inner = product(a.size for a in rest)
            first, count = divide(start, inner), divide(size, inner)
            if first is None or count is None or not known_equal(step, 1):
                raise LayoutError("slices across the digits of a merged dim")
            start, size = first, count
        moved = self._moved(head, start)
        return moved._with_dim(dim, (Atom(size, head.axis, head.stride * step), *rest))

    def select(self, dim: int, index: Size) -> Layout:
        """Fix one index of ``dim`` (not negative) and drop the dim."""
        moved, rest = self, index
        for atom in reversed(self.dims[dim][1:]):
            if not (isinstance(rest, int) and isinstance(atom.size, int)):
                raise LayoutError("selects a symbolic index of a merged dim")
            moved = moved._moved(atom, rest % atom.size)
            rest = rest // atom.size
        if self.dims[dim]:
            moved = moved._moved(self.dims[dim][0], rest)
        return moved.drop([dim])

    def reshape(self, shape: Sequence[Size]) -> Layout:
        """Flatten, then regroup, splitting and merging atoms."""
        pending: list[list[Atom]] = [list(dim) for dim in self.dims]
        sizes = list(self.shape)
        fresh = [True] * len(pending)
        at = 0
        out: list[Dim] = []
        for target in shape:
            while at < len(pending) and not fresh[at] and not pending[at]:
                at += 1
            # A dim that stays itself keeps its atoms, those of size 1 as well.
            if at < len(pending) and fresh[at] and known_equal(sizes[at], target):
                out.append(tuple(pending[at]))
                at += 1
                continue
            dim: list[Atom] = []
            rest: Size = target
            while not known_equal(rest, 1):
                while at < len(pending) and not pending[at]:
                    at += 1
                if at == len(pending):
                    raise LayoutError(f"regroups {self.shape} as {tuple(shape)}")
                atom = pending[at][0]
                fresh[at] = False
                fewer = divide(rest, atom.size)
                if fewer is not None:
                    pending[at].pop(0)
                    if not known_equal(atom.size, 1):
                        dim.append(atom)
                    rest = fewer
                    continue
                inner = divide(atom.size, rest)
                if inner is None:
                    raise LayoutError(
                        f"regroups {self.shape} as {tuple(shape)}: {atom.size} and {rest} share no whole factor"
                    )
                dim.append(Atom(rest, atom.axis, atom.stride * inner))
                pending[at][0] = Atom(inner, atom.axis, atom.stride)
                rest = 1
            out.append(tuple(dim))
        if not all(known_equal(atom.size, 1) for dim_left in pending[at:] for atom in dim_left):
            raise LayoutError(f"regroups {self.shape} as {tuple(shape)}")
        return replace(self, dims=tuple(out))

    def _with_dim(self, dim: int, atoms: Dim) -> Layout:
        return replace(self, dims=self.dims[:dim] + (atoms,) + self.dims[dim + 1 :])

    def _moved(self, atom: Atom, steps: Size) -> Layout:
        if atom.axis is None or known_equal(steps, 0):
            return self
        starts = list(self.starts)
        starts[atom.axis] = starts[atom.axis] + atom.stride * steps
        return replace(self, starts=tuple(starts))


# ---- from a node to the layout of its input


def _wrap(dim: Any, rank: int) -> int:
    if not isinstance(dim, int):
        raise LayoutError("takes a symbolic dim")
    return dim + rank if dim < 0 else dim


def _index(value: Any, size: Size) -> Size:
    """A start or index argument, made non-negative."""
    index = size_value(value)
    if index is None:
        raise LayoutError("takes an index that is not an int")
    if statically_known_true(index >= 0):
        return index
    if statically_known_true(index < 0):
        return index + size
    raise LayoutError(f"takes an index {index} of unknown sign")


def _slice(layout: Layout, node: Node, bound: dict[str, Any]) -> Layout:
    dim = _wrap(bound["dim"], len(layout.dims))
    size = layout.shape[dim]
    start = 0 if bound["start"] is None else _index(bound["start"], size)
    return layout.slice(dim, start, shape_of(node)[dim], bound["step"])


def _movedim(layout: Layout, node: Node, bound: dict[str, Any]) -> Layout:
    rank = len(layout.dims)
    pairs = [bound["source"], bound["destination"]]
    source, target = ([_wrap(d, rank) for d in (p if isinstance(p, (list, tuple)) else [p])] for p in pairs)
    rest = iter([d for d in range(rank) if d not in source])
    return layout.permute([source[target.index(d)] if d in target else next(rest) for d in range(rank)])


def _swap(layout: Layout, first: Any, second: Any) -> Layout:
    rank = len(layout.dims)
    order = list(range(rank))
    a, b = _wrap(first, rank), _wrap(second, rank)
    order[a], order[b] = order[b], order[a]
    return layout.permute(order)


def _squeeze(layout: Layout, node: Node, bound: dict[str, Any]) -> Layout:
    rank = len(layout.dims)
    given = bound.get("dim")
    dims = list(range(rank)) if given is None else given if isinstance(given, (list, tuple)) else [given]
    gone = [d for d in (_wrap(d, rank) for d in dims) if known_equal(layout.shape[d], 1)]
    if rank - len(gone) != len(shape_of(node)):
        raise LayoutError("squeezes a dim that is not provably of size 1")
    return layout.drop(gone)


def _repeat(layout: Layout, node: Node, bound: dict[str, Any]) -> Layout:
    shape = shape_of(node)
    for _ in range(len(shape) - len(layout.dims)):
        layout = layout.unsqueeze(0)
    for dim, (old, new) in enumerate(zip(layout.shape, shape, strict=True)):
        times = divide(new, old)
        if times is None:
            raise LayoutError(f"repeats a dim of size {old} to {new}")
        if not known_equal(times, 1):
            layout = layout.repeat(dim, times)
    return layout


def _interleave(layout: Layout, node: Node, bound: dict[str, Any]) -> Layout:
    times = size_value(bound.get("repeats"))
    if bound.get("dim") is None or times is None:
        raise LayoutError("repeats a flattened tensor, or by a tensor of counts")
    return layout.interleave(_wrap(bound["dim"], len(layout.dims)), times)


def _narrow(layout: Layout, node: Node, bound: dict[str, Any]) -> Layout:
    dim = _wrap(bound["dim"], len(layout.dims))
    return layout.slice(dim, _index(bound["start"], layout.shape[dim]), shape_of(node)[dim])


def _select(layout: Layout, node: Node, bound: dict[str, Any]) -> Layout:
    dim = _wrap(bound["dim"], len(layout.dims))
    return layout.select(dim, _index(bound["index"], layout.shape[dim]))


_Rule: TypeAlias = Callable[[Layout, Node, "dict[str, Any]"], Layout]
_IDENTITY: _Rule = lambda layout, node, bound: layout  # noqa: E731
_RESHAPE: _Rule = lambda layout, node, bound: layout.reshape(shape_of(node))  # noqa: E731
_EXPAND: _Rule = lambda layout, node, bound: layout.expand(shape_of(node))  # noqa: E731
_TRANSPOSE: _Rule = lambda layout, node, bound: _swap(layout, bound["dim0"], bound["dim1"])  # noqa: E731
_SWAPAXES: _Rule = lambda layout, node, bound: _swap(layout, bound["axis0"], bound["axis1"])  # noqa: E731
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(words("contiguous clone alias detach detach_ lift_fresh lift_fresh_copy"), _IDENTITY),
    **dict.fromkeys(words("view reshape _unsafe_view view_as reshape_as flatten unflatten"), _RESHAPE),
    **dict.fromkeys(words("_reshape_alias view_copy _reshape_copy"), _RESHAPE),
    **dict.fromkeys(words("expand expand_as broadcast_to expand_copy"), _EXPAND),
    **dict.fromkeys(words("transpose swapdims transpose_copy"), _TRANSPOSE),
    "swapaxes": _SWAPAXES,
    "t": lambda layout, node, bound: layout.permute(list(range(len(layout.dims)))[::-1]),
    "numpy_T": lambda layout, node, bound: layout.permute(list(range(len(layout.dims)))[::-1]),
    "mT": lambda layout, node, bound: _swap(layout, -1, -2),
    "permute": lambda layout, node, bound: layout.permute([_wrap(d, len(layout.dims)) for d in bound["dims"]]),
    **dict.fromkeys(words("movedim moveaxis"), _movedim),
    "unsqueeze": lambda layout, node, bound: layout.unsqueeze(_wrap(bound["dim"], len(layout.dims) + 1)),
    "squeeze": _squeeze,
    "slice": _slice,
    "narrow": _narrow,
    "select": _select,
    **dict.fromkeys(words("repeat tile"), _repeat),
    "repeat_interleave": _interleave,
}  # fmt: skip
_SPLITS = words("split split_with_sizes chunk tensor_split unbind unsafe_split unsafe_chunk")
_CASTS = words("to _to_copy type_as float half")
_FLOATS = {torch.float16: (5, 10), torch.bfloat16: (8, 7), torch.float32: (8, 23), torch.float64: (11, 52)}


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    if wide not in _FLOATS or narrow not in _FLOATS:
        return False
    return all(w >= n for w, n in zip(_FLOATS[wide], _FLOATS[narrow], strict=True))


def is_idle_dropout(node: Node) -> bool:
    """A dropout that changes nothing: evaluation mode or p = 0."""
    if op_name(node) not in ("dropout", "dropout_", "feature_dropout"):
        return False
    bound = arguments(node)
    return bound["train"] is False or bound["p"] == 0


def movement_input(node: Node) -> Node | None:
    """The tensor that a movement operation rearranges, or None if ``node`` is not one (casts and scalings are not)."""
    name = op_name(node)
    if name == "view" and node.target is torch.ops.aten.view.dtype:
        return None
    if name in ("clone", "contiguous") and not known_dense(node):
        return None
    if name == "getitem":
        inner = node.args[0]
        return inner.args[0] if isinstance(inner, Node) and op_name(inner) in _SPLITS else None  # type: ignore[return-value]
    if name in _RULES or is_idle_dropout(node):
        source = node.args[0] if node.args else None
        return source if isinstance(source, Node) and tensor_of(source) is not None else None
    return None


def known_dense(node: Node) -> bool:
    value = tensor_of(node)
    return value is None or value.layout == torch.strided


def apply_movement(layout: Layout, node: Node) -> Layout:
    """Layout of a movement node, given the layout of its input.  Raises ``LayoutError`` if it is no pure view."""
    name = op_name(node)
    if name == "getitem":
        return _apply_part(layout, node)
    rule = _RULES.get(name, _IDENTITY if is_idle_dropout(node) else None)
    if rule is None:
        raise LayoutError(f"{name or node.op} is not a movement operation")
    return rule(layout, node, arguments(node))


def _apply_part(layout: Layout, node: Node) -> Layout:
    parts, which = node.args[0], node.args[1]
    assert isinstance(parts, Node) and isinstance(which, int)
    values = parts.meta["val"]
    which = which + len(values) if which < 0 else which
    dim = _wrap(arguments(parts).get("dim", 0), len(layout.dims))
    if op_name(parts) == "unbind":
        return layout.select(dim, which)
    start: Size = 0
    for value in values[:which]:
        start = start + value.shape[dim]
    return layout.slice(dim, start, values[which].shape[dim])


def cast_input(node: Node) -> Node | None:
    """The input of a change of floating dtype that stays on its device, else None."""
    if op_name(node) not in _CASTS or not isinstance(node.args[0], Node):
        return None
    new, old = tensor_of(node), tensor_of(node.args[0])
    if new is None or old is None or new.device != old.device:
        return None
    return node.args[0] if new.dtype == old.dtype or (new.dtype in _FLOATS and old.dtype in _FLOATS) else None


def scaling(node: Node, constants: Mapping[str, Tensor] | None = None) -> tuple[Node, float] | None:
    """``(input, factor)`` if the node multiplies or divides a floating tensor by a constant, else None."""
    name = op_name(node)
    if (
        name not in ("mul", "div", "true_divide", "multiply", "divide")
        or node.kwargs.get("rounding_mode") is not None
    ):
        return None
    left, right = node.args[0], node.args[1]
    sides = [(left, right)] if name.startswith(("div", "true")) else [(left, right), (right, left)]
    for tensor, number in sides:
        factor = constant_value(number, constants)
        value = tensor_of(tensor)
        if (
            factor is None
            or value is None
            or value.dtype not in _FLOATS
            or not same_shape(value.shape, shape_of(node))
        ):
            continue
        assert isinstance(tensor, Node)
        if len(sides) == 1:
            return (tensor, 1.0 / factor) if factor else None
        return tensor, factor
    return None


@dataclass(frozen=True)
class Trace:
    """A node as ``scale * cast(view of source)``.

    ``casts`` lists the dtypes met, the node's own first; ``path`` the nodes walked, the node itself first (the source is
    not in it).  ``stopped`` says why a movement operation at the source could not be described, if that ended the walk.
    """

    source: Node
    layout: Layout
    casts: tuple[torch.dtype, ...] = ()
    scale: float = 1.0
    path: tuple[Node, ...] = field(default=(), compare=False)
    stopped: str | None = None


def trace_layout(
    node: Node, *, through_scale: bool = False, constants: Mapping[str, Tensor] | None = None
) -> Trace:
    """Walk back through views, repetitions, casts (and constant scalings) to the first node that is none of these.

    Writes, ``cat``, arithmetic and everything unknown end the walk.  A chain of casts is followed only while it equals one
    cast from the source's dtype to the node's.  With ``through_scale`` multiplications by constants are passed and
    multiplied into ``scale``.
    """
    final = tensor_of(node)
    path: list[Node] = []
    at = node
    while final is not None:
        moved = movement_input(at)
        cast = None if moved is not None else cast_input(at)
        scaled = scaling(at, constants) if through_scale and moved is None and cast is None else None
        if moved is not None:
            step = moved
        elif cast is not None:
            dtype, older = tensor_of(at).dtype, tensor_of(cast).dtype  # type: ignore[union-attr]
            if not (_holds(dtype, older) or dtype == final.dtype or dtype == older):
                break
            step = cast
        elif scaled is not None:
            step = scaled[0]
        else:
            break
        path.append(at)
        at = step
    return _describe(path, at, constants, None)


def _describe(
    path: list[Node], source: Node, constants: Mapping[str, Tensor] | None, stopped: str | None
) -> Trace:
    """The trace along ``path`` (the node first) down to ``source``.

    If a step on the way turns out to be no pure view, the part nearest to the node decides: that step becomes the source.
    """
    layout = Layout.identity(shape_of(source))
    casts: list[torch.dtype] = []
    scale = 1.0
    for position in range(len(path) - 1, -1, -1):
        at = path[position]
        if movement_input(at) is not None:
            try:
                layout = apply_movement(layout, at)
            except LayoutError as error:
                return _describe(path[:position], at, constants, f"{at.name} {error}")
        elif (cast := cast_input(at)) is None:
            found = scaling(at, constants)
            scale *= found[1] if found else 1.0
        else:
            dtype, older = tensor_of(at).dtype, tensor_of(cast).dtype  # type: ignore[union-attr]
            if dtype != older:
                casts.insert(0, dtype)
    return Trace(source, layout, tuple(casts), scale, tuple(path), stopped)
