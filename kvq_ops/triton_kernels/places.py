"""Where the tokens of an append come from and where they go, inside of Triton kernels.

Rows of a tile are pairs of a head and a token. A plain append writes token ``i`` of ``x`` to the slot that its position says, a
paged one to the page that a table holds for it. Behind a window (``kvq_ops.window``) those tokens are coded that have become old:
some wait in the ring, others have only now come.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["load_numbers", "pair", "settle", "spread", "window_row"]


@triton.jit
def window_row(given, held, coded, appended, RECENT: tl.constexpr, GROUP: tl.constexpr):
    """Of rows behind a window, int64: where the append starts, how many tokens stay coded once the row is rolled back to
    there, and how many will be coded.

    Args:
        given: first position of the append.
        held, coded: tokens that the row holds, and those of them that are coded.
    """
    start = given.to(tl.int64)
    reopened = tl.minimum(coded, tl.minimum(start, held) // GROUP * GROUP)
    target = tl.maximum(start + appended - RECENT, 0) // GROUP * GROUP
    return start, reopened, tl.maximum(reopened, target)


@triton.jit
def pair(r, count, heads):
    """Rows ``r`` of an append, tokens fastest, then heads: batch, head, and number of the token."""
    return r // (count * heads), (r // count) % heads, r % count


@triton.jit
def spread(x, ROWS: tl.constexpr, EACH: tl.constexpr):
    """A number of each of ``ROWS`` rows, ``EACH`` times."""
    if EACH == 1:
        return x
    else:
        return tl.reshape(tl.broadcast_to(x[:, None], (ROWS, EACH)), (ROWS * EACH,))


@triton.jit
def settle(
    i,
    live,
    given,
    held,
    coded,
    limit,
    appended,
    HAS_POSITION: tl.constexpr,
    WINDOWED: tl.constexpr,
    RECENT: tl.constexpr,
    GROUP: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """Where tokens ``i`` of rows go.

    This takes what kernels load rather than pointers, so that each kernel has the same three loads. torch finds what a kernel
    writes by going from the addresses it stores to back to its arguments: it stops at a load, but at a call it goes on to all
    that is passed, and never looks at what the function makes of it. A function that loaded positions would have them, the
    table and the counts copied at each launch, as if they were written. Loads whose result is not used are compiled away.

    Args:
        given: position of each token, any integers; behind a window that of the first.
        held, coded: as for :func:`window_row`.
        limit: tokens that a row has room for.
        appended: tokens of ``x``.
        HAS_POSITION: otherwise token ``i`` goes to slot ``i``.
        KNOWN: behind a window, all tokens that are not coded yet, and not only those that have become old.

    Returns:
        position, start of ``x`` behind a window, and whether the token is written.
    """
    position = (given if HAS_POSITION else i).to(tl.int64)
    start = position * 0
    if WINDOWED:
        start, reopened, target = window_row(given, held, coded, appended, RECENT, GROUP)
        position = reopened + i
        live = live & (position < (start + appended if KNOWN else target))
    live = live & (position >= 0)
    if not KNOWN:
        # The operator checks what it can; here nothing leaves its tensor.
        live = live & (position < limit)
    return position, start, live


@triton.jit
def load_numbers(
    b,
    h,
    i,
    position,
    start,
    channel,
    mask,
    X,
    x_b,
    x_h,
    x_t,
    x_d,
    RING,
    ring_b,
    ring_h,
    ring_t,
    ring_d,
    WINDOW: tl.constexpr,
):
    """fp32 values of tokens, ``channel`` and ``mask`` broadcastable to the result; zero where masked."""
    row = b.to(tl.int64) * x_b + h.to(tl.int64) * x_h
    if WINDOW == 0:
        at = (row + i.to(tl.int64) * x_t)[:, None] + channel.to(tl.int64) * x_d
        return tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    else:
        fresh = (position >= start)[:, None]
        at = (row + (position - start) * x_t)[:, None] + channel.to(tl.int64) * x_d
        new = tl.load(X + at, mask=mask & fresh, other=0.0).to(tl.float32)
        row = b.to(tl.int64) * ring_b + h.to(tl.int64) * ring_h + position % WINDOW * ring_t
        at = row[:, None] + channel.to(tl.int64) * ring_d
        old = tl.load(RING + at, mask=mask & (position < start)[:, None], other=0.0).to(tl.float32)
        return tl.where(fresh, new, old)
