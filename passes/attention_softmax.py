"""What normalises scores to probabilities: softmax by name, or made of ``exp``, ``sum``, ``log_softmax`` or ``logsumexp``."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from .attention_effects import Effects
from .layout_nodes import arguments, op_name, shape_of, words

__all__ = ["Softmax", "softmax_of"]

_NAMED = words("softmax _softmax _safe_softmax special_softmax")
_LOGARITHM = words("log_softmax _log_softmax special_log_softmax")


@dataclass(frozen=True)
class Softmax:
    """``node = softmax(source, dim)``.

    Attributes:
        reader: what reads ``source`` (``node`` itself, or the innermost operation of a spelling).
        inner: operations of the spelling before ``node``.
    """

    node: Node
    source: Node
    reader: Node
    dim: int
    inner: tuple[Node, ...] = ()


def softmax_of(node: Node, effects: Effects) -> Softmax | None:
    """``node`` read as a softmax of a tensor, or None. Besides the operation itself:

    * ``exp(x) / sum(exp(x), dim, keepdim=True)``, however ``x`` was shifted before;
    * ``exp(log_softmax(x, dim))``;
    * ``exp(x - logsumexp(x, dim, keepdim=True))``.

    Nothing may write into what these hand on to each other.
    """
    name = op_name(node).rstrip("_")
    if name in _NAMED:
        source = node.args[0]
        assert isinstance(source, Node)
        return Softmax(node, source, node, _dim(node, source))
    found = None
    if name in ("div", "divide", "true_divide") and len(node.args) >= 2:
        found = _quotient(node)
    elif name == "exp":
        found = _logarithm(node)
    if found is None:
        return None
    handed = (*found.inner, found.node)
    if any(effects.writes_between(one, later) for one in handed for later in handed if one in later.args):
        return None
    # All that read the source have to read the same of it; what was written before the first of them is the walk's to see.
    first = min(effects.order[one] for one in handed if found.source in one.args)
    writes = effects.writes_between(found.source, found.reader)
    return None if any(effects.order[write] > first for write in writes) else found


def _quotient(node: Node) -> Softmax | None:
    above, below = node.args[:2]
    if not isinstance(above, Node) or not isinstance(below, Node) or arguments(node).get("rounding_mode"):
        return None
    total = below.args[0] if op_name(below) == "unsqueeze" else below
    if not isinstance(total, Node) or op_name(above).rstrip("_") != "exp" or op_name(total) != "sum":
        return None
    dim = _dim(total, above)
    if total.args[0] is not above or dim < 0 or bool(arguments(total).get("keepdim")) == (total is not below):
        return None
    if total is not below and arguments(below)["dim"] % len(shape_of(above)) != dim:
        return None
    source = above.args[0]
    assert isinstance(source, Node)
    return Softmax(node, source, above, dim, tuple(dict.fromkeys((below, total, above))))


def _logarithm(node: Node) -> Softmax | None:
    inner = node.args[0]
    if not isinstance(inner, Node):
        return None
    name = op_name(inner).rstrip("_")
    if name in _LOGARITHM:
        source = inner.args[0]
        assert isinstance(source, Node)
        return Softmax(node, source, inner, _dim(inner, source), (inner,))
    if name not in ("sub", "subtract") or len(inner.args) < 2:
        return None
    source, total = inner.args[:2]
    if not isinstance(source, Node) or not isinstance(total, Node) or op_name(total) != "logsumexp":
        return None
    bound = arguments(inner)
    dim = _dim(total, source)
    if (
        total.args[0] is not source
        or not arguments(total).get("keepdim")
        or dim < 0
        or bound.get("alpha", 1) != 1
    ):
        return None
    return Softmax(node, source, inner, dim, (inner, total))


def _dim(node: Node, source: Node) -> int:
    """The one dim that ``node`` runs along, counted from the front; -1 where there is not just one."""
    dim = arguments(node).get("dim")
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    return dim % len(shape_of(source)) if isinstance(dim, int) else -1
