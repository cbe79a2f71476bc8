"""Views of a ``QuantizedKV``: slices, selections and permutations of its axes, over the same planes.

Each function has the arguments of the ATen operation it stands for and returns a handle whose writes reach the cache it was cut
from, or ``NotImplemented`` where codes have no such view; the dispatcher then reads decoded values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .handle import QuantizedKV

__all__ = ["VIEWS", "map_axis", "moves_along", "slice_bounds"]

aten = torch.ops.aten


def map_axis(
    handle: QuantizedKV, letter: str, move: Callable[[Tensor, int], Tensor], copy: bool
) -> list[Tensor]:
    """Apply ``move(plane, axis)`` to every plane that has the axis; others are shared, or cloned with ``copy``."""
    moved = []
    for plane, tensor in zip(handle.format.planes, handle.store, strict=True):
        axis = plane.axes.find(letter.upper())
        if axis >= 0:
            moved.append(move(tensor, axis))
        else:
            moved.append(tensor.clone() if copy else tensor)
    return moved


def moves_along(handle: QuantizedKV, dim: int) -> bool:
    """Whether the planes can be cut and reordered along this axis of the cache."""
    letter = handle.axes[dim]
    return letter in "bh" or (letter == "t" and not handle.format.windowed)


def slice_bounds(start: Any, end: Any, size: Any) -> tuple[Any, Any]:
    """``start`` and ``end`` of a slice, counted from the front and not beyond ``size``; sizes may be symbolic."""
    if type(size) is int and all(n is None or type(n) is int for n in (start, end)):
        start, end, _ = slice(start, end).indices(size)
        return start, max(start, end)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    def place(at: Any) -> Any:
        if guard_or_false(at < 0):
            return torch.sym_max(at + size, 0)
        if guard_or_false(at <= size):
            return at
        return size if guard_or_false(at >= size) else torch.sym_min(at, size)

    start = place(0 if start is None else start)
    end = size if end is None else place(end)
    return start, end if guard_or_false(end >= start) else torch.sym_max(end, start)


def _is_all(start: Any, end: Any, size: Any) -> bool:
    """Whether a slice is known to leave nothing out."""
    if all(type(n) is int for n in (start, end, size)):
        return bool(start == 0 and end == size)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return type(start) is int and start == 0 and statically_known_true(end == size)


def _slice(handle: QuantizedKV, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim = dim % handle.dim()
    letter = handle.axes[dim]
    first, stop = slice_bounds(start, end, handle.shape[dim])
    if type(step) is int and step == 1 and _is_all(first, stop, handle.shape[dim]):
        return _same(handle)
    if not moves_along(handle, dim):
        return NotImplemented

    def cut(t: Tensor, axis: int) -> Tensor:
        part: Tensor = aten.slice.Tensor(t, axis, first, stop, step)
        return part

    store = map_axis(handle, letter, cut, copy=False)
    strides = list(handle.stride())
    strides[dim] = strides[dim] * step
    owner = handle._owner
    if letter == "t":
        owner = (handle, first, step)
    elif owner is not None:
        # Same rows and heads of what the tokens were cut from.
        base = owner[0]
        base = base.view_over(base.planes(), handle.axes, handle.stride(), base._owner, base._cut)
        owner = (_slice(base, dim, first, stop, step), *owner[1:])
    cuts = handle._cut if letter in handle._cut else handle._cut + letter
    return handle.view_over(store, handle.axes, strides, owner, cuts)


def _select(handle: QuantizedKV, dim: int, index: Any) -> Any:
    dim = dim % handle.dim()
    if handle.axes[dim] == "d":
        return NotImplemented
    size = handle.shape[dim]
    if type(index) is int and type(size) is int and not -size <= index < size:
        raise IndexError(
            f"select(): index {index} out of range for tensor of size {tuple(handle.shape)} at dimension {dim}"
        )
    if type(index) is int and index < 0:
        index = index + size
    if not (handle.axes[dim] == "1" or moves_along(handle, dim)):
        return NotImplemented
    part = handle if handle.axes[dim] == "1" else _slice(handle, dim, index, index + 1)
    return _without(part, {dim})


def _without(handle: QuantizedKV, dims: set[int]) -> QuantizedKV:
    """``handle`` without axes of one element."""
    axes = "".join(letter for d, letter in enumerate(handle.axes) if d not in dims)
    strides = [s for d, s in enumerate(handle.stride()) if d not in dims]
    return handle.view_over(handle.planes(), axes, strides, handle._owner, handle._cut)


def _permute(handle: QuantizedKV, dims: Sequence[int]) -> QuantizedKV:
    axes = "".join(handle.axes[d] for d in dims)
    strides = [handle.stride()[d] for d in dims]
    return handle.view_over(handle.planes(), axes, strides, handle._owner, handle._cut)


def _transpose(handle: QuantizedKV, dim0: int, dim1: int) -> QuantizedKV:
    dims = list(range(handle.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(handle, dims)


def _unsqueeze(handle: QuantizedKV, dim: int) -> QuantizedKV:
    dim = dim % (handle.dim() + 1)
    axes = handle.axes[:dim] + "1" + handle.axes[dim:]
    strides = list(handle.stride())
    strides.insert(dim, handle.shape[dim] * strides[dim] if dim < handle.dim() else 1)
    return handle.view_over(handle.planes(), axes, strides, handle._owner, handle._cut)


def _squeeze(handle: QuantizedKV, dim: int | Sequence[int] | None = None) -> Any:
    dims = range(handle.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % handle.dim() for d in dims if handle.shape[d] == 1}
    if any(handle.axes[d] == "d" for d in gone):
        return NotImplemented
    return _without(handle, gone)


def _same(handle: QuantizedKV, *_: Any, **__: Any) -> QuantizedKV:
    return handle.view_over(handle.planes(), handle.axes, handle.stride(), handle._owner, handle._cut)


def _view(handle: QuantizedKV, size: Sequence[Any]) -> Any:
    same = len(size) == handle.dim() and all(
        (type(s) is int and s == -1) or s == n for s, n in zip(size, handle.shape, strict=True)
    )
    return _same(handle) if same else NotImplemented


def _expand(handle: QuantizedKV, size: Sequence[Any], *, implicit: bool = False) -> Any:
    return _view(handle, size)


def _contiguous(handle: QuantizedKV, *, memory_format: Any = torch.contiguous_format) -> Any:
    # Elsewhere it makes a copy, which is a read.
    return handle if handle.is_contiguous(memory_format=memory_format) else NotImplemented


def _narrow(handle: QuantizedKV, dim: int, start: Any, length: Any) -> Any:
    size = handle.shape[dim]
    if not moves_along(handle, dim) or isinstance(start, Tensor):
        return NotImplemented
    if type(start) is int and start < 0:
        start = start + size
    if all(type(n) is int for n in (start, length, size)) and not 0 <= start <= start + length <= size:
        raise IndexError(f"narrow(): start {start} and length {length} exceed dimension size {size}")
    return _slice(handle, dim, start, start + length)


def _split(handle: QuantizedKV, size: Any, dim: int = 0) -> Any:
    n = handle.shape[dim]
    if not moves_along(handle, dim) or type(n) is not int or type(size) is not int or size < 1:
        return NotImplemented
    return [_slice(handle, dim, at, at + size) for at in range(0, max(n, 1), size)]


def _chunk(handle: QuantizedKV, chunks: int, dim: int = 0) -> Any:
    n = handle.shape[dim]
    return _split(handle, max(-(-n // chunks), 1), dim) if type(n) is int and chunks > 0 else NotImplemented


def _split_with_sizes(handle: QuantizedKV, sizes: Sequence[Any], dim: int = 0) -> Any:
    n = handle.shape[dim]
    if (
        not moves_along(handle, dim)
        or type(n) is not int
        or not all(type(s) is int and s >= 0 for s in sizes)
    ):
        return NotImplemented
    if sum(sizes) != n:
        return NotImplemented
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(handle, dim, at, at + s) for at, s in zip(starts, sizes, strict=True)]


def _unbind(handle: QuantizedKV, dim: int = 0) -> Any:
    n = handle.shape[dim]
    if not (handle.axes[dim] == "1" or moves_along(handle, dim)) or type(n) is not int:
        return NotImplemented
    return [_select(handle, dim, i) for i in range(n)]


VIEWS: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.select.int: _select,
    aten.chunk.default: _chunk,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.view.default: _view,
    aten.reshape.default: _view,
    aten.expand.default: _expand,
    aten.contiguous.default: _contiguous,
}
