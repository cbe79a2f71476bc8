"""How often graphs on a GPU are compiled when sizes change, without a GPU. Prints JSON; run in a process of its own:

python -m tests.triton.trace_sizes compiled FORMAT [OPERATOR ...]
python -m tests.triton.trace_sizes packaged FORMAT
python -m tests.triton.trace_sizes written FORMAT

Dynamo runs as it does for users, on fake tensors; what AOTAutograd hands over is counted in place of being compiled.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kvq_ops
from kvq_ops.formats import Format
from tests.triton import pretend_gpu

HEADS, KV_HEADS, DIM, PAGE = 8, 2, 64, 16
# Batch, new tokens, and tokens that there is room for: one of them changes. The first call is compiled for its sizes, the
# second for any of what has changed.
CHANGES = {
    "tokens": [(7, 1, size) for size in (50, 70, 100, 140, 300, 340, 5000, 70000)],
    "batch": [(size, 1, 100) for size in (3, 4, 7, 12, 31, 64, 150, 300, 1000)],
    "prefill": [(1, size, 9000) for size in (600, 700, 1000, 1024, 1100, 3000, 8001)],
    "queries": [(3, size, 1000) for size in (2, 4, 5, 6, 9, 17, 18, 60, 61, 90, 127, 129, 200, 600, 700)],
}


class Graphs:
    """A backend that counts what it is given. What comes back has no sizes to rely on."""

    def __init__(self, mode: FakeTensorMode) -> None:
        from torch._dynamo.backends.common import aot_autograd

        self.mode, self.count = mode, 0
        self.backend = aot_autograd(
            fw_compiler=self.take, inference_compiler=self.take, keep_inference_input_mutations=True
        )

    def take(self, graph_module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        self.count += 1
        assert not [node for node in graph_module.graph.nodes if "kvq" in str(node.target)]
        outputs = [node.meta["val"] for node in graph_module.graph.find_nodes(op="output")[0].args[0]]

        def run(*_: Any) -> list[Tensor]:
            with self.mode:
                return [out.new_empty([2] * out.dim()) for out in outputs]

        return make_boxed_func(run)


def operators(key: Format, value: Format) -> dict[str, Callable[..., Any]]:
    """Each operator as a function of ``(query, new, position, table, length, *planes)``."""
    n, names = len(key.planes), (key.name, value.name)

    def attention(
        query: Tensor, new: Tensor, position: Tensor, table: Any, length: Any, *planes: Tensor
    ) -> Any:
        return torch.ops.kvq.attention(query, list(planes[:n]), list(planes[n:]), *names, causal=True)

    def append_(query: Any, new: Tensor, position: Tensor, table: Any, length: Any, *planes: Tensor) -> Any:
        torch.ops.kvq.append_(list(planes[:n]), position, new, names[0])

    def quantize(query: Any, new: Tensor, position: Any, table: Any, length: Any, *planes: Any) -> Any:
        return torch.ops.kvq.quantize(new, names[0])

    def dequantize(query: Any, new: Any, position: Any, table: Any, length: Any, *planes: Tensor) -> Any:
        return torch.ops.kvq.dequantize(list(planes[:n]), names[0], torch.float16)

    def paged_attention(
        query: Tensor, new: Any, position: Any, table: Tensor, length: Tensor, *planes: Tensor
    ) -> Any:
        stores = list(planes[:n]), list(planes[n:])
        return torch.ops.kvq.paged_attention(query, *stores, table, length, *names, causal=True)

    def paged_append_(
        query: Any, new: Tensor, position: Tensor, table: Tensor, length: Any, *planes: Tensor
    ) -> Any:
        torch.ops.kvq.paged_append_(list(planes[:n]), table, position, new, names[0])

    made = [attention, append_]
    if not key.calibrated:
        made.append(quantize)
    if not key.lossless:
        made.append(dequantize)
    if not any(row.windowed or row.token_group > 1 for row in (key, value)):
        made += [paged_attention, paged_append_]
    return {run.__name__: run for run in made}


def arguments(key: Format, value: Format, batch: int, queries: int, tokens: int, paged: bool) -> list[Tensor]:
    def empty(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    # As many pages as sequences can fill, or something else that changes with neither.
    rows = (batch * (tokens // PAGE) + 3, KV_HEADS, PAGE, DIM) if paged else (batch, KV_HEADS, tokens, DIM)
    return [
        empty(batch, HEADS, queries, DIM),
        empty(batch, KV_HEADS, queries, DIM),
        empty(batch, queries, dtype=torch.int64),
        empty(batch, tokens // PAGE, dtype=torch.int32),
        empty(batch, dtype=torch.int64),
        *(
            plane
            for row in (key, value)
            for plane in row.empty_store(*rows, dtype=torch.float16, device="cuda")
        ),
    ]


def case_compiled(pair: str, *names: str) -> dict[str, Any]:
    """For each operator (or those named) and size that changes: how many graphs each call of a sequence adds."""
    torch._dynamo.config.recompile_limit = 64
    mode, formats = FakeTensorMode(allow_non_fake_inputs=True), kvq_ops.parse_kv_format(pair)
    found: dict[str, Any] = {}
    for name, run in operators(formats.key, formats.value).items():
        for change, sizes in CHANGES.items() if not names or name in names else ():
            torch._dynamo.reset()
            graphs = Graphs(mode)
            compiled = torch.compile(run, backend=graphs.backend)
            added = []
            for one in sizes:
                before = graphs.count
                with mode:
                    given = arguments(formats.key, formats.value, *one, name.startswith("paged"))
                with torch.no_grad():
                    compiled(*given)
                added.append(graphs.count - before)
            found[f"{name} {change}"] = added
    return found


class Step(torch.nn.Module):
    def __init__(self, formats: Any) -> None:
        super().__init__()
        self.formats = formats

    def forward(self, query: Tensor, new: Tensor, position: Tensor, *planes: Tensor) -> tuple[Tensor]:
        runs = operators(self.formats.key, self.formats.value)
        runs["append_"](query, new, position, None, None, *planes)
        return (runs["attention"](query, new, position, None, None, *planes),)


def case_packaged(pair: str) -> dict[str, Any]:
    """The launches in an AOTInductor package whose batch and tokens are not fixed, with their grids."""
    formats = kvq_ops.parse_kv_format(pair)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        query, new, position, _, _, *planes = arguments(formats.key, formats.value, 3, 1, 100, False)
    batch, tokens = torch.export.Dim("batch", min=2), torch.export.Dim("tokens", min=2)
    rows = (formats.key, formats.value)
    dynamic = [
        {
            axis: size
            for axis, letter in enumerate(plane.axes)
            if (size := {"B": batch, "T": tokens}.get(letter))
        }
        for row in rows
        for plane in row.planes
    ]
    shapes = ({0: batch}, {0: batch}, {0: batch}, tuple(dynamic))
    program = torch.export.export(Step(formats), (query, new, position, *planes), dynamic_shapes=shapes)
    text = pretend_gpu.packaged(program)
    return {
        "calls": [match.groups() for match in re.finditer(r"^ +call_(\w+)_\d+\((.*)\);$", text, re.M)],
        "operators": sorted(set(re.findall(r"kvq::\w+", text))),
    }


def case_written(pair: str) -> dict[str, Any]:
    """The launches in what Inductor writes for any batch and tokens, each kernel compiled."""
    formats = kvq_ops.parse_kv_format(pair)
    generated = pretend_gpu.Generated()
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, new, position, _, _, *planes = arguments(formats.key, formats.value, 3, 1, 100, False)
    error = ""
    try:
        with torch.no_grad():
            torch.compile(Step(formats), dynamic=True)(query, new, position, *planes)
    except Exception as caught:  # nothing can run
        error = str(caught)[:300]
    return {
        "call": generated.call() if generated.files else "",
        "compiled": generated.compile(),
        "error": error,
    }


CASES: dict[str, Callable[..., Any]] = {
    "compiled": case_compiled,
    "packaged": case_packaged,
    "written": case_written,
}


def main() -> None:
    case, *given = sys.argv[1:]
    torch.set_num_threads(1)
    pretend_gpu.pretend()
    print(json.dumps(CASES[case](*given)))


if __name__ == "__main__":
    main()
