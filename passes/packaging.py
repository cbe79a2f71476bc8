"""AOTInductor packages for processes without Python.

    ep = passes.quantize_exported(torch.export.export(model, args), "nvfp4")
    passes.package_for_cpp(ep, package_path="model.pt2")

A package holds what Inductor could see: kernels that it made, Triton kernels, and calls of operators that stayed whole. On a CPU
those are served in C++ by ``kvq_ops.cpu.package.build_ops``. On a GPU an operator that stays whole runs in Python, as those do
that CuTe DSL serves; a package with one in it loads where ``kvq_ops`` was imported, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule

from kvq_ops.errors import ImplementationError
from kvq_ops.registry import Implementation, Request, implementations, select

from .implementations import requests

__all__ = ["check_for_cpp", "package_for_cpp"]


def _graphs(graph_module: GraphModule) -> Iterator[GraphModule]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield module


def check_for_cpp(graph_module: GraphModule) -> None:
    """Raise ``ImplementationError`` for an operator on a GPU that would stay whole, with its name and what to use instead."""
    for module in _graphs(graph_module):
        for request in requests(module):
            if request.device == "cpu":
                continue
            chosen = select(request)
            if not chosen.inlined:
                others = _inlined(request)
                ways = ["load it in Python after import kvq_ops (torch._inductor.aoti_compile_and_package)"]
                if others:
                    under = f"kvq_ops.use_implementation({others[0]!r})"
                    ways.insert(0, f"package under {under}, whose kernels go into the package")
                raise ImplementationError(
                    f"kvq::{request.op} for {', '.join(map(str, request.formats))} on {request.device} in an AOTInductor "
                    "package for C++",
                    got=f"implementation {chosen.name!r}, which runs in Python: the package would hold a call of the operator",
                    allowed=", ".join(others)
                    or "none: no implementation that goes into a package serves it there",
                    do="; or ".join(ways),
                )


def _inlined(request: Request) -> list[str]:
    def fits(row: Implementation) -> bool:
        return row.inlined and row.refuses(request) is None

    return [row.name for row in implementations(request.op) if fits(row)]


def package_for_cpp(program: ExportedProgram, *, package_path: str | Path, **options: Any) -> str:
    """``torch._inductor.aoti_compile_and_package`` for a package that a process without Python is to load.

    Args:
        program: what ``quantize_exported`` returns.
        package_path: ends in ``.pt2``.
        options: as ``aoti_compile_and_package`` takes them.

    Returns:
        the path of the package.

    Raises:
        ImplementationError: an operator on a GPU is served by kernels that need Python; nothing is compiled then.
    """
    import torch._inductor

    check_for_cpp(program.graph_module)
    made: str = torch._inductor.aoti_compile_and_package(program, package_path=str(package_path), **options)
    return made
