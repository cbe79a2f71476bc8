"""Every kernel compiled for every target: the instructions it was written for, registers, no spills; and what must be refused."""

from __future__ import annotations

import itertools
import re

import pytest

from cutlass_kernels import build, checks
from cutlass_kernels.build import NATIVE, PORTABLE

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

from cutlass_kernels.operators import DECODE, ENCODE, MEASURE
from tests.cutlass.leaves import CONVERT

# One shape class for each way to say where tokens go, and each dtype, head_dim and width of access at least once.
PLACES = {
    "quantize": {"position": None, "table": None, "dtype": "bfloat16", "head_dim": 128, "wide": True},
    "append": {"position": "int64", "table": None, "dtype": "float16", "head_dim": 64, "wide": True},
    "ragged": {"position": "int32", "table": None, "dtype": "float32", "head_dim": 96, "wide": False},
    "paged": {"position": "int64", "table": "int32", "dtype": "bfloat16", "head_dim": 256, "wide": True},
}
FITTED = ("nvfp4", "fp8_head", "fp8_tensor")
CODINGS = ("nvfp4", "mxfp4", "mxfp8", "fp8_token", "fp8_head", "fp8_tensor")
E2M1, E4M3 = "cvt.rn.satfinite.e2m1x2.f32", "cvt.rn.satfinite.e4m3x2.f32"
ENCODES = {"nvfp4": [E2M1, E4M3], "mxfp4": [E2M1]}
DECODES = {"nvfp4": ["cvt.rn.f16x2.e2m1x2", "cvt.rn.f16x2.e4m3x2"], "mxfp4": ["cvt.rn.f16x2.e2m1x2"]}
# Twice what one multiprocessor needs for full occupancy at 128 threads a block: 65536 / 2048 = 32.
REGISTERS = 64


def shape(place: str, coding: str) -> dict[str, object]:
    return {"coding": coding, "fit": coding in FITTED, **PLACES[place]}


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("place", PLACES)
def test_encode(place: str, coding: str) -> None:
    targets = NATIVE if place == "paged" else NATIVE[:3:2]
    given = shape(place, coding)
    checks.compiles(
        ENCODE, targets=targets, opcodes=ENCODES.get(coding, [E4M3]), registers=REGISTERS, **given
    )
    text = ENCODE.compiled("sm_100a", **given).ptx
    if given["wide"]:
        # 16 channels of two bytes are two loads of 16 bytes; codes go out in one store.
        assert re.search(r"ld\.global\.v4\.b32|ld\.global\.v2\.b64", text)
        assert re.search(r"st\.global\.v[24]\.b(32|64)", text)
    assert ("shfl.sync.bfly" in text) == (coding == "fp8_token")
    if "mx" not in coding:  # by the scale; those divide by powers of two, which is multiplying
        assert "div.rn.f32" in text
    assert "div.full" not in text and "approx" not in text, "codes would differ from those of other backends"


@pytest.mark.parametrize("coding", FITTED)
def test_measure(coding: str) -> None:
    given = shape("paged", coding)
    checks.compiles(MEASURE, opcodes=["shfl.sync.bfly", "atom.global.max.s32"], registers=REGISTERS, **given)


@pytest.mark.parametrize("coding", CODINGS)
def test_decode(coding: str) -> None:
    for dtype, wide in (("bfloat16", True), ("float32", False)):
        given = {"coding": coding, "dtype": dtype, "head_dim": 128, "wide": wide}
        opcodes = DECODES.get(coding, [] if coding == "mxfp8" else ["cvt.rn.f16x2.e4m3x2"])
        checks.compiles(DECODE, opcodes=opcodes, registers=REGISTERS, **given)


@pytest.mark.parametrize("target", PORTABLE)
@pytest.mark.parametrize("coding", CODINGS)
def test_the_portable_arm_needs_no_narrow_conversion(coding: str, target: str) -> None:
    for kernel, given in (
        (ENCODE, shape("paged", coding)),
        (DECODE, {"coding": coding, "dtype": "bfloat16", "head_dim": 128, "wide": True}),
    ):
        checks.compiles(kernel, targets=[target], registers=REGISTERS, **given)
        text = kernel.compiled(target, **given).ptx
        assert "e2m1" not in text and "e4m3" not in text


@pytest.mark.parametrize("target", ["sm_90a", "sm_89", "sm_80"])
def test_instructions_of_blackwell_are_refused_elsewhere(target: str) -> None:
    """The control: a compiler that takes everything would make the matrix above mean nothing."""
    said = checks.refused(CONVERT, target, what="to_e2m1", form="DeviceCvt")
    assert "e2m1x2" in said and target in said
    assert CONVERT.compiled(target, what="to_e2m1", form="HostCvt").ptx


def test_a_check_of_opcodes_fails_where_one_is_missing() -> None:
    with pytest.raises(AssertionError, match="no cvt.rn.satfinite.e2m1x2"):
        checks.compiles(
            CONVERT,
            targets=["sm_100a"],
            opcodes=["cvt.rn.satfinite.e2m1x2"],
            what="to_e4m3",
            form="DeviceCvt",
        )
    with pytest.raises(AssertionError, match="registers, over 8"):
        checks.compiles(CONVERT, targets=["sm_100a"], registers=8, what="to_e4m3", form="DeviceCvt")


def test_machine_code_has_the_instruction() -> None:
    """PTX is what was asked for, SASS what the chip gets."""
    given = shape("paged", "nvfp4")
    for target in ("sm_100a", "sm_120a"):
        text = checks.disassembly(ENCODE.compiled(target, **given))
        assert len(re.findall(r"F2FP\.SATFINITE\.E2M1\.F32", text)) == 8, "two channels at a time"
        assert "F2FP.SATFINITE.E4M3.F32" in text


def test_shape_classes_have_different_entries() -> None:
    entries = {
        kernel.entry(target, **shape(place, "nvfp4"))
        for kernel, target, place in itertools.product((ENCODE, MEASURE), NATIVE, PLACES)
    }
    assert len(entries) == 2 * len(NATIVE) * len(PLACES)
