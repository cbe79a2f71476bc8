"""PTX of kernels as a launch on a GPU would compile them: a process without the interpreter, which is asked launch by launch.

``python -m tests.triton.ptx_compiler`` answers pickled requests on its standard input. A request names a kernel and holds its
arguments, tensors as :class:`Pointer`; ``JITFunction.run`` specialises them (types, ``divisible by 16``, ``equal to 1``) as it
always does. The step from PTX to machine code is left out: it takes a third of the time, and the offline tests have it.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest

from tests.triton.offline import ROOT, VERSIONS, old_triton

__all__ = ["Compiled", "Pointer", "compile_launch"]


@dataclasses.dataclass(frozen=True)
class Pointer:
    """What a launch looks at in a tensor."""

    dtype: Any
    address: int

    def data_ptr(self) -> int:
        return self.address


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel in PTX.

    Attributes:
        parameters: names of the arguments that are passed on, in order; what is constant is compiled in. Pointers to scratch
            memory follow, of which our kernels use none.
        shared: bytes of dynamic shared memory.
        scratch: bytes of global scratch memory.
    """

    name: str
    ptx: str
    parameters: tuple[str, ...]
    warps: int
    shared: int
    scratch: int


Request = tuple[str, str, str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def compile_launch(
    target: str, version: str, module: str, kernel: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Compiled:
    """What ``kernel[grid](*args, **kwargs)`` would run on ``target``, for example ``sm_80``.

    Skips the test where the version is not installed, unless this is continuous integration.
    """
    return _ask(version, (target, module, kernel, args, tuple(sorted(kwargs.items()))))


@functools.lru_cache(maxsize=512)
def _ask(version: str, request: Request) -> Compiled:
    process = _process(version)
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(request, process.stdin)
    process.stdin.flush()
    try:
        answer = pickle.load(process.stdout)
    except EOFError:
        raise RuntimeError(f"the process that compiles ended: {process.wait()}") from None
    if isinstance(answer, str):
        raise RuntimeError(f"compiling {request[2]} for {request[0]}:\n{answer}")
    return answer


@functools.cache
def _process(version: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    path = [str(ROOT)]
    if version != VERSIONS[0]:
        if not (old_triton() / "triton").is_dir():
            reason = f"no Triton {version} in {old_triton()}"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        path.insert(0, str(old_triton()))
    environment["PYTHONPATH"] = os.pathsep.join(path)
    # What lies in the cache here has no machine code, and nobody else may find it.
    folder = tempfile.TemporaryDirectory()
    environment["TRITON_CACHE_DIR"] = folder.name
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.triton.ptx_compiler"],
        env=environment,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    atexit.register(_end, process, folder)
    return process


def _end(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()
    folder.cleanup()


def _compile(request: Request) -> Compiled:
    import importlib

    from tests.triton.offline import recording

    target, module, name, args, kwargs = request
    function = getattr(importlib.import_module(module), name)
    with recording(target):
        made = function.run(*args, grid=(1,), warmup=False, **dict(kwargs))
    signature = made.src.signature
    return Compiled(
        made.metadata.name,
        made.asm["ptx"],
        tuple(argument for argument, kind in signature.items() if kind != "constexpr"),
        made.metadata.num_warps,
        made.metadata.shared,
        made.metadata.global_scratch_size,
    )


def main() -> None:
    import traceback

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # compilers print what they like
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    assert not triton.knobs.runtime.interpret
    CUDABackend.make_cubin = lambda *_: b""
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer: Compiled | str = _compile(request)
        except Exception:
            answer = traceback.format_exc()[-3000:]
        try:
            pickle.dump(answer, answers)
            answers.flush()
        except BrokenPipeError:  # whoever asked is gone
            os._exit(1)


if __name__ == "__main__":
    # Pickled classes belong to the module, not to ``__main__``.
    from tests.triton import ptx_compiler

    ptx_compiler.main()
