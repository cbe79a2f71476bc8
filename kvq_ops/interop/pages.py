"""Which slot of which page a token lies in, and handles made from planes that were copied from elsewhere.

A *slot* is ``page * page_size + place in the page``, as in vLLM's ``slot_mapping``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import CapacityError, DtypeError, FormatError, ShapeError
from ..formats import Format, get_format
from ..handle import QuantizedKV, check_cache_dtype

__all__ = ["slot_mapping"]

_WHOLE = (torch.int32, torch.int64)


def slot_mapping(
    block_table: Tensor, lengths: Tensor, page_size: int, *, tokens: int | None = None, start: int = 0
) -> Tensor:
    """Slots of the tokens ``start .. start + tokens`` of each sequence, and -1 from its end on.

    Args:
        block_table: int32 or int64 ``[B, N]``, the page that holds tokens ``n * page_size ..`` of a sequence. Entries
            behind the last page in use may hold anything.
        lengths: int32 or int64 ``[B]``, tokens of each sequence.
        page_size: tokens of one page.
        tokens: how many; up to the longest sequence unless said otherwise.
        start: the first token.

    Returns:
        int64 ``[B, tokens]``.

    Raises:
        ShapeError, DtypeError: the table and the lengths do not go together, or are no whole numbers.
        CapacityError: a sequence is longer than its pages.
    """
    for name, tensor, dims in (("block_table", block_table, 2), ("lengths", lengths, 1)):
        if tensor.dtype not in _WHOLE:
            raise DtypeError(f"{name} of a paged cache", got=str(tensor.dtype), allowed="int32, int64")
        if tensor.dim() != dims or tensor.shape[0] != block_table.shape[0]:
            raise ShapeError(
                f"{name} of a paged cache",
                got=f"{tuple(tensor.shape)} beside a block table {tuple(block_table.shape)}",
                allowed="block_table [sequences, pages], lengths [sequences]",
            )
    capacity = block_table.shape[1] * page_size
    lengths = lengths.long()
    if bool(((lengths < 0) | (lengths > capacity)).any()):
        raise CapacityError(
            "lengths of a paged cache",
            got=str(lengths.tolist()),
            allowed=f"0..{capacity}: {block_table.shape[1]} pages of {page_size} tokens for each sequence",
        )
    if tokens is None:
        tokens = max(int(lengths.max()) - start, 0) if len(lengths) else 0
    token = start + torch.arange(tokens, device=block_table.device)
    held = token < lengths.unsqueeze(1)
    page = torch.where(held, token // page_size, 0)
    if block_table.shape[1] == 0:
        return torch.full_like(page, -1)
    slots = block_table.long().gather(1, page) * page_size + token % page_size
    # A page that does not exist must not look like a token that is skipped.
    if bool((held & (slots < 0)).any()):
        raise CapacityError(
            "block_table of a paged cache",
            got=f"pages {block_table.tolist()}",
            allowed="0 or more for every page in use",
        )
    return torch.where(held, slots, -1)


def check_slots(slots: Tensor, pages: int, page_size: int, what: str) -> None:
    """Raise ``CapacityError`` for a slot beyond the last page. Negative ones are skipped tokens."""
    limit = pages * page_size
    if slots.numel() and int(slots.max()) >= limit:
        raise CapacityError(
            f"slots of {what}",
            got=f"slot {int(slots.max())}, page {int(slots.max()) // page_size}",
            allowed=f"0..{limit - 1}: {pages} pages of {page_size} tokens",
            do="check the block table; it may belong to another cache",
        )


def writable(slots: Tensor, shape: tuple[int, ...], pages: int, page_size: int, what: str) -> Tensor:
    """The tokens of ``slots [B, T]`` that are written, as flat indices, after all checks."""
    if slots.dtype not in _WHOLE:
        raise DtypeError(f"slots of {what}", got=str(slots.dtype), allowed="int32, int64")
    if slots.dim() != 2 or slots.shape[0] != shape[0] or slots.shape[1] > shape[2]:
        raise ShapeError(
            f"slots of {what}",
            got=f"{tuple(slots.shape)} for keys {tuple(shape)}",
            allowed=f"[{shape[0]}, at most {shape[2]}]: a slot for each token, negative to skip it",
        )
    check_slots(slots, pages, page_size, what)
    flat = slots.reshape(-1)
    chosen = (flat >= 0).nonzero().flatten()
    if len(flat[chosen].unique()) != len(chosen):
        raise ShapeError(f"slots of {what}", got="two tokens for one slot", allowed="each slot at most once")
    return chosen


def check_held(handle: QuantizedKV, slots: Tensor, what: str) -> None:
    """Raise ``CapacityError`` where a slot is given to a token that the cache does not hold."""
    token = torch.arange(slots.shape[1], device=slots.device)
    if bool(((slots >= 0) & (token >= handle.length.to(slots.device).unsqueeze(1))).any()):
        raise CapacityError(
            f"slots of {what}",
            got="a slot for a token beyond the length of its row",
            allowed=f"negative slots from the lengths {handle.length.tolist()} on",
            do="make them with slot_mapping(..., lengths=...)",
        )


def check_handle(handle: Tensor, name: str, what: str) -> QuantizedKV:
    """``handle``, or an error unless it is a single cache in format ``name``."""
    if not isinstance(handle, QuantizedKV) or handle.is_stack:
        raise DtypeError(
            f"{what} of a quantized cache",
            got=type(handle).__name__,
            allowed="a QuantizedKV handle",
            do="encode dense tokens by the rules of the pages with the append_ function",
        )
    if handle.format != get_format(name):
        raise FormatError(
            what,
            got=f"a cache in format {handle.format.name!r}",
            allowed=repr(name),
            do="codes are copied as they are; QuantizedKV.from_dense codes another cache anew",
        )
    return handle


def tokens_first(plane: Tensor, count: int) -> Tensor:
    """``[B, H, T, ...]`` as ``[B * count, H, ...]``, the tokens of a row one after another."""
    return plane[:, :, :count].transpose(1, 2).flatten(0, 1)


def places(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and place in it; of a skipped token, of the first slot."""
    slots = slots.clamp_min(0).long()
    return slots // page_size, slots % page_size


def only_held(gathered: Tensor, slots: Tensor) -> Tensor:
    """``[B, T, H, bytes]`` as ``[B, H, T, bytes]``, zero for skipped tokens."""
    return gathered.masked_fill((slots < 0)[:, :, None, None], 0).transpose(1, 2).contiguous()


def check_tokens(
    sides: list[Tensor], codes: list[Tensor], slots: Tensor, scale_bytes: int, what: str
) -> Tensor:
    """Flat indices of the tokens to write; raises unless ``codes [B, H, T, bytes]`` fit the byte rows of ``sides``."""
    pages, page_size, heads, width = sides[0].shape
    shape = codes[0].shape
    for side in codes:
        if side.shape != shape or side.shape[1] != heads or side.shape[3] + scale_bytes != width:
            raise ShapeError(
                what,
                got=f"codes {tuple(codes[0].shape)} and {tuple(codes[1].shape)} for keys and values",
                allowed=f"[B, {heads}, T, {width - scale_bytes}] for both",
            )
        if side.device != sides[0].device or slots.device != side.device:
            raise ShapeError(what, got="tensors on several devices", allowed="one device for all")
    return writable(slots, tuple(shape), pages, page_size, what)


def dense_tokens(x: Tensor, what: str, copies: str) -> Tensor:
    if isinstance(x, QuantizedKV) or not x.dtype.is_floating_point or x.dim() != 4:
        raise DtypeError(
            f"dense tokens for {what}",
            got=repr(x) if isinstance(x, QuantizedKV) else f"{x.dtype} {tuple(x.shape)}",
            allowed="a dense tensor [B, H, T, D] of a floating dtype",
            do=f"{copies} copies the codes of a quantized cache",
        )
    return x.detach().float()


def make_handle(
    fmt: Format,
    planes: Mapping[str, Tensor],
    lengths: Tensor,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    axes: str = "bhtd",
) -> QuantizedKV:
    """A handle of ``shape [B, H, T, D]`` that holds copies of ``planes``; tokens beyond those stay empty."""
    check_cache_dtype(dtype)
    fmt.check_head_dim(shape[3])
    device = next(iter(planes.values())).device
    store = fmt.empty_store(*shape, dtype=dtype, device=device)
    for plane, tensor in zip(fmt.planes, store, strict=True):
        if plane.name == "length":
            tensor.copy_(lengths)
        elif plane.name in planes:
            given = planes[plane.name]
            (tensor[:, :, : given.shape[2]] if plane.per_token else tensor).copy_(given)
    return QuantizedKV(store, fmt.name, axes, dtype)


def capacity_for(capacity: int | None, tokens: int, what: str) -> int:
    if capacity is not None and capacity < tokens:
        raise CapacityError(
            f"capacity of {what}", got=str(capacity), allowed=f"{tokens} or more: the longest sequence"
        )
    return tokens if capacity is None else capacity
