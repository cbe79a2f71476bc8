"""Progress that fits where it is shown."""

from __future__ import annotations

import io

from kvq_lab.progress import Stages


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_plain_lines_at_each_quarter() -> None:
    stream = io.StringIO()
    now = iter(range(0, 100, 5))
    stages = Stages(stream, clock=lambda: next(now))
    with stages.stage("Scoring [int8]", 8) as advance:
        for _ in range(8):
            advance(1)
    assert stream.getvalue().splitlines() == [
        "[   5 s] Scoring [int8]",
        "[  10 s] Scoring [int8]: 25%",
        "[  15 s] Scoring [int8]: 50%",
        "[  20 s] Scoring [int8]: 75%",
    ]


def test_a_terminal_gets_a_bar(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    with Stages(stream).stage("Scoring", 2) as advance:
        advance(2)
    assert "━" in stream.getvalue()
    assert "Scoring" in stream.getvalue()
