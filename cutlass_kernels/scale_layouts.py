"""The orders in which FlashInfer and TensorRT-LLM keep the scales of NVFP4 blocks, and our pages in them and back.

Scales are a matrix: a row for each token (or row of a GEMM operand), a column for each 16 channels. Where the scale at ``(row,
column)`` lies, a CuTe layout says; the orders are, with ``C`` columns rounded up to a multiple of 4 where tiles are 4 wide:

    linear    row-major: what our pages hold, and what both projects expect for keys
    tokens4   (4, rows/4), C : (1, 4C), 4: four tokens interleaved. Values of pages for the trtllm-gen kernels of SM100
    128x4     (32, 4, rows/128), (4, C/4) : (16, 4, 128C), (1, 512): tiles of 512 bytes, of which the tensor cores of
              Blackwell take one at a time; TensorRT-LLM's ``SWIZZLED_128x4``, cuBLAS's and CUTLASS's block-scaled layout
    8x4       (8, rows/8), (4, C/4) : (4, 8C), (1, 32): TensorRT-LLM's ``SWIZZLED_8x4``, for few rows

Tiles are filled up with zeros. Everything here is bytes moved by torch: it runs on any device.

Pools of pages are the planes of ``kvq_ops.paged``: codes ``[P, H, S, D / 2]``, ``block_scale [P, H, S, D / 16]``,
``decode_scale [1]``, ``length [P]``. ``decode_scale`` is what a reader multiplies by; neither project keeps it in its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvq_ops.errors import FormatError, ShapeError
from kvq_ops.formats import get_format

__all__ = [
    "ORDERS",
    "SeparateTensors",
    "from_packed_pages",
    "offsets",
    "restore",
    "separate_tensors",
    "size",
    "swizzle",
    "to_packed_pages",
    "layout",
]

Order = Literal["linear", "tokens4", "128x4", "8x4"]
ORDERS: tuple[str, ...] = ("linear", "tokens4", "128x4", "8x4")
Mode = tuple[tuple[int, int], ...]
"""Sizes and strides of a nested mode, the fastest first."""

_TILE_ROWS = {"linear": 1, "tokens4": 4, "128x4": 128, "8x4": 8}
_BLOCK = 16


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _padded(order: str, rows: int, columns: int) -> tuple[int, int]:
    if order not in ORDERS:
        raise FormatError("an order of block scales", got=repr(order), allowed=", ".join(map(repr, ORDERS)))
    return _up(rows, _TILE_ROWS[order]), _up(columns, 4) if "x" in order else columns


def layout(order: str, rows: int, columns: int) -> tuple[Mode, Mode]:
    """The CuTe layout of an order: the mode of rows and the mode of columns, each with its sizes and strides.

    Args:
        rows, columns: of the matrix; rounded up to whole tiles.

    Raises:
        FormatError: for another order.
    """
    rows, columns = _padded(order, rows, columns)
    tile = _TILE_ROWS[order]
    if order == "linear":
        return ((rows, columns),), ((columns, 1),)
    if order == "tokens4":
        return ((4, 1), (rows // 4, 4 * columns)), ((columns, 4),)
    inner = ((32, 16), (4, 4)) if order == "128x4" else ((8, 4),)
    return (*inner, (rows // tile, tile * columns)), ((4, 1), (columns // 4, 4 * tile))


def size(order: str, rows: int, columns: int) -> int:
    """Bytes of a matrix of scales, filled up to whole tiles."""
    rows, columns = _padded(order, rows, columns)
    return rows * columns


def _along(mode: Mode, count: int, device: torch.device | str | None) -> Tensor:
    index = torch.arange(count, device=device)
    offset = torch.zeros_like(index)
    for number, stride in mode:
        offset += index % number * stride
        index = index // number
    return offset


def offsets(order: str, rows: int, columns: int, device: torch.device | str | None = None) -> Tensor:
    """Where each scale lies: int64 ``[rows, columns]``."""
    down, across = layout(order, rows, columns)
    return _along(down, rows, device).unsqueeze(1) + _along(across, columns, device)


def swizzle(scales: Tensor, order: str) -> Tensor:
    """Scales ``[..., rows, columns]`` of one byte in an order: ``[..., size]``, whole tiles, filled up with zeros."""
    *outer, rows, columns = scales.shape
    out = scales.new_zeros(*outer, size(order, rows, columns))
    out[..., offsets(order, rows, columns, scales.device).reshape(-1)] = scales.flatten(-2)
    return out


def restore(held: Tensor, rows: int, columns: int, order: str) -> Tensor:
    """The inverse of :func:`swizzle`: ``[..., rows, columns]`` from ``[..., size]``.

    Raises:
        ShapeError: when ``held`` has another size.
    """
    wanted = size(order, rows, columns)
    if held.shape[-1] != wanted:
        raise ShapeError(
            f"scales of {rows} rows and {columns} columns in order {order!r}",
            got=f"{held.shape[-1]} bytes",
            allowed=f"{wanted}: whole tiles",
            do="check rows and columns against how the scales were made",
        )
    return held[..., offsets(order, rows, columns, held.device)]


# --------------------------------------------------------------------------------------------------------------- pages


class SeparateTensors(NamedTuple):
    """Pages as FlashInfer's decode takes them, codes and scales apart, in the order ``HND``.

    Attributes:
        codes: uint8 ``[P, H, S, D / 2]`` of keys and of values: ``kv_cache``.
        scales: float8_e4m3fn ``[P, H, S, D / 16]`` of keys and of values: ``kv_block_scales``.
        decode_scales: fp32 ``[1]`` of keys and of values; a factor of ``bmm1_scale`` and of ``bmm2_scale``.
    """

    codes: tuple[Tensor, Tensor]
    scales: tuple[Tensor, Tensor]
    decode_scales: tuple[Tensor, Tensor]


def _checked(pages: Sequence[Tensor], order: str, what: str) -> tuple[int, int, int, int]:
    shape = get_format("nvfp4").check_store(pages)
    if order not in ("linear", "tokens4"):
        raise FormatError(
            f"the order of the value scales of {what}", got=repr(order), allowed="'linear' or 'tokens4'"
        )
    if shape[3] % 64 or shape[2] % 4:
        raise ShapeError(
            what,
            got=f"pages of {shape[2]} tokens, head_dim {shape[3]}",
            allowed="pages of a multiple of 4 tokens, head_dim a multiple of 64",
        )
    return shape


def _in_order(scales: Tensor, order: str) -> Tensor:
    """Scales ``[..., S, D / 16]`` in an order that fills the same bytes."""
    return scales if order == "linear" else swizzle(scales, order).view(scales.shape)


def _from_order(scales: Tensor, order: str) -> Tensor:
    if order == "linear":
        return scales
    return restore(scales.flatten(-2), scales.shape[-2], scales.shape[-1], order)


def separate_tensors(
    key_pages: Sequence[Tensor], value_pages: Sequence[Tensor], *, value_scales: Literal["linear", "tokens4"]
) -> SeparateTensors:
    """Our pools for a reader that takes codes and scales apart.

    Codes and linear scales are the same memory; scales of values in ``tokens4`` are a copy, to be made anew after a write.

    Args:
        key_pages, value_pages: pools in ``nvfp4``.
        value_scales: ``"tokens4"`` for the trtllm-gen kernels of SM100, ``"linear"`` for readers of SM120.

    Raises:
        CorruptStoreError: planes of another format.
        ShapeError, FormatError: what those kernels do not take.
    """
    for pages in (key_pages, value_pages):
        _checked(pages, value_scales, "pages for FlashInfer")
    scales = (key_pages[1], _in_order(value_pages[1], value_scales))
    return SeparateTensors(
        (key_pages[0], value_pages[0]),
        (scales[0].view(torch.float8_e4m3fn), scales[1].view(torch.float8_e4m3fn)),
        (key_pages[2], value_pages[2]),
    )


def to_packed_pages(
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    *,
    value_scales: Literal["linear", "tokens4"],
    layout: Literal["NHD", "HND"] = "HND",
) -> Tensor:
    """A copy of our pools as pages of vLLM and FlashInfer that hold both: uint8 ``[P, 2, H, S, 9 D / 16]``.

    The last axis is a count, not an order: of each side of a page first come the codes of all tokens and heads, then all scales.

    Args:
        layout: ``"HND"`` as above, ``"NHD"`` for ``[P, 2, S, H, 9 D / 16]`` with tokens before heads in memory too.

    Raises:
        As :func:`separate_tensors`; ShapeError when keys and values differ in shape.
    """
    what = "pages for vLLM or FlashInfer"
    shape, other = (_checked(pages, value_scales, what) for pages in (key_pages, value_pages))
    if shape != other:
        raise ShapeError(what, got=f"keys {shape} and values {other}", allowed="equal shapes")
    _check_axes(layout, what)
    count, heads, tokens, channels = shape
    sides = []
    for pages, order in ((key_pages, "linear"), (value_pages, value_scales)):
        codes, scales = pages[0], pages[1]
        if layout == "NHD":
            # Tokens are interleaved within a head: the bytes of a head stay in its own columns.
            scales = _in_order(scales, order).transpose(1, 2)
            codes = codes.transpose(1, 2)
        else:
            scales = _in_order(scales, order)
        sides.append(torch.cat([codes.reshape(count, -1), scales.reshape(count, -1)], 1))
    axes = (heads, tokens) if layout == "HND" else (tokens, heads)
    return torch.stack(sides, 1).view(count, 2, *axes, channels // 2 + channels // _BLOCK)


def from_packed_pages(
    pages: Tensor,
    *,
    key_decode_scale: Tensor,
    value_decode_scale: Tensor,
    value_scales: Literal["linear", "tokens4"],
    layout: Literal["NHD", "HND"] = "HND",
    length: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Pools of keys and of values from pages as :func:`to_packed_pages` makes them.

    Args:
        key_decode_scale, value_decode_scale: fp32 of one element, what a reader multiplies by.
        length: int64 ``[P]``, the tokens that each page holds; all of them unless given.

    Raises:
        ShapeError, FormatError: pages of another shape, or an unknown order.
    """
    what = "pages of vLLM or FlashInfer"
    _check_axes(layout, what)
    channels, left = divmod(pages.shape[-1] * _BLOCK, 9)
    if pages.dim() != 5 or pages.shape[1] != 2 or pages.dtype is not torch.uint8 or left:
        raise ShapeError(
            what, got=f"{pages.dtype} {tuple(pages.shape)}", allowed="uint8 [P, 2, H, S, 9 D / 16]"
        )
    count = pages.shape[0]
    axes = pages.shape[2:4]
    tokens = axes[1] if layout == "HND" else axes[0]
    held = torch.full((count,), tokens, device=pages.device) if length is None else length.long()
    made = []
    for side, scale, order in ((0, key_decode_scale, "linear"), (1, value_decode_scale, value_scales)):
        raw = pages[:, side].reshape(count, -1)
        border = axes[0] * axes[1] * channels // 2
        codes = raw[:, :border].view(count, *axes, channels // 2)
        scales = raw[:, border:].view(count, *axes, channels // _BLOCK)
        if layout == "NHD":
            codes, scales = codes.transpose(1, 2), scales.transpose(1, 2)
        store = [codes, _from_order(scales, order), scale.reshape(1).float(), held]
        store = [plane.clone(memory_format=torch.contiguous_format) for plane in store]
        _checked(store, order, what)
        made.append(store)
    return made[0], made[1]


def _check_axes(layout: str, what: str) -> None:
    if layout not in ("NHD", "HND"):
        raise FormatError(f"layout of {what}", got=repr(layout), allowed="'NHD', 'HND'")
