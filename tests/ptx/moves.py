"""Instructions that move numbers: between registers, and to and from memory.

Each function turns an instruction into a function of the active threads, as ``machine.Launch`` wants them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .alu import SIGNED, UNSIGNED, dtype_of
from .parser import Instruction, bits_of, elements

if TYPE_CHECKING:
    from .machine import Launch, Mask

__all__ = ["atomic", "copy_async", "load", "move", "store"]

_ATOMIC = {
    "add": lambda old, new: old + new,
    "max": max,
    "min": min,
    "exch": lambda old, new: new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
}


def load(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    op, (target, place), text = instruction.op, instruction.operands, instruction.text
    kind = op[-1]
    width = bits_of(kind) // 8
    puts = [machine.target(o) for o in elements(target)]
    if "param" in op:
        match = re.fullmatch(r"\[([\w$]+)(?:\+(\d+))?\]", place)
        assert match is not None, text
        at = int(match.group(2) or 0)
        raw = machine.parameters[match.group(1)][at : at + width * len(puts)]
        numbers = np.frombuffer(raw, SIGNED[width] if kind[0] == "s" else UNSIGNED[width])

        def parameter(mask: Mask) -> None:
            for number, put in zip(numbers, puts, strict=True):
                put(np.full(machine.total, number), mask)

        return parameter
    shared = _is_shared(op, text)
    address, signed = machine.address(place), kind[0] == "s"
    dtype = dtype_of(kind)

    def run(mask: Mask) -> None:
        active = machine.thread if mask is None else np.flatnonzero(mask)
        where = address()[active]
        if shared:
            got = machine.shared.load(where, width, len(puts), active, text)
        else:
            got = machine.memory.load(where, width, len(puts), text)
        for i, put in enumerate(puts):
            value = np.zeros(machine.total, got.dtype)
            value[active] = got[:, i]
            put(value.view(dtype) if signed else value, mask)

    return run


def _is_shared(op: tuple[str, ...], text: str) -> bool:
    if any(part.startswith("shared") for part in op):
        return True
    if "global" in op:
        return False
    raise NotImplementedError(f"state space of {text!r}")


def store(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    op, (place, value), text = instruction.op, instruction.operands, instruction.text
    width = bits_of(op[-1]) // 8
    sources = [machine.source(o, f"b{8 * width}") for o in elements(value)]
    shared, address = _is_shared(op, text), machine.address(place)

    def run(mask: Mask) -> None:
        active = machine.thread if mask is None else np.flatnonzero(mask)
        values = np.stack([source()[active] for source in sources], 1)
        where = address()[active]
        if shared:
            machine.shared.store(where, values, active, text)
        else:
            machine.memory.store(where, values, active, text)

    return run


def atomic(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    op, operands, text = instruction.op, instruction.operands, instruction.text
    if _is_shared(op, text) or op[0] == "atom" and "cas" in op:
        raise NotImplementedError(text)
    change = _ATOMIC[next(part for part in op if part in _ATOMIC)]
    kind = op[-1]
    width, dtype = bits_of(kind) // 8, np.dtype(dtype_of(kind))
    put = machine.target(operands[0]) if op[0] == "atom" else None
    place, value = operands[-2:]
    address, source = machine.address(place), machine.source(value, kind)

    def run(mask: Mask) -> None:
        active = machine.thread if mask is None else np.flatnonzero(mask)
        given = np.ascontiguousarray(source()[active])

        def update(old: Any, i: int) -> Any:
            before = np.array([old]).view(dtype)[0]
            with np.errstate(over="ignore"):
                return np.array([change(before, given[i])], dtype).view(UNSIGNED[width])[0]

        old = machine.memory.update(address()[active], width, update, text)
        if put is not None:
            whole = np.zeros(machine.total, old.dtype)
            whole[active] = old
            put(whole, mask)

    return run


def move(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    op, (target, value), _ = instruction.op, instruction.operands, instruction.text
    kind = op[-1]
    if target.startswith("{"):
        parts = elements(target)
        width = bits_of(kind) // len(parts)
        whole, puts = machine.source(value, f"b{bits_of(kind)}"), [machine.target(o) for o in parts]
        narrow = UNSIGNED[width // 8]

        def split(mask: Mask) -> None:
            word = whole()
            for i, put in enumerate(puts):
                put((word >> word.dtype.type(i * width)).astype(narrow), mask)

        return split
    put = machine.target(target)
    if value.startswith("{"):
        parts = elements(value)
        width = bits_of(kind) // len(parts)
        pieces = [machine.source(o, f"b{width}") for o in parts]
        wide = UNSIGNED[bits_of(kind) // 8]

        def join(mask: Mask) -> None:
            word = np.zeros(machine.total, wide)
            for i, piece in enumerate(pieces):
                word |= piece().astype(wide) << wide(i * width)
            put(word, mask)

        return join
    source = machine.source(value, kind)
    return lambda mask: put(source(), mask)


def copy_async(machine: Launch, instruction: Instruction) -> Callable[[Mask], None]:
    """``cp.async`` of 4, 8 or 16 bytes that says whether it reads them or writes zeros, and what starts and ends groups."""
    op, operands, text = instruction.op, instruction.operands, instruction.text
    copies = machine.copies
    if op[2] in ("commit_group", "wait_group", "wait_all"):
        most = int(operands[0]) if op[2] == "wait_group" else None

        def group(mask: Mask) -> None:
            active = np.ones(machine.total, bool) if mask is None else mask
            if op[2] == "commit_group":
                copies.commit(active)
            else:
                copies.wait(active, most, text)

        return group
    if op[2] not in ("ca", "cg") or "shared" not in op[3] or op[4] != "global":
        raise NotImplementedError(text)
    to, from_, size = machine.address(operands[0]), machine.address(operands[1]), int(operands[2], 0)
    if len(operands) > 4 or len(operands) == 4 and machine.is_predicate(operands[3]):
        raise NotImplementedError(text)
    given = machine.source(operands[3] if len(operands) > 3 else str(size), "u32")

    def run(mask: Mask) -> None:
        active = machine.thread if mask is None else np.flatnonzero(mask)
        read = given()[active]
        if not ((read == 0) | (read == size)).all():
            raise NotImplementedError(f"parts of what is copied: {text}")
        words = np.zeros((active.size, size // 4), np.uint32)
        some = read > 0
        words[some] = machine.memory.load(from_()[active[some]], 4, size // 4, text)
        copies.start(to()[active], words, active, text)

    return run
