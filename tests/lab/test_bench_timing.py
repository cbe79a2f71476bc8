"""Contenders are checked before they are timed and after; times and ratios come from the clock alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("numpy", reason="the lab extra is not installed")

from kvq_lab.bench_bandwidth import Bandwidth, cache_bytes
from kvq_lab.bench_rows import Row
from kvq_lab.bench_timing import SAMPLE_SECONDS, Contender, Expected, rounds_within, time_contenders
from tests.lab.bench_cases import Clock, Ticking

ONE = torch.ones(2, 3)


def contender(
    name: str, call: Callable[[], object], clock: Clock, seconds: float, expected: Expected | None = None
) -> Contender:
    """Its calls take ``seconds`` by ``clock``."""

    def run() -> object:
        clock.now += seconds
        return call()

    return Contender(Row("decode", name), [run], expected)


def right() -> Expected:
    return Expected.of(ONE.double(), torch.float32)


# -- right or not -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_rounding_of_a_dtype_is_allowed_and_no_more(dtype: torch.dtype) -> None:
    value = torch.randn(64, dtype=torch.float64)
    expected = Expected.of(value, dtype)
    rounded = value.to(dtype)
    assert expected.compare(rounded)[0] == ""
    if dtype is torch.float32:
        assert expected.compare((value + 0.9e-5 * (1 + value.abs())).float())[0] == ""
        further = value + 1.1e-5 * (1 + value.abs())
    else:
        # Two neighbours of the nearest number away.
        further = rounded.double() + 2 * torch.finfo(dtype).eps * value.abs() + 2e-5
    wrong, error, allowed = expected.compare(further.to(dtype))
    assert wrong.startswith("wrong: max error") and error > allowed


@pytest.mark.parametrize(
    ("got", "complaint"),
    [
        (torch.tensor([[1.0, 1, 1], [1, float("nan"), 1]]), "1 values are not finite"),
        (torch.ones(3, 2), r"torch.float32 \(3, 2\) instead of torch.float32 \(2, 3\)"),
        (ONE.double(), "torch.float64"),
        (None, "NoneType"),
        (torch.tensor([[1.0, 1, 1], [1, 1, 1.001]]), "max error 0.001, allowed 2e-05"),
    ],
)
def test_what_is_wrong_is_said(got: object, complaint: str) -> None:
    import re

    assert re.search(complaint, right().compare(got)[0])


def test_a_wrong_contender_has_no_speed_and_the_others_do() -> None:
    clock = Clock()
    base = contender("base", lambda: ONE, clock, 0.004, right())
    good = contender("good", lambda: ONE, clock, 0.002, right())
    bad = contender("bad", lambda: ONE + 1e-3, clock, 0.001, right())
    done: list[int] = []
    time_contenders([base, good, bad], base, 5, clock=clock, advance=done.append)
    assert bad.row.status == "wrong: max error 0.001, allowed 2e-05"
    assert (bad.row.seconds, bad.row.ratio, bad.row.rounds) == (None, None, None)
    assert bad.row.max_error == pytest.approx(1e-3, rel=1e-3)
    assert good.row.ok and good.row.ratio == pytest.approx(2.0)
    assert sum(done) == 3


def test_one_that_becomes_wrong_while_it_is_timed_loses_its_speed() -> None:
    clock, left = Clock(), iter(range(4))
    # Right at first, for the check and some calls.
    spoiled = contender(
        "spoiled", lambda: ONE if next(left, None) is not None else ONE * 2, clock, 0.01, right()
    )
    time_contenders([spoiled], None, 5, clock=clock)
    assert spoiled.row.wrong and spoiled.row.seconds is None


def test_one_wrong_copy_of_several_is_enough() -> None:
    contender = Contender(Row("decode", "x"), [lambda: ONE, lambda: ONE * 2], right())
    assert not contender.check() and contender.row.wrong


def test_raising_is_wrong_where_something_is_expected_and_not_run_elsewhere() -> None:
    def fails() -> None:
        raise RuntimeError("no such kernel\nand more")

    clock = Clock()
    ours, theirs = contender("a", fails, clock, 1, right()), contender("b", fails, clock, 1)
    time_contenders([ours, theirs], None, 3, clock=clock)
    assert ours.row.status == "wrong: RuntimeError: no such kernel"
    assert theirs.row.status == "not run: RuntimeError: no such kernel"


# -- fast or not --------------------------------------------------------------------------------------------------------


def test_times_ratios_and_quartiles_come_from_the_clock() -> None:
    clock = Clock()
    base = contender("base", lambda: ONE, clock, 0.004)
    fast = contender("fast", lambda: ONE, clock, 0.002)
    slow = contender("slow", lambda: ONE, clock, 0.4)
    time_contenders([base, fast, slow], base, 6, clock=clock)
    for one, seconds in ((base, 0.004), (fast, 0.002), (slow, 0.4)):
        assert one.row.seconds == pytest.approx(seconds)
        assert one.row.seconds_low == pytest.approx(seconds) == one.row.seconds_high
        assert one.row.seconds_best == pytest.approx(seconds)
        assert one.row.ratio == pytest.approx(0.004 / seconds)
        assert (one.row.base, one.row.rounds) == ("base", 6)


def test_short_calls_fill_a_sample_and_count_singly() -> None:
    clock, calls = Clock(), []
    short = SAMPLE_SECONDS / 10
    copies = [contender("x", lambda i=i: calls.append(i), clock, short).calls[0] for i in range(3)]
    one = Contender(Row("decode", "x"), copies)
    time_contenders([one], None, 4, clock=clock)
    assert one.row.seconds == pytest.approx(short)
    # A check, an estimate, ten calls in each of a warm-up and four rounds, a check; copies take turns across samples.
    assert len(calls) == 1 + 1 + 10 * 5 + 1
    assert calls[2:-1] == ([0, 1, 2] * 17)[:50]


def test_slow_contenders_get_fewer_rounds_within_the_budget() -> None:
    clock = Clock()
    base = contender("base", lambda: ONE, clock, 0.01)
    slow = contender("slow", lambda: ONE, clock, 1.0)
    time_contenders([base, slow], base, 20, budget=5.0, clock=clock)
    assert (base.row.rounds, slow.row.rounds) == (20, 4)
    assert slow.row.ratio == pytest.approx(0.01)
    assert rounds_within(100.0, 5.0, 20) == 3
    assert rounds_within(100.0, 5.0, 2) == 2
    assert rounds_within(0.0, 5.0, 20) == 20


def test_a_share_is_of_the_time_of_the_one_named() -> None:
    clock = Clock()
    append = contender("append", lambda: ONE, clock, 0.003)
    decode = contender("decode", lambda: ONE, clock, 0.06)
    time_contenders([append, decode], None, 3, clock=clock, shares={"append": "decode"})
    assert (append.row.share, append.row.share_of) == (pytest.approx(0.05), "decode")
    assert (decode.row.share, decode.row.ratio) == (None, None)


def test_without_a_base_that_is_right_there_are_times_and_no_ratios() -> None:
    clock = Clock()
    base = contender("base", lambda: ONE * 2, clock, 0.004, right())
    good = contender("good", lambda: ONE, clock, 0.002, right())
    time_contenders([base, good], base, 3, clock=clock)
    assert base.row.wrong
    assert good.row.seconds == pytest.approx(0.002) and good.row.ratio is None


# -- bandwidth ----------------------------------------------------------------------------------------------------------


def test_bandwidth_is_the_best_pass_over_the_whole_buffer() -> None:
    bandwidth = Bandwidth(threads=2, buffer=2**16)
    # Two looks at this clock are a millisecond apart.
    best = bandwidth.measure(passes=2, clock=Ticking())
    assert best == pytest.approx(2**16 / 0.001)
    assert bandwidth.passes == 8 and bandwidth.reader
    bandwidth.best *= 2
    assert bandwidth.measure(passes=1, clock=Ticking()) == pytest.approx(2 * 2**16 / 0.001)


def test_the_buffer_is_much_larger_than_the_caches() -> None:
    found = Bandwidth.of_this_machine(2)
    assert cache_bytes() >= 2**14
    assert 2**28 <= found.buffer <= 2**30
    assert found.buffer >= 8 * cache_bytes() or found.buffer == 2**30


def test_a_kernel_that_reads_faster_than_memory_raises_doubts() -> None:
    bandwidth = Bandwidth(threads=2, buffer=2**28, best=10e9)
    assert bandwidth.doubts(10.4e9) is None
    assert "20.0 GB/s, more than the 10.0 GB/s" in str(bandwidth.doubts(20e9))
