"""What operations do to a ``QuantizedKV``: writes, movements of codes, decoded reads.

``dispatch`` is the one entry. Eager execution comes here from the handle's ``__torch_dispatch__``; the graph pass comes here
while it interprets a captured graph with handles in place of dense caches, so both have the same meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .axes import to_canonical
from .codecs import encode
from .decoded import DecodedView, is_view
from .errors import DtypeError, KVQError, UnsupportedWriteError
from .handle import QuantizedKV, check_cache_dtype
from .handle_write import WRITES, check_source, same_static, values_known, write_tokens

__all__ = ["dispatch", "token_write", "written_arguments"]

aten = torch.ops.aten


def written_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> list[Any]:
    """The arguments that ``func`` writes into, by its schema."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if i < len(args) and not argument.kwarg_only:
            written.append(args[i])
        elif kwargs and argument.name in kwargs:
            written.append(kwargs[argument.name])
    return written


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, guard_views: bool = True) -> Any:
    """Run ``func`` on arguments among which there are handles.

    Args:
        guard_views: wrap decoded views so that a write into one raises instead of being lost.
    """
    if func is operator.getitem:
        return args[0][args[1]]  # an output of an operation that has several
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, QuantizedKV) and leaf.is_stack:
            return leaf.dispatch(func, args, kwargs, guard_views=guard_views)
    handler = _HANDLERS.get(func)
    if handler is not None and (func in _ANY_ARGUMENT or isinstance(args[0], QuantizedKV)):
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    for given in written_arguments(func, args, kwargs):
        if any(isinstance(t, QuantizedKV) for t in pytree.tree_leaves(given)):
            raise _cannot_write(func, (args, kwargs))
    if guard_views and is_view(func) and func._can_decompose():
        # Under inference_mode, composite operations such as movedim arrive whole.
        return func.decompose(*args, **kwargs)
    if func is aten.as_strided.default and isinstance(args[0], QuantizedKV) and args[0]._cut:
        raise KVQError(
            f"{func} on {args[0]!r}",
            got="a part of a cache, whose decoded values have no place in the memory of the whole",
            allowed="as_strided on a whole cache",
            do="call dequantize() or use slices",
        )
    if guard_views and (append := token_write(func, args, kwargs)) is not None:
        decoded: Tensor = func(args[0].dequantize(), *args[1:], **kwargs)
        return DecodedView.wrap(decoded, append)
    decoded_args, decoded_kwargs = pytree.tree_map_only(QuantizedKV, QuantizedKV.dequantize, (args, kwargs))
    result = func(*decoded_args, **decoded_kwargs)
    return pytree.tree_map_only(Tensor, DecodedView.wrap, result) if guard_views and is_view(func) else result


def token_write(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor] | None:
    """For tokens of a cache that only grows at its end, as ``func`` picks them: what ``copy_`` into them does.

    It returns what is seen there afterwards. ``None`` where ``func`` picks no tokens, or the cache has views of them.
    """
    if func not in (aten.slice.Tensor, aten.select.int, aten.narrow.default):
        return None
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    handle = given["self"]
    if not isinstance(handle, QuantizedKV) or handle.is_stack:
        return None
    dim = given.get("dim", 0) % handle.dim()
    if not handle.format.windowed or handle.axes[dim] != "t" or given.get("step", 1) != 1:
        return None
    start, stop = _token_span(func, given, handle.shape[dim])

    def write(source: Tensor) -> Tensor:
        write_tokens(
            handle, dim, start, stop, source.unsqueeze(dim) if _is_select(func, source, handle) else source
        )
        written: Tensor = func(handle.dequantize(), *args[1:], **kwargs)
        return written

    return write


def _is_select(func: Any, source: Tensor, handle: QuantizedKV) -> bool:
    """Whether ``source`` lacks the axis that ``func`` took away; one of fewer axes is broadcast by what it has."""
    return func is aten.select.int and source.dim() == handle.dim() - 1


def _token_span(func: Any, given: dict[str, Any], size: Any) -> tuple[Any, Any]:
    """First token and the one after the last, of a slice, narrow or select."""
    if func is aten.slice.Tensor:
        return _bounds(given.get("start"), given.get("end"), size)
    start = given["index"] if func is aten.select.int else given["start"]
    start = start + size if type(start) is int and start < 0 else start
    return start, start + (1 if func is aten.select.int else given["length"])


def _cannot_write(func: Any, args: Any, why: str = "") -> KVQError:
    handle = next(t for t in pytree.tree_leaves(args) if isinstance(t, QuantizedKV))
    return UnsupportedWriteError(
        f"{func} on {handle!r}",
        got=why or "an in-place operation that does not write whole tokens",
        allowed="index_copy_, x[:, :, pos] = k, copy_ (also into slices), fill_, zero_",
        do="write whole head vectors, or call dequantize() and work on the dense copy",
    )


# ------------------------------------------------------------------------------------------------------------- views


def _map_axis(
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


def _moves(handle: QuantizedKV, dim: int) -> bool:
    """Whether the planes can be cut and reordered along this axis of the cache."""
    letter = handle.axes[dim]
    return letter in "bh" or (letter == "t" and not handle.format.windowed)


def _bounds(start: Any, end: Any, size: Any) -> tuple[Any, Any]:
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
    first, stop = _bounds(start, end, handle.shape[dim])
    if type(step) is int and step == 1 and _is_all(first, stop, handle.shape[dim]):
        return _same(handle)
    if not _moves(handle, dim):
        return NotImplemented

    def cut(t: Tensor, axis: int) -> Tensor:
        part: Tensor = aten.slice.Tensor(t, axis, first, stop, step)
        return part

    store = _map_axis(handle, letter, cut, copy=False)
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
    if not (handle.axes[dim] == "1" or _moves(handle, dim)):
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
    if not _moves(handle, dim) or isinstance(start, Tensor):
        return NotImplemented
    if type(start) is int and start < 0:
        start = start + size
    if all(type(n) is int for n in (start, length, size)) and not 0 <= start <= start + length <= size:
        raise IndexError(f"narrow(): start {start} and length {length} exceed dimension size {size}")
    return _slice(handle, dim, start, start + length)


def _split(handle: QuantizedKV, size: Any, dim: int = 0) -> Any:
    n = handle.shape[dim]
    if not _moves(handle, dim) or type(n) is not int or type(size) is not int or size < 1:
        return NotImplemented
    return [_slice(handle, dim, at, at + size) for at in range(0, max(n, 1), size)]


def _chunk(handle: QuantizedKV, chunks: int, dim: int = 0) -> Any:
    n = handle.shape[dim]
    return _split(handle, max(-(-n // chunks), 1), dim) if type(n) is int and chunks > 0 else NotImplemented


def _split_with_sizes(handle: QuantizedKV, sizes: Sequence[Any], dim: int = 0) -> Any:
    n = handle.shape[dim]
    if not _moves(handle, dim) or type(n) is not int or not all(type(s) is int and s >= 0 for s in sizes):
        return NotImplemented
    if sum(sizes) != n:
        return NotImplemented
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(handle, dim, at, at + s) for at, s in zip(starts, sizes, strict=True)]


def _unbind(handle: QuantizedKV, dim: int = 0) -> Any:
    n = handle.shape[dim]
    if not (handle.axes[dim] == "1" or _moves(handle, dim)) or type(n) is not int:
        return NotImplemented
    return [_select(handle, dim, i) for i in range(n)]


# ------------------------------------------------------------------------------------------------------------ moving


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
    store = _map_axis(handle, letter, move, copy=True)
    if letter == "t":
        # Where tokens end up is no longer a prefix that a number could describe.
        store[-1] = torch.full_like(store[-1], store[0].shape[2])
    return handle.like(store)


def _index_select(handle: QuantizedKV, dim: int, index: Tensor) -> Any:
    if not _moves(handle, dim):
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
    if len(dims) != 1 or not _moves(handle, dims[0]):
        return NotImplemented
    return _moved(handle, dims[0], lambda t, axis: t.roll(shifts[0], axis))


def _flip(handle: QuantizedKV, dims: Sequence[int]) -> Any:
    if len(dims) != 1 or not _moves(handle, dims[0]):
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
    if not _moves(first, dim):
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


# -------------------------------------------------------------------------------------- writes that give a new tensor


def _functional(write: Callable[..., Any]) -> Callable[..., Any]:
    """The form of an in-place write that returns a new cache instead."""

    def written(handle: QuantizedKV, *args: Any, **kwargs: Any) -> Any:
        copied = handle.like([plane.clone() for plane in handle.store])
        return write(copied, *args, **kwargs)

    return written


def _into_slice(
    handle: QuantizedKV, source: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    part = _slice(handle, dim, start, end, step)
    if part is NotImplemented and handle.axes[dim] == "t" and step == 1:
        write_tokens(handle, dim, *_bounds(start, end, handle.shape[dim]), source)
        return handle
    if part is NotImplemented or WRITES[aten.copy_.default](part, source) is NotImplemented:
        return NotImplemented
    return handle


def _into_select(handle: QuantizedKV, source: Tensor, dim: int, index: Any) -> Any:
    if handle.format.windowed and handle.axes[dim] == "t":
        index = index + handle.shape[dim] if type(index) is int and index < 0 else index
        write_tokens(handle, dim, index, index + 1, source.unsqueeze(dim))
        return handle
    part = _select(handle, dim, index)
    if part is NotImplemented or WRITES[aten.copy_.default](part, source) is NotImplemented:
        return NotImplemented
    return handle


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **WRITES,
    aten.sym_size.int: lambda handle, dim: handle.shape[dim],
    aten.sym_size.default: lambda handle: handle.shape,
    aten.sym_stride.int: lambda handle, dim: handle.stride()[dim],
    aten.sym_numel.default: lambda handle: handle.numel(),
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
    aten.index_copy.default: _functional(WRITES[aten.index_copy_.default]),
    aten.index_put.default: _functional(WRITES[aten.index_put_.default]),
    aten.slice_scatter.default: _functional(_into_slice),
    aten.select_scatter.default: _functional(_into_select),
}
# Handlers that look for the handle themselves; the others run only where the first argument is one.
_ANY_ARGUMENT = {aten.copy_.default, aten.cat.default, aten.concat.default, aten.concatenate.default}
