"""How fast this machine reads memory: threads over a buffer much larger than its caches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

_CACHE_UNKNOWN = 32 * 2**20
_SMALLEST_BUFFER = 256 * 2**20
_LARGEST_BUFFER = 2**30

# Reductions that numpy does in vector registers without the interpreter lock. Which one is fastest depends on the
# processor; none needs more arithmetic than one instruction for each vector that is read.
READERS: dict[str, Callable[[Any], Any]] = {
    "or of int64": lambda part: np.bitwise_or.reduce(part),
    "max of int64": lambda part: part.max(),
    "max of float32": lambda part: part.view(np.float32).max(),
    "max of uint8": lambda part: part.view(np.uint8).max(),
}


def cache_bytes() -> int:
    """Size of the largest data cache, as the system tells; 32 MiB where it does not."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text.rstrip("KMG")) * units.get(text[-1:], 1))
        except (OSError, ValueError):
            continue
    return max(sizes, default=_CACHE_UNKNOWN)


@dataclasses.dataclass
class Bandwidth:
    """The fastest that memory was read so far in this run.

    Attributes:
        threads: that read at once, each its part of the buffer.
        buffer: bytes that each pass reads.
        best: bytes a second of the fastest pass; 0 before there was any.
        reader: what read it, one of ``READERS``.
        passes: how many there were.
    """

    threads: int
    buffer: int
    best: float = 0.0
    reader: str = ""
    passes: int = 0

    @staticmethod
    def of_this_machine(threads: int) -> Bandwidth:
        """With a buffer of eight times the largest cache, within 256 MiB and 1 GiB."""
        return Bandwidth(threads, min(max(8 * cache_bytes(), _SMALLEST_BUFFER), _LARGEST_BUFFER))

    def measure(self, passes: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
        """Read the buffer ``passes`` times by each reader, keep the best of all so far, and return it.

        It is the best that counts, since a busy machine makes memory seem slower and nothing makes it seem faster.
        """
        words = np.ones(self.buffer // 8, np.int64)  # written, so that every page is a real one
        parts = np.array_split(words, self.threads)
        with ThreadPoolExecutor(self.threads) as pool:
            for name, read in READERS.items():
                list(pool.map(read, parts))
                for _ in range(passes):
                    begin = clock()
                    list(pool.map(read, parts))
                    taken = clock() - begin
                    self.passes += 1
                    if words.nbytes > self.best * taken:
                        self.best, self.reader = words.nbytes / taken, name
        return self.best

    def doubts(self, fastest: float) -> str | None:
        """Why the figure cannot be the most that memory gives, if something read ``fastest`` bytes a second; else ``None``."""
        if fastest <= 1.05 * self.best:
            return None
        return (
            f"a kernel read {fastest / 1e9:.1f} GB/s, more than the {self.best / 1e9:.1f} GB/s that reading a buffer of "
            f"{self.buffer / 2**20:.0f} MiB reached: its data stood in a cache, or the machine was busy while bandwidth was "
            "measured; fractions of bandwidth in this run are too high"
        )
