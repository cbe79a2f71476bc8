"""A machine that runs compiled PTX on the CPU: numpy over all threads of a launch, no GPU, no CUDA.

It is there for tests. Threads of a warp diverge and meet again (the lowest program counter goes first); warps run in lockstep,
or in random order by a seed. Every access to memory is checked, see ``memory``; copies of ``cp.async`` arrive when they are
waited for and not before. Not modelled: ``tcgen05``, ``wgmma``, TMA, mbarrier, the caches, weak memory beyond the race check, and
time.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import lanes, moves
from .alu import SIGNED, UNSIGNED, dtype_of, operation
from .memory import AsyncCopies, Fault, GlobalMemory, SharedMemory
from .parser import Entry, Instruction, bits_of

__all__ = ["Launch", "Statistics", "pack_arguments"]

Mask = np.ndarray | None  # None: every thread
# Instructions that are not plain functions of their operands.
_DECODE = {
    "ld": moves.load, "st": moves.store, "mov": moves.move, "atom": moves.atomic, "red": moves.atomic, "cp": moves.copy_async,
    "shfl": lanes.shuffle, "vote": lanes.vote, "mma": lanes.product, "ldmatrix": lanes.load_matrix,
    "stmatrix": lanes.store_matrix, "redux": lanes.reduction,
}  # fmt: skip


@dataclass
class Statistics:
    """What a launch did: warp instructions by opcode, and bytes of global memory that threads asked for."""

    opcodes: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0


def pack_arguments(entry: Entry, values: Sequence[Any]) -> list[bytes]:
    """Numbers (addresses among them) and ready bytes as the kernel's parameters, by their sizes."""
    if len(values) != len(entry.parameters):
        raise ValueError(f"{entry.name} has {len(entry.parameters)} parameters, got {len(values)}")
    packed = []
    for parameter, value in zip(entry.parameters, values, strict=True):
        if isinstance(value, float):
            value = struct.pack("<d" if parameter.size == 8 else "<f", value)
        elif not isinstance(value, bytes):
            value = int(value).to_bytes(parameter.size, "little", signed=int(value) < 0)
        if len(value) > parameter.size:
            raise ValueError(f"{len(value)} bytes for parameter {parameter.name} of {parameter.size}")
        packed.append(value.ljust(parameter.size, b"\0"))
    return packed


class Launch:
    """One kernel on one grid. ``run`` may be called once.

    Args:
        arguments: one ``bytes`` for each parameter.
        shared: bytes of dynamic shared memory.
        schedule: None for lockstep, or the seed of a random order of warps.
        replicated: threads that store the same number to the same place of shared memory do no harm. Triton's layouts have such.
    """

    def __init__(
        self,
        entry: Entry,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[bytes],
        memory: GlobalMemory,
        *,
        shared: int = 0,
        schedule: int | None = None,
        replicated: bool = False,
    ) -> None:
        self.entry, self.memory = entry, memory
        self.ctas, self.threads = int(np.prod(grid)), int(np.prod(block))
        if self.threads % 32:
            raise ValueError(f"blocks of {self.threads} threads: only whole warps are modelled")
        if entry.threads and self.threads != entry.threads:
            raise ValueError(
                f"{entry.name} was compiled for blocks of {entry.threads} threads, not {self.threads}"
            )
        self.total = self.ctas * self.threads
        self.thread = np.arange(self.total)
        self.lane = self.thread % 32
        self.warp = self.thread // 32
        self.parameters = {p.name: bytes(a) for p, a in zip(entry.parameters, arguments, strict=True)}
        for parameter in entry.parameters:
            if len(self.parameters[parameter.name]) != parameter.size:
                raise ValueError(f"parameter {parameter.name} takes {parameter.size} bytes")
        self._registers: dict[str, np.ndarray] = {}
        self._special = self._special_registers(grid, block)
        self.shared = SharedMemory(
            self.ctas, entry.static_shared + shared, self.threads, self._grain(), replicated
        )
        self.copies = AsyncCopies(self.shared, self.total)
        self.done = np.zeros(self.total, bool)
        self.waiting = np.full(self.total, -1)
        self.counter = np.zeros(self.total, np.int64)
        self._random = None if schedule is None else np.random.default_rng(schedule)
        # Half of the schedules let one warp run as far as it can, the others change at every branch.
        self._greedy = schedule is not None and schedule % 2 == 1
        self._favourite = -1
        self.statistics = Statistics()
        self._steps = [self._decode(instruction) for instruction in entry.instructions]
        # Where others may join: behind labels that are branched to, most labels are for debuggers.
        self._starts = {entry.labels[i.operands[0]] for i in entry.instructions if i.op[0] == "bra"}

    def _special_registers(self, grid: tuple[int, ...], block: tuple[int, ...]) -> dict[str, np.ndarray]:
        inside, cta = self.thread % self.threads, self.thread // self.threads
        found: dict[str, Any] = {"%laneid": self.lane, "%warpid": inside // 32}
        for i, axis in enumerate("xyz"):
            found[f"%tid.{axis}"] = inside // int(np.prod(block[:i])) % block[i]
            found[f"%ctaid.{axis}"] = cta // int(np.prod(grid[:i])) % grid[i]
            found[f"%ntid.{axis}"] = np.full(self.total, block[i])
            found[f"%nctaid.{axis}"] = np.full(self.total, grid[i])
        return {name: np.asarray(value).astype(np.uint32) for name, value in found.items()}

    def _grain(self) -> int:
        """Bytes of shared memory that are watched together: the least that an instruction touches."""
        found = [4]
        for i in self.entry.instructions:
            if i.op[0] in ("ld", "st") and any(part.startswith("shared") for part in i.op):
                found.append(bits_of(i.op[-1]) // 8)
            elif i.op[0] in ("ldmatrix", "stmatrix") and "trans" in i.op:
                found.append(2)
        return min(found)

    # ------------------------------------------------------------------------------------------------ operands

    def register(self, name: str) -> np.ndarray:
        if name not in self._registers:
            kind = self.entry.type_of(name)
            dtype = np.bool_ if kind == "pred" else UNSIGNED[bits_of(kind) // 8]
            self._registers[name] = np.zeros(self.total, dtype)
        return self._registers[name]

    def is_predicate(self, operand: str) -> bool:
        return operand.startswith("%p") and self.entry.type_of(operand) == "pred"

    def source(self, operand: str, kind: str) -> Callable[[], np.ndarray]:
        """A function that gives the operand as numbers of a PTX type."""
        dtype = np.dtype(dtype_of(kind))
        if operand in self._special:
            value = self._special[operand].astype(UNSIGNED[dtype.itemsize]).view(dtype)
            return lambda: value
        if operand.startswith("%") or operand in self.entry.registers:
            register = self.register(operand)
            if register.dtype.itemsize == dtype.itemsize:
                view = register if register.dtype == np.bool_ else register.view(dtype)
                return lambda: view
            narrow = UNSIGNED[dtype.itemsize]
            return lambda: register.astype(narrow).view(dtype)
        constant = self._constant(operand, dtype)
        return lambda: constant

    def _constant(self, operand: str, dtype: np.dtype) -> np.ndarray:
        if dtype == np.bool_:
            return np.full(self.total, operand not in ("0", "false"))
        unsigned = UNSIGNED[dtype.itemsize]
        if operand[:2] in ("0f", "0F", "0d", "0D"):
            bits = int(operand[2:], 16)
            stored = (
                np.array([bits], np.uint32).view(np.float32)
                if operand[1] in "fF"
                else np.array([bits], np.uint64)
            )
            number = (
                stored if dtype.kind != "f" else stored.view(np.float64 if operand[1] in "dD" else np.float32)
            )
            value = number.astype(dtype) if dtype.kind == "f" else stored.view(unsigned)
        elif operand in self.entry.shared:
            value = np.array([self.entry.shared[operand]], unsigned)
        elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0) & ((1 << 8 * dtype.itemsize) - 1)
            value = np.array([number], unsigned)
        else:
            raise NotImplementedError(f"operand {operand!r}")
        return np.full(self.total, value.view(dtype)[0], dtype)

    def target(self, operand: str) -> Callable[[np.ndarray, Mask], None]:
        """A function that writes a register of the active threads, extended or cut to its width."""
        if operand == "_":
            return lambda value, mask: None
        register = self.register(operand)
        is_pred = register.dtype == np.bool_

        def put(value: np.ndarray, mask: Mask) -> None:
            if not is_pred:
                if value.dtype.itemsize == register.dtype.itemsize:
                    value = value.view(register.dtype)
                elif value.dtype.kind == "i":
                    value = value.astype(SIGNED[register.dtype.itemsize]).view(register.dtype)
                else:
                    value = value.view(UNSIGNED[value.dtype.itemsize]).astype(register.dtype)
            if mask is None:
                register[...] = value
            else:
                np.copyto(register, value, where=mask)

        return put

    def address(self, operand: str) -> Callable[[], np.ndarray]:
        match = re.fullmatch(r"\[\s*([%\w$@.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if match is None:
            raise NotImplementedError(f"address {operand!r}")
        base, offset = match.group(1), int(match.group(2) or 0)
        if base in self.entry.shared:
            at = np.full(self.total, self.entry.shared[base] + offset, np.int64)
            return lambda: at
        wide = bits_of(self.entry.type_of(base)) == 64
        register = self.register(base)
        if wide:
            return lambda: register.view(np.int64) + offset
        return lambda: register.astype(np.int64) + offset

    # ------------------------------------------------------------------------------------------------ instructions

    def _decode(self, instruction: Instruction) -> Callable[[Mask], None]:
        """The instruction as a function of the active threads."""
        op, operands = instruction.op, instruction.operands
        name = op[0]
        if name in _DECODE:
            return _DECODE[name](self, instruction)
        if name in ("bra", "ret", "exit", "bar", "barrier"):
            return lambda mask: None
        if name in ("fence", "membar", "griddepcontrol", "prefetch", "discard"):
            return lambda mask: None
        chosen = operation(op)
        if chosen is None:
            raise NotImplementedError(instruction.text)
        kinds, _, function = chosen
        if name == "setp" and "|" in operands[0]:
            raise NotImplementedError(instruction.text)
        if len(operands) != len(kinds) + 1:
            if name not in ("min", "max") or len(operands) != 4:
                raise NotImplementedError(instruction.text)
            two = function
            kinds, function = (*kinds, kinds[0]), lambda a, b, c: two(two(a, b), c)
        put = self.target(operands[0])
        sources = [self.negatable(o, kind) for o, kind in zip(operands[1:], kinds, strict=True)]
        if len(sources) == 1:
            one = sources[0]
            return lambda mask: put(function(one()), mask)
        if len(sources) == 2:
            one, other = sources
            return lambda mask: put(function(one(), other()), mask)
        return lambda mask: put(function(*(source() for source in sources)), mask)

    def negatable(self, operand: str, kind: str) -> Callable[[], np.ndarray]:
        if operand.startswith("!"):
            inner = self.source(operand[1:], kind)
            return lambda: ~inner()
        return self.source(operand, kind)

    def whole_warps(self, mask: Mask, members: np.ndarray, text: str) -> None:
        """Raise unless just the named lanes of each warp that takes part are here."""
        everyone = bool((members == 0xFFFFFFFF).all())
        if mask is None:
            if everyone:
                return
            mask = np.ones(self.total, bool)
        grid = mask.reshape(-1, 32)
        if everyone:
            if (grid.any(1) & ~grid.all(1)).any():
                raise Fault(f"lanes that are named are not here: {text}")
            return
        named = (members.reshape(-1, 32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        here = grid.any(1)
        if (named[here] != grid[here][:, None, :])[grid[here]].any():
            raise Fault(f"lanes that are named are not here: {text}")

    # ------------------------------------------------------------------------------------------------ running

    def run(self) -> Statistics:
        with np.errstate(all="ignore"):
            while self._step():
                pass
        return self.statistics

    def _step(self) -> bool:
        runnable = ~self.done & (self.waiting < 0)
        if not runnable.any():
            return self._release()
        if self._random is not None:
            runnable &= self._some_warps(runnable)
        counter = int(self.counter[runnable].min())
        mask = runnable & (self.counter == counter)
        self._block(counter, None if mask.all() else mask)
        return True

    def _some_warps(self, runnable: np.ndarray) -> np.ndarray:
        """One warp by chance, and others that are at the same place by chance too."""
        assert self._random is not None
        ready = np.unique(self.warp[runnable])
        if not (self._greedy and self._favourite in ready):
            self._favourite = int(self._random.choice(ready))
        mine = self.warp == self._favourite
        if self._greedy:
            return mine
        # A warp joins with the threads it would run itself: those that are behind the others of it.
        lowest = np.where(runnable, self.counter, np.iinfo(np.int64).max).reshape(-1, 32).min(1)
        company = (self._random.random(lowest.size) < 0.5) & (lowest == lowest[self._favourite])
        return mine | company[self.warp]

    def _release(self) -> bool:
        """Open the barriers that everyone reached; False when every thread is done."""
        if self.done.all():
            return False
        opened = False
        for cta in range(self.ctas):
            part = slice(cta * self.threads, (cta + 1) * self.threads)
            waiting = self.waiting[part][~self.done[part]]
            if waiting.size and (waiting == waiting[0]).all():
                self.waiting[part] = -1
                self.shared.epoch[cta] += 1
                opened = True
        if not opened:
            raise Fault("threads wait at different barriers for ever")
        return True

    def _block(self, index: int, mask: Mask) -> None:
        """Run from ``index`` to the next branch, barrier or label."""
        opcodes = self.statistics.opcodes
        instructions, steps = self.entry.instructions, self._steps
        warps = self.total // 32 if mask is None else int(mask.reshape(-1, 32).any(1).sum())
        before = self.memory.bytes_read, self.memory.bytes_written
        everyone = np.ones(self.total, bool) if mask is None else mask
        while True:
            instruction = instructions[index]
            name = instruction.op[0]
            opcodes[".".join(instruction.op)] += warps
            active = mask
            if instruction.guard is not None:
                guard = self.register(instruction.guard[0])
                active = everyone & (~guard if instruction.guard[1] else guard)
            after = index + 1
            if name in ("bra", "ret", "exit", "bar", "barrier"):
                self.counter[everyone] = after
                self._control(instruction, everyone if active is None else active)
                break
            if instruction.guard is None or active is not None and active.any():
                steps[index](active)
            index = after
            if index >= len(instructions) or index in self._starts:
                self.counter[everyone] = index
                if index >= len(instructions):
                    self.done |= everyone
                break
        self.statistics.bytes_read += self.memory.bytes_read - before[0]
        self.statistics.bytes_written += self.memory.bytes_written - before[1]

    def _control(self, instruction: Instruction, active: np.ndarray) -> None:
        name = instruction.op[0]
        if name == "bra":
            self.counter[active] = self.entry.labels[instruction.operands[0]]
        elif name in ("ret", "exit"):
            self.done |= active
        elif "warp" in instruction.op:
            members = self.source(instruction.operands[0], "u32")()
            self.whole_warps(active, np.broadcast_to(members, (self.total,)), instruction.text)
            self.shared.warp_epoch[np.unique(self.warp[active])] += 1
        elif len(instruction.operands) != 1 or "arrive" in instruction.op or "red" in instruction.op:
            raise NotImplementedError(instruction.text)
        else:
            number = self.source(instruction.operands[0], "u32")()
            self.waiting[active] = number[active]
