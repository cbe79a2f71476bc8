"""The arrows between packages go one way, checked from the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvq_ops", "passes", "cutlass_kernels", "kvq_lab")

# The rooms from the ground up: each may import the ones before it, and none after it.
LADDER = (
    "kvq_ops.config",
    "kvq_ops.errors",
    "kvq_ops.options",
    "kvq_ops.axes",
    "kvq_ops.files",
    "kvq_ops.layout",
    "kvq_ops.rows",
    "kvq_ops.formats",
    "kvq_ops.codecs",
    "kvq_ops.calibration",
    "kvq_ops.policy",
    "kvq_ops.window",
    "kvq_ops.reference",
    "kvq_ops.registry",
    "kvq_ops.cpu",
    "kvq_ops.triton_kernels",
    "cutlass_kernels",
    "kvq_ops.checks",
    "kvq_ops.ops",
    "kvq_ops.paged",
    "kvq_ops.decoded",
    "kvq_ops.handle",
    "kvq_ops.stacked",
    "kvq_ops.cache",
    "kvq_ops.eviction",
    "kvq_ops.hf",
    "kvq_ops.interop",
    "kvq_ops",
    "passes",
    "kvq_lab",
)
# A kernel knows formats and the registry, nothing above, and no other kernel.
KERNELS = ("kvq_ops.cpu", "kvq_ops.triton_kernels", "cutlass_kernels")
KERNELS_KNOW = {
    "kvq_ops.config",
    "kvq_ops.errors",
    "kvq_ops.options",
    "kvq_ops.layout",
    "kvq_ops.formats",
    "kvq_ops.registry",
}

# Optional packages, and the only rooms that may import them while being imported themselves. Of cutlass_kernels this holds for
# the modules with kernels in them; the package itself imports none of those.
OPTIONAL_AT_IMPORT: dict[str, set[str]] = {
    "kvq_ops.hf": {"transformers"},
    "kvq_ops.triton_kernels": {"triton"},
    "cutlass_kernels": {"cutlass"},
}


@dataclass(frozen=True)
class Import:
    module: str  # dotted name of the importing module
    target: str  # dotted name that is imported
    line: int
    at_import: bool  # runs when the importing module is imported


def room(module: str) -> str:
    """The room of a dotted name: two parts inside kvq_ops, else the package.

    ``handle_write`` is a part of ``handle``.
    """
    parts = module.split(".")
    name = ".".join(parts[:2]) if parts[0] == "kvq_ops" else parts[0]
    return next((known for known in LADDER if name.startswith(f"{known}_")), name)


def may_import(here: str) -> set[str]:
    return KERNELS_KNOW if here in KERNELS else set(LADDER[: LADDER.index(here)])


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, at_import
        else:
            later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
                isinstance(child, ast.If) and _is_type_checking(child.test)
            )
            yield from _walk(child, at_import and not later)


def imports_of(source: str, module: str, is_package: bool, submodules: set[str]) -> list[Import]:
    """Every import in ``source``; ``from a import b`` counts as ``a.b`` where that is a module."""
    found: list[Import] = []
    for node, at_import in _walk(ast.parse(source), True):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.ImportFrom)
            base = node.module or ""
            if node.level:
                keep = module.split(".") if is_package else module.split(".")[:-1]
                keep = keep[: len(keep) - (node.level - 1)]
                base = ".".join([*keep, base] if base else keep)
            names = [full if (full := f"{base}.{alias.name}") in submodules else base for alias in node.names]
        found += [Import(module, name, node.lineno, at_import) for name in names]
    return found


def _sources() -> dict[str, Path]:
    modules = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


SOURCES = _sources()


def _imports(module: str) -> list[Import]:
    path = SOURCES[module]
    return imports_of(path.read_text(), module, path.name == "__init__.py", set(SOURCES))


def wrong_arrows(imports: list[Import]) -> list[str]:
    wrong = []
    for found in imports:
        if found.target.split(".")[0] not in PACKAGES:
            continue
        here, there = room(found.module), room(found.target)
        if here != there and there not in may_import(here):
            allowed = ", ".join(sorted(may_import(here))) or "no other room"
            wrong.append(f"{found.module}:{found.line} imports {found.target}; {here} may import {allowed}")
    return wrong


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_module_belongs_to_a_known_room(module: str) -> None:
    assert room(module) in LADDER, f"{module} is in no room of LADDER: put it in its place there"


@pytest.mark.parametrize("module", sorted(m for m in SOURCES if room(m) in LADDER))
def test_arrows_go_one_way(module: str) -> None:
    assert not wrong_arrows(_imports(module))


@pytest.mark.parametrize("module", sorted(m for m in SOURCES if not m.startswith("kvq_lab")))
def test_only_torch_is_imported_at_import_time(module: str) -> None:
    allowed = {"torch", *PACKAGES, *sys.stdlib_module_names}
    allowed |= OPTIONAL_AT_IMPORT.get(room(module), set())
    foreign = [
        f"{module}:{found.line} imports {found.target}"
        for found in _imports(module)
        if found.at_import and found.target.split(".")[0] not in allowed
    ]
    assert not foreign, "import it inside the function that needs it"


@pytest.mark.parametrize(
    ("source", "module", "wrong"),
    [
        ("import passes", "kvq_ops.ops", 1),
        ("from kvq_ops.handle_write import write", "kvq_ops.ops", 1),
        ("from kvq_ops.handle_write import write", "kvq_ops.handle_ops", 0),
        ("import kvq_ops.codecs", "kvq_ops.triton_kernels.decode", 1),
        ("import cutlass_kernels", "kvq_ops.cpu", 1),
        ("import kvq_lab", "passes.report", 1),
        ("from kvq_ops import ops", "kvq_ops.formats", 1),
        ("from . import ops", "kvq_ops.formats", 1),
        ("from .ops import quantize", "kvq_ops.reference", 1),
        ("def f():\n    from kvq_ops.handle import QuantizedKV", "kvq_ops.cpu.build", 1),
        ("from kvq_ops.errors import KVQError", "kvq_ops.formats", 0),
        ("from ..formats import get_format", "kvq_ops.cpu.build", 0),
        ("import passes.report", "kvq_lab.demo", 0),
    ],
)
def test_the_check_sees_wrong_arrows(source: str, module: str, wrong: int) -> None:
    modules = set(SOURCES) | {"kvq_ops.ops", "kvq_ops.handle", "kvq_ops.formats"}
    assert len(wrong_arrows(imports_of(source, module, False, modules))) == wrong


def test_the_check_knows_what_runs_at_import() -> None:
    source = (
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import transformers\n"
        "def f():\n    import numpy\n"
        "class C:\n    import triton\n"
    )
    at_import = {i.target for i in imports_of(source, "kvq_ops.x", False, set()) if i.at_import}
    assert at_import == {"typing", "triton"}


BLOCKED = ("transformers", "numpy", "triton", "cutlass", "rich", "gguf", "safetensors")


@pytest.mark.parametrize("package", ["kvq_ops", "passes", "cutlass_kernels"])
def test_imports_with_torch_alone(package: str) -> None:
    # None in sys.modules makes an import fail as if the package were not installed.
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        f"for name in {BLOCKED!r}: sys.modules[name] = None\n"
        f"import {package}; print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("imported"), done.stderr
