"""Cases in processes of their own: kernels compile at the same time, and one that goes astray takes only its process with it.

A kernel that reads where nothing is leaves its whole process without a GPU, and one that never ends holds its process for good.
So every case runs in a worker; a worker that is lost is replaced, and what it was at is listed as failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from kvq_lab.gpu_rows import Budget, Case, DeviceLost, Pace, Row

Make = Callable[..., Sequence[Case]]

START = 90.0
"""Seconds that a worker may take to import everything."""
PATIENCE, LEAST = 6.0, 60.0
"""A case is given up once it took so many times what was expected, but not before so many seconds."""
ENVIRONMENT = {
    # A worker for each core: threads and compile pools of each would only fight over them.
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def serve(pipe: Connection, make: Make, arguments: tuple[Any, ...]) -> None:
    """The life of a worker: cases by key, their rows back one by one, ``None`` after the last of a case."""
    cases = {case.key: case for case in make(*arguments)}
    pipe.send(None)
    while True:
        try:
            key = pipe.recv()
        except EOFError:
            return
        try:
            for row in cases[key].rows():
                pipe.send(row)
        except DeviceLost as lost:
            pipe.send(lost.row)
            # The process that is left has no use, and its destructors would only hang or complain.
            pipe.close()
            os._exit(1)
        pipe.send(None)


@dataclasses.dataclass
class Worker:
    """A process and what it is at.

    Attributes:
        begin: when it was last given something to do; starting counts.
        ready: whether it has started.
    """

    process: Any
    pipe: Connection
    begin: float
    ready: bool = False
    case: Case | None = None

    def give(self, case: Case, now: float) -> None:
        self.case, self.begin = case, now
        self.pipe.send(case.key)

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(5)


class Pool:
    """Workers that run cases of ``make(*arguments)``.

    Args:
        count: how many at a time.
        make: a function of a module, which each worker calls for itself.
    """

    def __init__(
        self, count: int, make: Make, arguments: tuple[Any, ...] = (), tell: Callable[[Row], Any] = print
    ) -> None:
        self.count, self.make, self.arguments, self.tell = count, make, arguments, tell
        self.workers: list[Worker] = []
        self.pace = Pace()
        self.stillborn = 0

    def start(self, now: float) -> None:
        """One more worker."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self.make, self.arguments), daemon=True)
        with _environment():
            process.start()
        theirs.close()
        self.workers.append(Worker(process, ours, now))

    def close(self) -> None:
        for worker in self.workers:
            worker.stop()
        self.workers = []

    def run(self, cases: Sequence[Case], budget: Budget, *, defer: bool = False) -> list[Case]:
        """Run what there is time for, the worthiest first. Rows are told as they come.

        Args:
            defer: return what there was no time for, instead of listing it as not run.
        """
        waiting = sorted(cases, key=lambda case: -case.worth)
        left: list[Case] = []
        while waiting or any(worker.case for worker in self.workers):
            self._assign(waiting, left, budget)
            if self.stillborn >= 3 and not any(worker.ready for worker in self.workers):
                for case in waiting:
                    self.tell(Row(case.section, case.name, "failed", "no worker process could be started"))
                waiting.clear()
            self._listen(budget)
        if not defer:
            for case in left:
                self.tell(Row(case.section, case.name, "not run", "out of time"))
            left = []
        return left

    def _assign(self, waiting: list[Case], left: list[Case], budget: Budget) -> None:
        for case in [case for case in waiting if self.pace.expected(case) > budget.left]:
            waiting.remove(case)
            left.append(case)
        for worker in self.workers:
            if waiting and worker.ready and worker.case is None:
                worker.give(waiting.pop(0), budget.clock())
        busy = sum(worker.case is not None for worker in self.workers)
        while len(self.workers) < min(self.count, busy + len(waiting)) and self.stillborn < 3:
            self.start(budget.clock())

    def _listen(self, budget: Budget) -> None:
        """Wait for something to happen, and take note of it."""
        ready = wait([worker.pipe for worker in self.workers], timeout=0.2) if self.workers else []
        now = budget.clock()
        for worker in list(self.workers):
            if worker.pipe in ready:
                try:
                    self._take(worker, worker.pipe.recv(), now)
                except (EOFError, OSError):
                    worker.process.join(5)
                    self._bury(worker, f"its process ended with code {worker.process.exitcode}")
            elif worker.case is not None:
                limit = max(LEAST, PATIENCE * self.pace.expected(worker.case))
                if now - worker.begin > limit:
                    self._bury(worker, f"given up after {now - worker.begin:.0f} s")
                elif budget.left < 0:
                    self._bury(worker, "stopped at the end of the time", "not run")
            elif not worker.ready and now - worker.begin > START:
                self._bury(worker, "did not start")

    def _take(self, worker: Worker, row: Row | None, now: float) -> None:
        if row is not None:
            self.tell(row)
        elif not worker.ready:
            worker.ready = True
        elif worker.case is not None:
            self.pace.took(worker.case, now - worker.begin)
            worker.case = None

    def _bury(self, worker: Worker, why: str, verdict: str = "failed") -> None:
        self.workers.remove(worker)
        worker.stop()
        self.stillborn += not worker.ready
        if worker.case is not None:
            self.tell(Row(worker.case.section, f"{worker.case.name}: the rest", verdict, why))


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
