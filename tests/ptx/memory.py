"""Global and shared memory that complain: bounds, alignment, permission, values that nobody wrote, and races."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from .alu import UNSIGNED

__all__ = ["AsyncCopies", "Fault", "GlobalMemory", "SharedMemory"]

_WINDOW = 40  # each buffer has an address range of its own, so that no overrun reaches a neighbour


class Fault(RuntimeError):
    """What a kernel must not do."""


class GlobalMemory:
    """Buffers of numpy, aliased: what a kernel stores is in the array afterwards."""

    def __init__(self) -> None:
        self._bytes: list[np.ndarray] = []
        self._readable: list[np.ndarray | None] = []
        self._writer: list[np.ndarray | None] = []
        self.bytes_read = self.bytes_written = 0

    def add(
        self, array: np.ndarray, *, readable: np.ndarray | bool = True, writable: str | bool = True
    ) -> int:
        """The address of a contiguous array.

        Args:
            readable: False, or a bool for each byte, where reading is a fault. What a kernel stores becomes readable.
            writable: False, True, or ``"once"``: no two threads may write the same byte.
        """
        flat = array.reshape(-1)
        if not np.shares_memory(flat, array) and array.size:
            raise ValueError("an array that is not contiguous")
        data = flat.view(np.uint8)
        mask = None
        if not isinstance(readable, bool):
            mask = readable.reshape(-1).astype(bool).copy()
            assert mask.size == data.size, "one flag for each byte"
        elif not readable:
            mask = np.zeros(data.size, bool)
        writer = None
        if writable is False:
            writer = np.full(data.size, -2, np.int64)
        elif writable == "once":
            writer = np.full(data.size, -1, np.int64)
        self._bytes.append(data)
        self._readable.append(mask)
        self._writer.append(writer)
        return len(self._bytes) << _WINDOW

    def _parts(
        self, address: np.ndarray, size: int, text: str
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        if (address % size).any():
            raise Fault(f"misaligned access of {size} bytes: {text}")
        which = (address >> _WINDOW) - 1
        offset = address & ((1 << _WINDOW) - 1)
        for buffer in np.unique(which).tolist():
            if not 0 <= buffer < len(self._bytes):
                raise Fault(f"address {int(address[which == buffer][0]):#x} in no buffer: {text}")
            mine = which == buffer
            at = offset[mine]
            if (at + size > self._bytes[buffer].size).any():
                raise Fault(f"byte {int(at.max()) + size} of a buffer of {self._bytes[buffer].size}: {text}")
            yield buffer, mine, at

    def load(self, address: np.ndarray, width: int, count: int, text: str) -> np.ndarray:
        """``[len(address), count]`` unsigned elements of ``width`` bytes."""
        size = width * count
        out = np.empty((address.size, count), UNSIGNED[width])
        step = np.arange(count)
        for buffer, mine, at in self._parts(address, size, text):
            mask = self._readable[buffer]
            if mask is not None and not mask[at[:, None] + np.arange(size)].all():
                raise Fault(f"read of a forbidden or unwritten byte in buffer {buffer}: {text}")
            data = self._bytes[buffer]
            words = data[: data.size // width * width].view(UNSIGNED[width])
            out[mine] = words[(at // width)[:, None] + step]
        self.bytes_read += address.size * size
        return out

    def store(self, address: np.ndarray, values: np.ndarray, thread: np.ndarray, text: str) -> None:
        """Store ``[len(address), count]`` unsigned elements."""
        width, count = values.dtype.itemsize, values.shape[1]
        size = width * count
        for buffer, mine, at in self._parts(address, size, text):
            touched = at[:, None] + np.arange(size)
            writer = self._writer[buffer]
            if writer is not None:
                own = np.broadcast_to(thread[mine][:, None], touched.shape)
                before = writer[touched]
                if ((before != -1) & (before != own)).any():
                    what = "a read-only byte" if (before == -2).any() else "a byte that another thread wrote"
                    raise Fault(f"write to {what} in buffer {buffer}: {text}")
                writer[touched] = own
                if (writer[touched] != own).any():
                    raise Fault(f"two threads write one byte of buffer {buffer}: {text}")
            data = self._bytes[buffer]
            words = data[: data.size // width * width].view(values.dtype)
            words[(at // width)[:, None] + np.arange(count)] = values[mine]
            mask = self._readable[buffer]
            if mask is not None:
                mask[touched] = True
        self.bytes_written += address.size * size

    def update(self, address: np.ndarray, width: int, change, text: str) -> np.ndarray:
        """One thread after another: ``change(old, i)`` gives the new element of thread ``i``. Returns what was there."""
        old = np.empty(address.size, UNSIGNED[width])
        for i in range(address.size):
            for buffer, _, at in self._parts(address[i : i + 1], width, text):
                data = self._bytes[buffer]
                words = data[: data.size // width * width].view(UNSIGNED[width])
                old[i] = words[at[0] // width]
                words[at[0] // width] = change(old[i], i)
        return old


class SharedMemory:
    """Shared memory of all CTAs. Reads need a write before them, and a barrier between the two of different threads.

    Two accesses of which one writes race unless a barrier of the CTA, or of the warp where both threads are in one, lies
    between them; that is an error however the schedule happened to order them.
    """

    def __init__(self, ctas: int, size: int, threads: int, grain: int, replicated: bool = False) -> None:
        self._size = -(-size // 16) * 16
        self._data = np.zeros(ctas * self._size, np.uint8)
        self._threads = threads
        self._grain = grain
        self._replicated = replicated
        cells = self._data.size // grain
        self._writer = np.full(cells, -1, np.int64)
        self._write_epoch = np.zeros(cells, np.int64)
        self._write_warp_epoch = np.zeros(cells, np.int64)
        self._reader_warp = np.full(cells, -1, np.int64)  # -2: of several warps
        self._read_epoch = np.full(cells, -1, np.int64)
        self._pending = np.zeros(cells, bool)
        self.epoch = np.zeros(ctas, np.int64)
        self.warp_epoch = np.zeros(ctas * threads // 32, np.int64)

    def _place(
        self, address: np.ndarray, size: int, thread: np.ndarray, text: str
    ) -> tuple[np.ndarray, np.ndarray]:
        if (address % size).any():
            raise Fault(f"misaligned shared access of {size} bytes: {text}")
        if (address < 0).any() or (address + size > self._size).any():
            raise Fault(f"shared address {int(address.max())} + {size} of {self._size}: {text}")
        at = thread // self._threads * self._size + address
        cells = (at // self._grain)[:, None] + np.arange(size // self._grain)
        if self._pending[cells].any():
            raise Fault(f"a copy into shared memory has not been waited for: {text}")
        return at, cells

    def load(self, address: np.ndarray, width: int, count: int, thread: np.ndarray, text: str) -> np.ndarray:
        at, cells = self._place(address, width * count, thread, text)
        writer = self._writer[cells]
        if (writer < 0).any():
            raise Fault(f"read of shared memory that nobody wrote: {text}")
        epoch = self.epoch[thread // self._threads][:, None]
        warp = (thread // 32)[:, None]
        fresh = (writer != thread[:, None]) & (self._write_epoch[cells] == epoch)
        fresh &= (writer // 32 != warp) | (self._write_warp_epoch[cells] == self.warp_epoch[warp])
        if fresh.any():
            raise Fault(f"race: shared memory read with no barrier after another thread's write: {text}")
        known = (self._read_epoch[cells] == epoch) & (self._reader_warp[cells] != warp)
        self._reader_warp[cells] = np.where(known, -2, np.broadcast_to(warp, cells.shape))
        self._read_epoch[cells] = np.broadcast_to(epoch, cells.shape)
        # Different warps of one step may have read one cell; the last of them is in the table.
        self._reader_warp[cells] = np.where(self._reader_warp[cells] != warp, -2, self._reader_warp[cells])
        words = self._data.view(UNSIGNED[width])
        return words[(at // width)[:, None] + np.arange(count)]

    def _claim(
        self, at: np.ndarray, cells: np.ndarray, values: np.ndarray, thread: np.ndarray, text: str
    ) -> None:
        """Write for the threads, unless others read or write there with no barrier between."""
        epoch = self.epoch[thread // self._threads][:, None]
        warp = (thread // 32)[:, None]
        read = (self._read_epoch[cells] == epoch) & (self._reader_warp[cells] != warp)
        if read.any():
            raise Fault(f"race: shared memory overwritten with no barrier after another warp's read: {text}")
        writer = self._writer[cells]
        fresh = (writer >= 0) & (writer != thread[:, None]) & (self._write_epoch[cells] == epoch)
        fresh &= (writer // 32 != warp) | (self._write_warp_epoch[cells] == self.warp_epoch[warp])
        own = np.broadcast_to(thread[:, None], cells.shape)
        self._writer[cells] = own
        width, count = values.dtype.itemsize, values.shape[1]
        places, words = (at // width)[:, None] + np.arange(count), self._data.view(values.dtype)
        again = fresh.any(1) | (self._writer[cells] != own).any(1)
        if again.any():
            others = words[places[fresh.any(1)]] == values[fresh.any(1)]
            words[places] = values
            if not (self._replicated and others.all() and (words[places] == values).all()):
                raise Fault(f"race: two threads write one place of shared memory: {text}")
        words[places] = values
        self._write_epoch[cells] = np.broadcast_to(epoch, cells.shape)
        self._write_warp_epoch[cells] = np.broadcast_to(self.warp_epoch[warp], cells.shape)

    def store(self, address: np.ndarray, values: np.ndarray, thread: np.ndarray, text: str) -> None:
        at, cells = self._place(address, values.dtype.itemsize * values.shape[1], thread, text)
        self._claim(at, cells, values, thread, text)

    def expect(self, address: np.ndarray, values: np.ndarray, thread: np.ndarray, text: str) -> None:
        """A copy has been started that writes here at any time from now on: nothing else may."""
        at, cells = self._place(address, values.dtype.itemsize * values.shape[1], thread, text)
        self._claim(at, cells, values, thread, text)
        self._pending[cells] = True

    def receive(self, address: np.ndarray, values: np.ndarray, thread: np.ndarray, text: str) -> None:
        """The copy is done, as far as the threads that started it know; others have to meet them at a barrier."""
        size = values.dtype.itemsize * values.shape[1]
        at = thread // self._threads * self._size + address
        self._pending[(at // self._grain)[:, None] + np.arange(size // self._grain)] = False
        self.store(address, values, thread, text)


class AsyncCopies:
    """``cp.async``: copies into shared memory that a thread has started, in groups by its commits.

    Numbers are taken when a copy starts and arrive when it is waited for: what looks at them before finds a fault.
    """

    def __init__(self, shared: SharedMemory, threads: int) -> None:
        self._shared = shared
        self._group = np.zeros(threads, np.int64)  # that copies join now
        self._started: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []

    def start(self, address: np.ndarray, words: np.ndarray, thread: np.ndarray, text: str) -> None:
        self._shared.expect(address, words, thread, text)
        self._started.append((address, words, thread, self._group[thread]))

    def commit(self, active: np.ndarray) -> None:
        self._group[active] += 1

    def wait(self, active: np.ndarray, most: int | None, text: str) -> None:
        """Until at most so many of the groups of each thread are on their way, or, for None, no copy at all."""
        left = []
        for address, words, thread, group in self._started:
            due = active[thread].copy()
            if most is not None:
                due &= group < self._group[thread] - most
            if due.any():
                self._shared.receive(address[due], words[due], thread[due], text)
                keep = ~due
                if not keep.any():
                    continue
                address, words, thread, group = address[keep], words[keep], thread[keep], group[keep]
            left.append((address, words, thread, group))
        self._started = left
