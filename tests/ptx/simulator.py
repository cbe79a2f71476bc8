"""Run a compiled kernel on the CPU: the front door of ``tests/ptx``.

    memory = GlobalMemory()
    x = memory.add(array)                      # the array is aliased: results are in it afterwards
    run(ptx, (1, 1, 1), (128, 1, 1), [x, 3, 0.5], memory)

``kernel`` picks one of several entries by a part of its name. What the machine can and cannot do: ``tests.ptx.machine``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.ptx.machine import Launch, Statistics, pack_arguments
from tests.ptx.memory import Fault, GlobalMemory
from tests.ptx.parser import Entry, parse

__all__ = ["Fault", "GlobalMemory", "entry_of", "run"]


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
    replicated: bool = False,
) -> Statistics:
    """Launch a kernel. Arguments are addresses and numbers, packed by the sizes of the parameters, or ready bytes.

    See ``Launch`` for ``schedule`` and ``replicated``.
    """
    entry = entry_of(ptx, kernel) if isinstance(ptx, str) else ptx
    packed = pack_arguments(entry, arguments)
    return Launch(
        entry, grid, block, packed, memory, shared=shared, schedule=schedule, replicated=replicated
    ).run()
