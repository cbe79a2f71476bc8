"""Compiled graphs as ``gpu_check`` holds them against eager, on the CPU: what it would say of right and of wrong ones."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kvq_ops
from kvq_lab import gpu_graphs
from kvq_lab.gpu_cases import Machine
from kvq_lab.gpu_rows import Row
from kvq_ops.formats import get_format

MACHINE = Machine("cpu", heads=4, head_dims=(64,))
NAME = "int8_per_token_head"


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    with kvq_ops.use_implementation("torch"):
        yield
    torch._dynamo.reset()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], list[Any]]:
    """Put something in place of ``torch.compile``; the modes that it was asked for."""

    def install(change: Callable[..., Any]) -> list[Any]:
        modes: list[Any] = []

        original = torch.compile

        def compile_(*module: nn.Module, **options: Any) -> Any:
            if "mode" not in options:  # the pass itself, while it captures
                return original(*module, **options)
            modes.append(options["mode"])
            assert options["fullgraph"]
            return change(*module, options["mode"])

        monkeypatch.setattr(torch, "compile", compile_)
        return modes

    return install


def one(rows: Any) -> Row:
    (row,) = rows
    return row


def test_every_case_names_what_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = gpu_graphs.cases(MACHINE)
    assert len({case.key for case in cases}) == len(cases) == 8
    monkeypatch.setattr(gpu_graphs, "compiled", lambda *a: [])
    assert all(case.section == "graphs" for case in cases)


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", [NAME, "nvfp4"])
def test_a_right_graph_is_right(compiler: Any, mode: Any, name: str) -> None:
    original = torch.compile
    modes = compiler(lambda module, mode: original(module, backend="eager", fullgraph=True))
    row = one(gpu_graphs.compiled(MACHINE, name, mode))
    assert row.verdict == "right" and row.error is not None and modes == [mode], row


def test_wrong_graphs_are_wrong(compiler: Any) -> None:
    compiler(lambda module, mode: lambda *given: module(*given) * 1.01)
    assert one(gpu_graphs.compiled(MACHINE, NAME, None)).why.startswith("error")

    def forgets(module: nn.Module, mode: Any) -> Any:
        """Right outputs, but planes that are not what eager wrote."""

        def run(*given: Tensor) -> Tensor:
            out = module(*given)
            if int(given[-1]) == gpu_graphs.STEPS - 1:
                module.value_0[0, 0, 0, 0] += 1
            return out

        return run

    compiler(forgets)
    assert "value planes: codes: 1 of" in one(gpu_graphs.compiled(MACHINE, NAME, None)).why


def test_graphs_that_are_given_up_are_wrong(compiler: Any) -> None:
    from torch._dynamo.utils import counters

    def skips(module: nn.Module, mode: Any) -> Any:
        counters["inductor"]["cudagraph_skips"] += 1
        return module

    compiler(skips)
    assert "given up 1 times" in one(gpu_graphs.compiled(MACHINE, NAME, "reduce-overhead")).why
    assert one(gpu_graphs.compiled(MACHINE, NAME, None)).ok


def test_what_does_not_compile_is_a_row(compiler: Any) -> None:
    def fails(module: nn.Module, mode: Any) -> Any:
        raise RuntimeError("ptxas: out of registers")

    compiler(fails)
    row = one(gpu_graphs.compiled(MACHINE, NAME, None))
    assert row.verdict == "failed" and "ptxas" in row.why and "fails" in row.detail


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package is the exported program; what another process would do with it is kept."""
    made: dict[str, Any] = {"code": 0}

    def package(program: Any, *, package_path: str) -> str:
        made["program"] = program
        return package_path

    def run(command: list[str], **options: Any) -> Any:
        made["command"] = command
        compile(command[2], "command", "exec")
        folder = Path(next(part for part in command[2].split("'") if part.endswith("inputs.pt")))
        made["inputs"] = torch.load(folder)
        return SimpleNamespace(returncode=made["code"], stderr="no operator kvq::attention")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", package)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: made["program"].module())
    monkeypatch.setattr(subprocess, "run", run)
    return made


def test_a_package_is_tried_here_and_elsewhere(packages: dict[str, Any]) -> None:
    assert one(gpu_graphs.packaged(MACHINE, NAME)).ok
    assert len(packages["inputs"]) == 2 and packages["command"][1] == "-c"
    packages["code"] = 1
    row = one(gpu_graphs.packaged(MACHINE, NAME))
    assert row.verdict == "wrong" and "kvq::attention" in row.why and row.detail


def test_a_wrong_package_goes_nowhere(packages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    load = torch._inductor.aoti_load_package
    monkeypatch.setattr(
        torch._inductor, "aoti_load_package", lambda path: lambda *given: load(path)(*given) * 0
    )
    assert one(gpu_graphs.packaged(MACHINE, NAME)).verdict == "wrong"
    assert "command" not in packages


def test_headers_are_found_beside_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    (tmp_path / "include").mkdir()
    (tmp_path / "lib64" / "stubs").mkdir(parents=True)
    (tmp_path / "include" / "cuda.h").touch()
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CPATH", "/before")
    found = gpu_graphs.paths_of_cuda()
    assert found["CPATH"] == f"/before:{tmp_path / 'include'}"
    assert found["LIBRARY_PATH"].startswith(f"{tmp_path / 'lib64'}:{tmp_path / 'lib64' / 'stubs'}")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert gpu_graphs.paths_of_cuda() == {}


def test_a_rewritten_model(compiler: Any) -> None:
    """Through the pass itself; what the two ways of running it give is compared."""
    from passes.compile import kvq_backend

    original = torch.compile
    modes = compiler(lambda module, mode: original(module, backend=kvq_backend, fullgraph=True))
    row = one(gpu_graphs.model(MACHINE, NAME))
    assert row.ok and modes == [None, "reduce-overhead"], row


def test_models_that_differ_or_stay_as_they_are(compiler: Any) -> None:
    import passes

    outputs = iter(range(100))
    report = SimpleNamespace(graphs=[SimpleNamespace(rewritten=1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "report", lambda: report)
        compiler(lambda module, mode: lambda *given: torch.tensor(next(outputs)))
        assert one(gpu_graphs.model(MACHINE, NAME)).why == "CUDA graphs give other numbers"
        report.graphs[0].rewritten = 0
        assert "not rewritten" in one(gpu_graphs.model(MACHINE, NAME)).why


def test_planes_are_the_formats() -> None:
    step = gpu_graphs.Step(NAME, MACHINE)
    assert len(step.store("key")) == len(get_format(NAME).planes)
