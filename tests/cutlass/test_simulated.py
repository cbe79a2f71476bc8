"""The compiled quantizers run by the PTX simulator, against the torch codec; and with faults planted in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from cutlass_kernels import build, checks, operators
from cutlass_kernels.build import NATIVE, PORTABLE
from kvq_ops import registry
from kvq_ops.formats import get_format
from tests.cutlass.hosted import FORMATS, NAME, register_hosted
from tests.cutlass.ptxsim import Fault, why_not
from tests.ops.checks import assert_same_planes, raw
from tests.ops.codec_data import make

if reason := build.why_not() or why_not():
    pytest.skip(reason, allow_module_level=True)

from tests.cutlass.leaves import CONVERT
from tests.cutlass.ptxsim import GlobalMemory, run
from tests.cutlass.simulated import simulated
from tests.cutlass.test_compile_matrix import CODINGS, shape
from tests.cutlass.test_conversions import EVERY_BYTE, by_torch, numbers, same_bits

WRITES = ("quantize", "append_", "paged_append_")
NVFP4 = get_format("nvfp4")


@pytest.fixture(autouse=True, scope="module")
def hosted() -> Iterator[None]:
    before = {op: list(rows) for op, rows in registry._implementations.items()}
    register_hosted()
    yield
    for op, rows in before.items():
        registry._implementations[op][:] = rows
    registry._choices.clear()


def by(op: str) -> Callable[..., object]:
    return next(row for row in registry.implementations(op) if row.name == "torch").run


@pytest.mark.parametrize("target", ["sm_100a", "sm_120a"])
@pytest.mark.parametrize("what", ["to_e4m3", "to_e4m3_singly", "to_e2m1", "from_e4m3", "from_e2m1"])
def test_instructions_convert_as_torch_does(what: str, target: str) -> None:
    """How operands and bytes of words are put together around the instructions."""
    x = numbers()[::37] if what.startswith("to_") else EVERY_BYTE
    x = (x[~x.isnan()] if x.is_floating_point() else x).contiguous()
    x = x[: len(x) // 8 * 8]
    want = by_torch(what, x)
    out = torch.zeros_like(want)
    memory, count = GlobalMemory(), (len(want) if "from" in what else len(x)) // 8
    addresses = [memory.add(x.numpy(), writable=False), memory.add(out.numpy(), writable="once")]
    ptx = CONVERT.compiled(target, what=what, form="DeviceCvt").ptx
    run(ptx, (-(-count // 128), 1, 1), (128, 1, 1), [*addresses, count], memory)
    same_bits(out, want)


@pytest.mark.parametrize("name", FORMATS)
def test_every_operator_equals_torch(name: str) -> None:
    with simulated("sm_100a") as launches:
        for op in (*WRITES, "dequantize"):
            assert checks.operator(op, NAME, [name], dtypes=(torch.bfloat16,), opcheck=False) == 1
    assert launches["encode"] > 5 and launches["decode"] == 2
    assert ("measure" in launches) == bool(get_format(name).static_planes)


@pytest.mark.parametrize("schedule", [1, 2])
@pytest.mark.parametrize("name", ["nvfp4", "fp8_per_token_head", "fp8_per_head"])
def test_random_orders_of_warps(name: str, schedule: int) -> None:
    with simulated("sm_103a", schedule=schedule):
        for op in (*WRITES, "dequantize"):
            checks.operator(op, NAME, [name], head_dims=(96,), dtypes=(torch.float32,), opcheck=False)


def test_the_portable_arm() -> None:
    for name in ("nvfp4", "fp8_per_token_head"):
        with simulated("sm_90a"):
            for op in (*WRITES, "dequantize"):
                checks.operator(op, NAME, [name], dtypes=(torch.float16,), opcheck=False)


@pytest.mark.parametrize(
    "kind", ["e2m1_ties", "float8_ties", "subnormal", "huge", "negative_zero", "one_outlier"]
)
def test_awkward_values(kind: str) -> None:
    for name, dtype in (("nvfp4", torch.float32), ("mxfp4", torch.bfloat16), ("fp8_per_head", torch.float32)):
        fmt = get_format(name)
        x = make(kind, (2, 3, 5, 64), dtype)
        want = by("quantize")(x, fmt)
        with simulated("sm_100a"):
            assert_same_planes(operators.quantize(x, fmt), want, fmt, kind)
            got = operators.dequantize(want, fmt, dtype)
        assert torch.equal(raw(got), raw(by("dequantize")(want, fmt, dtype)))


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("targets", [NATIVE, PORTABLE])
def test_targets_of_one_kind_get_the_same_code(targets: tuple[str, ...], coding: str) -> None:
    """What is simulated for one of them stands for the others. The shape classes are those of the compile matrix."""
    decode = {"coding": coding, "dtype": "bfloat16", "head_dim": 128, "wide": True}
    for kernel, given in ((operators.ENCODE, shape("paged", coding)), (operators.DECODE, decode)):
        texts = {re.sub(r"\.target sm_\w+", "", kernel.compiled(target, **given).ptx) for target in targets}
        assert len(texts) == 1


# ------------------------------------------------------------------------------------------------------ planted faults


def write_pages() -> None:
    """Padding, blocks of all magnitudes, NaN, a page of which nothing is written, more threads than vectors."""
    x = checks._values((2, 3, 5, 64), torch.bfloat16, seed=1)
    x[0, :, 1] = 1e35  # padding, which must enter no scale
    table, position = (
        torch.tensor([[4, 1, -1], [0, 6, 3]]),
        torch.tensor([[7, -1, 5, -1, 6], [11, 0, 9, 5, 4]]),
    )
    pages: list[list[Tensor]] = [NVFP4.empty_store(7, 3, 4, 64, dtype=x.dtype) for _ in range(2)]
    operators.paged_append_(pages[0], table, position, x, NVFP4)
    by("paged_append_")(pages[1], table, position, x, NVFP4)
    assert_same_planes(*pages, NVFP4, "")


def write_into_no_page() -> None:
    """A table and positions that no caller may give: on a GPU nobody looks at them before the kernel does."""
    x = checks._values((2, 3, 5, 64), torch.bfloat16, seed=1)[:, :, :3]
    table = torch.tensor([[1, 7, 2], [-3, 0, 1 << 40]])
    misplaced, fine = torch.tensor([[4, 99, 9], [0, -5, 8]]), torch.tensor([[-1, -1, 9], [-1, -1, -1]])
    pages: list[list[Tensor]] = [NVFP4.empty_store(7, 3, 4, 64, dtype=x.dtype) for _ in range(2)]
    operators.paged_append_(pages[0], table, misplaced, x, NVFP4)
    by("paged_append_")(pages[1], table.clamp(0, 6), fine, x, NVFP4)
    assert_same_planes(*pages, NVFP4, "")


def write_backwards() -> None:
    x = checks._values((2, 3, 5, 64), torch.bfloat16, seed=1)
    stores: list[list[Tensor]] = [NVFP4.empty_store(2, 3, 8, 64, dtype=x.dtype) for _ in range(2)]
    operators.append_(stores[0], torch.arange(7, 2, -1), x, NVFP4)
    by("append_")(stores[1], torch.arange(7, 2, -1), x, NVFP4)
    assert_same_planes(*stores, NVFP4, "")


def write_rows() -> None:
    """A scale for each vector, one of them of a vector of zeros, one with NaN in it."""
    fmt = get_format("fp8_per_token_head")
    x = checks._values((2, 3, 5, 64), torch.bfloat16, seed=1)
    x[0, 1, 2, ::16] = torch.nan
    assert_same_planes(operators.quantize(x, fmt), by("quantize")(x, fmt), fmt, "")


def write_small_blocks() -> None:
    """Blocks so small, next to the largest of the tensor, that their scales would be zero."""
    x = torch.randn(1, 2, 3, 64) * 0.002
    x[0, 0, 0, 5] = 448 * 6
    assert_same_planes(operators.quantize(x, NVFP4), by("quantize")(x, NVFP4), NVFP4, "")


def read() -> None:
    store = by("quantize")(checks._values((2, 3, 5, 64), torch.bfloat16, seed=1), NVFP4)
    got, want = (
        operators.dequantize(store, NVFP4, torch.bfloat16),
        by("dequantize")(store, NVFP4, torch.bfloat16),
    )
    assert torch.equal(raw(got), raw(want))


def read_huge() -> None:
    """Values that fp16 does not hold."""
    store = by("quantize")(torch.randn(1, 2, 3, 64) * 1e6, NVFP4)
    got, want = (
        operators.dequantize(store, NVFP4, torch.float16),
        by("dequantize")(store, NVFP4, torch.float16),
    )
    assert torch.equal(raw(got), raw(want))


WORK = (read, read_huge, write_small_blocks, write_pages, write_into_no_page, write_backwards, write_rows)


@pytest.mark.parametrize("schedule", [None, 3])
@pytest.mark.parametrize("work", WORK)
def test_without_a_fault(work: Callable[[], None], schedule: int | None) -> None:
    with simulated("sm_100a", schedule=schedule):
        work()


def _branch(which: int) -> tuple[str, str]:
    """The ``which``-th branch from the end, gone: threads do what they must not."""
    return (
        rf"(?s)@!?%p\d+ bra\s+\S+;(?=(?:(?!@!?%p\d+ bra).)*(?:@!?%p\d+ bra(?:(?!@!?%p\d+ bra).)*){{{which}}}\Z)",
        "",
    )


FAULTS: dict[str, tuple[str, str, Callable[[], None]]] = {
    # what is replaced in the PTX of ``encode`` (the first place that fits), by what, and what has to notice
    "operands of a conversion swapped": (
        r"(cvt\.rn\.satfinite\.e2m1x2\.f32 \w+), (%\w+), (%\w+);",
        r"\1, \3, \2;",
        write_pages,
    ),
    "operands of an e4m3 conversion swapped": (
        r"(cvt\.rn\.satfinite\.e4m3x2\.f32 \w+), (%\w+), (%\w+);",
        r"\1, \3, \2;",
        write_rows,
    ),
    "the scale's byte in the wrong half": (
        r"(cvt\.rn\.satfinite\.e4m3x2\.f32 %\w+), (0f00000000), (%\w+);",
        r"\1, \3, \2;",
        write_pages,
    ),
    "bytes of a word swapped": (r"\{b0, b1, b2, b3\}", "{b1, b0, b2, b3}", write_pages),
    "words of a block swapped": (
        r"st\.global\.v2\.b32 (\s*\[%\w+\]), \{(%\w+), (%\w+)\}",
        r"st.global.v2.b32 \1, {\3, \2}",
        write_pages,
    ),
    "the clamp to the smallest block scale dropped": (
        r"selp\.f32 (\s*%\w+), 0f3B000000, (%\w+), %p\d+;",
        r"mov.b32 \1, \2;",
        write_small_blocks,
    ),
    "the clamp to the smallest magnitude dropped": (
        r"max\.f32 (\s*%\w+), (%\w+), 0f322BCC77;",
        r"mov.b32 \1, \2;",
        write_rows,
    ),
    "NaN kept": (
        r"setp\.gt\.u32 (\s*%p\d+), (%r\d+), 2139095040;",
        r"setp.ne.u32 \1, \2, \2;",
        write_rows,
    ),
    "a shuffle to the wrong thread": (r"(shfl\.sync\.bfly\.b32\s+%\w+, %\w+), 2,", r"\1, 4,", write_rows),
    "a shuffle left out": (
        r"shfl\.sync\.bfly\.b32\s+(%\w+), (%\w+), 1, 31, -1;",
        r"mov.b32 \1, \2;",
        write_rows,
    ),
    "the bound of rows removed": (
        r"setp\.lt\.s32 (\s*%p\d+), (%r\d+), (%r\d+);",
        r"setp.eq.s32 \1, \2, \2;",
        write_pages,
    ),
    "the bound of pages removed": (
        r"(?s)(.*)setp\.lt\.s64 (\s*%p\d+), (%rd\d+), (%rd\d+);",
        r"\1setp.eq.s64 \2, \3, \3;",
        write_into_no_page,
    ),
    "the bound of positions removed": (
        r"setp\.lt\.s64 (\s*%p\d+), (%rd\d+), (%rd\d+);",
        r"setp.eq.s64 \1, \2, \2;",
        write_into_no_page,
    ),
    "an atomic maximum become a store": (
        r"atom\.global\.max\.s64 \s*%\w+, (\[%\w+\]), (%\w+);",
        r"st.global.b64 \1, \2;",
        write_backwards,
    ),
    "codes written for padding": (*_branch(2), write_pages),
    "the scale written by every thread": (*_branch(3), write_pages),
    "lengths counted for padding": (*_branch(1), write_pages),
}


OTHER_FAULTS: dict[str, tuple[str, str, str, Callable[[], None]]] = {
    # the same with the kernel
    "padding enters the fitted scale": ("measure", *_branch(2), write_pages),
    "the fitted scale of the last vector alone": (
        "measure",
        r"atom\.global\.max\.s32 \s*%\w+, (\[%\w+\]), (%\w+);",
        r"st.global.b32 \1, \2;",
        write_small_blocks,
    ),
    "bytes of codes swapped": ("decode", "e2m1x2 w0, b0", "e2m1x2 w0, b1", read),
    "the bound of units removed": ("decode", *_branch(0), read),
    "the clamp to the largest number dropped": (
        "decode",
        r"setp\.gt\.f32 (\s*%p\d+), (%r\d+), 0f477FE000;",
        r"setp.ne.b32 \1, \2, \2;",
        read_huge,
    ),
}


@pytest.mark.parametrize("fault", [*FAULTS, *OTHER_FAULTS])
def test_planted_faults_are_caught(fault: str) -> None:
    where, pattern, instead, work = (
        OTHER_FAULTS[fault] if fault in OTHER_FAULTS else ("encode", *FAULTS[fault])
    )
    planted = 0

    def change(kernel: str, ptx: str) -> str:
        nonlocal planted
        if kernel != where:
            return ptx
        changed, count = re.subn(pattern, instead, ptx, count=1)
        planted += count
        return changed

    caught = None
    with simulated("sm_100a", change=change):
        try:
            work()
        except (AssertionError, Fault) as error:
            caught = error
    assert planted, "nothing of the kind is in the code"
    assert caught is not None
