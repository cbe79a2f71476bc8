"""3-bit codes: the PTX that looks entries up, carried out here, and the way from whole numbers to fp16."""

from __future__ import annotations

import random
import re

import pytest
import torch
import triton
import triton.language as tl

from kvq_ops.codecs.codebook import _normal_table
from kvq_ops.triton_kernels import numbers as N
from tests.triton.test_assembly import OPERATIONS, halves

OPERATIONS = {**OPERATIONS, "or.b32": lambda a, b: a | b}
TEXTS = {"normal": N._NORMAL_THREES_ASM.value, "whole": N._THREES_ASM.value}
TABLES = {"normal": torch.tensor(_normal_table(3)).half().tolist(), "whole": list(range(8))}
PAIRS = [(random.Random(i).getrandbits(24), random.Random(-i - 1).getrandbits(24)) for i in range(200)]


def run(text: str, first: int, second: int) -> list[list[float]]:
    """What the eight outputs hold for either word."""
    registers = {"$8": first, "$9": second}
    for line in filter(None, (part.strip() for part in text.strip().strip("{}").split(";"))):
        if not line.startswith(".reg"):
            name, rest = line.split(None, 1)
            target, *sources = (part.strip() for part in rest.split(","))
            values = [registers[s] if s in registers else int(s, 0) for s in sources]
            registers[target] = OPERATIONS[name](*values) & 0xFFFFFFFF
    return [halves(registers[f"${i}"]) for i in range(8)]


@pytest.mark.parametrize("kind", TEXTS)
def test_every_code_of_both_words(kind: str) -> None:
    for first, second in PAIRS:
        want = [[TABLES[kind][word >> 3 * k & 7] for word in (first, second)] for k in range(8)]
        assert run(TEXTS[kind], first, second) == want


@pytest.mark.parametrize("kind", TEXTS)
def test_a_wrong_constant_is_noticed(kind: str) -> None:
    text, pairs = TEXTS[kind], PAIRS[:20]
    right = [run(text, *pair) for pair in pairs]
    for match in re.finditer(r"(?<=, )(0x[0-9a-fA-F]+|\d+)\b", text):
        noticed = False
        for flipped in (0x1, 0x11111111, 0x88888888):
            constant = int(match[0], 0)
            # Shifts stay shifts.
            other = constant ^ flipped if constant > 31 else (constant + flipped) % 32
            wrong = f"{text[: match.start()]}{other:#x}{text[match.end() :]}"
            noticed |= any(run(wrong, *pair) != want for pair, want in zip(pairs, right, strict=True))
        # Of the truth table of lop3 the entries for what cannot occur may differ.
        assert noticed or match[0] == "0xea", f"{match[0]} at {match.start()}"


@triton.jit
def whole_kernel(OUT, ZERO, BLOCK: tl.constexpr):
    code = tl.arange(0, BLOCK)
    tl.store(OUT + code, N.whole_half(code, tl.load(ZERO)))


@pytest.mark.parametrize("zero", [0, 1, 4, 128, 255])
def test_whole_numbers(zero: int) -> None:
    out = torch.empty(256, dtype=torch.float16)
    whole_kernel[(1,)](out, torch.tensor([zero], dtype=torch.int32), 256)
    assert out.tolist() == [code - zero for code in range(256)]
