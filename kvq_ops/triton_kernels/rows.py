"""Where the tokens of a tile lie, and loading what lies there, inside of kernels.

A tile's place is a tuple ``(row, head, slot, rel, live)``: the batch row or page, int64, one for all tokens or, where they are
``SCATTERED``, one for each; the kv head; the first token of the tile in its row; tokens relative to that, int64 ``[BN]``; and
which of them to read, bool ``[BN]`` (others give zeros), which counts with ``BOUND`` only.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "at_rows",
    "find_rows",
    "load_groups",
    "load_rows",
    "load_tokens",
    "spread_groups",
    "spread_tokens",
]


@triton.jit
def find_rows(block_table, t_b, t_n, b, start, n, live, PAGE: tl.constexpr, SCATTERED: tl.constexpr):
    """Where tokens ``start + n`` of sequence ``b`` lie: row, first slot, and tokens relative to it.

    ``SCATTERED``: looked up for each of them, where ``live``; otherwise a page holds a whole tile.
    """
    if PAGE == 0:
        return b, start, n
    elif SCATTERED:
        token = start + n
        page = tl.load(block_table + b * t_b + (token // PAGE) * t_n, mask=live, other=0).to(tl.int64)
        return page, start * 0, token % PAGE
    else:
        page = tl.load(block_table + b * t_b + (start // PAGE) * t_n).to(tl.int64)
        return page, start % PAGE, n


@triton.jit
def at_rows(plane, place, SCATTERED: tl.constexpr):
    """Pointers ``[BN]`` to what a plane holds for the tokens of a tile."""
    ptr, b, h, t = plane
    row, head, slot, rel, live = place
    if SCATTERED:
        return ptr + (row * b + head * h + rel * t)
    else:
        return (ptr + (row * b + head * h + slot * t)) + rel * t


@triton.jit
def load_rows(rows, live, COUNT: tl.constexpr, PADDED: tl.constexpr, STEP: tl.constexpr, BOUND: tl.constexpr):
    """``[BN, PADDED]``: every ``STEP``-th of ``COUNT * STEP`` items of each row, zeros beyond."""
    column = tl.arange(0, PADDED)
    at = rows[:, None] + (column * STEP)[None, :]
    if BOUND and COUNT != PADDED:
        return tl.load(at, mask=live[:, None] & (column < COUNT)[None, :], other=0)
    elif BOUND:
        return tl.load(at, mask=live[:, None], other=0)
    elif COUNT != PADDED:
        return tl.load(at, mask=(column < COUNT)[None, :], other=0)
    else:
        return tl.load(at)


@triton.jit
def load_tokens(rows, live, BOUND: tl.constexpr):
    if BOUND:
        return tl.load(rows, mask=live, other=0)
    else:
        return tl.load(rows)


@triton.jit
def load_groups(
    rows,
    live,
    DIM: tl.constexpr,
    DT: tl.constexpr,
    CHANNELS: tl.constexpr,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    WHOLE: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Parameters of groups of channels: ``[BN, groups]``, or for groups that are no power of two ``[BN, DT]``."""
    if WHOLE:
        return load_rows(rows, live, COUNT, PADDED, 1, BOUND)
    else:
        channel = tl.arange(0, DT)
        inside = (channel < DIM)[None, :]
        if BOUND:
            inside = inside & live[:, None]
        return tl.load(rows[:, None] + (channel // CHANNELS)[None, :], mask=inside, other=0)


@triton.jit
def spread_groups(x, ROWS: tl.constexpr, GROUPS: tl.constexpr, EACH: tl.constexpr):
    """``[ROWS, GROUPS]`` repeated along channels, ``[ROWS, GROUPS * EACH]``; without an index for each channel."""
    return tl.reshape(tl.broadcast_to(x[:, :, None], (ROWS, GROUPS, EACH)), (ROWS, GROUPS * EACH))


@triton.jit
def spread_tokens(x, GROUPS: tl.constexpr, EACH: tl.constexpr, DT: tl.constexpr):
    """``[GROUPS, DT]`` repeated along tokens, ``[GROUPS * EACH, DT]``."""
    return tl.reshape(tl.broadcast_to(x[:, None, :], (GROUPS, EACH, DT)), (GROUPS * EACH, DT))
