"""Faults planted into the compiled PTX, each of which the checks have to catch.

Every one of them is a change that still runs. Without it the same case passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.cutlass.ptxsim import Fault, why_not
from tests.ops.attention_cases import Case, case

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

from cutlass_kernels import attention_kernel
from tests.cutlass import attention_runs
from tests.cutlass.attention_runs import run_case

Change = Callable[[str], str]


def _case(**options: object) -> Case:
    torch.manual_seed(5)
    return case(
        "nvfp4", heads=8, kv_heads=2, queries=2, tokens=192, dim=128, dtype=torch.float16, lengths=[181, 70], **options
    )  # fmt: skip


def _masked() -> Case:
    torch.manual_seed(6)
    c = _case(mask=torch.rand(2, 1, 2, 192) < 0.5, causal=True, sinks=torch.zeros(8) + 4.0, window=150)
    return c


def swap(pattern: str, by: str, count: int = 0) -> Change:
    return lambda ptx: re.sub(pattern, by, ptx, count=count)


def in_loop(change: Change) -> Change:
    """The change, only between the first and the last product: where tokens are worked on."""

    def apply(ptx: str) -> str:
        first, last = ptx.index("mma.sync"), ptx.rindex("mma.sync")
        return ptx[:first] + change(ptx[first:last]) + ptx[last:]

    return apply


def in_merge(change: Change) -> Change:
    def apply(ptx: str) -> str:
        at = next(m.start() for m in re.finditer(r"\.visible \.entry \S*merge_kernel", ptx))
        end = ptx.find(".visible .entry", at + 10)
        end = len(ptx) if end < 0 else end
        return ptx[:at] + change(ptx[at:end]) + ptx[end:]

    return apply


R = r"(%r\d+)"
FAULTS: dict[str, tuple[Callable[[], Case], int, Change]] = {
    # name: (case, page, change)
    "operands of the product swapped": (
        _case, 0, swap(rf"(mma\.sync\S+\s+\{{[^}}]*\}},\s*\{{[^}}]*\}}, \{{){R}, {R}\}}", r"\1\3, \2}"),
    ),
    "rows of the queries swapped": (
        _case, 0, swap(rf"(mma\.sync\S+\s+\{{[^}}]*\}},\s*\{{){R}, {R}, ", r"\1\3, \2, "),
    ),
    "weights swapped on their way to fp16": (_case, 0, in_loop(swap(rf"(cvt\.rn\.f16x2\.f32\s+%r\d+), {R}, {R}", r"\1, \3, \2"))),
    "codes of the wrong byte": (_case, 0, swap(r"(cvt\.rn\.f16x2\.e2m1x2\s+%r\d+), b1;", r"\1, b2;")),
    "block scale dropped": (_case, 0, in_loop(swap(rf"mul\.rn\.f16x2\s+{R}, {R}, {R};", r"mov.b32 \1, \2;"))),
    "one block scale dropped": (_case, 0, in_loop(swap(rf"mul\.rn\.f16x2\s+{R}, {R}, {R};", r"mov.b32 \1, \2;", 1))),
    "end of the sequence dropped": (_case, 0, swap(rf"min\.s32\s+{R}, {R}, {R};", r"mov.b32 \1, \2;")),
    "clamp to the last token dropped": (_case, 16, in_loop(swap(rf"min\.s32\s+{R}, {R}, {R};", r"mov.b32 \1, \2;"))),
    "barriers dropped": (_case, 0, swap(r"bar\.sync\s+0;", "")),
    "first barrier dropped": (_case, 0, swap(r"bar\.sync\s+0;", "", 1)),
    "shuffle from the wrong lane": (_case, 0, in_loop(swap(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 2,", r"\1, 8,"))),
    "one shuffle of many": (_case, 0, in_loop(swap(r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+), 1,", r"\1, 4,", 1))),
    "output not brought to the new largest score": (
        _case, 0, in_loop(swap(rf"ex2\.approx\.ftz\.f32\s+{R}, {R};", r"mov.b32 \1, 0f3F800000;", 1)),
    ),
    "mask ignored": (_masked, 0, in_loop(swap(r"setp\.ne\.b16\s+(%p\d+), (%rs\d+), 0;", r"setp.ne.b16 \1, 1, 0;"))),
    "weights of splits ignored": (
        _case, 0, in_merge(swap(rf"ex2\.approx\.ftz\.f32\s+{R}, {R};", r"mov.b32 \1, 0f3F800000;")),
    ),
    "sink ignored": (_masked, 0, in_merge(swap(rf"ex2\.approx\.ftz\.f32\s+{R}, {R};", r"mov.b32 \1, 0f00000000;", 1))),
    "scale of the tensor ignored": (_case, 0, in_merge(swap(rf"mul\.f32\s+{R}, {R}, {R};(?!.*mul\.f32)", r"mov.b32 \1, \2;"))),
    "page of the block before": (_case, 16, swap(rf"shr\.u32\s+{R}, {R}, 4;", r"shr.u32 \1, \2, 5;")),
    "token within the page lost": (_case, 16, swap(rf"and\.b32\s+{R}, {R}, 15;", r"and.b32 \1, \2, 7;")),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_planted_fault_is_caught(name: str) -> None:
    make, page, change = FAULTS[name]
    with pytest.raises((Fault, AssertionError)) as caught:
        # One warp far ahead of the others, where it is about them; all of them step by step is faster to simulate.
        run_case(make(), page=page, schedule=1 if "barrier" in name else 2, splits=2, change=change)
    assert "has no place" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "page", "schedule"), [(_case, 0, 1), (_case, 0, 2), (_case, 16, 2), (_masked, 0, 2)]
)
def test_the_same_cases_pass_without_a_fault(make: Callable[[], Case], page: int, schedule: int) -> None:
    assert 0 < run_case(make(), page=page, schedule=schedule, splits=2).used <= 1


def test_too_little_shared_memory_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    less = attention_kernel.shared_bytes(128) - 64  # the gaps at the end are never touched
    monkeypatch.setattr(attention_runs, "shared_bytes", lambda head_dim: less)
    with pytest.raises(Fault, match="shared address"):
        run_case(_case(), splits=1)


def test_a_split_without_tokens_has_to_say_so() -> None:
    """The largest score of an empty split is written by nobody: merging reads what was never stored."""
    change = swap(r"st\.global\.\S+\s+\[[^\]]+\], [^;]*(?:-8388608|0fFF800000|0xFF800000)[^;]*;", "")
    with pytest.raises(Fault, match="unwritten"):
        run_case(_case(), splits=3, change=change)
