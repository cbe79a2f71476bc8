"""Blocks of llama.cpp (ggml): q8_0 and q4_0, 32 channels each.

* q8_0, 34 bytes: fp16 ``d``, 32 int8 codes; ``x' = q d``.
* q4_0, 18 bytes: fp16 ``d``, 16 bytes, byte ``j`` holding code ``j`` in its low and code ``j + 16`` in its high half;
  ``x' = (q - 8) d``. ``d`` takes the sign that makes the value of largest magnitude code 0, so it is often negative.

Both are read exactly into rows of the table that hold such codes: one fp16 scale for 32 channels, symmetric. A cache of
llama.cpp is ``[tokens, heads * D]`` for keys, and for values with flash attention, which quantized values need:
``axes="thd"``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..axes import check_axes, from_canonical, to_canonical
from ..codecs import decode
from ..codecs.packing import pack, unpack
from ..errors import CapacityError, DtypeError, FormatError, HeadDimError, ShapeError, UnknownFormatError
from ..formats import Format, get_format
from ..handle import QuantizedKV
from .pages import make_handle

__all__ = ["read_q4_0", "read_q8_0", "write_q4_0", "write_q8_0"]

BLOCK = 32
_SCALE_BYTES = 2
_KINDS = {8: "q8_0", 4: "q4_0"}


def read_q8_0(
    blocks: Tensor,
    format: str = "int8_group32_sym",
    *,
    axes: str = "bhtd",
    length: int | Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> QuantizedKV:
    """A cache of q8_0 blocks, codes and scales unchanged.

    Args:
        blocks: uint8, a vector being ``D / 32 * 34`` bytes along the last axis.
        format: a row with int8 codes and an fp16 scale for 32 channels.
        axes: of ``blocks``, as letters with ``d`` last, see ``kvq_ops.axes``; ``thd`` for one sequence of llama.cpp.
        length: tokens that are filled, for all rows or ``[B]``; all of them unless said otherwise.
        dtype: of the dense cache that the handle stands for.

    Returns:
        a handle in ``axes``.

    Raises:
        FormatError: there is no such row (``UnknownFormatError``), or it means other codes.
        ShapeError, DtypeError, CapacityError: ``blocks`` are none, or ``length`` is out of range.
    """
    return _read(blocks, 8, format, axes, length, dtype)


def read_q4_0(
    blocks: Tensor,
    format: str = "int4_group32_sym",
    *,
    axes: str = "bhtd",
    length: int | Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> QuantizedKV:
    """A cache of q4_0 blocks, codes and scales unchanged; the codes are packed anew, neighbours in a byte.

    Args:
        blocks: uint8, a vector being ``D / 32 * 18`` bytes along the last axis.
        format: a row with 4-bit codes from -8 to 7, offset by 8 or in two's complement, and an fp16 scale for 32 channels.
        axes, length, dtype: as for :func:`read_q8_0`.

    Raises:
        As :func:`read_q8_0`.
    """
    return _read(blocks, 4, format, axes, length, dtype)


def write_q8_0(cache: QuantizedKV) -> Tensor:
    """The q8_0 blocks of a cache that :func:`read_q8_0` could have made: uint8, in the axes of ``cache``."""
    return _write(cache, 8)


def write_q4_0(cache: QuantizedKV) -> Tensor:
    """The q4_0 blocks of a cache that :func:`read_q4_0` could have made: uint8, in the axes of ``cache``."""
    return _write(cache, 4)


def _row(name: str, bits: int) -> tuple[Format, int]:
    """The row called ``name`` and what turns the codes of blocks into its codes by exclusive or, 0 or 8.

    Raises ``FormatError`` unless it holds such codes.
    """
    what = f"a row for {_KINDS[bits]} blocks"
    try:
        row = get_format(name)
    except UnknownFormatError as error:
        raise UnknownFormatError(
            what,
            got=repr(name),
            allowed=f"a row with {bits}-bit symmetric codes and an fp16 scale for {BLOCK} channels",
            do=f"register one with kvq_ops.register_format; {error.allowed}",
        ) from None
    planes = {plane.name: plane for plane in row.planes}
    scale = planes.get("scale")
    fits = (
        set(planes) == {"codes", "scale", "length"}
        and row.bits == bits
        and not row.rotation
        and planes["codes"].per * bits == 8
        and planes["codes"].dtype is (torch.int8 if bits == 8 else torch.uint8)
        and scale is not None
        and (scale.axes, scale.per, scale.tokens, scale.dtype) == ("BHTD", BLOCK, 1, torch.float16)
    )
    flip = _flip(row, bits) if fits else None
    if flip is None:
        raise FormatError(
            what,
            got=f"{name!r}: {row.summary}",
            allowed=f"{bits}-bit symmetric codes and an fp16 scale for {BLOCK} channels",
            do="other rows take the decoded values: QuantizedKV.from_dense(cache.dequantize(), format)",
        )
    return row, flip


def _flip(row: Format, bits: int) -> int | None:
    """How the row writes the codes: as blocks do (0), or 4-bit codes in two's complement (8); ``None`` for neither.

    Planes alone do not tell what a code means, so every code is decoded, with scales of both signs.
    """
    if bits == 8:
        c = torch.arange(-128, 128).to(torch.int8).view(1, 1, 1, -1)
        q = c.float()
    else:
        c = torch.arange(BLOCK).to(torch.uint8).view(1, 1, 1, -1) % 16
        q = c.float() - 8
    for flip in (0, 8) if bits == 4 else (0,):
        codes = c if bits == 8 else pack(c ^ flip, 4)
        right = True
        for d in (0.5, -0.25):
            scale = torch.full((1, 1, 1, q.shape[-1] // BLOCK), d, dtype=torch.float16)
            store = {"codes": codes, "scale": scale, "length": torch.ones(1, dtype=torch.int64)}
            decoded = decode([store[plane.name] for plane in row.planes], row)
            right = right and torch.equal(decoded, q * d)
        if right:
            return flip
    return None


def _read(
    blocks: Tensor,
    bits: int,
    name: str,
    axes: str,
    length: int | Tensor | None,
    dtype: torch.dtype,
) -> QuantizedKV:
    kind, size = _KINDS[bits], _SCALE_BYTES + BLOCK * bits // 8
    row, flip = _row(name, bits)
    check_axes(axes, blocks.dim())
    if not axes.endswith("d"):
        raise FormatError(f"axes of {kind} blocks", got=repr(axes), allowed="letters with d last")
    if blocks.dtype is not torch.uint8:
        raise DtypeError(
            f"{kind} blocks",
            got=str(blocks.dtype),
            allowed="uint8",
            do="blocks.view(torch.uint8) gives bytes",
        )
    if blocks.shape[-1] == 0 or blocks.shape[-1] % size:
        raise ShapeError(
            f"the last axis of {kind} blocks",
            got=f"{blocks.shape[-1]} bytes, in {tuple(blocks.shape)}",
            allowed=f"a multiple of {size}: {size} bytes for {BLOCK} channels",
        )
    parts = to_canonical(blocks, axes).unflatten(-1, (-1, size))
    scale = parts[..., :_SCALE_BYTES].contiguous().view(torch.float16).squeeze(-1)
    body = parts[..., _SCALE_BYTES:]
    if bits == 8:
        codes = body.contiguous().view(torch.int8).flatten(-2)
    else:
        codes = pack(torch.cat([body & 15, body >> 4], -1).flatten(-2) ^ flip, 4)
    rows, heads, tokens, count = scale.shape
    lengths = torch.as_tensor(tokens if length is None else length, device=blocks.device)
    if tuple(lengths.shape) not in ((), (rows,)) or bool(((lengths < 0) | (lengths > tokens)).any()):
        raise CapacityError(
            f"length of {kind} blocks", got=str(lengths.tolist()), allowed=f"0..{tokens}, one or {rows}"
        )
    planes = {"codes": codes, "scale": scale}
    if length is not None:
        gone = torch.arange(tokens, device=blocks.device) >= lengths.reshape(-1, 1)
        planes = {key: plane.masked_fill(gone[:, None, :, None], 0) for key, plane in planes.items()}
    shape = (rows, heads, tokens, count * BLOCK)
    return make_handle(row, planes, lengths.long().expand(rows), shape, dtype, axes)


def _write(cache: QuantizedKV, bits: int) -> Tensor:
    kind = _KINDS[bits]
    what = f"writing {kind} blocks"
    if not isinstance(cache, QuantizedKV) or cache.is_stack:
        raise DtypeError(what, got=type(cache).__name__, allowed="a QuantizedKV handle")
    row, flip = _row(cache.format.name, bits)
    codes, scale = cache.planes()[0], cache.planes()[row.index("scale")]
    channels = row.logical_shape(cache.planes())[3]
    if channels % BLOCK:
        raise HeadDimError(what, got=f"head_dim {channels}", allowed=f"a multiple of {BLOCK}")
    if not cache.axes.endswith("d"):
        raise FormatError(what, got=f"a cache in axes {cache.axes!r}", allowed="axes with d last")
    if bits == 8:
        body = codes.view(torch.uint8).unflatten(-1, (-1, BLOCK))
    else:
        c = unpack(codes, 4).unflatten(-1, (-1, BLOCK)) ^ flip
        body = c[..., : BLOCK // 2] | (c[..., BLOCK // 2 :] << 4)
    head = scale.contiguous().unsqueeze(-1).view(torch.uint8)
    return from_canonical(torch.cat([head, body], -1).flatten(-2), cache.axes)
