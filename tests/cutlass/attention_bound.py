"""How far the kernels' output may lie from the float64 oracle, worked out from the data of each case.

With weights p over keys, a relative error e_j of each unnormalised weight moves the output by at most
``sum_j p_j |e_j| |v_j - out| / (1 - max |e|)``: it cancels where values agree. What rounds only the numerator (weights to fp16,
the sums of products) adds ``sum_j p_j |v_j|`` times its relative error. Both kinds, by where they come from:

* queries go to fp16 scaled by a power of two: their error is computed, number by number;
* fp32 sums round once for each product over 16 channels; factors, bias and softcap a few times more;
* ``ex2`` is within 2^-22.5, ``lg2`` within 2^-22, ``rcp`` within 2^-23 (PTX ISA), and their fp32 arguments round;
* weights are fp16: 2^-11 of each, or 2^-25 of the largest below the normal range.

No constant here was chosen to make a test pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.attention_cases import Case

__all__ = ["check", "limit_of"]

_FP32, _FP16 = 2.0**-24, 2.0**-11
_EX2, _LG2, _RCP = 2.0**-22.5, 2.0**-22, 2.0**-23


def _fp16_query(query: np.ndarray) -> np.ndarray:
    largest = np.abs(query).max(-1, keepdims=True)
    power = 2.0 ** np.floor(np.log2(np.where(largest > 0, largest, 1)))
    return (query / power).astype(np.float16).astype(np.float64) * power


def _token_scales(case: Case) -> np.ndarray | None:
    """fp32 scales ``[B, H, T]`` of values that have one for each token."""
    fmt = get_format(case.value_format)
    plane = fmt.planes[1]
    return case.value_store[1].numpy().astype(np.float64) if plane.axes == "BHT" else None


def _wide(x: np.ndarray, query: np.ndarray) -> np.ndarray:
    return np.repeat(x.astype(np.float64), query.shape[1] // x.shape[1], 1)


def limit_of(case: Case, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's output, and how far from it the kernels' may lie; both ``[B, Hq, Tq, Dv]``."""
    key, value = case.decoded()
    query = checks.array(case.query).astype(np.float64)
    tokens, head_dim = key.shape[2:]
    unit = np.broadcast_to(np.eye(tokens), (*key.shape[:3], tokens))
    p = case.exact(key, unit)
    out = case.exact(key, value)
    k, v = _wide(key, query), _wide(value, query)
    scale = options.get("scale")
    scale = head_dim**-0.5 if scale is None else abs(scale)
    cap = options.get("softcap", 0.0)

    products = np.abs(query) @ np.abs(np.swapaxes(k, -1, -2)) * scale
    scores = query @ np.swapaxes(k, -1, -2) * scale
    moved = np.abs(_fp16_query(query) - query) @ np.abs(np.swapaxes(k, -1, -2)) * scale
    error = moved + (head_dim / 16 + 4) * _FP32 * products
    if cap:
        x = 2 * np.abs(scores) / cap
        error = error + cap * (0.5 * (_EX2 + (x + 1) * _FP32) + 2 * _RCP + 4 * _FP32)
        scores = cap * np.tanh(scores / cap)
    mask = options.get("mask")
    if mask is not None and mask.dtype != torch.bool:
        bias = np.where(np.isfinite(checks.array(mask)), checks.array(mask).astype(np.float64), 0)
        # A bias at the end of the range of fp32 swallows the score in the oracle too.
        bias = np.broadcast_to(np.where(np.abs(bias) > 1e30, 0, bias), scores.shape)
        scores = scores + bias
        error = error + 3 * _FP32 * (np.abs(scores) + np.abs(bias))
    shown = np.where(p > 0, scores, -np.inf)
    top = shown.max(-1, keepdims=True, initial=-np.inf)
    below = np.where(p > 0, np.where(np.isfinite(top), top, 0) - scores, 0)
    turns = -(-tokens // 64) + 3
    error = error + 2 * _FP32 * (below + np.abs(scores)) + turns * (_EX2 + 2 * _FP32)
    held = _token_scales(case)
    scales = np.ones_like(p)
    if held is not None:
        scales = np.broadcast_to(_wide(held, query)[:, :, None, :], p.shape)
        log = np.abs(np.log2(np.where(scales > 0, scales, 1)))
        error = error + _LG2 + _RCP + 4 * _FP32 * (1 + log)
    error = np.where(p > 0, error, 0)
    relative = np.expm1(error)

    apart = np.abs(v[:, :, None] - out[..., None, :])
    limit = np.einsum("bhqt,bhqtd->bhqd", p * relative, apart) / (
        1 - relative.max(-1, keepdims=True, initial=0)
    )
    absolute = np.einsum("bhqt,bhtd->bhqd", p, np.abs(v))
    limit = limit + (_FP16 + (turns + 8) * _FP32) * absolute
    codes = np.where(
        (scales > 0)[..., None], np.abs(v)[:, :, None] / np.where(scales > 0, scales, 1)[..., None], 0
    )
    open_ = (p > 0)[..., None]
    small = (p * scales).max(-1, keepdims=True, initial=0) * np.where(open_, codes, 0).sum(3)
    limit = limit + 2.0**-25 * small
    limit = limit + (tokens / 16 + 16) * _FP32 * np.abs(out)
    if case.query.dtype != torch.float32:
        info = torch.finfo(case.query.dtype)
        limit = (limit + info.smallest_normal * info.eps / 2) * (1 + info.eps) + info.eps / 2 * np.abs(out)
    return out, limit


def check(case: Case, got: Tensor, options: dict[str, Any]) -> float:
    """Raise unless the output is within its limit; gives the largest part of the limit that was used."""
    want, limit = limit_of(case, options)
    found = checks.array(got).astype(np.float64)
    assert found.shape == want.shape and np.isfinite(found).all()
    error = np.abs(found - want)
    worst = np.unravel_index((error - limit).argmax(), error.shape)
    assert (error <= limit).all(), f"off by {error[worst]:.3g} at {worst}, allowed {limit[worst]:.3g}"
    return float(np.max(error / np.where(limit > 0, limit, 1)))
