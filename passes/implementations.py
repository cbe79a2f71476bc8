"""Whether the operators of a graph can run here, asked before the graph is compiled rather than when it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from kvq_ops.formats import get_format
from kvq_ops.registry import Request, select

__all__ = ["check_implementations", "requests"]

kvq = torch.ops.kvq


def check_implementations(graph_module: GraphModule) -> None:
    """Raise ``ImplementationError`` for an operator that no implementation, or not the one asked for by name, can serve."""
    for request in requests(graph_module):
        select(request)


def requests(graph_module: GraphModule) -> Iterator[Request]:
    """What the operators of a graph will ask of the registry, as far as that is known before they run."""
    for node in graph_module.graph.nodes:
        request = _request(node) if node.op == "call_function" else None
        # A symbolic head_dim is known when it runs.
        if request is not None and all(isinstance(dim, int) for dim in request.head_dims):
            yield request


def _request(node: Node) -> Request | None:
    if node.target is kvq.attention.default:
        query, _, _, key, value = node.args[:5]
        x, out = _value(query), _value(node)
        if x is None or out is None:
            return None
        formats = (get_format(str(key)), get_format(str(value)))
        return Request("attention", x.device.type, formats, (x.shape[-1], out.shape[-1]), x.dtype)
    if node.target is kvq.paged_attention.default:
        query, *_, key, value = node.args[:7]
        x, out = _value(query), _value(node)
        if x is None or out is None:
            return None
        formats = (get_format(str(key)), get_format(str(value)))
        return Request("paged_attention", x.device.type, formats, (x.shape[-1], out.shape[-1]), x.dtype)
    if node.target in (kvq.append_.default, kvq.paged_append_.default, kvq.quantize.default):
        x, name = _value(node.args[-2]), node.args[-1]
        return x if x is None else _of_one(node.target._opname, x, name)
    if node.target is kvq.dequantize.default:
        x, name = _value(node), node.args[1]
        return x if x is None else _of_one("dequantize", x, name)
    return None


def _of_one(op: str, x: Tensor, name: Any) -> Request:
    return Request(op, x.device.type, (get_format(str(name)),), (x.shape[-1],), x.dtype)


def _value(argument: Any) -> Tensor | None:
    value = argument.meta.get("val") if isinstance(argument, Node) else None
    return value if isinstance(value, Tensor) else None
