"""What a cache needs beyond reading and writing: cut, reorder, grow, save and load.

All of these move codes; none decodes anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .axes import check_axes
from .errors import CapacityError, CorruptStoreError, KVQError, ShapeError, UnsupportedWriteError
from .files import read_file, unreadable, write_file
from .formats import get_format
from .handle import QuantizedKV, check_cache_dtype
from .window import roll_back_

__all__ = ["crop_", "grow", "load", "reorder", "save"]

_MAGIC, _VERSION = "kvq.cache", 1


def crop_(handle: QuantizedKV, length: int | Tensor) -> QuantizedKV:
    """Forget the tokens from ``length`` on, as if they had never been written. Static scales stay.

    With a window of exact tokens, those that were coded meanwhile stay coded; of a group of tokens that is cut through, the rest
    goes back to the window as decoded values.

    Args:
        handle: a whole cache, not a slice of tokens or heads.
        length: tokens to keep, for all rows or int ``[B]``. Rows that are shorter stay as they are.

    Raises:
        CapacityError: ``length`` below 0 or beyond the capacity.
        UnsupportedWriteError: ``handle`` is a slice.
    """
    if handle._owner is not None or "h" in handle._cut:
        raise UnsupportedWriteError(
            "crop_ of a cache",
            got=f"a slice: {handle!r}",
            allowed="a whole cache, or whole rows of one",
            do="crop the cache that it was cut from",
        )
    batch, _, tokens = handle.planes()[0].shape[:3]
    keep = torch.as_tensor(length, device=handle.device)
    if keep.dtype.is_floating_point or keep.dtype is torch.bool or tuple(keep.shape) not in ((), (batch,)):
        raise ShapeError(
            f"crop_ of {handle!r}",
            got=f"length {length!r}",
            allowed=f"a whole number, or one for each of {batch} rows",
            do="give the tokens to keep as int64, not as a mask or floats",
        )
    if keep.numel() and (int(keep.min()) < 0 or int(keep.max()) > tokens):
        raise CapacityError(
            f"crop_ of {handle!r}",
            got=f"length {keep.tolist()}",
            allowed=f"0..{tokens}",
            do="grow() makes a cache larger",
        )
    keep = keep.long().expand(batch)
    if handle.format.windowed:
        roll_back_(handle.store, torch.minimum(handle.length, keep), handle.format)
        return handle
    gone = torch.arange(tokens, device=handle.device) >= keep.unsqueeze(1)
    for plane, tensor in zip(handle.format.planes, handle.planes(), strict=True):
        if plane.per_token:
            # A plane is [B, H, T] or [B, H, T, channels].
            tensor.masked_fill_(gone.view(batch, 1, tokens, *[1] * (tensor.dim() - 3)), 0)
    handle.length.copy_(torch.minimum(handle.length, keep))
    return handle


def reorder(handle: QuantizedKV, index: Tensor | Sequence[int]) -> QuantizedKV:
    """A cache whose row ``i`` is row ``index[i]``, as beam search asks for; rows may repeat or be left out.

    Raises:
        CapacityError: an index outside of the rows.
    """
    rows = torch.as_tensor(index, device=handle.device, dtype=None if len(index) else torch.long)
    batch = handle.planes()[0].shape[0]
    if rows.dim() != 1 or rows.dtype.is_floating_point or rows.dtype is torch.bool:
        raise ShapeError(
            f"reorder of {handle!r}",
            got=f"index {tuple(rows.shape)} of {rows.dtype}",
            allowed="one axis of whole numbers",
            do="give one row of the cache for each row of the result; .nonzero() makes indices of a mask",
        )
    if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= batch):
        raise CapacityError(
            f"reorder of {handle!r}",
            got=f"rows {rows.tolist()}",
            allowed=f"0..{batch - 1}",
            do="count from 0; reorder a cache that holds as many rows as the beams come from",
        )
    store = [
        tensor.clone() if plane.static else tensor.index_select(0, rows)
        for plane, tensor in zip(handle.format.planes, handle.store, strict=True)
    ]
    return handle.like(store, order=handle.order)


def grow(handle: QuantizedKV, tokens: int) -> QuantizedKV:
    """A cache of capacity ``tokens`` with the codes, scales and lengths of ``handle``.

    Raises:
        CapacityError: ``tokens`` is below the present capacity; use :func:`crop_` and slices to shrink.
    """
    batch, heads, old, head_dim = handle.format.logical_shape(handle.planes())
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < old:
        raise CapacityError(
            f"grow of {handle!r}",
            got=f"{tokens!r} tokens",
            allowed=f"{old} or more",
            do="slice the cache to make it smaller",
        )
    grown = handle.format.empty_store(
        batch, heads, tokens, head_dim, dtype=handle.dtype, device=handle.device
    )
    for plane, new, tensor in zip(handle.format.planes, grown, handle.store, strict=True):
        (new[:, :, : tensor.shape[2]] if plane.per_token else new).copy_(tensor)
    return handle.like(grown, order=handle.order)


# ------------------------------------------------------------------------------------------------------------- files


def save(handles: Sequence[QuantizedKV], path: str | os.PathLike[str]) -> None:
    """Write caches to ``path``: header and planes, readable by ``torch.load`` with ``weights_only=True``.

    The file appears under its name only when it is complete; until then an older one stays.
    """
    entries = []
    for handle in handles:
        if not isinstance(handle, QuantizedKV):
            raise CorruptStoreError(
                "save of caches",
                got=type(handle).__name__,
                allowed="QuantizedKV handles",
                do="keep dense tensors with torch.save, or quantize them first: QuantizedKV.from_dense",
            )
        entries.append(
            {
                "format": handle.format.name,
                "planes": [plane.name for plane in handle.format.planes],
                "axes": handle.axes,
                "order": handle.order,
                "dtype": str(handle.dtype).removeprefix("torch."),
                # Copies, so that a slice is saved without what it was cut from.
                "store": [plane.detach().clone() for plane in handle.store],
            }
        )
    write_file(path, _MAGIC, _VERSION, {"caches": entries})


def load(path: str | os.PathLike[str], *, map_location: Any = None) -> list[QuantizedKV]:
    """Caches from a file that :func:`save` wrote.

    Raises:
        CorruptStoreError: the file is damaged, cut off, of another kind or version, or names an unknown format.
        FileNotFoundError: there is no such file.
    """
    content = read_file(path, _MAGIC, _VERSION, "caches", map_location=map_location)
    try:
        return [_restore(entry) for entry in content["caches"]]
    except (KVQError, KeyError, TypeError, AttributeError) as error:
        reason = error.got if isinstance(error, KVQError) and error.got else str(error)
        asked = error.asked if isinstance(error, KVQError) else type(error).__name__
        raise unreadable(path, "caches", f"{asked}: {reason}") from error


def _restore(entry: dict[str, Any]) -> QuantizedKV:
    row = get_format(entry["format"])
    if [plane.name for plane in row.planes] != entry["planes"]:
        raise CorruptStoreError(
            f"planes of format {row.name!r}",
            got=", ".join(entry["planes"]),
            allowed=", ".join(plane.name for plane in row.planes),
        )
    store = entry["store"]
    shape = row.check_store(store)
    dtype = getattr(torch, entry["dtype"])
    check_cache_dtype(dtype)
    axes = check_axes(entry["axes"], len(entry["axes"]))
    missing = [n for letter, n in zip("bhtd", shape, strict=True) if letter not in axes]
    length = store[-1]
    wrong_length = bool(((length < 0) | (length > shape[2])).any())
    if row.windowed:
        coded = store[row.index("coded")]
        waiting = length - coded
        wrong_length |= bool(((coded < 0) | (waiting < 0) | (waiting > row.window)).any())
        wrong_length |= bool((coded % row.token_group != 0).any())
    if any(n != 1 for n in missing) or sorted(entry["order"]) != sorted(set(entry["order"])) or wrong_length:
        raise CorruptStoreError(
            "the header of a stored cache",
            got=f"axes {axes!r}, order {entry['order']!r}, shape {shape}, lengths {length.tolist()}",
        )
    exact = {tensor.dtype for plane, tensor in zip(row.planes, store, strict=True) if plane.dtype is None}
    if exact - {dtype}:
        raise CorruptStoreError(
            "the dtype of a stored cache",
            got=f"{' and '.join(map(str, exact))} planes",
            allowed=str(dtype),
        )
    if not set(axes.replace("1", "")) <= set(entry["order"]) <= set("bhtd"):
        raise CorruptStoreError("the memory order of a stored cache", got=repr(entry["order"]))
    return QuantizedKV(store, row.name, axes, dtype, order=entry["order"])
