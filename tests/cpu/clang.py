"""clang, as the package ``ziglang`` brings it: for this machine, and for others that no test runs on.

As a program, ``python tests/cpu/clang.py ...`` is a C++ compiler for this machine: clang with the headers of the system's C++
library, which the system's compiler then links. (What ``zig c++`` links is a C++ library of its own, compiled in a minute.)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ZIG = (sys.executable, "-m", "ziglang", "c++")
# The C library of a shared object that is linked against nothing holds this address of the object itself.
_HANDLE = 'extern "C" { void* __dso_handle = nullptr; }\n'
# zig adds checks for undefined behaviour to whatever is compiled without -O3.
PLAIN = ("-fno-sanitize=undefined",)
CHECKED = ("-fsanitize=undefined", "-fsanitize-trap=undefined")
STRICT = ("-Wall", "-Wextra", "-Werror")


def missing(*packages: str) -> str | None:
    """Which of these packages are not installed, as a reason to skip."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return f"needs {' and '.join(absent)}: pip install {' '.join(absent)}" if absent else None


def _environment() -> dict[str, str]:
    from kvq_ops.cpu import build

    folder = str(build._usable_cache_dir() / "zig")
    return {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder} | os.environ


def run(arguments: Sequence[str]) -> str:
    """``zig c++`` with these arguments; what it said.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [*ZIG, *arguments], env=_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"zig c++ {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def aarch64(*flags: str) -> Path:
    """The kernels as a shared object for aarch64 Linux that is linked against nothing; compiled once."""
    from kvq_ops.cpu import build

    target = ("-target", "aarch64-linux-musl")
    every = (*build._FLAGS, *build._ARM["default"], *STRICT, *(flags or PLAIN), *target)
    os.environ.update(_environment())  # what the key asks the compiler must not go to another cache
    library = build._usable_cache_dir() / f"aarch64-{build._key(ZIG, every)}.so"
    with build._lock(library.with_suffix(".lock")):
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
                handle = Path(folder) / "handle.cpp"
                handle.write_text(_HANDLE)
                units = [*(build.SOURCES / unit for unit in build._UNITS), handle]
                objects = [str(Path(folder) / f"{unit.name}.o") for unit in units]
                for unit, out in zip(units, objects, strict=True):
                    run([*every, "-c", str(unit), "-o", out])
                made = Path(folder) / "kernels.so"
                run(["-target", target[1], "-shared", "-nostdlib", *objects, "-o", str(made)])
                os.replace(made, library)
    return library


def _headers() -> list[str]:
    """Folders of the system's C++ library."""
    said = subprocess.run(
        ["c++", "-E", "-v", "-x", "c++", os.devnull], capture_output=True, text=True, check=True
    ).stderr
    folders = said.split("search starts here:")[-1].split("End of search")[0].split()
    return [x for folder in folders if "c++" in folder for x in ("-I", folder)]


def main(arguments: list[str]) -> int:
    # zig spells the names of processors with underscores.
    arguments = [
        a.replace("-march=x86-64", "-march=x86_64").replace("x86_64-v", "x86_64_v") for a in arguments
    ]
    if "-shared" in arguments:
        given = arguments[arguments.index("-shared") :]
        command, environment = ["c++", "-pthread", *given], dict(os.environ)
    else:
        compiles = ["-nostdinc++", *PLAIN, *_headers()] if "-c" in arguments else []
        command, environment = [*ZIG, *compiles, *arguments], _environment()
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    with contextlib.suppress(ValueError):
        sys.path.remove(str(Path(__file__).parent))
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main(sys.argv[1:]))
