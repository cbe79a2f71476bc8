"""One attention computation as a record, and the nodes that replace it.

Shapes below: B batch, Hq query heads, Hkv key-value heads, Tq query tokens, Tk key tokens, D head size of query and key,
Dv of the values; query head ``h`` reads key-value head ``h // (Hq / Hkv)`` in every emitted form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from .attention_space import Dims, Sizes, Var, aten, emit, match_strides, rearrange, reshape
from .layout import Layout
from .layout_nodes import shape_of, tensor_of
from .layout_sizes import LayoutError, Size, known_equal, product, same_shape

_REPLACED = "kvq_replaced_by"


def mark_replaced(old: Node, new: Node) -> None:
    """Let records that name ``old`` read ``new`` from now on (a rewrite of one site may feed another)."""
    old.meta[_REPLACED] = new


def latest(node: Node) -> Node:
    """The node that stands where ``node`` stood when the records were made."""
    while _REPLACED in node.meta:
        node = node.meta[_REPLACED]
    return node


@dataclass
class Operand:
    """Query, key or value: the node the model reads and the source its elements come from.

    ``roles`` names, for each axis of ``source``, what it counts: ``"batch"``, ``"head"`` (key-value heads for key and value),
    ``"token"``, ``"channel"``, ``"fixed"`` (one index is read) or a ``"+"``-joined list where an axis merges several.
    ``stopped`` says which view on the way was no plain rearrangement, if one ended the walk.
    """

    node: Node
    source: Node
    layout: Layout
    path: tuple[Node, ...]
    casts: tuple[torch.dtype, ...]
    stopped: str | None
    roles: tuple[str, ...]
    dims: Dims
    read_by: Node

    def axis(self, role: str) -> int | None:
        """The source axis that counts ``role`` alone, or None."""
        found = [axis for axis, name in enumerate(self.roles) if name == role]
        return found[0] if len(found) == 1 else None


@dataclass
class Term:
    """One mask on the scores, in the order the model applies them.

    ``kind`` is ``"add"`` (``factor * node`` is added) or ``"fill"`` (where ``node``, a bool tensor, is not ``keep`` the score
    becomes ``fill``).  ``finite`` says that -inf in an added tensor counts as the least finite number (the model bounds its
    scores below).  ``dims`` gives the vars of each dim of ``node``.  ``build`` makes the tensor when it does not exist in the
    graph yet (flex_attention).
    """

    kind: str
    node: Node
    dims: Dims
    used_by: Node
    factor: float = 1.0
    keep: bool = True
    fill: float = -math.inf
    finite: bool = False
    build: Callable[[Graph, Sizes], tuple[Node, Dims]] | None = field(default=None, compare=False, repr=False)


@dataclass
class AttentionSite:
    """One attention: ``softmax(softcap(scale * q k^T) + masks) v``.

    ``causal`` is SDPA's flag, aligned to the top left corner (query i sees keys 0..i).  ``softcap`` is 0.0 for none, else the c
    of ``c * tanh(scale * q k^T / c)``.  ``repetition`` is ``"none"``, ``"interleaved"`` or ``"tiled"``: the order in which the
    model repeats kv heads; the emitted nodes are in interleaved order in all cases.  ``factors`` are tensors the query is
    multiplied by (exponent +1 or -1), such as a learned temperature per head.
    """

    anchor: Node
    output: Node
    query: Operand
    key: Operand
    value: Operand
    scale: float
    causal: bool
    terms: list[Term]
    softcap: float
    sinks: Node | None
    sink_dims: Dims
    factors: list[tuple[Node, Dims, float]]
    softmax_dtype: torch.dtype
    roles: dict[str, tuple[Var, ...]]
    out_dims: Dims
    interior: tuple[Node, ...]

    # ---- sizes

    def size(self, *roles: str) -> Size:
        return product(var.size for role in roles for var in self.roles[role])

    @property
    def batch(self) -> Size:
        return self.size("batch")

    @property
    def kv_heads(self) -> Size:
        return self.size("head")

    @property
    def group(self) -> Size:
        return self.size("group")

    @property
    def query_heads(self) -> Size:
        return self.size("head", "group")

    @property
    def query_length(self) -> Size:
        return self.size("query")

    @property
    def key_length(self) -> Size:
        return self.size("token")

    @property
    def head_dim(self) -> Size:
        return self.size("channel")

    @property
    def value_dim(self) -> Size:
        return self.size("value")

    @property
    def repetition(self) -> str:
        if known_equal(self.group, 1):
            return "none"
        heads = [
            v for dim in self.query.dims for v in dim if v in self.roles["head"] or v in self.roles["group"]
        ]
        heads = [v for v in heads if not known_equal(v.size, 1)]
        order = [v for v in (*self.roles["head"], *self.roles["group"]) if not known_equal(v.size, 1)]
        return "interleaved" if heads == order else "tiled"

    @property
    def is_square(self) -> bool:
        """Tq == Tk for every input, so that top-left and bottom-right causal alignment agree."""
        return known_equal(self.query_length, self.key_length)

    def describe(self) -> str:
        """One line for a report."""
        parts = [
            f"B={self.batch} Hq={self.query_heads} Hkv={self.kv_heads} Tq={self.query_length} Tk={self.key_length}"
        ]
        parts.append(
            f"D={self.head_dim}"
            + ("" if known_equal(self.head_dim, self.value_dim) else f" Dv={self.value_dim}")
        )
        parts.append(f"scale={self.scale:.6g}")
        parts += [f"{self.repetition} heads"] if self.repetition != "none" else []
        parts += ["causal from the top left"] if self.causal else []
        parts += [f"mask {term.node.name} ({term.kind})" for term in self.terms]
        parts += [f"softcap={self.softcap:.6g}"] if self.softcap else []
        parts += [f"sinks {self.sinks.name}"] if self.sinks is not None else []
        return f"{self.anchor.name}: " + ", ".join(parts)

    # ---- emission; the caller sets the graph's insertion point before ``output`` (``graph.inserting_before(site.output)``)

    def _sizes(self, graph: Graph) -> Sizes:
        nodes = [
            self.query.node,
            self.key.node,
            self.value.node,
            self.key.source,
            self.value.source,
            self.query.source,
        ]
        nodes += [term.node for term in self.terms if term.build is None]
        nodes = [latest(node) for node in nodes]
        alive = set(graph.nodes)
        nodes = [node for node in nodes if node in alive]
        return Sizes(graph, nodes + [node for node in graph.nodes if node.op == "placeholder"])

    def _form(self, *dims: tuple[str, ...]) -> Dims:
        return tuple(tuple(var for role in dim for var in self.roles[role]) for dim in dims)

    def emit_query(self, graph: Graph) -> Node:
        """The query as ``[B, Hq, Tq, D]``, times the tensor factors; ``scale`` is not applied."""
        sizes = self._sizes(graph)
        form = self._form(("batch",), ("head", "group"), ("query",), ("channel",))
        node = self._from_source(graph, sizes, self.query, form)
        for other, dims, exponent in self.factors:
            scaled = rearrange(graph, sizes, latest(other), dims, form)
            node = emit(graph, (aten.mul if exponent > 0 else aten.div).Tensor, (node, scaled))
        return node

    def emit_key(self, graph: Graph) -> Node:
        """The keys as ``[B, Hkv, Tk, D]`` from their source, without the repetition of heads."""
        form = self._form(("batch",), ("head",), ("token",), ("channel",))
        return self._from_source(graph, self._sizes(graph), self.key, form)

    def emit_value(self, graph: Graph) -> Node:
        """The values as ``[B, Hkv, Tk, Dv]`` from their source, without the repetition of heads."""
        form = self._form(("batch",), ("head",), ("token",), ("value",))
        return self._from_source(graph, self._sizes(graph), self.value, form)

    def _from_source(self, graph: Graph, sizes: Sizes, operand: Operand, form: Dims) -> Node:
        node = latest(operand.source)
        have = list(operand.dims)
        for axis in reversed(range(len(have))):
            start, length = operand.layout.starts[axis], product(var.size for var in have[axis])
            if not have[axis]:
                node = emit(graph, aten.select.int, (node, axis, sizes.value(start)))
                have.pop(axis)
            elif not (known_equal(start, 0) and known_equal(length, operand.layout.source_shape[axis])):
                node = emit(
                    graph, aten.slice.Tensor, (node, axis, sizes.value(start), sizes.value(start + length))
                )
        node = rearrange(graph, sizes, node, tuple(have), form)
        dtype, wanted = tensor_of(node).dtype, tensor_of(operand.node).dtype  # type: ignore[union-attr]
        return node if dtype == wanted else emit(graph, aten.to.dtype, (node, wanted))

    def emit_mask(self, graph: Graph, *, explicit_causal: bool | None = None) -> Node | None:
        """All masks as one tensor that broadcasts to ``[B, Hq, Tq, Tk]``: bool (True attends) or additive, or None.

        Terms that only exclude with -inf stay bool.  A finite fill becomes an additive mask with the least float32, so that
        a row with no key left weighs all keys alike, as it does in the model.  (The model may add a bias after such a fill;
        in a row with no key left it then differs from this by what the bias adds to the fill.)  The top-left ``causal`` flag
        is made explicit unless ``is_square`` (``explicit_causal`` overrides this).
        """
        sizes = self._sizes(graph)
        form = self._form(("batch",), ("head", "group"), ("query",), ("token",))
        if explicit_causal is None:
            explicit_causal = not self.is_square
        keeps: dict[float, Node] = {}
        adds: list[Node] = []

        def exclude(keep: Node, fill: float) -> None:
            keeps[fill] = (
                keep if fill not in keeps else emit(graph, aten.logical_and.default, (keeps[fill], keep))
            )

        for term in self.terms:
            source, dims = (latest(term.node), term.dims) if term.build is None else term.build(graph, sizes)
            node = rearrange(graph, sizes, source, dims, form)
            if term.kind == "fill":
                node = node if term.keep else emit(graph, aten.logical_not.default, (node,))
                exclude(node, -math.inf if term.fill == -math.inf else torch.finfo(torch.float32).min)
            else:
                node = node if term.factor == 1.0 else emit(graph, aten.mul.Scalar, (node, term.factor))
                least = torch.finfo(tensor_of(node).dtype).min  # type: ignore[union-attr]
                adds.append(emit(graph, aten.clamp_min.default, (node, least)) if term.finite else node)
        if self.causal and explicit_causal:
            exclude(self._emit_causal(graph, sizes), -math.inf)
        if not adds and set(keeps) <= {-math.inf}:
            return keeps.get(-math.inf)
        for fill, keep in sorted(keeps.items()):
            device = tensor_of(keep).device  # type: ignore[union-attr]
            options = {"dtype": torch.float32, "device": device}
            zero = emit(graph, aten.full.default, ([], 0.0), options)
            low = emit(graph, aten.full.default, ([], fill), options)
            adds.append(emit(graph, aten.where.self, (keep, zero, low)))
        total = adds[0]
        for node in adds[1:]:
            total = emit(graph, aten.add.Tensor, (total, node))
        return total

    def _emit_causal(self, graph: Graph, sizes: Sizes) -> Node:
        device = tensor_of(self.query.node).device  # type: ignore[union-attr]
        rows = emit(graph, aten.arange.default, (sizes.value(self.query_length),), {"device": device})
        columns = emit(graph, aten.arange.default, (sizes.value(self.key_length),), {"device": device})
        rows = emit(graph, aten.unsqueeze.default, (rows, -1))
        keep = emit(graph, aten.ge.Tensor, (rows, columns))
        for _ in range(2):
            keep = emit(graph, aten.unsqueeze.default, (keep, 0))
        return keep

    def emit_sinks(self, graph: Graph) -> Node | None:
        """The sinks' scores as ``[Hq]``, or None."""
        if self.sinks is None:
            return None
        return rearrange(
            graph, self._sizes(graph), latest(self.sinks), self.sink_dims, self._form(("head", "group"))
        )

    def emit_output(self, graph: Graph, node: Node) -> Node:
        """A ``[B, Hq, Tq, Dv]`` result in the shape, dtype and memory order of ``output``."""
        want = tensor_of(self.output)
        have = tensor_of(node)
        assert want is not None and have is not None
        shape = [self.batch, self.query_heads, self.query_length, self.value_dim]
        if not same_shape(have.shape, shape):
            raise LayoutError(
                f"attention result has shape {tuple(have.shape)}, the site needs {tuple(shape)}"
            )
        sizes = self._sizes(graph)
        sizes.nodes.append(node)
        have_dims = self._form(("batch",), ("head", "group"), ("query",), ("value",))
        node = rearrange(graph, sizes, node, have_dims, self.out_dims)
        node = reshape(graph, sizes, node, shape_of(self.output))
        if have.dtype != want.dtype:
            node = emit(graph, aten.to.dtype, (node, want.dtype))
        return match_strides(graph, node, want)

    def replace(self, graph: Graph, node: Node) -> None:
        """Let ``node``, as made by ``emit_output``, stand for ``output`` and erase what nothing reads any more."""
        node.meta = {**self.output.meta, **node.meta}
        self.output.replace_all_uses_with(node)
        mark_replaced(self.output, node)
        for old in self.interior:
            if all(_is_check(user) for user in old.users):
                for user in list(old.users):
                    graph.erase_node(user)
                graph.erase_node(old)


def _is_check(node: Node) -> bool:
    return not node.users and str(node.target).startswith("aten._assert_tensor_metadata")
