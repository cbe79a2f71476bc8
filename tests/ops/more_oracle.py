"""Numpy encodings of the formats beyond ``checks.ORACLES``: groups of tokens, MX blocks, rotation, outliers.

A vector's outliers are NaN in what is encoded; every function here leaves NaN out of its statistics and codes it as zero.
"""

from __future__ import annotations

import numpy as np
import oracle
import torch

from kvq_ops.formats import Format
from tests.ops import checks
from tests.ops.checks import F32

Planes = dict[str, np.ndarray]


def lower_median(x: np.ndarray) -> np.ndarray:
    return np.sort(x, -1)[..., (x.shape[-1] - 1) // 2, None]


def split_outliers(x: np.ndarray, count: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices and values of the farthest, and ``x`` with NaN there; said element by element."""
    centre = np.zeros((*x.shape[:-1], 1), F32) if symmetric else lower_median(x)
    index = np.zeros((*x.shape[:-1], count), np.int16)
    rest = x.copy()
    for at in np.ndindex(x.shape[:-1]):
        distance = [abs(F32(v - centre[at][0])) for v in x[at]]
        order = sorted(range(len(distance)), key=lambda i: (-distance[i], i))  # noqa: B023
        index[at] = sorted(order[:count])
        rest[at][index[at]] = np.nan
    return index, np.take_along_axis(x, index.astype(np.int64), -1), rest


def butterflies(x: np.ndarray) -> np.ndarray:
    """Rotation in fp32 in the documented order: neighbours first, the factor last."""
    d = x.shape[-1]
    n = d & -d
    y = x.astype(F32).copy()
    half = 1
    while half < n:
        for start in range(0, d, 2 * half):
            low, high = y[..., start : start + half].copy(), y[..., start + half : start + 2 * half].copy()
            y[..., start : start + half] = low + high
            y[..., start + half : start + 2 * half] = low - high
        half *= 2
    return y * F32(n**-0.5)


def _filled(x: np.ndarray, low: bool, group: int) -> np.ndarray:
    """``[..., n, group]`` with what is no number, and padding, beyond every value on one side."""
    x = np.where(np.isnan(x), F32(np.inf if low else -np.inf), x)
    missing = np.full((*x.shape[:-1], -x.shape[-1] % group), np.inf if low else -np.inf, F32)
    return np.concatenate([x, missing], -1).reshape(*x.shape[:-1], -1, group)


def _asymmetric(x: np.ndarray, bits: int, group: int, parameter: torch.dtype) -> tuple[np.ndarray, ...]:
    """Along the last axis, with NaN left out. Codes, scale, minimum."""
    round16, largest, _ = checks.ROUND16[parameter]
    top = 2**bits - 1
    edge = F32(np.finfo(F32).max * (0.5 - 2**-8))
    x = np.clip(x, -edge, edge)
    low, high = _filled(x, True, group).min(-1), _filled(x, False, group).max(-1)
    empty = high < low
    low, high = np.where(empty, F32(0), low), np.where(empty, F32(0), high)
    s = round16(np.minimum((high - low) / F32(top), F32(largest)))
    m = round16(np.clip(low, -F32(largest), F32(largest)))
    wide_s, wide_m = (np.repeat(p, group, -1)[..., : x.shape[-1]] for p in (s, m))
    value = np.where(np.isnan(x), F32(0), x)
    q = np.where(wide_s > 0, np.rint((value - wide_m) / np.where(wide_s > 0, wide_s, F32(1))), 0)
    return np.clip(q, 0, top).astype(np.uint8), s, m


def _symmetric(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    magnitude = np.where(np.isnan(x), F32(0), np.abs(x))
    amax = np.maximum(_filled(magnitude, False, group).max(-1), F32(1e-8))
    s = (amax / F32(127)).astype(F32)
    value = np.where(np.isnan(x), F32(0), x)
    q = np.rint(value / np.repeat(s, group, -1)[..., : x.shape[-1]])
    return np.clip(q, -127, 127).astype(np.int8), s


def _mx(x: np.ndarray, element: torch.dtype | None) -> Planes:
    d = x.shape[-1]
    value = np.where(np.isnan(x), F32(0), x)
    blocks = np.concatenate([value, np.zeros((*x.shape[:-1], -d % 32), F32)], -1)
    blocks = blocks.reshape(*x.shape[:-1], -1, 32).astype(np.float64)
    amax = np.abs(blocks).max(-1)
    emax = 2 if element is None else 8
    e = np.where(amax > 0, np.floor(np.log2(np.where(amax > 0, amax, 1))) - emax, -127)
    e = np.clip(e, -127, 127)
    scaled = (blocks / (2.0**e)[..., None]).reshape(*x.shape[:-1], -1)[..., :d].astype(F32)
    if element is None:
        codes = oracle.pack(oracle.e2m1_code(scaled), 4)
    else:
        codes = checks.float8_bytes(oracle.e4m3(scaled), np.signbit(value), element)
    return {"codes": codes, "exponent": (e + 127).astype(np.uint8)}


def encoded(fmt: Format, x: np.ndarray, static: Planes | None = None) -> Planes:
    """Every plane but ``length`` of a format without a window, for fp32 ``x [B, H, T, D]``."""
    assert fmt.base is None
    planes: Planes = {}
    if fmt.rotation:
        x = butterflies(x)
    if fmt.outliers:
        symmetric = "minimum" not in [plane.name for plane in fmt.planes]
        index, value, x = split_outliers(x, fmt.outlier_count(x.shape[-1]), symmetric)
        planes = {"outlier_index": index, "outlier_value": value}
    if fmt.codec == "block_scaled" and fmt.group == 32:
        return planes | _mx(x, fmt.element)
    if fmt.codec != "integer":
        x = np.where(np.isnan(x), F32(0), x)
        static = checks.calibrated(fmt, x) if static is None else static
        return planes | static | checks.ORACLES[fmt.codec](fmt, x, static)
    along = 2 if fmt.token_group > 1 else 3
    lines = np.moveaxis(x, along, -1)
    group = fmt.token_group if along == 2 else (fmt.group or x.shape[-1])
    parts: tuple[np.ndarray, ...]
    if "minimum" in [plane.name for plane in fmt.planes]:
        parts = _asymmetric(lines, fmt.bits, group, fmt.planes[fmt.index("scale")].dtype)  # type: ignore[arg-type]
    else:
        parts = _symmetric(lines, group)
    codes, *scales = (np.moveaxis(part, -1, along) for part in parts)
    if fmt.planes[fmt.index("scale")].axes == "BHT":
        scales = [scale[..., 0] for scale in scales]
    if codes.dtype == np.uint8:
        codes = oracle.pack(codes, fmt.bits)
    return planes | {"codes": codes} | dict(zip(("scale", "minimum"), scales, strict=False))


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits != 3:
        return checks.unpacked(codes, bits)
    three = codes.reshape(*codes.shape[:-1], -1, 3).astype(np.uint32)
    word = three[..., 0] + 256 * three[..., 1] + 65536 * three[..., 2]
    parts = [word // 8**i % 8 for i in range(8)]
    return np.stack(parts, -1).reshape(*codes.shape[:-1], -1).astype(np.uint8)


def decoded(fmt: Format, planes: Planes) -> np.ndarray:
    """fp32 ``[B, H, T, D]``."""
    assert fmt.base is None
    x = _dense(fmt, planes)
    if fmt.outliers:
        x = x.copy()
        np.put_along_axis(
            x, planes["outlier_index"].astype(np.int64), planes["outlier_value"].astype(F32), -1
        )
    return butterflies(x) if fmt.rotation else x


def _dense(fmt: Format, planes: Planes) -> np.ndarray:
    if fmt.codec == "block_scaled" and fmt.group == 32:
        if fmt.element is None:
            values = oracle.e2m1_value(unpacked(planes["codes"], 4))
        else:
            values = checks.float8_values(planes["codes"], fmt.element)
        scale = 2.0 ** (planes["exponent"].astype(np.float64) - 127)
        return (values * np.repeat(scale, 32, -1)[..., : values.shape[-1]]).astype(F32)
    if fmt.codec != "integer":
        given = {**planes, "length": np.zeros(planes["codes"].shape[0], np.int64)}
        store = [torch.from_numpy(np.asarray(given[plane.name])) for plane in fmt.planes]
        return checks.decoded(fmt, store)
    q = planes["codes"] if planes["codes"].dtype == np.int8 else unpacked(planes["codes"], fmt.bits)
    along = 2 if fmt.token_group > 1 else 3
    group = fmt.token_group if along == 2 else (fmt.group or q.shape[-1])

    def wide(scale: np.ndarray) -> np.ndarray:
        scale = scale[..., None] if scale.ndim == 3 else scale
        return np.take(np.repeat(scale.astype(F32), group, along), range(q.shape[along]), along)

    x = q.astype(F32) * wide(planes["scale"])
    return x + wide(planes["minimum"]) if "minimum" in planes else x


def window_state(
    fmt: Format, x: np.ndarray, length: int, static: Planes | None = None
) -> tuple[int, Planes, np.ndarray]:
    """What a store in a format with a window holds after ``length`` tokens of ``x`` in one row.

    Returns:
        how many tokens are coded, the planes of those, and what all tokens read as (zero from ``length`` on).
    """
    assert fmt.base is not None
    coded = max(0, length - fmt.recent) // fmt.token_group * fmt.token_group
    planes = encoded(fmt.base, x[:, :, :coded], static) if coded else {}
    dense = np.zeros(x.shape, F32)
    dense[:, :, :length] = x[:, :, :length]
    if coded:
        dense[:, :, :coded] = decoded(fmt.base, planes)
        first = min(fmt.sinks, coded)
        dense[:, :, :first] = x[:, :, :first]
    return coded, planes, dense
