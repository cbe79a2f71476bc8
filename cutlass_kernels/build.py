"""Compile CuTe kernels: once for each shape class, kept in memory and on disk.

A :class:`Kernel` says how to make the function and the arguments that ``cute.compile`` takes; :meth:`Kernel.compiled` gives the
compiled one for a target. Targets are ``sm_80``, ``sm_90a``, ``sm_100a``, ... and ``host``, the processor of this machine:
a ``@cute.jit`` function without a kernel in it, made from the same source, runs on CPU tensors.

No GPU is needed to compile. The result is kept in ``$KVQ_CACHE/cutlass`` (default ``~/.cache/kvq/cutlass``), in a folder for each
kernel, shape class, target, source and versions. Folders appear whole; several processes may want the same one at once, and one
of them compiles. A folder with a damaged file is made again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvq_ops.errors import ImplementationError

from .sources import digest_of

__all__ = [
    "HOST",
    "NATIVE",
    "PORTABLE",
    "BuildError",
    "Compiled",
    "Kernel",
    "aligned",
    "cache_dir",
    "require",
    "target_of",
    "why_not",
]

HOST = "host"
NATIVE = ("sm_100a", "sm_103a", "sm_120a", "sm_121a")
"""Targets with instructions that convert to and from e2m1."""
PORTABLE = ("sm_80", "sm_90a")
"""Targets for which conversions are done by integer arithmetic."""

INSTALL = "pip install 'kvq-ops[cutlass]'"
_OLDEST = (4, 6, 3)
_PACKAGES = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
    "apache-tvm-ffi",
)
_FUNCTION = "kvq_kernel"
_DIGESTS = "digests.json"
_lock = threading.RLock()


class BuildError(ImplementationError):
    """A kernel could not be compiled or loaded."""


# ------------------------------------------------------------------------------------------------------------ packages


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def why_not() -> str | None:
    """Why nothing can be compiled here, or ``None``. Looks at what is installed and imports nothing."""
    found = _version("nvidia-cutlass-dsl")
    if found is None or ("cutlass" in sys.modules and sys.modules["cutlass"] is None):
        return f"nvidia-cutlass-dsl is not installed: {INSTALL}"
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < _OLDEST:
        return f"nvidia-cutlass-dsl {found}, older than {'.'.join(map(str, _OLDEST))}: {INSTALL}"
    if _version("apache-tvm-ffi") is None:
        return f"apache-tvm-ffi is not installed: {INSTALL}"
    return None


def require() -> None:
    """Raise ``BuildError`` that says what to install, unless CuTe DSL is here."""
    if (reason := why_not()) is not None:
        raise BuildError(
            "compiling a CuTe kernel",
            got=reason,
            allowed="nvidia-cutlass-dsl and apache-tvm-ffi; neither a GPU nor a CUDA toolkit is needed to compile",
            do=f"{INSTALL}, or leave the choice to the registry: other implementations serve the same operators",
        )


@functools.cache
def _versions() -> tuple[str, ...]:
    known = tuple(f"{name} {_version(name)}" for name in _PACKAGES)
    return (*known, f"python {platform.python_version()}", platform.machine())


# ------------------------------------------------------------------------------------------------------------- targets


@functools.cache
def target_of(device: torch.device) -> str:
    """What kernels for tensors on ``device`` are compiled for.

    Raises:
        BuildError: for a device that CuTe kernels do not run on.
    """
    if device.type == "cpu":
        return HOST
    if device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 9:
            return f"sm_{major}{minor}a"
        if major == 8:
            return "sm_80"
    raise BuildError(
        f"a CuTe kernel for {device}", got="no such target", allowed="CUDA devices of capability 8.0 or later"
    )


# --------------------------------------------------------------------------------------------------------------- cache


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$KVQ_CACHE/cutlass``, else ``kvq/cutlass`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    root = os.environ.get("KVQ_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvq")
    return Path(root) / "cutlass"


def _usable_cache_dir() -> Path:
    path = cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError:
        own = os.getuid() if hasattr(os, "getuid") else None
        path = Path(tempfile.gettempdir()) / f"kvq-{'user' if own is None else own}" / "cutlass"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What is loaded from there is run.
        if own is not None and path.parent.stat().st_uid != own:
            raise BuildError(
                "a folder for compiled kernels",
                got=f"{cache_dir()} cannot be written, and {path} belongs to someone else",
                do="set KVQ_CACHE to a folder of your own",
            ) from None
        return path


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        try:
            import fcntl
        except ImportError:  # without it two processes may compile the same thing; both results are good
            yield
            return
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(entry: Path) -> bool:
    """Whether the files are those that were compiled: loading a truncated object can end the process."""
    try:
        known = json.loads((entry / _DIGESTS).read_text())
        return "kernel.o" in known and all(_digest(entry / name) == digest for name, digest in known.items())
    except (OSError, ValueError, AttributeError):
        return False


# ------------------------------------------------------------------------------------------------------------- kernels


def aligned(x: torch.Tensor, octets: int) -> torch.Tensor:
    """The tensor, or a copy if its vectors do not start at multiples of ``octets`` bytes or have gaps."""
    size = x.element_size()
    fits = x.stride(-1) == 1 and x.data_ptr() % octets == 0
    fits = fits and all(step * size % octets == 0 for step in x.stride()[:-1])
    return x if fits else x.clone(memory_format=torch.contiguous_format)


Made = tuple[Callable[..., Any], Sequence[Any]]


def _device_of(arguments: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            return torch.cuda.device(argument.device) if argument.is_cuda else contextlib.nullcontext()
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one target and shape class; calling it runs it on tensors and numbers.

    On a GPU it is launched on the device that the first tensor is on, and on torch's current stream of that.

    Attributes:
        kernel, target, shape: what it was compiled from.
        folder: where its files are.
    """

    kernel: str
    target: str
    shape: dict[str, Any]
    folder: Path
    _call: Callable[..., Any] = field(repr=False)

    def __call__(self, *arguments: Any) -> None:
        with _device_of(arguments):
            self._call(*arguments)

    @property
    def ptx(self) -> str:
        """The PTX text; there is none for ``host``."""
        return (self.folder / "kernel.ptx").read_text()

    @property
    def cubin(self) -> Path:
        """The file with the machine code; there is none for ``host``."""
        return self.folder / "kernel.cubin"


def _later(name: str) -> Callable[..., Made]:
    module, _, function = name.partition(":")

    def make(target: str, **shape: Any) -> Made:
        made: Made = getattr(importlib.import_module(module), function)(target, **shape)
        return made

    return make


def _file_of(make: Callable[..., Made] | str) -> str:
    if isinstance(make, str):
        found = importlib.util.find_spec(make.partition(":")[0])
        file = None if found is None else found.origin
    else:
        file = inspect.getsourcefile(make)
    if file is None or not os.path.isfile(file):
        raise BuildError("a CuTe kernel", got=f"{make!r}, which is in no file", do="write it into one")
    return file


class Kernel:
    """A kernel as source, compiled on demand.

    Args:
        name: letters, digits and ``_``; part of file names and messages.
        make: ``make(target, **shape)`` gives a ``@cute.jit`` function and the arguments to compile it with: fake tensors, example
            numbers, constants, and for a GPU :func:`stream` last. It is called once for a shape class, and only when that is
            not in the cache; it may import ``cutlass``. Or its name, ``"package.module:function"``, of which nothing is imported
            before that.
        options: more options for ``cute.compile``.
        sources: files that the code depends on, besides the one that ``make`` is in and what that imports (see ``sources``).

    Compiled kernels are called with the arguments of the function, without its constants and its stream: a kernel runs on
    torch's current stream.
    """

    def __init__(
        self, name: str, make: Callable[..., Made] | str, *, options: str = "", sources: Sequence[str] = ()
    ) -> None:
        self.name, self.options = name, options
        self.make: Callable[..., Made] = _later(make) if isinstance(make, str) else make
        self._start, self._sources = make, tuple(sources)
        self._known: dict[tuple[Any, ...], Compiled] = {}

    def compiled(self, target: str, **shape: Any) -> Compiled:
        """The kernel for a target and shape class, from memory, from disk, or compiled now (about half a second).

        Args:
            shape: what ``make`` wants to know; hashable, and written the same in every process (names rather than objects).

        Raises:
            BuildError: CuTe DSL is not installed, or does not accept the kernel for this target.
        """
        asked = (target, *shape.items())
        if (known := self._known.get(asked)) is not None:
            return known
        with _lock:
            if asked not in self._known:
                self._known[asked] = self._load(target, shape)
            return self._known[asked]

    def forget(self) -> None:
        """Drop what is in memory."""
        self._known.clear()

    def entry(self, target: str, **shape: Any) -> Path:
        """The folder in which the kernel is kept, whether it exists or not."""
        digest = hashlib.sha256()
        described = (self.name, target, *map(repr, sorted(shape.items())), self.options)
        for text in (digest_of(_file_of(self._start), self._sources), *_versions(), *described):
            digest.update(text.encode() + b"\0")
        return _usable_cache_dir() / f"{self.name}-{target}-{digest.hexdigest()[:24]}"

    def _load(self, target: str, shape: dict[str, Any]) -> Compiled:
        require()
        entry = self.entry(target, **shape)
        for attempt in range(2):
            if not _is_whole(entry):
                with _file_lock(entry.with_suffix(".lock")):
                    if not _is_whole(entry):  # another process may have been faster
                        self._compile(entry, target, shape)
            try:
                return Compiled(self.name, target, dict(shape), entry, _function(entry / "kernel.o"))
            except Exception as error:
                if attempt:
                    raise BuildError(
                        f"loading CuTe kernel {self.name} from {entry}", got=str(error)
                    ) from error
                shutil.rmtree(entry, ignore_errors=True)
        raise AssertionError

    def _compile(self, entry: Path, target: str, shape: dict[str, Any]) -> None:
        import cutlass.cute as cute

        with tempfile.TemporaryDirectory(dir=entry.parent, prefix="building-") as folder:
            dump, made = Path(folder) / "dump", Path(folder) / "made"
            dump.mkdir()
            made.mkdir()
            options = f"--enable-tvm-ffi {self.options}"
            if target != HOST:
                options += f" --gpu-arch {target} --keep-ptx --keep-cubin --dump-dir {shlex.quote(str(dump))}"
            try:
                function, arguments = self.make(target, **shape)
                result = cute.compile(function, *arguments, options=options)
                result.export_to_c(str(made / "kernel.o"), function_name=_FUNCTION)
                for kind in ("ptx", "cubin") if target != HOST else ():
                    (found,) = dump.glob(f"*.{kind}")
                    shutil.move(found, made / f"kernel.{kind}")
            except Exception as error:
                raise BuildError(
                    f"compiling CuTe kernel {self.name} for {target}, {shape}",
                    got="\n".join(f"{type(error).__name__}: {error}".strip().splitlines()[-20:]),
                    do="CUTE_DSL_SHOW_STACKTRACE=1 shows more",
                ) from error
            digests = {path.name: _digest(path) for path in made.iterdir()}
            (made / _DIGESTS).write_text(json.dumps(digests))
            if entry.exists():
                os.replace(entry, Path(folder) / "damaged")
            os.replace(made, entry)


def _function(path: Path) -> Callable[..., Any]:
    import cutlass.cute as cute

    module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
    function: Callable[..., Any] = getattr(module, _FUNCTION)
    return function


def stream() -> Any:
    """The argument that stands for torch's current stream when a kernel for a GPU is compiled."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)
