"""The kernel of attention over stored tokens, for few queries (decoding, cut along the tokens) and for many (prefill).

A program owns a kv head, ``BM`` query rows of it (queries times the query heads that share it, so that stored bytes are loaded
once for all of them) and a part of the tokens. Tokens go by in tiles: numbers meet the queries in a dot product, scores are
multiplied by what the channels of a token share, weights likewise, see :mod:`.tiles`. Softmax runs online, in fp32, in base 2.

Tiles that every row sees in full, and that hold codes alone, need no comparisons and no bounds; they are the main loop. All
others (the last tile, the diagonal of causal attention, exact tokens of a window) go through a first loop that has both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import spec as _spec
from .numbers import power_below
from .rotary import turn_steps
from .rows import find_rows
from .sides import KIND_AT, OUTER_AT, ROTARY_AT, STATIC_AT, WINDOWED_AT
from .tiles import load_any, load_coded

__all__ = ["attend_kernel"]

_E4M3 = tl.constexpr(_spec.E4M3)
_SCALE_E4M3 = tl.constexpr(_spec.SCALE_E4M3)
_LOG2E = tl.constexpr(1.4426950408889634)
_ROOM = tl.constexpr(16384.0)
"""Weights are at most this in fp16, so that even one of 2**-38 beside the largest keeps a bit."""
_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def tanh(x):
    """Within 2e-7 of the hyperbolic tangent, relative to it."""
    y = tl.abs(x)
    e = tl.exp2(y * -2.8853900817779268)
    z = y * y
    # Up to 0.55 the series, whose next term is 2e-8 of the sum there.
    series = 1.0 + z * (
        -0.3333333333333333
        + z
        * (
            0.13333333333333333
            + z
            * (
                -0.05396825396825397
                + z
                * (
                    0.021869488536155203
                    + z * (-0.008863235529902197 + z * (0.003592128036572481 + z * -0.001455834387051318))
                )
            )
        )
    )
    t = tl.where(y < 0.55, y * series, (1.0 - e) / (1.0 + e))
    return tl.where(x < 0, -t, t)


@triton.jit
def uniform_factor(side, head, SPEC: tl.constexpr, COMPUTE: tl.constexpr, NATIVE: tl.constexpr):
    """The factor of a tile where it is the same for all tokens."""
    if (SPEC >> STATIC_AT.value) & 1:
        scale = side[1]
        factor = tl.load(scale[0] + head * scale[2]).to(tl.float32)
        if (SPEC & 15) == _E4M3 and not NATIVE and COMPUTE != 0:
            factor *= 256.0
        return factor
    elif (SPEC >> KIND_AT.value) & 3 == _SCALE_E4M3:
        factor = 256.0
        if (SPEC >> OUTER_AT.value) & 1:
            factor *= tl.load(side[2]).to(tl.float32)
        return factor
    else:
        return 1.0


@triton.jit
def mask_tile(mask_rows, k_d, token, inside, MASK: tl.constexpr):
    """What is added to the scores of a tile in base 2, ``-inf`` where it is closed."""
    given = tl.load(mask_rows[:, None] + token[None, :] * k_d, mask=inside, other=0)
    if MASK == 1:
        return tl.where(given != 0, 0.0, float("-inf"))
    else:
        # What is finite stays so: masks hold the lowest number where they mean to close, and a row of nothing else is not closed.
        bias = given.to(tl.float32)
        return tl.where(bias > float("-inf"), tl.maximum(bias * _LOG2E, _LOWEST), bias)


@triton.jit
def open_tiles(
    mask_rows,
    k_d,
    valid,
    first,
    last,
    low,
    high,
    MASK: tl.constexpr,
    BN: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What a mask leaves open of tiles ``first`` to ``last``, at most 31, for any row: a bit for each tile that has something,
    the first such token, and the one behind the last. Only tokens ``[low, high)`` count. ``WIDE`` tiles are looked at together.
    """
    n = tl.arange(0, WIDE * BN)
    bits = tl.zeros((WIDE,), tl.int32)
    first_open = tl.zeros((WIDE * BN,), tl.int32) + high
    last_open = tl.zeros((WIDE * BN,), tl.int32) + (low - 1)
    for step in range(first, last, WIDE):
        token = step * BN + n
        inside = (token >= low) & (token < high) & (token < last * BN)
        bias = mask_tile(mask_rows, k_d, token.to(tl.int64), valid[:, None] & inside[None, :], MASK)
        seen = inside & (tl.max((valid[:, None] & (bias != float("-inf"))).to(tl.int32), 0) != 0)
        some = tl.max(tl.reshape(seen.to(tl.int32), (WIDE, BN)), 1)
        bits |= some << (step - first + tl.arange(0, WIDE))
        first_open = tl.minimum(first_open, tl.where(seen, token, high))
        last_open = tl.maximum(last_open, tl.where(seen, token, low - 1))
    return tl.sum(bits, 0), tl.min(first_open, 0), tl.max(last_open, 0) + 1


@triton.jit
def count_bits(bits):
    """How many bits of an int32 are set."""
    return tl.sum((bits >> tl.arange(0, 32)) & 1, 0)


@triton.jit
def lowest_bit(bits):
    """Which bit of a positive int32 is the first that is set."""
    # A power of two is its exponent in fp32.
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def attend_tile(
    state,
    rows,
    sequence,
    key,
    value,
    start,
    first_token,
    end_token,
    key_tile: tl.constexpr,
    value_tile: tl.constexpr,
    how: tl.constexpr,
    BOUND: tl.constexpr,
):
    """One tile of tokens from ``start`` on; returns the new state. With ``BOUND`` anything may be missing or exact.

    Args:
        state: for each row, the maximum of its scores, the sum of weights, weighted values, and weighted minima of values.
        rows: of the queries: what they hold, its sum, what scores are multiplied by, which are any, the newest token that each
            sees, and where its mask begins.
        sequence: ``(batch, head, block_table, its strides, stride of the mask, window, softcap)``.
        key: ``(planes, tokens of the window, first tokens)``; ``value`` likewise.
        key_tile: see :mod:`.tiles`; ``value_tile`` likewise.
        how: ``(CAUSAL, WINDOW, SOFTCAP, MASK, PAGE, KLOW, VLOW, VUNIFORM)``.
    """
    CAUSAL: tl.constexpr = how[0]
    WINDOW: tl.constexpr = how[1]
    SOFTCAP: tl.constexpr = how[2]
    MASK: tl.constexpr = how[3]
    PAGE: tl.constexpr = how[4]
    KLOW: tl.constexpr = how[5]
    VLOW: tl.constexpr = how[6]
    VUNIFORM: tl.constexpr = how[7]
    BN: tl.constexpr = key_tile[2]
    VC: tl.constexpr = value_tile[4]
    m, total, acc, below = state
    q, q_sum, row_factor, valid, newest, mask_rows = rows
    b, head, block_table, t_b, t_n, k_d, window, softcap = sequence
    n = tl.arange(0, BN).to(tl.int64)
    token = start + n
    live = (token >= first_token) & (token < end_token)
    row, slot, rel = find_rows(block_table, t_b, t_n, b, start, n, live, PAGE, PAGE % BN != 0)
    place = (row, head, slot, rel, live)
    if BOUND:
        k, k_factor, k_low = load_any(
            key[0], place, key[1], key[2], key_tile, (key_tile[3] >> ROTARY_AT.value) & 1 == 0
        )
        v, v_factor, v_low = load_any(
            value[0], place, value[1], value[2], value_tile, (value_tile[3] >> ROTARY_AT.value) & 1 == 0
        )
    else:
        k, k_factor, k_low = load_coded(key[0], place, key_tile, False)
        v, v_factor, v_low = load_coded(value[0], place, value_tile, False)

    s = tl.dot(q, tl.trans(k), input_precision="ieee") * k_factor[None, :]
    if KLOW:
        s += q_sum[:, None] * k_low[None, :]
    s *= row_factor[:, None]
    if SOFTCAP:
        s = tanh(s / softcap) * (softcap * _LOG2E)
    if MASK != 0:
        inside = valid[:, None]
        if BOUND:
            inside = inside & live[None, :]
        bias = mask_tile(mask_rows, k_d, token, inside, MASK)
        s = tl.where(bias == float("-inf"), bias, s + bias)
    if BOUND:
        open_ = live[None, :]
        if CAUSAL:
            open_ = open_ & (token[None, :] <= newest[:, None])
        if WINDOW:
            open_ = open_ & (token[None, :] > newest[:, None] - window)
        s = tl.where(open_, s, float("-inf"))

    # Comparisons with NaN are false: it stays out of the maximum and goes into the sum.
    top = tl.max(s, 1)
    new = tl.where(top > m, top, m)
    base = tl.where(new > float("-inf"), new, 0.0)
    shrink = tl.exp2(m - base)
    p = tl.exp2(s - base[:, None])
    total = total * shrink + tl.sum(p, 1)
    if VLOW:
        below = below * shrink + tl.sum(p * v_low[None, :], 1)
    acc = acc * shrink[:, None]
    if VC == 1:
        if VUNIFORM:
            acc = tl.dot((p * _ROOM).to(tl.float16), v, acc)
        else:
            # Weights times factors are brought up to the largest factor of the tile.
            most = tl.maximum(tl.max(v_factor, 0), 1e-30)
            share = v_factor * (_ROOM / most)
            acc += tl.dot((p * share[None, :]).to(tl.float16), v) * (most * (1.0 / _ROOM))
    elif VC == 2:
        acc = tl.dot(p.to(tl.bfloat16), v, acc)
    elif VUNIFORM:
        acc = tl.dot(p, v, acc, input_precision="ieee")
    else:
        acc = tl.dot(p * v_factor[None, :], v, acc, input_precision="ieee")
    return new, total, acc, below


@triton.jit
def attend_tiles(
    state,
    rows,
    sequence,
    key,
    value,
    first,
    last,
    low,
    high,
    all_low,
    all_high,
    opened,
    key_tile: tl.constexpr,
    value_tile: tl.constexpr,
    how: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles ``first`` to ``last``, of tokens ``[low, high)``; those within ``[all_low, all_high)`` need no bounds. With a mask
    only the tiles whose bits are set in ``opened``, at most 31. Arguments as for :func:`attend_tile`.
    """
    MASK: tl.constexpr = how[3]
    BN: tl.constexpr = key_tile[2]
    m, total, acc, below = state
    main_low = tl.minimum(tl.maximum((tl.maximum(low, all_low) + BN - 1) // BN, first), last)
    main_high = tl.minimum(tl.maximum(tl.minimum(high, all_high) // BN, main_low), last)
    origin = tl.full((), 0, tl.int64)
    # Loops count in 32 bits, or loads would not be started ahead.
    if MASK == 0:
        x, main_low, main_high = first.to(tl.int32), main_low.to(tl.int32), main_high.to(tl.int32)
        before = main_low - x
        for e in tl.range(0, before + (last.to(tl.int32) - main_high), num_stages=1):
            at = tl.where(e < before, x + e, main_high + (e - before))
            m, total, acc, below = attend_tile(
                (m, total, acc, below), rows, sequence, key, value, origin + at * BN, low, high,
                key_tile, value_tile, how, True,
            )  # fmt: skip
        for at in tl.range(main_low, main_high, num_stages=STAGES):
            m, total, acc, below = attend_tile(
                (m, total, acc, below), rows, sequence, key, value, origin + at * BN, low, high,
                key_tile, value_tile, how, False,
            )  # fmt: skip
    else:
        one = tl.full((), 1, tl.int64)
        main = (((one << (main_high - first)) - 1) & ~((one << (main_low - first)) - 1)).to(tl.int32)
        x = (origin + first).to(tl.int32)
        edges = opened & ~main
        main = opened & main
        for _ in tl.range(0, count_bits(edges), num_stages=1):
            at = x + lowest_bit(edges)
            edges = edges & (edges - 1)
            m, total, acc, below = attend_tile(
                (m, total, acc, below), rows, sequence, key, value, origin + at * BN, low, high,
                key_tile, value_tile, how, True,
            )  # fmt: skip
        for _ in tl.range(0, count_bits(main), num_stages=STAGES):
            at = x + lowest_bit(main)
            main = main & (main - 1)
            m, total, acc, below = attend_tile(
                (m, total, acc, below), rows, sequence, key, value, origin + at * BN, low, high,
                key_tile, value_tile, how, False,
            )  # fmt: skip
    return m, total, acc, below


@triton.jit
def attend_kernel(
    query, q_b, q_h, q_t, q_d, out, states, mask, k_b, k_h, k_t, k_d, sinks, n_s, block_table, t_b, t_n, length,
    k_codes, kc_b, kc_h, kc_t, k_scale, ks_b, ks_h, ks_t, k_outer, k_minimum, km_b, km_h, km_t, k_zero, kz_h,
    k_codebook, k_inv_freq, k_position, kp_b, kp_t, k_index, ki_b, ki_h, ki_t, k_value, kv_b, kv_h, kv_t,
    k_recent, kr_b, kr_h, kr_t, k_first, kf_b, kf_h, kf_t, k_coded, k_held,
    v_codes, vc_b, vc_h, vc_t, v_scale, vs_b, vs_h, vs_t, v_outer, v_minimum, vm_b, vm_h, vm_t, v_zero, vz_h,
    v_codebook, v_inv_freq, v_position, vp_b, vp_t, v_index, vi_b, vi_h, vi_t, v_value, vv_b, vv_h, vv_t,
    v_recent, vr_b, vr_h, vr_t, v_first, vf_b, vf_h, vf_t, v_coded, v_held,
    scale, softcap, heads, queries, tokens, splits, window, key_window, key_first, value_window, value_first,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, SINKS: tl.constexpr,
    USE_LENGTH: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, DT: tl.constexpr,
    VDIM: tl.constexpr, VDT: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, KC: tl.constexpr, VC: tl.constexpr,
    KLOW: tl.constexpr, VLOW: tl.constexpr, VUNIFORM: tl.constexpr, QNORM: tl.constexpr, SPLIT: tl.constexpr,
    ASM: tl.constexpr, NATIVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """See the module.

    Args:
        query: strides of batch, head, query, channel follow.
        out: ``[B, Hq, Tq, Dv]``, contiguous; with ``SPLIT`` fp32 ``[B, Hq, Tq, splits, Dv]``, to be merged.
        states: fp32 ``[B, Hq, Tq, splits, 2]``: maximum and sum, with ``SPLIT``.
        mask: strides of four axes, 0 where it is repeated; ``MASK`` 1: bool, 2: added.
        length: ``[B]``, with ``USE_LENGTH``.
        heads: of the queries.
        KC, VC: what keys and values are computed in, see ``load_coded``.
        KLOW, VLOW: whether tiles have a ``low``. VUNIFORM: whether the factor of values is the same for all tokens.
        QNORM: whether queries are divided by a power of two before they become fp16.
    """
    # A number of Python is fp32 to Triton when it launches a kernel, and fp64 where Inductor does.
    scale = tl.cast(scale, tl.float32)
    softcap = tl.cast(softcap, tl.float32)
    SCATTERED: tl.constexpr = PAGE % BN != 0
    key_tile: tl.constexpr = (DIM, DT, BN, KEY, KC, ASM, NATIVE, SCATTERED)
    value_tile: tl.constexpr = (VDIM, VDT, BN, VALUE, VC, ASM, NATIVE, SCATTERED)
    how: tl.constexpr = (CAUSAL, WINDOW, SOFTCAP, MASK, PAGE, KLOW, VLOW, VUNIFORM)
    part = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    b = tl.program_id(2).to(tl.int64)
    k_turns = turn_steps(k_inv_freq, k_scale + head * ks_h, k_minimum + head * km_h, k_codebook, DIM, DT, KEY)
    v_turns = turn_steps(
        v_inv_freq, v_scale + head * vs_h, v_minimum + head * vm_h, v_codebook, VDIM, VDT, VALUE
    )
    key = (
        (
            (k_codes, kc_b, kc_h, kc_t), (k_scale, ks_b, ks_h, ks_t), k_outer,
            (k_minimum, km_b, km_h, km_t), (k_zero, kz_h), k_codebook, k_turns, (k_position, kp_b, 0, kp_t),
            (k_index, ki_b, ki_h, ki_t), (k_value, kv_b, kv_h, kv_t), (k_recent, kr_b, kr_h, kr_t),
            (k_first, kf_b, kf_h, kf_t), k_coded, k_held,
        ), key_window, key_first,
    )  # fmt: skip
    value = (
        (
            (v_codes, vc_b, vc_h, vc_t), (v_scale, vs_b, vs_h, vs_t), v_outer,
            (v_minimum, vm_b, vm_h, vm_t), (v_zero, vz_h), v_codebook, v_turns, (v_position, vp_b, 0, vp_t),
            (v_index, vi_b, vi_h, vi_t), (v_value, vv_b, vv_h, vv_t), (v_recent, vr_b, vr_h, vr_t),
            (v_first, vf_b, vf_h, vf_t), v_coded, v_held,
        ), value_window, value_first,
    )  # fmt: skip
    split = part % splits
    # The last queries of causal attention see most; they go first.
    block = tl.num_programs(0) // splits - 1 - part // splits

    r = block * BM + tl.arange(0, BM)
    valid = r < queries * GROUP
    i = r // GROUP
    query_head = head * GROUP + r % GROUP
    channel = tl.arange(0, DT)
    q_rows = query + b * q_b + query_head * q_h + i.to(tl.int64) * q_t
    q = tl.load(
        q_rows[:, None] + (channel * q_d)[None, :], mask=valid[:, None] & (channel < DIM)[None, :], other=0.0
    )
    row_factor = tl.full((BM,), 1.0, tl.float32) * scale
    if not SOFTCAP:
        row_factor *= _LOG2E
    if KC == 0:
        q = q.to(tl.float32)
    elif KC == 2:
        q = q.to(tl.bfloat16)
    elif QNORM:
        wide = q.to(tl.float32)
        power, inverse = power_below(tl.max(tl.abs(wide), 1))
        q = (wide * inverse[:, None]).to(tl.float16)
        row_factor *= power
    q_sum = tl.sum(q.to(tl.float32), 1)

    # Tokens [low, high) that any row sees, and [all_low, all_high) that all rows see.
    end = tl.full((), 0, tl.int64) + tokens
    if USE_LENGTH:
        end = tl.minimum(tl.maximum(tl.load(length + b).to(tl.int64), 0), end)
    i_first = block * BM // GROUP
    i_last = tl.minimum((block * BM + BM - 1) // GROUP, queries - 1)
    newest = end - queries + i
    low = end * 0
    high = end
    all_low = low
    all_high = end
    if CAUSAL:
        high = tl.maximum(tl.minimum(end - queries + i_last + 1, end), 0)
        all_high = tl.maximum(tl.minimum(end - queries + i_first + 1, end), 0)
    if WINDOW:
        low = tl.minimum(tl.maximum(end - queries + i_first - window + 1, 0), end)
        all_low = tl.minimum(tl.maximum(end - queries + i_last - window + 1, 0), end)

    block_low = low // BN
    blocks = tl.maximum((high + BN - 1) // BN - block_low, 0)
    # A split of a single block would cost its share of the merge for little; where there is one split, it has all blocks anyway.
    each = tl.maximum((blocks + splits - 1) // splits, 2)
    x = block_low + tl.minimum(split * each, blocks)
    y = block_low + tl.minimum((split + 1) * each, blocks)

    mask_rows = mask + (b * k_b + query_head * k_h + i.to(tl.int64) * k_t)
    # Exact tokens are not in whole tiles of codes.
    if (KEY >> WINDOWED_AT.value) & 1:
        all_low = tl.maximum(all_low, key_first)
        all_high = tl.minimum(all_high, tl.load(k_coded + b).to(tl.int64))
    if (VALUE >> WINDOWED_AT.value) & 1:
        all_low = tl.maximum(all_low, value_first)
        all_high = tl.minimum(all_high, tl.load(v_coded + b).to(tl.int64))

    m = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    below = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, VDT), tl.float32)
    rows = (q, q_sum, row_factor, valid, newest, mask_rows)
    sequence = (b, head, block_table, t_b, t_n, k_d, window, softcap)
    if MASK == 0:
        m, total, acc, below = attend_tiles(
            (m, total, acc, below), rows, sequence, key, value, x, y, low, high, all_low, all_high, 0,
            key_tile, value_tile, how, STAGES,
        )  # fmt: skip
    else:
        # What the mask closes for all rows is not read.
        WIDE: tl.constexpr = min(8, max(1, 1024 // (BM * BN)))
        low, high, all_low, all_high = (
            low.to(tl.int32), high.to(tl.int32), all_low.to(tl.int32), all_high.to(tl.int32)
        )  # fmt: skip
        x, y = x.to(tl.int32), y.to(tl.int32)
        for first in range(x, y, 31):
            last = tl.minimum(first + 31, y)
            opened, first_open, end_open = open_tiles(
                mask_rows, k_d, valid, first, last, low, high, MASK, BN, WIDE
            )
            m, total, acc, below = attend_tiles(
                (m, total, acc, below), rows, sequence, key, value, first, last,
                tl.maximum(low, first_open), tl.minimum(high, end_open), all_low, all_high, opened,
                key_tile, value_tile, how, STAGES,
            )  # fmt: skip

    if VUNIFORM:
        factor = uniform_factor(value[0], head, VALUE, VC, NATIVE)
        if VC == 1:
            acc *= factor / _ROOM
        else:
            acc *= factor
    if VLOW:
        acc += below[:, None]
    channel_out = tl.arange(0, VDT)
    stored = valid[:, None] & (channel_out < VDIM)[None, :]
    out_row = (b * heads + query_head) * queries + i
    if SPLIT:
        at_state = out_row * splits + split
        tl.store(states + at_state * 2, m, mask=valid)
        tl.store(states + at_state * 2 + 1, total, mask=valid)
        # What saw nothing is not read back.
        tl.store(
            out + at_state[:, None] * VDIM + channel_out[None, :], acc, mask=stored & (total != 0.0)[:, None]
        )
    else:
        closed = total == 0.0
        if SINKS:
            # A sink counts where the query saw anything at all; its value is zero.
            sink = tl.load(sinks + query_head * n_s, mask=valid, other=0.0).to(tl.float32) * _LOG2E
            base = tl.where(m > float("-inf"), m, 0.0)
            base = tl.where(sink > base, sink, base)
            shrink = tl.exp2(m - base)
            acc *= shrink[:, None]
            total = total * shrink + tl.exp2(sink - base)
        acc = tl.where(closed[:, None], 0.0, acc / tl.where(closed, 1.0, total)[:, None])
        tl.store(
            out + out_row[:, None] * VDIM + channel_out[None, :], acc.to(out.dtype.element_ty), mask=stored
        )
