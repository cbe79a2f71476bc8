"""Cases for worker processes, which import this file; they know nothing of torch, so that a worker starts at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from kvq_lab.gpu_rows import Case, DeviceLost, Row


def _right() -> Iterator[Row]:
    yield Row("codes", "first")
    yield Row("codes", "second")


def _raises() -> Iterator[Row]:
    yield Row("codes", "before")
    raise RuntimeError("does not compile")


def _loses() -> Iterator[Row]:
    raise DeviceLost(Row("codes", "astray").refuse("failed", "an illegal memory access was encountered"))


def _dies() -> Iterator[Row]:
    yield Row("codes", "alive")
    os._exit(3)


def _hangs() -> Iterator[Row]:
    time.sleep(600)
    yield Row("codes", "never")


def _process() -> Iterator[Row]:
    yield Row("codes", "process", why=f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")


def make() -> list[Case]:
    runs = {
        "right": _right,
        "raises": _raises,
        "loses": _loses,
        "dies": _dies,
        "hangs": _hangs,
        "process": _process,
    }
    return [Case("codes", name, run, 0.1, 100.0 - at) for at, (name, run) in enumerate(runs.items())]


def timed() -> list[Case]:
    """One of each kind that the plan tells apart."""

    def row(name: str) -> Iterator[Row]:
        yield Row("codes", name, why=str(os.getpid()))

    def of(name: str, worth: float, alone: bool = False, seconds: float = 0.1) -> Case:
        return Case("codes", name, lambda: row(name), seconds, worth, alone=alone)

    return [
        of("first", 100),
        of("timed", 99, alone=True),
        of("timed too", 80, alone=True),
        of("later", 70),
        of("too long", 60, seconds=1e6),
    ]


def unstartable() -> list[Case]:
    raise ImportError("no numpy here")
