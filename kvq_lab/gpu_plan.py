"""In what order ``gpu_check`` does things on a GPU, and how the time is shared out."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from kvq_lab.gpu_rows import Budget, Case, Row
from kvq_lab.gpu_workers import Make, Pool

FIRST = 95.5
"""Cases worth so much come before anything is timed: compiling, graphs, and the formats that are timed."""
EARLY, LATE = 0.5, 0.2
"""Of the whole time, what these may take at most; and what the timing leaves for the other formats."""


def check_cases(interpret: bool = False) -> list[Case]:
    """Everything that is checked and timed; in Triton's interpreter, everything that is checked."""
    from kvq_lab import gpu_cases

    if interpret:
        return gpu_cases.correctness(gpu_cases.Machine.interpreter())
    from kvq_lab import gpu_cutlass, gpu_graphs, gpu_timing

    machine = gpu_cases.Machine("cuda")
    cutlass = Case("codes", "CUTLASS", functools.partial(gpu_cutlass.check, machine), 40, 97.2)
    return [*gpu_cases.correctness(machine), *gpu_graphs.cases(machine), *gpu_timing.cases(), cutlass]


def tune_cases() -> list[Case]:
    """Launch parameters tried, compiled beforehand."""
    from kvq_lab import gpu_tune

    return gpu_tune.cases()


def workers() -> int:
    """Processes at a time: a core for each, and some for what they start themselves."""
    return max(1, min(14, (os.cpu_count() or 4) - 2))


def run(
    cases: Sequence[Case],
    make: Make,
    seconds: Callable[[], float],
    tell: Callable[[Row], Any],
    count: int,
) -> None:
    """What comes first side by side, then what measures time one by one, then the rest side by side.

    Args:
        make: gives ``cases``, in each worker.
        seconds: what is left of the time.
        count: of workers.
    """
    whole = seconds()
    alone = [case for case in cases if case.alone]
    first = [case for case in cases if not case.alone and case.worth >= FIRST]
    rest = [case for case in cases if not case.alone and case.worth < FIRST]
    together = whole * EARLY if alone else whole
    if first:
        rest += _pool(first, make, min(together, seconds()), tell, count, defer=True)
    if alone:
        # Not next to the processes of the others: they hold memory.
        _pool(alone, make, seconds() - (whole * LATE if rest else 0), tell, 1)
    if rest:
        _pool(rest, make, seconds(), tell, count)


def _pool(
    cases: Sequence[Case],
    make: Make,
    seconds: float,
    tell: Callable[[Row], Any],
    count: int,
    *,
    defer: bool = False,
) -> list[Case]:
    pool = Pool(count, make, (), tell)
    try:
        return pool.run(cases, Budget(seconds), defer=defer)
    finally:
        pool.close()
