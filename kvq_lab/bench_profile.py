"""``kvq bench --profile``: the cycles that each stage of decode attention takes, from memory and from the caches.

The kernels are compiled once more, with clocks between their stages, and run on one thread. What a token and kv head takes is
counted in cycles of the core, whose speed is measured beside it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence

import torch

from kvq_lab.bench_attention import Inputs, Shape, copies, store
from kvq_ops import registry
from kvq_ops.cpu import kernels, library
from kvq_ops.formats import KVFormat

STAGES = ("prepare", "scores", "softmax", "values", "merge")
FORMATS = ("int8_per_token_head", "fp8_per_token_head", "int4_group32", "nvfp4")
# Of one kv head in cache: more than a kernel's start costs, and less than a core's own cache holds.
WARM_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Profile:
    """Cycles for a token and kv head by stage, and what they are relative to.

    Attributes:
        where: ``memory`` or ``cache``.
        nanoseconds: of a token and kv head, calls of the operator and all.
        bytes: stored, of a token and kv head.
        gigahertz: of the core.
    """

    format: str
    where: str
    tokens: int
    cycles: dict[str, float]
    nanoseconds: float
    bytes: float
    gigahertz: float


@contextlib.contextmanager
def profiled() -> Iterator[ctypes.CDLL]:
    """The kernels with clocks between their stages, on one thread, until the context is left."""
    flags, threads = os.environ.get("KVQ_CPU_FLAGS"), torch.get_num_threads()
    os.environ["KVQ_CPU_FLAGS"] = " ".join(filter(None, [flags, "-DKVQ_PROFILE"]))
    library.reset()
    registry._choices.clear()
    torch.set_num_threads(1)
    try:
        library.function("kvq_attention")
        yield ctypes.CDLL(str(library.loaded()))
    finally:
        torch.set_num_threads(threads)
        if flags is None:
            del os.environ["KVQ_CPU_FLAGS"]
        else:
            os.environ["KVQ_CPU_FLAGS"] = flags
        library.reset()
        registry._choices.clear()


def measure(
    pair: KVFormat, shape: Shape, tokens: int, where: str, clocks: ctypes.CDLL, seconds: float = 1.0
) -> Profile:
    """Decode attention over ``tokens`` for about ``seconds``; the best call counts, stage by stage."""
    inputs = Inputs.random(shape, tokens)
    first = store(pair, inputs)
    stores = [first] + [first.clone() for _ in range(copies(first.nbytes) - 1 if where == "memory" else 0)]
    ticks = (ctypes.c_int64 * (len(STAGES) + 1))()
    best: list[float] = []
    fastest = float("inf")
    until = time.perf_counter() + seconds
    turn = 0
    clocks.kvq_profile(ticks)  # forgets what ran before
    while turn < 3 * len(stores) or time.perf_counter() < until:
        stored = stores[turn % len(stores)]
        turn += 1
        begin = time.perf_counter()
        kernels.attention(inputs.query, stored.key, stored.value, pair.key, pair.value)
        taken = time.perf_counter() - begin
        clocks.kvq_profile(ticks)
        if taken < fastest and turn > len(stores):
            fastest, best = taken, list(ticks)
    cycle = best[-1] / 1e6  # ticks of a cycle
    count = tokens * shape.kv_heads * shape.batch
    cycles = {stage: spent / cycle / count for stage, spent in zip(STAGES, best, strict=False)}
    return Profile(
        str(pair),
        where,
        tokens,
        cycles,
        fastest / count * 1e9,
        first.nbytes / count,
        _gigahertz(clocks),
    )


def _gigahertz(clocks: ctypes.CDLL) -> float:
    """Cycles a nanosecond, from how long a known number of them takes."""
    ticks = (ctypes.c_int64 * (len(STAGES) + 1))()
    best = 0.0
    for _ in range(5):  # the fastest counts: a busy machine makes a core seem slower
        begin = time.perf_counter()
        clocks.kvq_profile(ticks)  # 20 times a million cycles
        best = max(best, 20e6 / (time.perf_counter() - begin) / 1e9)
    return best


def profiles(pairs: Sequence[KVFormat], shape: Shape, tokens: int, seconds: float = 1.0) -> list[Profile]:
    """Each format from memory, and one kv head of it from the caches."""
    one = dataclasses.replace(shape, batch=1, kv_heads=1, query_heads=shape.query_heads // shape.kv_heads)
    with profiled() as clocks, torch.no_grad():
        return [
            measure(pair, *how, clocks, seconds)
            for pair in pairs
            for how in ((shape, tokens, "memory"), (one, WARM_TOKENS, "cache"))
        ]


def show(found: Sequence[Profile], shape: Shape) -> str:
    """A table in Markdown."""
    lines = [
        f"Cycles of one thread for a token and kv head; {shape.query_heads // shape.kv_heads} query heads for each, "
        f"head_dim {shape.head_dim}.",
        "",
        "| format | from | tokens | " + " | ".join(STAGES) + " | sum | ns | GB/s | GHz |",
        "|---|---|---|" + "---|" * (len(STAGES) + 4),
    ]
    for p in found:
        cells = [f"{p.cycles[stage]:.1f}" for stage in STAGES] + [f"{sum(p.cycles.values()):.1f}"]
        lines.append(
            f"| {p.format} | {p.where} | {p.tokens} | "
            + " | ".join(cells)
            + f" | {p.nanoseconds:.1f} | {p.bytes / p.nanoseconds:.1f} | {p.gigahertz:.2f} |"
        )
    return "\n".join(lines)
