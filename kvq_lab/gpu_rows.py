"""Cases of ``gpu_check``, what they found, and the time that they may take."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass
class Row:
    """One line of the table.

    Attributes:
        section: ``codes``, ``dequantize``, ``attention``, ``graphs``, ``decode``, ``prefill``, ``append`` or ``peer``.
        name: what ran.
        verdict: ``right``, ``wrong``, ``failed`` (it raised), ``not run``, or ``timed``.
        why: what is wrong, or why it did not run.
        error, allowed: where the error is largest relative to what is allowed.
        seconds: median of a call.
        bytes: that a call has to read, every plane counted.
        fraction: ``bytes / seconds`` over what a copy moves in a second.
        against: times of others over this one's, by name.
    """

    section: str
    name: str
    verdict: str = "right"
    why: str = ""
    format: str = ""
    batch: int | None = None
    tokens: int | None = None
    queries: int | None = None
    error: float | None = None
    allowed: float | None = None
    seconds: float | None = None
    bytes: int | None = None
    fraction: float | None = None
    against: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.verdict in ("right", "timed")

    def refuse(self, verdict: str, why: str) -> Row:
        """Say what is wrong; a speed that was measured is taken back."""
        self.verdict, self.why = verdict, " ".join(why.split())[:300]
        self.seconds = self.fraction = None
        self.against = {}
        return self


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to do, how long it may be expected to take, and how much it is worth.

    Attributes:
        run: returns rows; whatever it raises becomes a row that says so.
        seconds: expected, compilation included.
        worth: cases run in falling order of it.
    """

    section: str
    name: str
    run: Callable[[], Sequence[Row]]
    seconds: float
    worth: float


class Budget:
    """Time that is left, by a clock that only goes on."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.end = clock, clock() + seconds

    @property
    def left(self) -> float:
        return self.end - self.clock()


def run_cases(
    cases: Sequence[Case], budget: Budget, tell: Callable[[Row], Any] = lambda row: None
) -> list[Row]:
    """Run what there is time for, the worthiest first; the rest is listed as not run.

    A case starts only when it can be expected to end in time. What is expected is corrected by what cases took so far.
    """
    rows: list[Row] = []
    slower = 1.0
    for case in sorted(cases, key=lambda case: -case.worth):
        if case.seconds * slower > budget.left:
            found: Sequence[Row] = [Row(case.section, case.name, "not run", "out of time")]
        else:
            begin = budget.clock()
            try:
                found = case.run()
            except (
                Exception
            ) as error:  # a kernel that does not compile, a peer that does not fit: the row says so
                found = [Row(case.section, case.name).refuse("failed", f"{type(error).__name__}: {error}")]
            taken = budget.clock() - begin
            slower = max(1.0, 0.7 * slower + 0.3 * taken / max(case.seconds, 0.1))
        for row in found:
            rows.append(row)
            tell(row)
    return rows


def table(rows: Sequence[Row]) -> str:
    """All rows, aligned, without anything that a terminal must know."""
    head = (
        "section",
        "what",
        "verdict",
        "ms",
        "of copy",
        "x SDPA bf16",
        "x dequantize+SDPA",
        "error/allowed",
        "why",
    )
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        lines.append(
            (
                row.section,
                row.name,
                row.verdict,
                "" if row.seconds is None else f"{row.seconds * 1e3:.3f}",
                "" if row.fraction is None else f"{row.fraction:.0%}",
                *(
                    "" if name not in row.against else f"{row.against[name]:.2f}"
                    for name in ("SDPA bf16", "dequantize+SDPA")
                ),
                "" if row.error is None or not row.allowed else f"{row.error / row.allowed:.2f}",
                row.why[:80],
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
