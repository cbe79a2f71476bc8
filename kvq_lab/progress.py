"""Progress on stderr: a live bar on a terminal, plain lines in a log."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int], None]


class Stages:
    """Announces stages of work and how far each is.

    On a terminal each stage is a bar that stays with its time; elsewhere a line says that a stage
    begins and further lines say when a quarter of it is done.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.console = Console(file=stream or sys.stderr, highlight=False)
        self.clock = clock
        self.begin = clock()

    def _line(self, text: str) -> None:
        self.console.print(f"[{self.clock() - self.begin:4.0f} s] {text}", markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def stage(self, name: str, total: int) -> Iterator[Advance]:
        """A stage of ``total`` units; yields a function that is told how many more are done."""
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            with Progress(*columns, console=self.console) as progress:
                task = progress.add_task(name, total=total)
                yield lambda count: progress.advance(task, count)
            return
        self._line(name)
        done = quarter = 0

        def advance(count: int) -> None:
            nonlocal done, quarter
            done += count
            if done * 4 // total > quarter and done < total:
                quarter = done * 4 // total
                self._line(f"{name}: {100 * done // total}%")

        yield advance
