"""Static scales, fitted to the first numbers that a store is given, on the device and without a look from the host.

The kernels are launched at every append that may have to fit, and end at once where a scale is set. Where one program can see all
numbers of a scale it sets it; else each leaves the lowest and highest of its share, and a second launch gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import spec as _spec
from .floats import finite_or_zero
from .launching import callable_of
from .places import pair, settle, window_row
from .rules import static_parameters
from .shapes import rule_numbers, tile_rows, vector_numbers, warps
from .spec import Spec, plane_args, plane_of
from .vectors import prepared, take_outliers

__all__ = ["fit"]


@triton.jit
def fit_static(
    X, x_b, x_h, x_t, x_d,
    POSITION, position_b, position_t,
    TABLE, table_b, table_n,
    SCALE, scale_b, scale_h, scale_t, scale_d,
    ZERO, zero_b, zero_h, zero_t, zero_d,
    RING, ring_b, ring_h, ring_t, ring_d,
    CODED, coded_b, coded_h, coded_t, coded_d,
    LENGTH, length_b, length_h, length_t, length_d,
    PART, rows, count, heads, shared, capacity, limit, appended, steps, batch,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROTATION: tl.constexpr, LOG: tl.constexpr, NORM: tl.constexpr,
    OUTLIERS: tl.constexpr, CENTRED: tl.constexpr,
    RULE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_POSITION: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr, RECENT: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Lowest and highest number that a static scale has to hold, of a share of the rows; nothing where the scale is set.

    Args:
        SCALE: the plane that says whether it is; ``scale_h`` 0 for one scale of all heads.
        PART: fp32 ``[scales, programs, 2]``.
        rows: of a scale. ``shared`` heads share one.
        ALONE: one program sees all rows of a scale, and sets it.
    """
    which = tl.program_id(0)
    WINDOWED: tl.constexpr = WINDOW > 0
    unset = tl.load(SCALE + which * scale_h) == 0.0
    if WINDOWED:
        # Nothing is fitted before something is coded, in any row.
        codes = which < 0
        for row in range(batch):
            start, reopened, target = window_row(
                tl.load(POSITION + (which * 0 + row).to(tl.int64) * position_b),
                tl.load(LENGTH + (which * 0 + row).to(tl.int64) * length_b),
                tl.load(CODED + (which * 0 + row).to(tl.int64) * coded_b),
                appended,
                RECENT,
                1,
            )
            codes = codes | (target > reopened)
        unset = unset & codes
    if unset:
        low = tl.zeros([ROWS], tl.float32)
        high = tl.zeros([ROWS], tl.float32)
        for step in range(steps):
            r = (tl.program_id(1) * steps + step) * ROWS + tl.arange(0, ROWS)
            # Heads that share the scale, as if there were no others.
            b, h, i = pair(r, count, shared)
            live = r < rows
            to = b.to(tl.int64)
            given = tl.load(POSITION + to * position_b + i.to(tl.int64) * position_t, mask=live, other=-1)
            held = tl.load(LENGTH + to * length_b, mask=live, other=0)
            coded = tl.load(CODED + to * coded_b, mask=live, other=0)
            position, start, live = settle(
                i, live, given, held, coded, limit, appended, HAS_POSITION, WINDOWED, RECENT, 1, WINDOWED
            )  # fmt: skip
            if PAGED:
                at = to * table_b + (position // capacity) * table_n
                to = tl.load(TABLE + at, mask=live, other=-1).to(tl.int64)
                live = live & (to >= 0)
            h = h + which * shared
            x = prepared(
                b, h, i, position, start, live, X, x_b, x_h, x_t, x_d, RING, ring_b, ring_h, ring_t, ring_d,
                X, X, 0, 0, ROWS, WIDTH, DIM, WINDOW, False, ROTATION, LOG, NORM,
            )  # fmt: skip
            if OUTLIERS:
                x = take_outliers(
                    x,
                    tl.arange(0, WIDTH),
                    x,
                    x,
                    X,
                    X,
                    r,
                    r,
                    0,
                    0,
                    live,
                    OUTLIERS,
                    CENTRED,
                    DIM,
                    WIDTH,
                    1.0,
                    False,
                )
            x = finite_or_zero(x)
            low = tl.minimum(low, tl.min(x, 1))
            high = tl.maximum(high, tl.max(x, 1))
        low_all = tl.min(low, 0)
        high_all = tl.max(high, 0)
        if ALONE:
            scale, zero = static_parameters(low_all, high_all, RULE, CODE, BITS, HAS_ZERO)
            tl.store(SCALE + which * scale_h, scale)
            if HAS_ZERO:
                tl.store(ZERO + which * zero_h, zero)
        else:
            part = PART + (which * tl.num_programs(1) + tl.program_id(1)) * 2
            tl.store(part, low_all)
            tl.store(part + 1, high_all)
    elif not ALONE:
        part = PART + (which * tl.num_programs(1) + tl.program_id(1)) * 2
        tl.store(part, 0.0)
        tl.store(part + 1, 0.0)


@triton.jit
def set_static(
    SCALE, scale_h, ZERO, zero_h, PART, parts,
    BLOCK: tl.constexpr, RULE: tl.constexpr, CODE: tl.constexpr, BITS: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    """Set the static scales that are unset, from what :func:`fit_static` found."""
    which = tl.program_id(0)
    if tl.load(SCALE + which * scale_h) == 0.0:
        at = tl.arange(0, BLOCK)
        part = PART + (which * parts + at) * 2
        low = tl.min(tl.load(part, mask=at < parts, other=0.0), 0)
        high = tl.max(tl.load(part + 1, mask=at < parts, other=0.0), 0)
        scale, zero = static_parameters(low, high, RULE, CODE, BITS, HAS_ZERO)
        tl.store(SCALE + which * scale_h, scale)
        if HAS_ZERO:
            tl.store(ZERO + which * zero_h, zero)


def fit(
    store: Sequence[Tensor],
    spec: Spec,
    x: Tensor,
    position: tuple[Tensor, int, int],
    table: tuple[Tensor, int, int],
    count: int,
    capacity: int,
    limit: int,
    flags: dict[str, Any],
) -> None:
    """Fit static scales that are unset to the numbers about to be coded.

    Args:
        count: tokens of each head that may be known.
        flags: ``HAS_POSITION``, ``PAGED``, ``WINDOW``, ``RECENT``.
    """
    slot = "outer" if spec.rule == _spec.NVFP4 else "scale"
    scale = plane_of(store, spec, slot)[0]
    if spec.calibrated or not (spec.static_scale or slot == "outer"):
        return
    batch, heads, _, dim = x.shape
    scales = scale.shape[0]
    numbers = vector_numbers(spec, dim)
    width = numbers["WIDTH"]
    rows = batch * heads // scales * count
    size = tile_rows(width)
    tiles = -(-rows // size)
    # A few tiles for each program, and no more programs than one block can gather.
    steps = torch.sym_max(4, -(-tiles // 1024))
    parts = -(-tiles // steps)
    part = x.new_empty((scales, parts, 2), dtype=torch.float32)
    rule = {
        key: value
        for key, value in rule_numbers(spec, store, dim).items()
        if key in ("RULE", "CODE", "BITS", "HAS_ZERO")
    }
    planes = plane_args(store, spec, (slot, "zero_point", "recent", "coded", "length"))
    callable_of(fit_static)[(scales, parts)](
        x, *x.stride(), *position, *table, *planes, part,
        rows, count, heads, heads // scales, capacity, limit, x.shape[2], steps, batch,
        ROWS=size, **numbers, **rule, **flags, ALONE=parts == 1, num_warps=warps(size * width),
    )  # fmt: skip
    if parts > 1:
        zero, zero_strides = plane_of(store, spec, "zero_point")
        callable_of(set_static)[(scales,)](
            scale, scale.stride(0), zero, zero_strides[1], part, parts, BLOCK=1024, **rule, num_warps=4
        )
