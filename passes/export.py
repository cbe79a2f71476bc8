"""Quantized caches in an ``ExportedProgram``.

    ep = torch.export.export(model, args, dynamic_shapes=...)
    ep = passes.quantize_exported(ep, "int8_per_token_head")
    torch._inductor.aoti_compile_and_package(ep, package_path="model.pt2")

The result is an ordinary program: each cache buffer is replaced by the buffers of its store (``<name>_codes``,
``<name>_scale``, ...), writes are ``kvq::append_`` and attention is ``kvq::attention``. Loading the program, or an AOTInductor
package made of it, needs ``import kvq_ops`` first: the operators are registered, and on some devices run, in Python.

A model that counts its position in a buffer of one element needs
``inductor_configs={"joint_graph_constant_folding": False}`` in ``aoti_compile_and_package``, quantized or not: AOTInductor
may take such a buffer for a constant (pytorch#165444).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx import Node
from torch.utils import _pytree as pytree

from kvq_ops.calibration import Calibration
from kvq_ops.errors import FormatError, NothingRewrittenError
from kvq_ops.formats import Format, KVFormat
from kvq_ops.handle import QuantizedKV
from kvq_ops.policy import Policy

from .caches import Candidate, Plan, find_candidates, plan, quantize_dense
from .fuse import decoded_elsewhere
from .latent import absorb
from .report import CacheResult, GraphReport, record
from .trace_model import same_memory

__all__ = ["quantize_exported"]


def quantize_exported(
    program: ExportedProgram,
    format: str | Format | KVFormat | Policy,
    *,
    layers: Any = None,
    skip: Any = (),
    calibration: Calibration | None = None,
    allow_unrewritten: bool = False,
) -> ExportedProgram:
    """A program whose KV caches are quantized; ``program`` is not changed.

    Caches are found from the dataflow: buffers, and inputs that come back as outputs. A cache that is an input is passed as the
    list of its planes (``QuantizedKV.store``) in its place, and comes back as one.

    Args:
        format: one name for all caches, ``"key=NAME,value=NAME"``, or a policy.
        layers, skip: formats of some layers, and layers to leave alone; see ``kvq_ops.policy.Policy``.
        calibration: scales and codebooks fitted beforehand, for each layer.
        allow_unrewritten: return a program in which nothing could be rewritten instead of raising.

    Raises:
        NothingRewrittenError: when no attention reads a quantized cache; the message says what stood in the way.
    """
    policy = Policy.of(format, layers=layers, skip=skip, calibration=calibration)
    _check_dialect(program)
    specs = program.graph_signature.input_specs
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    inputs = [node.meta["val"] for node in placeholders]
    constants = _constants(program)
    targets = {spec.arg.name: spec for spec in specs}

    captured = absorb(program.graph_module)
    candidates = find_candidates(captured, constants)
    layers_found = candidates.layers

    def names(layer: int, candidate: Candidate) -> tuple[str, str]:
        return targets[candidate.node.name].target or candidate.node.name, layers_found[layer].module

    def choose(layer: int, candidate: Candidate) -> KVFormat | None:
        return policy.choose(layer, names(layer, candidate), count=len(layers_found))

    def refuse(candidate: Candidate) -> str:
        kind = targets[candidate.node.name].kind
        if kind == InputKind.USER_INPUT:
            return "" if candidate.changes else "is an input that is neither written nor returned"
        if kind == InputKind.BUFFER:
            return _shared(program, targets[candidate.node.name])
        return f"is no cache but a {kind.name.lower().replace('_', ' ')} of the program"

    policy.check(
        [
            (layer, names(layer, candidate), None)
            for candidate in candidates.candidates
            for layer in sorted({*candidate.keys.values(), *candidate.values.values()})
        ],
        len(layers_found),
    )
    policy.check_layers(len(layers_found))
    found = plan(captured, inputs, choose, constants, found=candidates, refuse=refuse)
    result, real = _assemble(program, placeholders, found, policy)
    report = _report(program, found, real)
    record(report)
    if not report.rewritten and not allow_unrewritten:
        raise NothingRewrittenError(
            "quantize_exported",
            got="\n".join(report.lines()),
            allowed="at least one attention over a cache that can be quantized",
            do="export the decode step with static cache buffers, give what torch.export.export returns (before "
            "run_decompositions, which takes attention apart), or pass allow_unrewritten=True",
        )
    return result


def _check_dialect(program: ExportedProgram) -> None:
    if not isinstance(program, ExportedProgram):
        raise FormatError(
            "quantize_exported",
            got=type(program).__name__,
            allowed="what torch.export.export returns",
            do="export the model first, or call quantize_kv_cache_ on a module",
        )


def _constants(program: ExportedProgram) -> dict[str, Tensor]:
    """Values of the inputs that are constants or unchanging scalars, by placeholder name."""
    values: dict[str, Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (InputKind.CONSTANT_TENSOR,) and spec.target in program.constants:
            value = program.constants[spec.target]
            if isinstance(value, Tensor):
                values[spec.arg.name] = value
    return values


def _data(program: ExportedProgram, spec: InputSpec) -> Tensor:
    """The dense buffer behind an input."""
    assert spec.target is not None
    found = program.state_dict.get(spec.target)
    value = found if found is not None else program.constants[spec.target]
    assert isinstance(value, Tensor)
    return value


def _shared(program: ExportedProgram, spec: InputSpec) -> str:
    """Why a buffer cannot be replaced on its own, or an empty string."""
    mine = _data(program, spec)
    for name, other in {**program.state_dict, **program.constants}.items():
        if other is not mine and isinstance(other, Tensor) and same_memory(mine, other):
            return f"shares memory with {name}"
    return ""


def _assemble(
    program: ExportedProgram, placeholders: Sequence[Node], found: Plan, policy: Policy
) -> tuple[ExportedProgram, dict[str, QuantizedKV]]:
    graph_module = found.lifted.graph_module
    old_signature = program.graph_signature
    new_nodes = iter([node for node in graph_module.graph.nodes if node.op == "placeholder"])
    quantized = [
        _data(program, spec)
        for spec, handle in zip(old_signature.input_specs, found.handles, strict=True)
        if handle is not None and spec.kind == InputKind.BUFFER
    ]
    state, constants = _own_state(program, {id(dense) for dense in quantized})
    input_specs: list[InputSpec] = []
    user_inputs: list[int] = []
    real: dict[str, QuantizedKV] = {}
    shared: dict[int, QuantizedKV] = {}
    # By name: the graph that was searched may be a copy of the program's.
    cached = {candidate.node.name: candidate for candidate in found.caches}
    for node, spec, handle in zip(placeholders, old_signature.input_specs, found.handles, strict=True):
        if handle is None:
            new = next(new_nodes)
            if spec.kind == InputKind.BUFFER and any(_data(program, spec) is dense for dense in quantized):
                _drop_alias(graph_module, new, spec)
                continue
            spec = copy.copy(spec)
            spec.arg = _renamed(spec.arg, new.name)
            input_specs.append(spec)
            user_inputs += [1] if spec.kind == InputKind.USER_INPUT else []
            continue
        planes = [next(new_nodes) for _ in handle.store]
        if spec.kind == InputKind.USER_INPUT:
            input_specs += [InputSpec(InputKind.USER_INPUT, TensorArgument(p.name), None) for p in planes]
            user_inputs.append(len(planes))
            continue
        assert spec.target is not None
        dense = _data(program, spec)
        if id(dense) not in shared:
            shared[id(dense)] = quantize_dense(dense.detach(), handle, cached[node.name], policy)
        real[spec.target] = stored = shared[id(dense)]
        if (stored.format_name, stored.axes) != (handle.format_name, handle.axes):
            raise FormatError(
                f"the buffer {spec.target!r}, which has other names too",
                got=f"{handle.format_name} for this name and {stored.format_name} for another",
                allowed="one format for what is one tensor",
                do="name the layers that share a cache alike in layers= and skip=",
            )
        where = state if spec.target in program.state_dict else constants
        for name, tensor, placeholder in zip(handle.plane_names(), stored.store, planes, strict=True):
            target = f"{spec.target}_{name}"
            if target in state or target in constants:
                raise FormatError(
                    f"the buffer {target!r} for a store",
                    got="a name that the program uses already",
                    allowed="a name that is free",
                    do="rename that buffer of the model",
                )
            where[target] = tensor
            input_specs.append(
                InputSpec(InputKind.BUFFER, TensorArgument(placeholder.name), target, spec.persistent)
            )
    output_specs, user_outputs = _output_specs(found, old_signature)
    # Of the calls only the root's is kept: the inner ones speak of values that are gone.
    call = copy.copy(program.module_call_graph[0])
    if call.signature is not None:
        call.signature = root = copy.copy(call.signature)
        root.in_spec = _grow_spec(root.in_spec, user_inputs)
        root.out_spec = _grow_spec(root.out_spec, user_outputs)
        root.inputs = [s.arg for s in input_specs if s.kind == InputKind.USER_INPUT]
        root.outputs = [s.arg for s in output_specs if s.kind == OutputKind.USER_OUTPUT]
    for node in graph_module.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kvq":
            # Saved with the program, and part of what torch says where the operators are not known.
            node.meta["custom"] = {**node.meta.get("custom", {}), "needs": "import kvq_ops"}
    signature = ExportGraphSignature(input_specs, output_specs)
    graph_module.meta.update(program.graph_module.meta)
    result = ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=signature,
        state_dict=state,
        range_constraints=dict(program.range_constraints),
        module_call_graph=[call],
        example_inputs=_example_inputs(program, found, placeholders, policy),
        constants=constants,
        verifiers=program.verifiers,
    )
    if any(size > 1 for size in user_inputs):
        # What tracing learned about sizes is said in terms of the inputs as they were; the planes' own sizes are still checked.
        result._guards_code = []
    result.validate()
    return result, real


def _drop_alias(graph_module: torch.fx.GraphModule, placeholder: Node, spec: InputSpec) -> None:
    """Remove another name of a quantized buffer from the inputs; nothing may use it."""
    if placeholder.users:
        raise FormatError(
            f"the buffer {spec.target!r}, which has other names too",
            got="one name of it is read as a quantized cache, and this one is not",
            allowed="one format for what is one tensor",
            do="leave its layers alone with skip=",
        )
    graph_module.graph.erase_node(placeholder)
    graph_module.recompile()


def _own_state(program: ExportedProgram, gone: set[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """State and constants without the dense caches, which may have several names.

    Buffers are copied, so that running one program does not change the other.

    Args:
        gone: ``id`` of the dense caches.
    """
    buffers = {s.target for s in program.graph_signature.input_specs if s.kind == InputKind.BUFFER}
    copies: dict[int, Tensor] = {}

    def own(name: str, value: Any) -> Any:
        if name not in buffers or not isinstance(value, Tensor):
            return value
        return copies.setdefault(id(value), value.detach().clone())

    state, constants = (
        {name: own(name, value) for name, value in values.items() if id(value) not in gone}
        for values in (program.state_dict, program.constants)
    )
    return state, constants


def _example_inputs(
    program: ExportedProgram, found: Plan, placeholders: Sequence[Node], policy: Policy
) -> Any:
    """The example inputs, with planes in place of caches."""
    specs = program.graph_signature.input_specs
    # By name: the graph that was searched may be a copy of the program's.
    cached = {candidate.node.name: candidate for candidate in found.caches}
    user = [
        (handle, cached.get(node.name))
        for handle, node, spec in zip(found.handles, placeholders, specs, strict=True)
        if spec.kind == InputKind.USER_INPUT
    ]
    if program.example_inputs is None or not any(handle is not None for handle, _ in user):
        return program.example_inputs
    leaves, spec = pytree.tree_flatten(program.example_inputs)
    if len(leaves) != len(user):
        return None
    planes = [
        leaf
        if handle is None or candidate is None
        else list(quantize_dense(leaf.detach(), handle, candidate, policy).store)
        for leaf, (handle, candidate) in zip(leaves, user, strict=True)
    ]
    return pytree.tree_unflatten(planes, spec)


def _renamed(argument: Any, name: str) -> Any:
    argument = copy.copy(argument)
    if hasattr(argument, "name"):
        argument.name = name
    return argument


def _output_specs(found: Plan, old: ExportGraphSignature) -> tuple[list[OutputSpec], list[int]]:
    (output,) = (node for node in found.lifted.graph_module.graph.nodes if node.op == "output")
    flat = pytree.tree_leaves(output.args[0], is_leaf=lambda leaf: leaf is None)
    specs: list[OutputSpec] = []
    sizes: list[int] = []
    for spec, group in zip(old.output_specs, found.lifted.split_outputs(flat), strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            sizes.append(len(group))
        for item in group:
            new = copy.copy(spec)
            if isinstance(item, Node):
                new.arg = TensorArgument(item.name) if len(group) > 1 else _renamed(spec.arg, item.name)
            specs.append(new)
    return specs, sizes


def _grow_spec(spec: pytree.TreeSpec, sizes: Sequence[int]) -> pytree.TreeSpec:
    """``spec`` with each leaf that became several planes replaced by a list of leaves."""
    if all(size == 1 for size in sizes):
        return spec
    tree = pytree.tree_unflatten([[0] * size if size > 1 else 0 for size in sizes], spec)
    return pytree.tree_structure(tree)


def _report(program: ExportedProgram, found: Plan, real: dict[str, QuantizedKV]) -> GraphReport:
    report = GraphReport("export", sites=found.sites, writes=found.lifted.writes)
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for candidate in found.caches:
        target = specs[candidate.node.name].target or candidate.node.name
        report.caches.append(
            CacheResult.of(target, real[target])
            if target in real
            else CacheResult.planned(target, found.handle_of(candidate))
        )
    for candidate, reason in found.refused:
        target = specs[candidate.node.name].target or candidate.node.name
        report.notes.append(f"cache {target} stays dense: it {reason}")
    report.notes += decoded_elsewhere(found.lifted.graph_module, found.sites)
    return report
