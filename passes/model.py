"""Quantize the caches of a model that nobody prepared, and say what would be done.

passes.quantize_kv_cache_(model, "int8_per_token_head", example_inputs)
passes.explain(model, *args, format="int8_per_token_head")
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kvq_ops.calibration import Calibration
from kvq_ops.errors import FormatError, NothingRewrittenError
from kvq_ops.formats import Format, KVFormat
from kvq_ops.handle import QuantizedKV
from kvq_ops.policy import Policy

from .caches import Candidate, Plan, find_candidates, plan, quantize_dense
from .holders import Holders
from .layer_names import LayerNames
from .report import CacheResult, GraphReport, Report
from .trace_model import Traced, dense_fake, same_memory, source_name, trace_model

__all__ = ["dense_fake", "explain", "quantize_kv_cache_", "source_name"]


def quantize_kv_cache_(
    model: nn.Module,
    format: str | Format | KVFormat | Policy,
    example_inputs: Sequence[Any] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    layers: Any = None,
    skip: Any = (),
    calibration: Calibration | None = None,
) -> Report:
    """Replace the KV caches of ``model`` by quantized ones, in place: all that can be, or when anything fails none.

    The model is traced once and not run (a model with graph breaks is run on a copy). Tensors that attention reads keys or values
    from, and that nothing else reads or writes in a way codes cannot follow, are caches; those that the model holds (buffers,
    attributes, items of lists and dicts) or by objects among the inputs (such as a Hugging Face static cache) become
    ``QuantizedKV`` handles with the same content, wherever they are held. A Hugging Face model also makes ``generate()`` use a
    quantized cache from then on; for that alone no example inputs are needed.

    Caches that are quantized already stay as they are.

    Args:
        format: one name, ``"key=NAME,value=NAME"``, or a policy.
        example_inputs, example_kwargs: a call of the model, best a decode step.
        layers, skip: formats of some layers, and layers to leave alone; see ``kvq_ops.policy.Policy``. Layers count the
            attentions that read a cache of their own, in the order in which they run.
        calibration: scales and codebooks fitted beforehand, for each layer.

    Returns:
        What was found and replaced, and what was left and why.

    Raises:
        NothingRewrittenError: no cache could be replaced.
        FormatError: on formats and layers that do not exist, and caches that are quantized already in another format.
    """
    policy = Policy.of(format, layers=layers, skip=skip, calibration=calibration)
    kwargs = example_kwargs or {}
    generates = hasattr(model, "_prepare_cache_for_generation") and hasattr(model, "config")
    if generates and not example_inputs and not kwargs:
        _prepare_generate(model, policy)
        return Report([GraphReport("generate", notes=["generate() makes quantized caches from now on"])])
    planned = _Plans(model, trace_model(model, example_inputs, kwargs), policy)
    # What the arguments themselves are is for the caller to change; what they hold is shared with the caller.
    holders = Holders(model, *example_inputs, *kwargs.values())
    new: dict[int, QuantizedKV] = {}
    done = 0
    for graph, candidate in planned.caches():
        dense, name = graph.object_of(candidate), graph.name_of(candidate)
        if isinstance(dense, QuantizedKV):
            done += 1
            _check_same(dense, graph.plan.handle_of(candidate), name)
            graph.report.notes.append(f"cache {name} is quantized already ({dense.format_name})")
        elif not isinstance(dense, Tensor) or not holders.holds(dense):
            graph.report.notes.append(
                f"cache {name} is an argument: pass QuantizedKV.from_dense(cache, ..., axes={candidate.axes!r}) in its place"
            )
        elif id(dense) not in new:
            like = graph.plan.handle_of(candidate)
            new[id(dense)] = quantize_dense(dense.detach(), like, candidate, policy, graph.first)
    report = planned.report
    if not new and not done and not generates:
        raise NothingRewrittenError(
            "quantize_kv_cache_",
            got=report.text(),
            allowed="a model that reads keys and values from a cache in its buffers or in its inputs",
            do="call it with a decode step over an existing cache; a Hugging Face model takes past_key_values=StaticCache(...)",
        )
    holders.replace(new)
    if generates:
        _prepare_generate(model, policy)
    planned.settle(new)
    return report


def explain(
    model: nn.Module,
    *args: Any,
    format: str | Format | KVFormat | Policy = "int8_per_token_head",
    **kwargs: Any,
) -> Report:
    """What ``quantize_kv_cache_`` and the backend would rewrite for this call, and why not the rest; nothing is changed."""
    return _Plans(model, trace_model(model, args, kwargs), Policy.of(format)).report


def _check_same(have: QuantizedKV, want: QuantizedKV, name: str) -> None:
    formats = [[one.format.name for one in handle.caches()] for handle in (have, want)]
    if formats[0] != formats[1]:
        raise FormatError(
            f"quantize_kv_cache_ to {want.format_name}",
            got=f"the cache {name}, which is quantized already as {have.format_name}",
            allowed="dense caches, or the same format again",
            do="start from the model with its dense caches, or name this layer in skip=",
        )


class _Graph:
    """A traced graph with its plan."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.found = find_candidates(traced.captured)
        self.at = {node: i for i, node in enumerate(traced.placeholders())}
        self.first = 0  # the number of its first layer among those of all graphs
        self.plan: Plan
        self.report: GraphReport

    def object_of(self, candidate: Candidate) -> Any:
        return self.traced.objects[self.at[candidate.node]]

    def name_of(self, candidate: Candidate) -> str:
        return self.traced.names[self.at[candidate.node]]


class _Plans:
    """Plans for all graphs of a call, with one count of layers and one decision for each cache."""

    def __init__(self, model: nn.Module, traced: Sequence[Traced], policy: Policy) -> None:
        self.graphs = [_Graph(one) for one in traced]
        self.policy = policy
        self.names = LayerNames(model, [layer for graph in self.graphs for layer in graph.found.layers])
        held = list(Holders(model).tensors())
        self.tensors = held + [
            one for graph in self.graphs for one in graph.traced.objects if isinstance(one, Tensor)
        ]
        self.refused: dict[int, str] = {}
        self._check_policy()
        while self._plan():
            pass
        for graph in self.graphs:
            graph.report = self._report(graph)

    @property
    def report(self) -> Report:
        return Report([graph.report for graph in self.graphs])

    def caches(self) -> Iterator[tuple[_Graph, Candidate]]:
        for graph in self.graphs:
            for candidate in graph.plan.caches:
                yield graph, candidate

    def settle(self, new: Mapping[int, QuantizedKV]) -> None:
        """Let the report tell of the caches as they are now."""
        for graph in self.graphs:
            for i, candidate in enumerate(graph.plan.caches):
                handle = new.get(id(graph.object_of(candidate)))
                if handle is not None:
                    graph.report.caches[i] = CacheResult.of(graph.name_of(candidate), handle)

    # ------------------------------------------------------------------------------------------------------- deciding

    def _plan(self) -> bool:
        """Plan each graph; True if a cache that one of them refuses was planned for in another."""
        first = 0
        before = len(self.refused)
        for graph in self.graphs:

            def choose(layer: int, candidate: Candidate, graph: _Graph = graph, first: int = first) -> Any:
                return self._choose(first + layer, graph.name_of(candidate))

            def refuse(candidate: Candidate, graph: _Graph = graph) -> str:
                return self._refuse(graph, candidate)

            traced = graph.traced
            graph.first = first
            graph.plan = plan(traced.captured, traced.inputs, choose, found=graph.found, refuse=refuse)
            for candidate, reason in graph.plan.refused:
                self.refused.setdefault(id(graph.object_of(candidate)), reason)
            first += len(graph.found.layers)
        self._refuse_elsewhere()
        again = len(self.refused) > before and len(self.graphs) > 1
        return again and any(id(graph.object_of(c)) in self.refused for graph, c in self.caches())

    def _choose(self, layer: int, name: str) -> KVFormat | None:
        known = self.names.of(layer)
        return self.policy.choose(layer, (name, known.module), kind=known.kind, count=len(self.names.layers))

    def _refuse(self, graph: _Graph, candidate: Candidate) -> str:
        tensor = graph.object_of(candidate)
        if isinstance(tensor, nn.Parameter):
            return "is a parameter of the model and no cache; caches are buffers"
        if id(tensor) in self.refused and tensor is not None:
            return self.refused[id(tensor)]
        if isinstance(tensor, Tensor) and not isinstance(tensor, QuantizedKV):
            for other in self.tensors:
                if other is not tensor and not isinstance(other, QuantizedKV) and same_memory(tensor, other):
                    return f"shares memory with another tensor of the model, of shape {tuple(other.shape)}"
        return ""

    def _refuse_elsewhere(self) -> None:
        """A cache that another graph of the call uses in a way it does not understand stays dense everywhere."""
        planned = {id(graph.object_of(c)): (graph, c) for graph, c in self.caches()}
        for graph in self.graphs:
            mine = {id(graph.object_of(c)) for c in graph.found.candidates}
            for node, tensor, name in zip(
                graph.traced.placeholders(), graph.traced.objects, graph.traced.names, strict=True
            ):
                if tensor is None or id(tensor) in mine or id(tensor) not in planned or not node.users:
                    continue
                user = next(iter(node.users))
                self.refused.setdefault(
                    id(tensor),
                    f"is also used by {user.name}, in a graph of its own where no attention reads {name}",
                )

    def _check_policy(self) -> None:
        names: list[list[str]] = [[] for _ in self.names.layers]
        first = 0
        for graph in self.graphs:
            for candidate in graph.found.candidates:
                for layer in {*candidate.keys.values(), *candidate.values.values()}:
                    names[first + layer].append(graph.name_of(candidate))
            first += len(graph.found.layers)
        known = [(i, (*own, self.names.of(i).module), self.names.of(i).kind) for i, own in enumerate(names)]
        self.policy.check(known, len(known))
        self.policy.check_layers(len(known))

    # ------------------------------------------------------------------------------------------------------ reporting

    def _report(self, graph: _Graph) -> GraphReport:
        report = GraphReport("plan", sites=graph.plan.sites, writes=graph.plan.lifted.writes)
        readable = {node.name: graph.traced.names[i] for node, i in graph.at.items()}
        for site in report.sites:
            site.module = self.names.clean(site.module)
            site.node = readable.get(site.node, site.node)
        for candidate in graph.plan.caches:
            report.caches.append(
                CacheResult.planned(graph.name_of(candidate), graph.plan.handle_of(candidate))
            )
        for candidate, reason in graph.plan.refused:
            report.notes.append(f"cache {graph.name_of(candidate)} stays dense: it {reason}")
        return report


def _prepare_generate(model: nn.Module, policy: Policy) -> None:
    """Let ``generate()`` of a Hugging Face model make quantized caches."""
    from kvq_ops.hf_generate import use_quantized_cache_

    use_quantized_cache_(model, policy)
