"""Launch parameters that are faster on this GPU than those that are known, written to ``configs.json`` of the kernels."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import kvq_ops
from kvq_lab import gpu_oracle as oracle
from kvq_lab.gpu_cases import HEADLINE, KERNELS, held
from kvq_lab.gpu_rows import Budget, Case, Row, attempt
from kvq_lab.gpu_timing import (
    KV_HEADS,
    QUERY_HEADS,
    Bench,
    Shape,
    corners,
    expected_part,
    flush_buffer,
    part,
    timing,
)
from kvq_ops.formats import KVFormat, parse_kv_format

SHAPES = (Shape(8, 32768), Shape(1, 8192))
LEAST_GAIN = 1.02
"""A candidate replaces what is known when it is faster by so much; less is noise."""
SLOTS = (1, 2, 3, 4, 6, 8)
"""Programs for each multiprocessor that splits are to make."""
EACH = 25.0
"""Seconds that the candidates of a format may take."""
MOST = 36
"""Candidates that :func:`candidates` gives at most."""
CHUNK = 4
"""Candidates that one case compiles."""


def candidates(rule: dict[str, int]) -> list[dict[str, int]]:
    """Neighbours of a rule, the likeliest first; ``block_m`` follows from the query and stays."""
    own = rule["block_n"]
    found = [
        {"block_n": block_n, "num_warps": warps, "num_stages": stages}
        for block_n in (own, own * 2, own // 2)
        for warps in (rule["num_warps"], rule["num_warps"] * 2, rule["num_warps"] // 2)
        for stages in (rule["num_stages"], 3, 1, 4)
        if block_n >= 16 and 1 <= warps <= 8
    ]
    return [config for at, config in enumerate(found) if config not in found[:at]]


def cases() -> list[Case]:
    """Candidates compiled side by side, then timed format by format."""
    made = []
    for at, name in enumerate(HEADLINE):
        for chunk in range(-(-MOST // CHUNK)):
            run = functools.partial(compile_some, name, chunk * CHUNK)
            made.append(Case("compile", f"tune {name} {chunk}", run, 3.0 * CHUNK, 100.0 - at))
        run = functools.partial(tune, name)
        made.append(Case("tune", name, run, 10.0, 100.0 - at, alone=True))
    return made


def compile_some(name: str, first: int) -> Iterator[Row]:
    """Compile some candidates into Triton's cache on disk; what cannot be compiled is refused again when it is timed."""

    def check(row: Row) -> Row:
        trial = Trial(parse_kv_format(name), torch.empty(1, dtype=torch.uint8, device="cuda"))
        for config in candidates(trial.known)[first : first + CHUNK]:
            try:
                trial.run(config)
            except Exception:  # too much shared memory, or too many registers
                continue
        torch.cuda.synchronize()
        return row

    with torch.no_grad(), kvq_ops.use_implementation(KERNELS):
        yield attempt(Row("compile", f"tune {name} {first // CHUNK}", format=name), check)


def tune(name: str) -> Iterator[Row]:
    """Time the candidates of a format; what is faster than what is known is written to the table at once."""
    with torch.no_grad(), kvq_ops.use_implementation(KERNELS):
        yield attempt(Row("tune", name, format=name), functools.partial(_tune, parse_kv_format(name)))


def _tune(pair: KVFormat, row: Row) -> Row:
    trial = Trial(pair, flush_buffer())
    budget = Budget(EACH)
    base = best = trial.seconds(trial.known)
    chosen: dict[str, int] | None = None
    tried, refused = 0, []
    waiting = [config for config in candidates(trial.known) if trial.known != trial.known | config]
    while waiting and budget.left > 0:
        config = waiting.pop(0)
        tried += 1
        try:
            taken = trial.seconds(config)
        except Exception as error:  # too much shared memory, too many registers, or a wrong result
            torch.cuda.synchronize()
            refused.append(f"{config}: {type(error).__name__}: {error}")
            continue
        if taken < best / LEAST_GAIN:
            best, chosen = taken, config
        if not waiting and "slots" not in config:
            # Last, how finely to cut, with the best of the rest.
            plain = chosen or {name: trial.known[name] for name in ("block_n", "num_warps", "num_stages")}
            waiting = [plain | {"slots": slots} for slots in SLOTS]
    if chosen is not None:
        # The best of many is in part luck: once more, one after the other.
        base, best = trial.seconds(trial.known), trial.seconds(chosen)
        if best > base / LEAST_GAIN:
            chosen = None
    row.verdict, row.seconds, row.detail = "timed", best, "\n".join(refused)[-4000:]
    row.why = f"{tried} candidates, {base * 1e3:.3f} ms before; {chosen or 'as known'}"
    if chosen is not None:
        gain = {"gain": round(base / best, 3), "gpu": torch.cuda.get_device_name()}
        write([{**trial.identity, "config": chosen, **gain}])
    return row


class Trial:
    """Decoding of a format at the shapes that are tuned for, with launch parameters of one's choice."""

    def __init__(self, pair: KVFormat, flush: Tensor) -> None:
        from kvq_ops.triton_kernels import configs
        from kvq_ops.triton_kernels.spec import Spec, spec_of

        key, value = spec_of(pair.key), spec_of(pair.value)
        assert isinstance(key, Spec) and isinstance(value, Spec)
        target, group = configs.target(), QUERY_HEADS // KV_HEADS
        bench = Bench(flush, 1.0)
        self.flush = flush
        self.calls: list[Callable[[], Tensor]] = []
        self.expected: list[dict[tuple[int, int], oracle.Expected]] = []
        for shape in SHAPES:
            query, keys, values = bench.dense(shape)
            stores = [kvq_ops.quantize(x, row.name) for x, row in ((keys, pair.key), (values, pair.value))]
            names = pair.key.name, pair.value.name
            self.calls.append(functools.partial(kvq_ops.attention, query, stores[0], stores[1], *names))
            self.expected.append(
                {
                    at: expected_part(pair.key, pair.value, query, stores, *at, False)
                    for at in corners(shape.batch)
                }
            )
            dim = keys.shape[-1]
        self.identity: dict[str, Any] = {
            "kind": "decode",
            "codes": [configs.code_of(key), configs.code_of(value)],
            "head_dim": configs.padded(dim),
            "group": group,
            "fp32": False,
            "backend": target[0],
            "arch": target[1],
        }
        self.known = configs.config_for("decode", key, value, dim, group, torch.bfloat16, target)

    def run(self, config: dict[str, int]) -> list[Tensor]:
        with only({**self.identity, "config": config}):
            return [call() for call in self.calls]

    def seconds(self, config: dict[str, int]) -> float:
        """What one call at each shape takes together.

        Raises:
            ValueError: a result is further from float64 than roundings go.
        """
        for out, expected in zip(self.run(config), self.expected, strict=True):
            for at, one in expected.items():
                row = held(Row("tune", ""), one, part(out, *at))
                if not row.ok:
                    raise ValueError(row.why)
        with only({**self.identity, "config": config}):
            return sum(timing(call, self.flush, rounds=10, most=0.1).seconds for call in self.calls)


class only:
    """Within it one entry is the whole table."""

    def __init__(self, entry: dict[str, Any]) -> None:
        self.entry = entry

    def __enter__(self) -> None:
        from kvq_ops.triton_kernels import configs

        configs._chosen.cache_clear()
        self.before, entries = configs.measured, [self.entry]
        configs.measured = lambda: entries  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        from kvq_ops.triton_kernels import configs

        configs.measured = self.before
        configs._chosen.cache_clear()


def write(found: list[dict[str, Any]]) -> None:
    """Put entries into the table, in place of those that serve the same launches."""
    from kvq_ops.triton_kernels import configs

    names = ("kind", "codes", "head_dim", "group", "fp32", "backend", "arch")

    def identity(entry: dict[str, Any]) -> list[Any]:
        return [entry[name] for name in names]

    table = json.loads(configs.TABLE_FILE.read_text())
    new = [identity(entry) for entry in found]
    table["entries"] = [entry for entry in table["entries"] if identity(entry) not in new] + found
    # One entry a line, so that a change can be read.
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in table["entries"])
    body = f"[\n{lines}\n ]" if lines else "[]"
    configs.TABLE_FILE.write_text(f'{{\n "about": {json.dumps(table["about"])},\n "entries": {body}\n}}\n')
    configs.measured.cache_clear()
    configs._chosen.cache_clear()
