"""The graphs of one call of a model, and which object each input of a graph is."""

from __future__ import annotations

import copy
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.traceback import preserve_node_meta

from kvq_ops.errors import KVQError
from kvq_ops.handle import QuantizedKV

from .capture import capture
from .holders import Holders
from .latent import absorb

__all__ = ["Traced", "dense_fake", "source_name", "trace_model"]


@dataclass
class Traced:
    """One graph of a call.

    Attributes:
        captured: the graph as pre-dispatch ATen, with dense tensors in place of quantized caches.
        inputs: its fake inputs, dense.
        objects: what each input is in the model or the arguments; ``None`` where that cannot be told.
        names: a readable name of each input.
    """

    captured: GraphModule
    inputs: list[Any]
    objects: list[Any]
    names: list[str]

    def placeholders(self) -> list[Node]:
        return [node for node in self.captured.graph.nodes if node.op == "placeholder"]


class _Stop(Exception):
    """Ends compilation once the graph is in hand."""


def trace_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Traced]:
    """The graphs of one call, which changes neither model nor arguments.

    A model that is one graph is not run. One with graph breaks is run on a deep copy, and what Dynamo has compiled so far in this
    process is forgotten.
    """
    graphs: list[Traced] = []
    known = {id(tensor): name for name, tensor in _tensors(model)}

    def take(graph_module: GraphModule) -> tuple[Callable[[list[Any]], Traced], list[Any]]:
        placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        inputs = [dense_fake(node.meta.get("example_value")) for node in placeholders]
        with preserve_node_meta():
            captured = absorb(capture(graph_module, inputs))
        names = [source_name(node) for node in placeholders]

        def traced(objects: list[Any]) -> Traced:
            named = [known.get(id(one), name) for one, name in zip(objects, names, strict=True)]
            return Traced(captured, inputs, objects, named)

        return traced, placeholders

    def stop(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        traced, placeholders = take(graph_module)
        scope = {"model": model, "args": args, "kwargs": kwargs}
        graphs.append(
            traced([_resolve(getattr(node, "_dynamo_source", None), scope) for node in placeholders])
        )
        raise _Stop

    with torch.no_grad():
        try:
            torch.compile(_call(), backend=stop, fullgraph=True, dynamic=False)(model, args, kwargs)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if not isinstance(error.inner_exception, _Stop):
                raise error.inner_exception from error
        except torch._dynamo.exc.Unsupported as error:
            graphs.clear()
            copied, originals = _copied((model, args, kwargs), error)

            def go_on(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
                traced, _ = take(graph_module)

                def run(*values: Any) -> Any:
                    # One graph may serve several layers; each call is a graph of its own here.
                    graphs.append(traced([originals.get(id(value)) for value in values]))
                    return graph_module(*values)

                return run

            torch._dynamo.reset()
            torch.compile(_call(), backend=go_on, dynamic=False)(*copied)
            torch._dynamo.reset()
    return graphs


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _copied(call: Any, why: Exception) -> tuple[Any, dict[int, Any]]:
    """A deep copy, and what each of its tensors is a copy of. One copy for all, so that what is shared stays shared."""
    memo: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(call, memo)
    except Exception as error:
        raise KVQError(
            "tracing a model that is not one graph",
            got=f"a model or arguments that cannot be copied: {error}",
            allowed="a model that copy.deepcopy takes, to be run without changing yours",
            do=f"remove the graph break: {str(why).splitlines()[0]}",
        ) from error
    holders = Holders(*call)
    tensors = [*holders.tensors(), *(one for one in call[0].parameters()), *call[1], *call[2].values()]
    return copied, {id(memo[id(one)]): one for one in tensors if isinstance(one, Tensor) and id(one) in memo}


def _call() -> Callable[..., Any]:
    """A frame of our own, so that sources start at names that are known; new each time, as Dynamo keeps results by code."""

    def call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return model(*args, **kwargs)

    return types.FunctionType(call.__code__.replace(), call.__globals__)


def dense_fake(value: Any) -> Any:
    """``value``, or for a handle of fake planes a dense fake tensor in its place."""
    if isinstance(value, QuantizedKV):
        return value.store[0].new_empty(tuple(value.shape), dtype=value.dtype)
    return value


def _resolve(source: Any, scope: Mapping[str, Any]) -> Any:
    """The object that a source of Dynamo stands for, or ``None``."""
    from torch._dynamo import source as kinds

    def value(one: Any) -> Any:
        if isinstance(one, kinds.LocalSource):
            return scope[one.local_name]
        owner = value(one.base)
        if hasattr(one, "member"):
            return getattr(owner, one.member)
        if hasattr(one, "index"):
            return _item(owner, one.index)
        return owner

    try:
        return None if source is None else value(source)
    except (KeyError, AttributeError, IndexError, TypeError):
        return None


def _item(owner: Any, index: Any) -> Any:
    if isinstance(owner, dict) and not isinstance(index, (str, int)):
        return list(owner.values())[getattr(index, "index", index)]
    return owner[index]


def source_name(node: Node) -> str:
    """A readable name for a graph input: ``layers[0].k_cache``, ``past_key_values.layers[0].keys``."""
    source = getattr(node, "_dynamo_source", None)
    name = source.name if source is not None else node.name
    name = str(name() if callable(name) else name)
    name = re.sub(r"^L\['\w+'\](?=\._(modules|buffers|parameters)\b)", "", name)
    for noise in ("L['model']", "L['self']", "L['kwargs']", "_modules", "_buffers", "_parameters"):
        name = name.replace(noise, "")
    name = name.replace("L['", "").replace("['", ".").replace("']", "")
    while ".." in name:
        name = name.replace("..", ".")
    return name.strip(".") or node.name


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have elements in common; where strides do not tell, whether they may have."""
    if a.layout != torch.strided or b.layout != torch.strided or not a.numel() or not b.numel():
        return False
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata:
        return False
    apart = int(b.storage_offset()) - int(a.storage_offset())
    if a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride():
        steps = sorted(
            ((stride, size) for stride, size in zip(a.stride(), a.shape, strict=True)), reverse=True
        )
        return _reachable(apart, steps)
    starts = [t.storage_offset() * t.itemsize for t in (a, b)]
    ends = [at + _reach(t) * t.itemsize for at, t in zip(starts, (a, b), strict=True)]
    return starts[0] < ends[1] and starts[1] < ends[0]


def _reach(tensor: Tensor) -> int:
    """Elements from the first to the last in memory."""
    return 1 + sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def _reachable(apart: int, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether two elements of a tensor lie ``apart`` from each other; ``steps`` are strides and sizes, the largest first."""
    if not steps:
        return apart == 0
    (stride, size), *rest = steps
    if stride == 0:
        return _reachable(apart, rest)
    # What the smaller strides reach stays below this one, so one of the two nearest multiples must do.
    near = {apart // stride, -(-apart // stride)}
    return any(abs(n) < size and _reachable(apart - n * stride, rest) for n in near)
