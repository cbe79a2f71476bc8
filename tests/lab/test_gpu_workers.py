"""Worker processes of ``gpu_check``: what one of them does takes nothing from the others."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvq_lab import gpu_plan, gpu_workers
from kvq_lab.gpu_rows import Budget, DeviceLost, Row, attempt
from kvq_lab.gpu_workers import Pool
from tests.lab import gpu_worker_cases


def run(
    names: str, seconds: float = 60.0, count: int = 2, make: Any = gpu_worker_cases.make, **more: Any
) -> list[Row]:
    rows: list[Row] = []
    pool = Pool(count, make, (), rows.append)
    try:
        cases = [case for case in gpu_worker_cases.make() if case.name in names.split()]
        left = pool.run(cases, Budget(seconds), **more)
    finally:
        pool.close()
    assert not left or more
    return rows


def test_a_process_that_is_lost_takes_only_its_case_along() -> None:
    rows = {row.name: row for row in run("right raises loses dies process")}
    assert rows["first"].ok and rows["second"].ok and rows["before"].ok and rows["alive"].ok
    assert rows["raises"].verdict == "failed" and "does not compile" in rows["raises"].why
    assert "_raises" in rows["raises"].detail
    assert "illegal memory access" in rows["astray"].why
    assert rows["loses: the rest"].verdict == "failed" and "code 1" in rows["loses: the rest"].why
    assert rows["dies: the rest"].verdict == "failed" and "code 3" in rows["dies: the rest"].why
    assert rows["process"].why.endswith(" 1")
    assert len(rows) == 9


def test_what_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_workers, "LEAST", 0.5)
    rows = run("hangs process")
    assert {row.name: row.verdict for row in rows} == {"hangs: the rest": "failed", "process": "right"}


def test_the_end_of_the_time_ends_everything() -> None:
    begin = time.monotonic()
    rows = run("hangs right process", seconds=1.5, count=1)
    assert time.monotonic() - begin < 20
    assert {row.name: row.verdict for row in rows if row.name == "hangs: the rest"} in (
        {},
        {"hangs: the rest": "not run"},
    )
    assert not any(row.verdict == "failed" for row in rows)


def test_what_there_is_no_time_for_is_listed_or_given_back() -> None:
    rows = run("right", seconds=0.0)
    assert [(row.name, row.verdict, row.why) for row in rows] == [("right", "not run", "out of time")]
    assert run("right", seconds=0.0, defer=True) == []


def test_workers_that_cannot_start_are_not_started_for_ever() -> None:
    rows = run("right process", make=gpu_worker_cases.unstartable, count=1)
    assert [row.why for row in rows] == ["no worker process could be started"] * 2


def test_a_worker_that_does_not_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_workers, "START", 0.0)
    monkeypatch.setattr(gpu_workers, "wait", lambda pipes, timeout: [])
    rows = run("right", count=1)
    assert [row.why for row in rows] == ["no worker process could be started"]


def test_what_is_timed_runs_alone_and_in_between() -> None:
    rows: list[Row] = []
    end = time.monotonic() + 30
    gpu_plan.run(
        gpu_worker_cases.timed(), gpu_worker_cases.timed, lambda: end - time.monotonic(), rows.append, 2
    )
    assert [row.name for row in rows] == ["first", "timed", "timed too", "later", "too long"]
    assert rows[1].why == rows[2].why, "both in one process"
    assert rows[4].verdict == "not run"
    assert gpu_plan.workers() >= 1


def test_what_a_kernel_left_behind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is a row; a GPU that is lost ends the case."""
    import torch

    def check(row: Row) -> Row:
        raise RuntimeError("wrong launch")

    assert attempt(Row("codes", "x"), check).verdict == "failed"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert attempt(Row("codes", "x"), check).verdict == "failed"

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(DeviceLost, match="wrong launch"):
        attempt(Row("codes", "x"), check)
