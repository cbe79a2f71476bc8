"""The backend ``kvq`` of ``torch.compile``.

    step = torch.compile(model, backend="kvq")
    step(ids, past_key_values=cache)      # cache: kvq_ops.hf.QuantizedCache, or any QuantizedKV in inputs or buffers

Dynamo's graph is captured as pre-dispatch ATen, caches are lifted to their stores, attention over them is fused into
``kvq::attention``, and Inductor compiles the result.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.traceback import preserve_node_meta

from kvq_ops.errors import FormatError, GradientError, KVQError, NothingRewrittenError, near_names
from kvq_ops.formats import KVFormat, parse_kv_format
from kvq_ops.handle import QuantizedKV

from .candidates import find_candidates
from .capture import capture
from .fuse import decoded_elsewhere, fuse
from .implementations import check_implementations
from .latent import absorb
from .lift import Lifted, flatten_handles, lift
from .model import dense_fake, source_name
from .report import CacheResult, GraphReport, record
from .verify import check_graph, plane_write_count

__all__ = ["kvq_backend", "rewrite"]


@dataclass(frozen=True)
class _Options:
    """What ``torch.compile(..., options=)`` may say."""

    allow_unrewritten: bool = False
    format: KVFormat | None = None
    inductor: Mapping[str, Any] = field(default_factory=dict)
    lower: str = "inductor"


def kvq_backend(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo.

    Args:
        mode: as for Inductor (``"max-autotune"``, ...).
        options: any of

            * ``allow_unrewritten``: accept a graph none of whose attention reads a quantized cache;
            * ``format``: the format that the caches must have; a model whose caches are dense, or have another one, is an error
              that says what to call;
            * ``inductor``: a mapping of Inductor's own options;
            * ``lower``: ``"inductor"``, or ``"eager"`` to run the rewritten graph as it is, to look for the cause of a fault.

    Returns:
        The compiled function. Errors of this toolkit are raised by its call rather than here, where Dynamo would wrap them:
        ``FormatError`` for options that cannot be used, ``UnsupportedWriteError`` for writes that codes cannot follow,
        ``GradientError`` where the graph was to be differentiated, ``NothingRewrittenError`` when no attention was rewritten,
        ``ImplementationError`` when the implementation asked for cannot run it; nothing was lowered then.
    """
    try:
        return _compile(graph_module, example_inputs, mode, _check_options(options, mode))
    except KVQError as error:
        refused = error

        def refuse(*_: Any) -> Any:
            raise refused.with_traceback(None)

        return refuse


def _compile(
    graph_module: GraphModule, example_inputs: Sequence[Any], mode: str | None, options: _Options
) -> Callable[..., Any]:
    _fix_numbers(graph_module)
    captured, lifted, result = rewrite(graph_module, example_inputs)
    _check_formats(result.caches, options.format)
    record(result)
    # Caches that are only written into (a prefill may attend to the new states alone) leave nothing to rewrite.
    written_only = result.caches and not _decodes(lifted.graph_module)
    if not options.allow_unrewritten and not result.rewritten and not written_only:
        error = _refusal(graph_module, captured, result, options.format)
        if error is not None:
            raise error
    check_implementations(lifted.graph_module)

    _keep_sources(graph_module, lifted)
    compiled = _lower(lifted, mode, options)
    if not result.caches:
        return compiled

    def run(*args: Any) -> Any:
        return lifted.rebuild_outputs(compiled(*flatten_handles(args)))

    return run


def _fix_numbers(graph_module: GraphModule) -> None:
    """Ask Dynamo to trace again with the numbers of the model as constants, where it made inputs of them.

    It does so under ``dynamic=True``; a scale of attention must be known.
    """
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis
    from torch._dynamo.symbolic_convert import TensorifyState

    names = set()
    for node in graph_module.graph.find_nodes(op="placeholder"):
        number = getattr(node.meta.get("example_value"), "item_memo", None)
        if isinstance(number, torch.SymFloat):
            names.add(str(number.node._expr))
    names = {name for name in names if not TensorifyState.should_specialize(name)}
    for name in names:
        TensorifyState.specialize(name)
    if names:
        raise TensorifyScalarRestartAnalysis


def rewrite(
    graph_module: GraphModule, example_inputs: Sequence[Any]
) -> tuple[GraphModule, Lifted, GraphReport]:
    """Dynamo's graph as captured, the same on stores with attention fused, and what was done."""
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta.get("example_value") for node in placeholders]
    result = GraphReport("compile")
    for node, fake, value in zip(placeholders, inputs, example_inputs, strict=True):
        if isinstance(fake, QuantizedKV):
            real = value if isinstance(value, QuantizedKV) else fake
            result.caches.append(CacheResult.of(source_name(node), real))
    if result.caches:
        _check_gradient(inputs)

    _unify_sizes([value for value in inputs if isinstance(value, QuantizedKV)])
    with preserve_node_meta():
        captured = absorb(capture(graph_module, [dense_fake(value) for value in inputs]))
    _name_inputs(captured, [source_name(node) for node in placeholders])
    lifted = lift(captured, inputs)
    check_graph(captured, lifted)
    appends = plane_write_count(lifted.graph_module)
    result.writes = lifted.writes
    result.sites = fuse(lifted.graph_module)
    result.notes += decoded_elsewhere(lifted.graph_module, result.sites)
    check_graph(captured, lifted, appends=appends)
    return captured, lifted, result


def _name_inputs(captured: GraphModule, names: Sequence[str]) -> None:
    """Name placeholders after where their values come from, so that a printed graph can be read."""
    placeholders = [node for node in captured.graph.nodes if node.op == "placeholder"]
    for node, name in zip(placeholders, names, strict=True):
        node._rename(name.replace(".", "_").strip("_"))
        node.target = node.name
    captured.recompile()


def _keep_sources(graph_module: GraphModule, lifted: Lifted) -> None:
    """Hand on what Dynamo tells AOTAutograd about inputs: where each comes from, and that the graph is Dynamo's.

    Without it AOTAutograd takes no input for one that stays in its place, and CUDA graphs, which may only update such inputs,
    are given up (``mode="reduce-overhead"``).
    """
    from torch._dynamo.source import AttrSource, ConstantSource

    old = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    if "dynamo_compile_id" not in graph_module.meta or not all(hasattr(n, "_dynamo_source") for n in old):
        return
    new = iter([node for node in lifted.graph_module.graph.nodes if node.op == "placeholder"])
    for node in old:
        value, source = node.meta.get("example_value"), node._dynamo_source
        if isinstance(value, QuantizedKV):
            sources = [source and AttrSource(source, name) for name in value.__tensor_flatten__()[0]]
        else:
            sources = [source]
        for one in sources:
            next(new)._dynamo_source = one
    lifted.graph_module.meta["dynamo_compile_id"] = graph_module.meta["dynamo_compile_id"]
    # Constants that capturing has lifted out of the graph (``torch.tensor(50.0)``) come from nowhere that Dynamo guards.
    constants = chain(lifted.graph_module.named_parameters(), lifted.graph_module.named_buffers())
    lifted_from = {name: ConstantSource(f"kvq_constant{name}") for name, _ in constants}
    lifted.graph_module._param_name_to_source = lifted_from  # type: ignore[assignment]


def _lower(lifted: Lifted, mode: str | None, options: _Options) -> Callable[..., Any]:
    if options.lower == "eager":
        return lifted.graph_module
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode else {}), **options.inductor}
    with config.patch(patches) if patches else contextlib.nullcontext():
        compiled: Callable[..., Any] = compile_fx(lifted.graph_module, lifted.inputs)  # type: ignore[assignment]
    return compiled


def _check_options(options: Mapping[str, Any] | None, mode: str | None) -> _Options:
    from torch._inductor import config, list_mode_options

    given = dict(options or {})
    names = tuple(_Options.__dataclass_fields__)
    for name in given:
        if name not in names:
            raise FormatError(
                "an option of backend 'kvq'",
                got=repr(name),
                allowed=near_names(name, names),
                do="put Inductor's own options under 'inductor'",
            )
    if mode is not None and mode not in (modes := list_mode_options()):
        raise FormatError(
            "mode= of backend 'kvq'",
            got=repr(mode),
            allowed=near_names(mode, modes),
            do="choose one of Inductor's modes",
        )
    inductor = given.get("inductor", {})
    known = config.get_config_copy()
    for name in inductor:
        if name.replace("-", "_") not in known:
            raise FormatError(
                "an option of Inductor, given to backend 'kvq'",
                got=repr(name),
                allowed=near_names(name, known) if len(name) > 2 else "the names in torch._inductor.config",
                do="see torch._inductor.list_options()",
            )
    given["inductor"] = {name.replace("-", "_"): value for name, value in inductor.items()}
    if given.get("format") is not None:
        given["format"] = parse_kv_format(given["format"])
    if given.get("lower", "inductor") not in ("inductor", "eager"):
        raise FormatError(
            "option 'lower' of backend 'kvq'",
            got=repr(given["lower"]),
            allowed="'inductor' or 'eager'",
            do="leave it out to compile with Inductor; 'eager' runs the rewritten graph as it is",
        )
    return _Options(**given)


def _check_formats(caches: Sequence[CacheResult], wanted: KVFormat | None) -> None:
    if wanted is None:
        return
    names = {wanted.key.name, wanted.value.name}
    for cache in caches:
        if not names.issuperset(cache.format.split(", ")):
            raise FormatError(
                f"backend 'kvq' with option 'format' {wanted}",
                got=f"the cache {cache.name} in {cache.format}",
                allowed="caches of the format asked for",
                do="make the cache in that format, or leave the option out",
            )


def _check_gradient(inputs: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs):
        raise GradientError(
            "torch.compile(..., backend='kvq') of a graph that uses a quantized cache",
            got="grad mode on, and parameters or inputs that require a gradient",
            allowed="inference only: rounding has no useful derivative",
            do="call the model under torch.no_grad() or torch.inference_mode()",
        )


def _unify_sizes(handles: Sequence[QuantizedKV]) -> None:
    """Guard that sizes which agree now agree in every call: of the planes of a cache, and of the caches of a model.

    Dynamo gives each plane sizes of its own when they vary. For a dense cache the model's own attention would have tied keys
    to values; here nothing in the graph does before it is rewritten.
    """
    known: dict[tuple[str, int], Any] = {}
    for handle in (cache for one in handles for cache in one.caches()):
        sizes = dict(zip("BHT", handle.store[0].shape, strict=False))
        for axis, size in sizes.items():
            if isinstance(size, torch.SymInt):
                first = known.setdefault((axis, size.node.hint), size)
                if first is not size:
                    bool(first == size)
        for plane, tensor in zip(handle.format.planes, handle.store, strict=True):
            for axis, size in zip(plane.axes, tensor.shape, strict=True):
                if axis in sizes:
                    expected = -(-sizes[axis] // plane.tokens) if axis == "T" else sizes[axis]
                    bool(expected == size)


def _decodes(graph_module: GraphModule) -> bool:
    dequantize = torch.ops.kvq.dequantize.default
    return any(node.target is dequantize for node in graph_module.graph.nodes)


def _is_piece(graph_module: GraphModule) -> bool:
    """Whether Dynamo compiles a part of the model here: it broke the graph, or is in a function that a broken graph calls."""
    reason = getattr(graph_module, "compile_subgraph_reason", None)
    if reason is not None and reason.graph_break:
        return True
    # A piece after a break looks like a whole model, but for what called it: Dynamo's wrapper calls the whole model only.
    package = os.path.dirname(torch.__file__) + os.sep
    frame: FrameType | None = sys._getframe(1)
    outside = 0
    while frame is not None:
        path = frame.f_code.co_filename
        if (
            path.endswith(os.path.join("_dynamo", "eval_frame.py"))
            and frame.f_code.co_name == "compile_wrapper"
        ):
            return outside > 1
        outside += not path.startswith(package) and path != __file__
        frame = frame.f_back
    return False


def _dense_caches(graph_module: GraphModule, captured: GraphModule) -> str:
    """Names of the dense caches that attention reads here, as the end of a sentence."""
    pairs = zip(
        captured.graph.find_nodes(op="placeholder"),
        graph_module.graph.find_nodes(op="placeholder"),
        strict=True,
    )
    names = {new: source_name(old) for new, old in pairs}
    dense = [names[c.node] for c in find_candidates(captured).candidates if c.changes]
    more = f" and {len(dense) - 4} more" if len(dense) > 4 else ""
    return f"; they read the dense caches {', '.join(dense[:4])}{more}" if dense else ""


def _refusal(
    graph_module: GraphModule, captured: GraphModule, result: GraphReport, format: KVFormat | None
) -> NothingRewrittenError | None:
    """The error for a graph that was meant to be rewritten; pieces around graph breaks pass."""
    if _is_piece(graph_module):
        return None
    if result.caches:
        got = "\n".join(result.lines())
        do = "see the reasons above, or pass options={'allow_unrewritten': True}"
    else:
        name = format if format is not None else "int8_per_token_head"
        got = f"{len(result.sites)} attention sites, none of them over a quantized cache"
        got += _dense_caches(graph_module, captured)
        do = (
            f"call passes.quantize_kv_cache_(model, {str(name)!r}, example_inputs) before compiling, or give the model a "
            "quantized cache (kvq_ops.hf.QuantizedCache, QuantizedKV buffers), or pass options={'allow_unrewritten': True}"
        )
    return NothingRewrittenError(
        "torch.compile(..., backend='kvq')", got=got, allowed="at least one rewritten site", do=do
    )
