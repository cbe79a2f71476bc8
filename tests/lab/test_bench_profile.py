"""``kvq bench --profile``: stages of the kernels, counted in cycles."""

from __future__ import annotations

import pytest
import torch

import kvq_ops
from kvq_lab import bench_profile
from kvq_lab.bench_attention import Shape
from kvq_ops.cpu import library


@pytest.mark.slow
def test_every_stage_is_counted_and_the_kernels_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := library.why_not():
        pytest.skip(reason)
    monkeypatch.setattr(bench_profile, "copies", lambda nbytes: 2)
    shape = Shape(1, 4, 2, 64)
    pairs = [kvq_ops.parse_kv_format("int8_per_token_head"), kvq_ops.parse_kv_format("int4_group32")]
    before, threads = library.loaded(), torch.get_num_threads()
    found = bench_profile.profiles(pairs, shape, 8192, seconds=0.05)
    assert [(p.format, p.where) for p in found] == [
        (str(pair), w) for pair in pairs for w in ("memory", "cache")
    ]
    for p in found:
        assert set(p.cycles) == set(bench_profile.STAGES) and min(p.cycles.values()) > 0 < p.gigahertz
    text = bench_profile.show(found, shape)
    assert text.count("\n") == 3 + len(found) and "int4_group32 | cache" in text
    # The kernels with clocks are nobody else's.
    assert library.why_not() is None and library.loaded() == before and torch.get_num_threads() == threads
