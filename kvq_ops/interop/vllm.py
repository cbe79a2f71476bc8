"""Pages of vLLM and FlashInfer: int8 and fp8 per token and head here, NVFP4 from ``nvfp4``.

The bytes of one head of one token are its codes and then its fp32 scale (vLLM's ``_reshape_cache_per_token_head`` and the
scale views of its Triton backend):

* ``[pages, 2, page_size, H, D + 4]``, keys at 0 and values at 1 of the second axis (older versions);
* ``[pages, H, page_size, 2 (D + 4)]``, a row being ``[K | scale of K | V | scale of V]`` (newer ones).

Read and write functions copy codes and scales bit by bit. Append functions encode dense tokens by the rules of those systems,
with IEEE division; their GPU kernels may use approximate reciprocals, and then differ by single codes.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..errors import DtypeError, FormatError, ShapeError
from ..formats import get_format
from ..handle import QuantizedKV
from .nvfp4 import append_nvfp4, read_nvfp4, write_nvfp4
from .pages import (
    capacity_for,
    check_handle,
    check_held,
    check_slots,
    check_tokens,
    dense_tokens,
    make_handle,
    only_held,
    places,
    slot_mapping,
    tokens_first,
)

__all__ = [
    "append_nvfp4",
    "append_per_token_head",
    "read_nvfp4",
    "read_per_token_head",
    "slot_mapping",
    "write_nvfp4",
    "write_per_token_head",
]

_SCALE_BYTES = 4
# vLLM keeps fp8 in uint8 pages where a kernel cannot name the type; its int8 pages are int8.
_FORMATS = {
    torch.int8: "int8_per_token_head",
    torch.uint8: "fp8_per_token_head",
    torch.float8_e4m3fn: "fp8_per_token_head",
}
_RANGES = {"int8_per_token_head": (127.0, -128.0), "fp8_per_token_head": (448.0, -448.0)}


def _rows(pages: Tensor, head_dim: int | None) -> tuple[str, Tensor, Tensor]:
    """Format, and the byte rows of keys and of values as views ``[pages, page_size, H, D + 4]``."""
    what = "pages of int8 or fp8 per token and head"
    if pages.dtype not in _FORMATS:
        raise DtypeError(
            what,
            got=str(pages.dtype),
            allowed="int8 for int8 codes, uint8 or float8_e4m3fn for fp8 codes",
            do="the codes of float8_e4m3fnuz mean other values" if "fnuz" in str(pages.dtype) else "",
        )
    old = pages.dim() == 5
    if not (pages.dim() == 4 or (old and pages.shape[1] == 2)):
        raise ShapeError(
            what,
            got=str(tuple(pages.shape)),
            allowed="[pages, 2, page_size, heads, D + 4] or [pages, heads, page_size, 2 * (D + 4)]",
        )
    last = pages.shape[-1]
    width = last if old else last // 2
    fits = last == width * (1 if old else 2) and width > _SCALE_BYTES and width % _SCALE_BYTES == 0
    if not fits or (head_dim is not None and head_dim != width - _SCALE_BYTES):
        wanted = "D" if head_dim is None else str(head_dim)
        raise ShapeError(
            f"the last axis of {what}",
            got=f"{last}, in pages {tuple(pages.shape)}",
            allowed=f"{wanted} + 4" if old else f"2 * ({wanted} + 4)",
            do="D is a multiple of 4, so that its fp32 scale is aligned; 4-bit pages are another format",
        )
    rows = pages.view(torch.uint8)
    if old:
        return _FORMATS[pages.dtype], rows[:, 0], rows[:, 1]
    rows = rows.transpose(1, 2)
    return _FORMATS[pages.dtype], rows[..., :width], rows[..., width:]


def read_per_token_head(
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    capacity: int | None = None,
) -> tuple[QuantizedKV, QuantizedKV]:
    """Keys and values of int8 or fp8 pages of vLLM, codes and scales unchanged.

    Args:
        pages: in either layout of this module, of any strides. int8, or uint8 or float8_e4m3fn for fp8.
        block_table: int32 or int64 ``[B, N]``, the pages of each sequence; entries behind the last one in use are not
            looked at.
        lengths: int32 or int64 ``[B]``, tokens of each sequence.
        head_dim: checked against the last axis when given.
        dtype: of the dense caches that the handles stand for: what they decode to.
        capacity: tokens that the handles have room for, at least the longest sequence, which is the default.

    Returns:
        handles ``[B, H, capacity, D]`` in ``int8_per_token_head`` or ``fp8_per_token_head``. The code -128, which vLLM may
        store and this toolkit never makes, stays and decodes as it should.

    Raises:
        ShapeError, DtypeError: pages of another layout. CapacityError: a page, length or capacity out of range.
    """
    name, *sides = _rows(pages, head_dim)
    what = "pages of int8 or fp8 per token and head"
    count, page_size, heads, width = sides[0].shape
    slots = slot_mapping(block_table, lengths, page_size)
    check_slots(slots, count, page_size, what)
    room = capacity_for(capacity, slots.shape[1], what)
    shape = (len(slots), heads, room, width - _SCALE_BYTES)
    handles = [
        make_handle(get_format(name), _token_planes(side, slots, name), lengths, shape, dtype)
        for side in sides
    ]
    return handles[0], handles[1]


def _token_planes(side: Tensor, slots: Tensor, name: str) -> dict[str, Tensor]:
    page, place = places(slots, side.shape[1])
    rows = only_held(side[page, place], slots)
    codes = rows[..., :-_SCALE_BYTES]
    scale = rows[..., -_SCALE_BYTES:].contiguous().view(torch.float32).squeeze(-1)
    return {"codes": codes.view(torch.int8) if name.startswith("int8") else codes, "scale": scale}


def write_per_token_head(pages: Tensor, key: QuantizedKV, value: QuantizedKV, slots: Tensor) -> None:
    """Copy codes and scales of caches into int8 or fp8 pages of vLLM, in place.

    Args:
        pages: as for :func:`read_per_token_head`.
        key, value: ``[B, H, T, D]`` in the format of the pages.
        slots: int32 or int64 ``[B, at most T]``, where each token goes; negative skips it. :func:`slot_mapping` makes them.

    Raises:
        FormatError, ShapeError, DtypeError: caches and pages do not go together.
        CapacityError: a slot out of range, or for a token that a cache does not hold. Nothing is written then.
    """
    what = "writing into pages of int8 or fp8 per token and head"
    name, *sides = _rows(pages, None)
    caches = [check_handle(key, name, what), check_handle(value, name, what)]
    stores = [cache.planes() for cache in caches]
    chosen = check_tokens(sides, [store[0] for store in stores], slots, _SCALE_BYTES, what)
    for cache in caches:
        check_held(cache, slots, what)
    for side, store in zip(sides, stores, strict=True):
        _store_rows(side, store[0], store[1], slots, chosen)


def _store_rows(side: Tensor, codes: Tensor, scale: Tensor, slots: Tensor, chosen: Tensor) -> None:
    """Write codes ``[B, H, T, D]`` and fp32 scales ``[B, H, T]`` of the chosen tokens into a side of the pages."""
    page, place = places(slots.reshape(-1)[chosen], side.shape[1])
    count = slots.shape[1]
    scale_bytes = tokens_first(scale, count).unsqueeze(-1).contiguous().view(torch.uint8)
    rows = torch.cat([tokens_first(codes.view(torch.uint8), count), scale_bytes], -1)
    side[page, place] = rows[chosen]


def append_per_token_head(
    pages: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    rounding: Literal["nearest", "truncate"] = "nearest",
) -> None:
    """Encode dense tokens into int8 or fp8 pages as vLLM does: ``s = max(amax / MAX, 1e-6)``, ``q = clamp(x * (1 / s))``.

    ``MAX`` is 127 or 448; int8 codes reach down to -128. All arithmetic is fp32.

    Args:
        pages: as for :func:`read_per_token_head`.
        key, value: dense, ``[B, H, T, D]`` of a floating dtype.
        slots: int32 or int64 ``[B, at most T]``; negative skips the token.
        rounding: of int8 codes: ``"nearest"``, ties to even, or ``"truncate"``, towards zero, as early versions did.

    Raises:
        As :func:`write_per_token_head`.
    """
    what = "appending to pages of int8 or fp8 per token and head"
    name, *sides = _rows(pages, None)
    if rounding not in ("nearest", "truncate"):
        raise FormatError(what, got=f"rounding={rounding!r}", allowed="'nearest', 'truncate'")
    dense = [
        dense_tokens(key, what, "write_per_token_head"),
        dense_tokens(value, what, "write_per_token_head"),
    ]
    chosen = check_tokens(sides, dense, slots, _SCALE_BYTES, what)
    top, bottom = _RANGES[name]
    for side, x in zip(sides, dense, strict=True):
        scale = (x.abs().amax(-1) / torch.full_like(x[..., 0], top)).clamp_min(1e-6)
        q = (x * (1.0 / scale).unsqueeze(-1)).clamp(bottom, top)
        if name.startswith("int8"):
            codes = (q.round() if rounding == "nearest" else q.trunc()).to(torch.int8)
        else:
            codes = q.to(torch.float8_e4m3fn)
        _store_rows(side, codes, scale, slots, chosen)
