"""Replace every attention site of a graph by a plain reference attention, to prove that a site says all there is to say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._sympy.functions import Min

from passes.attention import AttentionSite, Operand, scan
from passes.capture import capture, remove_dead_code


def is_plain(operand: Operand) -> bool:
    """Whether the source has one axis each for token and channel, and all others are batch, head or fixed axes.

    False as well if the walk ended early at a view that mixes axes.
    """
    seen = [role for role in operand.roles if role != "fixed"]
    return (
        operand.stopped is None
        and operand.axis("token") is not None
        and operand.axis("channel") is not None
        and len(set(seen)) == len(seen)
        and set(seen) <= {"batch", "head", "token", "channel"}
    )


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Float64 attention of ``[B, Hq, Tq, D]`` on ``[B, Hkv, Tk, D]``; rows that may attend to nothing give zeros."""
    assert query.dim() == key.dim() == value.dim() == 4
    group = query.shape[1] // key.shape[1]
    k = key.double().repeat_interleave(group, 1)
    v = value.double().repeat_interleave(group, 1)
    scores = query.double() @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        assert mask.dim() == 4
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    if causal:
        assert scores.shape[-1] == scores.shape[-2]
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    if sinks is not None:
        weights = weights[..., :-1]
    return (weights @ v).to(query.dtype)


def fake_reference(query: Tensor, value: Tensor) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


def rewrite_to_reference(graph_module: GraphModule, sites: Sequence[AttentionSite]) -> GraphModule:
    """In place: emit_query, emit_key, emit_value, emit_mask, the reference, emit_output."""
    graph = graph_module.graph
    for site in sites:
        with graph.inserting_before(site.output):
            query, key, value = site.emit_query(graph), site.emit_key(graph), site.emit_value(graph)
            assert tuple(query.meta["val"].shape[1:2]) == (site.query_heads,)
            mask, sinks = site.emit_mask(graph), site.emit_sinks(graph)
            causal = site.causal and site.is_square
            result = graph.call_function(
                reference_attention, (query, key, value, mask, causal, site.scale, site.softcap, sinks)
            )
            result.meta["val"] = fake_reference(query.meta["val"], value.meta["val"])
            output = site.emit_output(graph, result)
        old, new = site.output.meta["val"], output.meta["val"]
        assert new.dtype == old.dtype and len(new.shape) == len(old.shape)
        site.replace(graph, output)
    remove_dead_code(graph)
    graph.lint()
    graph_module.recompile()
    return graph_module


class Plain(nn.Module):
    """A function as a module, for export."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def compares_strides() -> bool:
    """Whether this torch sees that ``min(16 * t, 64 * t)`` is ``16 * t``; 2.11 does not, 2.13 does.

    Where it does not, such a stride becomes a guard, which export cannot prove for a ``Dim`` with a range and refuses. As an
    assertion at run time it does no harm.
    """
    t = sympy.Symbol("t", positive=True, integer=True)
    return Min(16 * t, 64 * t) == 16 * t


def exported(function: Callable[..., Any], args: tuple[Any, ...], dynamic: Any = None) -> GraphModule:
    """Graph of a function of tensors, by torch.export; ``dynamic`` has one entry per argument."""
    module = function if isinstance(function, nn.Module) else Plain(function)
    shapes = None if dynamic is None else (tuple(dynamic),)
    if dynamic is not None and module is function:
        shapes = tuple(dynamic)
    program = torch.export.export(
        module,
        args,
        dynamic_shapes=shapes,
        prefer_deferred_runtime_asserts_over_guards=not compares_strides(),
    )
    return copy.copy(program.graph_module)


class CaptureBackend:
    """A torch.compile backend that captures, hands the graph to ``edit`` and runs the result."""

    def __init__(self, edit: Callable[[GraphModule], GraphModule]) -> None:
        self.edit = edit

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        fakes = [n.meta["example_value"] for n in graph_module.graph.nodes if n.op == "placeholder"]
        captured = self.edit(capture(graph_module, fakes))
        return torch._dynamo.disable(captured.forward)


def found(graph_module: GraphModule) -> AttentionSite:
    """The one site of a graph."""
    sites, misses = scan(graph_module)
    assert len(sites) == 1, [str(m) for m in misses]
    return sites[0]
