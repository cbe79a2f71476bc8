"""In-place writes into a ``QuantizedKV``.

Each function has the arguments of the ATen operation it stands for and returns the written handle, or ``NotImplemented`` where
codes cannot follow; the dispatcher then raises. Everything that can be wrong is looked at before the first plane changes.

What a write does to ``length``: tokens written raise it, whole rows that are replaced by another cache's take its length, and
zeroing a whole cache or whole rows empties them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .axes import CANONICAL, to_canonical
from .codecs import encode
from .config import is_checked
from .errors import (
    CapacityError,
    DtypeError,
    GradientError,
    NonFiniteError,
    ShapeError,
    UnsupportedWriteError,
)
from .handle import QuantizedKV
from .window import append_window_

__all__ = ["WRITES", "check_source", "same_static", "share_storage", "values_known", "write_tokens"]

aten = torch.ops.aten


def values_known(tensor: Tensor) -> bool:
    """Whether Python may look at the values: a plain tensor in host memory, and nothing being traced."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None
    )


def check_source(handle: QuantizedKV, source: Any) -> Tensor:
    """``source`` as a plain tensor, if it may be written into ``handle``."""
    if not isinstance(source, Tensor) or source.dtype != handle.dtype:
        raise DtypeError(
            f"writing into {handle!r}",
            got=str(source.dtype) if isinstance(source, Tensor) else type(source).__name__,
            allowed=str(handle.dtype),
            do="make the cache in the dtype of the model, or cast before writing",
        )
    if torch.is_grad_enabled() and source.requires_grad:
        raise GradientError(
            f"writing into {handle!r}",
            got="values that require a gradient",
            allowed="inference only: rounding has no useful derivative",
            do="run the model under torch.no_grad() or torch.inference_mode()",
        )
    dense: Tensor = source.dequantize() if isinstance(source, QuantizedKV) else source
    if is_checked() and values_known(dense) and not bool(dense.isfinite().all()):
        raise NonFiniteError(
            f"writing into {handle!r} in checked mode",
            got=f"{int(dense.isnan().sum())} NaN and {int(dense.isinf().sum())} infinite values in {tuple(dense.shape)}",
            allowed="finite values",
            do="find where the model produces them, or leave checked mode",
        )
    return dense


def _expand(handle: QuantizedKV, source: Tensor, shape: Sequence[Any]) -> Tensor:
    try:
        return source.expand(shape)
    except RuntimeError as error:
        raise ShapeError(
            f"writing into {handle!r}",
            got=f"values of shape {tuple(source.shape)}",
            allowed=f"what broadcasts to {tuple(shape)}",
            do="check batch size, kv heads and head_dim of the cache against the model",
        ) from error


def _check_range(handle: QuantizedKV, index: Tensor, size: Any, what: str = "positions") -> None:
    """Raise ``CapacityError`` when a position that Python may look at lies outside of ``0..size-1``."""
    if index.numel() and values_known(index):
        low, high = (int(v) for v in index.aminmax())
        if low < 0 or high >= size:
            raise CapacityError(
                f"writing into {handle!r}",
                got=f"{what} {low}..{high}",
                allowed=f"0..{size - 1}" if size else f"none: there are no {what}",
                do="make the cache larger, or stop generating; nothing was written",
            )


def _wrapped(index: Tensor, size: Any) -> Tensor:
    """Python's negative indices as positions from the start."""
    index = index.long()
    return torch.where(index < 0, index + size, index)


def _append(handle: QuantizedKV, position: Tensor, source: Tensor, *, inside: bool = False) -> None:
    """Write canonical ``source [B, H, N, D]`` at ``position``; a slice along tokens passes it on to what it was cut from.

    Args:
        inside: that positions lie inside the slice needs no proof.
    """
    while handle._owner is not None:
        base, start, step = handle._owner
        tokens = handle.planes()[0].shape[2]
        moved = position * step + start
        if not inside:
            _check_range(handle, position, tokens)
            # Where values cannot be looked at, what lies outside of the slice must not land elsewhere in the cache.
            if not values_known(position):
                nowhere = base.planes()[0].shape[2]
                moved = torch.where((position >= 0) & (position < tokens), moved, nowhere)
        handle, position = base, moved
    _check_heads(handle)
    if handle.format.windowed:
        _check_window(handle, position)
    torch.ops.kvq.append_(handle.store, position, source, handle.format.name)


def _check_window(handle: QuantizedKV, position: Tensor) -> None:
    """What a window of exact tokens cannot follow: tokens between others."""
    if position.shape[-1] == 0:
        return
    last = position[..., -1:]
    reached = (last >= (handle.length if position.dim() == 1 else handle.length.unsqueeze(1)) - 1).all()
    if not (values_known(position) and values_known(handle.length)):
        # In a graph, or on another device, where the failure itself cannot be caught.
        torch._assert_async(
            reached, f"writing between the tokens of a cache in format {handle.format.name!r}: crop_ it first"
        )
    elif not bool(reached):
        raise UnsupportedWriteError(
            f"writing into {handle!r}",
            got=f"tokens up to {last.tolist()}, counted from 0, of {handle.length.tolist()}",
            allowed=f"format {handle.format.name!r} codes tokens once they are old, and takes new ones at the end",
            do="crop_ the cache first to take tokens back, or use a format without a window",
        )


def _check_heads(handle: QuantizedKV) -> None:
    if "h" not in handle._cut:
        return
    kept = "which tokens are coded" if handle.format.windowed else "where each token was written"
    if handle.format.windowed or "position" in handle.format._index:
        raise UnsupportedWriteError(
            f"writing into {handle!r}",
            got="some heads of a cache",
            allowed=f"all heads at once: format {handle.format.name!r} keeps for all of them {kept}",
            do="write all heads, or use another format",
        )


def write_tokens(handle: QuantizedKV, dim: int, start: Any, stop: Any, source: Tensor) -> None:
    """``handle[..., start:stop, ...] = source`` along its token axis ``dim``, for a cache whose tokens have no view of their own.

    Args:
        source: broadcast to that shape; it may be in another dtype or on another device, as for ``copy_``.
    """
    shape = [*handle.shape]
    shape[dim] = stop - start
    dense = source.dequantize() if isinstance(source, QuantizedKV) else source
    dense = _expand(handle, check_source(handle, dense.to(handle.device, handle.dtype)), shape)
    position = torch.arange(start, stop, device=handle.device)
    _append(handle, position, to_canonical(dense, handle.axes))


def _reach(handle: QuantizedKV, reached: Tensor) -> None:
    """Rows hold at least ``reached`` tokens ``[B]``, counted in ``handle``."""
    while handle._owner is not None:
        base, start, step = handle._owner
        reached = torch.where(reached > 0, (reached - 1) * step + start + 1, 0)
        handle = base
    handle.length.copy_(torch.maximum(handle.length, reached))


def _set_length(handle: QuantizedKV, length: Tensor) -> None:
    """All that rows held is replaced by rows of ``length`` tokens; a part of heads or tokens can only add to them."""
    if handle._owner is None and "h" not in handle._cut:
        handle.length.copy_(length)
    else:
        _reach(handle, length)


# ----------------------------------------------------------------------------------------------------- tokens, rows


def _index_copy_(handle: QuantizedKV, dim: int, index: Tensor, source: Tensor) -> Any:
    letter = handle.axes[dim]
    if letter not in "bt":
        return NotImplemented
    index = index.reshape(-1) if index.dim() == 0 else index
    if letter == "b" and isinstance(source, QuantizedKV) and _same_kind(handle, source):
        _check_range(handle, index, handle.shape[dim], "rows")
        shape = [*handle.shape]
        shape[dim] = index.shape[0]
        if list(source.shape) == shape and same_static(handle, source):
            return _put_rows_of(handle, index, source)
    source = check_source(handle, source)
    if source.dim() == handle.dim() - 1 and index.shape[0] == 1:
        source = source.unsqueeze(dim)
    if letter == "b":
        return _put_whole_rows(handle, index, source)
    _append(handle, index, to_canonical(source, handle.axes))
    return handle


def _put_whole_rows(handle: QuantizedKV, rows: Tensor, source: Tensor) -> QuantizedKV:
    """Encode ``source``, in the axes of ``handle``, one row for each of ``rows``."""
    shape = [
        rows.shape[0] if letter == "b" else n for letter, n in zip(handle.axes, handle.shape, strict=True)
    ]
    if list(source.shape) != shape:
        raise ShapeError(
            f"writing rows of {handle!r}",
            got=f"values of shape {tuple(source.shape)}",
            allowed=str(tuple(shape)),
            do="write whole rows: every head and token of the cache",
        )
    _check_range(handle, rows, handle.planes()[0].shape[0], "rows")
    _check_heads(handle)
    canonical = to_canonical(source, handle.axes)
    if handle.format.windowed:
        _append_rows(handle, rows, torch.arange(canonical.shape[2], device=handle.device), canonical)
        return handle
    token, static = encode(canonical, handle.format, handle.store)
    _write_encoded(handle, token, static, lambda plane, new: plane.index_copy_(0, rows, new))
    tokens = handle.planes()[0].shape[2]
    _reach(handle, handle.length.index_fill(0, rows, tokens))
    return handle


def _append_rows(handle: QuantizedKV, rows: Tensor, position: Tensor, source: Tensor) -> None:
    """Append to some rows of a cache with a window, each at most once."""
    if values_known(rows) and rows.unique().shape != rows.shape:
        raise UnsupportedWriteError(
            f"writing into {handle!r}",
            got=f"rows {rows.tolist()}",
            allowed="each row once",
            do="write the tokens of a row together: x[row, :, start:stop] = k",
        )
    planes = [
        tensor if plane.static else tensor.index_select(0, rows)
        for plane, tensor in zip(handle.format.planes, handle.store, strict=True)
    ]
    part = handle.view_over(planes, CANONICAL, [0] * 4, None, handle._cut)
    _append(part, position, source)
    for plane, mine, new in zip(handle.format.planes, handle.store, planes, strict=True):
        if not plane.static:
            mine.index_copy_(0, rows, new)


def _put_rows_of(handle: QuantizedKV, rows: Tensor, source: QuantizedKV) -> QuantizedKV:
    theirs = [p.clone() for p in source.store] if share_storage(handle, source) else source.store
    _check_heads(handle)
    for plane, mine, new in zip(handle.format.planes[:-1], handle.planes(), theirs, strict=False):
        if not plane.static:
            mine.index_copy_(0, rows, new)
    _set_length(handle, handle.length.index_copy(0, rows, theirs[-1]))
    return handle


def _write_encoded(
    handle: QuantizedKV,
    token: Sequence[Tensor | None],
    static: Sequence[Tensor | None],
    write: Callable[[Tensor, Tensor], Any],
) -> None:
    for plane, new, kept in zip(handle.planes(), token, static, strict=True):
        if kept is not None:
            plane.copy_(kept)
        elif new is not None:
            write(plane, new.to(plane.dtype))


def _expand_masks(handle: QuantizedKV, indices: Sequence[Tensor | None]) -> Any:
    """Boolean masks as the indices where they are true."""
    expanded: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            expanded.append(index)
            continue
        at = len(expanded)
        if not values_known(index):
            return NotImplemented
        if tuple(index.shape) != tuple(handle.shape[at : at + index.dim()]):
            raise ShapeError(
                f"writing into {handle!r}",
                got=f"a mask of shape {tuple(index.shape)}",
                allowed=str(tuple(handle.shape[at : at + index.dim()])),
                do="make the mask as large as the axes that it stands for",
            )
        expanded += index.nonzero().unbind(1)
    return expanded


def _index_put_(
    handle: QuantizedKV,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Any:
    if accumulate:
        return NotImplemented
    indices = _expand_masks(handle, indices)
    if indices is NotImplemented:
        return NotImplemented
    given = {handle.axes[axis]: i for axis, i in enumerate(indices) if i is not None}
    if set(given) not in ({"t"}, {"b"}, {"b", "t"}):
        return NotImplemented
    values = check_source(handle, values)
    tokens = handle.planes()[0].shape[2]
    if set(given) == {"b", "t"}:
        return _put_rows(handle, given["b"], _wrapped(given["t"], tokens), values)
    ((letter, index),) = given.items()
    at = handle.axes.index(letter)
    shape = [*handle.shape[:at], *index.shape, *handle.shape[at + 1 :]]
    values = _expand(handle, values, shape)
    # Indices of any shape take the place of their axis; one axis is enough.
    values = values.flatten(at, at + index.dim() - 1) if index.dim() else values.unsqueeze(at)
    index = _wrapped(index.reshape(-1), handle.shape[at])
    if letter == "b":
        return _put_whole_rows(handle, index, values)
    _append(handle, index, to_canonical(values, handle.axes))
    return handle


def _put_rows(handle: QuantizedKV, rows: Tensor, position: Tensor, values: Tensor) -> QuantizedKV:
    """``x[rows, :, position] = values`` with rows and positions broadcast against each other."""
    batch, _, tokens = handle.planes()[0].shape[:3]
    # One row after the other, each with several tokens of its own: cache[rows[:, None], :, position].
    by_row = rows.dim() == 2 and rows.shape[1] == 1
    rows, position = torch.broadcast_tensors(_wrapped(rows, batch), position)
    grid = rows.shape
    # An index that spans non-adjacent axes comes first in the result; adjacent ones stay in place.
    b, t = handle.axes.index("b"), handle.axes.index("t")
    rest = [letter for letter in handle.axes if letter not in "bt"]
    lead = 0 if abs(b - t) > 1 else min(b, t)
    sizes = [n for letter, n in zip(handle.axes, handle.shape, strict=True) if letter not in "bt"]
    values = _expand(handle, values, [*sizes[:lead], *rows.shape, *sizes[lead:]])
    values = values.movedim(list(range(lead, lead + rows.dim())), list(range(rows.dim())))
    values = values.reshape(rows.numel(), *sizes)
    rows, position = rows.reshape(-1), position.reshape(-1)
    _check_range(handle, position, tokens)
    _check_range(handle, rows, batch, "rows")
    _check_heads(handle)
    if rows.shape[0] == 0:
        return handle
    canonical = to_canonical(values, "b" + "".join(rest))
    if handle.format.windowed:
        count = grid[1] if by_row else 1
        canonical = canonical.unflatten(0, (-1, count)).squeeze(3).transpose(1, 2)
        _append_rows(handle, rows[::count], position.view(-1, count), canonical)
        return handle
    token, static = encode(canonical, handle.format, handle.store, position.unsqueeze(1))

    def write(plane: Tensor, new: Tensor) -> None:
        plane.transpose(1, 2)[rows, position] = new.squeeze(2)

    _write_encoded(handle, token, static, write)
    _reach(handle, handle.length.scatter_reduce(0, rows, position + 1, "amax"))
    return handle


# ------------------------------------------------------------------------------------------------------------ copies


def _copy_(target: Any, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, QuantizedKV):
        return NotImplemented
    if (
        isinstance(source, QuantizedKV)
        and _same_kind(target, source)
        and _broadcasts(source, target)
        and (not target._cut or same_static(target, source))
        and (not target.format.windowed or source.planes()[0].shape[2] == target.planes()[0].shape[2])
    ):
        return _copy_planes(target, source, non_blocking)
    length = source.length if isinstance(source, QuantizedKV) and source.axes == target.axes else None
    # copy_ converts between dtypes and devices on dense tensors, and does here.
    dense = source.dequantize() if isinstance(source, QuantizedKV) else source
    if dense.dtype != target.dtype:
        dense = dense.to(target.dtype)
    dense = _expand(target, check_source(target, dense).to(target.device), target.shape)
    canonical = to_canonical(dense, target.axes)
    if target.format.windowed and length is not None and source.shape == target.shape:
        _check_heads(target)
        length = length.to(target.device)
        append_window_(target.store, torch.zeros_like(length), canonical, target.format, length)
        return target
    _append(target, torch.arange(canonical.shape[2], device=target.device), canonical, inside=True)
    if length is not None and source.shape == target.shape:
        _set_length(target, length)
    return target


def _same_kind(target: QuantizedKV, source: Any) -> bool:
    """Whether planes of ``source`` mean the same in ``target``."""
    return (
        isinstance(source, QuantizedKV)
        and source.format == target.format
        and source.axes == target.axes
        and (not target.format.lossless or source.dtype == target.dtype)
    )


def _broadcasts(source: QuantizedKV, target: QuantizedKV) -> bool:
    return all(
        theirs == mine or (theirs == 1 and letter != "d")
        for letter, theirs, mine in zip(source.axes, source.shape, target.shape, strict=True)
    )


def _copy_planes(target: QuantizedKV, source: QuantizedKV, non_blocking: bool) -> QuantizedKV:
    theirs = source.store
    if share_storage(target, source):
        theirs = [plane.clone() for plane in theirs]
    _check_heads(target)
    whole = not target._cut
    for plane, mine, new in zip(target.format.planes[:-1], target.planes(), theirs, strict=False):
        if not plane.static or whole:
            mine.copy_(new, non_blocking)
    tokens = target.planes()[0].shape[2]
    length = theirs[-1].to(target.device)
    if source.planes()[0].shape[2] != tokens:
        length = torch.where(length > 0, tokens, length)
    _set_length(target, length.expand(target.planes()[0].shape[0]))
    return target


def same_static(a: QuantizedKV, b: QuantizedKV) -> bool:
    """Whether two caches of one format have the same static scales, as far as Python may look."""
    pairs = [(a.planes()[i], b.planes()[i]) for i in a.format.static_planes]
    return all(x is y or (values_known(x) and values_known(y) and torch.equal(x, y)) for x, y in pairs)


def share_storage(a: QuantizedKV, b: QuantizedKV) -> bool:
    mine = {plane.untyped_storage()._cdata for plane in a.planes()}
    return any(plane.untyped_storage()._cdata in mine for plane in b.planes())


def _zero_(handle: QuantizedKV) -> QuantizedKV:
    whole_rows = handle._owner is None and "h" not in handle._cut
    for plane, tensor in zip(handle.format.planes, handle.planes(), strict=True):
        own = plane.per_token or {"B", "H"} <= set(plane.axes)
        fitted = plane.static and not handle._cut and not handle.format.calibrated
        if own or fitted or (whole_rows and not plane.static):
            tensor.zero_()
    return handle


def _fill_(handle: QuantizedKV, value: Any) -> Any:
    if not isinstance(value, Tensor):
        if value == 0:
            return _zero_(handle)
        value = torch.full((), value, dtype=handle.dtype, device=handle.device)
    elif values_known(value) and bool(value == 0):
        return _zero_(handle)
    return _copy_(handle, value)


WRITES: dict[Any, Callable[..., Any]] = {
    aten.index_copy_.default: _index_copy_,
    aten.index_put_.default: _index_put_,
    aten._index_put_impl_.default: _index_put_,
    aten.copy_.default: _copy_,
    aten.zero_.default: _zero_,
    aten.fill_.Scalar: _fill_,
    aten.fill_.Tensor: _fill_,
}
