"""``kvq::attention`` and ``kvq::paged_attention`` by Triton kernels.

Precision. For fp32 queries everything is fp32, dot products included (``ieee``), and results lie within fp32 rounding of float64
attention over the decoded store. For fp16 and bf16 queries, numbers and weights meet tensor cores in fp16 (plainly stored bf16
under bf16 queries: in bf16) and sums are fp32. There

* queries are exact unless they are rotated: bf16 has fewer bits than fp16, and a power of two brings each row into range;
* integers, float8 and blocks of fp4 are exact as well, because scales of a token stay outside of the dot products. Where channels
  have scales of their own a number is rounded at most four times, to ``2**-11`` of its parts, and what was stored exactly once;
* weights are rounded once, to ``2**-11``, after they were brought up to where fp16 loses nothing.

How far scores, weights and the result can move by that follows from the data; ``tests/triton/attention_bound.py`` computes it,
and tests hold results to it. A prefill of many queries decodes the store once, into the dtype of the query, which rounds it once
more.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from ..formats import Format, get_format
from ..options import Options
from . import spec as _spec
from .attention_kernel import attend_kernel
from .configs import config_for, padded, processors, target
from .dequantize import dense
from .launching import callable_of
from .merge import CHUNK, merge_kernel
from .rotate import rotated
from .sides import rotation_log, side_args
from .spec import Spec, spec_of

__all__ = ["attention", "count_splits", "paged_attention", "whole_waves"]

_DECODE_ROWS = 64
"""Up to so many query rows of a kv head count as decoding."""
_MOST_SPLITS = 128
_DENSE_ROWS = 512
"""From so many on, what is stored is decoded once, into the dtype of the query, instead of once for each block of rows."""


def _served(fmt: Format) -> Spec:
    spec = spec_of(fmt)
    assert isinstance(spec, Spec), spec
    return spec


_PLAIN = _served(get_format("none"))


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
    """``kvq::attention``; arguments were checked. Positions and lengths are read by the kernels only."""
    key, value = _served(key_format), _served(value_format)
    value_dim = value_format.logical_shape(value_store)[3]
    tokens, length, options = key_store[0].shape[2], key_store[-1], Options(**given)
    return _attention(
        query, key_store, value_store, key, value, value_dim, tokens, None, length, options, use_length
    )


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
    """``kvq::paged_attention``; arguments were checked."""
    key, value = _served(key_format), _served(value_format)
    value_dim = value_format.logical_shape(value_pages)[3]
    tokens = block_table.shape[1] * key_pages[0].shape[2]
    options = Options(**given)
    return _attention(
        query, key_pages, value_pages, key, value, value_dim, tokens, block_table, length, options, True
    )


def _computed_in(spec: Spec, store: Sequence[Tensor], dtype: torch.dtype) -> int:
    """0 for fp32, 1 for fp16, 2 for bf16."""
    if dtype is torch.float32:
        return 0
    if spec.code != _spec.EXACT:
        return 1
    stored = store[0].dtype
    if stored is torch.bfloat16 and dtype is torch.bfloat16:
        return 2
    return 1 if stored in (torch.float16, torch.bfloat16) else 0


def _has_low(spec: Spec) -> int:
    """Whether tiles come with something to add for each token."""
    return int(spec.has_minimum and not spec.static_scale and spec.scale_channels == 0 and not spec.percent)


def _is_uniform(spec: Spec, compute: int, store: Sequence[Tensor]) -> int:
    """Whether the factor of a tile is the same for all tokens."""
    if spec.windowed or spec.rotary or spec.percent:
        return 0
    if spec.code == _spec.EXACT:
        return int(compute != 1 or store[0].dtype is torch.float16)
    if spec.scale_kind == _spec.SCALE_E4M3:
        return int(compute != 0)
    return spec.static_scale


def count_splits(programs: int, blocks: int, slots: int) -> int:
    """Into how many parts the tokens are cut.

    As few as fill the processors nearly as well as possible: the smallest number within 85 % of the best efficiency of waves,
    after FlashAttention. While a graph is traced that is to serve other sizes too, the sizes are symbols, and the result is an
    expression of them: to look for a number would bind the graph to the sizes at hand.

    Args:
        programs: there are without cutting.
        blocks: of tokens, allocated.
        slots: programs that run at the same time.
    """
    if type(programs) is not int:
        wanted = whole_waves(programs, slots)
    elif type(blocks) is int:
        return _best_splits(programs, blocks, slots)
    elif (wanted := _best_splits(programs, 2 * _MOST_SPLITS, slots)) == 1:
        return 1
    return torch.sym_max(1, torch.sym_min(wanted, blocks // 2))


def whole_waves(programs: int, slots: int) -> int:
    """:func:`count_splits` as arithmetic, for as many blocks as one likes.

    ``n`` parts that fit into ``w`` waves, of which one more would not, leave less than ``programs / (w * slots)`` of the
    processors without work; with ``w > 6 * programs / slots`` less than a sixth. There is one part where four fifths have work
    without cutting.
    """
    waves = 1 + programs * 6 // slots
    idle = 1 - torch.sym_min(1, programs * 5 // (slots * 4))
    return torch.sym_max(1, torch.sym_min(waves * slots // programs * idle, min(_MOST_SPLITS, slots)))


@functools.cache
def _best_splits(programs: int, blocks: int, slots: int) -> int:
    if programs * 5 >= slots * 4 or blocks <= 2:
        return 1
    most = min(_MOST_SPLITS, max(1, blocks // 2), max(1, slots))

    def efficiency(splits: int) -> float:
        waves = programs * splits / slots
        return waves / -(-programs * splits // slots)

    best = max(efficiency(n) for n in range(1, most + 1))
    return next(n for n in range(1, most + 1) if efficiency(n) >= 0.85 * best)


def _attention(
    query: Tensor,
    key_store: Sequence[Tensor],
    value_store: Sequence[Tensor],
    key: Spec,
    value: Spec,
    value_dim: int,
    tokens: int,
    block_table: Tensor | None,
    length: Tensor,
    options: Options,
    use_length: bool,
) -> Tensor:
    mask, causal, scale, window, softcap, sinks = options
    batch, heads, queries, dim = query.shape
    kv_heads = key_store[0].shape[1]
    out = query.new_empty((batch, heads, queries, value_dim))
    if out.numel() == 0:
        return out
    if tokens == 0:
        return out.zero_()
    group = heads // kv_heads
    rows = group * queries
    if rows >= _DENSE_ROWS and query.dtype is not torch.float32 and not (key.lossless and value.lossless):
        filled = length if use_length else None
        keys, values = (
            [dense(store, spec, query.dtype, width, block_table=block_table, length=filled), length]
            for store, spec, width in ((key_store, key, dim), (value_store, value, value_dim))
        )
        return _attention(
            query, keys, values, _PLAIN, _PLAIN, value_dim, tokens, None, length, options, use_length
        )
    key_compute = _computed_in(key, key_store, query.dtype)
    value_compute = _computed_in(value, value_store, query.dtype)
    kind = "decode" if rows <= _DECODE_ROWS else "prefill"
    where = target()
    config = config_for(kind, key, value, max(dim, value_dim), rows, query.dtype, where)
    block_m, block_n = config["block_m"], config["block_n"]
    row_blocks = -(-rows // block_m)
    page = 0 if block_table is None else key_store[0].shape[2]

    splits = 1
    if kind == "decode":
        slots = config.get("slots", 2) * processors(query.device)
        splits = count_splits(batch * kv_heads * row_blocks, -(-tokens // block_n), slots)
    turns = value.rotation if value.folds_rotation else 0
    # A number that the graph finds out may be one, which needs no merging but comes through it.
    parted = type(splits) is not int or splits > 1 or turns > 0
    parts, states = out, out
    if parted:
        # In one axis, since several of which one might have one element would bind the graph to whether it has.
        pieces = batch * heads * queries * splits
        parts = out.new_empty(pieces * value_dim, dtype=torch.float32)
        states = out.new_empty(pieces * 2, dtype=torch.float32)

    exact_query = query.dtype is torch.float16
    if key.folds_rotation:
        query, exact_query = rotated(query, key.rotation), False
    mask_kind, mask_strides = 0, (0, 0, 0, 0)
    if mask is not None:
        mask_kind = 1 if mask.dtype is torch.bool else 2
        missing = 4 - mask.dim()
        steps = [0 if size == 1 else step for size, step in zip(mask.shape, mask.stride(), strict=True)]
        mask_strides = (*(0,) * missing, *steps)  # type: ignore[assignment]
    table_strides = (0, 0) if block_table is None else block_table.stride()
    key_args, key_packed = side_args(key_store, key, dim)
    value_args, value_packed = side_args(value_store, value, value_dim)
    callable_of(attend_kernel)[(row_blocks * splits, kv_heads, batch)](
        query,
        *query.stride(),
        parts,
        states,
        query if mask is None else mask,
        *mask_strides,
        query if sinks is None else sinks,
        0 if sinks is None else sinks.stride(0),
        length if block_table is None else block_table,
        *table_strides,
        length if length.is_contiguous() else length.contiguous(),
        *key_args,
        *value_args,
        float(dim**-0.5 if scale is None else scale),
        float(softcap or 1.0),
        heads,
        queries,
        tokens,
        splits,
        window,
        key.window,
        key.sinks,
        value.window,
        value.sinks,
        CAUSAL=int(causal),
        WINDOW=int(window > 0),
        SOFTCAP=int(softcap > 0),
        MASK=mask_kind,
        SINKS=int(sinks is not None and not parted),
        USE_LENGTH=int(use_length),
        PAGE=page,
        GROUP=group,
        DIM=dim,
        DT=padded(dim),
        VDIM=value_dim,
        VDT=padded(value_dim),
        KEY=key_packed,
        VALUE=value_packed,
        KC=key_compute,
        VC=value_compute,
        KLOW=_has_low(key),
        VLOW=_has_low(value),
        VUNIFORM=_is_uniform(value, value_compute, value_store),
        QNORM=int(not exact_query),
        SPLIT=int(parted),
        ASM=int(where[0] == "cuda"),
        NATIVE=int(where[0] == "cuda" and where[1] >= 89),
        BM=block_m,
        BN=block_n,
        STAGES=config["num_stages"],
        num_warps=config["num_warps"],
    )
    if parted:
        callable_of(merge_kernel)[(batch * heads * queries,)](
            parts,
            states,
            query if sinks is None else sinks,
            out,
            0 if sinks is None else sinks.stride(0),
            splits,
            heads,
            queries,
            SINKS=int(sinks is not None),
            ROTATION=turns,
            DIM=value_dim,
            DT=triton.next_power_of_2(value_dim),
            LOG=rotation_log(value_dim),
            CHUNK=CHUNK,
            num_warps=2,
        )
    return out
