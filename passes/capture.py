"""Re-trace a graph to pre-dispatch ATen: SDPA whole, in-place writes visible, one spelling per operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx


def capture(graph_module: GraphModule, fake_inputs: Sequence[Any]) -> GraphModule:
    """The same computation as pre-dispatch ATen, its placeholders and outputs in the same number and order.

    ``fake_inputs`` has one value per placeholder: fake tensors of one fake mode (dense ones, also where the program will get
    a tensor subclass), SymInts and plain numbers.  Dynamo's graph becomes ATen here; an exported program's ``graph_module``
    already is ATen and comes out again operation by operation.  Raises ``ValueError`` if the number of inputs differs.
    """
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(fake_inputs):
        raise ValueError(
            f"capture: the graph has {len(placeholders)} placeholders, got {len(fake_inputs)} inputs; give one per placeholder"
        )
    keep_vmap = _exporting_state() if _has_transforms(graph_module) else contextlib.nullcontext()
    symbolic = detect_fake_mode(list(fake_inputs)) is not None

    def run(*values: Any) -> Any:
        return torch.fx.Interpreter(graph_module).run(*values, enable_io_processing=False)

    with torch.no_grad(), keep_vmap:
        traced = make_fx(run, pre_dispatch=True, tracing_mode="symbolic" if symbolic else "fake")(
            *fake_inputs
        )
    found = [node for node in traced.graph.nodes if node.op == "placeholder"]
    if len(found) != len(placeholders):
        raise ValueError(f"capture: tracing turned {len(placeholders)} placeholders into {len(found)}")
    for new, old in zip(found, placeholders, strict=True):
        new.meta = {**old.meta, **new.meta}
    return traced


def _has_transforms(graph_module: GraphModule) -> bool:
    """True if the graph enters vmap (block masks are built that way)."""
    return any(
        getattr(node.target, "__module__", None) == "torch._functorch.predispatch"
        for node in graph_module.graph.nodes
    )


@contextlib.contextmanager
def _exporting_state() -> Iterator[None]:
    """Tracing keeps vmap's own calls in the graph only while exporting; otherwise its batched tensors leak as constants."""
    before = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_exporting_flag = before


def remove_dead_code(graph: Graph) -> None:
    """Erase what nothing reads: as FX does it, but in-place writes and the brackets around vmap regions stay.

    FX takes ``_vmap_increment_nesting`` for a pure call and would erase it before the calls that need it.
    """
    brackets = (
        torch._functorch.predispatch._vmap_increment_nesting,
        torch._functorch.predispatch._vmap_decrement_nesting,
    )
    graph.eliminate_dead_code(
        lambda node: node.op in ("placeholder", "output") or node.is_impure() or node.target in brackets
    )
