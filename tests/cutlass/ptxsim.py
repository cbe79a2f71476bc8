"""Run a compiled kernel on the CPU: the front door of ``tests/cutlass/ptx``.

    memory = GlobalMemory()
    x = memory.add(array)                      # the array is aliased: results are in it afterwards
    run(ptx, (1, 1, 1), (128, 1, 1), [x, 3, 0.5], memory)

``kernel`` picks one of several entries by a part of its name. What the machine can and cannot do: ``ptx.machine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.cutlass.ptx.machine import Launch, Statistics, pack_arguments, tensor_argument
from tests.cutlass.ptx.memory import Fault, GlobalMemory
from tests.cutlass.ptx.parser import Entry, parse

__all__ = ["DSL_VERSION", "Fault", "GlobalMemory", "entry_of", "run", "tensor_argument", "why_not"]

DSL_VERSION = "4.8.1"
"""The version whose kernel parameters the simulator knows."""


def why_not() -> str | None:
    """Why the compiled kernels cannot be simulated here, or None: the reason of a skip."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        return "nvidia-cutlass-dsl is not installed"
    if installed != DSL_VERSION:
        return f"kernel parameters are known for nvidia-cutlass-dsl {DSL_VERSION}, not {installed}"
    return None


def entry_of(ptx: str, kernel: str = "") -> Entry:
    """The one entry whose name contains ``kernel``."""
    found = [entry for name, entry in parse(ptx).items() if kernel in name]
    if len(found) != 1:
        raise LookupError(f"{len(found)} kernels match {kernel!r} among {sorted(parse(ptx))}")
    return found[0]


def run(
    ptx: str | Entry,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    arguments: Sequence[Any],
    memory: GlobalMemory,
    *,
    kernel: str = "",
    shared: int = 0,
    schedule: int | None = None,
) -> Statistics:
    """Launch a kernel. Arguments are addresses and numbers, packed by the sizes of the parameters, or ready bytes."""
    entry = entry_of(ptx, kernel) if isinstance(ptx, str) else ptx
    packed = pack_arguments(entry, arguments)
    return Launch(entry, grid, block, packed, memory, shared=shared, schedule=schedule).run()
