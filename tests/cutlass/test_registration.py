"""When CuTe kernels are chosen, what they refuse and why, and what is imported for that; packages for C++."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule

import cutlass_kernels
import kvq_ops
from cutlass_kernels import build, operators
from kvq_ops import registry
from kvq_ops.errors import ImplementationError
from kvq_ops.formats import get_format
from kvq_ops.registry import Implementation, Request, register
from passes.packaging import check_for_cpp, package_for_cpp

ROOT = Path(__file__).resolve().parents[2]
NVFP4 = get_format("nvfp4")


@pytest.fixture
def blackwell(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A pretended GPU, and packages that are installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    monkeypatch.setattr(build, "why_not", lambda: None)
    registry._choices.clear()
    yield monkeypatch
    registry._choices.clear()


def request(op: str = "append_", fmt: str = "nvfp4", head_dim: int = 128, device: str = "cuda") -> Request:
    return Request(op, device, (get_format(fmt),), (head_dim,), torch.bfloat16)


@pytest.mark.parametrize("op", ["quantize", "dequantize", "append_", "paged_append_"])
@pytest.mark.parametrize(
    "fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_per_token_head", "fp8_per_head", "fp8_e4m3", "nvfp4+static"]
)
def test_chosen_on_blackwell(op: str, fmt: str, blackwell: pytest.MonkeyPatch) -> None:
    for capability in ((10, 0), (10, 3), (12, 0), (12, 1)):
        blackwell.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        registry._choices.clear()
        assert registry.select(request(op, fmt)).name == "cutlass"
    assert "cutlass: chosen" in kvq_ops.explain(op, get_format(fmt), device="cuda")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (11, 0)])
def test_not_on_other_gpus(capability: tuple[int, int], blackwell: pytest.MonkeyPatch) -> None:
    blackwell.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert registry.select(request()).name != "cutlass"
    said = f"compute capability {capability[0]}.{capability[1]}: 10.x and 12.x have instructions"
    assert said in kvq_ops.explain("append_", NVFP4, device="cuda")


@pytest.mark.parametrize(
    ("fmt", "head_dim", "said"),
    [
        ("int8_per_token_head", 128, "nvfp4, mxfp4, mxfp8 and the fp8 formats of e4m3 codes are served"),
        ("fp8_e5m2", 128, "fp8 formats of e4m3"),
        ("none", 128, "are served"),
        ("nvfp4+recent32", 128, "exact tokens, outliers, rotations"),
        ("nvfp4+hadamard", 128, "rotations"),
        ("fp8_per_head+outlier1%", 128, "outliers"),
        ("nvfp4", 100, "head_dim 100: multiples of 16 up to 512"),
        ("nvfp4", 1024, "head_dim 1024"),
        ("mxfp4", 80, "head_dim 80: multiples of 32"),
    ],
)
def test_refusals(fmt: str, head_dim: int, said: str, blackwell: pytest.MonkeyPatch) -> None:
    assert said in str(operators.refuses(request("append_", fmt, head_dim)))
    with registry.use_implementation("cutlass"), pytest.raises(ImplementationError) as caught:
        registry.select(request("append_", fmt, head_dim))
    assert said in str(caught.value)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("op", ["attention", "paged_attention"])
def test_attention_of_mx_formats_is_explained(op: str, fmt: str, blackwell: pytest.MonkeyPatch) -> None:
    row = get_format(fmt)
    said = kvq_ops.explain(op, row, row, device="cuda")
    assert f"cutlass: rejected: format {fmt}: its scales go up to 2^127, beyond the fp16" in said
    assert "attention serves nvfp4" in said
    assert "cutlass: chosen" in kvq_ops.explain(op, NVFP4, NVFP4, device="cuda")


def test_without_the_packages_others_run(blackwell: pytest.MonkeyPatch) -> None:
    blackwell.setattr(build, "why_not", lambda: "nvidia-cutlass-dsl is not installed: pip install it")
    assert registry.select(request()).name != "cutlass"
    assert "cutlass: rejected: nvidia-cutlass-dsl is not installed" in kvq_ops.explain(
        "append_", NVFP4, device="cuda"
    )


def test_on_a_cpu() -> None:
    assert "cutlass: rejected: tensors on cpu" in kvq_ops.explain("append_", NVFP4)
    with (
        registry.use_implementation("cutlass"),
        pytest.raises(ImplementationError, match="tensors on cpu: Blackwell GPUs are served"),
    ):
        kvq_ops.quantize(torch.ones(1, 1, 1, 16), "nvfp4")


def test_preferred_to_triton() -> None:
    for op in cutlass_kernels.OPS:
        rows = {row.name: row.priority for row in registry.implementations(op)}
        assert all(rows["cutlass"] > priority for name, priority in rows.items() if name != "cutlass")


def test_nothing_is_imported_before_it_is_wanted() -> None:
    code = (
        "import sys, torch, kvq_ops\n"
        "known = lambda: sorted(m for m in sys.modules if m.split('.')[0] in ('cutlass', 'cutlass_kernels', 'tvm_ffi'))\n"
        "print(known())\n"
        "kvq_ops.dequantize(kvq_ops.quantize(torch.ones(1, 1, 1, 16), 'nvfp4'), 'nvfp4'); print(known())\n"
        "kvq_ops.explain('append_', kvq_ops.get_format('nvfp4'), device='cuda')\n"
        "print([m for m in known() if not m.startswith('cutlass_kernels')])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['cutlass_kernels']", "['cutlass_kernels']", "[]"], done.stderr


def test_without_cutlass_the_package_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['cutlass'] = None\n"
        "import torch, kvq_ops\n"
        "from cutlass_kernels import operators\n"
        "try:\n    operators.quantize(torch.ones(1, 1, 1, 16), kvq_ops.get_format('nvfp4'))\n"
        "except kvq_ops.errors.ImplementationError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "nvidia-cutlass-dsl is not installed: pip install 'kvq-ops[cutlass]'" in done.stdout, done.stderr


def test_the_guide_is_part_of_the_package() -> None:
    """Of a wheel too: messages and docstrings send readers there."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folder = Path(cutlass_kernels.__file__).parent
    found = {path.name for pattern in data["cutlass_kernels"] for path in folder.glob(pattern)}
    assert {"README.md", "EXPECTED.md"} <= found


# ------------------------------------------------------------------------------------------------------- packages, C++


def graph_with(op: str, device: str, fmt: str = "nvfp4") -> GraphModule:
    """A graph with one operator in it, on fake tensors."""
    graph, mode = Graph(), FakeTensorMode()
    with mode:
        x = torch.empty(2, 3, 4, 64, dtype=torch.bfloat16, device=device)

    def given(name: str):
        node = graph.placeholder(name)
        node.meta["val"] = x
        return node

    arguments = {
        "quantize": lambda: (given("x"), fmt),
        "append_": lambda: ([], None, given("x"), fmt),
        "paged_append_": lambda: ([], None, None, given("x"), fmt),
        "dequantize": lambda: ([], fmt, torch.float32),
        "attention": lambda: (given("query"), [], [], fmt, fmt),
        "paged_attention": lambda: (given("query"), [], [], None, None, fmt, fmt),
    }[op]()
    node = graph.call_function(getattr(torch.ops.kvq, op).default, arguments)
    node.meta["val"] = x
    graph.output(node)
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize("op", ["quantize", "append_", "paged_append_", "dequantize"])
def test_a_package_for_cpp_refuses_what_runs_in_python(op: str, blackwell: pytest.MonkeyPatch) -> None:
    check_for_cpp(graph_with(op, "cpu"))  # served in C++
    with pytest.raises(ImplementationError) as caught:
        check_for_cpp(graph_with(op, "cuda"))
    said = str(caught.value)
    assert f"kvq::{op} for nvfp4 on cuda in an AOTInductor package for C++" in said
    assert "implementation 'cutlass', which runs in Python" in said
    assert "kvq_ops.use_implementation('triton')" in said


def test_where_nothing_else_goes_into_a_package_only_python_is_named(blackwell: pytest.MonkeyPatch) -> None:
    rows = list(registry._implementations["dequantize"])
    try:
        registry._implementations["dequantize"][:] = [row for row in rows if not row.inlined]
        with pytest.raises(ImplementationError) as caught:
            check_for_cpp(graph_with("dequantize", "cuda"))
    finally:
        registry._implementations["dequantize"][:] = rows
        registry._choices.clear()
    said = str(caught.value)
    assert "none: no implementation that goes into a package" in said and "use_implementation" not in said
    assert "load it in Python after import kvq_ops" in said


@pytest.mark.parametrize("op", registry.OPS)
def test_and_takes_what_goes_into_it(op: str, blackwell: pytest.MonkeyPatch) -> None:
    rows = list(registry._implementations[op])
    try:
        register(Implementation("seen", op, print, lambda r: None, priority=1000, inlined=True))
        check_for_cpp(graph_with(op, "cuda"))
        register(Implementation("seen", op, print, lambda r: None, priority=1000))
        with pytest.raises(ImplementationError, match="'seen', which runs in Python"):
            check_for_cpp(graph_with(op, "cuda"))
    finally:
        registry._implementations[op][:] = rows
        registry._choices.clear()


@pytest.mark.slow
def test_a_package_on_a_cpu(tmp_path: Path) -> None:
    class Decode(torch.nn.Module):
        def forward(
            self, codes: torch.Tensor, block: torch.Tensor, scale: torch.Tensor, length: torch.Tensor
        ):
            return kvq_ops.dequantize([codes, block, scale, length], "nvfp4") + 1

    store = kvq_ops.quantize(torch.randn(1, 2, 3, 32), "nvfp4")
    program = torch.export.export(Decode(), tuple(store))
    path = package_for_cpp(program, package_path=tmp_path / "decode.pt2")
    loaded = torch._inductor.aoti_load_package(path)
    assert torch.equal(loaded(*store), kvq_ops.dequantize(store, "nvfp4") + 1)
