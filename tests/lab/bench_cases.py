"""What the tests of ``kvq bench`` share: a clock that is told the time, implementations that come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from kvq_ops import registry
from kvq_ops.registry import Implementation


class Clock:
    """Stands still except when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(Clock):
    """Moves on by the same amount whenever it is asked."""

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@contextlib.contextmanager
def implementation(op: str, run: Callable[..., Any], refuses: Callable[..., str | None]) -> Iterator[None]:
    """An implementation called ``broken`` that is preferred to all others, for as long as this lasts."""
    rows = registry._implementations[op]
    before = list(rows)
    registry.register(Implementation("broken", op, run, refuses, priority=1000))
    try:
        yield
    finally:
        rows[:] = before
        registry._choices.clear()


def only(name: str) -> Callable[[registry.Request], str | None]:
    """Refuses every format but one."""
    return lambda request: None if {f.name for f in request.formats} == {name} else "not this format"
