"""What the operator tests compare with: numpy computations that share no code with the package.

Encodings come from the oracle wherever it has the format; a codec that is missing from ``ORACLES`` fails the test of its
rows, so that a new format cannot go unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import oracle
import pytest
import torch
from torch import Tensor

from kvq_ops import formats, registry
from kvq_ops.formats import Format

F32 = np.float32
DTYPES = (torch.float32, torch.float16, torch.bfloat16)

LISTED = formats.names()
# Rows that the grammar makes on demand: other groups, and bfloat16 parameters.
DERIVED = ("int4_group32_bf16", "int4_group64_bf16", "int4_group8", "int4_group128")
NAMES = LISTED + DERIVED
STATIC = tuple(n for n in NAMES if formats.get_format(n).static_planes)
PER_TOKEN = tuple(n for n in NAMES if n not in STATIC)


def array(tensor: Tensor) -> np.ndarray:
    """numpy view of a tensor; half floats widened to float32, which loses nothing."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in DTYPES else tensor).numpy()


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


# ------------------------------------------------------------------------------------------------------ float8 bytes


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


# -------------------------------------------------------------------------------------------------------- encodings


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16, ties to even; the result as float32."""
    bits = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(F32).reshape(np.shape(x))


ROUND16: dict[torch.dtype, tuple[Callable[[np.ndarray], np.ndarray], float, float]] = {
    # rounding, largest value, relative error of rounding
    torch.float16: (lambda x: np.asarray(x, np.float16).astype(F32), 65504.0, 2.0**-11),
    torch.bfloat16: (bfloat16, 3.3895313892515355e38, 2.0**-8),
}


def saturating_asymmetric(
    x: np.ndarray, bits: int, group: int, parameter: torch.dtype
) -> tuple[np.ndarray, ...]:
    """As ``oracle.asymmetric_encode``, with bfloat16 as well, and with planes that saturate where it gives infinity."""
    round16, largest, _ = ROUND16[parameter]
    top = 2**bits - 1
    edge = F32(np.finfo(F32).max * (0.5 - 2**-8))
    x = np.clip(np.asarray(x, F32), -edge, edge)
    parts = []
    for i in range(0, x.shape[-1], group):
        g = x[..., i : i + group]
        low, high = g.min(-1, keepdims=True), g.max(-1, keepdims=True)
        s = round16(np.minimum((high - low) / F32(top), F32(largest)))
        m = round16(np.clip(low, -F32(largest), F32(largest)))
        q = np.where(s > 0, np.rint((g - m) / np.where(s > 0, s, F32(1))), 0)
        parts.append((np.clip(q, 0, top).astype(np.uint8), s, m))
    return tuple(np.concatenate(list(p), -1) for p in zip(*parts, strict=True))


def _integer(fmt: Format, x: np.ndarray, static: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [plane.name for plane in fmt.planes]
    if "minimum" not in names:
        assert fmt.bits == 8 and fmt.planes[fmt.index("scale")].axes == "BHT", (
            f"{fmt.name}: unknown symmetric row"
        )
        codes, scale = oracle.int8_per_token_head_encode(x)
        return {"codes": codes, "scale": scale}
    parameter = fmt.planes[fmt.index("scale")].dtype
    group = fmt.group or x.shape[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        codes, scale, minimum = oracle.asymmetric_encode(x, fmt.bits, group)
    if parameter != torch.float16 or np.isinf(scale).any() or np.isinf(minimum).any():
        codes, scale, minimum = saturating_asymmetric(x, fmt.bits, group, parameter)
    return {"codes": oracle.pack(codes, fmt.bits), "scale": scale.astype(F32), "minimum": minimum.astype(F32)}


def _float8(fmt: Format, x: np.ndarray, static: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert fmt.element is not None
    largest = F32(MAGNITUDES[fmt.element][-1])
    planes = {}
    if fmt.group == 0 and fmt.element == torch.float8_e4m3fn:
        values, scale = oracle.fp8_per_token_head_encode(x)
        planes["scale"] = scale
    else:
        assert fmt.group is None, f"{fmt.name}: unknown float8 row"
        scale = static["scale"].reshape(1, -1, 1, 1)
        quotient = np.where(scale > 0, x / np.where(scale > 0, scale, F32(1)), F32(0))
        values = CASTS[fmt.element](np.clip(quotient, -largest, largest))
    usable = scale.reshape(*scale.shape, *[1] * (4 - scale.ndim)) > 0
    planes["codes"] = float8_bytes(values, np.signbit(x) & usable, fmt.element)
    return planes


def _block_scaled(fmt: Format, x: np.ndarray, static: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    assert fmt.group == 16 and fmt.bits == 4, f"{fmt.name}: unknown block-scaled row"
    d = x.shape[-1]
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -d % 16), F32)], -1)
    g = static["decode_scale"][0]
    if g == 0:
        codes, scale = (
            np.zeros(padded.shape, np.uint8),
            np.zeros((*x.shape[:-1], padded.shape[-1] // 16), F32),
        )
    else:
        codes, scale = oracle.nvfp4_encode(padded, g)
    return {
        "codes": oracle.pack(codes[..., :d], 4),
        "block_scale": float8_bytes(scale, np.zeros(scale.shape, bool), torch.float8_e4m3fn),
    }


def _exact(fmt: Format, x: np.ndarray, static: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"codes": x}


Encode = Callable[[Format, np.ndarray, dict[str, np.ndarray]], dict[str, np.ndarray]]
ORACLES: dict[str, Encode] = {
    "exact": _exact,
    "integer": _integer,
    "float8": _float8,
    "block_scaled": _block_scaled,
}


def calibrated(fmt: Format, x: np.ndarray) -> dict[str, np.ndarray]:
    """Static planes for a first write of ``x [B, H, T, D]``."""
    planes = {}
    for i in fmt.static_planes:
        plane = fmt.planes[i]
        amax = np.abs(x).max((0, 2, 3) if plane.axes == "H" else None).reshape(-1)
        if fmt.codec == "float8":
            divisor = F32(MAGNITUDES[fmt.element][-1])
        elif fmt.codec == "block_scaled":
            divisor = F32(448 * 6)
        else:
            pytest.fail(f"no oracle for the static plane {plane.name!r} of format {fmt.name!r}: add one")
        planes[plane.name] = np.where(amax > 0, np.maximum(amax, F32(1e-8)) / divisor, F32(0)).astype(F32)
    return planes


def expected(fmt: Format, x: Tensor, static: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
    """Every plane but ``length`` for ``x [B, H, T, D]``, by name; floats as float32.

    ``static`` holds scales that are already set; by default they are fitted to ``x``.
    """
    if fmt.codec not in ORACLES:
        pytest.fail(f"format {fmt.name!r} has codec {fmt.codec!r}, which has no oracle: add one to ORACLES")
    values = array(x)
    static = calibrated(fmt, values) if static is None else static
    planes = {**static, **ORACLES[fmt.codec](fmt, values, static)}
    wanted = {plane.name for plane in fmt.planes} - {"length"}
    assert set(planes) == wanted, (
        f"the oracle of {fmt.name!r} gives {sorted(planes)}, the row has {sorted(wanted)}"
    )
    return planes


def assert_planes(store: Sequence[Tensor], fmt: Format, want: dict[str, np.ndarray], context: str) -> None:
    for plane, tensor in zip(fmt.planes[:-1], store[:-1], strict=True):
        got = array(tensor)
        assert got.shape == want[plane.name].shape, f"{context} {plane.name}: shape {got.shape}"
        bad = np.argwhere(got != want[plane.name])
        assert not len(bad), (
            f"{context} {plane.name}: {len(bad)} of {got.size} differ, first at {tuple(bad[0])}: "
            f"{got[tuple(bad[0])]} for {want[plane.name][tuple(bad[0])]}"
        )


# -------------------------------------------------------------------------------------------------------- decodings


def unpacked(codes: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return codes
    parts = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*codes.shape[:-1], -1)


def element_codes(fmt: Format, store: Sequence[Tensor]) -> np.ndarray:
    """One code for each channel, unpacked."""
    codes = array(store[0])
    return codes if fmt.lossless else unpacked(codes, fmt.bits)


def decoded(fmt: Format, store: Sequence[Tensor]) -> np.ndarray:
    """float32 ``[B, H, T, D]`` of a store."""
    planes = {plane.name: array(tensor) for plane, tensor in zip(fmt.planes, store, strict=True)}
    codes = element_codes(fmt, store)
    if fmt.codec == "exact":
        return codes
    if fmt.codec == "integer" and "minimum" in planes:
        return oracle.asymmetric_decode(
            codes, planes["scale"], planes["minimum"], fmt.group or codes.shape[-1]
        )
    if fmt.codec == "integer":
        return oracle.int8_per_token_head_decode(codes, planes["scale"])
    if fmt.codec == "float8":
        scale = planes["scale"]
        values = float8_values(codes, fmt.element)
        return values * (scale.reshape(1, -1, 1, 1) if fmt.group is None else scale[..., None])
    if fmt.codec == "block_scaled":
        d = codes.shape[-1]
        padded = np.concatenate([codes, np.zeros((*codes.shape[:-1], -d % 16), np.uint8)], -1)
        scale = float8_values(planes["block_scale"], torch.float8_e4m3fn)
        return oracle.nvfp4_decode(padded, scale, planes["decode_scale"][0])[..., :d]
    pytest.fail(f"format {fmt.name!r} has codec {fmt.codec!r}, which has no decoding oracle: add one")


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


def assert_tight(out: Tensor, want: np.ndarray, tolerance: float = 1e-5) -> None:
    """``out`` equals ``want`` within fp32 arithmetic (1e-5, absolute and relative) and the rounding of its own dtype."""
    assert tuple(out.shape) == want.shape
    limit = tolerance * (1 + np.abs(want))
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
    return [row.name for row in registry.implementations(op)]


def refusal(
    name: str, op: str, fmts: Sequence[Format], head_dims: Sequence[int], dtype: torch.dtype
) -> str | None:
    """Why the implementation would not run this here, or None."""
    row = next(row for row in registry.implementations(op) if row.name == name)
    return row.refuses(registry.Request(op, "cpu", tuple(fmts), tuple(head_dims), dtype))
