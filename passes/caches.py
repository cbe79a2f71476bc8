"""Decide which inputs of a captured graph become quantized caches.

A candidate becomes a cache only if the whole graph works with it as a store: every writer is understood, every reader is a
rewritten attention. All or nothing for each cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node

from kvq_ops.axes import to_canonical
from kvq_ops.errors import KVQError
from kvq_ops.formats import Format, KVFormat, get_format
from kvq_ops.handle import QuantizedKV
from kvq_ops.policy import Policy
from kvq_ops.stacked import StackedKV

from .candidates import Candidate, Found, Slot, find_candidates
from .fuse import SiteResult, fuse
from .layout_nodes import op_name
from .lift import CannotLift, Lifted, lift
from .verify import check_graph, plane_write_count

__all__ = ["Candidate", "Plan", "filled_length", "find_candidates", "plan", "quantize_dense"]

kvq = torch.ops.kvq

_MOVES_PLANES = frozenset(
    ["slice", "select", "index_select", "index", "roll", "flip", "cat", "clone", "copy_", "to", "_to_copy"]
)


@dataclass
class Plan:
    """What quantizing the caches of one captured graph comes to.

    Attributes:
        lifted: the rewritten graph.
        handles: for each placeholder of the captured graph, its fake handle if it becomes a store, else ``None``.
        caches: the candidates that are quantized.
        refused: the candidates that are not, with reasons.
        sites: what became of each attention.
    """

    lifted: Lifted
    handles: list[QuantizedKV | None]
    caches: list[Candidate]
    refused: list[tuple[Candidate, str]]
    sites: list[SiteResult]

    def handle_of(self, candidate: Candidate) -> QuantizedKV:
        """The fake handle of a candidate that is quantized."""
        placeholders = [node for node in candidate.node.graph.nodes if node.op == "placeholder"]
        handle = self.handles[placeholders.index(candidate.node)]
        assert handle is not None
        return handle


Choose = Callable[[int, Candidate], KVFormat | None]


def plan(
    captured: GraphModule,
    inputs: Sequence[Any],
    choose: Choose,
    constants: Mapping[str, Tensor] | None = None,
    *,
    found: Found | None = None,
    refuse: Callable[[Candidate], str] = lambda candidate: "",
) -> Plan:
    """Lift and fuse all caches of ``captured`` that can be.

    Args:
        inputs: fake inputs of ``captured``, dense.
        choose: the format of a cache of a layer (its index in ``found.layers``), or ``None`` to leave it alone.
        found: the candidates, where they are known already.
        refuse: why a candidate is none, or an empty string.
    """
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    found = find_candidates(captured, constants) if found is None else found
    refused: list[tuple[Candidate, str]] = []
    chosen: list[tuple[Candidate, list[Format]]] = []
    for candidate in found.candidates:
        reason = refuse(candidate)
        rows = _rows(candidate, inputs[placeholders.index(candidate.node)], choose) if not reason else ""
        if isinstance(rows, str):
            refused.append((candidate, reason or rows))
        else:
            chosen.append((candidate, rows))

    while True:
        handles: list[QuantizedKV | None] = [None] * len(placeholders)
        failed: list[tuple[Candidate, str]] = []
        for candidate, rows in chosen:
            at = placeholders.index(candidate.node)
            try:
                handles[at] = _fake_handle(inputs[at], rows, candidate.axes)
            except KVQError as error:
                failed.append((candidate, f"has no {rows[0].name} store: {error.asked}: {error.got}"))
        if not failed:
            values = [
                dense if handle is None else handle for dense, handle in zip(inputs, handles, strict=True)
            ]
            outcome = _try(captured, values, constants)
            if isinstance(outcome, KVQError):
                failed = _blame(chosen, outcome)
            else:
                lifted, sites = outcome
                failed = _not_understood(placeholders, chosen, handles, lifted, sites)
        if not failed:
            break
        refused += failed
        gone = {id(candidate) for candidate, _ in failed}
        chosen = [(candidate, rows) for candidate, rows in chosen if id(candidate) not in gone]
    why = {anchor: reason for c, reason in reversed(refused) for anchor in c.sites}
    names = {anchor: c.node.name for c, _ in reversed(refused) for anchor in c.sites}
    for site in sites:
        if site.rewritten:
            continue
        if site.anchor in found.reasons:
            site.node, site.reason = found.reasons[site.anchor]
        elif site.anchor in why:
            site.node, site.reason = names[site.anchor], why[site.anchor]
    return Plan(lifted, handles, [c for c, _ in chosen], refused, sites)


def _rows(candidate: Candidate, dense: Tensor, choose: Choose) -> list[Format] | str:
    """A format for each cache of a candidate, or why all of it stays as it is."""
    lead = [size for size, letter in zip(dense.shape, candidate.axes, strict=True) if letter == "l"]
    if not all(isinstance(size, int) for size in lead):
        return "holds a number of caches that is not known"
    rows: list[Format | None] = []
    for slot in itertools.product(*(range(size) for size in lead)):
        rows.append(_format(candidate, slot, choose))
    if all(row is None for row in rows):
        return "is left alone as asked"
    return [get_format("none") if row is None else row for row in rows]


def _format(candidate: Candidate, slot: Slot, choose: Choose) -> Format | None:
    # What is read both as keys and as values, a latent, counts as keys.
    layer = candidate.keys.get(slot, candidate.values.get(slot))
    pair = None if layer is None else choose(layer, candidate)
    if pair is None:
        return None
    return pair.key if slot in candidate.keys else pair.value


def _fake_handle(dense: Tensor, rows: Sequence[Format], axes: str) -> QuantizedKV:
    mode = detect_fake_mode([dense])
    assert mode is not None
    options: dict[str, Any] = {"dtype": dense.dtype, "device": dense.device, "axes": axes}
    with mode:
        if "l" in axes:
            return StackedKV.empty(dense.shape, rows, **options)
        return QuantizedKV.empty(dense.shape, rows[0], **options)


def quantize_dense(
    dense: Tensor, like: QuantizedKV, candidate: Candidate, policy: Policy, first: int = 0
) -> QuantizedKV:
    """A real cache in the form of the (fake) one, holding what ``dense`` holds up to the last token that is not zero.

    Args:
        policy: what was calibrated.
        first: the number of the graph's first layer.

    Raises:
        CalibrationError: scales or codebooks that a format needs are missing, or do not fit.
    """
    lead = [size for size, letter in zip(dense.shape, like.axes, strict=True) if letter == "l"]
    static = []
    for slot, part in zip(itertools.product(*(range(size) for size in lead)), like.caches(), strict=True):
        side, layers = ("key", candidate.keys) if slot in candidate.keys else ("value", candidate.values)
        shape = part.format.logical_shape(part.planes())
        static.append(policy.static(first + layers.get(slot, 0), side, part.format, shape))
    if isinstance(like, StackedKV):
        formats = [part.format for part in like.parts]
        return StackedKV.from_dense(dense, formats, axes=like.axes, length=filled_length, static=static)
    length = filled_length(dense, like.axes)
    return QuantizedKV.from_dense(dense, like.format, axes=like.axes, length=length, static=static[0])


def filled_length(dense: Tensor, axes: str) -> Tensor:
    """Tokens of each row up to the last one that is not all zero, int64 ``[B]``."""
    canonical = to_canonical(dense, axes)
    tokens = canonical.shape[2]
    used = (canonical != 0).any(-1).any(1)
    return (used * torch.arange(1, tokens + 1, device=dense.device)).amax(-1) if tokens else used.sum(-1)


def _try(
    captured: GraphModule, values: Sequence[Any], constants: Mapping[str, Tensor] | None
) -> tuple[Lifted, list[SiteResult]] | KVQError:
    try:
        lifted = lift(captured, values)
    except KVQError as error:
        return error
    check_graph(captured, lifted)
    appends = plane_write_count(lifted.graph_module)
    sites = fuse(lifted.graph_module, constants)
    check_graph(captured, lifted, appends=appends)
    return lifted, sites


def _blame(chosen: Sequence[tuple[Candidate, list[Format]]], error: KVQError) -> list[tuple[Candidate, str]]:
    """The candidates that a failed lift is about: those it names, else all."""
    if not isinstance(error, CannotLift):
        return [(c, f"cannot be lifted: {error.asked}: {error.got}") for c, _ in chosen]
    named = [(c, error.reason) for c, _ in chosen if c.node in error.caches]
    return named or [(c, error.reason) for c, _ in chosen]


def _not_understood(
    placeholders: Sequence[Node],
    chosen: Sequence[tuple[Candidate, list[Format]]],
    handles: Sequence[QuantizedKV | None],
    lifted: Lifted,
    sites: Sequence[SiteResult],
) -> list[tuple[Candidate, str]]:
    """Candidates that something other than a rewritten attention still reads, or that no rewritten attention reads."""
    new = iter([node for node in lifted.graph_module.graph.nodes if node.op == "placeholder"])
    planes: dict[Node, Node] = {}
    for node, handle in zip(placeholders, handles, strict=True):
        for _ in range(1 if handle is None else len(handle.store)):
            planes[next(new)] = node
    readers: dict[Node, Node] = {}
    used: set[Node] = set()
    for node in lifted.graph_module.graph.nodes:
        if node.target is kvq.dequantize.default:
            for source in _sources(node.args[0], planes):
                readers.setdefault(source, node)
        elif node.target is kvq.attention.default:
            used |= _sources([*node.args[1], *node.args[2]], planes)
    failed = []
    for candidate, _ in chosen:
        if candidate.node in readers:
            user = next(iter(readers[candidate.node].users), readers[candidate.node])
            left = [site for site in sites if not site.rewritten and site.anchor in candidate.sites]
            why = f": {left[0].node} {left[0].reason}" if left else ""
            failed.append((candidate, f"is also read by {user.name}{why}"))
        elif candidate.node not in used:
            left = [site for site in sites if not site.rewritten]
            why = f": {left[0].anchor}: {left[0].node} {left[0].reason}" if left else ""
            failed.append((candidate, f"is read by no attention that could be rewritten{why}"))
    return failed


def _sources(store: Sequence[Node], planes: Mapping[Node, Node]) -> set[Node]:
    """The caches whose planes ``store`` is cut from or joined of."""
    found: set[Node] = set()
    seen: set[Node] = set()
    stack = list(store)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in planes:
            found.add(planes[node])
        elif op_name(node) in _MOVES_PLANES:
            stack += node.all_input_nodes
    return found
