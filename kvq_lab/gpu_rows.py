"""Cases of ``gpu_check``, what they found, and the time that they may take."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


@dataclasses.dataclass
class Row:
    """One line of the table.

    Attributes:
        section: ``codes``, ``dequantize``, ``attention``, ``graphs``, ``compile``, ``tune``, ``decode``, ``prefill``,
            ``append``.
        name: what ran.
        verdict: ``right``, ``wrong``, ``failed`` (it raised), ``not run``, or ``timed``.
        why: what is wrong, or why it did not run.
        detail: the end of the traceback of what raised; for the JSON only.
        error, allowed: where the error is largest relative to what is allowed.
        seconds: median of a call on the GPU.
        host: what the CPU takes to start a call; an eager loop of shorter calls runs at this pace.
        bytes: that a call has to read, every plane counted.
        fraction: ``bytes / seconds`` over what a copy moves in a second.
        against: times of others over this one's, by name.
    """

    section: str
    name: str
    verdict: str = "right"
    why: str = ""
    detail: str = ""
    format: str = ""
    batch: int | None = None
    tokens: int | None = None
    queries: int | None = None
    error: float | None = None
    allowed: float | None = None
    seconds: float | None = None
    host: float | None = None
    bytes: int | None = None
    fraction: float | None = None
    against: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.verdict in ("right", "timed")

    def refuse(self, verdict: str, why: str) -> Row:
        """Say what is wrong; a speed that was measured is taken back."""
        self.verdict, self.why = verdict, " ".join(why.split())[:300]
        self.seconds = self.host = self.fraction = None
        self.against = {}
        return self

    def fail(self, error: BaseException) -> Row:
        """What raised, with the end of its traceback."""
        self.detail = "".join(traceback.format_exception(error))[-4000:]
        return self.refuse("failed", f"{type(error).__name__}: {error}")


class DeviceLost(RuntimeError):
    """A kernel has left this process without a usable GPU; ``row`` says which."""

    def __init__(self, row: Row) -> None:
        super().__init__(row.why)
        self.row = row


def attempt(row: Row, check: Callable[[Row], Row]) -> Row:
    """``check(row)``; what it raises is that row's failure and no other's.

    Raises:
        DeviceLost: the GPU does not answer any more after what ``check`` did to it, so that all that follows would fail.
    """
    try:
        return check(row)
    except Exception as error:
        row.fail(error)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise DeviceLost(row) from error
    return row


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to do, how long it may be expected to take, and how much it is worth.

    Attributes:
        run: gives rows, one after the other; whatever it raises becomes a row that says so.
        seconds: expected, compilation included.
        worth: cases run in falling order of it.
        alone: it measures time, so that nothing else may run.
    """

    section: str
    name: str
    run: Callable[[], Iterable[Row]]
    seconds: float
    worth: float
    alone: bool = False

    @property
    def key(self) -> str:
        return f"{self.section} {self.name}"

    def rows(self) -> Iterator[Row]:
        """What ``run`` gives, and what it raises, but for :class:`DeviceLost`, as a row."""
        try:
            yield from self.run()
        except DeviceLost:
            raise
        except Exception as error:  # a kernel that does not compile, a peer that does not fit
            yield Row(self.section, self.name).fail(error)


class Budget:
    """Time that is left, by a clock that only goes on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return self.end - self.clock()


class Pace:
    """How much longer cases take than was expected, from those that ended."""

    def __init__(self) -> None:
        self.slower = 1.0

    def expected(self, case: Case) -> float:
        return case.seconds * self.slower

    def took(self, case: Case, seconds: float) -> None:
        self.slower = max(1.0, 0.7 * self.slower + 0.3 * seconds / max(case.seconds, 0.1))


def run_cases(
    cases: Sequence[Case], budget: Budget, tell: Callable[[Row], Any] = lambda row: None
) -> list[Row]:
    """Run what there is time for in this process, the worthiest first; the rest is listed as not run.

    A case starts only when it can be expected to end in time. What is expected is corrected by what cases took so far.
    """
    rows: list[Row] = []
    pace = Pace()
    for case in sorted(cases, key=lambda case: -case.worth):
        begin = budget.clock()
        late = pace.expected(case) > budget.left
        found = [Row(case.section, case.name, "not run", "out of time")] if late else case.rows()
        for row in found:
            rows.append(row)
            tell(row)
        if not late:
            pace.took(case, budget.clock() - begin)
    return rows


def table(rows: Sequence[Row]) -> str:
    """What is not simply right, line by line and aligned; how much is right, by section."""
    head = (
        *("section", "what", "verdict", "ms", "host ms", "of copy", "x SDPA bf16", "x dequantize+SDPA"),
        *("error/allowed", "why"),
    )
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        if row.verdict == "right":
            continue
        lines.append(
            (
                row.section,
                row.name,
                row.verdict,
                *("" if t is None else f"{t * 1e3:.3f}" for t in (row.seconds, row.host)),
                "" if row.fraction is None else f"{row.fraction:.0%}",
                *(
                    "" if name not in row.against else f"{row.against[name]:.2f}"
                    for name in ("SDPA bf16", "dequantize+SDPA")
                ),
                "" if row.error is None or not row.allowed else f"{row.error / row.allowed:.2f}",
                row.why[:80],
            )
        )
    used = [i for i in range(len(head)) if i < 3 or any(line[i] for line in lines[1:])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    body = [
        "  ".join(line[i].ljust(widths[i]) for i in used).rstrip()
        for line in (lines if len(lines) > 1 else [])
    ]
    right = Counter(row.section for row in rows if row.verdict == "right")
    return "\n".join([*body, *(f"{section}: {count} right" for section, count in right.items())])
