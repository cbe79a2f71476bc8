"""Appending behind a window of exact tokens: ``kvq_ops.window`` in kernels.

An append is a few launches, since each reads what the next one overwrites: a group that is cut through by rolling back is decoded
into the ring; tokens that have become old are coded, from the ring and from ``x``; the new tokens go into the ring; the counts
follow. How many tokens do any of that, each kernel works out from the counts: a launch that has nothing to do ends at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import spec as _spec
from .append import append_vectors
from .floats import product
from .launching import callable_of
from .numbers import channel_signs, hadamard
from .places import pair, settle, window_row
from .rules import encode_tile, store_codes
from .shapes import (
    angles,
    index_args,
    power,
    rows_of_a_program,
    rule_numbers,
    tile_rows,
    vector_numbers,
    warps,
)
from .spec import Spec, plane_args, plane_of
from .vectors import prepared, take_outliers

__all__ = ["append_window"]

SIGNED = tl.constexpr(_spec.SIGNED)


@triton.jit
def reopen_group(
    POSITION, position_b,
    CODES, codes_b, codes_h, codes_t, codes_d,
    SCALE, scale_b, scale_h, scale_t, scale_d,
    MINIMUM, minimum_b, minimum_h, minimum_t, minimum_d,
    INDEX, index_b, index_h, index_t, index_d,
    VALUE, value_b, value_h, value_t, value_d,
    SINKS, sinks_b, sinks_h, sinks_t, sinks_d,
    RING, ring_b, ring_h, ring_t, ring_d,
    CODED, coded_b, coded_h, coded_t, coded_d,
    LENGTH, length_b, length_h, length_t, length_d,
    heads, appended,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATION: tl.constexpr, LOG: tl.constexpr, NORM: tl.constexpr,
    OUTLIERS: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr, FIRST: tl.constexpr, LARGEST_EXACT: tl.constexpr,
):  # fmt: skip
    """Tokens of a group that rolling back cuts through go back to the ring as what they read as (``FIRST`` sinks as they are)."""
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = (tl.program_id(0) // heads).to(tl.int64)
    start, reopened, _ = window_row(
        tl.load(POSITION + b * position_b),
        tl.load(LENGTH + b * length_b),
        tl.load(CODED + b * coded_b),
        appended,
        RECENT,
        GROUP,
    )
    coded = tl.load(CODED + b * coded_b)
    end = tl.minimum(coded, tl.minimum(start, tl.load(LENGTH + b * length_b)))
    channel = tl.arange(0, WIDTH)
    inside = channel < DIM
    block = tl.program_id(1) * ROWS
    if reopened + block < end:
        token = reopened + block + tl.arange(0, ROWS)
        live = token < end
        mask = live[:, None] & inside[None, :]
        row = CODES + b * codes_b + h * codes_h + token * codes_t
        bit = channel * BITS
        low = (
            tl.load(row[:, None] + (bit // 8).to(tl.int64)[None, :] * codes_d, mask=mask, other=0).to(
                tl.int32
            )
            & 255
        )
        code = low >> (bit % 8)[None, :]
        if BITS == 3:
            # Codes that straddle two bytes.
            split = mask & (bit % 8 > 5)[None, :]
            high = tl.load(
                row[:, None] + (bit // 8 + 1).to(tl.int64)[None, :] * codes_d, mask=split, other=0
            ).to(tl.int32)
            code = code | (high << (8 - bit % 8)[None, :])
        code = code & ((1 << BITS) - 1)
        if CODE == SIGNED:
            HALF: tl.constexpr = 1 << (BITS - 1)
            code = (code ^ HALF) - HALF
        at = b * scale_b + h * scale_h + reopened // GROUP * scale_t + channel * scale_d
        scale = tl.load(SCALE + at, mask=inside, other=0.0).to(tl.float32)
        x = product(code.to(tl.float32), scale[None, :])
        if HAS_MINIMUM:
            at = b * minimum_b + h * minimum_h + reopened // GROUP * minimum_t + channel * minimum_d
            x = x + tl.load(MINIMUM + at, mask=inside, other=0.0).to(tl.float32)[None, :]
        x = tl.where(mask, x, 0.0)
        for k in range(OUTLIERS):
            index = tl.load(
                INDEX + b * index_b + h * index_h + token * index_t + k * index_d, mask=live, other=0
            )
            value = tl.load(
                VALUE + b * value_b + h * value_h + token * value_t + k * value_d, mask=live, other=0.0
            )
            x = tl.where(channel[None, :] == index.to(tl.int32)[:, None], value.to(tl.float32)[:, None], x)
        if ROTATION:
            x = product(hadamard(x, ROWS, WIDTH, LOG, 1.0), tl.full([1, 1], NORM, tl.float32))
            if ROTATION == 2:
                x = x * channel_signs(channel)[None, :]
        # A rotation of numbers near the largest may give NaN, which stays.
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST_EXACT), LARGEST_EXACT), x)
        x = x.to(RING.dtype.element_ty)
        if FIRST:
            exact = live & (token < FIRST)
            at = (b * sinks_b + h * sinks_h + token * sinks_t)[:, None] + channel.to(tl.int64)[
                None, :
            ] * sinks_d
            first = tl.load(SINKS + at, mask=exact[:, None] & inside[None, :], other=0.0)
            x = tl.where(exact[:, None], first.to(RING.dtype.element_ty), x)
        at = (b * ring_b + h * ring_h + token % WINDOW * ring_t)[:, None] + channel.to(tl.int64)[
            None, :
        ] * ring_d
        tl.store(RING + at, x, mask=mask)


@triton.jit
def prepare_rows(
    X, x_b, x_h, x_t, x_d,
    POSITION, position_b, position_t,
    INDEX, index_b, index_h, index_t, index_d,
    VALUE, value_b, value_h, value_t, value_d,
    RING, ring_b, ring_h, ring_t, ring_d,
    CODED, coded_b, coded_h, coded_t, coded_d,
    LENGTH, length_b, length_h, length_t, length_d,
    OUT, rows, count, heads, capacity, appended,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROTATION: tl.constexpr, LOG: tl.constexpr, NORM: tl.constexpr,
    OUTLIERS: tl.constexpr, CENTRED: tl.constexpr, LARGEST_VALUE: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Vectors that become old, as they are coded, to ``OUT`` fp32 ``[B, H, count, D]``: for scales that span tokens."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    b, h, i = pair(r, count, heads)
    live = r < rows
    to = b.to(tl.int64)
    given = tl.load(POSITION + to * position_b, mask=live, other=0)
    held = tl.load(LENGTH + to * length_b, mask=live, other=0)
    coded = tl.load(CODED + to * coded_b, mask=live, other=0)
    position, start, live = settle(
        i, live, given, held, coded, capacity, appended, True, True, RECENT, GROUP, False
    )  # fmt: skip
    slot = position
    x = prepared(
        b, h, i, position, start, live, X, x_b, x_h, x_t, x_d, RING, ring_b, ring_h, ring_t, ring_d,
        X, X, 0, 0, ROWS, WIDTH, DIM, WINDOW, False, ROTATION, LOG, NORM,
    )  # fmt: skip
    channel = tl.arange(0, WIDTH)
    if OUTLIERS:
        x = take_outliers(
            x, channel, x, x, INDEX, VALUE,
            to * index_b + h.to(tl.int64) * index_h + slot * index_t,
            to * value_b + h.to(tl.int64) * value_h + slot * value_t,
            index_d, value_d, live, OUTLIERS, CENTRED, DIM, WIDTH, LARGEST_VALUE, True,
        )  # fmt: skip
    at = r.to(tl.int64)[:, None] * DIM + channel[None, :]
    tl.store(OUT + at, x, mask=live[:, None] & (channel < DIM)[None, :])


@triton.jit
def append_groups(
    X, x_b, x_h, x_t, x_d,
    POSITION, position_b, position_t,
    CODES, codes_b, codes_h, codes_t, codes_d,
    SCALE, scale_b, scale_h, scale_t, scale_d,
    MINIMUM, minimum_b, minimum_h, minimum_t, minimum_d,
    RING, ring_b, ring_h, ring_t, ring_d,
    CODED, coded_b, coded_h, coded_t, coded_d,
    LENGTH, length_b, length_h, length_t, length_d,
    READY, ready_b, ready_h, ready_t, heads, capacity, appended,
    CHANNELS: tl.constexpr, DIM: tl.constexpr, MEMBERS: tl.constexpr, FROM_READY: tl.constexpr, ROOT: tl.constexpr,
    RULE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, HAS_MINIMUM: tl.constexpr, PARAMETER: tl.constexpr,
    LARGEST: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Code a group of ``GROUP`` tokens that has become old, ``CHANNELS`` channels of it, each with a scale of its own.

    Args:
        READY: vectors that were prepared, in place of the ring and ``x``.
        MEMBERS: ``GROUP`` as a power of two.
    """
    h = (tl.program_id(0) % heads).to(tl.int64)
    b = (tl.program_id(0) // heads).to(tl.int64)
    start, reopened, target = window_row(
        tl.load(POSITION + b * position_b),
        tl.load(LENGTH + b * length_b),
        tl.load(CODED + b * coded_b),
        appended,
        RECENT,
        GROUP,
    )
    first = reopened + tl.program_id(1).to(tl.int64) * GROUP
    if (first < target) & (first + GROUP <= capacity):
        channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
        member = tl.arange(0, MEMBERS)
        inside = channel < DIM
        valid = inside[:, None] & (member < GROUP)[None, :]
        wide = channel.to(tl.int64)[:, None]
        if FROM_READY:
            at = b * ready_b + h * ready_h + (first - reopened + member)[None, :] * ready_t + wide
            x = tl.load(READY + at, mask=valid, other=0.0)
        else:
            token = first + member
            fresh = (token >= start)[None, :]
            at = b * x_b + h * x_h + (token - start)[None, :] * x_t + wide * x_d
            new = tl.load(X + at, mask=valid & fresh, other=0.0).to(tl.float32)
            at = b * ring_b + h * ring_h + (token % WINDOW)[None, :] * ring_t + wide * ring_d
            old = tl.load(RING + at, mask=valid & (token < start)[None, :], other=0.0).to(tl.float32)
            x = tl.where(fresh, new, old)
        none = tl.zeros([CHANNELS, 1], tl.float32)
        codes, scale, minimum = encode_tile(
            x, valid, none, none, X, 0, ROOT, RULE, CODE, BITS, False, False, PARAMETER, LARGEST
        )
        slot = first // GROUP
        at = b * scale_b + h * scale_h + slot * scale_t + channel.to(tl.int64) * scale_d
        tl.store(SCALE + at, scale.to(SCALE.dtype.element_ty), mask=inside)
        if HAS_MINIMUM:
            at = b * minimum_b + h * minimum_h + slot * minimum_t + channel.to(tl.int64) * minimum_d
            tl.store(MINIMUM + at, minimum.to(MINIMUM.dtype.element_ty), mask=inside)
        row = CODES + b * codes_b + h * codes_h + (first + member) * codes_t
        before = tl.program_id(2).to(tl.int64) * (CHANNELS * BITS // 8)
        store_codes(
            tl.trans(codes), row + before * codes_d, codes_d, DIM - tl.program_id(2) * CHANNELS, member < GROUP,
            MEMBERS, CHANNELS, BITS, DIM % CHANNELS == 0,
        )  # fmt: skip


@triton.jit
def keep_exact(
    X, x_b, x_h, x_t, x_d,
    POSITION, position_b, position_t,
    SINKS, sinks_b, sinks_h, sinks_t, sinks_d,
    RING, ring_b, ring_h, ring_t, ring_d,
    CODED, coded_b, coded_h, coded_t, coded_d,
    LENGTH, length_b, length_h, length_t, length_d,
    rows, kept, heads, appended,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Write the newest ``kept`` tokens into the ring and the first ones to their places, then count them.

    Args:
        rows: pairs of a head and one of ``kept + FIRST`` tokens: the last of ``x``, then its first.
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    each = kept + FIRST
    i = r % each
    h = ((r // each) % heads).to(tl.int64)
    b = (r // (each * heads)).to(tl.int64)
    live = r < rows
    start = tl.load(POSITION + b * position_b, mask=live, other=0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    inside = (channel < DIM)[None, :]
    wide = channel.to(tl.int64)[None, :]
    newest = i < kept
    n = tl.where(newest, appended - kept + i, i - kept).to(tl.int64)
    token = start + n
    live = live & (n < appended) & (newest | (token < FIRST))
    at = (b * x_b + h * x_h + n * x_t)[:, None] + wide * x_d
    x = tl.load(X + at, mask=live[:, None] & inside, other=0.0)
    at = (b * ring_b + h * ring_h + token % WINDOW * ring_t)[:, None] + wide * ring_d
    tl.store(RING + at, _cast(x, RING.dtype.element_ty), mask=(live & newest)[:, None] & inside)
    if FIRST:
        at = (b * sinks_b + h * sinks_h + token * sinks_t)[:, None] + wide * sinks_d
        tl.store(SINKS + at, _cast(x, SINKS.dtype.element_ty), mask=(live & (i >= kept))[:, None] & inside)
    # Nothing else reads the counts in this launch: the token that ends the append brings them up to date.
    last = live & newest & (i == kept - 1) & (h == 0)
    _, _, target = window_row(
        tl.load(POSITION + b * position_b, mask=last, other=0),
        tl.load(LENGTH + b * length_b, mask=last, other=0),
        tl.load(CODED + b * coded_b, mask=last, other=0),
        appended,
        RECENT,
        GROUP,
    )
    tl.store(CODED + b * coded_b, target, mask=last)
    tl.store(LENGTH + b * length_b, start + appended, mask=last)


@triton.jit
def _cast(x, TO: tl.constexpr):
    if x.dtype == TO:
        return x
    else:
        return x.to(tl.float32).to(TO)


# ----------------------------------------------------------------------------------------------------------- launchers


def append_window(store: Sequence[Tensor], position: Tensor, x: Tensor, spec: Spec) -> None:
    """Append ``x [B, H, N, D]`` at ``position``, of which the first of each row counts: the others follow it."""
    group, appended, capacity = spec.scale_tokens, x.shape[2], store[0].shape[2]
    # All tokens that can possibly become old now.
    most = torch.sym_min(-(-appended // group), capacity // group) * group
    if group > 1:
        _code_groups(store, position, x, spec, most)
    elif most:
        cos_sin = None
        if spec.rotary:
            inv_freq = plane_of(store, spec, "inv_freq")[0]
            cos_sin = angles(
                _first_reopened(store, position, spec) + torch.arange(most, device=x.device), inv_freq
            )
        append_vectors(store, spec, x, position, None, most, False, cos_sin)
    _keep(store, position, x, spec)


def _first_reopened(store: Sequence[Tensor], position: Tensor, spec: Spec) -> Tensor:
    """Tokens that stay coded once rows are rolled back to where the append starts, ``[B, 1]``."""
    coded, held = plane_of(store, spec, "coded")[0], plane_of(store, spec, "length")[0]
    start = position[..., 0] if position.dim() == 2 else position[0]
    return torch.minimum(coded, torch.minimum(start.long(), held)).unsqueeze(1)


def _code_groups(store: Sequence[Tensor], position: Tensor, x: Tensor, spec: Spec, most: int) -> None:
    batch, heads, appended, dim = x.shape
    group, where = spec.scale_tokens, index_args(position)
    numbers, rule = vector_numbers(spec, dim), rule_numbers(spec, store, dim)
    width = numbers["WIDTH"]
    window = {"GROUP": group, "WINDOW": spec.window, "RECENT": spec.recent}
    vectors = {key: numbers[key] for key in ("DIM", "WIDTH", "ROTATION", "LOG", "NORM", "OUTLIERS")}
    counts = ("coded", "length")
    ring = plane_of(store, spec, "recent")[0]
    size = min(power(group), tile_rows(width))
    planes = plane_args(
        store,
        spec,
        ("codes", "scale", "minimum", "outlier_index", "outlier_value", "sinks", "recent", *counts),
    )
    callable_of(reopen_group)[(batch * heads, triton.cdiv(group, size))](
        *where[:2], *planes, heads, appended, ROWS=size, **vectors, **window, FIRST=spec.sinks,
        LARGEST_EXACT=torch.finfo(ring.dtype).max, **{key: rule[key] for key in ("CODE", "BITS", "HAS_MINIMUM")},
        num_warps=warps(size * width),
    )  # fmt: skip
    if not most:
        return
    ready, strides = x, (0, 0, 0)
    whole = bool(spec.rotation or numbers["OUTLIERS"])
    if whole:
        ready = x.new_empty((batch, heads, most, dim), dtype=torch.float32)
        strides = (heads * most * dim, most * dim, dim)
        rows = batch * heads * most
        size = rows_of_a_program(rows, width)
        planes = plane_args(store, spec, ("outlier_index", "outlier_value", "recent", *counts))
        callable_of(prepare_rows)[(triton.cdiv(rows, size),)](
            x, *x.stride(), *where, *planes, ready, rows, most, heads, store[0].shape[2], appended,
            ROWS=size, **vectors, CENTRED=spec.centred, LARGEST_VALUE=rule["LARGEST_VALUE"], **window,
            num_warps=warps(size * width),
        )  # fmt: skip
    members = power(group)
    channels = min(width, max(8, tile_rows(members)))
    planes = plane_args(store, spec, ("codes", "scale", "minimum", "recent", *counts))
    callable_of(append_groups)[(batch * heads, most // group, triton.cdiv(dim, channels))](
        x, *x.stride(), *where, *planes, ready, *strides, heads, store[0].shape[2], appended,
        CHANNELS=channels, DIM=dim, MEMBERS=members, FROM_READY=whole, **window,
        **{key: rule[key] for key in ("ROOT", "RULE", "CODE", "BITS", "HAS_MINIMUM", "PARAMETER", "LARGEST")},
        num_warps=warps(channels * members),
    )  # fmt: skip


def _keep(store: Sequence[Tensor], position: Tensor, x: Tensor, spec: Spec) -> None:
    batch, heads, appended, dim = x.shape
    kept = torch.sym_min(appended, spec.window)
    rows = batch * heads * (kept + spec.sinks)
    width = max(8, power(dim))
    size = rows_of_a_program(rows, width)
    callable_of(keep_exact)[(triton.cdiv(rows, size),)](
        x, *x.stride(), *index_args(position), *plane_args(store, spec, ("sinks", "recent", "coded", "length")),
        rows, kept, heads, appended, ROWS=size, DIM=dim, WIDTH=width,
        GROUP=spec.scale_tokens, WINDOW=spec.window, RECENT=spec.recent, FIRST=spec.sinks, num_warps=warps(size * width),
    )  # fmt: skip
