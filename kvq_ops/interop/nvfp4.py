"""NVFP4 pages of vLLM and FlashInfer.

uint8 ``[pages, 2, page_size, H, 9 D / 16]`` (vLLM ``reshape_and_cache_nvfp4``). The last axis is a count, not an order:
each side of a page holds first the e2m1 codes of *all* its tokens and heads, then all their e4m3 scales, so that a page is
``[K codes | K scales | V codes | V scales]``; the low half of a byte is the even channel. Scales of keys lie in the order
of the tokens. Those of values do too (``value_scales="linear"``), or are swizzled for the trtllm-gen kernels of SM100
(``"swizzled"``): within a page and head, with ``S = D / 16`` scales a token, scale ``s`` of token ``t`` lies at ``t // 4 *
4 S + 4 s + t % 4``. Nothing in the bytes tells which.

The fp32 scale of a tensor is not in the pages either. Here it is the *decode* scale ``g``, what a reader multiplies by:
``x' = e2m1 * sf * g``.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..codecs.block_scaled import e2m1_codes
from ..codecs.packing import pack
from ..errors import DtypeError, FormatError, ShapeError
from ..formats import get_format
from ..handle import QuantizedKV
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

__all__ = ["append_nvfp4", "read_nvfp4", "write_nvfp4"]

ScaleOrder = Literal["linear", "swizzled"]


_BLOCK = 16


def _nvfp4_sides(pages: Tensor, layout: str, head_dim: int | None) -> list[tuple[Tensor, Tensor]]:
    """(codes, scales) of keys and of values as views ``[pages, page_size, H, D / 2]`` and ``[..., D / 16]``."""
    what = "NVFP4 pages"
    if pages.dtype is not torch.uint8:
        raise DtypeError(what, got=str(pages.dtype), allowed="uint8")
    if layout not in ("NHD", "HND"):
        raise FormatError(f"layout of {what}", got=repr(layout), allowed="'NHD', 'HND'")
    if pages.dim() != 5 or pages.shape[1] != 2:
        order = "page_size, heads" if layout == "NHD" else "heads, page_size"
        raise ShapeError(what, got=str(tuple(pages.shape)), allowed=f"[pages, 2, {order}, 9 * D / 16]")
    last = pages.shape[-1]
    channels, left = divmod(last * _BLOCK, 9)
    if left or channels % 64 or channels == 0 or (head_dim is not None and head_dim != channels):
        raise ShapeError(
            f"the last axis of {what}",
            got=f"{last}, in pages {tuple(pages.shape)}",
            allowed=f"{head_dim} / 2 + {head_dim} / 16" if head_dim else "D / 2 + D / 16",
            do="D is a multiple of 64: 36, 72, 108, 144, ... bytes a head",
        )
    page_size = pages.shape[2 if layout == "NHD" else 3]
    if page_size % 4 or page_size == 0:
        raise ShapeError(
            f"the page size of {what}",
            got=f"{page_size}, in pages {tuple(pages.shape)} of layout {layout}",
            allowed="a multiple of 4",
            do="say layout='HND' for [pages, 2, heads, page_size, bytes]",
        )
    return [_split_side(pages[:, side], layout, channels) for side in (0, 1)]


def _split_side(side: Tensor, layout: str, channels: int) -> tuple[Tensor, Tensor]:
    # The bytes run as the memory does, whatever the order of the axes: vLLM gives the logical order NHD to HND memory.
    swapped = side.stride(2) > side.stride(1) and 1 not in side.shape[1:3]
    inner = side.transpose(1, 2) if swapped else side
    count, first, second, last = inner.shape
    try:
        raw = inner.view(count, first * second * last)
    except RuntimeError:
        raise ShapeError(
            "NVFP4 pages",
            got=f"strides {side.stride()} of one side, shape {tuple(side.shape)}",
            allowed="keys (and values) of a page without gaps: codes and scales are addressed by bytes",
            do="pass the cache tensor itself, not a slice of its heads or tokens",
        ) from None
    border = first * second * (channels // 2)
    codes = raw[:, :border].view(count, first, second, channels // 2)
    scales = raw[:, border:].view(count, first, second, channels // _BLOCK)
    if swapped != (layout == "HND"):
        codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
    return codes, scales


def _scale_order(order: str) -> bool:
    if order not in ("linear", "swizzled"):
        raise FormatError(
            "the order of the value scales of NVFP4 pages",
            got=repr(order),
            allowed="'linear', or 'swizzled' for pages of SM100 trtllm-gen kernels",
        )
    return order == "swizzled"


def _swizzled(place: Tensor, scales: int) -> tuple[Tensor, Tensor]:
    """Where the scales of the tokens at ``place [N]`` of a page lie: token and column, ``[N, scales]`` each."""
    column = torch.arange(scales, device=place.device)
    token = place.unsqueeze(1)
    flat = token // 4 * 4 * scales + 4 * column + token % 4
    return flat // scales, flat % scales


def _decode_scale(scale: float | Tensor, side: str, device: torch.device) -> Tensor:
    given = torch.as_tensor(scale, dtype=torch.float32, device=device).detach().reshape(-1)
    number = float(given[0]) if given.numel() == 1 else math.nan
    if not (0 < number < math.inf):
        raise FormatError(
            f"{side}_decode_scale of NVFP4 pages",
            got=f"{scale}",
            allowed="one positive finite number",
            do="it is what a reader multiplies by (vLLM's k_scale and v_scale), not its inverse; the pages do not hold it",
        )
    return given.clone()


def read_nvfp4(
    pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    key_decode_scale: float | Tensor,
    value_decode_scale: float | Tensor,
    value_scales: ScaleOrder,
    layout: Literal["NHD", "HND"] = "NHD",
    head_dim: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    capacity: int | None = None,
) -> tuple[QuantizedKV, QuantizedKV]:
    """Keys and values of NVFP4 pages of vLLM or FlashInfer, codes and scales unchanged.

    Args:
        pages: uint8 ``[pages, 2, page_size, H, 9 D / 16]``, or with the two middle axes the other way round for
            ``layout="HND"``. Its memory may run in either order.
        block_table, lengths, head_dim, dtype, capacity: as for :func:`read_per_token_head`.
        key_decode_scale, value_decode_scale: the fp32 scale of each tensor, what a reader multiplies by.
        value_scales: ``"linear"`` or ``"swizzled"``, see above.

    Returns:
        handles ``[B, H, capacity, D]`` in ``nvfp4``.

    Raises:
        ShapeError, DtypeError, FormatError: pages of another layout, or a scale that is none.
        CapacityError: a page, length or capacity out of range.
    """
    swizzled = _scale_order(value_scales)
    sides = _nvfp4_sides(pages, layout, head_dim)
    given = [
        _decode_scale(key_decode_scale, "key", pages.device),
        _decode_scale(value_decode_scale, "value", pages.device),
    ]
    count, page_size, heads, half = sides[0][0].shape
    slots = slot_mapping(block_table, lengths, page_size)
    check_slots(slots, count, page_size, "NVFP4 pages")
    room = capacity_for(capacity, slots.shape[1], "NVFP4 pages")
    page, place = places(slots, page_size)
    handles = []
    for codes, scales, decode_scale, swizzle in zip(
        *zip(*sides, strict=True), given, (False, swizzled), strict=True
    ):
        planes = {
            "codes": only_held(codes[page, place], slots),
            "block_scale": only_held(_take_scales(scales, page, place, swizzle), slots),
            "decode_scale": decode_scale,
        }
        shape = (len(slots), heads, room, 2 * half)
        handles.append(make_handle(get_format("nvfp4"), planes, lengths, shape, dtype))
    return handles[0], handles[1]


def _take_scales(scales: Tensor, page: Tensor, place: Tensor, swizzled: bool) -> Tensor:
    """``[B, T, H, S]`` from a side's scales ``[pages, page_size, H, S]``, for tokens at ``page`` and ``place [B, T]``."""
    if not swizzled:
        return scales[page, place]
    token, column = _swizzled(place.reshape(-1), scales.shape[-1])
    taken = scales[page.reshape(-1, 1), token, :, column]
    return taken.transpose(1, 2).reshape(*page.shape, *scales.shape[2:])


def _put_scales(scales: Tensor, page: Tensor, place: Tensor, new: Tensor, swizzled: bool) -> None:
    """Write ``new [N, H, S]`` for tokens at ``page`` and ``place [N]``."""
    if not swizzled:
        scales[page, place] = new
        return
    token, column = _swizzled(place, scales.shape[-1])
    scales[page.unsqueeze(1), token, :, column] = new.transpose(1, 2)


def write_nvfp4(
    pages: Tensor,
    key: QuantizedKV,
    value: QuantizedKV,
    slots: Tensor,
    *,
    value_scales: ScaleOrder,
    layout: Literal["NHD", "HND"] = "NHD",
    key_decode_scale: float | Tensor | None = None,
    value_decode_scale: float | Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Copy codes and scales of ``nvfp4`` caches into NVFP4 pages, in place.

    Args:
        pages, value_scales, layout: as for :func:`read_nvfp4`.
        key, value: ``[B, H, T, D]`` in ``nvfp4``.
        slots: int32 or int64 ``[B, at most T]``, where each token goes; negative skips it.
        key_decode_scale, value_decode_scale: what the pages are read with. Given, they must be those of the caches; codes
            made with another scale would mean other values.

    Returns:
        fp32 ``[1]`` decode scales of keys and of values, which the reader of the pages needs.

    Raises:
        As :func:`read_nvfp4` and :func:`write_per_token_head`. Nothing is written then.
    """
    what = "writing into NVFP4 pages"
    swizzled = _scale_order(value_scales)
    sides = _nvfp4_sides(pages, layout, None)
    caches = [check_handle(key, "nvfp4", what), check_handle(value, "nvfp4", what)]
    stores = [cache.planes() for cache in caches]
    chosen = check_tokens([side[0] for side in sides], [store[0] for store in stores], slots, 0, what)
    held = []
    for cache, store, side, asked in zip(
        caches, stores, ("key", "value"), (key_decode_scale, value_decode_scale), strict=True
    ):
        check_held(cache, slots, what)
        held.append(_decode_scale(store[2], side, store[2].device))
        if asked is not None and not torch.equal(_decode_scale(asked, side, store[2].device), held[-1]):
            raise FormatError(
                what,
                got=f"{side} codes made with decode scale {float(held[-1])}",
                allowed=f"{side}_decode_scale {float(asked)}, which the pages are read with",
                do="append_nvfp4 encodes dense tokens with the scale of the pages",
            )
    page, place = places(slots.reshape(-1)[chosen], sides[0][0].shape[1])
    count = slots.shape[1]
    for (codes, scales), store, swizzle in zip(sides, stores, (False, swizzled), strict=True):
        codes[page, place] = tokens_first(store[0], count)[chosen]
        _put_scales(scales, page, place, tokens_first(store[1], count)[chosen], swizzle)
    return held[0], held[1]


def append_nvfp4(
    pages: Tensor,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    *,
    key_decode_scale: float | Tensor,
    value_decode_scale: float | Tensor,
    value_scales: ScaleOrder,
    layout: Literal["NHD", "HND"] = "NHD",
) -> None:
    """Encode dense tokens into NVFP4 pages as FlashInfer's software path does.

    For each 16 channels ``sf = e4m3(amax / (6 g))``, saturating; ``q = e2m1(x * (1 / (sf g)))``, ties to even, and 0 where
    ``sf`` is 0 or ``x`` is NaN. All arithmetic is fp32.

    Args:
        pages, value_scales, layout: as for :func:`read_nvfp4`.
        key, value: dense, ``[B, H, T, D]`` of a floating dtype.
        slots: int32 or int64 ``[B, at most T]``; negative skips the token.
        key_decode_scale, value_decode_scale: ``g`` of each tensor.

    Raises:
        As :func:`read_nvfp4` and :func:`append_per_token_head`. Nothing is written then.
    """
    what = "appending to NVFP4 pages"
    swizzled = _scale_order(value_scales)
    sides = _nvfp4_sides(pages, layout, None)
    dense = [dense_tokens(key, what, "write_nvfp4"), dense_tokens(value, what, "write_nvfp4")]
    given = [
        _decode_scale(key_decode_scale, "key", pages.device),
        _decode_scale(value_decode_scale, "value", pages.device),
    ]
    encoded = [_nvfp4_planes(x, g) for x, g in zip(dense, given, strict=True)]
    chosen = check_tokens([side[0] for side in sides], [codes for codes, _ in encoded], slots, 0, what)
    page, place = places(slots.reshape(-1)[chosen], sides[0][0].shape[1])
    count = slots.shape[1]
    for (codes, scales), new, swizzle in zip(sides, encoded, (False, swizzled), strict=True):
        codes[page, place] = tokens_first(new[0], count)[chosen]
        _put_scales(scales, page, place, tokens_first(new[1], count)[chosen], swizzle)


def _nvfp4_planes(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape[-1] % _BLOCK:
        raise ShapeError("tokens for NVFP4 pages", got=f"head_dim {x.shape[-1]}", allowed="a multiple of 64")
    blocks = torch.where(x.isnan(), 0.0, x).unflatten(-1, (-1, _BLOCK))
    scale = (blocks.abs().amax(-1) / (6.0 * g)).clamp_max(448.0).to(torch.float8_e4m3fn)
    wide = scale.float() * g
    inverse = torch.where(wide != 0, 1.0 / torch.where(wide != 0, wide, 1.0), 0.0)
    # Where the scale is zero even an infinite value is coded as zero.
    values = torch.where(wide.unsqueeze(-1) != 0, blocks * inverse.unsqueeze(-1), 0.0)
    return pack(e2m1_codes(values).flatten(-2), 4), scale.view(torch.uint8)
