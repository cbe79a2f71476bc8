"""Which nodes share memory, and which writes happen between two nodes of a graph that still holds in-place operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from .layout import is_idle_dropout
from .layout_nodes import op_name, words

if TYPE_CHECKING:
    from .attention_site import AttentionSite

PURE_VIEWS = words(
    "view transpose permute expand expand_as slice select unsqueeze squeeze narrow t numpy_T mT alias "
    "detach detach_ getitem movedim moveaxis swapaxes swapdims view_as unflatten broadcast_to"
)


class Effects:
    """Order, aliases and writes of a graph, read from the operator schemas (an alias that may exist counts as one)."""

    def __init__(self, graph: Graph) -> None:
        self.order: dict[Node, int] = {}
        self.roots: dict[Node, frozenset[Node]] = {}
        self.writes: dict[Node, list[Node]] = {}
        for position, node in enumerate(graph.nodes):
            self.order[node] = position
            shared: set[Node] = set()
            for value in _aliased(node):
                shared |= self.roots.get(value, frozenset((value,)))
            self.roots[node] = frozenset(shared) if shared else frozenset((node,))
            for value in written(node):
                for root in self.roots.get(value, frozenset((value,))):
                    self.writes.setdefault(root, []).append(node)

    def writes_between(self, node: Node, before: Node) -> list[Node]:
        """Writes into the memory of ``node`` after it is computed and before the node ``before`` runs, in order."""
        found = {
            write
            for root in self.roots[node]
            for write in self.writes.get(root, ())
            if self.order[node] < self.order[write] < self.order[before]
        }
        return sorted(found, key=self.order.__getitem__)


def written(node: Node) -> list[Node]:
    """The tensor arguments a call writes into (``detach_`` changes no element)."""
    if op_name(node) == "detach_":
        return []
    return _flagged(node, write=True)


def _aliased(node: Node) -> list[Node]:
    name = op_name(node)
    if name in ("getitem", "detach_") or is_idle_dropout(node):
        return [node.args[0]] if isinstance(node.args[0], Node) else []
    return _flagged(node, write=False)


def _flagged(node: Node, *, write: bool) -> list[Node]:
    """Arguments whose schema carries an alias annotation: the written ones, or those a result may share memory with."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    shared: set[str] = set()
    for result in schema.returns:
        if result.alias_info is not None:
            shared |= set(result.alias_info.before_set)
    found: list[Node] = []
    for position, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or not (info.is_write if write else shared & set(info.before_set)):
            continue
        value: Any = node.kwargs.get(argument.name)
        if value is None and position < len(node.args):
            value = node.args[position]
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Node):
                found.append(item)
    return found


def late_write(effects: Effects, site: AttentionSite) -> Node | None:
    """A write that changes what the site reads after the model read it and before the site's output, or None.

    The nodes that replace a site read their inputs where the output stands; what lies in memory there must be what the model
    read earlier: at the first copy on the way from the source, or at the product itself if there are only views.
    """
    reads: list[tuple[Node, Node]] = []
    for operand in (site.query, site.key, site.value):
        copies = [node for node in operand.path if op_name(node) not in PURE_VIEWS]
        reads.append((operand.source, copies[-1] if copies else operand.read_by))
    reads += [(term.node, term.used_by) for term in site.terms if term.build is None]
    reads += [(node, site.query.read_by) for node, _, _ in site.factors]
    reads += [(site.sinks, site.query.read_by)] if site.sinks is not None else []
    for node, reader in reads:
        for write in effects.writes_between(node, site.output):
            if effects.order[write] > effects.order[reader] and write not in site.interior:
                return write
    return None
