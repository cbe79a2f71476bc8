"""The operators as a C++ library, for processes without Python that load an AOTInductor package.

``build_ops`` compiles the kernels together with ``csrc/torch/ops.cpp``, which registers the schemas (unless Python did) and CPU
kernels for them. Link the library into a program, or ``dlopen`` it, before the package is loaded. ``build_runner`` compiles such
a program: ``run_package model.pt2 inputs.pt outputs.pt``.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from ..formats import Format, get_format, names
from . import build
from .build import SOURCES, BuildError
from .params import DTYPES, layout_of

__all__ = ["build_ops", "build_runner"]


def _text(value: float | bool | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _braces(*values: float | bool | str) -> str:
    return "{" + ", ".join(map(_text, values)) + "}"


def _row(fmt: Format) -> str:
    layout = layout_of(fmt)
    if isinstance(layout, str):
        raise BuildError(
            f"a C++ library for format {fmt.name!r}", got=layout, allowed="formats that the CPU kernels serve"
        )
    planes = [
        _braces(p.name, p.axes, 0 if p.dtype is None else DTYPES[p.dtype], p.per, p.items, p.tokens, p.size)
        for p in fmt.planes
    ]
    slots = [_braces(index, dtype) for index, dtype, _ in layout.slots]
    return (
        f'    {{"{fmt.name}", {_braces(*layout.numbers)}, {{{", ".join(slots)}}}, {_braces(*layout.table.tolist())}, '
        f"{len(planes)}, {{{', '.join(planes)}}}, {_text(fmt.lossless)}, {_text(fmt.windowed)}, "
        f"{_text((fmt.base or fmt).calibrated)}, {float((fmt.base or fmt).outliers)!r}, {next(iter(fmt.static_planes), -1)}}},\n"
    )


def _torch_flags() -> tuple[list[str], list[str]]:
    root = Path(torch.__file__).parent
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    include = [f"-I{root / 'include'}", f"-I{root / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
    library = root / "lib"
    link = [f"-L{library}", f"-Wl,-rpath,{library}", "-ltorch", "-ltorch_cpu", "-lc10"]
    return [*include, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-w"], link


def _run(command: Sequence[str], asked: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(asked, got="\n".join((done.stdout + done.stderr).strip().splitlines()[-20:]))


def build_ops(folder: str | Path, formats: Sequence[str] | None = None) -> Path:
    """Compile ``libkvq_ops.so`` into ``folder`` (about a minute).

    Args:
        formats: the names that the library understands; default: every listed one.

    Raises:
        BuildError: no compiler, or it failed, or a format that the CPU kernels do not serve.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    table = "".join(_row(get_format(name)) for name in (names() if formats is None else formats))
    sources = folder / "csrc"
    shutil.copytree(SOURCES, sources, dirs_exist_ok=True)
    (sources / "torch" / "formats.inc").write_text(f"const Known kFormats[] = {{\n{table}}};\n")
    include, link = _torch_flags()
    library = folder / "libkvq_ops.so"
    units = [str(sources / unit) for unit in (*build._UNITS, "torch/ops.cpp")]
    command = [
        *build._compiler(),
        *build._flags(),
        "-fopenmp",
        *include,
        "-shared",
        *units,
        "-o",
        str(library),
        *link,
    ]
    _run(command, "compiling the operators as a C++ library")
    return library


def build_runner(folder: str | Path, library: Path) -> Path:
    """Compile ``run_package`` into ``folder``, linked with what ``build_ops`` made."""
    include, link = _torch_flags()
    program = Path(folder) / "run_package"
    # The library registers operators by being loaded; nothing in the program names it.
    kept = ["-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent.resolve()}", "-Wl,--as-needed"]
    source = str(SOURCES / "torch" / "main.cpp")
    command = [*build._compiler(), "-std=c++20", "-O1", *include, source, "-o", str(program), *kept, *link]
    _run(command, "compiling a program that runs AOTInductor packages")
    return program
