"""Compile the kernels with the system's C++ compiler, once for each source, compiler, flags and processor.

The result is kept in ``$KVQ_CACHE/cpu`` (default ``~/.cache/kvq/cpu``). Several processes may start at once: one compiles, the
others wait for it. A file that is damaged is compiled again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..errors import ImplementationError

__all__ = ["CAPABILITIES", "BuildError", "build", "cache_dir", "capability", "discard"]

SOURCES = Path(__file__).parent / "csrc"
_UNITS = ("attention.cpp", "store.cpp")
# No contraction: codes have to be the same bytes everywhere. Attention says where it wants fused multiply-adds.
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)

_X86: dict[str, tuple[str, ...]] = {
    "native": ("-march=native",),
    "avx512": ("-march=x86-64-v4",),
    "avx2": ("-march=x86-64-v3",),
    "default": ("-march=x86-64",),
}
_ARM: dict[str, tuple[str, ...]] = {"native": ("-mcpu=native",), "default": ()}
_OTHER: dict[str, tuple[str, ...]] = {"native": (), "default": ()}
_LEVELS = ("DEFAULT", "AVX2", "AVX512")


class BuildError(ImplementationError):
    """The kernels could not be compiled or loaded."""


def _flags_of_capabilities() -> dict[str, tuple[str, ...]]:
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64"):
        return _X86
    return _ARM if machine in ("aarch64", "arm64") else _OTHER


def _runs_here(name: str) -> bool:
    needed = {"avx512": "AVX512", "avx2": "AVX2"}.get(name, "DEFAULT")
    here = torch.backends.cpu.get_cpu_capability()
    return here not in _LEVELS or _LEVELS.index(needed) <= _LEVELS.index(here)


CAPABILITIES: tuple[str, ...] = tuple(name for name in _flags_of_capabilities() if _runs_here(name))
"""What kernels can be compiled for here: everything the processor has, or less of it."""


def capability() -> str:
    """Which of ``CAPABILITIES`` is in use: ``KVQ_CPU_CAPABILITY``, or ``native``.

    Raises:
        BuildError: when the variable names something else.
    """
    name = os.environ.get("KVQ_CPU_CAPABILITY", "native").lower()
    if name not in CAPABILITIES:
        raise BuildError(
            "C++ kernels for KVQ_CPU_CAPABILITY",
            got=repr(name),
            allowed=", ".join(CAPABILITIES),
            do="unset it to use what the processor has",
        )
    return name


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$KVQ_CACHE/cpu``, else ``$XDG_CACHE_HOME/kvq/cpu`` or ``~/.cache/kvq/cpu``."""
    root = os.environ.get("KVQ_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvq")
    return Path(root) / "cpu"


def _usable_cache_dir() -> Path:
    path = cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        path = Path(tempfile.gettempdir()) / f"kvq-{user}" / "cpu"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid") and path.parent.stat().st_uid != os.getuid():
            raise BuildError(
                "a folder for compiled kernels",
                got=f"{cache_dir()} cannot be written, and {path} belongs to someone else",
                do="set KVQ_CACHE to a folder of your own",
            ) from None
        return path


def _compiler() -> list[str]:
    asked = os.environ.get("CXX")
    for command in [shlex.split(asked)] if asked else [["c++"], ["g++"], ["clang++"]]:
        if command and shutil.which(command[0]):
            return command
    raise BuildError(
        "compiling the C++ kernels",
        got=f"no compiler: CXX is {asked!r}, which is not to be found"
        if asked
        else "no c++, g++ or clang++ on PATH",
        allowed="any C++17 compiler",
        do="install one or name it in CXX; until then everything runs in plain torch, which is slower",
    )


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def _processor() -> str:
    """Identifies the processor's instructions, since ``native`` differs where a home folder is shared."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("flags", "Features", "model name", "CPU part")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"])  # on macOS
    return platform.processor()


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in SOURCES.iterdir() if p.is_file()):
        digest.update(path.name.encode() + path.read_bytes())
    for text in (*compiler, _output([*compiler, "--version"]), *flags, platform.platform(), _processor()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        try:
            import fcntl
        except ImportError:  # without it two processes may compile the same thing; both results are good
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(library: Path) -> bool:
    """Whether the file is what was compiled: loading a truncated one can end the process."""
    try:
        return library.with_suffix(".sha256").read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    except OSError:
        return False


def discard(library: Path) -> None:
    """Forget a compiled library, so that the next ``build`` compiles it again."""
    for path in (library, library.with_suffix(".sha256")):
        path.unlink(missing_ok=True)


def _compile(compiler: Sequence[str], flags: Sequence[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as folder:
        objects = [str(Path(folder) / f"{unit}.o") for unit in _UNITS]
        running = [
            subprocess.Popen(
                [*compiler, *flags, "-c", str(SOURCES / unit), "-o", out],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for unit, out in zip(_UNITS, objects, strict=True)
        ]
        said = "".join(process.communicate()[0] for process in running)
        good = not any(process.returncode for process in running)
        made = Path(folder) / "kernels.so"
        if good:
            link = [*compiler, *flags, "-shared", *objects, "-o", str(made)]
            done = subprocess.run(link, capture_output=True, text=True, check=False)
            said, good = said + done.stdout + done.stderr, done.returncode == 0
        if good:
            digest = Path(folder) / "digest"
            digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            os.replace(made, target)
            os.replace(digest, target.with_suffix(".sha256"))
            return
    raise BuildError(
        "compiling the C++ kernels",
        got="\n".join(said.strip().splitlines()[-20:]),
        allowed="a C++17 compiler: " + shlex.join(compiler) + " was used",
        do="name another one in CXX; until then everything runs in plain torch, which is slower",
    )


@functools.cache
def _takes(compiler: tuple[str, ...], flags: tuple[str, ...]) -> bool:
    command = [*compiler, *flags, "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode == 0


def _flags() -> tuple[str, ...]:
    chosen = _flags_of_capabilities()[capability()]
    # Not every clang knows the ARM processor it runs on by the name "native". The kernels need none of what that adds to ARMv8.
    if chosen == _ARM["native"] and not _takes(tuple(_compiler()), chosen):
        chosen = _ARM["default"]
    return (
        *_FLAGS,
        *chosen,
        *shlex.split(os.environ.get("KVQ_CPU_FLAGS", "")),
    )


def build(*, verbose: bool = False) -> Path:
    """The compiled kernels for ``capability()``, from the cache or compiled now (a few seconds).

    Args:
        verbose: say on stderr where they are and whether they were compiled.

    ``KVQ_CPU_FLAGS`` adds flags for the compiler, such as ``-fsanitize=address``.

    Raises:
        BuildError: no compiler, or it failed, or there is no folder to write to.
    """
    name = capability()
    compiler = _compiler()
    flags = _flags()
    library = _usable_cache_dir() / f"kernels-{name}-{_key(compiler, flags)}.so"
    if not _is_whole(library):
        with _lock(library.with_suffix(".lock")):
            if not _is_whole(library):  # another process may have been faster
                start = time.perf_counter()
                _compile(compiler, flags, library)
                took = time.perf_counter() - start
                if verbose or took > 1:
                    print(f"kvq: compiled CPU kernels ({name}) in {took:.1f} s: {library}", file=sys.stderr)
                return library
    if verbose:
        print(f"kvq: CPU kernels ({name}): {library}", file=sys.stderr)
    return library
