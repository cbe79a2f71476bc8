"""Find every attention computation of a captured graph, in whatever spelling, and describe each as one record.

    sites = find_attention(graph_module)
    for miss in near_misses(graph_module):
        print(miss.anchor, miss.node, miss.reason)

The graph is pre-dispatch ATen: what ``torch.export.export`` holds, or ``passes.capture.capture`` makes.  Found are
``scaled_dot_product_attention``, ``flex_attention`` and a softmax between two contractions (matmul, bmm, baddbmm, einsum), with
scales, masks, softcap, sinks and head repetition in any order that one exact record can state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .attention_build import Builder
from .attention_flex import from_flex, is_flex
from .attention_operands import fused_products
from .attention_scores import Blocked, ScoreWalker, Step, follows_product
from .attention_site import AttentionSite, Operand, Term
from .attention_softmax import Softmax, softmax_of
from .layout_nodes import arguments, constant_value, op_name, shape_of, tensor_of
from .layout_sizes import LayoutError

__all__ = ["AttentionSite", "NearMiss", "Operand", "Term", "find_attention", "near_misses", "scan"]


@dataclass(frozen=True)
class NearMiss:
    """A softmax, SDPA or flex_attention that is no site: ``node`` is the first one that stood in the way.

    ``likely`` is False for a softmax that no product of two tensors leads to elementwise (a router, a classifier).
    """

    anchor: Node
    node: Node
    reason: str
    likely: bool = True

    def __str__(self) -> str:
        return f"{self.anchor.name}: {self.node.name} {self.reason}"


def scan(
    graph_module: GraphModule, constants: Mapping[str, Tensor] | None = None
) -> tuple[list[AttentionSite], list[NearMiss]]:
    """All sites and all near misses, each in graph order.

    ``constants`` maps placeholder names to tensor constants (an ExportedProgram lifts them to inputs), so that a scale or a
    fill held in a tensor is known.
    """
    walker = ScoreWalker(graph_module.graph, constants)
    sites: list[AttentionSite] = []
    misses: list[NearMiss] = []
    for node in graph_module.graph.nodes:
        softmax = softmax_of(node, walker.effects)
        find = _fused(node) if softmax is None else functools.partial(_from_softmax, softmax=softmax)
        if find is None:
            continue
        try:
            sites.append(find(walker, node))
        except Blocked as blocked:
            likely = softmax is None or follows_product(node)
            misses.append(NearMiss(node, blocked.node, blocked.reason, likely))
        except LayoutError as error:
            misses.append(NearMiss(node, node, f"cannot be read: {error}"))
    return sites, misses


def find_attention(
    graph_module: GraphModule, constants: Mapping[str, Tensor] | None = None
) -> list[AttentionSite]:
    """Every attention of the graph as a record, in graph order."""
    return scan(graph_module, constants)[0]


def near_misses(graph_module: GraphModule, constants: Mapping[str, Tensor] | None = None) -> list[NearMiss]:
    """Every softmax, SDPA or flex_attention that is no site, with the first node that stood in the way and why."""
    return scan(graph_module, constants)[1]


def _fused(node: Node) -> Callable[[ScoreWalker, Node], AttentionSite] | None:
    """What reads ``node``, if that is an operation which is attention as a whole."""
    if op_name(node) == "scaled_dot_product_attention":
        return _from_sdpa
    if is_flex(node):
        return from_flex
    return None


def _from_softmax(walker: ScoreWalker, node: Node, softmax: Softmax) -> AttentionSite:
    path = walker.path(softmax)
    return Builder(walker, path.first, path.steps, path.last, path.probabilities, node, path.interior).build()


def _from_sdpa(walker: ScoreWalker, node: Node) -> AttentionSite:
    bound = arguments(node)
    query, key, value = bound["query"], bound["key"], bound["value"]
    if constant_value(bound["dropout_p"]) != 0.0:
        raise Blocked(node, "drops probabilities at random (training); call eval() or set dropout_p to 0")
    first, last, repeats = fused_products(node, query, key, value, gqa=bool(bound["enable_gqa"]))
    scale = bound["scale"]
    if scale is None:
        width = shape_of(query)[-1]
        if not isinstance(width, int):
            raise Blocked(node, "has a head size that is not static, so its default scale is no number")
        scale = 1.0 / math.sqrt(width)
    number = constant_value(scale)
    if number is None:
        raise Blocked(node, "scales by a symbolic number; the head size must be static")
    steps = [Step(node, "contract", number)]
    mask = bound["attn_mask"]
    if mask is not None:
        if tensor_of(mask).dtype == torch.bool:  # type: ignore[union-attr]
            steps.append(Step(node, "fill", -math.inf, mask, True))
        else:
            steps.append(Step(node, "add", 1.0, mask))
    steps.append(Step(node, "softmax", dim=len(first.out) - 1))
    builder = Builder(walker, first, steps, last, node, node, [node])
    builder.repeats, builder.value_repeats = repeats, repeats
    builder.causal = bool(bound["is_causal"])
    return builder.build()
