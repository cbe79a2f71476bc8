"""What must hold for a graph after each pass; a violation is a fault of the pass and stops it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from .attention_effects import written
from .layout_sizes import same_shape
from .lift import Lifted

__all__ = ["check_graph", "plane_write_count"]

kvq = torch.ops.kvq


class BrokenGraphError(AssertionError):
    """A pass produced a graph that does not mean what the graph before it meant."""


def _output(graph_module: GraphModule) -> list[Any]:
    (node,) = (n for n in graph_module.graph.nodes if n.op == "output")
    return pytree.tree_leaves(node.args[0], is_leaf=lambda leaf: leaf is None)


def plane_write_count(graph_module: GraphModule) -> int:
    """How many ``kvq::append_`` the graph holds."""
    return sum(node.target is kvq.append_.default for node in graph_module.graph.nodes)


def check_graph(before: GraphModule, lifted: Lifted, *, appends: int | None = None) -> None:
    """Outputs keep number, shape and dtype; the graph is well formed; writes are neither lost nor added.

    Args:
        appends: how many ``kvq::append_`` there must be.
    """
    after = lifted.graph_module
    after.graph.lint()
    old, new = _output(before), lifted.split_outputs(_output(after))
    if len(old) != len(new):
        raise BrokenGraphError(f"{len(old)} outputs became {len(new)}")
    for a, (b, *_), handle in zip(old, new, lifted.outputs, strict=True):
        if handle is not None:
            continue
        x = a.meta.get("val") if isinstance(a, Node) else a
        y = b.meta.get("val") if isinstance(b, Node) else b
        if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
            if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
                raise BrokenGraphError(f"output {a} became {b}")
            continue
        if x.dtype != y.dtype or not same_shape(x.shape, y.shape):
            raise BrokenGraphError(
                f"output {a} of {x.dtype} {tuple(x.shape)} became {y.dtype} {tuple(y.shape)}"
            )
    if appends is not None and plane_write_count(after) != appends:
        raise BrokenGraphError(f"{appends} writes into quantized caches became {plane_write_count(after)}")
    for node in after.graph.nodes:
        if node.op == "call_function" and node.target is kvq.append_.default:
            planes = written(node)
            if len(set(planes)) != len(planes):
                raise BrokenGraphError(f"{node.name} writes one plane twice")
