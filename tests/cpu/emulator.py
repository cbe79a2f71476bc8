"""Kernels that were compiled for aarch64, run by an emulated processor, behind the interface of the compiled library.

``Emulated(path)`` loads a shared object that was linked against nothing. What it wants of a C library is done here in Python.
``function(name)`` takes the same packed arguments as the real library: every word in them that is the address of a tensor is
replaced by that of a copy that lies alone between unmapped pages, so that one byte read or written beyond a tensor ends the call.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvq_ops import registry
from kvq_ops.cpu import kernels, library

PAGE = 4096
_CODE, _STUBS, _STACK, _THREAD, _ARGUMENTS = (i << 28 for i in range(1, 6))
_STACK_SIZE = 1 << 20
_STOP, _PLACE = (
    _STUBS,
    _STUBS + 16,
)  # where a call returns to, and what finds thread-local variables: no functions of a library


class Fault(RuntimeError):
    """The emulated code touched memory that is not its own, or called something that should not be called."""


class Reader:
    """An ELF shared object of 64 bits: its segments, symbols and relocations."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        if data[:6] != b"\x7fELF\x02\x01" or struct.unpack_from("<HH", data, 16) != (3, 183):
            raise Fault("no shared object for aarch64")
        phoff, phentsize, phnum = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
        # type, flags, offset, address, physical address, size in the file, size in memory, alignment
        self.headers = [struct.unpack_from("<IIQQQQQQ", data, phoff + i * phentsize) for i in range(phnum)]
        self.dynamic: dict[int, int] = {}
        for kind, _, offset, _, _, size, _, _ in self.headers:
            if kind == 2:
                self.dynamic = dict(struct.iter_unpack("<QQ", data[offset : offset + size]))
        if 36 in self.dynamic:
            raise Fault("packed relocations are not known here")
        count = struct.unpack_from("<II", data, self._offset(self.dynamic[4]))[1]  # of DT_HASH
        self.symbols = [self._symbol(i) for i in range(count)]

    def _offset(self, address: int) -> int:
        for kind, _, offset, start, _, size, _, _ in self.headers:
            if kind == 1 and start <= address < start + size:
                return offset + address - start
        raise Fault(f"address {address:#x} is in no segment")

    def _symbol(self, index: int) -> tuple[str, int, bool]:
        """Name, value, and whether it is defined here."""
        at = self._offset(self.dynamic[6]) + 24 * index
        name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", self.data, at)
        start = self._offset(self.dynamic[5]) + name
        return self.data[start : self.data.index(b"\0", start)].decode(), value, section != 0

    def relocations(self) -> list[tuple[int, int, int, int]]:
        """Address, type, symbol, addend."""
        found = []
        for table, size in ((7, 8), (23, 2)):  # DT_RELA, DT_JMPREL
            if table in self.dynamic:
                start = self._offset(self.dynamic[table])
                for at, info, addend in struct.iter_unpack(
                    "<QQq", self.data[start : start + self.dynamic[size]]
                ):
                    found.append((at, info & 0xFFFFFFFF, info >> 32, addend))
        return found


class Emulated:
    """A library in an emulated processor.

    Args:
        path: the shared object.
        at_end: whether copies of tensors end where their pages end, so that reading on faults; else they begin where pages
            begin, so that reading before them does.
        damage: ``(mask, value, flip)``: in every instruction whose bits under ``mask`` are ``value``, the bits of ``flip`` are
            turned over, for a test of what would notice that.
    """

    def __init__(self, path: Path, at_end: bool = True, damage: tuple[int, int, int] | None = None) -> None:
        import unicorn
        from unicorn import arm64_const

        self.at_end = at_end
        self._uc = uc = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self._error = unicorn.UcError
        self._x = [getattr(arm64_const, f"UC_ARM64_REG_X{i}") for i in range(29)]
        self._x += [arm64_const.UC_ARM64_REG_X29, arm64_const.UC_ARM64_REG_X30]
        self._d = [getattr(arm64_const, f"UC_ARM64_REG_D{i}") for i in range(2)]
        self._s0, self._sp = arm64_const.UC_ARM64_REG_S0, arm64_const.UC_ARM64_REG_SP
        self._pc = arm64_const.UC_ARM64_REG_PC
        uc.reg_write(arm64_const.UC_ARM64_REG_CPACR_EL1, 3 << 20)  # vectors are allowed
        uc.reg_write(arm64_const.UC_ARM64_REG_TPIDR_EL0, _THREAD)
        self._names: list[str] = ["return", "place of a thread-local variable"]
        self._library = {name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_do_")}
        self._heap: dict[int, int] = {}
        self._next = 0x10_0000_0000
        self._failed: Exception | None = None
        self._seen: dict[int, int] = {}  # addresses of tensors since the last call: how many bytes each has
        self._kept: dict[int, int] = {}  # of all tensors ever
        self.calls: dict[str, int] = {}
        uc.mem_map(_STACK, _STACK_SIZE)
        self._load(Reader(path.read_bytes()), damage)

    # ------------------------------------------------------------------------------------------------------- loading

    def _load(self, elf: Reader, damage: tuple[int, int, int] | None) -> None:
        uc = self._uc
        end = max(h[3] + h[6] for h in elf.headers if h[0] == 1)
        uc.mem_map(_CODE, -(-end // PAGE) * PAGE)
        self.damaged = 0
        for kind, flags, offset, address, _, size, whole, _ in elf.headers:
            if kind == 1:
                data = elf.data[offset : offset + size]
                if damage and flags & 1:
                    mask, value, flip = damage
                    words = np.frombuffer(data[: len(data) // 4 * 4], np.uint32).copy()
                    hit = words & mask == value
                    words[hit] ^= flip
                    self.damaged, data = int(hit.sum()), words.tobytes() + data[len(words) * 4 :]
                uc.mem_write(_CODE + address, data)
            elif kind == 7:  # of the only thread
                uc.mem_map(_THREAD, -(-whole // PAGE) * PAGE)
                uc.mem_write(_THREAD, elf.data[offset : offset + size])
        self._entry = {name: _CODE + value for name, value, defined in elf.symbols if defined}
        stubs: dict[str, int] = {}
        for at, kind, index, addend in elf.relocations():
            name, value, defined = elf.symbols[index]
            if kind == 1031:  # R_AARCH64_TLSDESC: what finds the place, and what it finds
                uc.mem_write(_CODE + at + 8, struct.pack("<Q", value + addend))
                target = _PLACE
            elif kind == 1027:  # R_AARCH64_RELATIVE
                target = _CODE + addend
            elif kind in (257, 1025, 1026):  # ABS64, GLOB_DAT, JUMP_SLOT
                if defined:
                    target = _CODE + value + addend
                else:
                    if name not in stubs:
                        stubs[name] = _STUBS + 16 * len(self._names)
                        self._names.append(name)
                    target = stubs[name] + addend
            else:
                raise Fault(f"relocation {kind} of {name!r} is not known here")
            uc.mem_write(_CODE + at, struct.pack("<Q", target))
        size = -(-16 * len(self._names) // PAGE) * PAGE
        uc.mem_map(_STUBS, size)
        uc.mem_write(_STUBS, struct.pack("<II8x", 0xD65F03C0, 0) * len(self._names))  # ret
        uc.mem_write(_PLACE, struct.pack("<II", 0xF9400400, 0xD65F03C0))  # ldr x0, [x0, #8]; ret
        import unicorn

        uc.hook_add(unicorn.UC_HOOK_CODE, self._stub, None, _STUBS + 32, _STUBS + size)
        if 25 in elf.dynamic:  # DT_INIT_ARRAY
            for i in range(elf.dynamic[27] // 8):
                (start,) = struct.unpack("<Q", uc.mem_read(_CODE + elf.dynamic[25] + 8 * i, 8))
                self._run(start)

    def _stub(self, uc: Any, address: int, size: int, data: Any) -> None:
        name = self._names[(address - _STUBS) // 16]
        try:
            if name not in self._library:
                raise Fault(f"called {name}")
            self._library[name]()
        except Exception as error:
            self._failed = error
            uc.emu_stop()

    # -------------------------------------------------------------------------------------------------- the C library

    def _arguments(self, count: int) -> list[int]:
        return [self._uc.reg_read(self._x[i]) for i in range(count)]

    def _return(self, value: int) -> None:
        self._uc.reg_write(self._x[0], value & 0xFFFF_FFFF_FFFF_FFFF)

    def _doubles(self, call: Callable[..., float], count: int = 1) -> None:
        bits = [self._uc.reg_read(r) for r in self._d[:count]]
        numbers = struct.unpack(f"<{count}d", struct.pack(f"<{count}Q", *bits))
        self._uc.reg_write(self._d[0], struct.unpack("<Q", struct.pack("<d", call(*numbers)))[0])

    def _float(self) -> float:
        return struct.unpack("<f", struct.pack("<I", self._uc.reg_read(self._s0)))[0]

    def _return_float(self, value: float) -> None:
        self._uc.reg_write(self._s0, int(np.float32(value).view(np.uint32)))

    def _do_memcpy(self) -> None:
        to, start, count = self._arguments(3)
        if count:
            self._uc.mem_write(to, bytes(self._uc.mem_read(start, count)))

    _do_memmove = _do_memcpy

    def _do_memset(self) -> None:
        to, byte, count = self._arguments(3)
        if count:
            self._uc.mem_write(to, bytes([byte & 255]) * count)

    def _do_bcmp(self) -> None:
        a, b, count = self._arguments(3)
        x, y = (bytes(self._uc.mem_read(p, count)) if count else b"" for p in (a, b))
        self._return((x > y) - (x < y))

    _do_memcmp = _do_bcmp

    def _allocate(self, size: int, align: int = 16) -> int:
        """Memory that ends where its pages end, as far as its alignment allows; poisoned, since nothing says what it holds."""
        size = max(-(-size // align) * align, align)
        pages = -(-size // PAGE) * PAGE
        base, self._next = self._next, self._next + pages + PAGE
        self._uc.mem_map(base, pages)
        self._uc.mem_write(base, b"\xff" * pages)
        at = base + pages - size
        self._heap[at] = pages
        return at

    def _release(self, at: int) -> None:
        if at:
            pages = self._heap.pop(at)  # KeyError: freed twice
            self._uc.mem_unmap(at // PAGE * PAGE, pages)

    def _do_malloc(self) -> None:
        self._return(self._allocate(self._arguments(1)[0]))

    _do__Znwm = _do__Znam = _do_malloc

    def _do_aligned_alloc(self) -> None:
        align, size = self._arguments(2)
        if size % align:
            raise Fault(f"aligned_alloc of {size} bytes, no multiple of {align}")
        self._return(self._allocate(size, align))

    def _do_free(self) -> None:
        self._release(self._arguments(1)[0])

    _do__ZdlPv = _do__ZdaPv = _do__ZdlPvm = _do__ZdaPvm = _do_free

    def _do___cxa_guard_acquire(self) -> None:
        (guard,) = self._arguments(1)
        self._return(int(self._uc.mem_read(guard, 1)[0] == 0))

    def _do___cxa_guard_release(self) -> None:
        self._uc.mem_write(self._arguments(1)[0], b"\1")

    def _nothing(self) -> None:
        self._return(0)

    _do___cxa_atexit = _do___cxa_thread_atexit = _nothing
    _do__ZNSt3__15mutex4lockEv = _do__ZNSt3__15mutex6unlockEv = _nothing
    _do_pthread_mutex_lock = _do_pthread_mutex_unlock = _do___getauxval = _nothing

    def _do__ZNSt3__16__sortIRNS_6__lessIssEEPsEEvT0_S5_T_(self) -> None:
        first, last = self._arguments(2)
        if last > first:
            numbers = np.sort(np.frombuffer(bytes(self._uc.mem_read(first, last - first)), np.int16))
            self._uc.mem_write(first, numbers.tobytes())

    def _do_cos(self) -> None:
        self._doubles(math.cos)

    def _do_sin(self) -> None:
        self._doubles(math.sin)

    def _do_sincos(self) -> None:
        (x,) = struct.unpack("<d", struct.pack("<Q", self._uc.reg_read(self._d[0])))
        for to, value in zip(self._arguments(2), (math.sin(x), math.cos(x)), strict=True):
            self._uc.mem_write(to, struct.pack("<d", value))

    def _do_pow(self) -> None:
        self._doubles(math.pow, 2)

    def _do_expf(self) -> None:
        x = self._float()
        with np.errstate(over="ignore", under="ignore"):
            self._return_float(float(np.exp(np.float64(x))))

    def _do_frexpf(self) -> None:
        mantissa, exponent = math.frexp(self._float())
        self._uc.mem_write(self._arguments(1)[0], struct.pack("<i", exponent))
        self._return_float(mantissa)

    # ------------------------------------------------------------------------------------------------------- calling

    def _run(self, entry: int, *arguments: int) -> int:
        uc = self._uc
        for register, value in zip(self._x, arguments, strict=False):
            uc.reg_write(register, value)
        uc.reg_write(self._x[30], _STOP)
        uc.reg_write(self._sp, _STACK + _STACK_SIZE - 64)
        self._failed = None
        try:
            uc.emu_start(entry, _STOP)
        except self._error as error:
            self._failed = Fault(f"{error} at {self._where()}")
        if self._failed is not None:
            raise self._failed
        value = uc.reg_read(self._x[0])
        return value - (1 << 64) if value >> 63 else value

    def _where(self) -> str:
        pc = self._uc.reg_read(self._pc)
        before = [(at, name) for name, at in self._entry.items() if at <= pc]
        at, name = max(before, default=(0, "?"))
        return f"{pc:#x} ({name} + {pc - at:#x})"

    def saw(self, tensor: Tensor, address: int) -> None:
        """``address`` is that of ``tensor``, as far as this goes from its first element to its last."""
        count = 0
        if tensor.numel():
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
            count = (last + 1) * tensor.element_size()
        self._seen[address] = max(count, self._seen.get(address, 0))
        self._kept[address] = count

    def function(self, name: str) -> Callable[[bytes], int]:
        """An entry point: packed arguments in, as the compiled library takes them."""
        return lambda arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: bytes) -> int:
        uc = self._uc
        self.calls[name] = self.calls.get(name, 0) + 1
        words = list(struct.unpack(f"<{len(arguments) // 8}Q", arguments))
        mapped: list[tuple[int, int]] = []
        copies: dict[int, tuple[int, bytes]] = {}
        at = _ARGUMENTS

        def place(size: int, at_end: bool) -> int:
            nonlocal at
            pages = max(-(-size // PAGE), 1) * PAGE
            uc.mem_map(at, pages)
            mapped.append((at, pages))
            start = at + pages - size if at_end else at
            at += pages + PAGE
            return start

        try:
            for i, word in enumerate(words):
                size = self._seen.get(word, self._kept.get(word) if word >> 32 else None)
                if size is None:
                    continue
                if word not in copies:
                    held = ctypes.string_at(word, size)
                    copies[word] = place(size, self.at_end), held
                    uc.mem_write(copies[word][0], held)
                words[i] = copies[word][0]
            packed = struct.pack(f"<{len(words)}Q", *words)
            start = place(len(packed), True)
            uc.mem_write(start, packed)
            result = self._run(self._entry[name], start)
            for word, (copy, before) in copies.items():
                after = bytes(uc.mem_read(copy, len(before)))
                if after != before:  # only what was written, since copies of views may overlap
                    old, new = (np.frombuffer(x, np.uint8) for x in (before, after))
                    there = np.ctypeslib.as_array((ctypes.c_uint8 * len(before)).from_address(word))
                    there[old != new] = new[old != new]
            return result
        finally:
            for where, pages in mapped:
                uc.mem_unmap(where, pages)
            self._seen.clear()


@contextlib.contextmanager
def installed(emulated: Emulated) -> Iterator[None]:
    """Every operator by ``emulated`` in place of the compiled library, in one thread."""
    before, threads, original = library._functions, torch.get_num_threads(), torch._C.TensorBase.data_ptr

    def data_ptr(tensor: Tensor) -> int:
        # Arguments hold what this was asked for, and nothing else that is an address.
        address: int = original(tensor)
        emulated.saw(tensor, address)
        return address

    kernels._sides.clear()  # packed from addresses that were not seen
    registry._choices.clear()
    torch.set_num_threads(1)
    torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign, assignment]
    library._functions = {name: emulated.function(name) for name in library._NAMES}
    try:
        yield
    finally:
        library._functions = before
        del torch.Tensor.data_ptr
        torch.set_num_threads(threads)
        registry._choices.clear()
        kernels._sides.clear()
