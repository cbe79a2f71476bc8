"""The operators on tensors: what is asked of a kernel, which shape class that is, and what refuses.

    quantize(x, fmt)    dequantize(store, fmt, dtype)    append_(store, position, x, fmt)
    paged_append_(pages, block_table, position, x, fmt)

They run on CUDA devices of capability 8.0 and later, by instructions of Blackwell where there are those and by integer arithmetic
elsewhere, and on CPU tensors, which is slow and meant for tests. The registry prefers them on Blackwell alone: see ``refuses``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvq_ops.formats import Format
from kvq_ops.registry import Request, implementations

from . import build
from .build import Kernel
from .coding import Coding, coding_of, why_not_format

__all__ = ["DECODE", "ENCODE", "MEASURE", "append_", "dequantize", "paged_append_", "quantize", "refuses"]


# Shape classes. Sizes of batch, heads, tokens and pages are not in them: one kernel serves them all.
#   coding    a name in coding.CODINGS
#   dtype     of x, or of what is decoded
#   head_dim
#   wide      addresses and strides allow loads and stores of 16 bytes
#   position  None (tokens 0, 1, ...), "int32" or "int64"
#   table     None (contiguous), "int32" or "int64": of the block table
#   fit       a scale that spans tokens is fitted where it is unset
ENCODE = Kernel("encode", f"{__package__}.quantize:make_encode")
MEASURE = Kernel("measure", f"{__package__}.quantize:make_measure")
DECODE = Kernel("decode", f"{__package__}.dequantize:make_decode")


def refuses(request: Request) -> str | None:
    """Why these kernels do not serve a request, or ``None``."""
    if request.device != "cuda":
        return f"tensors on {request.device}: Blackwell GPUs are served"
    for fmt, head_dim in zip(request.formats, request.head_dims, strict=True):
        if (reason := why_not_format(fmt, head_dim)) is not None:
            return reason
    if (reason := build.why_not()) is not None:
        return reason
    return _why_not_device()


def _why_not_device() -> str | None:
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no CUDA device here, let alone one of compute capability 10.x or 12.x"
    major, minor = torch.cuda.get_device_capability()
    if major not in (10, 12):
        return f"compute capability {major}.{minor}: 10.x and 12.x have instructions for 4-bit floats"
    return None


def _torch(op: str) -> Callable[..., Any]:
    """The operator in plain torch, which knows what to say about wrong arguments."""
    return next(row for row in implementations(op) if row.name == "torch").run


def _coding(fmt: Format) -> Coding:
    coding = coding_of(fmt)
    assert isinstance(coding, Coding), coding
    return coding


def _planes(
    store: Sequence[Tensor], fmt: Format, coding: Coding
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Codes, scales of blocks or tokens, and scales that span tokens."""
    scales = store[1] if coding.scale_bytes or coding.scale == "token" else None
    static = store[fmt.static_planes[0]] if fmt.static_planes else None
    return store[0], scales, static


def _is_wide(x: Tensor, octets: int) -> bool:
    """Whether every vector of ``x`` starts at a multiple of ``octets`` bytes."""
    size = x.element_size()
    return x.data_ptr() % octets == 0 and all(step * size % octets == 0 for step in x.stride()[:-1])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_gaps(plane: Tensor | None) -> bool:
    return plane is not None and plane.dim() == 4 and plane.stride(3) != 1 and plane.shape[3] > 1


def _write(
    store: Sequence[Tensor],
    position: Tensor | None,
    table: Tensor | None,
    x: Tensor,
    fmt: Format,
    length: Tensor | None,
) -> None:
    coding = _coding(fmt)
    planes = _planes(store, fmt, coding)
    if any(_with_gaps(plane) for plane in planes):
        # Rare: a cache whose channels are not next to each other.
        held = [plane.contiguous() if _with_gaps(plane) else plane for plane in store]
        _write(held, position, table, x, fmt, length)
        for plane, own in zip(store, held, strict=True):
            if own is not plane:
                plane.copy_(own)
        return
    codes, scales, static = planes
    if x.stride(3) != 1:
        x = x.contiguous()
    if position is not None:
        position = position.expand(x.shape[0], x.shape[2])
    fit = static is not None and not fmt.calibrated
    shape = {
        "coding": coding.name,
        "dtype": _name(x.dtype),
        "head_dim": x.shape[3],
        "wide": _is_wide(x, 16) and _is_wide(codes, coding.access),
        "position": None if position is None else _name(position.dtype),
        "table": None if table is None else _name(table.dtype),
        "fit": fit,
    }
    target = build.target_of(x.device)
    seen = x.new_zeros(len(static), dtype=torch.int32) if fit and static is not None else None
    arguments = (x, codes, scales, static, seen, length, position, table)
    if fit:
        MEASURE.compiled(target, **shape)(*arguments)
    ENCODE.compiled(target, **shape)(*arguments)


def _check_calibrated(store: Sequence[Tensor], fmt: Format, op: str, *arguments: Any) -> None:
    if not fmt.calibrated:
        return
    marker = store[fmt.static_planes[0]]
    if marker.is_cuda:
        torch._assert_async((marker != 0).any(), f"a cache in format {fmt.name!r} was not calibrated")
    elif not bool((marker != 0).any()):
        _torch(op)(*arguments)


def append_(store: Sequence[Tensor], position: Tensor, x: Tensor, fmt: Format) -> None:
    """``kvq::append_``. A token whose position lies outside of the cache is not written."""
    if x.numel() == 0:
        return
    _check_calibrated(store, fmt, "append_", store, position, x, fmt)
    _write(store, position, None, x, fmt, store[-1])
    # Autograd and functionalization go by the version of a tensor, which nothing else has moved.
    torch.autograd.graph.increment_version(store)


def paged_append_(
    pages: Sequence[Tensor], block_table: Tensor, position: Tensor, x: Tensor, fmt: Format
) -> None:
    """``kvq::paged_append_``. A token that has no page is not written."""
    if x.numel() == 0 or block_table.numel() == 0:
        return
    _check_calibrated(pages, fmt, "paged_append_", pages, block_table, position, x, fmt)
    _write(pages, position, block_table, x, fmt, pages[-1])
    torch.autograd.graph.increment_version(pages)


def quantize(x: Tensor, fmt: Format) -> list[Tensor]:
    """``kvq::quantize``."""
    if fmt.calibrated:  # there is nothing that was calibrated, and that is said there
        complaint: list[Tensor] = _torch("quantize")(x, fmt)
        return complaint
    store = []
    for plane, shape, dtype in zip(
        fmt.planes, fmt.plane_shapes(*x.shape), fmt.plane_dtypes(x.dtype), strict=True
    ):
        store.append((x.new_empty if plane.per_token else x.new_zeros)(shape, dtype=dtype))
    store[-1].fill_(x.shape[2])
    if x.numel():
        _write(store, None, None, x, fmt, None)
    return store


def dequantize(store: Sequence[Tensor], fmt: Format, dtype: torch.dtype) -> Tensor:
    """``kvq::dequantize``."""
    coding = _coding(fmt)
    codes, scales, static = (
        plane.contiguous() if plane is not None and _with_gaps(plane) else plane
        for plane in _planes(store, fmt, coding)
    )
    assert codes is not None
    made = torch.float32 if dtype is torch.float64 else dtype
    out = codes.new_empty(fmt.logical_shape(store), dtype=made)
    if out.numel():
        kernel = DECODE.compiled(
            build.target_of(out.device),
            coding=coding.name,
            dtype=_name(made),
            head_dim=out.shape[3],
            wide=_is_wide(codes, coding.access),
        )
        kernel(codes, scales, static, out)
    return out.to(dtype)
