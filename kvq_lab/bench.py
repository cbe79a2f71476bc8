"""``kvq bench``: how fast attention over a quantized cache is, next to what there is without it, in one run.

Every contender is held against the definition of its operator in float64 before it is timed and after; what is not right
has a row that says so and no speed. Contenders take turns, and a ratio is the median over rounds of ratios within a round, so
that a busy minute of the machine touches both sides of it.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import kvq_ops
from kvq_lab import bench_attention, bench_cache
from kvq_lab.bench_attention import Inputs, Shape
from kvq_lab.bench_bandwidth import Bandwidth
from kvq_lab.bench_parts import CONTEXTS, LENGTHS, LLAMA_CACHES, MODEL_DTYPES, MODEL_FORMATS, PARTS
from kvq_lab.bench_rows import SCHEMA, Row, bench_environment, with_bandwidth
from kvq_lab.bench_timing import Clock, Contender, time_contenders
from kvq_lab.progress import Stages
from kvq_ops import registry
from kvq_ops.errors import ImplementationError, ShapeError, near_names
from kvq_ops.formats import KVFormat


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        parts: of ``PARTS``.
        formats: cache formats of the parts on attention alone.
        implementations: of decode attention, by name; all that serve a format if there are none.
        shape: of that attention.
        lengths: tokens in the cache of decode attention.
        dtypes: of its queries.
        tokens: in the cache of prefill (the new ones included), append and linearity.
        prefill: new tokens of a prefill.
        rounds: timed rounds; fewer, but three at least, of what takes longer than ``budget`` seconds.
        budget: seconds for the rounds of one group of contenders.
        contexts: tokens in the cache of the model.
        model_formats, model_dtypes: of the model's quantized caches, and of the model.
        llama_bench: llama.cpp's benchmark program, if there is one.
        llama_caches: llama.cpp's types of caches; each reads its tokens anew, which takes minutes at long contexts.
    """

    parts: tuple[str, ...] = PARTS
    formats: tuple[str, ...] = ()
    implementations: tuple[str, ...] = ()
    shape: Shape = Shape()
    lengths: tuple[int, ...] = LENGTHS
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    tokens: int = 16384
    prefill: int = 2048
    rounds: int = 21
    budget: float = 60.0
    contexts: tuple[int, ...] = CONTEXTS
    model_formats: tuple[str, ...] = MODEL_FORMATS
    model_dtypes: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in MODEL_DTYPES)
    llama_bench: Path | None = None
    llama_caches: tuple[str, ...] = LLAMA_CACHES

    @property
    def pairs(self) -> list[KVFormat]:
        names = self.formats or kvq_ops.formats.kv_names()
        return [kvq_ops.parse_kv_format(name) for name in names]

    @property
    def fills(self) -> list[int]:
        """Lengths at which linearity is looked at: an eighth of the room, a quarter, a half, all."""
        return sorted({max(self.tokens // part, 1) for part in (8, 4, 2, 1)})

    def check(self) -> None:
        """Raise what would be raised later, before anything slow.

        Raises:
            ShapeError: query heads that are no multiple of the kv heads.
            HeadDimError: a format that cannot code vectors of ``head_dim``.
            ImplementationError: an implementation that is none.
        """
        shape = self.shape
        if shape.query_heads % shape.kv_heads:
            raise ShapeError(
                "attention to measure",
                got=f"{shape.query_heads} query heads for {shape.kv_heads} kv heads",
                allowed="a multiple of the kv heads",
            )
        known = [row.name for row in registry.implementations("attention")]
        for name in self.implementations:
            if name not in known:
                raise ImplementationError(
                    "an implementation of attention", got=repr(name), allowed=near_names(name, known)
                )
        for pair in self.pairs:
            pair.key.check_head_dim(shape.head_dim)
            pair.value.check_head_dim(shape.head_dim)

    def plain(self) -> dict[str, Any]:
        """As JSON values."""

        def value(x: Any) -> Any:
            if isinstance(x, tuple):
                return [value(y) for y in x]
            return (
                bench_attention.short(x)
                if isinstance(x, torch.dtype)
                else str(x)
                if isinstance(x, Path)
                else x
            )

        found = {f.name: value(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "shape"}
        return found | {"shape": dataclasses.asdict(self.shape)}


# -- parts --------------------------------------------------------------------------------------------------------------


class Run:
    """One run of the benchmark: its rows, and what there is to say beside them."""

    def __init__(self, settings: Settings, stages: Stages, clock: Clock = time.perf_counter) -> None:
        self.settings, self.stages, self.clock = settings, stages, clock
        self.rows: list[Row] = []
        self.notes: set[str] = set()

    def parts(self) -> dict[str, Callable[[], None]]:
        return {
            "decode": self.decode,
            "prefill": self.prefill,
            "append": self.append,
            "linearity": self.linearity,
            "model": self.model,
        }

    def decode(self) -> None:
        settings = self.settings
        for tokens in settings.lengths:
            inputs = Inputs.random(settings.shape, tokens)
            for dtype in settings.dtypes:
                base = bench_attention.sdpa(settings.shape, inputs, torch.bfloat16)
                contenders = [base, bench_attention.sdpa(settings.shape, inputs, torch.float32)]
                contenders.append(bench_attention.torchao_int8(settings.shape, inputs))
                title = f"Decode attention over {tokens} tokens, {bench_attention.short(dtype)}"
                with self.stages.stage(f"{title}: preparing", len(settings.pairs)) as advance:
                    for pair in settings.pairs:
                        contenders += bench_attention.decode_contenders(
                            settings.shape, inputs, pair, dtype, self.notes, settings.implementations
                        )
                        advance(1)
                self._time(title, contenders, base)

    def prefill(self) -> None:
        settings = self.settings
        tokens = max(settings.tokens, settings.prefill)
        inputs = Inputs.random(settings.shape, tokens, settings.prefill)
        for dtype in settings.dtypes:
            base = bench_cache.prefill_sdpa(settings.shape, inputs, torch.bfloat16)
            contenders = [base, bench_cache.prefill_sdpa(settings.shape, inputs, torch.float32)]
            title = f"Prefill of {settings.prefill} tokens into {tokens}, {bench_attention.short(dtype)}"
            with self.stages.stage(f"{title}: preparing", len(settings.pairs)) as advance:
                for pair in settings.pairs:
                    contenders += bench_cache.prefill_contenders(
                        settings.shape, inputs, pair, dtype, self.notes
                    )
                    advance(1)
            self._time(title, contenders, base)

    def append(self) -> None:
        settings = self.settings
        room = bench_cache.append_room(settings.rounds)
        inputs = Inputs.random(settings.shape, settings.tokens + room)
        for dtype, pair in self._dtypes_and_pairs("Appending a token"):
            contenders = bench_cache.append_contenders(
                settings.shape, inputs, pair, settings.tokens, dtype, self.notes
            )
            if contenders:
                append, decode = contenders
                self._time("", contenders, None, {append.row.name: decode.row.name})

    def linearity(self) -> None:
        settings = self.settings
        inputs = Inputs.random(settings.shape, settings.tokens)
        for dtype, pair in self._dtypes_and_pairs(f"Decode with parts of {settings.tokens} tokens filled"):
            contenders = bench_cache.linearity_contenders(
                settings.shape, inputs, pair, settings.fills, dtype, self.notes
            )
            name = bench_cache.linearity_name
            shares = {
                name(pair, form, filled): name(pair, form, settings.fills[-1])
                for form in ("length", "mask")
                for filled in settings.fills
            }
            self._time("", contenders, None, shares)

    def model(self) -> None:
        from kvq_lab import bench_model

        self.rows += bench_model.measure(self.settings, self.stages, self.notes, self.clock)

    def _dtypes_and_pairs(self, title: str) -> Iterator[tuple[torch.dtype, KVFormat]]:
        pairs = self.settings.pairs
        for dtype in self.settings.dtypes:
            with self.stages.stage(f"{title}, {bench_attention.short(dtype)}", len(pairs)) as advance:
                for pair in pairs:
                    yield dtype, pair
                    advance(1)

    def _time(
        self,
        title: str,
        contenders: list[Contender],
        base: Contender | None,
        shares: dict[str, str] | None = None,
    ) -> None:
        """Time ``contenders`` and keep their rows; with a title, as a stage of its own."""
        settings = self.settings
        options: dict[str, Any] = {"budget": settings.budget, "clock": self.clock, "shares": shares}
        if title:
            with self.stages.stage(title, len(contenders)) as advance:
                time_contenders(contenders, base, settings.rounds, advance=advance, **options)
        else:
            time_contenders(contenders, base, settings.rounds, **options)
        self.rows += [contender.row for contender in contenders]


def measure(
    settings: Settings,
    stages: Stages,
    clock: Clock = time.perf_counter,
    bandwidth: Bandwidth | None = None,
) -> dict[str, Any]:
    """Run the parts; the result is what is shown and written.

    Bandwidth is measured before the first part and after each, and the best counts. When it is interrupted, the result holds what
    was measured until then, and ``stopped`` says so.
    """
    begin = time.monotonic()
    run = Run(settings, stages, clock)
    found = bench_environment()
    if found["load"] is not None and found["load"] > 0.5 * found["cores"]:
        run.notes.add(
            f"the machine was busy at the beginning: a load of {found['load']} on {found['cores']} cores; threads that wait for "
            "each other then take many times as long"
        )
    bandwidth = bandwidth or Bandwidth.of_this_machine(torch.get_num_threads())
    parts = [part for part in PARTS if part in settings.parts]

    def read(when: str) -> None:
        with stages.stage(f"Reading memory with {bandwidth.threads} threads {when}", 1) as advance:
            bandwidth.measure()
            advance(1)

    stopped = False
    try:
        read("at first")
        with torch.no_grad():
            for part in parts:
                run.parts()[part]()
                read(f"after {part}")
    except KeyboardInterrupt:
        # What took half an hour to measure is not thrown away.
        stopped = True
        run.notes.add("stopped before the end: what came later is missing")
    if bandwidth.best:
        with_bandwidth(run.rows, bandwidth.best)
    fastest = max((row.bytes_per_second or 0.0 for row in run.rows), default=0.0)
    if doubts := bandwidth.doubts(fastest):
        run.notes.add(doubts)
    return {
        "schema": SCHEMA,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": found,
        "settings": settings.plain(),
        "bandwidth": dataclasses.asdict(bandwidth),
        "notes": sorted(run.notes),
        "stopped": stopped,
        "rows": run.rows,
        "seconds": time.monotonic() - begin,
    }
