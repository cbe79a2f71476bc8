"""Launch parameters that are faster on this GPU than those that are known, written to ``configs.json`` of the kernels."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

import kvq_ops
from kvq_lab.gpu_cases import HEADLINE, KERNELS
from kvq_lab.gpu_rows import Budget
from kvq_lab.gpu_timing import KV_HEADS, QUERY_HEADS, Bench, Shape, median_seconds
from kvq_ops.formats import KVFormat, parse_kv_format

SHAPES = (Shape(8, 32768), Shape(1, 8192))
LEAST_GAIN = 1.02
"""A candidate replaces what is known when it is faster by so much; less is noise."""


def candidates(rule: dict[str, int]) -> Iterator[dict[str, int]]:
    """Neighbours of a rule, the likeliest first; ``block_m`` follows from the query and stays."""
    own = rule["block_n"]
    for block_n in (own, own * 2, own // 2):
        for warps in (rule["num_warps"], rule["num_warps"] * 2, rule["num_warps"] // 2):
            for stages in (rule["num_stages"], 3, 1, 4):
                if block_n >= 16 and 1 <= warps <= 8:
                    yield {"block_n": block_n, "num_warps": warps, "num_stages": stages}


def tune(budget: Budget, tell: Callable[[str], Any]) -> int:
    """Try candidates for the formats that are timed until the budget is spent; the number of entries that were written."""
    from kvq_ops.triton_kernels import configs

    tell(
        f"tuning for {budget.left:.0f} s: decode of {', '.join(HEADLINE)}; results go to {configs.TABLE_FILE}"
    )
    bench, found = Bench(), []
    for at, name in enumerate(HEADLINE):
        # What is left is shared by those that are left.
        own = Budget(budget.left / (len(HEADLINE) - at))
        entry = _tune_one(bench, parse_kv_format(name), own, tell)
        if entry is not None:
            found.append(entry)
    write(found)
    tell(f"tuning: {len(found)} entries written")
    return len(found)


def _tune_one(
    bench: Bench, pair: KVFormat, budget: Budget, tell: Callable[[str], Any]
) -> dict[str, Any] | None:
    from kvq_ops.triton_kernels import configs
    from kvq_ops.triton_kernels.spec import Spec, spec_of

    key, value = spec_of(pair.key), spec_of(pair.value)
    assert isinstance(key, Spec) and isinstance(value, Spec)
    target, group = configs.target(), QUERY_HEADS // KV_HEADS
    calls = []
    for shape in SHAPES:
        query, keys, values = bench.dense(shape)
        with torch.no_grad(), kvq_ops.use_implementation(KERNELS):
            stores = [kvq_ops.quantize(x, row.name) for x, row in ((keys, pair.key), (values, pair.value))]
        calls.append(
            functools.partial(kvq_ops.attention, query, stores[0], stores[1], pair.key.name, pair.value.name)
        )
    dim = keys.shape[-1]
    codes = [configs.code_of(key), configs.code_of(value)]
    identity = {
        "kind": "decode",
        "codes": codes,
        "head_dim": configs.padded(dim),
        "group": group,
        "fp32": False,
        "backend": target[0],
        "arch": target[1],
    }
    known = configs.config_for("decode", key, value, dim, group, torch.bfloat16, target)
    want = [call() for call in calls]

    def seconds(config: dict[str, int]) -> float:
        with only({**identity, "config": config}), torch.no_grad(), kvq_ops.use_implementation(KERNELS):
            for call, right in zip(calls, want, strict=True):
                # Another order of sums: a few steps of bf16, or something is wrong with these parameters.
                if not torch.allclose(call().float(), right.float(), rtol=2.0**-6, atol=2.0**-10):
                    raise ValueError("wrong result")
            return sum(median_seconds(call, bench.flush, rounds=10) for call in calls)

    base = best = seconds(known)
    chosen: dict[str, int] | None = None
    tried = 0
    for config in candidates(known):
        if budget.left < 6:
            break
        tried += 1
        try:
            taken = seconds(config)
        except Exception as error:  # too much shared memory, or too many registers
            tell(f"tuning {pair}: {config} refused: {type(error).__name__}")
            continue
        if taken < best / LEAST_GAIN:
            best, chosen = taken, config
    tell(
        f"tuning {pair}: {tried} candidates, {base * 1e3:.3f} ms before, {best * 1e3:.3f} ms with {chosen or 'what is known'}"
    )
    if chosen is None:
        return None
    return {**identity, "config": chosen, "gain": round(base / best, 3), "gpu": torch.cuda.get_device_name()}


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
