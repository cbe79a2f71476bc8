"""``StackedKV``: several caches that a model keeps in one tensor.

Some models hold the caches of all layers, or keys and values, in one buffer such as ``[layers, 2, B, H, T, D]``. Each index along
those axes (``l`` in ``axes``) becomes a cache of its own, with a format of its own; selecting one gives that cache, and writing
into it writes into the stack.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .axes import check_axes
from .decoded import make_wrapper
from .errors import FormatError, KVQError, UnsupportedWriteError
from .formats import Format
from .handle import QuantizedKV

__all__ = ["StackedKV", "dispatch_stack"]

aten = torch.ops.aten


class StackedKV(QuantizedKV):
    """Caches along the ``l`` axes of one tensor.

    Attributes:
        parts: the caches, in row-major order of the ``l`` axes.
        lead: sizes of the ``l`` axes.
        axes: of the whole, ``l`` for axes that tell caches apart, as in ``"llbhtd"``.
    """

    parts: list[QuantizedKV]
    lead: tuple[int, ...]
    is_stack = True

    @staticmethod
    def __new__(cls, parts: Sequence[QuantizedKV], lead: Sequence[int], axes: str) -> StackedKV:
        inner = iter(parts[0].shape)
        outer = iter(lead)
        shape = tuple(next(outer) if letter == "l" else next(inner) for letter in axes)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        first = parts[0]
        return cast(
            StackedKV,
            make_wrapper(cls, shape, strides=tuple(strides), dtype=first.dtype, device=first.store[0].device),
        )

    def __init__(self, parts: Sequence[QuantizedKV], lead: Sequence[int], axes: str) -> None:
        self.parts, self.lead, self.axes = list(parts), tuple(lead), axes
        self.format = parts[0].format
        self.order = axes
        self._owner = None
        self._cut = ""
        for i, part in enumerate(parts):
            for plane, tensor in zip(part.format.planes, part.store, strict=True):
                setattr(self, f"part{i}_{plane.name}", tensor)

    @classmethod
    def empty(  # type: ignore[override]
        cls,
        shape: Sequence[int],
        formats: str | Format | Sequence[str | Format],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        axes: str,
    ) -> StackedKV:
        """Empty caches that read as zeros.

        Args:
            shape: of the dense tensor, in the order of ``axes``.
            formats: one for all caches, or one for each in row-major order of the ``l`` axes.
        """
        inner = check_axes(axes.replace("l", ""), len(shape) - axes.count("l"))
        lead = [size for size, letter in zip(shape, axes, strict=True) if letter == "l"]
        rest = [size for size, letter in zip(shape, axes, strict=True) if letter != "l"]
        rows = _one_each(formats, math.prod(lead))
        parts = [QuantizedKV.empty(rest, row, dtype=dtype, device=device, axes=inner) for row in rows]
        return cls(parts, lead, axes)

    @classmethod
    def from_dense(  # type: ignore[override]
        cls,
        x: Tensor,
        formats: str | Format | Sequence[str | Format],
        *,
        axes: str,
        length: Any = None,
        static: Sequence[Mapping[str, Tensor] | None] | None = None,
    ) -> StackedKV:
        """Caches holding ``x``.

        Args:
            formats: as in :meth:`empty`.
            length: a function that tells the filled length of a dense cache of axes ``axes`` without ``l``; default: all filled.
            static: what was calibrated for each cache.
        """
        inner = check_axes(axes.replace("l", ""), x.dim() - axes.count("l"))
        lead = [size for size, letter in zip(x.shape, axes, strict=True) if letter == "l"]
        rows = _one_each(formats, math.prod(lead))
        parts = []
        fitted = static or [None] * len(rows)
        for index, row, planes in zip(_indices(lead), rows, fitted, strict=True):
            dense = _pick(x, axes, index)
            filled = length(dense, inner) if callable(length) else length
            parts.append(QuantizedKV.from_dense(dense, row, axes=inner, length=filled, static=planes))
        return cls(parts, lead, axes)

    # ------------------------------------------------------------------------------------------------ looking at it

    def planes(self) -> list[Tensor]:
        return [plane for part in self.parts for plane in part.planes()]

    @property
    def store(self) -> list[Tensor]:
        return [plane for part in self.parts for plane in part.store]

    @property
    def length(self) -> Tensor:
        """Tokens that each row of each cache holds, int64 ``[caches, B]``."""
        return torch.stack([part.length for part in self.parts])

    @staticmethod
    def dispatch(func: Any, args: Any, kwargs: Any, *, guard_views: bool) -> Any:
        return dispatch_stack(func, args, kwargs, guard_views=guard_views)

    def caches(self) -> list[QuantizedKV]:
        return self.parts

    def plane_names(self) -> list[str]:
        return [
            f"{''.join(f'{i}_' for i in index)}{plane.name}"
            for index, part in zip(_indices(self.lead), self.parts, strict=True)
            for plane in part.format.planes
        ]

    @property
    def format_name(self) -> str:
        return ", ".join(dict.fromkeys(part.format.name for part in self.parts))

    def dequantize(self) -> Tensor:
        dense = torch.stack([part.dequantize() for part in self.parts])
        dense = dense.reshape(*self.lead, *self.parts[0].shape)
        inner = iter(range(len(self.lead), dense.dim()))
        outer = iter(range(len(self.lead)))
        dense = dense.permute([next(outer) if letter == "l" else next(inner) for letter in self.axes])
        # In memory as the dense tensor was, which views of decoded values may rely on.
        return dense.contiguous()

    def dequantize_canonical(self) -> Tensor:
        raise KVQError(
            "the canonical values of a stack of caches",
            got=repr(self),
            allowed="one cache, which has the axes [B, H, T, D]",
            do="select one cache, or call dequantize()",
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StackedKV({self.format_name}, shape={tuple(self.shape)}, axes={self.axes!r}, dtype={self.dtype})"

    # ------------------------------------------------------------------------------------------------ protocols

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names = [f"part{i}_{plane.name}" for i, part in enumerate(self.parts) for plane in part.format.planes]
        formats = tuple(part.format.name for part in self.parts)
        return names, (formats, self.lead, self.axes, self.parts[0].axes, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> StackedKV:
        formats, lead, axes, part_axes, dtype = context
        return _rebuild_stack([inner[name] for name in inner], formats, lead, axes, part_axes, dtype)

    def with_store(self, store: Sequence[Tensor]) -> StackedKV:
        given = iter(store)
        parts = [part.with_store([next(given) for _ in part.format.planes]) for part in self.parts]
        return StackedKV(parts, self.lead, self.axes)

    def __copy__(self) -> StackedKV:
        return StackedKV(self.parts, self.lead, self.axes)

    def __deepcopy__(self, memo: dict[int, Any]) -> StackedKV:
        if id(self) not in memo:
            parts = [part.__deepcopy__(memo) for part in self.parts]
            memo[id(self)] = StackedKV(parts, self.lead, self.axes)
        return cast(StackedKV, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        names, (formats, lead, axes, part_axes, dtype) = self.__tensor_flatten__()
        return _rebuild_stack, (self.store, formats, lead, axes, part_axes, dtype)


def _rebuild_stack(
    store: Sequence[Tensor],
    formats: Sequence[str],
    lead: Sequence[int],
    axes: str,
    part_axes: str,
    dtype: torch.dtype,
) -> StackedKV:
    from .formats import get_format

    given = iter(store)
    parts = []
    for name in formats:
        row = get_format(name)
        planes = [next(given) for _ in row.planes]
        row.check_store(planes)
        parts.append(QuantizedKV(planes, name, part_axes, dtype))
    return StackedKV(parts, lead, axes)


torch.serialization.add_safe_globals([_rebuild_stack, StackedKV])


def _one_each(formats: str | Format | Sequence[str | Format], count: int) -> list[str | Format]:
    if isinstance(formats, (str, Format)):
        return [formats] * count
    if len(formats) != count:
        raise FormatError(
            "formats of a stack of caches",
            got=f"{len(formats)} formats",
            allowed=f"one, or {count}: one for each cache",
            do="give a format for each cache, in the order of the leading axes",
        )
    return list(formats)


def _indices(lead: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in lead))


def _pick(x: Tensor, axes: str, index: Sequence[int]) -> Tensor:
    """The part of dense ``x`` at ``index`` along its ``l`` axes."""
    left = [dim for dim, letter in enumerate(axes) if letter == "l"]
    for dim, i in reversed(list(zip(left, index, strict=True))):
        x = x.select(dim, i)
    return x


# -------------------------------------------------------------------------------------------------------- operations


def dispatch_stack(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, guard_views: bool = True
) -> Any:
    """As ``handle_ops.dispatch``, for arguments among which there is a stack."""
    from .handle_ops import dispatch, written_arguments

    if args and isinstance(args[0], StackedKV) and func in _HANDLERS:
        result = _HANDLERS[func](*args, **kwargs)
        if result is not NotImplemented:
            return result
    for given in written_arguments(func, args, kwargs):
        if any(isinstance(t, StackedKV) for t in pytree.tree_leaves(given)):
            raise UnsupportedWriteError(
                f"{func} on {given!r}",
                got="a write across the caches of a stack",
                allowed="writes into one cache of it, zero_, copy_",
                do="select one cache (x[layer], x[layer, 0]) and write whole head vectors into it",
            )
    decoded = pytree.tree_map_only(StackedKV, lambda stack: stack.dequantize(), (args, kwargs))
    if any(isinstance(t, QuantizedKV) for t in pytree.tree_leaves(decoded)):
        return dispatch(func, decoded[0], decoded[1], guard_views=guard_views)
    result = func(*decoded[0], **decoded[1])
    if guard_views:
        from .decoded import DecodedView, is_view

        if is_view(func):
            return pytree.tree_map_only(Tensor, DecodedView.wrap, result)
    return result


def _on_part(func: Any, part: QuantizedKV, *args: Any, **kwargs: Any) -> Any:
    from .handle_ops import dispatch

    return dispatch(func, (part, *args), kwargs, guard_views=False)


def _each(stack: StackedKV, act: Callable[[QuantizedKV], Any], axes: str | None = None) -> Any:
    parts = [act(part) for part in stack.parts]
    if not all(isinstance(part, QuantizedKV) for part in parts):
        return NotImplemented
    return StackedKV(parts, stack.lead, stack.axes if axes is None else axes)


def _inner_dim(stack: StackedKV, dim: int) -> int:
    """The axis of a part that is axis ``dim`` of the stack."""
    return dim - stack.axes[:dim].count("l")


def _select(stack: StackedKV, dim: int, index: Any) -> Any:
    dim = dim % stack.dim()
    axes = stack.axes[:dim] + stack.axes[dim + 1 :]
    if stack.axes[dim] != "l":
        return _each(stack, lambda part: _on_part(aten.select.int, part, _inner_dim(stack, dim), index), axes)
    if type(index) is not int:
        return NotImplemented
    if not -stack.shape[dim] <= index < stack.shape[dim]:
        raise IndexError(f"index {index} is out of range for a stack of {stack.shape[dim]} caches")
    which = stack.axes[:dim].count("l")
    index = index % stack.shape[dim]
    kept = [part for at, part in zip(_indices(stack.lead), stack.parts, strict=True) if at[which] == index]
    lead = stack.lead[:which] + stack.lead[which + 1 :]
    return StackedKV(kept, lead, axes) if lead else _on_part(aten.alias.default, kept[0])


def _slice(stack: StackedKV, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    dim = dim % stack.dim()
    if stack.axes[dim] != "l":
        return _each(
            stack, lambda part: _on_part(aten.slice.Tensor, part, _inner_dim(stack, dim), start, end, step)
        )
    if not all(bound is None or type(bound) is int for bound in (start, end)):
        return NotImplemented
    which = stack.axes[:dim].count("l")
    chosen = range(*slice(start, end, step).indices(stack.shape[dim]))
    if not chosen:
        return NotImplemented
    kept = [part for at, part in zip(_indices(stack.lead), stack.parts, strict=True) if at[which] in chosen]
    lead = (*stack.lead[:which], len(chosen), *stack.lead[which + 1 :])
    return StackedKV(kept, lead, stack.axes)


def _narrow(stack: StackedKV, dim: int, start: Any, length: Any) -> Any:
    return _slice(stack, dim, start, start + length)


def _unbind(stack: StackedKV, dim: int = 0) -> Any:
    return [_select(stack, dim, i) for i in range(stack.shape[dim])]


def _split(stack: StackedKV, size: int, dim: int = 0) -> Any:
    return [_slice(stack, dim, at, at + size) for at in range(0, stack.shape[dim], size)]


def _permute(stack: StackedKV, dims: Sequence[int]) -> Any:
    axes = "".join(stack.axes[d] for d in dims)
    lead_order = [stack.axes[: d % stack.dim()].count("l") for d in dims if stack.axes[d] == "l"]
    if lead_order != sorted(lead_order):
        return NotImplemented
    inner = [_inner_dim(stack, d % stack.dim()) for d in dims if stack.axes[d] != "l"]
    return _each(stack, lambda part: _on_part(aten.permute.default, part, inner), axes)


def _transpose(stack: StackedKV, dim0: int, dim1: int) -> Any:
    dims = list(range(stack.dim()))
    dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return _permute(stack, dims)


def _same(stack: StackedKV, *_: Any, **__: Any) -> Any:
    return _each(stack, lambda part: _on_part(aten.alias.default, part))


def _clone(stack: StackedKV, **kwargs: Any) -> Any:
    return _each(stack, lambda part: _on_part(aten.clone.default, part, **kwargs))


def _to_copy(stack: StackedKV, **kwargs: Any) -> Any:
    return _each(stack, lambda part: _on_part(aten._to_copy.default, part, **kwargs))


def _copy_(stack: StackedKV, source: Tensor, non_blocking: bool = False) -> Any:
    if isinstance(source, StackedKV) and source.axes == stack.axes and source.lead == stack.lead:
        pieces: list[Any] = list(source.parts)
    else:
        dense = source.dequantize() if isinstance(source, QuantizedKV) else source
        dense = dense.expand(stack.shape)
        pieces = [_pick(dense, stack.axes, index) for index in _indices(stack.lead)]
    for part, piece in zip(stack.parts, pieces, strict=True):
        _on_part(aten.copy_.default, part, piece, non_blocking)
    return stack


def _index_copy_(stack: StackedKV, dim: int, index: Tensor, source: Tensor) -> Any:
    dim = dim % stack.dim()
    if stack.axes[dim] == "l" or isinstance(source, QuantizedKV):
        return NotImplemented
    for part, at in zip(stack.parts, _indices(stack.lead), strict=True):
        piece = _pick(source, stack.axes, at)
        if _on_part(aten.index_copy_.default, part, _inner_dim(stack, dim), index, piece) is NotImplemented:
            return NotImplemented
    return stack


def _zero_(stack: StackedKV) -> Any:
    for part in stack.parts:
        _on_part(aten.zero_.default, part)
    return stack


def _fill_(stack: StackedKV, value: Any) -> Any:
    for part in stack.parts:
        _on_part(aten.fill_.Scalar, part, value)
    return stack


def _index_select(stack: StackedKV, dim: int, index: Tensor) -> Any:
    dim = dim % stack.dim()
    if stack.axes[dim] == "l":
        return NotImplemented
    return _each(stack, lambda part: _on_part(aten.index_select.default, part, _inner_dim(stack, dim), index))


_HANDLERS: dict[Any, Callable[..., Any]] = {
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.narrow.default: _narrow,
    aten.unbind.int: _unbind,
    aten.split.Tensor: _split,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.index_copy_.default: _index_copy_,
    aten.zero_.default: _zero_,
    aten.fill_.Scalar: _fill_,
    aten.index_select.default: _index_select,
}
