"""Graphs on a GPU serve sizes that change. Each case is a process without ``TRITON_INTERPRET``."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("triton", reason="the triton extra is not installed")

from kvq_ops.formats import get_format
from kvq_ops.triton_kernels.attention import count_splits, whole_waves
from kvq_ops.triton_kernels.configs import config_for
from kvq_ops.triton_kernels.spec import Spec, spec_of
from tests.triton.traces import traced as tracing

traced = functools.partial(tracing, "trace_sizes")


def more(operator: str, change: str) -> int:
    """Graphs beyond the one for the first sizes and the one for any, because they do their work in another way."""
    if "attention" in operator and change == "queries":
        # Tiles of 16, 32 and 64 rows; more rows; so many that the store is decoded once. One of these came with the second call.
        return 4
    if change in ("batch", "queries") and operator in ("append_", "paged_append_", "quantize"):
        # One row or several for a program, and one program or several to find a static scale.
        return 2
    return 0


FORMATS = [
    pytest.param("int8_per_token_head", ("attention", "append_"), id="int8"),
    pytest.param("nvfp4", (), id="nvfp4", marks=pytest.mark.slow),
    pytest.param("kivi2", (), id="kivi2", marks=pytest.mark.slow),
    pytest.param("turbo3", ("append_", "attention"), id="turbo3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("pair", "operators"), FORMATS)
def test_a_size_that_changes_is_compiled_for_once(pair: str, operators: tuple[str, ...]) -> None:
    """The first call for its sizes, as torch does, the next for any; then no number of tokens, rows or queries does it again."""
    found = traced("compiled", pair, *operators)
    assert len(found) >= 8
    for case, added in found.items():
        assert added[0] == 1 and added[1] <= 1 and sum(added[2:]) <= more(*case.split()), f"{case}: {added}"


@pytest.mark.slow
def test_a_package_computes_its_launches() -> None:
    """An AOTInductor package of a decode step for any batch and room: grids, strides and parts are expressions of both."""
    found = traced("packaged", "int8_per_token_head")
    assert found["operators"] == []
    calls = dict(found["calls"])
    assert list(calls) == ["append_rows", "attend_kernel", "merge_kernel"]
    for name, call in calls.items():
        grid = call.split(", this->")[0].split(", ")[-3:]
        assert any("s" in size for size in grid), f"{name}: {grid}"
        # Neither of the sizes at hand: a batch of 3, 100 tokens.
        assert not {"3", "3L", "100", "100L"} & set(call.split(", ")), f"{name}: {call}"
    # The parts, chosen where it runs: in the grid and in the arguments.
    assert calls["attend_kernel"].count("std::max") == 2 and calls["merge_kernel"].count("std::max") == 1


@pytest.mark.slow
def test_inductor_writes_launches_for_any_size() -> None:
    found = traced("written", "int8_per_token_head")
    assert found["compiled"] == {"append_rows": 1, "attend_kernel": 1, "merge_kernel": 1}
    launches = [line for line in found["call"].splitlines() if ".run(" in line]
    assert len(launches) == 3 and all("max(1, min(" in line for line in launches[1:])
    assert "kvq" not in found["call"] and "without CUDA" in found["error"]


# ---------------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize("slots", [80, 132, 264, 304])
def test_parts_by_arithmetic_fill_the_processors(slots: int) -> None:
    for programs in range(1, 3 * slots):
        splits = whole_waves(programs, slots)
        if programs * 5 >= slots * 4:
            assert splits == 1
        elif splits < 128:
            # A sixth, as ``whole_waves`` says; exactly, in integers.
            busy, room = programs * splits, slots * -(-programs * splits // slots)
            assert 6 * (room - busy) <= room, (programs, splits)
        else:
            assert programs * 129 <= slots * (1 + programs * 6 // slots)


def test_a_part_has_two_blocks_at_least() -> None:
    # Of 64 blocks not 32 parts: 28 are within 85 % of what 32 keep busy.
    assert [count_splits(2, blocks, 264) for blocks in (1, 2, 3, 4, 9, 64)] == [1, 1, 1, 2, 4, 28]


def test_the_tile_of_rows_that_are_not_known_holds_them() -> None:
    """Symbols stand for many numbers of rows: asked for their bound, never for their value."""
    spec = spec_of(get_format("int8_per_token_head"))
    assert isinstance(spec, Spec)

    class Rows:
        """Some number of which only comparisons may be asked."""

        def __init__(self, number: int) -> None:
            self.number = number

        def __le__(self, other: int) -> bool:
            return self.number <= other

    for rows in (2, 16, 17, 32, 33, 64):
        config = config_for("decode", spec, spec, 128, Rows(rows), torch.bfloat16, ("cuda", 90))  # type: ignore[arg-type]
        assert config == config_for("decode", spec, spec, 128, rows, torch.bfloat16, ("cuda", 90))
        assert config["block_m"] >= rows
