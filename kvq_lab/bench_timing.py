"""Contenders of a benchmark: each is checked, then timed in turn with the others, and speaks of no speed if it is not right."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvq_lab.bench_rows import Row
from kvq_lab.evaluate import interleaved

Clock = Callable[[], float]

# A sample shorter than this is made of several calls, so that the clock and the loop around it do not count.
SAMPLE_SECONDS = 2e-3
# Contenders whose samples take this many times the base's are timed apart, in fewer rounds.
SLOW = 4.0
FEWEST_ROUNDS = 3


# -- right or not -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a result must be: ``value`` in float64, each element to within ``limit``, in ``dtype``."""

    value: Tensor
    limit: Tensor
    dtype: torch.dtype

    @staticmethod
    def of(value: Tensor, dtype: torch.dtype, further: Tensor | float = 0.0) -> Expected:
        """fp32 arithmetic (1e-5, absolute and relative), the rounding of ``dtype``, and what else is allowed."""
        limit = 1e-5 * (1 + value.abs()) + further
        if dtype is not torch.float32:
            info = torch.finfo(dtype)
            limit = limit + info.eps / 2 * value.abs() + info.smallest_normal * info.eps / 2
        return Expected(value, limit, dtype)

    def compare(self, got: Any) -> tuple[str, float | None, float | None]:
        """(``""`` or what is wrong, the error that is largest relative to what is allowed, what is allowed there)."""
        if not isinstance(got, Tensor) or got.shape != self.value.shape or got.dtype != self.dtype:
            shown = f"{got.dtype} {tuple(got.shape)}" if isinstance(got, Tensor) else type(got).__name__
            return f"wrong: {shown} instead of {self.dtype} {tuple(self.value.shape)}", None, None
        error = (got.double() - self.value).abs()
        if not bool(error.isfinite().all()):
            return f"wrong: {int((~error.isfinite()).sum())} values are not finite", None, None
        if error.numel() == 0:
            return "", 0.0, 0.0
        limit = self.limit.expand_as(error)
        worst = int((error / limit).argmax())
        found, allowed = float(error.flatten()[worst]), float(limit.flatten()[worst])
        wrong = f"wrong: max error {found:.3g}, allowed {allowed:.3g}" if found > allowed else ""
        return wrong, found, allowed


@dataclasses.dataclass
class Contender:
    """Something to be timed.

    Attributes:
        row: where the result goes.
        calls: the same work on distinct copies of the data, taken in turn, so that caches hold no more than they would in
            a model of many layers.
        expected: what a call must return; ``None`` where there is nothing to hold it against, which the row then says.
        result: of what a call returned, the part that is compared.
        repeat: calls of one sample; as many as fill ``SAMPLE_SECONDS`` unless given.
    """

    row: Row
    calls: Sequence[Callable[[], Any]]
    expected: Expected | None = None
    result: Callable[[Any], Any] = lambda got: got
    repeat: int | None = None

    def check(self) -> bool:
        """Run the first copy's call and the last one's and compare; the row says what is wrong."""
        if not self.row.ok:
            return False
        ends = [0] if self.expected is None else sorted({0, len(self.calls) - 1})
        for call in (self.calls[at] for at in ends):
            try:
                got = self.result(call())
            except Exception as error:  # whatever a peer or a kernel raises is its row's result
                word = "not run" if self.expected is None else "wrong"
                self.row.refuse(f"{word}: {type(error).__name__}: {_first_line(error)}")
                return False
            if self.expected is not None and not self._compare(got):
                return False
        return True

    def _compare(self, got: Any) -> bool:
        assert self.expected is not None
        wrong, error, allowed = self.expected.compare(got)
        if error is not None and (self.row.max_error is None or error > self.row.max_error or wrong):
            self.row.max_error, self.row.allowed_error = error, allowed
        if wrong:
            self.row.refuse(wrong)
        return not wrong


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]


# -- fast or not --------------------------------------------------------------------------------------------------------


def rounds_within(seconds: float, budget: float, rounds: int) -> int:
    """Rounds of ``seconds`` each that fit into ``budget``, no more than asked for and no fewer than three."""
    if rounds * seconds <= budget:
        return rounds
    return max(int(budget / seconds), min(rounds, FEWEST_ROUNDS))


def time_contenders(
    contenders: Sequence[Contender],
    base: Contender | None,
    rounds: int,
    *,
    budget: float = math.inf,
    clock: Clock = time.perf_counter,
    shares: dict[str, str] | None = None,
    advance: Callable[[int], Any] = lambda count: None,
) -> None:
    """Check the contenders, time those that are right, fill in their rows, and check once more.

    Args:
        base: the one (of ``contenders``) that ratios refer to.
        rounds: of each; fewer, but three at least, where they would take longer than ``budget`` seconds.
        shares: for a contender's name that of another, whose time its own is divided by.
        advance: told of each contender that is done.
    """
    right = []
    for contender in contenders:
        if contender.check():
            right.append(contender)
        else:
            advance(1)
    if base is not None and base not in right:
        base = None
    counts, estimates = {}, {}
    for contender in right:
        begin = clock()
        contender.calls[0]()
        taken = max(clock() - begin, 1e-9)
        count = contender.repeat or max(1, min(256, math.ceil(SAMPLE_SECONDS / taken)))
        counts[id(contender)], estimates[id(contender)] = count, taken * count
    groups = _groups(right, base, estimates, shares or {})
    for group in groups:
        seconds = sum(estimates[id(contender)] for contender in group)
        number = rounds_within(seconds, budget, rounds)
        _time_group(group, base, number, counts, clock, shares or {})
        for contender in group:
            # A race, or a call that spoils what it reads, shows after many calls rather than at the first.
            contender.check()
        advance(len(group) - (group is not groups[0]))


def _groups(
    right: list[Contender], base: Contender | None, estimates: dict[int, float], shares: dict[str, str]
) -> list[list[Contender]]:
    """Those about as fast as the base, and those much slower with the base once more."""
    if base is None or shares:
        return [right] if right else []
    limit = SLOW * max(estimates[id(base)], SAMPLE_SECONDS)
    quick = [contender for contender in right if estimates[id(contender)] <= limit]
    slow = [contender for contender in right if estimates[id(contender)] > limit]
    return [quick, [base, *slow]] if slow else [quick]


def _time_group(
    group: Sequence[Contender],
    base: Contender | None,
    rounds: int,
    counts: dict[int, int],
    clock: Clock,
    shares: dict[str, str],
) -> None:
    def sample(contender: Contender) -> Callable[[], None]:
        turns, count = itertools.cycle(contender.calls), counts[id(contender)]

        def run() -> None:
            for call in itertools.islice(turns, count):
                call()

        return run

    timings = interleaved(
        {str(at): sample(contender) for at, contender in enumerate(group)}, rounds, clock=clock
    )
    samples = {
        id(contender): [taken / counts[id(contender)] for taken in timings[str(at)].samples]
        for at, contender in enumerate(group)
    }
    names = {contender.row.name: contender for contender in group}
    for contender in group:
        row, own = contender.row, samples[id(contender)]
        if contender is base and row.seconds is not None:
            continue  # timed with the quick ones already
        row.seconds, row.seconds_best, row.rounds = statistics.median(own), min(own), rounds
        if len(own) > 1:
            row.seconds_low, _, row.seconds_high = statistics.quantiles(own, n=4, method="inclusive")
        if base is not None:
            row.base, row.ratio = base.row.name, _median_quotient(samples[id(base)], own)
        whole = shares.get(row.name)
        if whole in names:
            row.share_of, row.share = whole, _median_quotient(own, samples[id(names[whole])])


def _median_quotient(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    quotients = [a / b if b else math.inf for a, b in zip(numerators, denominators, strict=True)]
    return statistics.median(quotients)
