"""Foreign layouts said byte by byte in numpy, with addresses instead of axes; nothing of the package is used.

Each builder takes codes and scales and gives the bytes that the other system would hold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import oracle

F32 = np.float32
Planes = dict[str, np.ndarray]

# ---------------------------------------------------------------------------------------------- pages per token and head


def old_row(page: int, side: int, place: int, head: int, page_size: int, heads: int, dim: int) -> int:
    """First byte of the row ``[D codes | fp32]`` in ``(pages, 2, page_size, H, D + 4)``."""
    return (((page * 2 + side) * page_size + place) * heads + head) * (dim + 4)


def new_row(page: int, side: int, place: int, head: int, page_size: int, heads: int, dim: int) -> int:
    """The same in ``(pages, H, page_size, 2 (D + 4))``."""
    return ((page * heads + head) * page_size + place) * 2 * (dim + 4) + side * (dim + 4)


ROWS: dict[str, Callable[..., int]] = {"old": old_row, "new": new_row}


def pages_shape(layout: str, pages: int, page_size: int, heads: int, dim: int) -> tuple[int, ...]:
    if layout == "old":
        return (pages, 2, page_size, heads, dim + 4)
    return (pages, heads, page_size, 2 * (dim + 4))


def fill_per_token_head(
    memory: np.ndarray,
    layout: str,
    sides: list[Planes],
    slots: np.ndarray,
    page_size: int,
    *,
    swap_sides: bool = False,
    permute_scales: bool = False,
) -> None:
    """Write codes ``[B, H, T, D]`` (bytes) and scales ``[B, H, T]`` of keys and values at ``slots [B, T]``."""
    batch, heads, tokens, dim = sides[0]["codes"].shape
    for b in range(batch):
        for t in range(slots.shape[1]):
            if slots[b, t] < 0:
                continue
            page, place = divmod(int(slots[b, t]), page_size)
            for side in (0, 1):
                planes = sides[1 - side if swap_sides else side]
                for h in range(heads):
                    at = ROWS[layout](page, side, place, h, page_size, heads, dim)
                    memory[at : at + dim] = planes["codes"][b, h, t].view(np.uint8)
                    scale = planes["scale"][b, (h + 1) % heads if permute_scales else h, t]
                    memory[at + dim : at + dim + 4] = np.frombuffer(F32(scale).tobytes(), np.uint8)


def vllm_encode(x: np.ndarray, element: str, truncate: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """``s = max(amax / MAX, 1e-6)``, ``q = clamp(x * (1 / s))``: int8 codes or e4m3 values, and scales ``[B, H, T]``."""
    top, bottom = (127, -128) if element == "int8" else (448, -448)
    x = np.asarray(x, F32)
    s = np.maximum(np.abs(x).max(-1) / F32(top), F32(1e-6)).astype(F32)
    q = np.clip(x * (F32(1) / s)[..., None], F32(bottom), F32(top))
    if element != "int8":
        return oracle.e4m3(q), s
    return (np.trunc(q) if truncate else np.rint(q)).astype(np.int8), s


# ---------------------------------------------------------------------------------------------------------- NVFP4 pages


def swizzle(place: int, scale: int, scales: int) -> tuple[int, int]:
    flat = place // 4 * 4 * scales + 4 * scale + place % 4
    return flat // scales, flat % scales


def fill_nvfp4(
    memory: np.ndarray,
    memory_order: str,
    sides: list[Planes],
    slots: np.ndarray,
    page_size: int,
    swizzled: bool,
    *,
    swap_nibbles: bool = False,
    swap_sides: bool = False,
    interleaved: bool = False,
) -> None:
    """Write codes ``[B, H, T, D]`` (0..15) and scale bytes ``[B, H, T, D / 16]`` of keys and values.

    Args:
        memory_order: ``NHD`` or ``HND``, how a side of a page runs.
        interleaved: a wrong layout, in which each head's scales follow its own codes.
    """
    batch, heads, tokens, dim = sides[0]["codes"].shape
    half, scales = dim // 2, dim // 16
    side_bytes = page_size * heads * (half + scales)

    def row(place: int, head: int) -> int:
        return place * heads + head if memory_order == "NHD" else head * page_size + place

    for b in range(batch):
        for t in range(slots.shape[1]):
            if slots[b, t] < 0:
                continue
            page, place = divmod(int(slots[b, t]), page_size)
            for side in (0, 1):
                planes = sides[1 - side if swap_sides else side]
                base = (page * 2 + side) * side_bytes
                for h in range(heads):
                    codes = planes["codes"][b, h, t]
                    even, odd = codes[0::2], codes[1::2]
                    packed = odd | even << 4 if swap_nibbles else even | odd << 4
                    at = base + row(place, h) * (half + scales if interleaved else half)
                    memory[at : at + half] = packed
                    for s in range(scales):
                        place_s, s_s = swizzle(place, s, scales) if swizzled and side == 1 else (place, s)
                        at = base + page_size * heads * half + row(place_s, h) * scales + s_s
                        if interleaved:
                            at = base + row(place_s, h) * (half + scales) + half + s_s
                        memory[at] = planes["block_scale"][b, h, t, s]


def nvfp4_encode(x: np.ndarray, g: float) -> tuple[np.ndarray, np.ndarray]:
    """FlashInfer's software path: codes ``[..., D]`` and scale values ``[..., D / 16]``; multiplies by a reciprocal."""
    blocks = np.asarray(x, F32).reshape(*x.shape[:-1], -1, 16)
    sf = oracle.e4m3(np.abs(blocks).max(-1) / (F32(6) * F32(g)))
    wide = (sf * F32(g)).astype(F32)
    inverse = np.where(wide > 0, F32(1) / np.where(wide > 0, wide, F32(1)), F32(0)).astype(F32)
    return oracle.e2m1_code(blocks * inverse[..., None]).reshape(x.shape), sf


# -------------------------------------------------------------------------------------------------------- llama.cpp


def _half_away(x: np.ndarray) -> np.ndarray:
    return np.trunc(x + np.copysign(F32(0.5), x))


def q8_0(x: np.ndarray) -> np.ndarray:
    """``[..., D]`` as ``[..., D / 32 * 34]`` bytes: fp32 ``d`` encodes, fp16 ``d`` is stored, halves go away from zero."""
    blocks = np.asarray(x, F32).reshape(-1, 32)
    out = []
    for block in blocks:
        d = F32(np.abs(block).max() / F32(127))
        q = _half_away(block * (F32(1) / d if d else F32(0))).astype(np.int8)
        out.append(np.concatenate([np.frombuffer(np.float16(d).tobytes(), np.uint8), q.view(np.uint8)]))
    return np.concatenate(out).reshape(*x.shape[:-1], -1)


def q4_0(x: np.ndarray, *, neighbours: bool = False) -> np.ndarray:
    """``[..., D]`` as ``[..., D / 32 * 18]`` bytes. ``neighbours`` packs the wrong way, codes 2j and 2j + 1 in a byte."""
    out = []
    for block in np.asarray(x, F32).reshape(-1, 32):
        d = F32(block[np.argmax(np.abs(block))] / F32(-8))
        scaled = block * (F32(1) / d if d else F32(0)) + F32(8.5)
        q = np.minimum(15, scaled.astype(np.int8)).astype(np.uint8)
        low, high = (q[0::2], q[1::2]) if neighbours else (q[:16], q[16:])
        out.append(np.concatenate([np.frombuffer(np.float16(d).tobytes(), np.uint8), low | high << 4]))
    return np.concatenate(out).reshape(*x.shape[:-1], -1)


def q8_0_values(blocks: np.ndarray) -> np.ndarray:
    rows = blocks.reshape(-1, 34)
    d = np.array([np.frombuffer(row[:2].tobytes(), np.float16)[0] for row in rows], F32)
    return (rows[:, 2:].view(np.int8).astype(F32) * d[:, None]).reshape(*blocks.shape[:-1], -1)


def q4_0_values(blocks: np.ndarray) -> np.ndarray:
    rows = blocks.reshape(-1, 18)
    d = np.array([np.frombuffer(row[:2].tobytes(), np.float16)[0] for row in rows], F32)
    q = np.concatenate([rows[:, 2:] & 15, rows[:, 2:] >> 4], 1).astype(F32) - 8
    return (q * d[:, None]).reshape(*blocks.shape[:-1], -1)


# ------------------------------------------------------------------------------------------------------- quanto and HQQ


def quanto_group_index(
    index: tuple[int, ...], shape: tuple[int, ...], axis: int, group: int
) -> tuple[int, int]:
    """(group, place in it) of the element ``index`` of a tensor ``[B, H, T, D]``."""
    flat = int(np.ravel_multi_index(index, shape))
    if axis == 0:
        return flat // group, flat % group
    dim = shape[-1]
    token, channel = divmod(flat, dim)
    blocks = int(np.prod(shape)) // dim // group
    block, place = divmod(token, group)
    return channel * blocks + block, place


def hqq_group_index(index: tuple[int, ...], shape: tuple[int, ...], axis: int, group: int) -> tuple[int, int]:
    flat = int(np.ravel_multi_index(index, shape))
    if axis == 1:
        return flat // group, flat % group
    groups = int(np.prod(shape)) // group
    return flat % groups, flat // groups


def pack_rows_low_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """quanto: of ``n`` packed rows, row ``i`` holds rows ``i``, ``i + n``, ... from the lowest bits on."""
    per = 8 // bits
    n = -(-codes.shape[0] // per)
    out = np.zeros((n, codes.shape[1]), np.uint8)
    for row in range(codes.shape[0]):
        out[row % n] |= codes[row] << (bits * (row // n))
    return out


def pack_rows_high_first(codes: np.ndarray, bits: int) -> np.ndarray:
    """HQQ: the first rows in the highest of the bits in use; ten 3-bit codes in an int32, the rows filled up with zeros."""
    per, kind = (10, np.int32) if bits == 3 else (8 // bits, np.uint8)
    n = -(-codes.shape[0] // per)
    out = np.zeros((n, codes.shape[1]), kind)
    for row in range(codes.shape[0]):
        out[row % n] |= codes[row].astype(kind) << (bits * (per - 1 - row // n))
    return out
