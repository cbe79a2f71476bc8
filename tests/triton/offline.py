"""Compiling kernels for GPUs that are not there.

:func:`compiled` starts a process without the interpreter, in which the real launchers are called with CPU tensors. A driver that
only names its target makes Triton compile what that GPU would run, down to machine code (ptxas and lld come with Triton), and
nothing is started. What the code holds comes back as :class:`Kernel`.

A case names a function ``module:function`` and its arguments; the function makes its tensors and calls launchers. One process
compiles all cases of a target and a version of Triton; a test module that asks again gets what is there, so tests of one target
should share a worker of xdist (:func:`matrix` marks them).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["SHARED", "TARGETS", "VERSIONS", "Case", "Kernel", "compiled", "matrix"]

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")
VERSIONS = ("3.8", "3.6")
"""The one that torch 2.13 pairs with (the installed one), and the oldest that is served, in a folder of its own."""

SHARED = {"sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory that a block may use; Triton compares them only when a kernel is loaded."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a launcher.

    Attributes:
        name: unique among those compiled together.
        call: ``module:function``.
        arguments: of the function, as JSON can hold them.
        loops: measure loops, for which NVIDIA's code is disassembled; that takes longer than compiling a small kernel.
    """

    name: str
    call: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    loops: bool = False


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the machine code of one kernel holds.

    Attributes:
        registers: of a thread (vector registers on AMD).
        stack: bytes of memory of a thread, spilled registers included.
        shared: bytes of shared memory of a block.
        loads: instructions that read global memory, straight or into shared memory, by the bytes that a thread moves with one.
        stores: the same for writes.
        tensor: tensor-core instructions by name.
        loop: machine instructions in the shortest loop that has tensor-core ones, or else in the shortest; 0 on AMD,
            and in cases that do not ask for it.
        opcodes: all instructions by name, without modifiers on AMD; of PTX on NVIDIA.
    """

    name: str
    warps: int
    registers: int
    stack: int
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]
    tensor: dict[str, int]
    opcodes: dict[str, int]
    seconds: float
    loop: int = 0

    def count(self, pattern: str) -> int:
        """Instructions whose name matches a regular expression."""
        return sum(n for name, n in self.opcodes.items() if re.search(pattern, name))


# ------------------------------------------------------------------------------------------------------ asking for code


def old_triton() -> Path:
    """Where the oldest Triton lies: ``$KVQ_TRITON36``, or ``triton36`` in the virtual environment."""
    return Path(os.environ.get("KVQ_TRITON36") or Path(sys.prefix) / "triton36")


def matrix(*targets: str, versions: Sequence[str] = VERSIONS) -> pytest.MarkDecorator:
    """Parametrizes a test over ``target`` and ``version``, those of one process in one worker."""
    return pytest.mark.parametrize(
        ("target", "version"),
        [
            pytest.param(t, v, id=f"{t}-triton{v}", marks=pytest.mark.xdist_group(f"offline-{t}-{v}"))
            for v in versions
            for t in targets or TARGETS
        ],
    )


def compiled(cases: Sequence[Case], target: str, version: str = VERSIONS[0]) -> dict[str, list[Kernel] | str]:
    """The kernels of each case in the order of their launches, or what went wrong.

    Skips the test where the version is not installed, unless this is continuous integration.
    """
    path = [str(ROOT)]
    if version != VERSIONS[0]:
        if not (old_triton() / "triton").is_dir():
            reason = f"no Triton {version} in {old_triton()}; `make venv` installs it, KVQ_TRITON36 names another folder"
            pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        path.insert(0, str(old_triton()))
    request = json.dumps([dataclasses.asdict(case) for case in cases])
    return _answers(request, target, version, tuple(path))


@functools.cache
def _answers(request: str, target: str, version: str, path: tuple[str, ...]) -> dict[str, list[Kernel] | str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    environment["PYTHONPATH"] = os.pathsep.join(path)
    with tempfile.TemporaryDirectory() as folder:
        environment.setdefault("TRITON_CACHE_DIR", folder)
        # Answers come through a file: compilers print what they like.
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "tests.triton.offline", target, version, str(answer)]
        done = subprocess.run(
            command, input=request, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode or not answer.exists():
            raise RuntimeError(f"compiling for {target} with Triton {version}:\n{done.stderr[-4000:]}")
        return {
            name: made if isinstance(made, str) else [_kernel(fields) for fields in made]
            for name, made in json.loads(answer.read_text()).items()
        }


def _kernel(fields: dict[str, Any]) -> Kernel:
    for moved in ("loads", "stores"):
        fields[moved] = {int(size): count for size, count in fields[moved].items()}
    return Kernel(**fields)


# ----------------------------------------------------------------------------------- in the process that compiles


def _target(name: str) -> Any:
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64)


class _Driver:
    """Names a GPU and does nothing else."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> Any:
        return ("offline", self.target.backend, self.target.arch)

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("a launcher wants to tune: configurations have to come from data")


@contextlib.contextmanager
def recording(target: str) -> Iterator[list[tuple[str, Any, float]]]:
    """Launches compile for ``target`` and are listed as name, compiled kernel and seconds."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    launched: list[tuple[str, Any, float]] = []
    stock = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        kernel = stock(self, *args, grid=grid, warmup=True, **kwargs)
        launched.append((self.fn.__name__, kernel, time.perf_counter() - begun))
        return kernel

    JITFunction.run = run
    before = driver._active
    driver.set_active(_Driver(_target(target)))
    try:
        yield launched
    finally:
        JITFunction.run = stock
        driver._active = before


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


_PTX_WIDTH = {"b8": 1, "b16": 2, "b32": 4, "b64": 8, "b128": 16}
_PTX_WIDTH |= {f"{kind}{bits}": bits // 8 for kind in "usf" for bits in (8, 16, 32, 64)}


def _nvidia(kernel: Any, loops: bool) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True)
        code = ""
        if loops:
            code = subprocess.run([_tool("nvdisasm"), "-c", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage.stdout + usage.stderr)
    assert found, usage.stdout + usage.stderr
    loads: collections.Counter[int] = collections.Counter()
    stores: collections.Counter[int] = collections.Counter()
    opcodes: collections.Counter[str] = collections.Counter()
    for line in ptx.splitlines():
        match = re.match(r"\s*(?:@!?%p\d+ )?([a-z][a-z0-9_]*(?:[.:]+[a-z0-9_]+)*)", line)
        if match is None or not line.rstrip().endswith(";"):
            continue
        name = match[1]
        opcodes[name] += 1
        if moved := re.match(r"(ld|st)\.global\b.*?(?:\.v(\d))?\.([a-z]+\d+)$", name):
            width = int(moved[2] or 1) * _PTX_WIDTH[moved[3]]
            (loads if moved[1] == "ld" else stores)[width] += 1
        elif re.match(r"cp\.async\.c[ag]\b", name):
            loads[int(re.findall(r", (0x[0-9a-f]+|\d+)", line)[0], 0)] += 1
    return {
        "registers": int(found[1]),
        "stack": int(found[2]) + int(found[3]),
        "loads": loads,
        "stores": stores,
        "tensor": {k: n for k, n in opcodes.items() if re.match(r"mma\.|wgmma\.mma|tcgen05\.mma", k)},
        "opcodes": opcodes,
        "loop": _shortest_loop(code),
    }


def _shortest_loop(code: str) -> int:
    """Instructions of the shortest loop in what nvdisasm prints, of those with tensor-core instructions if there are any."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(names)
        elif found := re.search(
            r"/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);", line
        ):
            names.append(found[1])
            back = re.search(r"\.L_x_\d+", found[2])
            if found[1].startswith("BRA") and back and back[0] in labels:
                loops.append(names[labels[back[0]] :])
    with_tensor = [loop for loop in loops if any("MMA" in name for name in loop)]
    return min((len(loop) for loop in with_tensor or loops), default=0)


_GCN_WIDTH = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "sshort": 2}
_GCN_WIDTH |= {"ubyte": 1, "sbyte": 1, "byte": 1}


def _amd(kernel: Any, loops: bool) -> dict[str, Any]:
    text = kernel.asm["amdgcn"]

    def metadata(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        return int(found[1])

    loads: collections.Counter[int] = collections.Counter()
    stores: collections.Counter[int] = collections.Counter()
    opcodes: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        match = re.match(r"\s+([vs]_[a-z0-9_]+|(?:global|buffer|flat|ds|scratch)_[a-z0-9_]+)\b", line)
        if match is None:
            continue
        opcodes[match[1]] += 1
        if moved := re.match(r"(?:global|buffer|flat)_(load|store)_(?:lds_)?([a-z]+\d?x?\d?)", match[1]):
            (loads if moved[1] == "load" else stores)[_GCN_WIDTH[moved[2]]] += 1
    return {
        "registers": metadata("vgpr_count"),
        "stack": metadata("private_segment_fixed_size"),
        "loads": loads,
        "stores": stores,
        "tensor": {k: n for k, n in opcodes.items() if k.startswith("v_mfma")},
        "opcodes": opcodes,
    }


@functools.cache
def _described(kernel: Any, loops: bool) -> dict[str, Any]:
    read = _nvidia if "ptx" in kernel.asm else _amd
    return {"warps": kernel.metadata.num_warps, "shared": kernel.metadata.shared, **read(kernel, loops)}


def _compile(case: dict[str, Any], target: str) -> list[dict[str, Any]] | str:
    module, function = case["call"].split(":")
    try:
        with recording(target) as launched:
            getattr(importlib.import_module(module), function)(**case["arguments"])
        return [
            {"name": name, "seconds": s, **_described(kernel, case["loops"])} for name, kernel, s in launched
        ]
    except Exception as error:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__  # type: ignore[assignment]
        return f"{type(cause).__name__}: {str(cause).strip()[-1500:]}"


def main() -> None:
    target, version, answer = sys.argv[1:]
    import triton

    assert triton.__version__.startswith(version) or version == VERSIONS[0], triton.__version__
    assert not triton.knobs.runtime.interpret
    made = {case["name"]: _compile(case, target) for case in json.load(sys.stdin)}
    Path(answer).write_text(json.dumps(made))


if __name__ == "__main__":
    main()
