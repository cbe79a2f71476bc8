"""Attention over narrow-float caches on tensors: which kernel, which arguments, and what refuses.

    attention(query, key_store, value_store, key_format, value_format, *, ...)
    paged_attention(query, key_pages, value_pages, block_table, length, key_format, value_format, *, ...)

The kernels are for decoding: up to ``MAX_ROWS`` rows (query heads of a kv head times query tokens) attend to a long cache. Longer
prefills, and vectors or pages of sizes that are not served, go to the next implementation that does not refuse them. Nothing here
looks at values, so that calls can be captured in CUDA graphs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvq_ops.errors import ImplementationError
from kvq_ops.formats import Format
from kvq_ops.options import Options
from kvq_ops.registry import Request, implementations

from . import build
from .build import Kernel, aligned
from .coding import Coding, coding_of, scale_octets

__all__ = ["ATTENTION", "HEAD_DIMS", "MAX_ROWS", "Plan", "attention", "paged_attention", "plan", "refuses"]

HEAD_DIMS = (64, 128, 256)
MAX_ROWS = 64
"""Query rows of a kv head that are served: each 16 of them read the whole cache."""

ROWS, STEP = 16, 64
"""Rows of a CTA; tokens that its four warps take at once."""
_MOST_CTAS = 65535  # along the second and third axis of a grid, by CUDA
_KINDS = ("nvfp4", "fp8_token", "fp8_head", "fp8_tensor")
_LOG2E = math.log2(math.e)
# Partial results for each row are at most so many: beyond it, putting them together costs more than it brings.
_MOST_SPLITS = 64
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


# Shape classes. Batch, heads, tokens, rows and splits are not in them.
#   dtype                  of query and output
#   keys, values           names in coding.CODINGS
#   head_dim, value_dim    64, 128 or 256
#   page                   tokens of a page, 0 for a contiguous cache
#   table, length          None, "int32" or "int64"
#   mask                   "", "bool" or "float" (fp32)
#   causal, window, softcap, sinks   whether there are such
ATTENTION = Kernel("attention", f"{__package__}.attend:make_attention")


@dataclass(frozen=True)
class Plan:
    """One call: what to compile, the arguments of ``attend.attend`` in their order, and where the output will be.

    Attributes:
        grid: of the first kernel; the second has a CTA for each row.
    """

    shape: dict[str, Any]
    arguments: dict[str, Any]
    out: Tensor
    grid: tuple[int, int, int]


# ---------------------------------------------------------------------------------------------------------- refusals


def why_not_formats(fmts: Sequence[Format], head_dims: Sequence[int]) -> str | None:
    """Why these formats, or vectors of these sizes, are not served; ``None`` where they are."""
    for fmt, head_dim in zip(fmts, head_dims, strict=True):
        coding = coding_of(fmt)
        if isinstance(coding, str):
            return coding
        if coding.name not in _KINDS:
            return (
                f"format {fmt.name}: its scales go up to 2^127, beyond the fp16 that tensor cores multiply in here; attention "
                "serves nvfp4 and the fp8 formats of e4m3 codes"
            )
        if head_dim not in HEAD_DIMS:
            return f"head_dim {head_dim}: {', '.join(map(str, HEAD_DIMS))} are served"
    return None


def refuses(request: Request) -> str | None:
    """Why attention by these kernels does not serve a request, or ``None``. As for the other operators, Blackwell alone."""
    if request.device != "cuda":
        return f"tensors on {request.device}: Blackwell GPUs are served"
    if (reason := why_not_formats(request.formats, request.head_dims)) is not None:
        return reason
    if request.dtype not in _DTYPES:
        return f"queries of {request.dtype}: {', '.join(_DTYPES.values())} are served"
    if (reason := build.why_not()) is not None:
        return reason
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return "no CUDA device here"
    major, minor = torch.cuda.get_device_capability()
    if major not in (10, 12):
        return f"compute capability {major}.{minor}: 10.x and 12.x have instructions for 4-bit floats"
    return None


def _elsewhere(op: str, query: Tensor, fmts: tuple[Format, Format], dims: tuple[int, int]) -> Any:
    """The implementation that comes after this one."""
    request = Request(op, query.device.type, fmts, dims, query.dtype)
    for row in implementations(op):
        if row.name != "cutlass" and row.refuses(request) is None:
            return row.run
    raise ImplementationError(
        f"kvq::{op} for more than {MAX_ROWS} query rows of a kv head, or pages of an odd size",
        got="no other implementation that serves it",
        allowed="the implementation 'torch', which serves everything",
    )


# -------------------------------------------------------------------------------------------------------- arguments


def _rows(query: Tensor, heads: int) -> int:
    return query.shape[1] // heads * query.shape[2]


def _fits_grid(query: Tensor, heads: int) -> bool:
    rows = _rows(query, heads)
    return rows <= MAX_ROWS and max(query.shape[0], heads * -(-rows // ROWS)) <= _MOST_CTAS


def _within_words(store: Sequence[Tensor], fmt: Format) -> bool:
    """Whether the tokens of a head, or of a page, lie within the 4 GB that offsets of one word reach."""
    planes = (tensor for plane, tensor in zip(fmt.planes, store, strict=True) if plane.per_token)
    return all(plane.shape[2] * plane.stride(2) < 1 << 32 for plane in planes)


def _side(store: Sequence[Tensor], fmt: Format, coding: Coding, dim: int) -> dict[str, Tensor | None]:
    """Codes, scales of blocks or tokens, and scales that span tokens."""
    codes = aligned(store[0], coding.lane_octets(dim))
    scales = static = None
    if coding.scale_bytes:
        scales = aligned(store[1], scale_octets(dim))
    elif coding.scale == "token":
        scales = store[1]
    if fmt.static_planes:
        static = store[fmt.static_planes[0]].contiguous()
    return {"codes": codes, "scales": scales, "static": static}


@functools.cache
def _processors(device: torch.device) -> int:
    # Without a GPU, as a B200 has.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 148


def _splits(query: Tensor, heads: int, tokens: int, step: int) -> int:
    """Stretches of each sequence: enough for two CTAs on each processor, none shorter than what four warps take at once.

    By the room of the cache, since the lengths are on the GPU; what a sequence really holds is spread over them there.
    """
    parts = query.shape[0] * heads * -(-_rows(query, heads) // ROWS)
    wanted = -(-2 * _processors(query.device) // max(1, parts))
    return max(1, min(wanted, -(-tokens // step), _MOST_SPLITS))


def plan(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key_format: Format,
    value_format: Format,
    *,
    table: Tensor | None = None,
    length: Tensor | None = None,
    splits: int | None = None,
    **given: Any,
) -> Plan:
    """What a call launches, without launching it. The arguments were checked by the operator.

    Args:
        table: ``[B, N]`` for pages.
        length: ``[B]``, or None for all the room there is.
        splits: stretches of each sequence; chosen by default.
        given: ``Options``.
    """
    mask, causal, scale, window, softcap, sinks = Options(**given)
    codings = coding_of(key_format), coding_of(value_format)
    assert isinstance(codings[0], Coding) and isinstance(codings[1], Coding), codings
    batch, query_heads, queries, head_dim = query.shape
    heads, value_dim = key_store[0].shape[1], value_format.logical_shape(value_store)[3]
    page = 0 if table is None else key_store[0].shape[2]
    tokens = key_store[0].shape[2] if table is None else table.shape[1] * page
    rows = query_heads // heads * queries
    if splits is None:
        splits = _splits(query, heads, tokens, STEP)
    scale = head_dim**-0.5 if scale is None else scale
    query = aligned(query, 4 * query.element_size())
    if mask is not None:
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask.float()
        mask = mask.expand(batch, query_heads, queries, tokens)
    out = query.new_empty((batch, query_heads, queries, value_dim))
    count = batch * heads * rows * splits
    partial = query.new_empty(count * value_dim, dtype=torch.float32)
    stats = query.new_empty(count * 2, dtype=torch.float32)
    shape = {
        "dtype": _DTYPES[query.dtype],
        "keys": codings[0].name,
        "values": codings[1].name,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "page": page,
        "table": None if table is None else str(table.dtype).removeprefix("torch."),
        "length": None if length is None else str(length.dtype).removeprefix("torch."),
        "mask": "" if mask is None else "bool" if mask.dtype == torch.uint8 else "float",
        "causal": causal,
        "window": window > 0,
        "softcap": softcap > 0,
        "sinks": sinks is not None,
    }
    key_planes = _side(key_store, key_format, codings[0], head_dim)
    value_planes = _side(value_store, value_format, codings[1], value_dim)
    arguments = {
        "query": query,
        **{f"key_{name}": plane for name, plane in key_planes.items()},
        **{f"value_{name}": plane for name, plane in value_planes.items()},
        "mask": mask,
        "table": table,
        "length": None if length is None else length.contiguous(),
        "sinks": None if sinks is None else sinks.float().contiguous(),
        "partial": partial,
        "stats": stats,
        "out": out.view(-1),
        "queries": queries,
        "group": query_heads // heads,
        "splits": splits,
        "tokens": tokens,
        # No key is further away than that; beyond, the kernel's differences might not fit a word.
        "window": min(window, tokens + queries),
        "scale": scale * _LOG2E * (2 / softcap if softcap > 0 else 1.0),
        "cap": softcap * _LOG2E,
    }
    grid = (splits, heads * -(-rows // ROWS), batch)
    return Plan(shape, arguments, out, grid)


def _run(query: Tensor, planned: Plan) -> Tensor:
    if query.device.type != "cuda":
        raise ImplementationError(
            "attention by the CuTe kernels",
            got=f"tensors on {query.device}",
            allowed="CUDA devices",
            do="leave the choice of the implementation open",
        )
    target = build.target_of(query.device)
    if target == "sm_80":
        raise ImplementationError(
            "attention by the CuTe kernels", got="compute capability 8.x", allowed="9.0 and later"
        )
    ATTENTION.compiled(target, **planned.shape)(*planned.arguments.values())
    return planned.out


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
    """``kvq::attention``; more than ``MAX_ROWS`` query rows of a kv head go to the next implementation."""
    value_dim = value_format.logical_shape(value_store)[3]
    heads, tokens = key_store[0].shape[1:3]
    if query.numel() == 0 or tokens == 0:
        return query.new_zeros((*query.shape[:3], value_dim))
    served = _fits_grid(query, heads)
    served = served and _within_words(key_store, key_format) and _within_words(value_store, value_format)
    if not served:
        run = _elsewhere("attention", query, (key_format, value_format), (query.shape[3], value_dim))
        other: Tensor = run(
            query, key_store, value_store, key_format, value_format, use_length=use_length, **given
        )
        return other
    length = key_store[-1] if use_length else None
    planned = plan(query, key_store, value_store, key_format, value_format, length=length, **given)
    return _run(query, planned)


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
    """``kvq::paged_attention``. Pages whose tokens are no multiple of 8 go to the next implementation too."""
    value_dim = value_format.logical_shape(value_pages)[3]
    heads, page = key_pages[0].shape[1:3]
    if query.numel() == 0 or block_table.numel() == 0 or page == 0:
        return query.new_zeros((*query.shape[:3], value_dim))
    served = _fits_grid(query, heads) and page % 8 == 0
    served = served and _within_words(key_pages, key_format) and _within_words(value_pages, value_format)
    if not served:
        run = _elsewhere("paged_attention", query, (key_format, value_format), (query.shape[3], value_dim))
        other: Tensor = run(
            query, key_pages, value_pages, block_table, length, key_format, value_format, **given
        )
        return other
    planned = plan(
        query,
        key_pages,
        value_pages,
        key_format,
        value_format,
        table=block_table,
        length=length,
        **given,
    )
    return _run(query, planned)
