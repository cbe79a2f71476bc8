"""What the pass did: sites found, rewritten, left and why; bytes before and after.

``passes.report()`` gives all graphs since the start of the process or the last ``passes.clear_report()``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvq_ops.handle import QuantizedKV, dense_bytes

from .fuse import SiteResult

__all__ = ["CacheResult", "GraphReport", "Report", "clear_report", "record", "report"]


@dataclass
class CacheResult:
    """One quantized cache that a graph uses.

    Attributes:
        name: where the graph got it from, such as ``past_key_values.layers[0].keys``.
        bytes: of all its planes, from real storage.
        dense_bytes: of the dense cache it stands for.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    axes: str
    bytes: int
    dense_bytes: int

    @staticmethod
    def of(name: str, handle: QuantizedKV) -> CacheResult:
        return CacheResult(
            name,
            handle.format_name,
            tuple(int(s) for s in handle.shape),
            handle.axes,
            handle.nbytes,
            dense_bytes(handle),
        )

    @staticmethod
    def planned(name: str, handle: QuantizedKV) -> CacheResult:
        """For a cache that exists only as a fake so far: what it will take."""
        shape = tuple(_hint(size) for size in handle.shape)
        stored = sum(math.prod(_hint(s) for s in p.shape) * p.dtype.itemsize for p in handle.store)
        dense = math.prod(shape) * handle.dtype.itemsize
        return CacheResult(name, handle.format_name, shape, handle.axes, stored, dense)


def _hint(size: int | torch.SymInt) -> int:
    """A size, or the one a symbolic size was traced with."""
    return size if isinstance(size, int) else int(size.node.hint)


@dataclass
class GraphReport:
    """One graph that went through the pass."""

    kind: str
    sites: list[SiteResult] = field(default_factory=list)
    caches: list[CacheResult] = field(default_factory=list)
    writes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def rewritten(self) -> int:
        return sum(site.rewritten for site in self.sites)

    def lines(self) -> Iterable[str]:
        yield f"{self.kind}: {self.rewritten} of {len(self.sites)} attention sites read the quantized cache"
        if self.caches:
            stored, dense = sum(c.bytes for c in self.caches), sum(c.dense_bytes for c in self.caches)
            formats = ", ".join(f"{n} {name}" for name, n in Counter(c.format for c in self.caches).items())
            yield f"  caches: {len(self.caches)} ({formats}), {stored:,} bytes instead of {dense:,}; {self.writes} writes"
        reasons: dict[str, list[SiteResult]] = {}
        for site in self.sites:
            if not site.rewritten:
                reasons.setdefault(site.reason, []).append(site)
        for reason, left in reasons.items():
            first = left[0]
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            where = f" in {first.module}" if first.module else ""
            yield f"  left: {first.anchor}{where}{more}: {first.node} {reason}"
        for note in self.notes:
            yield f"  note: {note}"


@dataclass
class Report:
    """All graphs of a process, in the order in which they were compiled."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def found(self) -> int:
        return sum(len(graph.sites) for graph in self.graphs)

    @property
    def rewritten(self) -> int:
        return sum(graph.rewritten for graph in self.graphs)

    @property
    def left(self) -> list[SiteResult]:
        return [site for graph in self.graphs for site in graph.sites if not site.rewritten]

    def text(self) -> str:
        if not self.graphs:
            return "no graph has gone through the pass yet"
        return "\n".join(line for graph in self.graphs for line in graph.lines())

    __str__ = text

    def data(self) -> dict[str, Any]:
        """The same as plain values for JSON."""
        return {
            "found": self.found,
            "rewritten": self.rewritten,
            "graphs": [
                {**asdict(graph), "found": len(graph.sites), "rewritten": graph.rewritten}
                for graph in self.graphs
            ],
        }


_graphs: list[GraphReport] = []


def record(graph: GraphReport) -> None:
    _graphs.append(graph)


def report() -> Report:
    """What the pass did so far in this process."""
    return Report(list(_graphs))


def clear_report() -> None:
    """Forget the graphs so far."""
    _graphs.clear()
