"""``append_`` and ``paged_append_``: tokens into a store, each coded by itself.

One kernel writes every format whose tokens do not share scales with others: rows of ``x`` are loaded once, turned, rotated and
relieved of outliers as the format says, coded, packed and stored. A static scale that is unset is fitted before, by a kernel that
does nothing once the scale is there, so that no launch depends on values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import Format
from ..registry import implementations
from . import spec as _spec
from .fit import fit
from .launching import callable_of
from .places import load_numbers, pair, settle, spread
from .rules import encode_tile, store_codes
from .shapes import angles, index_args, power, rows_of_a_program, rule_numbers, vector_numbers, warps
from .spec import Spec, plane_args, plane_of, spec_of
from .vectors import prepared, take_outliers

__all__ = ["append_", "paged_append_"]

COPY = tl.constexpr(_spec.COPY)
CODEBOOK = tl.constexpr(_spec.CODEBOOK)
NVFP4 = tl.constexpr(_spec.NVFP4)


@triton.jit
def append_rows(
    X, x_b, x_h, x_t, x_d,
    POSITION, position_b, position_t,
    TABLE, table_b, table_n,
    COS, SIN, angle_b, angle_t,
    CODES, codes_b, codes_h, codes_t, codes_d,
    SCALE, scale_b, scale_h, scale_t, scale_d,
    OUTER, outer_b, outer_h, outer_t, outer_d,
    MINIMUM, minimum_b, minimum_h, minimum_t, minimum_d,
    ZERO, zero_b, zero_h, zero_t, zero_d,
    BOOK, book_b, book_h, book_t, book_d,
    PLACE, place_b, place_h, place_t, place_d,
    INDEX, index_b, index_h, index_t, index_d,
    VALUE, value_b, value_h, value_t, value_d,
    RING, ring_b, ring_h, ring_t, ring_d,
    CODED, coded_b, coded_h, coded_t, coded_d,
    LENGTH, length_b, length_h, length_t, length_d,
    rows, count, heads, capacity, limit, appended,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, WIDE: tl.constexpr,
    WHOLE: tl.constexpr, REGROUP: tl.constexpr,
    ROTARY: tl.constexpr, ROTATION: tl.constexpr, LOG: tl.constexpr, NORM: tl.constexpr, ROOT: tl.constexpr,
    OUTLIERS: tl.constexpr, CENTRED: tl.constexpr, LARGEST_VALUE: tl.constexpr,
    RULE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, STATIC: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, PARAMETER: tl.constexpr, LARGEST: tl.constexpr,
    HAS_POSITION: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr, COUNTS: tl.constexpr,
):  # fmt: skip
    """Code ``ROWS`` pairs of a head and a token, each in ``SPANS`` (a power of two) groups of ``SPAN`` channels."""
    WINDOWED: tl.constexpr = WINDOW > 0
    M: tl.constexpr = ROWS * SPANS
    item = tl.arange(0, M)
    r = tl.program_id(0) * ROWS + (tl.arange(0, ROWS) if WHOLE else item // SPANS)
    b, h, i = pair(r, count, heads)
    live = r < rows
    to = b.to(tl.int64)
    given = tl.load(POSITION + to * position_b + i.to(tl.int64) * position_t, mask=live, other=-1)
    held = tl.load(LENGTH + to * length_b, mask=live, other=0)
    coded = tl.load(CODED + to * coded_b, mask=live, other=0)
    position, start, live = settle(
        i, live, given, held, coded, limit, appended, HAS_POSITION, WINDOWED, RECENT, 1, False
    )  # fmt: skip
    slot = position
    if PAGED:
        at = to * table_b + (position // capacity) * table_n
        to = tl.load(TABLE + at, mask=live, other=-1).to(tl.int64)
        slot = position % capacity
        live = live & (to >= 0)
    g = item % SPANS
    member = tl.arange(0, WIDE)
    channel = g[:, None] * SPAN + member[None, :]
    valid = (member < SPAN)[None, :] & (channel < DIM)
    if WHOLE:
        x = prepared(
            b, h, i, position, start, live, X, x_b, x_h, x_t, x_d, RING, ring_b, ring_h, ring_t, ring_d,
            COS, SIN, angle_b, angle_t, ROWS, WIDTH, DIM, WINDOW, ROTARY, ROTATION, LOG, NORM,
        )  # fmt: skip
        if OUTLIERS:
            wide = tl.arange(0, WIDTH)
            centre = x
            half_range = x
            if CENTRED == 2:
                there = live[:, None] & (wide < DIM)[None, :]
                at = h[:, None] * minimum_h + wide[None, :] * minimum_d
                centre = tl.load(MINIMUM + at, mask=there, other=0.0).to(tl.float32)
                at = h[:, None] * scale_h + wide[None, :] * scale_d
                half_range = tl.load(SCALE + at, mask=there, other=1.0).to(tl.float32)
            x = take_outliers(
                x, wide, centre, half_range, INDEX, VALUE,
                to * index_b + h.to(tl.int64) * index_h + slot * index_t,
                to * value_b + h.to(tl.int64) * value_h + slot * value_t,
                index_d, value_d, live, OUTLIERS, CENTRED, DIM, WIDTH, LARGEST_VALUE, True,
            )  # fmt: skip
        if REGROUP:
            pick = tl.arange(0, SPANS * WIDE)
            pick = tl.minimum(pick // WIDE * SPAN + pick % WIDE, WIDTH - 1)
            x = tl.gather(x, tl.broadcast_to(pick[None, :], (ROWS, SPANS * WIDE)), 1)
        x = tl.reshape(x, (M, WIDE))
        # From here on a row for each group.
        h, to, slot = spread(h, ROWS, SPANS), spread(to, ROWS, SPANS), spread(slot, ROWS, SPANS)
        position, live = spread(position, ROWS, SPANS), spread(live, ROWS, SPANS)
    else:
        x = load_numbers(
            b, h, i, position, start, channel, live[:, None] & valid, X, x_b, x_h, x_t, x_d,
            RING, ring_b, ring_h, ring_t, ring_d, WINDOW,
        )  # fmt: skip
    row = to * codes_b + h.to(tl.int64) * codes_h + slot * codes_t
    if RULE == COPY:
        store_codes(x, CODES + row, codes_d, DIM, live, M, WIDE, 8, DIM == WIDE)
    else:
        fixed = tl.zeros([M, 1], tl.float32)
        second = fixed
        if STATIC and RULE == CODEBOOK:
            at = h[:, None] * scale_h + channel * scale_d
            fixed = tl.load(SCALE + at, mask=live[:, None] & valid, other=0.0).to(tl.float32)
            at = h[:, None] * minimum_h + channel * minimum_d
            second = tl.load(MINIMUM + at, mask=live[:, None] & valid, other=0.0).to(tl.float32)
        elif STATIC:
            fixed = tl.load(SCALE + h * scale_h, mask=live, other=0.0)[:, None]
            if HAS_ZERO:
                second = tl.load(ZERO + h * zero_h, mask=live, other=0.0)[:, None]
        elif RULE == NVFP4:
            fixed = tl.load(OUTER + h * outer_h, mask=live, other=0.0)[:, None]
        codes, scale, minimum = encode_tile(
            x,
            valid,
            fixed,
            second,
            BOOK,
            book_d,
            ROOT,
            RULE,
            CODE,
            BITS,
            STATIC,
            HAS_ZERO,
            PARAMETER,
            LARGEST,
        )
        # Groups have whole bytes, where there is more than one. The product tells the compiler how addresses are aligned.
        first = g.to(tl.int64) * (SPAN * BITS // 8)
        kept = live & (g * SPAN < DIM)
        members = tl.minimum(DIM - g * SPAN, SPAN)[:, None]
        WHOLE_ROWS: tl.constexpr = DIM % SPAN == 0 and SPAN == WIDE
        store_codes(codes, CODES + row + first * codes_d, codes_d, members, kept, M, WIDE, BITS, WHOLE_ROWS)
        if not STATIC:
            at = to * scale_b + h.to(tl.int64) * scale_h + slot * scale_t + g.to(tl.int64) * scale_d
            tl.store(SCALE + at, scale.to(SCALE.dtype.element_ty), mask=kept)
            if HAS_MINIMUM:
                at = (
                    to * minimum_b
                    + h.to(tl.int64) * minimum_h
                    + slot * minimum_t
                    + g.to(tl.int64) * minimum_d
                )
                tl.store(MINIMUM + at, minimum.to(MINIMUM.dtype.element_ty), mask=kept)
    once = live & (h == 0) & (g == 0)
    if ROTARY:
        # Zero stands for a slot that holds nothing.
        tl.store(PLACE + to * place_b + slot * place_t, (position + 1).to(tl.int32), mask=once)
    if COUNTS:
        # Most tiles lie in one row, for which one operation will do.
        here = tl.min(tl.where(once, to, 9223372036854775807), 0)
        longest = tl.max(tl.where(once & (to == here), slot + 1, 0), 0)
        tl.atomic_max(LENGTH + here * length_b, longest, mask=longest > 0)
        tl.atomic_max(LENGTH + to * length_b, slot + 1, mask=once & (to != here))


# ---------------------------------------------------------------------------------------------------------- launchers


def check_calibrated(op: str, store: Sequence[Tensor], fmt: Format, *args: Any) -> None:
    """Complain as the operator in plain torch does about a store that should have been calibrated and was not."""
    if not fmt.calibrated:
        return
    marker = store[fmt.static_planes[0]]
    if marker.device.type != "cpu":
        torch._assert_async((marker != 0).any(), f"a cache in format {fmt.name!r} was not calibrated")
    elif type(marker) is Tensor and not bool((marker != 0).any()):
        next(row for row in implementations(op) if row.name == "torch").run(store, *args, fmt)


def append_vectors(
    store: Sequence[Tensor],
    spec: Spec,
    x: Tensor,
    position: Tensor | None,
    table: Tensor | None,
    count: int,
    counts: bool,
    cos_sin: tuple[Tensor, Tensor, int, int] | None = None,
) -> None:
    """Launch what codes tokens by themselves.

    Args:
        count: tokens of each head that may be coded now.
        counts: whether the kernel keeps the lengths.
        cos_sin: from :func:`angles`, where keys are turned back.
    """
    batch, heads, appended, dim = x.shape
    where = (x, 0, 0) if position is None else index_args(position)
    if spec.windowed:
        where = (*where[:2], 0)  # the first of a row counts
    pages = (store[0], 0, 0) if table is None else index_args(table)
    capacity = store[0].shape[2]
    limit = capacity if table is None else capacity * table.shape[1]
    flags = {
        "HAS_POSITION": position is not None,
        "PAGED": table is not None,
        "WINDOW": spec.window,
        "RECENT": spec.recent,
    }
    fit(
        store,
        spec,
        x,
        where,
        pages,
        spec.window + appended if spec.windowed else count,
        capacity,
        limit,
        flags,
    )
    numbers = vector_numbers(spec, dim)
    span = (
        dim
        if spec.static_scale or not spec.scale_channels or spec.lossless
        else min(spec.scale_channels, dim)
    )
    wide = max(8, power(span))
    spans = power(triton.cdiv(dim, span))
    whole = bool(spec.rotation or spec.rotary or numbers["OUTLIERS"])
    regroup = whole and spans > 1 and span != wide
    if regroup:
        # As wide as the groups, so that moving numbers between them keeps the shape.
        numbers["WIDTH"] = spans * wide
    rows = batch * heads * count
    size = rows_of_a_program(rows, spans * wide)
    planes = plane_args(
        store,
        spec,
        (
            "codes", "scale", "outer", "minimum", "zero_point", "codebook", "position", "outlier_index", "outlier_value",
            "recent", "coded", "length",
        ),
    )  # fmt: skip
    turned = cos_sin if cos_sin is not None else (x, x, 0, 0)
    callable_of(append_rows)[(triton.cdiv(rows, size),)](
        x, *x.stride(), *where, *pages, *turned, *planes, rows, count, heads, capacity, limit, appended,
        ROWS=size, SPAN=span, SPANS=spans, WIDE=wide, WHOLE=whole,
        REGROUP=regroup, ROTARY=spec.rotary,
        COUNTS=counts, **numbers, **rule_numbers(spec, store, dim), **flags,
        num_warps=warps(size * spans * wide),
    )  # fmt: skip


def known_spec(fmt: Format) -> Spec:
    made = spec_of(fmt)
    assert isinstance(made, Spec), made
    return made


def append_(store: Sequence[Tensor], position: Tensor, x: Tensor, fmt: Format) -> None:
    """``kvq::append_``."""
    if x.numel() == 0:
        return
    spec = known_spec(fmt)
    check_calibrated("append_", store, fmt, position, x)
    if spec.windowed:
        from .window_append import append_window

        append_window(store, position, x, spec)
        return
    cos_sin = angles(position, plane_of(store, spec, "inv_freq")[0]) if spec.rotary else None
    append_vectors(store, spec, x, position, None, x.shape[2], True, cos_sin)


def paged_append_(
    pages: Sequence[Tensor], block_table: Tensor, position: Tensor, x: Tensor, fmt: Format
) -> None:
    """``kvq::paged_append_``."""
    if x.numel() == 0 or block_table.numel() == 0:
        return
    spec = known_spec(fmt)
    check_calibrated("paged_append_", pages, fmt, block_table, position, x)
    cos_sin = angles(position.clamp_min(0), plane_of(pages, spec, "inv_freq")[0]) if spec.rotary else None
    append_vectors(pages, spec, x, position, block_table, x.shape[2], True, cos_sin)
