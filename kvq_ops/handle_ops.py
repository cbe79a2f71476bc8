"""What operations do to a ``QuantizedKV``: writes, movements of codes, decoded reads.

``dispatch`` is the one entry. Eager execution comes here from the handle's ``__torch_dispatch__``; the graph pass comes here
while it interprets a captured graph with handles in place of dense caches, so both have the same meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .decoded import DecodedView, is_view
from .errors import KVQError, UnsupportedWriteError
from .handle import QuantizedKV
from .handle_moves import MOVES
from .handle_views import VIEWS, slice_bounds
from .handle_write import WRITES, write_tokens

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
        return slice_bounds(given.get("start"), given.get("end"), size)
    start = given["index"] if func is aten.select.int else given["start"]
    start = start + size if type(start) is int and start < 0 else start
    return start, start + (1 if func is aten.select.int else given["length"])


def _cannot_write(func: Any, args: Any) -> KVQError:
    handle = next(t for t in pytree.tree_leaves(args) if isinstance(t, QuantizedKV))
    return UnsupportedWriteError(
        f"{func} on {handle!r}",
        got="an in-place operation that does not write whole tokens",
        allowed="index_copy_, x[:, :, pos] = k, copy_ (also into slices), fill_, zero_",
        do="write whole head vectors, or call dequantize() and work on the dense copy",
    )


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
    part = VIEWS[aten.slice.Tensor](handle, dim, start, end, step)
    if part is NotImplemented and handle.axes[dim] == "t" and step == 1:
        write_tokens(handle, dim, *slice_bounds(start, end, handle.shape[dim]), source)
        return handle
    if part is NotImplemented or WRITES[aten.copy_.default](part, source) is NotImplemented:
        return NotImplemented
    return handle


def _into_select(handle: QuantizedKV, source: Tensor, dim: int, index: Any) -> Any:
    if handle.format.windowed and handle.axes[dim] == "t":
        index = index + handle.shape[dim] if type(index) is int and index < 0 else index
        write_tokens(handle, dim, index, index + 1, source.unsqueeze(dim))
        return handle
    part = VIEWS[aten.select.int](handle, dim, index)
    if part is NotImplemented or WRITES[aten.copy_.default](part, source) is NotImplemented:
        return NotImplemented
    return handle


_HANDLERS: dict[Any, Callable[..., Any]] = {
    **WRITES,
    **VIEWS,
    **MOVES,
    aten.sym_size.int: lambda handle, dim: handle.shape[dim],
    aten.sym_size.default: lambda handle: handle.shape,
    aten.sym_stride.int: lambda handle, dim: handle.stride()[dim],
    aten.sym_numel.default: lambda handle: handle.numel(),
    aten.index_copy.default: _functional(WRITES[aten.index_copy_.default]),
    aten.index_put.default: _functional(WRITES[aten.index_put_.default]),
    aten.slice_scatter.default: _functional(_into_slice),
    aten.select_scatter.default: _functional(_into_select),
}
# Handlers that look for the handle themselves; the others run only where the first argument is one.
_ANY_ARGUMENT = {aten.copy_.default, aten.cat.default, aten.concat.default, aten.concatenate.default}
