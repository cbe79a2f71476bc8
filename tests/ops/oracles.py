"""Numpy computations of every code, scale and decoded value, from the formulas in the documentation of the codecs.

They share no code with the package. Where ``golden/oracle.py`` has a format, the two are held equal (``test_oracles.py``); these
also know values that are not finite, planes that saturate, outliers and rotation. A codec that is missing from ``ENCODERS`` fails
the tests of its rows, so that a new format cannot go unchecked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

from kvq_ops.formats import Format
from tests.ops.oracle_numbers import (
    CASTS,
    F32,
    MAGNITUDES,
    array,
    blocks,
    extremes,
    finite,
    float8_bytes,
    float8_values,
    has,
    ratio,
    saturated,
    widen,
    zero_for_nan,
)

Planes = dict[str, np.ndarray]

INTEGER_EDGE = F32(np.finfo(F32).max * (0.5 - 2**-8))
CODEBOOK_EDGE = F32(np.finfo(F32).max / 4)

# ----------------------------------------------------------------------------------------------------- encodings


def _integer(fmt: Format, x: np.ndarray, static: Planes) -> Planes:
    if fmt.group is None:
        return _spanning(fmt, x, static)
    along = 2 if fmt.token_group > 1 else 3
    lines = np.moveaxis(x, along, -1)
    group = fmt.token_group if along == 2 else (fmt.group or x.shape[-1])
    parameter = fmt.planes[fmt.index("scale")].dtype
    assert parameter is not None
    encode = _asymmetric if has(fmt, "minimum") else _symmetric
    codes, *scales = (np.moveaxis(p, -1, along) for p in encode(lines, fmt.bits, group, parameter))
    if fmt.planes[fmt.index("scale")].axes == "BHT":
        scales = [scale[..., 0] for scale in scales]
    if codes.dtype == np.uint8:
        codes = oracle.pack(codes, fmt.bits)
    return {"codes": codes} | dict(zip(("scale", "minimum"), scales, strict=False))


def _asymmetric(x: np.ndarray, bits: int, group: int, parameter: torch.dtype) -> tuple[np.ndarray, ...]:
    top = 2**bits - 1
    low, high = extremes(
        np.where(np.isfinite(x), np.clip(x, -INTEGER_EDGE, INTEGER_EDGE), F32(np.nan)), group
    )
    scale, minimum = saturated((high - low) / F32(top), parameter), saturated(low, parameter)
    value = np.clip(zero_for_nan(x), -INTEGER_EDGE, INTEGER_EDGE)
    wide = widen(scale, group, x.shape[-1])
    steps = np.rint(ratio(value - widen(minimum, group, x.shape[-1]), wide))
    return np.clip(steps, 0, top).astype(np.uint8), scale, minimum


def _symmetric(x: np.ndarray, bits: int, group: int, parameter: torch.dtype) -> tuple[np.ndarray, ...]:
    top = 2 ** (bits - 1) - 1
    amax = np.maximum(blocks(np.abs(finite(x)), group, 0).max(-1), F32(1e-8))
    scale = saturated(amax / F32(top), parameter)
    steps = np.clip(np.rint(ratio(zero_for_nan(x), widen(scale, group, x.shape[-1]))), -top, top)
    return _twos_complement(steps, bits), scale


def _twos_complement(steps: np.ndarray, bits: int) -> np.ndarray:
    return steps.astype(np.int8) if bits == 8 else (steps.astype(np.int64) % 2**bits).astype(np.uint8)


def _spanning(fmt: Format, x: np.ndarray, static: Planes) -> Planes:
    """One scale for many tokens, and a zero point perhaps."""
    steps = np.rint(ratio(zero_for_nan(x), static["scale"].reshape(1, -1, 1, 1)))
    if "zero_point" in static:
        zero = static["zero_point"].reshape(1, -1, 1, 1)
        codes = (np.clip(steps, -zero, 2**fmt.bits - 1 - zero).astype(np.int64) % 2**fmt.bits).astype(
            np.uint8
        )
    else:
        top = 2 ** (fmt.bits - 1) - 1
        codes = _twos_complement(np.clip(steps, -top, top), fmt.bits)
    return {"codes": oracle.pack(codes, fmt.bits) if fmt.bits < 8 else codes}


def _float8(fmt: Format, x: np.ndarray, static: Planes) -> Planes:
    assert fmt.element is not None
    largest = F32(MAGNITUDES[fmt.element][-1])
    planes: Planes = {}
    value = zero_for_nan(x)
    if fmt.group == 0:
        planes["scale"] = np.maximum(np.abs(finite(x)).max(-1), F32(1e-8)) / largest
        scale = planes["scale"][..., None]
    else:
        scale = static["scale"].reshape(1, -1, 1, 1)
    values = CASTS[fmt.element](np.clip(ratio(value, scale), -largest, largest))
    return planes | {"codes": float8_bytes(values, np.signbit(value) & (scale > 0), fmt.element)}


def _block_scaled(fmt: Format, x: np.ndarray, static: Planes) -> Planes:
    if has(fmt, "exponent"):
        return _mx(fmt, x)
    g, d = F32(static["decode_scale"][0]), x.shape[-1]
    amax = blocks(np.abs(finite(x)), 16, 0).max(-1)
    sf = oracle.e4m3(ratio(amax, F32(6) * g))
    # A block whose scale rounds to zero gets the smallest one of e4m3, where a value is nearer to a code than to zero then.
    sf = np.where((sf == 0) & (ratio(amax, g) > F32(2.0**-11)), F32(2.0**-9), sf)
    codes = oracle.e2m1_code(ratio(zero_for_nan(x), widen(sf * g, 16, d)))
    return {
        "codes": oracle.pack(codes, 4),
        "block_scale": float8_bytes(sf, np.zeros(sf.shape, bool), torch.float8_e4m3fn),
    }


def _mx(fmt: Format, x: np.ndarray) -> Planes:
    """In float64: logarithms of float32 are off next to powers of two."""
    d, emax = x.shape[-1], 2 if fmt.element is None else 8
    amax = blocks(np.abs(finite(x)).astype(np.float64), 32, 0).max(-1)
    e = np.where(amax > 0, np.floor(np.log2(np.where(amax > 0, amax, 1))) - emax, -127)
    e = np.clip(e, -127, 127)
    value = zero_for_nan(x)
    scaled = np.clip(value.astype(np.float64) / widen(2.0**e, 32, d), -1e30, 1e30).astype(F32)
    if fmt.element is None:
        codes = oracle.pack(oracle.e2m1_code(scaled), 4)
    else:
        codes = float8_bytes(CASTS[fmt.element](scaled), np.signbit(value), fmt.element)
    return {"codes": codes, "exponent": (e + 127).astype(np.uint8)}


@functools.cache
def normal_table(bits: int) -> np.ndarray:
    """Lloyd-Max entries for N(0, 1), iterated to the fixed point with the normal integrals from ``math``."""

    def mean(a: float, b: float) -> float:
        def density(t: float) -> float:
            return math.exp(-t * t / 2) / math.sqrt(2 * math.pi)

        return (density(a) - density(b)) / ((math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2)

    entries = np.linspace(-2, 2, 2**bits)
    for _ in range(20000):
        ends = [-40.0, *((entries[1:] + entries[:-1]) / 2), 40.0]
        moved = np.array([mean(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)])
        moved = (moved - moved[::-1]) / 2
        if np.abs(moved - entries).max() < 1e-14:
            break
        entries = moved
    return entries.astype(F32)


def nearest(z: np.ndarray, table: np.ndarray) -> np.ndarray:
    """The number of the nearest entry, the lower one on a fp32 midpoint."""
    middles = (table[1:] + table[:-1]) * F32(0.5)
    return (z[..., None] > middles).sum(-1).astype(np.uint8)


def _codebook(fmt: Format, x: np.ndarray, static: Planes) -> Planes:
    value = np.clip(zero_for_nan(x), -CODEBOOK_EDGE, CODEBOOK_EDGE)
    if has(fmt, "norm"):
        norm = saturated(np.minimum(np.sqrt((value.astype(np.float64) ** 2).sum(-1)), 65504.0), torch.float16)
        z = ratio(value * F32(x.shape[-1] ** 0.5), norm[..., None])
        return {"norm": norm, "codes": oracle.pack(nearest(z, normal_table(fmt.bits)), fmt.bits)}
    planes: Planes = {}
    if fmt.group == 0:
        low, high = (p[..., 0] for p in extremes(np.where(np.isfinite(x), value, F32(np.nan)), x.shape[-1]))
        planes["centre"] = saturated((high + low) * F32(0.5), torch.float16)
        planes["half_range"] = saturated((high - low) * F32(0.5), torch.float16)
    centre, half = _centre_and_half(fmt, planes or static)
    return planes | {"codes": oracle.pack(nearest(ratio(value - centre, half), static["codebook"]), fmt.bits)}


def _centre_and_half(fmt: Format, planes: Planes) -> tuple[np.ndarray, np.ndarray]:
    centre, half = (planes[name].astype(F32) for name in ("centre", "half_range"))
    if fmt.group is None:  # of channels, [H, D]
        return centre[None, :, None], half[None, :, None]
    return centre[..., None], half[..., None]


ENCODERS: dict[str, Callable[[Format, np.ndarray, Planes], Planes]] = {
    "exact": lambda fmt, x, static: {"codes": x},
    "integer": _integer,
    "float8": _float8,
    "block_scaled": _block_scaled,
    "codebook": _codebook,
}

# --------------------------------------------------------------------------------- before coding: turning and rotation


def turned(x: np.ndarray, position: np.ndarray, inv_freq: np.ndarray, back: bool = False) -> np.ndarray:
    """Pairs ``(c, c + D / 2)`` as complex numbers times ``exp(+-i position inv_freq)``, sines rounded to fp32 once."""
    angle = position.astype(np.float64)[..., None] * inv_freq.astype(np.float64)
    cos, sin = np.cos(angle).astype(F32), (np.sin(angle) * (-1 if back else 1)).astype(F32)
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


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


def random_signs(d: int) -> np.ndarray:
    """The documented hash, in modular arithmetic of numpy."""
    h = np.arange(1, d + 1, dtype=np.uint32) * np.uint32(0x9E3779B9)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return np.where(h >= 2**31, F32(-1), F32(1))


def rotated(fmt: Format, x: np.ndarray) -> np.ndarray:
    if fmt.rotation == "random_hadamard":
        x = x * random_signs(x.shape[-1])
    return butterflies(x) if fmt.rotation else x


def rotated_back(fmt: Format, x: np.ndarray) -> np.ndarray:
    x = butterflies(x) if fmt.rotation else x
    return x * random_signs(x.shape[-1]) if fmt.rotation == "random_hadamard" else x


def split_outliers(fmt: Format, x: np.ndarray, static: Planes) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the farthest, and ``x`` with NaN there; said element by element."""
    count = fmt.outlier_count(x.shape[-1])
    index = np.zeros((*x.shape[:-1], count), np.int16)
    rest = x.copy()
    for at in np.ndindex(x.shape[:-1]):
        line = x[at]
        if "centre" in static:
            centre, half = static["centre"][at[1]].astype(F32), static["half_range"][at[1]].astype(F32)
            distance = np.abs(line - centre)
            distance = np.where(distance == 0, F32(0), distance / half)
        elif has(fmt, "minimum") or has(fmt, "centre"):
            known = np.sort(line[~np.isnan(line)])
            distance = np.abs(line - (known[(len(known) - 1) // 2] if len(known) else F32(0)))
        else:
            distance = np.abs(line)
        order = sorted(
            range(len(line)), key=lambda i: (-np.nan_to_num(distance[i], nan=-1, posinf=np.inf), i)
        )  # noqa: B023
        index[at] = sorted(order[:count])
        rest[at][index[at]] = np.nan
    return index, rest


# -------------------------------------------------------------------------------------------------------- whole stores


def calibrated(fmt: Format, x: np.ndarray) -> Planes:
    """Static planes that a first write of ``x [B, H, T, D]``, rotated and without outliers, is given."""
    planes: Planes = {}
    if not fmt.static_planes:
        return planes
    plane = fmt.planes[fmt.static_planes[0]]
    axes = (0, 2, 3) if plane.axes == "H" else None
    x = finite(x)
    low, high = x.min(axes, initial=0).reshape(-1), x.max(axes, initial=0).reshape(-1)
    amax = np.maximum(high, -low)
    if has(fmt, "zero_point"):
        top = 2**fmt.bits - 1
        low, high = np.maximum(low, -INTEGER_EDGE), np.minimum(high, INTEGER_EDGE)
        scale = np.where(high > low, np.maximum(high - low, F32(1e-8)) / F32(top), F32(0)).astype(F32)
        return {"scale": scale, "zero_point": np.clip(np.rint(ratio(-low, scale)), 0, top).astype(F32)}
    if fmt.codec == "integer":
        divisor = F32(2 ** (fmt.bits - 1) - 1)
    elif fmt.codec == "float8":
        divisor = F32(MAGNITUDES[fmt.element][-1])
    elif fmt.codec == "block_scaled":
        divisor = F32(448 * 6)
    else:
        pytest.fail(f"no oracle for the static plane {plane.name!r} of format {fmt.name!r}: add one")
    planes[plane.name] = np.where(amax > 0, np.maximum(amax, F32(1e-8)) / divisor, F32(0)).astype(F32)
    return planes


def first_fit(fmt: Format, x: Tensor | np.ndarray) -> Planes:
    """Static planes after a first write of ``x`` as the cache receives it."""
    with np.errstate(all="ignore"):
        values = array(x) if isinstance(x, Tensor) else x
        if fmt.rotation:
            values = rotated(fmt, finite(values))
        if fmt.outliers:
            values = split_outliers(fmt, values, {})[1]
        return calibrated(fmt, values)


def expected(
    fmt: Format,
    x: Tensor | np.ndarray,
    static: Planes | None = None,
    position: np.ndarray | None = None,
) -> Planes:
    """Every plane but ``length`` for ``x [B, H, T, D]`` in a format without a window, by name; floats as float32.

    Args:
        static: planes that are already set; by default they are fitted to ``x``.
        position: the slots of the tokens, ``[T]`` or ``[B, T]``; ``0..T-1`` unless given.
    """
    assert fmt.base is None
    if fmt.codec not in ENCODERS:
        pytest.fail(f"format {fmt.name!r} has codec {fmt.codec!r}, which has no oracle: add one to ENCODERS")
    dtype = x.dtype if isinstance(x, Tensor) else torch.float32
    values = array(x) if isinstance(x, Tensor) else x
    planes: Planes = {}
    with np.errstate(all="ignore"):
        if has(fmt, "position"):
            assert static is not None
            slots = np.arange(x.shape[2]) if position is None else position
            slots = np.broadcast_to(slots.reshape(-1, 1, x.shape[2]), (x.shape[0], 1, x.shape[2]))
            planes["position"] = (slots + 1).astype(np.int32)
            values = turned(finite(values), slots, static["inv_freq"], back=True)
        if fmt.rotation:
            values = rotated(fmt, finite(values))
        if fmt.outliers:
            index, rest = split_outliers(fmt, values, static or {})
            kept = np.take_along_axis(zero_for_nan(values), index.astype(np.int64), -1)
            planes |= {"outlier_index": index, "outlier_value": saturated(kept, dtype)}
            values = rest
        static = calibrated(fmt, values) if static is None else static
        planes = {**planes, **static, **ENCODERS[fmt.codec](fmt, values, static)}
    wanted = {plane.name for plane in fmt.planes} - {"length"}
    assert set(planes) == wanted, (
        f"the oracle of {fmt.name!r} gives {sorted(planes)}, the row has {sorted(wanted)}"
    )
    return planes


# ----------------------------------------------------------------------------------------------------------- decodings


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return codes
    if bits == 3:
        three = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 3, 3).astype(np.uint32)
        word = three[..., 0] + 256 * three[..., 1] + 65536 * three[..., 2]
        parts = [word // 8**i % 8 for i in range(8)]
    else:
        parts = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*codes.shape[:-1], codes.shape[-1] * 8 // bits).astype(np.uint8)


def element_codes(fmt: Format, store: Sequence[Tensor]) -> np.ndarray:
    """One code for each channel, unpacked."""
    codes = array(store[0])
    return codes if fmt.lossless else unpacked(codes, fmt.bits)


def decoded(fmt: Format, store: Sequence[Tensor] | Planes) -> np.ndarray:
    """float32 ``[B, H, T, D]`` of a store, or of planes by name, in a format without a window."""
    assert fmt.base is None
    if isinstance(store, dict):
        planes = {name: np.asarray(plane) for name, plane in store.items()}
    else:
        planes = {plane.name: array(tensor) for plane, tensor in zip(fmt.planes, store, strict=True)}
    codes = planes["codes"] if fmt.lossless else unpacked(planes["codes"], fmt.bits)
    with np.errstate(all="ignore"):
        x = _values(fmt, planes, codes)
        if fmt.outliers:
            x = x.copy()
            kept = planes["outlier_value"].astype(F32)
            np.put_along_axis(x, planes["outlier_index"].astype(np.int64), kept, -1)
        x = rotated_back(fmt, x)
        if "position" in planes:
            x = turned(x, planes["position"] - 1, planes["inv_freq"])
            x = np.where(planes["position"][..., None] == 0, F32(0), x)
    return x


def _values(fmt: Format, planes: Planes, codes: np.ndarray) -> np.ndarray:
    d = codes.shape[-1]
    if fmt.codec == "exact":
        return codes
    if fmt.codec == "integer":
        return _integer_values(fmt, planes, codes)
    if fmt.codec == "float8":
        scale = planes["scale"]
        return float8_values(codes, fmt.element) * (
            scale.reshape(1, -1, 1, 1) if fmt.group is None else scale[..., None]
        )
    if fmt.codec == "block_scaled":
        values = oracle.e2m1_value(codes) if fmt.element is None else float8_values(codes, fmt.element)
        if "exponent" in planes:
            scale = widen(2.0 ** (planes["exponent"].astype(np.float64) - 127), 32, d)
            return (values * scale).astype(F32)
        sf = float8_values(planes["block_scale"], torch.float8_e4m3fn)
        return values * widen(sf * planes["decode_scale"][0], 16, d)
    if fmt.codec == "codebook" and "norm" in planes:
        entries = normal_table(fmt.bits)[codes]
        length = np.sqrt((entries.astype(np.float64) ** 2).sum(-1, keepdims=True))
        return entries * (planes["norm"].astype(np.float64)[..., None] / length).astype(F32)
    if fmt.codec == "codebook":
        centre, half = _centre_and_half(fmt, planes)
        return planes["codebook"][codes] * half + centre
    pytest.fail(f"format {fmt.name!r} has codec {fmt.codec!r}, which has no decoding oracle: add one")


def _integer_values(fmt: Format, planes: Planes, codes: np.ndarray) -> np.ndarray:
    along = 2 if fmt.token_group > 1 else 3
    group = fmt.token_group if along == 2 else (fmt.group or codes.shape[-1])

    def wide(scale: np.ndarray) -> np.ndarray:
        scale = scale[..., None] if scale.ndim == 3 else scale
        return np.take(np.repeat(scale.astype(F32), group, along), range(codes.shape[along]), along)

    if "minimum" in planes:
        return codes.astype(F32) * wide(planes["scale"]) + wide(planes["minimum"])
    steps, span = codes.astype(np.int64), 2**fmt.bits
    if codes.dtype == np.uint8:
        zero = planes["zero_point"].reshape(1, -1, 1, 1) if "zero_point" in planes else span // 2
        steps = np.where(steps >= span - zero, steps - span, steps)
    scale = planes["scale"].reshape(1, -1, 1, 1) if fmt.group is None else wide(planes["scale"])
    return steps.astype(F32) * scale
