"""Fold the steps on the scores into one canonical form: softcap of a scaled product, then masks, then sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from .attention_scores import Blocked, Contraction, Step, drops_sink
from .attention_site import Term
from .layout import Layout, apply_movement, movement_input
from .layout_nodes import shape_of, tensor_of
from .layout_sizes import LayoutError, Size, same_shape

Place = tuple[int, Size]
LARGE = -1e4  # a fill at or below this excludes a key as surely as -inf does, a row without keys aside


@dataclass
class Scores:
    """What the steps add up to: ``softcap(inner * qk)`` with terms, and the layout of the tensor over ``first.out``."""

    layout: Layout
    scale: float = 1.0
    outer: float | None = None
    pending: list[tuple[Term, Layout]] = field(default_factory=list)
    factors: list[tuple[Node, Layout, float, Node]] = field(default_factory=list)
    sinks: tuple[Node, Layout, Step] | None = None
    sink_dim: int | None = None
    softmax_layout: Layout | None = None
    softmax_dim: int = -1
    dtype: torch.dtype = torch.float32


def read_steps(first: Contraction, steps: Sequence[Step]) -> Scores:
    """Fold the steps into one canonical form.  Raises ``Blocked`` where none is exact."""
    state = Scores(Layout.identity(first.shape))
    for step in steps:
        _READ[step.kind](state, step)
    if state.sink_dim is not None:
        raise Blocked(steps[-1].node, "keeps the column of sinks after the softmax")
    return state


def _contract(state: Scores, step: Step) -> None:
    state.scale = step.value


def _move(state: Scores, step: Step) -> None:
    if state.sink_dim is not None and state.sinks is not None:
        last = state.sinks[2].flag
        if state.softmax_layout is not None and drops_sink(step.node, state.sink_dim, last):
            state.sink_dim = None
        elif not same_shape(shape_of(step.node), shape_of(movement_input(step.node))):  # type: ignore[arg-type]
            raise Blocked(step.node, "moves the scores while they carry the column of sinks")
        return
    try:
        state.layout = apply_movement(state.layout, step.node)
    except LayoutError as error:
        raise Blocked(step.node, str(error)) from None


def _scale(state: Scores, step: Step) -> None:
    if state.sink_dim is not None:
        raise Blocked(step.node, "scales the scores together with the sinks")
    if state.outer is None:
        state.scale *= step.value
    else:
        state.outer *= step.value
    for term, _ in state.pending:
        if term.kind == "add":
            term.factor *= step.value
            continue
        if step.value <= 0:
            raise Blocked(step.node, "turns the sign of scores that are already masked")
        dtype = tensor_of(step.node).dtype  # type: ignore[union-attr]
        term.fill = torch.tensor(term.fill * step.value, dtype=torch.float64).to(dtype).item()
        if term.fill > LARGE:
            raise Blocked(
                step.node, f"scales the fill of a mask to {term.fill}, which no longer excludes a key"
            )


def _factor(state: Scores, step: Step) -> None:
    if state.outer is not None or state.pending or state.sink_dim is not None:
        raise Blocked(step.node, "multiplies by a tensor after a mask or a softcap")
    assert step.other is not None
    state.factors.append((step.other, state.layout, step.value, step.node))


def _add(state: Scores, step: Step) -> None:
    if state.sink_dim is not None:
        raise Blocked(step.node, "adds to the scores together with the sinks")
    assert step.other is not None
    value = tensor_of(step.other)
    if value is None or not value.dtype.is_floating_point:
        raise Blocked(step.node, "adds a tensor that is not of a floating dtype to the scores")
    state.pending.append((Term("add", step.other, (), step.node, factor=step.value), state.layout))


def _fill(state: Scores, step: Step) -> None:
    if state.sink_dim is not None:
        raise Blocked(step.node, "masks the scores together with the sinks")
    if not step.value <= LARGE:
        raise Blocked(
            step.node,
            f"fills scores with {step.value}, which does not exclude a key (allowed: -inf up to {LARGE})",
        )
    assert step.other is not None
    state.pending.append(
        (Term("fill", step.other, (), step.node, keep=step.flag, fill=step.value), state.layout)
    )


def _floor(state: Scores, step: Step) -> None:
    """A lower bound far below any score: it only turns -inf into a finite fill."""
    if state.sink_dim is not None or not step.value <= LARGE:
        raise Blocked(
            step.node, f"bounds the scores below at {step.value} (allowed: at most {LARGE}, before any sinks)"
        )
    for term, _ in state.pending:
        term.fill = max(term.fill, step.value)
        term.finite = True


def _tanh(state: Scores, step: Step) -> None:
    if state.pending:
        raise Blocked(step.node, "caps scores that are already masked")
    if state.outer is not None or state.sink_dim is not None:
        raise Blocked(step.node, "is a second tanh over the scores")
    state.outer = 1.0


def _sink(state: Scores, step: Step) -> None:
    if state.sinks is not None:
        raise Blocked(step.node, "adds a second column of sinks")
    assert step.other is not None
    state.sinks = (step.other, state.layout, step)
    state.sink_dim = step.dim


def _shift(state: Scores, step: Step) -> None:
    # softmax(x - c) = softmax(x) if c is the same along the softmax dim, which _softmax checks.
    if state.softmax_dim not in (-1, step.dim):
        raise Blocked(step.node, "shifts by a maximum along another dim than the softmax")
    state.softmax_dim = step.dim


def _softmax(state: Scores, step: Step) -> None:
    if state.softmax_dim not in (-1, step.dim):
        raise Blocked(step.node, "runs along another dim than the maximum that was subtracted")
    if state.sink_dim not in (None, step.dim):
        raise Blocked(step.node, "runs along another dim than the sinks were added to")
    state.softmax_dim = step.dim
    state.softmax_layout = state.layout
    state.dtype = tensor_of(step.node).dtype  # type: ignore[union-attr]


def _refuse(reason: str) -> Callable[[Scores, Step], None]:
    def refuse(state: Scores, step: Step) -> None:
        raise Blocked(step.node, reason)

    return refuse


def _nothing(state: Scores, step: Step) -> None:
    pass


_READ: dict[str, Callable[[Scores, Step], None]] = {
    "contract": _contract, "move": _move, "cast": _nothing, "scale": _scale, "factor": _factor, "add": _add, "fill": _fill,
    "floor": _floor, "tanh": _tanh, "sink": _sink, "shift": _shift, "softmax": _softmax, "zero_nan": _nothing,
    "zero": _refuse("multiplies the scores by zero"),
    "symbolic": _refuse("scales by a symbolic number; the head size must be static"),
    "offset": _refuse("adds a constant to the scores"),
    "unknown_fill": _refuse("fills masked scores with a value that is not a constant"),
}  # fmt: skip
