"""Instructions in which the lanes of a warp take part together: shuffles, votes, matrices.

Each function turns an instruction into a function of the active threads, as ``machine.Launch`` wants them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import mma
from .memory import Fault
from .parser import Instruction, elements

if TYPE_CHECKING:
    from .machine import Launch, Mask

__all__ = ["load_matrix", "product", "reduction", "shuffle", "store_matrix", "vote"]

EVERYONE = 0xFFFFFFFF


def shuffle(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    operands, text = instruction.operands, instruction.text
    mode = instruction.op[2]
    targets = operands[0].split("|")
    put = machine.target(targets[0])
    put_valid = machine.target(targets[1]) if len(targets) > 1 else None
    value, step = machine.source(operands[1], "b32"), machine.source(operands[2], "u32")
    control, members = machine.source(operands[3], "u32"), machine.source(operands[4], "u32")

    def run(mask: Mask) -> None:
        machine.whole_warps(mask, np.broadcast_to(members(), (machine.total,)), text)
        by, clamp = step().astype(np.int64) & 31, control().astype(np.int64)
        segment, bound = (clamp >> 8) & 31, clamp & 31
        top = (machine.lane & segment) | (bound & ~segment)
        low = machine.lane & segment
        from_ = {
            "bfly": machine.lane ^ by,
            "up": machine.lane - by,
            "down": machine.lane + by,
            "idx": low | (by & ~segment),
        }[mode]
        valid = from_ >= top if mode == "up" else from_ <= top
        from_ = np.where(valid, from_, machine.lane)
        source = machine.warp * 32 + from_
        if mask is not None and not mask[source][mask].all():
            raise Fault(f"a lane reads from one that is not here: {text}")
        put(value()[source], mask)
        if put_valid is not None:
            put_valid(valid, mask)

    return run


def vote(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    op, operands, text = instruction.op, instruction.operands, instruction.text
    put, question = machine.target(operands[0]), machine.negatable(operands[1], "pred")
    members = machine.source(operands[2], "u32")

    def run(mask: Mask) -> None:
        machine.whole_warps(mask, np.broadcast_to(members(), (machine.total,)), text)
        asked = question() if mask is None else question() & mask
        by_warp = asked.reshape(-1, 32)
        if "ballot" in op:
            bits = (by_warp.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
            put(np.repeat(bits, 32), mask)
            return
        here = np.ones_like(by_warp) if mask is None else mask.reshape(-1, 32)
        answer = by_warp.any(1) if "any" in op else (by_warp | ~here).all(1)
        put(np.repeat(answer, 32), mask)

    return run


_REDUCE = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


def reduction(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    """``redux.sync`` over the whole warp; of floats the largest or least, NaN only where ``.NaN`` says so."""
    op, operands, text, kind = instruction.op, instruction.operands, instruction.text, instruction.op[-1]
    if "abs" in op or op[2] not in (("min", "max") if kind[0] == "f" else _REDUCE):
        raise NotImplementedError(text)
    join, put = _REDUCE[op[2]], machine.target(operands[0])
    if kind[0] == "f" and "NaN" not in op:
        join = {"min": np.fmin, "max": np.fmax}[op[2]]
    value, members = machine.source(operands[1], kind), machine.source(operands[2], "u32")

    def run(mask: Mask) -> None:
        named = members()
        machine.whole_warps(mask, np.broadcast_to(named, (machine.total,)), text)
        if (named[... if mask is None else mask] != EVERYONE).any():
            raise NotImplementedError(f"a part of a warp: {text}")
        given = value().reshape(-1, 32)
        put(np.repeat(join.reduce(given, axis=1, dtype=given.dtype), 32), mask)

    return run


def product(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    op, operands, text = instruction.op, instruction.operands, instruction.text
    kind = op[-2]
    if (
        op[:6] != ("mma", "sync", "aligned", "m16n8k16", "row", "col")
        or op[6] != "f32"
        or kind not in ("f16", "bf16")
    ):
        raise NotImplementedError(text)
    puts = [machine.target(o) for o in elements(operands[0])]
    a, b = ([machine.source(o, "b32") for o in elements(part)] for part in operands[1:3])
    c = [machine.source(o, "f32") for o in elements(operands[3])]

    def run(mask: Mask) -> None:
        machine.whole_warps(mask, np.full(machine.total, EVERYONE, np.uint32), text)
        results = mma.multiply([r() for r in a], [r() for r in b], [r() for r in c], kind)
        for put, result in zip(puts, results, strict=True):
            put(result, mask)

    return run


def _rows(machine: Launch, instruction: Instruction, place: str) -> Callable[[Mask], np.ndarray]:
    """Where the rows lie that lanes name: lane ``8 i + r`` names row ``r`` of the 8 x 8 matrix ``i``, 16 bytes."""
    op, text = instruction.op, instruction.text
    if op[1:4] != ("sync", "aligned", "m8n8") or op[-1] != "b16" or op[4] not in ("x1", "x2", "x4"):
        raise NotImplementedError(text)
    address, names = machine.address(place), machine.lane < 8 * int(op[4][1:])

    def run(mask: Mask) -> np.ndarray:
        machine.whole_warps(mask, np.full(machine.total, EVERYONE, np.uint32), text)
        named = address()
        if (named[names if mask is None else names & mask] % 16).any():
            raise Fault(f"a row of a matrix that is not aligned to 16 bytes: {text}")
        return named

    return run


def _places(named: np.ndarray, active: np.ndarray, matrix: int, trans: bool) -> list[np.ndarray]:
    """Addresses of what lanes hold of a matrix: two neighbours of row ``lane // 4``, or of column ``lane // 4`` if transposed."""
    lane = active % 32
    first = active - lane + 8 * matrix
    if not trans:
        return [named[first + lane // 4] + 4 * (lane % 4)]
    return [named[first + 2 * (lane % 4) + half] + 2 * (lane // 4) for half in (0, 1)]


def load_matrix(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    """``ldmatrix``."""
    (target, place), text, trans = instruction.operands, instruction.text, "trans" in instruction.op
    puts, rows = [machine.target(o) for o in elements(target)], _rows(machine, instruction, place)
    width = 2 if trans else 4

    def run(mask: Mask) -> None:
        named = rows(mask)
        active = machine.thread if mask is None else np.flatnonzero(mask)
        for i, put in enumerate(puts):
            word = np.zeros(machine.total, np.uint32)
            for half, where in enumerate(_places(named, active, i, trans)):
                got = machine.shared.load(where, width, 1, active, text)[:, 0]
                word[active] |= got.astype(np.uint32) << np.uint32(16 * half)
            put(word, mask)

    return run


def store_matrix(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    """``stmatrix``."""
    (place, value), text, trans = instruction.operands, instruction.text, "trans" in instruction.op
    sources, rows = [machine.source(o, "b32") for o in elements(value)], _rows(machine, instruction, place)

    def run(mask: Mask) -> None:
        named = rows(mask)
        active = machine.thread if mask is None else np.flatnonzero(mask)
        for i, source in enumerate(sources):
            word = source()[active]
            for half, where in enumerate(_places(named, active, i, trans)):
                part = (word >> np.uint32(16 * half)).astype(np.uint16) if trans else word
                machine.shared.store(where, part[:, None], active, text)

    return run
