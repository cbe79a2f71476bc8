"""flex_attention: its score_mod and mask_mod read as steps on the scores, their tensors rebuilt from broadcast indices.

The block tables of a block mask only say where ``mask_mod`` holds, as in PyTorch's own unfused implementation; the mask built
here is ``mask_mod`` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .attention_build import Builder
from .attention_operands import fused_products
from .attention_scores import Blocked, ScoreWalker, Step
from .attention_site import AttentionSite, Term
from .attention_space import Dims, Sizes, aten, emit
from .layout_nodes import constant_value, op_name, shape_of, tensor_of, words
from .layout_sizes import known_equal

_MOD_INDEX = "torch._dynamo._trace_wrapped_higher_order_op.ModIndex"
# Elementwise, but not tagged so.
_POINTWISE = words(
    "__and__ __or__ __xor__ bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not where "
    "to _to_copy floor_divide remainder clamp lift_fresh lift_fresh_copy detach alias rsub subtract "
    "multiply divide true_divide"
)
_CONSTANTS = words("full scalar_tensor ones zeros new_ones new_zeros new_full")


def is_flex(node: Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.higher_order.flex_attention


class _ModWalker(ScoreWalker):
    """Walks a score_mod from its result back to its first argument, the score."""

    def __init__(self, module: GraphModule, scale: float) -> None:
        super().__init__(module.graph)
        self.inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.scale = scale

    def _back(self, node: Node) -> list[Step]:
        if node is self.inputs[0]:
            return [Step(node, "contract", self.scale)]
        return super()._back(node)


def from_flex(walker: ScoreWalker, node: Node) -> AttentionSite:
    """The site of a ``flex_attention`` call.  Raises ``Blocked``."""
    inputs: tuple[Any, ...] = node.args
    query, key, value, score_mod, block_mask, scale, _, score_buffers, mask_buffers = inputs
    results = {user.args[1]: user for user in walker.users(node) if op_name(user) == "getitem"}
    extra = next((user for index, user in results.items() if index != 0 and walker.users(user)), None)
    if extra is not None or 0 not in results:
        raise Blocked(extra or node, "reads more of flex_attention than its output")
    output = results[0]
    number = constant_value(scale)
    if number is None:
        raise Blocked(node, "scales by a symbolic number; the head size must be static")
    first, last, repeats = fused_products(output, query, key, value, gqa=True)
    if len(first.out) != 4:
        raise Blocked(node, "has operands that are not 4-dimensional")
    owner: Any = node.graph.owning_module
    module = _module(owner, score_mod)
    mod = _ModWalker(module, number)
    result = _result(module)
    try:
        steps = mod.back(result, next(iter(result.users)))
    except Blocked as blocked:
        raise Blocked(node, f"has a score_mod that is not understood: {blocked}") from None
    if any(step.kind in ("factor", "sink") for step in steps):
        raise Blocked(node, "has a score_mod that multiplies the score by a tensor")
    steps = [*steps, Step(output, "softmax", dim=3)]
    builder = Builder(walker, first, steps, last, output, node, [output, node])
    builder.repeats, builder.value_repeats = repeats, repeats
    labels = first.out
    place = lambda: tuple(builder.space.vars(label) for label in labels)  # noqa: E731
    for term, _ in builder.scores.pending:
        cone = _cone(node, term.node, mod.inputs[0])
        term.build = _builder(score_mod, cone, term.node, _bind(mod.inputs[1:], score_buffers), place)
    mask_mod = block_mask[-1]
    module = _module(owner, mask_mod)
    result = _result(module)
    if not _always(result):
        indices = [n for n in module.graph.nodes if n.op == "placeholder"]
        cone = _cone(node, result, None)
        term = Term("fill", result, (), output, fill=-math.inf)
        term.build = _builder(mask_mod, cone, result, _bind(indices, mask_buffers), place)
        builder.extra_terms.append(term)
    return builder.build()


def _module(owner: Any, attribute: Any) -> GraphModule:
    for part in str(attribute.target).split("."):
        owner = getattr(owner, part)
    assert isinstance(owner, GraphModule)
    return owner


def _result(module: GraphModule) -> Node:
    value = next(node for node in module.graph.nodes if node.op == "output").args[0]
    value = value[0] if isinstance(value, (list, tuple)) else value
    assert isinstance(value, Node)
    return value


def _always(node: Node) -> bool:
    """A mask_mod that is true everywhere (no block mask was given)."""
    name = op_name(node)
    return name in ("ones", "new_ones") or (name in ("full", "new_full") and node.args[-1] is True)


def _bind(inputs: list[Node], buffers: Any) -> dict[Node, Any]:
    """Inputs of a mod after the score: batch, head, query and key index (by position), then its buffers."""
    bound: dict[Node, Any] = {node: position for position, node in enumerate(inputs[:4])}
    return bound | dict(zip(inputs[4:], buffers, strict=True))


def _cone(anchor: Node, result: Node, score: Node | None) -> list[Node]:
    """What ``result`` needs, in order; every step must be elementwise on numbers or look a buffer up."""
    needed: set[Node] = set()
    pending = [result]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    cone = [node for node in result.graph.nodes if node in needed]
    for node in cone:
        if node is score:
            raise Blocked(anchor, f"has a mask that depends on the score ({result.name})")
        if node.op in ("placeholder", "get_attr") or _is_lookup(node):
            continue
        name = op_name(node)
        pointwise = name and torch.Tag.pointwise in node.target.tags
        value = tensor_of(node)
        if not (pointwise or name in _POINTWISE or name in _CONSTANTS) or value is None or value.dim() != 0:
            raise Blocked(
                anchor, f"has a mod with {name or node.target} ({node.name}), which is not elementwise"
            )
    return cone


def _is_lookup(node: Node) -> bool:
    value = tensor_of(node)
    if value is None or value.dim() != 0:
        return False
    if op_name(node) == "index":
        return all(isinstance(index, Node) for index in node.args[1])  # type: ignore[union-attr]
    return node.target is torch.ops.higher_order.flat_apply and node.args[2] == _MOD_INDEX


def _builder(
    owner: Node, cone: list[Node], result: Node, bound: dict[Node, Any], place: Callable[[], Dims]
) -> Callable[[Graph, Sizes], tuple[Node, Dims]]:
    """A function that puts ``result`` into the main graph, over batch, head, query and key indices at once."""

    def build(graph: Graph, sizes: Sizes) -> tuple[Node, Dims]:
        dims = place()
        made: dict[Node, Any] = {}
        device = next(
            tensor_of(n).device  # type: ignore[union-attr]
            for n in graph.nodes
            if n.op == "placeholder" and tensor_of(n) is not None
        )
        for node in cone:
            if node in bound:
                given = bound[node]
                made[node] = _iota(graph, sizes, dims, given, device) if isinstance(given, int) else given
            elif node.op == "get_attr" and tensor_of(node) is not None:
                made[node] = graph.get_attr(f"{owner.target}.{node.target}")
                made[node].meta = dict(node.meta)
            elif node.op == "call_function":
                made[node] = _copy(graph, node, made)
        value = made[result]
        shape = shape_of(value)
        tail = dims[len(dims) - len(shape) :]
        found = tuple(
            () if known_equal(size, 1) and not all(known_equal(v.size, 1) for v in vars_) else vars_
            for size, vars_ in zip(shape, tail, strict=True)
        )
        return value, found

    return build


def _copy(graph: Graph, node: Node, made: dict[Node, Any]) -> Node:
    if node.target is torch.ops.higher_order.flat_apply:
        looked_up: tuple[Any, ...] = node.args[3:]
        buffer, *indices = looked_up
        return emit(graph, aten.index.Tensor, (made[buffer], [made[i] for i in indices]))
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), made.__getitem__)
    return emit(graph, node.target, args, dict(kwargs))


def _iota(graph: Graph, sizes: Sizes, dims: Dims, position: int, device: torch.device) -> Node:
    """Indices of one of the four dims, shaped to broadcast along the others."""
    size: Any = 1
    for var in dims[position]:
        size = size * var.size
    node = emit(graph, aten.arange.default, (sizes.value(size),), {"device": device})
    for dim in range(4):
        if dim != position:
            node = emit(graph, aten.unsqueeze.default, (node, 0 if dim < position else -1))
    return node
