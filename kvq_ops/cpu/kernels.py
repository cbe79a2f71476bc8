"""The operators on CPUs, by the compiled kernels: tensors in, packed arguments down."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import ImplementationError
from ..formats import Format
from ..options import NO_OPTIONS, Options
from ..registry import Request, implementations
from . import library
from .params import DTYPES, MAX_DIM, Layout, index_numbers, layout_of, plane_numbers, side_numbers

__all__ = [
    "append_",
    "attention",
    "dequantize",
    "paged_append_",
    "paged_attention",
    "quantize",
    "read_memory",
    "refuses",
]

_NOTHING = (0, 0, 0, 0, 0, 0)


def refuses(request: Request) -> str | None:
    """Why the kernels cannot serve a request, or ``None``."""
    if request.device != "cpu":
        return f"tensors on {request.device}"
    for fmt in request.formats:
        layout = layout_of(fmt)
        if isinstance(layout, str):
            return layout
    if any(dim > MAX_DIM for dim in request.head_dims):
        return f"head_dim {max(request.head_dims)} above {MAX_DIM}"
    return library.why_not()


@functools.cache
def _packer(integers: int, doubles: int = 0) -> struct.Struct:
    return struct.Struct(f"{integers}q{doubles}d")


_layouts: dict[int, tuple[Format, Layout]] = {}


def _layout(fmt: Format) -> Layout:
    # By identity, since a row hashes all of its fields; the row is kept, so that no other takes its place.
    if (known := _layouts.get(id(fmt))) is not None:
        return known[1]
    layout = layout_of(fmt)
    assert isinstance(layout, Layout), layout
    _layouts[id(fmt)] = fmt, layout
    return layout


_sides: dict[tuple[Any, ...], bytes] = {}


def _side(fmt: Format, store: Sequence[Tensor]) -> bytes:
    """``Side`` of a store, packed; remembered by all that it depends on, since models call with the same stores again."""
    layout = _layout(fmt)
    key = (id(fmt), store[0].shape, *[x for t in store for x in (t.data_ptr(), t.stride(), t.dtype)])
    if (known := _sides.get(key)) is not None:
        return known
    numbers = side_numbers(layout, fmt, store)
    if len(_sides) >= 4096:
        _sides.clear()
    made = _sides[key] = _packer(len(numbers)).pack(*numbers)
    return made


def _paged_side(fmt: Format, pages: Sequence[Tensor], table: Tensor, length: Tensor | None = None) -> bytes:
    numbers = side_numbers(_layout(fmt), fmt, pages, table, length)
    return _packer(len(numbers)).pack(*numbers)


def _call(name: str, arguments: bytes) -> None:
    if library.function(name)(arguments):
        raise ImplementationError(
            f"the C++ kernel {name}",
            got="not enough memory for its intermediate results",
            allowed="what the system can still give",
            do="free memory, or give fewer tokens at a time",
        )


def append_(store: Sequence[Tensor], position: Tensor | None, x: Tensor, fmt: Format) -> None:
    """``kvq::append_``; ``position`` ``None`` means ``0..N-1``."""
    if x.numel() == 0:
        return
    if fmt.calibrated and not bool((store[fmt.static_planes[0]] != 0).any()):
        _torch("append_")(store, torch.arange(x.shape[2]) if position is None else position, x, fmt)
    _append(store, position, x, fmt, None)


def paged_append_(
    pages: Sequence[Tensor], block_table: Tensor, position: Tensor, x: Tensor, fmt: Format
) -> None:
    """``kvq::paged_append_``."""
    if x.numel() == 0:
        return
    if fmt.calibrated and not bool((pages[fmt.static_planes[0]] != 0).any()):
        _torch("paged_append_")(pages, block_table, position, x, fmt)
    _append(pages, position, x, fmt, block_table)


def _append(
    store: Sequence[Tensor], position: Tensor | None, x: Tensor, fmt: Format, table: Tensor | None
) -> None:
    side = _side(fmt, store) if table is None else _paged_side(fmt, store, table)
    if fmt.keeps_exact and fmt.lossless and x.dtype != store[0].dtype:
        x = x.to(store[0].dtype)
    numbers = (
        *plane_numbers(x, x.stride()),
        *(_NOTHING if position is None else index_numbers(position)),
        x.shape[2],
        torch.get_num_threads(),
    )
    _call("kvq_append", side + _packer(len(numbers)).pack(*numbers))
    # Autograd and functionalization go by the version of a tensor, which nothing else has moved.
    torch.autograd.graph.increment_version(store)


def _torch(op: str) -> Callable[..., Any]:
    """The operator in plain torch, which also knows what to say about wrong arguments."""
    return next(row for row in implementations(op) if row.name == "torch").run


def quantize(x: Tensor, fmt: Format) -> list[Tensor]:
    if fmt.calibrated:  # there is nothing that was calibrated, and that is said there
        complaint: list[Tensor] = _torch("quantize")(x, fmt)
        return complaint
    batch, heads, tokens, dim = x.shape
    store = []
    for plane, shape, dtype in zip(
        fmt.planes, fmt.plane_shapes(batch, heads, tokens, dim), fmt.plane_dtypes(x.dtype), strict=True
    ):
        whole = plane.per_token and not fmt.windowed
        store.append(x.new_empty(shape, dtype=dtype) if whole else x.new_zeros(shape, dtype=dtype))
    append_(store, None, x, fmt)
    if x.numel() == 0:
        store[-1].fill_(tokens)
    return store


def dequantize(store: Sequence[Tensor], fmt: Format, dtype: torch.dtype) -> Tensor:
    if fmt.lossless:
        return store[0].to(dtype, copy=True, memory_format=torch.contiguous_format)
    numbers = side_numbers(_layout(fmt), fmt, store)
    out = store[0].new_empty(fmt.logical_shape(store), dtype=dtype)
    if out.numel():
        numbers += (out.data_ptr(), DTYPES[dtype], torch.get_num_threads())
        _call("kvq_dequantize", _packer(len(numbers)).pack(*numbers))
    return out


def _mask_numbers(mask: Tensor | None) -> tuple[int, ...]:
    if mask is None:
        return _NOTHING
    missing = 4 - mask.dim()
    strides = [0] * missing + [
        0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True)
    ]
    return plane_numbers(mask, strides)


def attention(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key_format: Format,
    value_format: Format,
    *,
    use_length: bool = True,
    **given: Any,
) -> Tensor:
    """``kvq::attention``."""
    key, value = _side(key_format, key_store), _side(value_format, value_store)
    value_dim = value_format.logical_shape(value_store)[3]
    options = Options(**given) if given else NO_OPTIONS
    return _attention(query, key + value, value_dim, options, use_length)


def paged_attention(
    query: Tensor,
    key_pages: Sequence[Tensor],
    value_pages: Sequence[Tensor],
    block_table: Tensor,
    length: Tensor,
    key_format: Format,
    value_format: Format,
    **given: Any,
) -> Tensor:
    """``kvq::paged_attention``."""
    key = _paged_side(key_format, key_pages, block_table, length)
    value = _paged_side(value_format, value_pages, block_table, length)
    value_dim = value_format.logical_shape(value_pages)[3]
    return _attention(query, key + value, value_dim, Options(**given), True)


def _attention(
    query: Tensor,
    sides: bytes,
    value_dim: int,
    options: Options,
    use_length: bool,
) -> Tensor:
    mask, causal, scale, window, softcap, sinks = options
    batch, query_heads, queries, dim = query.shape
    if mask is not None and mask.dtype not in DTYPES:
        mask = mask.float()
    if sinks is not None and sinks.dtype not in DTYPES:
        sinks = sinks.float()
    out = query.new_empty((batch, query_heads, queries, value_dim))
    if out.numel() == 0:
        return out
    numbers = (
        *plane_numbers(query, query.stride()),
        *_mask_numbers(mask),
        *(_NOTHING if sinks is None else plane_numbers(sinks, (0, sinks.stride(0), 0, 0))),
        out.data_ptr(),
        query_heads,
        queries,
        int(causal),
        window,
        int(use_length),
        torch.get_num_threads(),
    )
    scale = dim**-0.5 if scale is None else scale
    _call("kvq_attention", sides + _packer(len(numbers), 2).pack(*numbers, scale, softcap))
    return out


def read_memory(data: Tensor) -> int:
    """The wrapped sum of the 64-bit words of a contiguous tensor, by ``torch.get_num_threads()`` threads.

    It does nothing else than read: the time it takes is what a kernel that is bound by memory can hope for.
    """
    words = data.numel() * data.element_size() // 8
    return library.function("kvq_read")(_packer(3).pack(data.data_ptr(), words * 8, torch.get_num_threads()))
