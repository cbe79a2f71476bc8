"""What the operator tests go through and compare with: the rows of the table, stores bit for bit, attention within bounds.

Codes and decoded values come from ``tests.ops.oracles``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import oracle
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import formats, registry
from kvq_ops.calibration import fit
from kvq_ops.formats import Format
from tests.ops.oracle_numbers import (  # noqa: F401  most are used through this module
    CASTS,
    DTYPES,
    F32,
    MAGNITUDES,
    array,
    float8_bytes,
    float8_values,
)
from tests.ops.oracles import decoded, element_codes, expected, first_fit, unpacked  # noqa: F401

# Formats with a window take tokens in order only (test_windows.py); calibrated ones need a fit first (test_calibration.py).
LISTED = tuple(
    n for n in formats.names() if not (formats.get_format(n).windowed or formats.get_format(n).calibrated)
)
# Rows that the grammar makes on demand: each bit width, granularity, kind and dtype of parameters at least once.
DERIVED = (
    "int4_group32_bf16", "int4_group64_bf16", "int4_group8", "int4_group128", "int4_per_token_head_bf16",
    "int4_per_token_head_fp32", "int3_group24", "int3_per_token_head", "int2_group64", "int2_per_token_head", "int2_group8_bf16",
    "int8_group32", "int4_group32_sym", "int3_per_token_head_sym_bf16", "int2_group16_sym", "int8_per_token_head_asym",
    "int8_per_tensor", "int8_per_head_asym", "int4_per_head_sym", "int3_per_tensor", "int2_per_head",
)  # fmt: skip
NAMES = LISTED + DERIVED
STATIC = tuple(n for n in NAMES if formats.get_format(n).static_planes)
PER_TOKEN = tuple(n for n in NAMES if n not in STATIC)


def head_dims(fmt: Format, *dims: int) -> list[int]:
    """Head sizes that this row can hold: each of ``dims``, moved up where codes are packed in larger units."""
    return [d + -d % fmt.pack for d in dims]


def _kind(fmt: Format) -> tuple[object, ...]:
    planes = tuple((p.name, p.axes, p.dtype, p.items) for p in fmt.planes)
    return fmt.codec, planes, fmt.rotation, fmt.calibrated


# One row of each kind, where what is tested is how planes are passed about and not what is in them.
CALIBRATED = ("nuq4_keys", "nuq3_values", "fp8_per_head+static", "nuq3_keys+outlier1%+hadamard")
EACH_KIND = tuple(
    {_kind(formats.get_format(n)): n for n in reversed((*LISTED, "int8_per_head_asym", *CALIBRATED))}.values()
)[::-1]


def fitted(name: str, heads: int, head_dim: int) -> dict[str, Tensor]:
    """What a format has to be given beforehand; empty for one that needs nothing."""
    fmt = formats.get_format(name)
    if not fmt.calibrated:
        return {}
    x = torch.randn(2, heads, 48, head_dim, generator=torch.Generator().manual_seed(11))
    return fit(x, fmt, inv_freq=torch.linspace(1, 0.01, head_dim // 2))


def empty(
    name: str, batch: int, heads: int, tokens: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """An empty store that takes tokens, calibrated where it has to be."""
    fmt = formats.get_format(name)
    store = fmt.empty_store(batch, heads, tokens, head_dim, dtype=dtype)
    for plane, value in fitted(name, heads, head_dim).items():
        store[fmt.index(plane)].copy_(value)
    return store


def stored(x: Tensor, name: str) -> list[Tensor]:
    """A full store holding ``x``, calibrated where it has to be."""
    if not formats.get_format(name).calibrated:
        return kvq_ops.quantize(x, name)
    store = empty(name, *x.shape, dtype=x.dtype)
    kvq_ops.append_(store, torch.arange(x.shape[2]), x, name)
    store[-1].fill_(x.shape[2])
    return store


def copy(store: Sequence[Tensor]) -> list[Tensor]:
    return [plane.clone() for plane in store]


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_planes(got: Sequence[Tensor], want: Sequence[Tensor], fmt: Format, context: str = "") -> None:
    """Bit equality: ``torch.equal`` alone takes -0.0 for 0.0."""
    for plane, a, b in zip(fmt.planes, got, want, strict=True):
        where = f"{fmt.name} plane {plane.name} {context}"
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert torch.equal(raw(a), raw(b)), where


def assert_planes(store: Sequence[Tensor], fmt: Format, want: dict[str, np.ndarray], context: str) -> None:
    for plane, tensor in zip(fmt.planes[:-1], store[:-1], strict=True):
        got = array(tensor)
        assert got.shape == want[plane.name].shape, f"{context} {plane.name}: shape {got.shape}"
        bad = np.argwhere(got != want[plane.name])
        assert not len(bad), (
            f"{context} {plane.name}: {len(bad)} of {got.size} differ, first at {tuple(bad[0])}: "
            f"{got[tuple(bad[0])]} for {want[plane.name][tuple(bad[0])]}"
        )


# -------------------------------------------------------------------------------------------------------- attention


def allowed_pairs(
    query_shape: Sequence[int],
    tokens: int,
    *,
    mask: np.ndarray | None = None,
    causal: bool = False,
    window: int = 0,
    lengths: Sequence[int] | None = None,
) -> np.ndarray:
    """bool ``[B, Hq, Tq, T]``: which key each query may see, said position by position."""
    batch, heads, queries, _ = query_shape
    open_ = np.zeros((batch, heads, queries, tokens), bool)
    for b in range(batch):
        end = tokens if lengths is None else int(lengths[b])
        for i in range(queries):
            own = end - queries + i
            for j in range(end):
                if (not causal or j <= own) and (not window or j > own - window):
                    open_[b, :, i, j] = True
    if mask is not None:
        open_ &= np.broadcast_to(mask if mask.dtype == bool else mask != -np.inf, open_.shape)
    return open_


def exact_attention(
    query: Tensor,
    key: np.ndarray,
    value: np.ndarray,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> np.ndarray:
    """float64 attention by the oracle; ``lengths`` is what ``use_length`` would read from the store."""
    q = array(query).astype(np.float64)
    tokens = key.shape[2]
    if tokens == 0 or q.shape[0] == 0:
        return np.zeros((*q.shape[:3], value.shape[-1]))
    given = None if mask is None else array(mask)
    open_ = allowed_pairs(q.shape, tokens, mask=given, causal=causal, window=window, lengths=lengths)
    bias = np.where(open_, 0.0, -np.inf)
    if given is not None and given.dtype != bool:
        bias = np.where(open_, np.broadcast_to(given, open_.shape), -np.inf)
    sink = None if sinks is None else array(sinks)
    return oracle.attention(q, key, value, bias, scale, softcap, sink)


def assert_tight(
    out: Tensor, want: np.ndarray, tolerance: float = 1e-5, beyond: np.ndarray | float = 0.0
) -> None:
    """``out`` equals ``want`` within fp32 arithmetic (1e-5, absolute and relative) and the rounding of its own dtype.

    Args:
        beyond: what else may be lost, computed from the data.
    """
    assert tuple(out.shape) == want.shape
    limit = tolerance * (1 + np.abs(want)) + beyond
    if out.dtype != torch.float32:
        info = torch.finfo(out.dtype)
        limit = limit + info.eps / 2 * np.abs(want) + info.smallest_normal * info.eps / 2
    got = array(out).astype(np.float64)
    error = np.abs(got - want)
    assert np.isfinite(got).all(), "not finite"
    worst = np.unravel_index((error - limit).argmax(), error.shape) if error.size else ()
    assert (error <= limit).all(), f"off by {error[worst]:.3g} at {worst}, allowed {limit[worst]:.3g}"


def quantization_bound(
    query: Tensor,
    key: np.ndarray,
    key_decoded: np.ndarray,
    value: np.ndarray,
    value_decoded: np.ndarray,
    open_: np.ndarray,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> np.ndarray:
    """How far attention over the decoded cache may lie from attention over the exact one, ``[B, Hq, Tq, Dv]``.

    Let d be the largest change of a score of one query, ``max_j |scale q (k'_j - k_j)|``. Each unnormalised weight changes
    by a factor within ``[exp(-d), exp(d)]``, so a set of keys with weight p gets at most ``p e^2d / (1 - p + p e^2d)``;
    the gain is largest at ``p = 1 / (1 + e^d)``, where it is ``tanh(d / 2)``. Hence weights move by at most tanh(d/2) in
    total variation. With ``sum p' v' - sum p v = sum p' (v' - v) + sum (p' - p) v`` and ``sum (p' - p) = 0``:

        |out' - out| <= max_j |v'_j - v_j| + tanh(d / 2) (max_j v_j - min_j v_j)

    for each channel, over the keys that the query may see. Soft-capping never widens a difference of scores, a mask and a sink
    change none; the sink is one more key with value zero.
    """
    q = array(query).astype(np.float64)
    group = q.shape[1] // key.shape[1]
    wide = [np.repeat(a.astype(np.float64), group, 1) for a in (key, key_decoded, value, value_decoded)]
    k, k2, v, v2 = wide
    factor = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    moved = np.abs(q @ np.swapaxes(k2 - k, -1, -2)) * factor
    d = np.where(open_, moved, 0).max(-1, initial=0)[..., None]
    seen = open_[..., None]
    wrong = np.where(seen, np.abs(v2 - v)[:, :, None], 0).max(3, initial=0)
    high = np.where(seen, v[:, :, None], -np.inf).max(3, initial=-np.inf)
    low = np.where(seen, v[:, :, None], np.inf).min(3, initial=np.inf)
    if sinks is not None:
        high, low = np.maximum(high, 0), np.minimum(low, 0)
    any_open = open_.any(-1)[..., None]
    spread = np.where(any_open, high - low, 0)
    return np.where(any_open, wrong + np.tanh(d / 2) * spread, 0)


# -------------------------------------------------------------------------------------------------- implementations


def implementations(op: str) -> list[str]:
    """Those that may run on a CPU; kernels that do not are tested in their own folder."""
    return [row.name for row in registry.implementations(op) if row.name != "cutlass"]


def refusal(
    name: str, op: str, fmts: Sequence[Format], head_dims: Sequence[int], dtype: torch.dtype
) -> str | None:
    """Why the implementation would not run this here, or None."""
    row = next(row for row in registry.implementations(op) if row.name == name)
    return row.refuses(registry.Request(op, "cpu", tuple(fmts), tuple(head_dims), dtype))
