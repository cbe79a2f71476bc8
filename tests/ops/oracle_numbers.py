"""The numbers that codes are made of, in numpy: small floats by their definitions, rounding, and groups of values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle
import torch
from torch import Tensor

from kvq_ops.formats import Format

F32 = np.float32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def array(tensor: Tensor) -> np.ndarray:
    """numpy view of a tensor; half floats widened to float32, which loses nothing."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in DTYPES else tensor).numpy()


def has(fmt: Format, plane: str) -> bool:
    return plane in [p.name for p in fmt.planes]


# ------------------------------------------------------------------------------------------------------- small floats


def _float8_magnitudes(exponent_bits: int, mantissa_bits: int, codes: int) -> np.ndarray:
    """Values of the byte patterns 0..codes-1, from the definition of the format."""
    bias = 2 ** (exponent_bits - 1) - 1
    byte = np.arange(codes)
    exponent, mantissa = byte >> mantissa_bits, byte & (2**mantissa_bits - 1)
    normal = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
    return np.where(exponent > 0, normal, mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)).astype(F32)


# Above the last finite byte of e4m3fn lies NaN, above that of e5m2 infinity.
MAGNITUDES = {
    torch.float8_e4m3fn: _float8_magnitudes(4, 3, 127),
    torch.float8_e5m2: _float8_magnitudes(5, 2, 124),
}
CASTS = {torch.float8_e4m3fn: oracle.e4m3, torch.float8_e5m2: oracle.e5m2}


def float8_bytes(values: np.ndarray, negative: np.ndarray, element: torch.dtype) -> np.ndarray:
    table = MAGNITUDES[element]
    byte = np.searchsorted(table, np.abs(values))
    assert np.array_equal(table[byte], np.abs(values)), "not values of this element type"
    return (byte | np.where(negative, 128, 0)).astype(np.uint8)


def float8_values(codes: np.ndarray, element: torch.dtype) -> np.ndarray:
    table = MAGNITUDES[element]
    assert ((codes & 127) < len(table)).all(), "NaN or infinity among the codes"
    return np.where(codes & 128, -table[codes & 127], table[codes & 127]).astype(F32)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, ties to even; the result as float32."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(F32).reshape(np.shape(x))


ROUND: dict[torch.dtype, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    # rounding, largest value, relative error of rounding
    torch.float16: (lambda x: np.asarray(x, np.float16).astype(F32), 65504.0, 2.0**-11),
    torch.bfloat16: (bfloat16, 3.3895313892515355e38, 2.0**-8),
    torch.float32: (lambda x: np.asarray(x, F32), float(np.finfo(F32).max), 2.0**-24),
}


def saturated(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Rounded to ``dtype``, at most its largest number; as float32."""
    rounding, largest, _ = ROUND[dtype]
    return rounding(np.clip(np.asarray(x, F32), -F32(largest), F32(largest))).astype(F32)


# ---------------------------------------------------------------------------------------------------- groups of values


def zero_for_nan(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), F32(0), x)


def finite(x: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(x), x, F32(0))


def blocks(x: np.ndarray, group: int, fill: float) -> np.ndarray:
    """``[..., n, group]``, the last group filled up."""
    padding = np.full((*x.shape[:-1], -x.shape[-1] % group), fill, x.dtype)
    return np.concatenate([x, padding], -1).reshape(*x.shape[:-1], -(-x.shape[-1] // group), group)


def extremes(x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest finite value of each group; zeros where there is none."""
    low = blocks(np.where(np.isfinite(x), x, F32(np.inf)), group, np.inf).min(-1)
    high = blocks(np.where(np.isfinite(x), x, F32(-np.inf)), group, -np.inf).max(-1)
    empty = high < low
    return np.where(empty, F32(0), low), np.where(empty, F32(0), high)


def widen(scale: np.ndarray, group: int, size: int) -> np.ndarray:
    return np.repeat(scale, group, -1)[..., :size]


def ratio(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """``x / scale``, zero where the scale is."""
    return np.where(scale != 0, x / np.where(scale != 0, scale, F32(1)), F32(0)).astype(F32)
