"""Every format there is, in toy sizes, and three ways to run a step over a cache of it.

Formats come from the table, so that one that arrives is tried by every case without being named here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kvq_ops
import passes
from kvq_ops import QuantizedKV, formats
from kvq_ops.calibration import Calibration, fit
from kvq_ops.formats import Format, get_format, parse_kv_format
from tests.ops import checks

B, HQ, HKV, D, T = 2, 4, 2, 16, 9

MODIFIED = (
    "int8_per_token_head+recent3+sink2",
    "int4_group32+hadamard",
    "int4_group8+outlier10%",
    "nvfp4+recent4",
    "key=int4_channel8+recent4,value=int4_group8+recent4",
    "key=int2_channel8+recent3+sink2,value=int2_group8+sink1",
    "key=int8_channel8,value=fp8_per_token_head",
)
SPECS = (*formats.kv_names(), *MODIFIED)


def rows_of(specs: Sequence[str]) -> tuple[str, ...]:
    """Names of the formats of keys and of values in ``specs``, each once."""
    pairs = [parse_kv_format(spec) for spec in specs]
    return tuple(dict.fromkeys(row.name for pair in pairs for row in (pair.key, pair.value)))


ROWS = rows_of(SPECS)
LOSSY = tuple(name for name in ROWS if not get_format(name).lossless)
# What a token is stored as does not depend on which tokens share its group.
OF_A_TOKEN = tuple(name for name in ROWS if get_format(name).token_group == 1)


def static_for(row: Format | str, x: Tensor) -> dict[str, Tensor]:
    """Scales and codebooks that span tokens, fitted to ``x [B, H, T, D]``; empty where a format has none."""
    return fit(x, get_format(row) if isinstance(row, str) else row)


def empty(row: str, x: Tensor, capacity: int | None = None, sample: Tensor | None = None) -> QuantizedKV:
    """An empty cache for tokens like ``x``, calibrated where that is possible, so that nothing depends on what came first."""
    shape = (x.shape[0], x.shape[1], capacity or x.shape[2], x.shape[3])
    static = static_for(row, x if sample is None else sample)
    return QuantizedKV.empty(shape, row, dtype=x.dtype, static=static or None)


def filled(
    row: str, x: Tensor, sizes: Sequence[int] = (), capacity: int | None = None, sample: Tensor | None = None
) -> QuantizedKV:
    """A cache of ``x`` after appends of these sizes; of all at once unless said otherwise."""
    cache = empty(row, x, capacity, sample)
    append(cache, x, sizes or [x.shape[2]])
    return cache


def append(cache: QuantizedKV, x: Tensor, sizes: Sequence[int], start: int = 0) -> None:
    for size in sizes:
        cache.index_copy_(2, torch.arange(start, start + size), x[:, :, start : start + size])
        start += size


def coded(row: str, x: Tensor, sample: Tensor | None = None) -> Tensor:
    """What ``x`` reads as once all of it is coded: through the codes of the format, without exact tokens.

    Tokens that do not fill a group of tokens are left out.
    """
    fmt = get_format(row)
    base = fmt.base or fmt
    whole = x.shape[2] // base.token_group * base.token_group
    store = base.empty_store(*x[:, :, :whole].shape, dtype=x.dtype)
    for name, plane in static_for(base, x if sample is None else sample).items():
        store[base.index(name)].copy_(plane)
    token, static = kvq_ops.codecs.encode(x[:, :, :whole], base, store)
    planes = [
        t if t is not None else s if s is not None else old
        for t, s, old in zip(token, static, store, strict=True)
    ]
    return kvq_ops.codecs.decode(planes, base).to(x.dtype)


def attend(query: Tensor, key: QuantizedKV, value: QuantizedKV, **options: Any) -> Tensor:
    return kvq_ops.attention(query, key.store, value.store, key.format.name, value.format.name, **options)


def check_tight(out: Tensor, query: Tensor, key: QuantizedKV, value: QuantizedKV, **options: Any) -> None:
    """``out`` is attention in float64 over what the caches hold, as far as they hold it."""
    want = checks.exact_attention(query, read32(key), read32(value), lengths=key.length.tolist(), **options)
    checks.assert_tight(out, want)


def read32(cache: QuantizedKV) -> np.ndarray:
    """What a cache holds, in fp32 whatever its dtype."""
    return kvq_ops.dequantize(cache.store, cache.format.name, torch.float32).numpy()


def per_token_planes(cache: QuantizedKV) -> dict[str, Tensor]:
    """The planes that belong to rows."""
    return {
        plane.name: tensor
        for plane, tensor in zip(cache.format.planes, cache.store, strict=True)
        if not plane.static
    }


# -------------------------------------------------------------------------------------------------------- three ways


class Step(nn.Module):
    """Writes new keys and values into two cache buffers and attends to all there is, causally."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.register_buffer("k_cache", keys)
        self.register_buffer("v_cache", values)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        self.k_cache.index_copy_(2, position, key)
        self.v_cache.index_copy_(2, position, value)
        mask = torch.arange(self.k_cache.shape[2], device=query.device) <= position.unsqueeze(-1)
        return F.scaled_dot_product_attention(
            query, self.k_cache, self.v_cache, attn_mask=mask[None, None], enable_gqa=True
        )


WAYS = ("compile", "inductor", "export")
Call = tuple[Tensor, Tensor, Tensor, Tensor]


def calls_of(query: Tensor, key: Tensor, value: Tensor, sizes: Sequence[int], start: int = 0) -> list[Call]:
    """Inputs of steps of ``sizes`` tokens, cut from whole tensors."""
    calls = []
    for size in sizes:
        part = slice(start, start + size)
        calls.append(
            (query[:, :, part], key[:, :, part], value[:, :, part], torch.arange(start, start + size))
        )
        start += size
    return calls


def caches(spec: str, key: Tensor, value: Tensor, capacity: int) -> list[QuantizedKV]:
    pair = parse_kv_format(spec)
    return [empty(pair.key.name, key, capacity), empty(pair.value.name, value, capacity)]


def run_eagerly(
    spec: str, calls: Sequence[Call], key: Tensor, value: Tensor, capacity: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of every step, and the planes left at the end."""
    step = Step(*caches(spec, key, value, capacity))
    outs = [step(*call) for call in calls]
    return outs, [*step.k_cache.planes(), *step.v_cache.planes()]


def run(
    way: str, spec: str, calls: Sequence[Call], key: Tensor, value: Tensor, capacity: int
) -> tuple[list[Tensor], list[Tensor]]:
    """As :func:`run_eagerly`, compiled (lowered by the pass alone, or by Inductor) or exported."""
    if way == "export":
        return _run_exported(spec, calls, key, value, capacity)
    torch._dynamo.reset()
    passes.clear_report()
    step = Step(*caches(spec, key, value, capacity))
    options = {} if way == "inductor" else {"lower": "eager"}
    compiled = torch.compile(step, backend="kvq", fullgraph=True, options=options)
    outs = [compiled(*call) for call in calls]
    report = passes.report()
    assert report.rewritten == report.found > 0, report.text()
    return outs, [*step.k_cache.planes(), *step.v_cache.planes()]


def _run_exported(
    spec: str, calls: Sequence[Call], key: Tensor, value: Tensor, capacity: int
) -> tuple[list[Tensor], list[Tensor]]:
    shape = (key.shape[0], key.shape[1], capacity, key.shape[3])
    dense = Step(torch.zeros(shape, dtype=key.dtype), torch.zeros(shape, dtype=value.dtype))
    program = torch.export.export(dense, calls[0])
    pair = parse_kv_format(spec)
    fitted = {(0, "key"): static_for(pair.key, key), (0, "value"): static_for(pair.value, value)}
    calibration = Calibration({at: planes for at, planes in fitted.items() if planes})
    program = passes.quantize_exported(program, spec, calibration=calibration if calibration.planes else None)
    module = program.module()
    outs = [module(*call) for call in calls]
    state = dict(module.named_buffers())
    planes = []
    for cache, row in (("k_cache", pair.key), ("v_cache", pair.value)):
        planes += [
            state[next(n for n in state if n.startswith(cache) and n.endswith(p.name))] for p in row.planes
        ]
    return outs, planes
