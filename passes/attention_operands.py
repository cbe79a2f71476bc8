"""Query, key and value of a site: traced to their sources, with every digit of the index space put in its place there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from torch.fx import Node

from .attention_scores import Blocked, Contraction
from .attention_space import Dims, Var
from .layout import Atom, Layout, Trace, trace_layout
from .layout_nodes import op_name, shape_of
from .layout_sizes import LayoutError, Size, divide, known_equal, must_agree

Place = tuple[int, Size]


@dataclass
class Reading:
    """An operand with its labels and its trace; ``whole`` is the trace that stays at the operand itself."""

    node: Node
    labels: tuple[str, ...]
    by: Node
    trace: Trace
    whole: Trace
    is_value: bool = False

    def atoms(self, label: str, size: Size) -> tuple[Atom, ...] | None:
        """Atoms of one label; None where the operand does not depend on it (broadcast or absent)."""
        if label not in self.labels:
            return None
        dim = self.labels.index(label)
        if known_equal(self.trace.layout.shape[dim], 1) and not known_equal(size, 1):
            return None
        return self.trace.layout.dims[dim]

    def stay(self, reason: str) -> None:
        """Give up the walk to the source and describe the operand as its own source."""
        mixing = [
            node.name for node in self.trace.path if op_name(node) in ("view", "reshape", "_unsafe_view")
        ]
        where = mixing[-1] if mixing else self.node.name
        self.trace = replace(self.whole, stopped=self.trace.stopped or f"{where} {reason}")


def reading(
    node: Node,
    labels: tuple[str, ...],
    by: Node,
    constants: Mapping[str, Tensor] | None,
    *,
    is_value: bool = False,
    repeats: dict[str, Size] | None = None,
) -> Reading:
    """Trace an operand.  ``repeats`` gives labels along which the operation itself repeats it, each index in place."""
    trace = trace_layout(node, through_scale=not is_value, constants=constants)
    whole = Trace(node, Layout.identity(shape_of(node)))
    for label, times in (repeats or {}).items():
        dim = labels.index(label)
        trace = replace(trace, layout=trace.layout.interleave(dim, times))
        whole = replace(whole, layout=whole.layout.interleave(dim, times))
    return Reading(node, labels, by, trace, whole, is_value)


def place_vars(vars: Sequence[Var], atoms: Sequence[Atom]) -> dict[Var, Place | None]:
    """Which step along which source axis each var takes, given the atoms of the same dim."""
    found: dict[Var, Place | None] = {}
    units = [a for a in atoms if known_equal(a.size, 1)]
    left = [a for a in atoms if not known_equal(a.size, 1)]
    for var in reversed(vars):
        if known_equal(var.size, 1):
            found[var] = (units[0].axis, units[0].stride) if units and units[0].axis is not None else None
            continue
        if not left:
            raise LayoutError(f"digit {var} has no atom")
        atom = left.pop()
        found[var] = None if atom.axis is None else (atom.axis, atom.stride)
        if not known_equal(atom.size, var.size):
            steps = divide(atom.size, var.size)
            if steps is None:
                raise LayoutError(f"digit {var} and atom {atom} do not nest")
            left.append(Atom(steps, atom.axis, atom.stride * var.size))
    return found


def source_dims(layout: Layout, place: dict[Var, Place | None]) -> Dims | None:
    """Vars of each source axis, outermost first, or None if the read part of an axis is not one contiguous range."""
    dims: list[tuple[Var, ...]] = []
    for axis, size in enumerate(layout.source_shape):
        vars_ = {v: p for v, p in place.items() if p is not None and p[0] == axis}
        done: list[Var] = [v for v in vars_ if known_equal(v.size, 1)]
        rest = {v: p for v, p in vars_.items() if v not in done}
        length: Size = 1
        while rest:
            inner = next((v for v, p in rest.items() if p is not None and known_equal(p[1], length)), None)
            if inner is None:
                return None
            del rest[inner]
            done.append(inner)
            length = length * inner.size
        if not vars_ and not known_equal(size, 1) and not isinstance(layout.starts[axis], int):
            return None
        if not (isinstance(layout.starts[axis], int) or known_equal(length, size)):
            return None
        dims.append(tuple(reversed(done)))
    return tuple(dims)


def fused_products(
    node: Node, query: Node, key: Node, value: Node, *, gqa: bool
) -> tuple[Contraction, Contraction, dict[str, Size]]:
    """The two products inside a fused attention of ``[..., H, T, D]`` operands, and the repetition of kv heads in them."""
    shapes = [shape_of(operand) for operand in (query, key, value)]
    ranks = [len(shape) for shape in shapes]
    if min(ranks) < 2:
        raise Blocked(node, "has operands of fewer than two dims")
    lead = tuple(f"b{i}" for i in range(max(ranks) - 2))
    labels = [lead[len(lead) - (rank - 2) :] for rank in ranks]
    repeats: dict[str, Size] = {}
    if gqa and lead:
        times = [divide(shapes[0][-3], shape[-3]) for shape in shapes[1:]]
        if times[0] is None or not known_equal(times[0], times[1] or 0):
            counts = [shape[-3] for shape in shapes]
            if not all(isinstance(count, int) for count in counts):
                raise Blocked(
                    node, "groups query heads over kv heads whose numbers are symbolic; mark them static"
                )
            raise Blocked(
                node, f"groups {counts[0]} query heads over {counts[1]} kv heads, which do not divide"
            )
        if not known_equal(times[0], 1):
            repeats[lead[-1]] = times[0]
    sizes = {label: size for label, size in zip(lead, shape_of(node)[:-2], strict=True)}
    agree = [(shapes[1][-2], shapes[2][-2]), (shapes[0][-1], shapes[1][-1])]
    for side, shape in zip(labels, shapes, strict=True):
        agree += [
            (sizes[a], n)
            for a, n in zip(side, shape, strict=False)
            if a not in repeats and not known_equal(n, 1)
        ]
    for left, right in agree:
        if not must_agree(left, right):
            raise Blocked(node, f"has operands of sizes {left} and {right} that do not provably agree")
    whole = (*(sizes[label] for label in lead), shapes[0][-2], shapes[1][-2])
    first = Contraction(
        node, (*lead, "m", "n"), query, (*labels[0], "m", "c"), key, (*labels[1], "n", "c"), sizes=whole
    )
    last = Contraction(node, (*lead, "m", "e"), node, (*lead, "m", "n"), value, (*labels[2], "n", "e"))
    return first, last, repeats
