"""Put the stores of quantized caches in place of dense cache inputs.

The captured graph, in which a cache is one dense input, is interpreted once more with a ``QuantizedKV`` handle in its place.
What an operation does to a handle is defined once, in ``kvq_ops.handle_ops``, for eager and for graphs: writes become
``kvq::append_`` on the planes, movements move planes, all other reads become ``kvq::dequantize``. The result takes the planes
as inputs, in order, where the cache was, and is already right; ``passes.fuse`` then makes it fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import preserve_node_meta
from torch.utils import _pytree as pytree

from kvq_ops.errors import KVQError, UnsupportedWriteError
from kvq_ops.handle import QuantizedKV
from kvq_ops.handle_ops import dispatch, token_write, written_arguments

from .attention_effects import Effects, written

__all__ = ["CannotLift", "Lifted", "flatten_handles", "lift"]


class CannotLift(UnsupportedWriteError):
    """A node that has no counterpart on stores.

    Attributes:
        caches: the nodes that hold the caches it uses.
        reason: what it does to them, as the end of a sentence about a cache.
    """

    reason: str = ""


@dataclass
class Lifted:
    """A graph on stores.

    Attributes:
        graph_module: takes one input for each plane where a cache was one input.
        inputs: its fake inputs, in order.
        writes: how many writes into caches it carries out.
        outputs: for each output of the captured graph, ``None``, or the fake handle whose planes stand in its place.
    """

    graph_module: GraphModule
    inputs: list[Any]
    writes: int = 0
    outputs: list[QuantizedKV | None] = field(default_factory=list)

    def split_outputs(self, flat: Sequence[Any]) -> list[list[Any]]:
        """Flat results of the lifted graph, grouped by the output of the captured graph that they stand for."""
        groups, at = [], 0
        for handle in self.outputs:
            size = 1 if handle is None else len(handle.store)
            groups.append(list(flat[at : at + size]))
            at += size
        return groups

    def rebuild_outputs(self, flat: Sequence[Any]) -> list[Any]:
        """Flat results of the lifted graph as those of the captured one, with handles around planes."""
        return [
            group[0] if handle is None else handle.with_store(group)
            for handle, group in zip(self.outputs, self.split_outputs(flat), strict=True)
        ]


def flatten_handles(values: Sequence[Any]) -> list[Any]:
    """``values`` with each handle replaced by its planes."""
    flat: list[Any] = []
    for value in values:
        flat += value.store if isinstance(value, QuantizedKV) else [value]
    return flat


def lift(captured: GraphModule, inputs: Sequence[Any]) -> Lifted:
    """Re-interpret ``captured`` with stores.

    Args:
        captured: from ``passes.capture.capture``.
        inputs: one for each placeholder: a handle of fake planes where the cache is quantized, fake tensors and sizes otherwise.

    Raises:
        UnsupportedWriteError: when the graph writes into a cache in a way that codes cannot follow; the node is named.
    """
    result = Lifted(captured, flatten_handles(inputs))
    interpreter = _Lifter(captured, [isinstance(v, QuantizedKV) for v in inputs])

    def run(*flat: Any) -> Any:
        values, at = [], 0
        for value in inputs:
            if isinstance(value, QuantizedKV):
                planes = flat[at : at + len(value.store)]
                values.append(value.with_store(planes))
                at += len(planes)
            else:
                values.append(flat[at])
                at += 1
        outputs = interpreter.run(*values, enable_io_processing=False)
        leaves = pytree.tree_leaves(outputs, is_leaf=lambda leaf: leaf is None)
        result.outputs = [leaf if isinstance(leaf, QuantizedKV) else None for leaf in leaves]
        return flatten_handles(leaves)

    with torch.no_grad(), preserve_node_meta():
        result.graph_module = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(*result.inputs)
    # make_fx leaves the shape environment on the module; Inductor's cache would try to pickle what it refers to.
    result.graph_module.__dict__.pop("shape_env", None)
    result.writes = interpreter.writes
    _copy_placeholder_meta(captured, result.graph_module, inputs)
    return result


class _Lifter(torch.fx.Interpreter):
    """Runs a graph with handles among its values."""

    def __init__(self, module: GraphModule, is_cache: Sequence[bool]) -> None:
        super().__init__(module)
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.caches = {node for node, cache in zip(placeholders, is_cache, strict=True) if cache}
        self.effects = Effects(module.graph)
        self.writes = 0
        # Nodes that pick tokens of a cache which only grows at its end, and what a copy_ into them does.
        self.appends: dict[Node, Callable[[Any], Any]] = {}

    def run_node(self, n: Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten.copy_.default and self.node.args[0] in self.appends:
            self.writes += 1
            return self.appends[self.node.args[0]](args[1])  # type: ignore[index]
        if not any(isinstance(t, QuantizedKV) for t in pytree.tree_leaves((args, kwargs))):
            self._check_not_lost()
            return super().call_function(target, args, kwargs)
        writes = any(isinstance(t, QuantizedKV) for t in pytree.tree_leaves(written_arguments(target, args)))
        if not writes:
            self._check_not_lost()
        if (append := token_write(target, args, kwargs)) is not None:
            self.appends[self.node] = append
        try:
            result = dispatch(target, args, kwargs, guard_views=False)
        except (KVQError, GuardOnDataDependentSymNode) as error:
            # torch puts its advice to the author of the graph behind the first sentence.
            why = error.got if isinstance(error, KVQError) else str(error).partition("(unhinted")[0].strip()
            raise self._cannot(why, written(self.node) if writes else self.node.all_input_nodes) from error
        self.writes += writes
        return result

    def _check_not_lost(self) -> None:
        """A write into a decoded view of a cache would not reach the cache."""
        for value in written(self.node):
            if self.effects.roots[value] & self.caches and not isinstance(self.env[value], QuantizedKV):
                why = "a write through a view that mixes axes, of which codes have no counterpart"
                raise self._cannot(why, written(self.node))

    def _cannot(self, why: str, through: Sequence[Node]) -> CannotLift:
        does = "writes into" if written(self.node) else "reads"
        error = CannotLift(
            f"quantizing a cache that node {self.node.name!r} ({self.node.target}) {does}",
            got=why,
            allowed="index_copy_, x[:, :, pos] = k, copy_ (also into slices of tokens), zero_",
            do="write whole head vectors in the model, or leave this cache unquantized",
        )
        how = "written" if written(self.node) else "read"
        error.reason = f"is {how} by {self.node.name} ({self.node.target}): {why}"
        error.caches = frozenset().union(*(self.effects.roots[value] for value in through))
        return error


def _copy_placeholder_meta(captured: GraphModule, lifted: GraphModule, inputs: Sequence[Any]) -> None:
    """Carry over names and sources, so that reports and CUDA graphs can tell which input is which."""
    new = iter([node for node in lifted.graph.nodes if node.op == "placeholder"])
    old = [node for node in captured.graph.nodes if node.op == "placeholder"]
    for node, value in zip(old, inputs, strict=True):
        kept = {key: node.meta[key] for key in ("tensor_dict",) if key in node.meta}
        names = (
            [f"{node.name}_{name}" for name in value.plane_names()]
            if isinstance(value, QuantizedKV)
            else [node.name]
        )
        for name in names:
            placeholder = next(new)
            placeholder.meta.update(kept)
            if not isinstance(value, QuantizedKV):
                # make_fx says nothing of plain numbers, and an exported program wants to know.
                placeholder.meta.setdefault("val", value)
            placeholder._rename(name)
            placeholder.target = placeholder.name
    lifted.recompile()
