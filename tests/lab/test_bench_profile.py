"""``kvq bench --profile``: stages of the kernels, counted in cycles."""

from __future__ import annotations

import pytest
import torch

import kvq_ops
from kvq_lab import bench_profile
from kvq_lab.bench_attention import Shape
from kvq_ops.cpu import library


@pytest.mark.slow
def test_stages_add_up_to_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := library.why_not():
        pytest.skip(reason)
    monkeypatch.setattr(bench_profile, "copies", lambda nbytes: 2)
    shape = Shape(1, 4, 2, 64)
    pairs = [kvq_ops.parse_kv_format("int8_per_token_head"), kvq_ops.parse_kv_format("int4_group32")]
    before, threads = library.loaded(), torch.get_num_threads()
    for _ in range(5):  # a machine that is busy with something else stretches one of two clocks
        found = bench_profile.profiles(pairs, shape, 8192, seconds=0.05)
        # Of the call, stages leave arguments on the way down, threads and the clock.
        shares = [sum(p.cycles.values()) / (p.nanoseconds * p.gigahertz) for p in found]
        if all(0.2 < share < 1.1 for share in shares):
            break
    else:
        raise AssertionError(shares)
    assert [(p.format, p.where) for p in found] == [
        (str(pair), w) for pair in pairs for w in ("memory", "cache")
    ]
    for p in found:
        assert set(p.cycles) == set(bench_profile.STAGES) and min(p.cycles.values()) > 0
        # Scores and values are what there is to do.
        assert p.cycles["scores"] + p.cycles["values"] > p.cycles["merge"] + p.cycles["prepare"]
    text = bench_profile.show(found, shape)
    assert text.count("\n") == 3 + len(found) and "int4_group32 | cache" in text
    # The kernels with clocks are nobody else's.
    assert library.why_not() is None and library.loaded() == before and torch.get_num_threads() == threads
