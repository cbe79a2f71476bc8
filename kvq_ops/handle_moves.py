"""What moves the contents of a ``QuantizedKV``: copies, reorderings and joins, which give a new cache and code nothing twice.

Each function has the arguments of the ATen operation it stands for, or returns ``NotImplemented`` where codes cannot follow; the
dispatcher then reads decoded values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .axes import to_canonical
from .codecs import encode
from .errors import DtypeError
from .handle import QuantizedKV, check_cache_dtype
from .handle_views import map_axis, moves_along
from .handle_write import check_source, same_static, values_known

__all__ = ["MOVES"]

aten = torch.ops.aten


def _clone(handle: QuantizedKV, *, memory_format: Any = None) -> Any:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    store = [plane.clone(memory_format=torch.contiguous_format) for plane in handle.store]
    return handle.like(store, order=None if memory_format is torch.contiguous_format else handle.order)


def _to_copy(
    handle: QuantizedKV,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **_: Any,
) -> Any:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    dtype = handle.dtype if dtype is None else dtype
    check_cache_dtype(dtype)
    store = []
    for plane, tensor in zip(handle.format.planes, handle.store, strict=True):
        kind = dtype if plane.dtype is None else plane.dtype
        store.append(tensor.to(device=device, dtype=kind, non_blocking=non_blocking, copy=True))
    return QuantizedKV(store, handle.format.name, handle.axes, dtype, order=handle.order)


def _moved(handle: QuantizedKV, dim: int, move: Callable[[Tensor, int], Tensor]) -> QuantizedKV:
    """A new cache whose planes are copies that ``move(plane, axis)`` makes along ``dim``."""
    letter = handle.axes[dim]
    store = map_axis(handle, letter, move, copy=True)
    if letter == "t":
        # Where tokens end up is no longer a prefix that a number could describe.
        store[-1] = torch.full_like(store[-1], store[0].shape[2])
    return handle.like(store)


def _index_select(handle: QuantizedKV, dim: int, index: Tensor) -> Any:
    if not moves_along(handle, dim):
        return NotImplemented
    index = index.reshape(-1) if index.dim() == 0 else index
    return _moved(handle, dim, lambda t, axis: t.index_select(axis, index))


def _index(handle: QuantizedKV, indices: Sequence[Tensor | None]) -> Any:
    given = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if len(given) != 1 or given[0][1].dim() != 1 or given[0][1].dtype not in (torch.int64, torch.int32):
        return NotImplemented
    axis, index = given[0]
    return _index_select(handle, axis, torch.where(index < 0, index + handle.shape[axis], index))


def _repeat_interleave(handle: QuantizedKV, repeats: Any, dim: int | None = None, **kwargs: Any) -> Any:
    # Rows are repeated for beams and stay codes; heads are repeated for attention, which reads them decoded.
    if dim is None or handle.axes[dim] != "b":
        return NotImplemented
    rows = torch.arange(handle.shape[dim], device=handle.device)
    return _index_select(handle, dim, rows.repeat_interleave(repeats, **kwargs))


def _roll(handle: QuantizedKV, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if len(dims) != 1 or not moves_along(handle, dims[0]):
        return NotImplemented
    return _moved(handle, dims[0], lambda t, axis: t.roll(shifts[0], axis))


def _flip(handle: QuantizedKV, dims: Sequence[int]) -> Any:
    if len(dims) != 1 or not moves_along(handle, dims[0]):
        return NotImplemented
    return _moved(handle, dims[0], lambda t, axis: t.flip(axis))


def _same_counts(a: QuantizedKV, b: QuantizedKV) -> bool:
    """Whether the rows of two caches with windows hold and have coded equally many tokens, as far as Python may look."""
    at = a.format.index("coded")
    pairs = ((a.length, b.length), (a.planes()[at], b.planes()[at]))
    return all(x is y or (values_known(x) and values_known(y) and torch.equal(x, y)) for x, y in pairs)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Caches joined along tokens, rows or heads stay quantized.

    Along tokens, where a cache grows, dense parts are encoded with the static scales of the first cache.
    """
    # torch.cat skips empty one-dimensional tensors, the usual start of a growing cache.
    parts = [t for t in tensors if not (t.dim() == 1 and t.shape[0] == 0)]
    first = next((t for t in parts if isinstance(t, QuantizedKV)), None)
    if first is None or not -first.dim() <= dim < first.dim():
        return NotImplemented
    letter = first.axes[dim]
    if not moves_along(first, dim):
        return NotImplemented
    dense = [t for t in parts if not isinstance(t, QuantizedKV)]
    if dense and letter != "t":
        return NotImplemented
    if any(t.dtype != first.dtype for t in parts):
        raise DtypeError(
            f"torch.cat with {first!r}",
            got=", ".join(str(t.dtype) for t in parts),
            allowed=f"all {first.dtype}",
            do="make the cache in the dtype of the model, or cast before joining",
        )
    handles = [t for t in parts if isinstance(t, QuantizedKV)]
    if any(t.format != first.format or t.axes != first.axes for t in handles):
        return NotImplemented
    if first.format.windowed and letter == "h" and not all(_same_counts(t, first) for t in handles):
        return NotImplemented
    if letter == "h" and "position" in first.format._index:
        return NotImplemented  # one for all heads of a token, which the parts need not agree on
    # Along heads, scales of heads are joined like everything else.
    if letter != "h" and not all(t is first or same_static(t, first) for t in handles):
        return NotImplemented
    static = first.planes()
    stores: list[list[Tensor]] = []
    for part in parts:
        if isinstance(part, QuantizedKV):
            stores.append(part.store)
            continue
        canonical = to_canonical(check_source(first, part), first.axes)
        slots = torch.arange(canonical.shape[2], device=first.device)
        if letter == "t":
            slots = slots + sum(store[0].shape[2] for store in stores)
        token, fitted = encode(canonical, first.format, static, slots)
        # A scale that is unset so far belongs to the first tokens that have one.
        static = [old if new is None else new for old, new in zip(static, fitted, strict=True)]
        stores.append([cast(Tensor, plane) for plane in token])
    joined = []
    for i, plane in enumerate(first.format.planes[:-1]):
        axis = plane.axes.find(letter.upper())
        if axis < 0:
            if letter == "h" and not all(t is first or same_static(t, first) for t in handles):
                return NotImplemented
            joined.append(static[i].clone())
        else:
            joined.append(torch.cat([store[i] for store in stores], axis).to(static[i].dtype))
    lengths = [store[-1] for store in stores if store[-1] is not None]
    if letter == "t":
        joined.append(torch.full_like(static[-1], joined[0].shape[2]))
    elif letter == "b":
        joined.append(torch.cat(lengths))
    else:
        joined.append(torch.stack(lengths).amax(0))
    return first.like(joined)


MOVES: dict[Any, Callable[..., Any]] = {
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.roll.default: _roll,
    aten.flip.default: _flip,
    aten.cat.default: _cat,
    aten.concat.default: _cat,
    aten.concatenate.default: _cat,
}
