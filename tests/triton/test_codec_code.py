"""Machine code of the kernels that write stores, for every GPU: it is there, fits, moves bytes wide, divides right."""

from __future__ import annotations

import pytest

from tests.triton.offline import SHARED, VERSIONS, Case, Kernel, compiled, matrix

MOST_REGISTERS = {"gfx942": 128}
"""Of a thread: on AMD so many that four waves fit a unit; elsewhere, by default, three blocks of four warps on a processor."""
BLOCKS_OF_FOUR_WARPS = 65536 // 3 // 128

# One format for each way through the kernels, and the bytes that a thread should store at once where rows are whole: the codes of
# the 16 numbers that a thread holds, 8 on AMD. Codes of 3 bits go byte by byte, three to a word.
FORMATS = {
    "none": 16,
    "int8_per_token_head": 16,
    "int8_per_token_head+recent5+sink3": 16,
    "int8_per_head_asym": 16,
    "fp8_per_head": 16,
    "fp8_e5m2": 16,
    "mxfp8": 16,
    "int4_group32": 8,
    "int4_group64+outlier5%": 8,
    "int4_per_token_head": 8,
    "int3_group32": 1,
    "int2_group32": 4,
    "nvfp4": 8,
    "nvfp4+sink2": 8,
    "mxfp4": 8,
    "nuq4_keys": 8,
    "nuq3_keys+recent4+hadamard": 1,
    "nuq2_values+outlier5%+sink1": 4,
    "turbo4": 8,
    "turbo3+recent2": 1,
    "int4_group48+hadamard": 1,
    "kivi2_keys": 4,
    "kivi4_keys+hadamard": 4,
    "kivi2_keys+recent8+outlier3%": 4,
    "int4_channel128": 1,
}
APPEND, PAGED, FULL = (f"tests.triton.codec_launches:{name}" for name in ("append", "paged", "full"))
CASES = [
    *(Case(name, APPEND, {"name": name, "tokens": 300}) for name in FORMATS),
    *(
        Case(f"{name}, one token", APPEND, {"name": name, "tokens": 1})
        for name in ("int8_per_token_head", "int4_group32", "kivi2_keys")
    ),
    *(
        Case(f"{name}, pages", PAGED, {"name": name, "tokens": 70})
        for name in ("int8_per_token_head", "nvfp4", "nuq4_keys")
    ),
    Case("int4_group32, whole", FULL, {"name": "int4_group32", "tokens": 300}),
    Case(
        "int4_group32, rows",
        APPEND,
        {"name": "int4_group32", "tokens": 70, "ragged": True, "dtype": "float32"},
    ),
    Case(
        "int4_group32, D=80", APPEND, {"name": "int4_group32", "tokens": 300, "dim": 80, "dtype": "float16"}
    ),
    Case("int8_per_token_head, D=576", APPEND, {"name": "int8_per_token_head", "tokens": 300, "dim": 576}),
    Case(
        "int4_group24+outlier1%, D=1000", APPEND, {"name": "int4_group24+outlier1%", "tokens": 9, "dim": 1000}
    ),
    Case("int4_channel1024", APPEND, {"name": "int4_channel1024", "tokens": 1100}),
    Case("turbo4, D=256", APPEND, {"name": "turbo4", "tokens": 300, "dim": 256}),
]
# The oldest Triton compiles every way through the kernels once.
FEWER = {
    "none", "fp8_e5m2", "int8_per_token_head", "int8_per_head_asym", "int2_group32", "int3_group32", "int4_group48+hadamard",
    "kivi2_keys+recent8+outlier3%", "nuq2_values+outlier5%+sink1", "nuq3_keys+recent4+hadamard", "nuq4_keys, pages",
    "nvfp4+sink2", "mxfp4", "mxfp8", "turbo4",
}  # fmt: skip
assert {case.name for case in CASES} >= FEWER
WRITERS = ("append_rows", "append_groups")


def kernels(target: str, version: str) -> dict[str, list[Kernel]]:
    cases = CASES if version == VERSIONS[0] else [case for case in CASES if case.name in FEWER]
    made = compiled(cases, target, version)
    failed = {name: got for name, got in made.items() if isinstance(got, str)}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    return {name: got for name, got in made.items() if not isinstance(got, str)}


@pytest.mark.slow
@matrix()
def test_code(target: str, version: str) -> None:
    made = kernels(target, version)
    bad = []
    for name, launches in made.items():
        assert any(kernel.name in WRITERS for kernel in launches), f"{name}: {[k.name for k in launches]}"
        for kernel in launches:
            faults = {
                "shared memory": kernel.shared > SHARED[target],
                "stack": kernel.stack > 16,
                "registers": kernel.registers > MOST_REGISTERS.get(target, BLOCKS_OF_FOUR_WARPS),
                # Codes of float8 are made by integer operations: what hardware rounds otherwise must not be there.
                "conversion to float8": kernel.count(r"cvt.*(e4m3|e5m2|fp8|bf8)"),
                "division that is not IEEE's": kernel.count(r"^div\.(full|approx)"),
                "no division of IEEE's": kernel.name in WRITERS
                and not undivided(name)
                and not divides(kernel),
            }
            bad += [f"{name} {kernel.name}: {fault} {kernel}" for fault, there in faults.items() if there]
    assert not bad, "\n".join(bad)


def undivided(name: str) -> bool:
    """Formats that keep numbers as they are, or divide by powers of two."""
    return name == "none" or name.startswith("mx")


def divides(kernel: Kernel) -> bool:
    """IEEE division is one instruction of PTX, and on AMD a sequence that ends so."""
    return kernel.count(r"^div\.rn\.f32|^v_div_fixup_f32") > 0


@pytest.mark.slow
@matrix()
def test_bytes_move_wide(target: str, version: str) -> None:
    made = kernels(target, version)
    half = 2 if target.startswith("gfx") else 1  # 64 threads to a warp
    bad = []
    for name in FORMATS.keys() & made.keys():
        width = FORMATS[name]
        writer = next(kernel for kernel in made[name] if kernel.name in WRITERS)
        reads = max(max(kernel.loads) for kernel in made[name])
        if reads < 16 // half or max(writer.stores) < (16 if name == "none" else max(1, width // half)):
            bad.append(f"{name}: loads {writer.loads} stores {writer.stores}")
    assert not bad, "\n".join(bad)
