"""Faults planted into compiled kernels: the runs of ``test_ptx_attention`` and ``test_ptx_codecs`` have to notice each.

A compiler that forgot a barrier, a typing error in inline assembly, a layout that reads from the wrong lane.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from kvq_ops.formats import get_format
from kvq_ops.triton_kernels.append import append_
from tests.cpu.stores import empty, implementation
from tests.triton.ptx_launches import Fault, simulated
from tests.triton.stores import assert_same
from tests.triton.test_ptx_attention import BFLOAT, Run, attend

pytestmark = pytest.mark.xdist_group("ptx")

Edit = Callable[[str], str]
R = r"(%r\d+)"


def swap(pattern: str, by: str, count: int = 0) -> Edit:
    return lambda ptx: re.sub(pattern, by, ptx, count=count)


def one(pattern: str, by: str, which: int) -> Edit:
    """Only that one of all places."""

    def apply(ptx: str) -> str:
        match = list(re.finditer(pattern, ptx))[which]
        return ptx[: match.start()] + match.expand(by) + ptx[match.end() :]

    return apply


def loop(edit: Edit) -> Edit:
    """Only from the last place on where copies are waited for: the loop that loads ahead."""

    def apply(ptx: str) -> str:
        at = ptx.index("cp.async.wait_group")
        return ptx[:at] + edit(ptx[at:])

    return apply


INT8, INT4, NVFP4, FP8 = (
    Run(n) for n in ("int8_per_token_head", "int4_group32", "nvfp4", "fp8_per_token_head")
)
PLAIN, PAGES = Run("none"), Run("int4_group32", dtype=BFLOAT, page=16)
TWO = Run("int3_group32", "int2_group32")

ATTENTION: dict[str, tuple[Run, str, Edit]] = {
    # name: (run, kernel, edit)
    "no barriers": (INT8, "attend_kernel", swap(r"bar\.sync\s+0;", "")),
    "no barrier behind the wait": (INT8, "attend_kernel", swap(r"(cp\.async\.wait_group\s+\d+;\s*)bar\.sync\s+0;", r"\1")),
    "a barrier before codes are stored": (INT4, "attend_kernel", loop(one(r"bar\.sync\s+0;", "", 2))),
    "a barrier within a reduction": (INT4, "attend_kernel", loop(one(r"bar\.sync\s+0;", "", 6))),
    "no barrier in the merge": (INT8, "merge_kernel", swap(r"bar\.sync\s+0;", "")),
    "copies not waited for": (INT4, "attend_kernel", swap(r"cp\.async\.wait_group\s+\d+;", "")),
    "one copy too few waited for": (PLAIN, "attend_kernel", swap(r"cp\.async\.wait_group\s+0;", "cp.async.wait_group 1;")),
    "copies in no group": (INT8, "attend_kernel", swap(r"cp\.async\.commit_group;", "")),
    "copies beyond the end": (INT8, "attend_kernel", swap(rf"selp\.b32\s+{R}, 16, 0, (%p\d+);", r"mov.b32 \1, 16;")),
    "copies that are never made": (INT8, "attend_kernel", swap(rf"selp\.b32\s+{R}, 16, 0, (%p\d+);", r"mov.b32 \1, 0;")),
    "operands of a product swapped": (
        INT8, "attend_kernel",
        swap(rf"(mma\.sync\S+\s+\{{[^}}]*\}},\s*\{{[^}}]*\}},\s*\{{\s*){R}, {R}", r"\1\3, \2"),
    ),
    "rows of queries swapped": (
        INT4, "attend_kernel", swap(rf"(mma\.sync\S+\s+\{{[^}}]*\}},\s*\{{\s*){R}, {R}", r"\1\3, \2"),
    ),
    "one product of many": (
        PAGES, "attend_kernel",
        loop(swap(rf"(mma\.sync\S+\s+\{{[^}}]*\}},\s*\{{[^}}]*\}},\s*\{{\s*){R}, {R}", r"\1\3, \2", 1)),
    ),
    "matrices exchanged": (INT8, "attend_kernel", loop(swap(rf"(ldmatrix\S*x4\S*\s+\{{){R}, {R}", r"\1\3, \2"))),
    "a matrix not transposed": (PLAIN, "attend_kernel", swap(r"(ldmatrix\S*x4)\.trans", r"\1")),
    "a row of another matrix": (INT8, "attend_kernel", loop(swap(r"(ldmatrix\S*x4[^\[]*\[%r\d+)\]", r"\1+16]"))),
    "shuffle from the wrong lane": (INT8, "attend_kernel", swap(rf"(shfl\.sync\.bfly\.b32\s+{R}, {R}), 1,", r"\1, 4,")),
    "one shuffle of many": (INT4, "attend_kernel", loop(swap(rf"(shfl\.sync\.bfly\.b32\s+{R}, {R}), 2,", r"\1, 8,", 1))),
    "shuffle in the merge": (INT8, "merge_kernel", swap(rf"(shfl\.sync\.bfly\.b32\s+{R}, {R}), 1,", r"\1, 2,")),
    "signs of bytes": (INT8, "attend_kernel", swap(r"0x80808080", "0x80808000")),
    "order of bytes": (INT8, "attend_kernel", swap(r"0x64646464, 0x4140", "0x64646464, 0x4041")),
    "what halves of bytes hide in": (INT8, "attend_kernel", swap(r"0xE480E480", "0xE400E400")),
    "mask of nibbles": (INT4, "attend_kernel", swap(r"0x00f000f0", "0x00f000e0")),
    "table of lop3": (INT4, "attend_kernel", swap(r"(0x000f000f, 0x64006400), 0xea", r"\1, 0xe8")),
    "factor of upper nibbles": (INT4, "attend_kernel", swap(r"0x2C002C00", "0x2C002800")),
    "shift of e2m1": (NVFP4, "attend_kernel", swap(r"shr\.u32 s, a, 3;", "shr.u32 s, a, 2;")),
    "halves of e2m1": (NVFP4, "attend_kernel", swap(r"0x1404", "0x0414")),
    "sign of e4m3": (FP8, "attend_kernel", swap(r"(lop3\.b32 %r\d+, [ab]), 0x80008000", r"\1, 0x80000000")),
    "field of a quarter": (TWO, "attend_kernel", swap(r"0x00300030", "0x000c000c")),
    "queries swapped on their way to fp16": (
        PAGES, "attend_kernel", swap(rf"(cvt\.rn\.f16x2\.f32\s+%r\d+), {R}, {R}", r"\1, \3, \2"),
    ),
    "result not brought to the new largest score": (
        INT8, "attend_kernel", loop(swap(rf"ex2\.approx\S*\s+{R}, {R};", r"mov.b32 \1, 0f3F800000;", 1)),
    ),
    "parts not weighted": (INT8, "merge_kernel", swap(rf"ex2\.approx\S*\s+{R}, {R};", r"mov.b32 \1, 0f3F800000;")),
    "a part not stored": (INT8, "attend_kernel", swap(r"@%p\d+ st\.global\.v4\.b32 [^;]*;", "", 1)),
    "page of the block before": (PAGES, "attend_kernel", swap(r"(shr\.s64\s+%rd\d+, %rd\d+), 4;", r"\1, 5;")),
}  # fmt: skip


def planted(kernel: str, edit: Edit) -> Callable[[str, str], str]:
    def change(name: str, ptx: str) -> str:
        if name != kernel:
            return ptx
        changed = edit(ptx)
        if changed == ptx:
            raise LookupError("the fault has no place in this kernel")
        return changed

    return change


@pytest.mark.parametrize("name", ATTENTION)
def test_a_fault_in_attention_is_noticed(name: str) -> None:
    run, kernel, edit = ATTENTION[name]
    with pytest.raises((Fault, AssertionError)):
        attend(run, "sm_80", schedule=1, change=planted(kernel, edit))


WRITES: dict[str, tuple[str, Edit]] = {
    "approximate quotient": ("int8_per_token_head", swap(r"div\.rn\.f32", "div.full.f32")),
    "largest number of some lanes": ("int8_per_token_head", swap(rf"(shfl\.sync\.bfly\.b32\s+{R}, {R}), 2,", r"\1, 1,")),
    "no clamp": ("int4_group32", swap(rf"min\S*\.f32\s+{R}, {R}, [^;]*;", r"mov.b32 \1, \2;")),
    "nibbles exchanged": ("int4_group32", swap(r"(shl\.b(?:16|32)\s+%rs?\d+, %rs?\d+), 4;", r"\1, 3;")),
    "channels apart": ("int8_per_token_head", swap(r"(mad\.wide\.u32\s+%rd\d+, %r\d+), 4,", r"\1, 8,", 1)),
}  # fmt: skip


def test_writes_without_a_fault() -> None:
    for name in {name for name, _ in WRITES.values()}:
        write(name)


@pytest.mark.parametrize("name", WRITES)
def test_a_fault_in_writing_is_noticed(name: str) -> None:
    format_, edit = WRITES[name]
    with pytest.raises((Fault, AssertionError)):
        write(format_, planted("append_rows", edit))


def write(name: str, change: Callable[[str, str], str] | None = None) -> None:
    fmt, x = get_format(name), torch.randn(1, 2, 33, 32) * 3
    mine, other = (empty(name, 1, 2, 40, 32) for _ in range(2))
    implementation("append_", "torch").run(other, torch.arange(33), x, fmt)
    with simulated("sm_80", schedule=1, change=change):
        append_(mine, torch.arange(33), x, fmt)
    assert_same(mine, other, fmt)
