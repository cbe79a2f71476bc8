"""A machine that runs compiled PTX on the CPU: numpy over all threads of a launch, no GPU, no CUDA.

It is there for tests. Threads of a warp diverge and meet again (the lowest program counter goes first); warps run in lockstep,
or in random order by a seed. Every access to memory is checked, see ``memory``. Not modelled: ``tcgen05``, TMA, mbarrier,
``cp.async``, the caches, weak memory beyond the race check, and time.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import mma
from .alu import dtype_of, operation
from .memory import Fault, GlobalMemory, SharedMemory
from .parser import Entry, Instruction, bits_of, elements

__all__ = ["Launch", "Statistics", "pack_arguments", "tensor_argument"]

Mask = np.ndarray | None  # None: every thread
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_ATOMIC = {
    "add": lambda old, new: old + new,
    "max": max,
    "min": min,
    "exch": lambda old, new: new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
}


@dataclass
class Statistics:
    """What a launch did: warp instructions by opcode, and bytes of global memory that threads asked for."""

    opcodes: Counter[str] = field(default_factory=Counter)
    bytes_read: int = 0
    bytes_written: int = 0


def tensor_argument(address: int, shape: Sequence[int] = (), stride: Sequence[int] = ()) -> bytes:
    """A tensor as CuTe DSL 4.8.1 passes it to a kernel: pointer, dynamic sizes (int32), padding, dynamic strides (int64).

    The layout is documented nowhere; it was read off compiled kernels.
    """
    packed = struct.pack("<Q", address) + b"".join(struct.pack("<i", int(n)) for n in shape)
    packed += bytes(-len(packed) % 8)
    return packed + b"".join(struct.pack("<q", int(n)) for n in stride)


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
        self._parameters = {p.name: bytes(a) for p, a in zip(entry.parameters, arguments, strict=True)}
        for parameter in entry.parameters:
            if len(self._parameters[parameter.name]) != parameter.size:
                raise ValueError(f"parameter {parameter.name} takes {parameter.size} bytes")
        self._registers: dict[str, np.ndarray] = {}
        self._special = self._special_registers(grid, block)
        self.shared = SharedMemory(self.ctas, entry.static_shared + shared, self.threads, self._grain())
        self.done = np.zeros(self.total, bool)
        self.waiting = np.full(self.total, -1)
        self.counter = np.zeros(self.total, np.int64)
        self._random = None if schedule is None else np.random.default_rng(schedule)
        # Half of the schedules let one warp run as far as it can, the others change at every branch.
        self._greedy = schedule is not None and schedule % 2 == 1
        self._favourite = -1
        self.statistics = Statistics()
        self._steps = [self._decode(instruction) for instruction in entry.instructions]
        self._starts = set(entry.labels.values())

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
        widths = [
            bits_of(i.op[-1]) // 8
            for i in self.entry.instructions
            if i.op[0] in ("ld", "st") and any(part.startswith("shared") for part in i.op)
        ]
        return min([4, *widths])

    # ------------------------------------------------------------------------------------------------ operands

    def register(self, name: str) -> np.ndarray:
        if name not in self._registers:
            kind = self.entry.type_of(name)
            dtype = np.bool_ if kind == "pred" else _UNSIGNED[bits_of(kind) // 8]
            self._registers[name] = np.zeros(self.total, dtype)
        return self._registers[name]

    def source(self, operand: str, kind: str) -> Callable[[], np.ndarray]:
        """A function that gives the operand as numbers of a PTX type."""
        dtype = np.dtype(dtype_of(kind))
        if operand in self._special:
            value = self._special[operand].astype(_UNSIGNED[dtype.itemsize]).view(dtype)
            return lambda: value
        if operand.startswith("%") or operand in self.entry.registers:
            register = self.register(operand)
            if register.dtype.itemsize == dtype.itemsize:
                view = register if register.dtype == np.bool_ else register.view(dtype)
                return lambda: view
            narrow = _UNSIGNED[dtype.itemsize]
            return lambda: register.astype(narrow).view(dtype)
        constant = self._constant(operand, dtype)
        return lambda: constant

    def _constant(self, operand: str, dtype: np.dtype) -> np.ndarray:
        if dtype == np.bool_:
            return np.full(self.total, operand not in ("0", "false"))
        unsigned = _UNSIGNED[dtype.itemsize]
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
                    value = value.astype(_SIGNED[register.dtype.itemsize]).view(register.dtype)
                else:
                    value = value.view(_UNSIGNED[value.dtype.itemsize]).astype(register.dtype)
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
        special = {
            "ld": self._decode_load, "st": self._decode_store, "mov": self._decode_move, "shfl": self._decode_shuffle,
            "mma": self._decode_mma, "vote": self._decode_vote, "atom": self._decode_atomic, "red": self._decode_atomic,
        }  # fmt: skip
        if name in special:
            return special[name](instruction)
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
        sources = [self._negatable(o, kind) for o, kind in zip(operands[1:], kinds, strict=True)]
        if len(sources) == 1:
            one = sources[0]
            return lambda mask: put(function(one()), mask)
        if len(sources) == 2:
            one, other = sources
            return lambda mask: put(function(one(), other()), mask)
        return lambda mask: put(function(*(source() for source in sources)), mask)

    def _negatable(self, operand: str, kind: str) -> Callable[[], np.ndarray]:
        if operand.startswith("!"):
            inner = self.source(operand[1:], kind)
            return lambda: ~inner()
        return self.source(operand, kind)

    def _decode_load(self, instruction: Instruction) -> Callable[[Mask], None]:
        op, (target, place), text = instruction.op, instruction.operands, instruction.text
        kind = op[-1]
        width = bits_of(kind) // 8
        puts = [self.target(o) for o in elements(target)]
        if "param" in op:
            match = re.fullmatch(r"\[([\w$]+)(?:\+(\d+))?\]", place)
            assert match is not None, text
            at = int(match.group(2) or 0)
            raw = self._parameters[match.group(1)][at : at + width * len(puts)]
            numbers = np.frombuffer(raw, _UNSIGNED[width])

            def parameter(mask: Mask) -> None:
                for number, put in zip(numbers, puts, strict=True):
                    put(np.full(self.total, number), mask)

            return parameter
        shared = self._space(op, text)
        address, signed = self.address(place), kind[0] == "s"
        dtype = dtype_of(kind)

        def load(mask: Mask) -> None:
            active = self.thread if mask is None else np.flatnonzero(mask)
            where = address()[active]
            if shared:
                got = self.shared.load(where, width, len(puts), active, text)
            else:
                got = self.memory.load(where, width, len(puts), text)
            for i, put in enumerate(puts):
                value = np.zeros(self.total, got.dtype)
                value[active] = got[:, i]
                put(value.view(dtype) if signed else value, mask)

        return load

    def _space(self, op: tuple[str, ...], text: str) -> bool:
        if any(part.startswith("shared") for part in op):
            return True
        if "global" in op:
            return False
        raise NotImplementedError(f"state space of {text!r}")

    def _decode_store(self, instruction: Instruction) -> Callable[[Mask], None]:
        op, (place, value), text = instruction.op, instruction.operands, instruction.text
        width = bits_of(op[-1]) // 8
        sources = [self.source(o, f"b{8 * width}") for o in elements(value)]
        shared, address = self._space(op, text), self.address(place)

        def store(mask: Mask) -> None:
            active = self.thread if mask is None else np.flatnonzero(mask)
            values = np.stack([source()[active] for source in sources], 1)
            where = address()[active]
            if shared:
                self.shared.store(where, values, active, text)
            else:
                self.memory.store(where, values, active, text)

        return store

    def _decode_atomic(self, instruction: Instruction) -> Callable[[Mask], None]:
        op, operands, text = instruction.op, instruction.operands, instruction.text
        if self._space(op, text) or op[0] == "atom" and "cas" in op:
            raise NotImplementedError(text)
        change = _ATOMIC[next(part for part in op if part in _ATOMIC)]
        kind = op[-1]
        width, dtype = bits_of(kind) // 8, np.dtype(dtype_of(kind))
        put = self.target(operands[0]) if op[0] == "atom" else None
        place, value = operands[-2:]
        address, source = self.address(place), self.source(value, kind)

        def atomic(mask: Mask) -> None:
            active = self.thread if mask is None else np.flatnonzero(mask)
            given = np.ascontiguousarray(source()[active])

            def update(old: Any, i: int) -> Any:
                before = np.array([old]).view(dtype)[0]
                with np.errstate(over="ignore"):
                    return np.array([change(before, given[i])], dtype).view(_UNSIGNED[width])[0]

            old = self.memory.update(address()[active], width, update, text)
            if put is not None:
                whole = np.zeros(self.total, old.dtype)
                whole[active] = old
                put(whole, mask)

        return atomic

    def _decode_move(self, instruction: Instruction) -> Callable[[Mask], None]:
        op, (target, value), _ = instruction.op, instruction.operands, instruction.text
        kind = op[-1]
        if target.startswith("{"):
            parts = elements(target)
            width = bits_of(kind) // len(parts)
            whole, puts = self.source(value, f"b{bits_of(kind)}"), [self.target(o) for o in parts]
            narrow = _UNSIGNED[width // 8]

            def split(mask: Mask) -> None:
                word = whole()
                for i, put in enumerate(puts):
                    put((word >> word.dtype.type(i * width)).astype(narrow), mask)

            return split
        put = self.target(target)
        if value.startswith("{"):
            parts = elements(value)
            width = bits_of(kind) // len(parts)
            pieces = [self.source(o, f"b{width}") for o in parts]
            wide = _UNSIGNED[bits_of(kind) // 8]

            def join(mask: Mask) -> None:
                word = np.zeros(self.total, wide)
                for i, piece in enumerate(pieces):
                    word |= piece().astype(wide) << wide(i * width)
                put(word, mask)

            return join
        source = self.source(value, kind)
        return lambda mask: put(source(), mask)

    def _whole_warps(self, mask: Mask, members: np.ndarray, text: str) -> None:
        """Raise unless just the named lanes of each warp that takes part are here."""
        if mask is None:
            mask = np.ones(self.total, bool)
        grid = mask.reshape(-1, 32)
        named = (members.reshape(-1, 32)[:, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
        here = grid.any(1)
        if (named[here] != grid[here][:, None, :])[grid[here]].any():
            raise Fault(f"lanes that are named are not here: {text}")

    def _decode_shuffle(self, instruction: Instruction) -> Callable[[Mask], None]:
        operands, text = instruction.operands, instruction.text
        mode = instruction.op[2]
        targets = operands[0].split("|")
        put = self.target(targets[0])
        put_valid = self.target(targets[1]) if len(targets) > 1 else None
        value, step = self.source(operands[1], "b32"), self.source(operands[2], "u32")
        control, members = self.source(operands[3], "u32"), self.source(operands[4], "u32")

        def shuffle(mask: Mask) -> None:
            self._whole_warps(mask, np.broadcast_to(members(), (self.total,)), text)
            by, clamp = step().astype(np.int64) & 31, control().astype(np.int64)
            segment, bound = (clamp >> 8) & 31, clamp & 31
            top = (self.lane & segment) | (bound & ~segment)
            low = self.lane & segment
            from_ = {
                "bfly": self.lane ^ by,
                "up": self.lane - by,
                "down": self.lane + by,
                "idx": low | (by & ~segment),
            }[mode]
            valid = from_ >= top if mode == "up" else from_ <= top
            from_ = np.where(valid, from_, self.lane)
            source = self.warp * 32 + from_
            if mask is not None and not mask[source][mask].all():
                raise Fault(f"a lane reads from one that is not here: {text}")
            put(value()[source], mask)
            if put_valid is not None:
                put_valid(valid, mask)

        return shuffle

    def _decode_vote(self, instruction: Instruction) -> Callable[[Mask], None]:
        op, operands, text = instruction.op, instruction.operands, instruction.text
        put, question = self.target(operands[0]), self._negatable(operands[1], "pred")
        members = self.source(operands[2], "u32")

        def vote(mask: Mask) -> None:
            self._whole_warps(mask, np.broadcast_to(members(), (self.total,)), text)
            asked = question() if mask is None else question() & mask
            by_warp = asked.reshape(-1, 32)
            if "ballot" in op:
                bits = (by_warp.astype(np.uint32) << np.arange(32, dtype=np.uint32)).sum(1, dtype=np.uint32)
                put(np.repeat(bits, 32), mask)
                return
            here = np.ones_like(by_warp) if mask is None else mask.reshape(-1, 32)
            answer = by_warp.any(1) if "any" in op else (by_warp | ~here).all(1)
            put(np.repeat(answer, 32), mask)

        return vote

    def _decode_mma(self, instruction: Instruction) -> Callable[[Mask], None]:
        op, operands, text = instruction.op, instruction.operands, instruction.text
        kind = op[-2]
        if (
            op[:6] != ("mma", "sync", "aligned", "m16n8k16", "row", "col")
            or op[6] != "f32"
            or kind not in ("f16", "bf16")
        ):
            raise NotImplementedError(text)
        puts = [self.target(o) for o in elements(operands[0])]
        a, b = ([self.source(o, "b32") for o in elements(part)] for part in operands[1:3])
        c = [self.source(o, "f32") for o in elements(operands[3])]

        def product(mask: Mask) -> None:
            self._whole_warps(mask, np.full(self.total, 0xFFFFFFFF, np.uint32), text)
            results = mma.multiply([r() for r in a], [r() for r in b], [r() for r in c], kind)
            for put, result in zip(puts, results, strict=True):
                put(result, mask)

        return product

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
            if active is None or active.any():
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
            self._whole_warps(active, np.broadcast_to(members, (self.total,)), instruction.text)
            self.shared.warp_epoch[np.unique(self.warp[active])] += 1
        elif len(instruction.operands) != 1 or "arrive" in instruction.op or "red" in instruction.op:
            raise NotImplementedError(instruction.text)
        else:
            number = self.source(instruction.operands[0], "u32")()
            self.waiting[active] = number[active]


_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
