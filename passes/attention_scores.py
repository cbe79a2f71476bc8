"""The path of the scores: from the contraction of query and key, through scales, masks and softcap, to the softmax and on
to the contraction with the values, in whatever order and spelling the model wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from .attention_effects import Effects, written
from .attention_softmax import Softmax
from .layout import cast_input, movement_input
from .layout_nodes import arguments, constant_value, op_name, shape_of, size_value, tensor_of, words
from .layout_sizes import Size, known_equal, same_shape


class Blocked(Exception):
    """The walk ended at ``node``, the first one that stood in the way."""

    def __init__(self, node: Node, reason: str) -> None:
        super().__init__(f"{node.name}: {reason}")
        self.node = node
        self.reason = reason


@dataclass(frozen=True)
class Contraction:
    """``out[...] = alpha * sum(left * right) + beta * bias`` with one label per dim."""

    node: Node
    out: tuple[str, ...]
    left: Node
    left_labels: tuple[str, ...]
    right: Node
    right_labels: tuple[str, ...]
    alpha: float = 1.0
    bias: Node | None = None
    beta: float = 1.0
    sizes: tuple[Size, ...] | None = None

    @property
    def shape(self) -> tuple[Size, ...]:
        """Sizes of ``out`` (a fused operation has a product that no node shows)."""
        return shape_of(self.node) if self.sizes is None else self.sizes

    def other(self, operand: Node) -> tuple[Node, tuple[str, ...], tuple[str, ...]]:
        """``(the other operand, its labels, labels of operand)``."""
        if self.left is operand:
            return self.right, self.right_labels, self.left_labels
        return self.left, self.left_labels, self.right_labels


def contraction(node: Node) -> Contraction | None:
    """The node read as a contraction of two tensors (matmul, mm, bmm, baddbmm, einsum), or None."""
    name = op_name(node)
    if name in ("matmul", "bmm", "mm"):
        left, right = node.args[0], node.args[1]
        assert isinstance(left, Node) and isinstance(right, Node)
        ranks = len(shape_of(left)), len(shape_of(right))
        if min(ranks) < 2:
            return None
        batch = tuple(f"b{i}" for i in range(max(ranks) - 2))
        a = (*batch[len(batch) - (ranks[0] - 2) :], "m", "c")
        b = (*batch[len(batch) - (ranks[1] - 2) :], "c", "n")
        return Contraction(node, (*batch, "m", "n"), left, a, right, b)
    if name == "baddbmm":
        bound = arguments(node)
        alpha, beta = constant_value(bound["alpha"]), constant_value(bound["beta"])
        if alpha is None or beta is None:
            return None
        bias = bound["self"] if beta else None
        return Contraction(
            node,
            ("b0", "m", "n"),
            bound["batch1"],
            ("b0", "m", "c"),
            bound["batch2"],
            ("b0", "c", "n"),
            alpha,
            bias,
            beta,
        )
    return _einsum(node) if name == "einsum" else None


def _einsum(node: Node) -> Contraction | None:
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (list, tuple)) or len(operands) != 2:
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    sides = inputs.split(",")
    labels: list[tuple[str, ...]] = []
    dots = 0
    for side, operand in zip(sides, operands, strict=True):
        assert isinstance(operand, Node)
        extra = len(shape_of(operand)) - len(side.replace("...", "")) if "..." in side else 0
        head, _, tail = side.partition("...")
        # An ellipsis aligns from the right, so the last of its dims has number 0.
        labels.append((*head, *(f".{i}" for i in reversed(range(extra))), *tail))
        dots = max(dots, extra)
    ellipsis = tuple(f".{i}" for i in reversed(range(dots)))
    if arrow:
        head, mark, tail = output.partition("...")
        if ellipsis and not mark:
            return None
        out = (*head, *(ellipsis if mark else ()), *tail)
    else:
        once = sorted(c for c in set(inputs) - set(".,") if inputs.count(c) == 1)
        out = (*ellipsis, *once)
    left, right = labels
    if any(len(set(group)) != len(group) for group in (left, right, out)):
        return None
    if any(label not in out for label in set(left) ^ set(right)):
        return None  # sums one operand alone
    return Contraction(node, out, operands[0], left, operands[1], right)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Step:
    """One operation on the scores.  ``value`` and ``other`` depend on ``kind``:

    contract; move; cast; scale (value); factor (other tensor, value = exponent +1 or -1); add (other, value = its factor);
    fill (other = condition, value = fill, flag = True where the scores are kept);
    floor (value, a lower bound); tanh; sink (other, flag = comes last);
    shift (a maximum along the softmax dim, ``dim``, is subtracted); softmax (``dim``); zero_nan.
    """

    node: Node
    kind: str
    value: float = 1.0
    other: Node | None = None
    flag: bool = True
    dim: int = -1


@dataclass
class ScorePath:
    """Steps from the query-key contraction to the tensor the value contraction reads."""

    first: Contraction
    steps: list[Step]
    last: Contraction
    probabilities: Node
    interior: set[Node] = field(default_factory=set)


MOST_STEPS = 48
_PASSED = words("cat max maximum amax masked_fill where softmax")
_QUIET = ("_assert", "sym_size", "sym_stride", "sym_numel", "sym_storage", "_unsafe_index_none")


class ScoreWalker:
    """Finds the score path around a softmax of one graph."""

    def __init__(self, graph: Graph, constants: Mapping[str, Tensor] | None = None) -> None:
        self.effects = Effects(graph)
        self.constants = constants
        self._live = _live_nodes(graph)
        self._known: dict[tuple[Node, Node], list[Step] | Blocked] = {}
        self._depth = 0

    def users(self, node: Node) -> list[Node]:
        """Users that matter: not metadata checks, not dead code."""
        return [user for user in node.users if user in self._live and not _is_quiet(user)]

    def path(self, softmax: Softmax) -> ScorePath:
        """The score path through ``softmax``.  Raises ``Blocked``."""
        steps = [
            *self.back(softmax.source, softmax.reader),
            Step(softmax.node, "softmax", dim=softmax.dim),
        ]
        forward, last, probabilities = self._forward(softmax.node)
        steps += forward
        first = contraction(steps[0].node)
        assert first is not None
        path = ScorePath(first, steps, last, probabilities)
        path.interior = {step.node for step in steps} | {last.node, *softmax.inner}
        return path

    # ---- from the softmax back to the contraction

    def current(self, node: Node, consumer: Node) -> Node:
        """The node that last wrote the tensor ``consumer`` reads as ``node`` (in-place forms write without being read)."""
        writes = self.effects.writes_between(node, consumer)
        if not writes:
            return node
        write = writes[-1]
        if not written(write) or _base(written(write)[0]) is not _base(node):
            raise Blocked(write, f"writes into {node.name} through another view of it")
        return write

    def back(self, node: Node, consumer: Node) -> list[Step]:
        """Steps that lead from a contraction to ``node`` as ``consumer`` reads it."""
        key = (node, consumer)
        if key not in self._known:
            self._depth += 1
            try:
                if self._depth > MOST_STEPS:
                    raise Blocked(node, f"is more than {MOST_STEPS} operations away from the softmax")
                self._known[key] = self._back(self.current(node, consumer))
            except Blocked as blocked:
                self._known[key] = blocked
            finally:
                self._depth -= 1
        found = self._known[key]
        if isinstance(found, Blocked):
            raise found
        return found

    def _back(self, node: Node) -> list[Step]:
        found = contraction(node)
        if found is not None:
            bias = [] if found.bias is None else [Step(node, "add", found.beta, found.bias)]
            return [Step(node, "contract", found.alpha), *bias]
        moved = movement_input(node)
        if moved is not None:
            return [*self.back(moved, node), Step(node, "move")]
        cast = cast_input(node)
        if cast is not None:
            return [*self.back(cast, node), Step(node, "cast")]
        handler = getattr(self, "_back_" + op_name(node).rstrip("_"), None)
        if handler is None or not op_name(node):
            what = op_name(node) or f"{node.op} {node.target}"
            raise Blocked(node, f"{what} is not understood as a step from a query-key product to the softmax")
        steps: list[Step] = handler(node, arguments(node))
        return steps

    def _either(self, node: Node, options: list[tuple[Any, list[Step]]]) -> list[Step]:
        """The first operand that leads back to a contraction, with the steps that follow it."""
        blocked: list[Blocked] = []
        for operand, steps in options:
            if tensor_of(operand) is None:
                continue
            try:
                inner = self.back(operand, node)
            except Blocked as error:
                blocked.append(error)
                continue
            if not same_shape(shape_of(operand), shape_of(node)):
                raise Blocked(node, "expands the scores by a broadcast")
            return [*inner, *steps]
        # An operation in the way says more than the input a mask came from.
        blocked.sort(key=lambda b: b.node.op != "call_function" or not follows_product(b.node))
        raise blocked[0] if blocked else Blocked(node, "has no tensor operand")

    def _back_mul(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        left, right = bound["self"], bound["other"]
        return self._either(node, [(left, [self._factor(node, right)]), (right, [self._factor(node, left)])])

    def _back_div(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        if bound.get("rounding_mode") is not None:
            raise Blocked(node, "divides the scores with rounding")
        return self._either(node, [(bound["self"], [self._factor(node, bound["other"], inverse=True)])])

    _back_multiply, _back_divide, _back_true_divide = _back_mul, _back_div, _back_div

    def _factor(self, node: Node, other: Any, inverse: bool = False) -> Step:
        number = constant_value(other, self.constants)
        if number is not None:
            if number == 0:
                return Step(node, "zero")
            return Step(node, "scale", 1.0 / number if inverse else number)
        if tensor_of(other) is None:
            return Step(node, "symbolic")
        return Step(node, "factor", -1.0 if inverse else 1.0, other)

    def _back_neg(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        return self._either(node, [(bound["self"], [Step(node, "scale", -1.0)])])

    def _back_add(self, node: Node, bound: dict[str, Any], sign: float = 1.0) -> list[Step]:
        left, right = bound["self"], bound["other"]
        alpha = constant_value(bound.get("alpha", 1))
        if alpha is None:
            raise Blocked(node, "adds with a symbolic alpha")
        scaled = [Step(node, "scale", sign * alpha)] if sign * alpha != 1.0 else []
        return self._either(
            node,
            [
                (left, [self._plus(node, right, sign * alpha)]),
                (right, [*scaled, self._plus(node, left, 1.0)]),
            ],
        )

    def _back_sub(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        left, right = bound["self"], bound["other"]
        if (
            isinstance(left, Node)
            and isinstance(right, Node)
            and (dim := self._maximum_of(right, left, node)) is not None
        ):
            return [*self.back(left, node), Step(node, "shift", dim=dim)]
        return self._back_add(node, bound, -1.0)

    _back_subtract = _back_sub

    def _back_rsub(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        return self._back_add(node, {**bound, "self": bound["other"], "other": bound["self"]}, -1.0)

    def _plus(self, node: Node, other: Any, factor: float) -> Step:
        if tensor_of(other) is None or constant_value(other, self.constants) is not None:
            return Step(node, "offset")
        return Step(node, "add", factor, other)

    def _maximum_of(self, node: Node, scores: Node, consumer: Node) -> int | None:
        """The dim along which ``node`` is the maximum of ``scores``, kept with size 1."""
        if op_name(node) == "detach":
            node = node.args[0]  # type: ignore[assignment]
        if op_name(node) == "getitem" and node.args[1] == 0:
            node = node.args[0]  # type: ignore[assignment]
        if op_name(node) not in ("amax", "max") or len(node.args) < 2:
            return None
        bound = arguments(node)
        dim = bound.get("dim")
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        if bound.get("self") is not scores or not bound.get("keepdim") or not isinstance(dim, int):
            return None
        if self.effects.writes_between(node, consumer) or self.effects.writes_between(scores, consumer):
            return None
        return dim + len(shape_of(scores)) if dim < 0 else dim

    def _back_tanh(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        return self._either(node, [(bound["self"], [Step(node, "tanh")])])

    def _back_masked_fill(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        return self._either(
            node, [(bound["self"], [self._fill(node, bound["mask"], bound["value"], keep=False)])]
        )

    def _back_where(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        if "self" not in bound or "other" not in bound:
            raise Blocked(node, "where with one argument")
        kept, filled = bound["self"], bound["other"]
        return self._either(
            node,
            [
                (kept, [self._fill(node, bound["condition"], filled, keep=True)]),
                (filled, [self._fill(node, bound["condition"], kept, keep=False)]),
            ],
        )

    def _fill(self, node: Node, condition: Node, value: Any, keep: bool) -> Step:
        number = constant_value(value, self.constants)
        if number is None:
            return Step(node, "unknown_fill", other=condition)
        return Step(node, "fill", number, condition, keep)

    def _back_clamp(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        least, most = bound.get("min"), bound.get("max")
        number = constant_value(least, self.constants)
        if most is not None or number is None:
            raise Blocked(node, "clamps the scores to a range that is not constant or bounded above")
        return self._either(node, [(bound["self"], [Step(node, "floor", number)])])

    _back_clamp_min = _back_clamp

    def _back_maximum(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        left, right = bound["self"], bound.get("other")
        if tensor_of(right) is None:
            raise Blocked(node, "is a reduction of the scores")
        options = []
        for scores, least in ((left, right), (right, left)):
            number = constant_value(least, self.constants)
            if number is not None:
                options.append((scores, [Step(node, "floor", number)]))
        return self._either(node, options)

    _back_max = _back_maximum

    def _back_cat(self, node: Node, bound: dict[str, Any]) -> list[Step]:
        parts = bound["tensors"]
        rank = len(shape_of(node))
        dim = bound["dim"] + rank if bound["dim"] < 0 else bound["dim"]
        columns = [part for part in parts if known_equal(shape_of(part)[dim], 1)] if len(parts) == 2 else []
        blocked: Blocked | None = None
        for sink in reversed(columns):
            last = sink is parts[1]
            try:
                inner = self.back(parts[0] if last else parts[1], node)
            except Blocked as error:
                blocked = blocked or error
                continue
            return [*inner, Step(node, "sink", other=sink, flag=last, dim=dim)]
        raise blocked or Blocked(node, "concatenates more than one column of sinks to the scores")

    _back_concat = _back_concatenate = _back_cat

    # ---- from the softmax on to the contraction with the values

    def _forward(self, softmax: Node) -> tuple[list[Step], Contraction, Node]:
        steps: list[Step] = []
        node = softmax
        while True:
            users = self.users(node)
            if not users:
                raise Blocked(node, "its probabilities are used by nothing")
            if len(users) > 1:
                found = next(
                    (u for u in users if contraction(u) is None and movement_input(u) is None), users[-1]
                )
                raise Blocked(
                    found, f"reads the probabilities {node.name} besides the product with the values"
                )
            user = users[0]
            last = contraction(user)
            if last is not None:
                if last.bias is not None or (last.left is node) == (last.right is node):
                    raise Blocked(user, "is no plain product of probabilities and values")
                return steps, last, node
            if movement_input(user) is node:
                steps.append(Step(user, "move"))
            elif cast_input(user) is node:
                steps.append(Step(user, "cast"))
            elif op_name(user) == "nan_to_num" and _zero_nan(user):
                steps.append(Step(user, "zero_nan"))
            else:
                raise Blocked(user, _after_softmax(user))
            node = user


def _after_softmax(node: Node) -> str:
    name = op_name(node)
    if name in ("dropout", "dropout_", "native_dropout"):
        return "drops probabilities at random (training); call eval() or set dropout to 0"
    if node.op == "output":
        return "returns the probabilities"
    return f"{name or node.target} between the softmax and the product with the values is not understood"


def _zero_nan(node: Node) -> bool:
    nan = arguments(node).get("nan")
    return nan is None or constant_value(nan) == 0.0


def _base(node: Node) -> Node:
    """The tensor an in-place call returns."""
    while written(node) and op_name(node).endswith("_"):
        node = written(node)[0]
    return node


def _is_quiet(node: Node) -> bool:
    return op_name(node).startswith(_QUIET)


def _live_nodes(graph: Graph) -> set[Node]:
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        pure = node.op in ("get_attr",) or (
            node.op == "call_function" and bool(op_name(node)) and not written(node)
        )
        used = node.op in ("output", "placeholder") or not pure or any(user in live for user in node.users)
        if used and not _is_quiet(node):
            live.add(node)
    return live


def follows_product(node: Node) -> bool:
    """True if elementwise operations and movements alone lead from a contraction to ``node``."""
    pending, seen = [node], {node}
    while pending and len(seen) < 200:
        at = pending.pop()
        for source in at.all_input_nodes:
            if contraction(source) is not None:
                return True
            name = op_name(source)
            passes = movement_input(source) is not None or cast_input(source) is not None or name in _PASSED
            overload = source.target if isinstance(source.target, torch._ops.OpOverload) else None
            tagged = overload is not None and torch.Tag.pointwise in overload.tags
            if source not in seen and (passes or tagged):
                seen.add(source)
                pending.append(source)
    return False


def drops_sink(node: Node, dim: int, last: bool) -> bool:
    """True if a slice takes away exactly the sinks' column, the last or the first of ``dim``."""
    if op_name(node) not in ("slice", "narrow"):
        return False
    bound = arguments(node)
    source = node.args[0]
    assert isinstance(source, Node)
    rank = len(shape_of(node))
    at = bound["dim"] + rank if bound["dim"] < 0 else bound["dim"]
    start = 0 if bound.get("start") is None else size_value(bound["start"])
    if at != dim or bound.get("step", 1) != 1 or start is None:
        return False
    before, after = shape_of(source)[dim], shape_of(node)[dim]
    return known_equal(before, after + 1) and known_equal(start, 0 if last else 1)
