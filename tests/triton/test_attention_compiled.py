"""What the machine code of attention holds, compiled for GPUs that are not here.

The main cases are the formats that decoding is judged by. Lane instructions for each stored number, keys and values together, say
whether a kernel can keep up with memory: at 100 % issue there are about 10 for each byte an A100 reads, 8.8 on an H100. 8-bit
formats have one number a byte, 4-bit formats nearly two.
"""

from __future__ import annotations

import pytest

from tests.triton.offline import SHARED, VERSIONS, Case, Kernel, compiled, matrix

ATTEND = "tests.triton.attention_launches:attend"
DIM = 128


def case(name: str, formats: str, **arguments: object) -> Case:
    return Case(name, ATTEND, {"formats": formats, **arguments})


# Lane instructions for each number, at most. BLOCK: tokens of a tile.
MAIN = {
    "none": (2.7, 64),
    "int8_per_token_head": (6.5, 64),
    "fp8_per_token_head": (6.5, 64),
    "int4_group32": (7.5, 64),
    "int4_per_token_head": (5.0, 128),
    "nvfp4": (7.5, 64),
}
MAIN_CASES = [Case(name, ATTEND, {"formats": name}, loops=True) for name in MAIN]
VARIANTS = [
    case("bf16", "none", dtype="bfloat16"),
    case("bf16 int8", "int8_per_token_head", dtype="bfloat16", kv_heads=32),
    case("fp32", "int8_per_token_head", dtype="float32"),
    case("kivi", "kivi2"),
    case("int3", "int3_group32"),
    case("int2", "int2_group32"),
    case("mx", "key=mxfp8,value=mxfp4"),
    case("turbo", "turbo4"),
    case("nuq", "nuq4"),
    case("window", "int8_per_token_head+recent128+sink4"),
    case("rotated window", "int4_group32+hadamard+recent32"),
    case("outliers", "int4_group32+outlier1%"),
    case("zero points", "key=int8_per_head_asym,value=int4_per_head_asym"),
    case("pages", "int8_per_token_head", page=16),
    case("large pages", "int4_group32", page=128, dtype="bfloat16"),
    case("everything", "fp8_per_head", mask="float16", window=512, softcap=30.0, sinks=True),
    case("bool mask", "int4_group32", mask="bool", causal=False),
    case("few queries", "int8_per_token_head", queries=8),
    case("wide heads", "int8_per_token_head", dim=256, heads=16),
    case("prefill", "int8_per_token_head", queries=512, tokens=512),
    case("short prefill", "int4_group32", queries=24),
    case("small heads", "fp8_per_token_head", dim=64, kv_heads=32),
]
DEQUANTIZE = [
    Case(f"dequantize {name}", "tests.triton.attention_launches:dequantize", {"format": name})
    for name in ("int8_per_token_head", "int4_group32", "nvfp4", "turbo3", "nuq4")
]


def kernels(cases: list[Case], target: str, version: str) -> dict[str, list[Kernel]]:
    """Of ``cases``, compiled with all others of this target and version: a process takes seconds to start."""
    variants = [*VARIANTS, *DEQUANTIZE] if version == VERSIONS[0] else VARIANTS if target == "sm_90" else []
    made = compiled([*MAIN_CASES, *variants], target, version)
    wanted = {case.name: made[case.name] for case in cases}
    failed = {name: what for name, what in wanted.items() if isinstance(what, str)}
    assert not failed, failed
    return wanted  # type: ignore[return-value]


def check_resources(kernel: Kernel, target: str, context: str, stack: int) -> None:
    limit = 512 if target == "gfx942" else 255
    assert kernel.shared <= SHARED[target], f"{context}: {kernel.shared} bytes of shared memory"
    assert kernel.registers <= limit and kernel.stack <= stack, (
        f"{context}: {kernel.registers} registers, {kernel.stack} bytes spilled"
    )


@matrix()
def test_main_formats(target: str, version: str) -> None:
    made = kernels(MAIN_CASES, target, version)
    for name, (ceiling, block) in MAIN.items():
        attend = next(kernel for kernel in made[name] if kernel.name == "attend_kernel")
        # In single builds ptxas puts a number that the loop does not need into memory.
        check_resources(attend, target, name, 8)
        assert attend.tensor, name
        # Codes come 16 bytes at a time; what is narrower are parameters.
        assert attend.loads.get(16, 0) >= 4, (name, attend.loads)
        if target != "gfx942":
            cost = attend.loop * attend.warps * 32 / (block * 2 * DIM)
            assert 0.5 < cost <= ceiling, f"{name}: {cost:.2f} lane instructions for each number"
            assert attend.count("cp.async.c"), f"{name}: nothing is loaded ahead"


@matrix(versions=VERSIONS[:1])
def test_every_variant(target: str, version: str) -> None:
    made = kernels(VARIANTS, target, version)
    for name, launched in made.items():
        for kernel in launched:
            check_resources(kernel, target, f"{name}, {kernel.name}", 64 if name in ("nuq",) else 16)
        attend = next(kernel for kernel in launched if kernel.name == "attend_kernel")
        # Tensor cores of NVIDIA have no fp32; the matrix cores of gfx942 do.
        assert bool(attend.tensor) == (name != "fp32" or target == "gfx942"), name
    assert [kernel.name for kernel in made["prefill"]] == ["dequantize_kernel"] * 2 + ["attend_kernel"]
    if target in ("sm_90", "sm_100"):
        assert made["prefill"][2].count("wgmma.mma_async|tcgen05.mma")


@matrix("sm_90", versions=VERSIONS[1:])
def test_every_variant_with_the_oldest_triton(target: str, version: str) -> None:
    for name, launched in kernels(VARIANTS, target, version).items():
        for kernel in launched:
            check_resources(kernel, target, f"{name}, {kernel.name}", 64 if name in ("nuq",) else 16)


@matrix(versions=VERSIONS[:1])
def test_dequantize(target: str, version: str) -> None:
    for name, launched in kernels(DEQUANTIZE, target, version).items():
        for kernel in launched:
            check_resources(kernel, target, name, 16)
            assert max(kernel.stores) >= 8, name


def test_a_spill_would_be_noticed() -> None:
    fine = Kernel("k", 4, 200, 0, 1000, {16: 8}, {16: 2}, {}, {}, 0.0)
    check_resources(fine, "sm_90", "", 0)
    for change in ({"stack": 24}, {"registers": 256}, {"shared": 240000}):
        with pytest.raises(AssertionError):
            check_resources(Kernel(**{**fine.__dict__, **change}), "sm_90", "", 16)
