"""``kvq::dequantize`` by a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from .configs import config_for, padded, target
from .launching import callable_of
from .rotary import turn_steps
from .rows import find_rows
from .sides import CHANNELS_AT, MINIMUM_AT, side_args
from .spec import Spec, spec_of
from .tiles import load_any

__all__ = ["dense", "dequantize"]


@triton.jit
def dequantize_kernel(
    out,
    codes, c_b, c_h, c_t, scale, s_b, s_h, s_t, outer, minimum, m_b, m_h, m_t, zero, z_h, codebook, inv_freq,
    position, p_b, p_t, index, i_b, i_h, i_t, value, v_b, v_h, v_t, recent, r_b, r_h, r_t, first, f_b, f_h, f_t,
    coded, held, block_table, t_b, t_n, length, heads, tokens, window, first_tokens,
    PAGE: tl.constexpr, LENGTH: tl.constexpr, LARGEST: tl.constexpr, SPEC: tl.constexpr, DIM: tl.constexpr, DT: tl.constexpr,
    ASM: tl.constexpr, NATIVE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of ``BN`` tokens of one row and head to ``out [B, H, T, D]``, contiguous.

    With ``PAGE`` a row is a sequence of ``block_table``; with ``LENGTH`` nothing is written from its length on. ``LARGEST`` is
    the largest number of ``out``, which is written in place of infinity.
    """
    start = tl.program_id(0).to(tl.int64) * BN
    head = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    turns = turn_steps(inv_freq, scale + head * s_h, minimum + head * m_h, codebook, DIM, DT, SPEC)
    side = (
        (codes, c_b, c_h, c_t), (scale, s_b, s_h, s_t), outer, (minimum, m_b, m_h, m_t), (zero, z_h), codebook, turns,
        (position, p_b, 0, p_t), (index, i_b, i_h, i_t), (value, v_b, v_h, v_t), (recent, r_b, r_h, r_t),
        (first, f_b, f_h, f_t), coded, held,
    )  # fmt: skip
    n = tl.arange(0, BN).to(tl.int64)
    channel = tl.arange(0, DT)
    end = tl.full((), 0, tl.int64) + tokens
    if LENGTH:
        end = tl.minimum(tl.load(length + b).to(tl.int64), end)
    SCATTERED: tl.constexpr = PAGE != 0
    tile: tl.constexpr = (DIM, DT, BN, SPEC, 0, ASM, NATIVE, SCATTERED)
    if start < end:
        live = start + n < end
        row, slot, rel = find_rows(block_table, t_b, t_n, b, start, n, live, PAGE, SCATTERED)
        numbers, factor, low = load_any(
            side, (row, head, slot, rel, live), window, first_tokens, tile, False
        )  # fmt: skip
        x = numbers * factor[:, None]
        LOW: tl.constexpr = ((SPEC >> MINIMUM_AT.value) & 1) and ((SPEC >> CHANNELS_AT.value) & 2047) == 0
        if LOW:
            x += low[:, None]
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        at = out + ((b * heads + head) * tokens + start) * DIM + (n * DIM)[:, None] + channel[None, :]
        tl.store(at, x.to(out.dtype.element_ty), mask=live[:, None] & (channel < DIM)[None, :])


def dequantize(store: Sequence[Tensor], fmt: Format, dtype: torch.dtype) -> Tensor:
    """``kvq::dequantize``: ``[B, H, T, D]`` in ``dtype``, contiguous. Arguments were checked.

    The arithmetic is that of ``kvq_ops.codecs``; a compiler may join a product and a sum into one rounding.
    """
    if fmt.lossless:
        return store[0].to(dtype, copy=True, memory_format=torch.contiguous_format)
    spec = spec_of(fmt)
    assert isinstance(spec, Spec), spec
    return dense(store, spec, dtype, fmt.logical_shape(store)[3])


def dense(
    store: Sequence[Tensor],
    spec: Spec,
    dtype: torch.dtype,
    dim: int,
    *,
    block_table: Tensor | None = None,
    length: Tensor | None = None,
) -> Tensor:
    """The same of a format in numbers; of a pool of pages the sequences of a table. As far as lengths go, if there are any: what
    lies beyond is not written.
    """
    batch, heads, tokens = store[0].shape[:3]
    page = 0
    if block_table is not None:
        page, batch, tokens = tokens, block_table.shape[0], block_table.shape[1] * tokens
    out = store[0].new_empty((batch, heads, tokens, dim), dtype=dtype)
    if out.numel() == 0:
        return out
    where = target()
    config = config_for("dequantize", spec, spec, dim, 1, dtype, where)
    block = config["block_n"]
    args, packed = side_args(store, spec, dim)
    callable_of(dequantize_kernel)[(-(-tokens // block), heads, batch)](
        out,
        *args,
        store[-1] if block_table is None else block_table,
        *((0, 0) if block_table is None else block_table.stride()),
        store[-1] if length is None else length,
        heads,
        tokens,
        spec.window,
        spec.sinks,
        PAGE=page,
        LENGTH=int(length is not None),
        LARGEST=torch.finfo(dtype).max,
        SPEC=packed,
        DIM=dim,
        DT=padded(dim),
        ASM=int(where[0] == "cuda"),
        NATIVE=int(where[0] == "cuda" and where[1] >= 89),
        BN=block,
        num_warps=config["num_warps"],
    )
    return out
