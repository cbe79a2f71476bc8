"""The attention kernels' machine code: instructions, widths of loads, registers, no spills, and what must be refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cutlass_kernels import build, checks, expected
from tests.cutlass.ptxsim import why_not

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

from cutlass_kernels.attention import ATTENTION

# One process compiles and disassembles; what it found is asked for by several tests.
pytestmark = pytest.mark.xdist_group("attention_code")

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
E4M3 = "cvt.rn.f16x2.e4m3x2"
OPCODES = {
    "nvfp4": [MMA, "cvt.rn.f16x2.e2m1x2", E4M3, "mul.rn.f16x2", "ex2.approx.ftz.f32", "cvt.rn.f16x2.f32"],
    "fp8_token": [MMA, E4M3, "lg2.approx.ftz.f32", "rcp.approx.ftz.f32"],
    "fp8_head": [MMA, E4M3],
}
TARGETS = ("sm_100a", "sm_120a")
PLAIN = {"mask": "", "causal": False, "window": False, "softcap": False, "sinks": False}
ALL = {"mask": "float", "causal": True, "window": True, "softcap": True, "sinks": True}


def shape(keys: str, dim: int, page: int, values: str | None = None, **options: Any) -> dict[str, Any]:
    table = "int32" if page else None
    return {
        "dtype": "bfloat16", "keys": keys, "values": values or keys, "head_dim": dim, "value_dim": dim, "page": page,
        "table": table, "length": "int64", **PLAIN, **options,
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "dim", "page"), expected.CASES)
def test_instructions_and_registers(kind: str, dim: int, page: int) -> None:
    given = shape(kind, dim, page)
    checks.compiles(ATTENTION, targets=TARGETS, opcodes=OPCODES[kind], registers=255, **given)
    bits = 4 if kind == "nvfp4" else 8
    key_row, value_share = dim * bits // 8, dim * bits // 64
    for target in TARGETS:
        loop = expected.loop_of(checks.disassembly(ATTENTION.compiled(target, **given)), "stretch_kernel")
        assert sum(n for name, n in loop.items() if name.startswith("HMMA")) == dim // 16 * 2 + dim // 8
        # Keys in 16 bytes a lane; values too, where an eighth of a row is as much.
        wide = (2 * key_row // 64 if key_row >= 64 else 0) + (
            4 * value_share // 16 if value_share >= 16 else 0
        )
        loads = {
            size: sum(n for name, n in loop.items() if name.startswith("LDG") and size in name.split("."))
            for size in ("128", "64")
        }
        assert loads["128"] == wide, (target, loop)
        eights = (2 if key_row == 32 else 0) + (4 if value_share == 8 else 0)
        assert loads["64"] == eights
        assert not any(name.startswith(("STL", "LDL", "BAR")) for name in loop)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8_token"])
def test_all_options_at_once_spill_nothing(kind: str, dim: int) -> None:
    checks.compiles(
        ATTENTION, targets=("sm_100a",), opcodes=OPCODES[kind], registers=255, **shape(kind, dim, 64, **ALL)
    )


def test_other_targets() -> None:
    checks.compiles(
        ATTENTION,
        targets=("sm_103a", "sm_121a"),
        opcodes=OPCODES["nvfp4"],
        registers=255,
        **shape("nvfp4", 128, 16),
    )


def test_sm_90a_makes_e2m1_of_bits_and_sm_80_is_refused() -> None:
    given = shape("nvfp4", 128, 16)
    opcodes = [MMA, E4M3, "0x74007400"]
    checks.compiles(ATTENTION, targets=("sm_90a",), opcodes=opcodes, registers=255, **given)
    assert "e2m1" not in ATTENTION.compiled("sm_90a", **given).ptx
    assert "e4m3x2" in checks.refused(ATTENTION, "sm_80", **given)


@pytest.mark.parametrize(("kind", "dim", "page"), [("nvfp4", 128, 16), ("fp8_token", 128, 16)])
def test_sm_103a_costs_what_sm_100a_does(kind: str, dim: int, page: int) -> None:
    """The PTX is the same; ptxas chooses registers and a few instructions for each target."""
    texts = {
        re.sub(r"sm_10\da", "", ATTENTION.compiled(t, **shape(kind, dim, page)).ptx)
        for t in ("sm_100a", "sm_103a")
    }
    assert len(texts) == 1
    first, second = (expected.cost(gpu, kind, dim, page) for gpu in (expected.GPUS[0], expected.GB300))
    assert first.ctas == second.ctas and abs(first.registers - second.registers) <= 8
    assert abs(first.instructions - second.instructions) <= first.instructions // 100


@pytest.mark.parametrize("gpu", expected.GPUS, ids=lambda gpu: gpu.target)
def test_shared_memory_suffices_for_the_expected_ctas(gpu: expected.GPU) -> None:
    """A share of L1 that is too small would keep CTAs out that registers have room for."""
    from cutlass_kernels.attention_kernel import Shape, blocks_of, carveout, shared_bytes

    for kind, dim, page in expected.CASES:
        fields = {key: value for key, value in shape(kind, dim, page).items() if key in Shape._fields}
        given = Shape(**fields, target=gpu.target)
        ctas = expected.cost(gpu, kind, dim, page).ctas
        assert ctas >= blocks_of(given), "what the compiler was told to make room for"
        assert carveout(given) <= 100
        assert ctas * (shared_bytes(dim) + 1024) <= gpu.shared * carveout(given) / 100


def test_the_expected_costs_are_those_of_this_code() -> None:
    if reason := why_not():
        pytest.skip(reason)
    path = Path(expected.__file__).parent / "EXPECTED.md"
    assert path.read_text() == expected.document(), "python -m cutlass_kernels.expected --write"
