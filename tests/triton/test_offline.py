"""The harness of offline compilation sees what there is to see."""

from __future__ import annotations

from tests.triton.offline import SHARED, Case, compiled, matrix

CASES = [
    Case("wide", "tests.triton.probes:copy", {"dtype": "float16"}),
    Case("narrow", "tests.triton.probes:copy", {"dtype": "uint8", "offset": 1}),
    Case("dot", "tests.triton.probes:dot", {"size": 32}),
    Case("spilled", "tests.triton.probes:hold", {"size": 32768}),
    Case("failed", "tests.triton.probes:fail"),
]


@matrix("sm_90", "gfx942")
def test_what_machine_code_holds(target: str, version: str) -> None:
    made = compiled(CASES, target, version)
    assert made["failed"] == "ValueError: no such launch"
    wide, narrow, dot, spilled = (made[name][0] for name in ("wide", "narrow", "dot", "spilled"))
    assert wide.name == "copy_kernel" and wide.warps == 4
    assert set(wide.loads) == set(wide.stores) == {16} and not wide.tensor and wide.stack == 0
    assert set(narrow.loads) == set(narrow.stores) == {1}
    assert dot.tensor and 0 < dot.shared <= SHARED[target] and 16 < dot.registers <= 512
    assert spilled.stack > 100, "512 numbers and some addresses do not fit the registers of a thread"
