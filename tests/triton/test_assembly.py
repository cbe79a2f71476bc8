"""The PTX in :mod:`kvq_ops.triton_kernels.numbers` against its twin in plain operations, and both against what codes mean.

The interpreter cannot run PTX, so the few instructions that are used are carried out here, on every byte and every neighbour.
"""

from __future__ import annotations

import re
import struct

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kvq_ops.codecs.block_scaled import e2m1_values
from kvq_ops.codecs.codebook import _normal_table
from kvq_ops.triton_kernels import numbers as N

# Four bytes in one register, as a thread has them; bytes next to each other are never alike.
WORDS = [
    int.from_bytes(bytes((b, (b * 7 + 3) % 256, 255 - b, (b * 31 + 90) % 256)), "little") for b in range(256)
]


def halves(word: int) -> list[float]:
    return [
        float(np.frombuffer(struct.pack("<H", word >> shift & 0xFFFF), np.float16)[0]) for shift in (0, 16)
    ]


def packed(values: list[float]) -> int:
    low, high = (struct.unpack("<H", np.float16(v).tobytes())[0] for v in values)
    return low | high << 16


def prmt(a: int, b: int, selector: int) -> int:
    pool = [a >> s & 255 for s in (0, 8, 16, 24)] + [b >> s & 255 for s in (0, 8, 16, 24)]
    out = 0
    for i in range(4):
        chosen = selector >> 4 * i & 15
        byte = pool[chosen & 7]
        out |= (0xFF * (byte >> 7) if chosen & 8 else byte) << 8 * i
    return out


def lop3(a: int, b: int, c: int, table: int) -> int:
    out = 0
    for bit in range(32):
        index = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | c >> bit & 1
        out |= (table >> index & 1) << bit
    return out


def fused(a: float, b: float, c: float) -> float:
    return float(np.float16(a * b + c))  # exact in float64 before it is rounded


OPERATIONS = {
    "mov.b32": lambda a: a,
    "not.b32": lambda a: ~a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: a << n,
    "sub.u32": lambda a, b: a - b,
    "prmt.b32": prmt,
    "lop3.b32": lop3,
    "add.rn.f16x2": lambda a, b: packed(
        [fused(x, 1.0, y) for x, y in zip(halves(a), halves(b), strict=True)]
    ),
    "fma.rn.f16x2": lambda a, b, c: packed(
        [fused(*three) for three in zip(halves(a), halves(b), halves(c), strict=True)]
    ),
}


def run(text: str, word: int, outputs: int) -> list[float]:
    """The fp16 numbers that a body leaves in its outputs, in their order; anything it does not know raises."""
    registers = {f"${outputs}": word}
    body = text.strip().removeprefix("{").removesuffix("}")
    declared: set[str] = set()
    for line in filter(None, (part.strip() for part in body.split(";"))):
        if line.startswith(".reg .b32"):
            declared |= {name.strip() for name in line.removeprefix(".reg .b32").split(",")}
            continue
        name, rest = line.split(None, 1)
        target, *sources = (part.strip() for part in rest.split(","))
        assert target in declared or re.fullmatch(r"\$\d", target) and int(target[1:]) < outputs, line
        values = [registers[s] if s in registers else int(s, 0) for s in sources]
        registers[target] = OPERATIONS[name](*values) & 0xFFFFFFFF
    return [x for i in range(outputs) for x in halves(registers[f"${i}"])]


@triton.jit
def twin_kernel(X, OUT, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    b = tl.load(X + at)
    if KIND == "byte":
        tl.store(OUT + at, N.byte_half(b, False))
    elif KIND == "signed":
        tl.store(OUT + at, N.signed_byte_half(b.to(tl.int8, bitcast=True), False))
    elif KIND == "e4m3":
        tl.store(OUT + at, N.e4m3_half(b, False, False))
    elif KIND == "e5m2":
        tl.store(OUT + at, N.e5m2_half(b))
    elif KIND == "nibbles":
        low, high = N.nibbles_half(b, False)
        tl.store(OUT + at, low)
        tl.store(OUT + BLOCK + at, high)
    elif KIND == "e2m1":
        low, high = N.e2m1_half(b, False)
        tl.store(OUT + at, low)
        tl.store(OUT + BLOCK + at, high)
    elif KIND == "normal":
        tl.store(OUT + at, N.normal_entry((b & 15).to(tl.int32), 4).to(tl.float16))
        tl.store(OUT + BLOCK + at, N.normal_entry((b >> 4).to(tl.int32), 4).to(tl.float16))
    elif KIND == "quarters":
        w, x, y, z = N.quarters_half(b, False)
        tl.store(OUT + at, w)
        tl.store(OUT + BLOCK + at, x)
        tl.store(OUT + 2 * BLOCK + at, y)
        tl.store(OUT + 3 * BLOCK + at, z)


BYTES = torch.arange(256, dtype=torch.uint8)


def nibble_pair(table: torch.Tensor) -> torch.Tensor:
    return torch.cat((table[(BYTES & 15).long()], table[(BYTES >> 4).long()]))


MEANING = {
    "byte": BYTES.half(),
    "signed": BYTES.view(torch.int8).half(),
    "e4m3": BYTES.view(torch.float8_e4m3fn).float().nan_to_num(nan=480.0).half() / 256,
    "e5m2": BYTES.view(torch.float8_e5m2).half(),
    "nibbles": nibble_pair(torch.arange(16).half()),
    "e2m1": nibble_pair(e2m1_values(torch.arange(16, dtype=torch.uint8)).half() / 2**14),
    "normal": nibble_pair(torch.tensor(_normal_table(4)).half()),
    "quarters": torch.cat([(BYTES >> s & 3).half() for s in (0, 2, 4, 6)]),
}
TEXTS = {
    "byte": N._BYTE_ASM,
    "signed": N._SIGNED_BYTE_ASM,
    "e4m3": N._E4M3_ASM,
    "nibbles": N._NIBBLES_ASM,
    "e2m1": N._E2M1_ASM,
    "normal": N._NORMAL_ASM,
    "quarters": N._QUARTERS_ASM,
}


def wanted(kind: str) -> torch.Tensor:
    want = MEANING[kind]
    if kind == "e4m3":
        want[255] = -480 / 256  # NaN of either sign
    return want


@pytest.mark.parametrize("kind", MEANING)
def test_twins(kind: str) -> None:
    out = torch.empty(len(MEANING[kind]), dtype=torch.float16)
    twin_kernel[(1,)](BYTES, out, kind, 256)
    assert torch.equal(out.view(torch.int16)[~out.isnan()], wanted(kind).view(torch.int16)[~out.isnan()])
    assert torch.equal(out.isnan(), wanted(kind).isnan())


@pytest.mark.parametrize("kind", TEXTS)
def test_assembly(kind: str) -> None:
    want, parts = wanted(kind), len(MEANING[kind]) // 256
    for word in WORDS:
        got = run(TEXTS[kind].value, word, 2 * parts)
        for part in range(parts):
            for i in range(4):
                value = float(want[part * 256 + (word >> 8 * i & 255)])
                assert got[part * 4 + i] == value, f"{kind} of {word:08x}, byte {i}"
                assert np.signbit(got[part * 4 + i]) == np.signbit(value)


@pytest.mark.parametrize("kind", TEXTS)
def test_a_wrong_constant_is_noticed(kind: str) -> None:
    """Each constant in each text matters."""
    text = TEXTS[kind].value
    constants = list(re.finditer(r"0x[0-9a-fA-F]+", text))
    outputs = 2 * (len(MEANING[kind]) // 256)
    for match in constants:
        noticed = False
        for flipped in (0x11111111, 0x88888888):
            wrong = f"{text[: match.start()]}{int(match[0], 0) ^ flipped:#x}{text[match.end() :]}"
            noticed |= any(run(wrong, word, outputs) != run(text, word, outputs) for word in WORDS[::5])
        # Of the truth table of lop3 the entries for what cannot occur may differ.
        assert noticed or match[0] == "0xea", f"{kind}: {match[0]} at {match.start()}"
