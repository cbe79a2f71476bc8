"""What becomes of ``kvq::`` operators in graphs on a GPU, without one. Prints JSON; run in a process of its own:

python -m tests.triton.trace_graphs CASE [ARGUMENT ...]

No ``TRITON_INTERPRET``: what is traced here is what would be compiled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.triton_kernel_wrap import (
    triton_kernel_wrapper_functional,
    triton_kernel_wrapper_mutation,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import kvq_ops
from kvq_ops.formats import get_format
from kvq_ops.handle import QuantizedKV
from tests.triton import pretend_gpu, standin

FORMAT = standin.FORMAT
HOPS = (triton_kernel_wrapper_functional, triton_kernel_wrapper_mutation)


def targets(graph_module: GraphModule) -> list[str]:
    return [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]


def functional(step: Callable[..., Any], arguments: list[Any], mode: FakeTensorMode) -> GraphModule:
    """What AOTAutograd hands to Inductor for a function of fake tensors that returns a tuple."""
    from functorch.compile import make_boxed_func
    from torch._functorch.aot_autograd import aot_module_simplified

    found: list[GraphModule] = []

    def take(graph_module: GraphModule, _: Any) -> Any:
        found.append(graph_module)
        return make_boxed_func(graph_module)

    with mode, torch.no_grad():
        whole = make_fx(step)(*arguments)
    with torch.no_grad(), tracing(TracingContext(mode)):
        aot_module_simplified(
            whole,
            arguments,
            fw_compiler=take,
            inference_compiler=take,
            keep_inference_input_mutations=True,
        )
    return found[0]


def written_by(node: torch.fx.Node) -> tuple[str, list[str]]:
    """Name of a node's kernel and the arguments that it writes, as torch reads them off the kernel."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    return getattr(kernel, "fn", kernel).__name__, sorted(node.kwargs["tensors_to_clone"])


def text_of(graph_module: GraphModule) -> str:
    """One line for each call: kernels by name with what they write, other operators with their arguments."""
    lines = []
    for node in graph_module.graph.nodes:
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
        if node.op != "call_function" or "getitem" in str(node.target):
            continue
        if node.target in HOPS:
            name, written = written_by(node)
            lines.append(f"{node.name}: {name} writes {', '.join(written)}, grid {node.kwargs['grid']}")
        else:
            arguments = ", ".join(map(str, node.args)).replace(f"{FORMAT!r}", "F").replace(FORMAT, "F")
            lines.append(f"{node.name}: {node.target}({arguments})")
    return "\n".join(lines)


def decode_step(query: Tensor, new: Tensor, position: Tensor, *planes: Tensor) -> tuple[Tensor]:
    key, value = list(planes[:3]), list(planes[3:])
    torch.ops.kvq.append_(key, position, new, FORMAT)
    torch.ops.kvq.append_(value, position, new, FORMAT)
    return (torch.ops.kvq.attention(query, key, value, FORMAT, FORMAT) * 2,)


def step_inputs(device: str) -> list[Tensor]:
    planes = [
        plane for _ in range(2) for plane in get_format(FORMAT).empty_store(1, 2, 16, 32, device=device)
    ]
    return [
        torch.empty(1, 4, 1, 32, device=device),
        torch.empty(1, 2, 1, 32, device=device),
        torch.empty(1, dtype=torch.int64, device=device),
        *planes,
    ]


def fake_mode(symbolic: bool = False) -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if symbolic else None)


def case_standin(device: str) -> dict[str, Any]:
    """The stand-in kernels, before and after the graph is made functional."""
    standin.install()
    mode = fake_mode()
    with mode:
        arguments = step_inputs(device)
        before = make_fx(decode_step)(*arguments)
    return {"before": targets(before), "after": text_of(functional(decode_step, arguments, mode))}


class Step(torch.nn.Module):
    def forward(self, query: Tensor, new: Tensor, position: Tensor, *planes: Tensor) -> tuple[Tensor]:
        return decode_step(query, new, position, *planes)


def case_export() -> dict[str, Any]:
    """An exported program, as it comes and decomposed: its operators stay whole."""
    standin.install()
    with fake_mode():
        arguments = step_inputs("cuda")
    program = torch.export.export(Step(), tuple(arguments))
    return {
        "exported": targets(program.graph_module),
        "decomposed": targets(program.run_decompositions().graph_module),
    }


def case_package(kernels: str = "standin") -> dict[str, Any]:
    """The launches in the C++ of an AOTInductor package, and what it would need from Python."""
    import re

    if kernels == "standin":
        standin.install()
    with fake_mode():
        arguments = step_inputs("cuda")
    text = pretend_gpu.packaged(torch.export.export(Step(), tuple(arguments)))
    return {
        "launches": re.findall(r"^ +call_(\w+)_\d+\(", text, re.M),
        "cubins": sorted(set(re.findall(r'loadKernel\("[^"]*\.cubin", "(\w+)"', text))),
        "operators": sorted(set(re.findall(r"kvq::\w+", text))),
    }


def case_reads(pair: str, queries: str, dim: str, paged: str = "") -> dict[str, Any]:
    """Attention and dequantize by this package's kernels: nothing that they read is written, and no operator is left."""
    formats = kvq_ops.parse_kv_format(pair)
    mode = fake_mode()
    with mode:
        query = torch.empty(2, 4, int(queries), int(dim), dtype=torch.float16, device="cuda")
        key, value = (
            row.empty_store(
                *(5 if paged else 2, 2, 32 if paged else 256, int(dim)), dtype=query.dtype, device="cuda"
            )
            for row in (formats.key, formats.value)
        )
        table = torch.empty(2, 8, dtype=torch.int32, device="cuda")
        length = torch.empty(2, dtype=torch.int64, device="cuda")

    def step(query: Tensor, table: Tensor, length: Tensor, *planes: Tensor) -> tuple[Tensor, ...]:
        keys, values = list(planes[: len(key)]), list(planes[len(key) :])
        names = formats.key.name, formats.value.name
        if paged:
            return (torch.ops.kvq.paged_attention(query, keys, values, table, length, *names, causal=True),)
        return (
            torch.ops.kvq.attention(query, keys, values, *names, causal=True),
            torch.ops.kvq.dequantize(keys, names[0], torch.float16),
        )

    return _kernels_of(functional(step, [query, table, length, *key, *value], mode))


def case_writes(name: str, tokens: str, dim: str, paged: str = "") -> dict[str, Any]:
    """``append_`` (and ``quantize``) by this package's kernels: planes are written, everything else is only read."""
    row = get_format(name)
    mode = fake_mode()
    with mode:
        new = torch.empty(2, 2, int(tokens), int(dim), dtype=torch.float16, device="cuda")
        store = row.empty_store(
            5 if paged else 2, 2, 32 if paged else 256, int(dim), dtype=new.dtype, device="cuda"
        )
        table = torch.empty(2, 8, dtype=torch.int32, device="cuda")
        position = torch.empty(2, int(tokens), dtype=torch.int64, device="cuda")

    def step(new: Tensor, table: Tensor, position: Tensor, *planes: Tensor) -> tuple[Tensor, ...]:
        if paged:
            torch.ops.kvq.paged_append_(list(planes), table, position, new, name)
            return ()
        torch.ops.kvq.append_(list(planes), position, new, name)
        return () if row.calibrated else tuple(torch.ops.kvq.quantize(new, name))

    graph_module = functional(step, [new, table, position, *store], mode)
    inputs = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    back = {str(n.args[0]) for n in graph_module.graph.nodes if n.target is torch.ops.aten.copy_.default}
    planes = [plane.name for plane, at in zip(row.planes, inputs[3:], strict=True) if at in back]
    return _kernels_of(graph_module) | {
        "planes": planes,
        "others": sorted(back - set(inputs[3:])),
        "targets": [target for target in targets(graph_module) if "getitem" not in target],
    }


def _kernels_of(graph_module: GraphModule) -> dict[str, Any]:
    return {
        "kernels": [written_by(node) for node in graph_module.graph.nodes if node.target in HOPS],
        "operators": [target for target in targets(graph_module) if "kvq" in target],
        "copied_back": sum("copy_" in target for target in targets(graph_module)),
        # A tensor that a kernel writes and takes a second time: what comes out under the one name is not what comes out under
        # the other.
        "taken_twice": [
            (written_by(node)[0], name)
            for node in graph_module.graph.nodes
            if node.target in HOPS
            for name in node.kwargs["tensors_to_clone"]
            if any(
                other in node.kwargs["tensors_to_clone"]
                and value is node.kwargs["kwargs"][name]
                and other != name
                for other, value in node.kwargs["kwargs"].items()
            )
        ],
    }


def case_every(*pairs: str) -> dict[str, Any]:
    """:func:`case_reads` and :func:`case_writes` for many formats in one process."""
    found: dict[str, Any] = {}
    for pair in pairs:
        formats = kvq_ops.parse_kv_format(pair)
        one = found[pair] = {
            "decode": case_reads(pair, "1", "64"),
            "prefill": case_reads(pair, "80", "64"),
            **{
                f"write {row.name}": case_writes(row.name, "3", "64")
                for row in dict.fromkeys((formats.key, formats.value))
            },
        }
        if all(not row.windowed and row.token_group == 1 for row in (formats.key, formats.value)):
            one["paged decode"] = case_reads(pair, "1", "64", "paged")
            one["paged write"] = case_writes(formats.key.name, "3", "64", "paged")
    return found


def case_checked() -> dict[str, Any]:
    """Checked mode looks at values, so operators stay whole."""
    with kvq_ops.checked():
        return case_standin("cuda")


def case_model(mode: str, kernels: str = "standin", pair: str = FORMAT) -> dict[str, Any]:
    """A decode step of a small model through ``torch.compile(backend="kvq")``, down to Inductor's code and its cubins."""
    from torch._dynamo.utils import counters
    from torch._inductor import compile_fx

    import passes
    from tests.passes import toys

    if kernels == "standin":
        standin.install()
    generated = pretend_gpu.Generated()
    told: dict[str, Any] = {}
    original = compile_fx.compile_fx_inner

    def spy(graph_module: GraphModule, inputs: Any, **kwargs: Any) -> Any:
        told["static"] = sorted(kwargs["static_input_idxs"])
        told["mutated"] = [
            at
            for at, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))
            if any(
                user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users
            )
        ]
        return original(graph_module, inputs, **kwargs)

    compile_fx.compile_fx.__defaults__ = (spy, *compile_fx.compile_fx.__defaults__[1:])
    with torch.no_grad(), fake_mode(symbolic=True):
        torch.set_default_device("cuda")
        model = toys.Decoder(1).eval()
        torch.set_default_device(None)
        formats = kvq_ops.parse_kv_format(pair)
        for layer in model.layers:
            for name, row in (("k_cache", formats.key), ("v_cache", formats.value)):
                shape = getattr(layer, name).shape
                layer._buffers[name] = QuantizedKV.empty(shape, row, device="cuda")
        ids = torch.empty(toys.B, 1, dtype=torch.int64, device="cuda")
        position = torch.empty(1, dtype=torch.int64, device="cuda")
        try:
            torch.compile(model, backend="kvq", mode=mode)(ids, position)
            error = ""
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"[:300]
    return {
        "rewritten": [graph.rewritten for graph in passes.report().graphs],
        "call": generated.call() if generated.files else "",
        "compiled": generated.compile(),
        "skips": counters["inductor"]["cudagraph_skips"],
        # Nothing can run without a GPU; how far it came says whether compiling was over.
        "error": error,
        **told,
    }


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    name.removeprefix("case_"): value for name, value in list(globals().items()) if name.startswith("case_")
}


def main() -> None:
    name, *arguments = sys.argv[1:]
    pretend_gpu.pretend()
    print(json.dumps(CASES[name](*arguments)))


if __name__ == "__main__":
    main()
