"""What a lane loads of queries, keys and values, and the products it takes part in: the parts of ``attention_kernel``.

The functions stand for code: they run while a kernel is traced, on values that are registers later, so that a ``for`` in them is
unrolled. Who holds what is said in ``fragments``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8, Uint32

from . import fragments
from .blocks import View
from .coding import CODINGS
from .conversions import choose, magnitude_bits

__all__ = [
    "TILE", "Shape", "Side", "Where", "accumulate", "find_pages", "key_counts", "load_keys", "load_token_scales", "load_values",
    "number", "products_of", "query_fragments", "query_words", "rows_of", "smaller", "static_scale", "value_counts",
]  # fmt: skip

TILE = 16
"""Tokens that a warp takes at once: one product over 16 tokens, two over the channels."""


class Side(NamedTuple):
    """Keys or values: codes, scales (of blocks, bytes; of tokens, fp32), and the scale of heads or of the tensor."""

    codes: View
    scales: Any
    static: Any


class Shape(NamedTuple):
    """What a kernel is compiled for. ``page``: tokens of a page, 0 for a contiguous cache. ``mask``: "", "bool" or "float"."""

    keys: str
    values: str
    head_dim: int
    value_dim: int
    page: int
    mask: str
    causal: bool
    window: bool
    softcap: bool
    target: str


def number(pointer, index=0):
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


def smaller(a, b):
    return choose(a < b, a, b)


def static_scale(side: Side, kind: str, head):
    """The fp32 scale that a head of keys or values has in common."""
    if side.static is None:
        return Float32(1.0)
    return number(side.static, head if CODINGS[kind].scale == "head" else 0)


# ---------------------------------------------------------------------------------------------------------- queries


def query_words(found, held, lane, step: int) -> list:
    """The words of the queries for the ``step``-th product: in registers, or in shared memory."""
    if held is None:
        return found[step]
    words = held[step, lane, None].load()
    return [words[i] for i in range(4)]


def query_fragments(query: View, rows, lane_in_quad, shape: Shape):
    """The rows ``g`` and ``g + 8`` as fp16 fragments, and what each has to be multiplied by.

    A row is first scaled by a power of two so that its largest magnitude is in [1, 2): no query leaves the range of fp16.
    """
    bits = CODINGS[shape.keys].bits
    steps = shape.head_dim // 16
    numbers, powers = [], []
    for b, h, q in rows:
        row = query.row(b, h, q, 4)
        loaded = []
        for step in range(steps):
            at = cute.assume(fragments.channel_of(step, lane_in_quad, shape.head_dim, bits), divby=4)
            four = cute.make_tensor(row + at, cute.make_layout(4)).load().to(Float32)
            loaded += [four[i] for i in range(4)]
        largest = Uint32(0)
        for x in loaded:
            magnitude = magnitude_bits(x)
            largest = choose(magnitude > largest, magnitude, largest)
        for offset in (1, 2):
            other = cute.arch.shuffle_sync_bfly(largest, offset=offset)
            largest = choose(other > largest, other, largest)
        # The exponent field, kept where both it and its negative are normal numbers.
        power = largest & Uint32(0x7F800000)
        power = choose(power < Uint32(1 << 23), Uint32(127 << 23), power)
        power = choose(power > Uint32(253 << 23), Uint32(253 << 23), power)
        inverse = (Uint32(254 << 23) - power).bitcast(Float32)
        numbers.append([x * inverse for x in loaded])
        powers.append(power.bitcast(Float32))
    low, high = numbers
    pair = fragments.fp16_pair
    found = [
        [
            pair(low[4 * s], low[4 * s + 1]),
            pair(high[4 * s], high[4 * s + 1]),
            pair(low[4 * s + 2], low[4 * s + 3]),
            pair(high[4 * s + 2], high[4 * s + 3]),
        ]
        for s in range(steps)
    ]
    return found, powers


# ------------------------------------------------------------------------------------------------------------- tiles


class Where(NamedTuple):
    """Where a CTA and a lane are. ``stop``: no token at or beyond it is read. ``g``, ``t``: see ``fragments``."""

    b: Int32
    head: Int32
    stop: Int32
    g: Int32
    t: Int32


class Rows(NamedTuple):
    """Vectors of a head: where token 0 is, and bytes or elements from page to page and token to token.

    Tokens of a page, or of a contiguous row, lie within 4 GB, so that their offsets are words; the launcher sees to that.
    """

    pointer: cute.Pointer
    page: Int64
    token: Uint32


def rows_of(plane: View | None, where: Where, shape: Shape) -> Rows | None:
    if plane is None:
        return None
    start = where.head.to(Int64) * plane.h
    if shape.page == 0:
        start = start + where.b.to(Int64) * plane.b
    return Rows(plane.pointer + start, plane.b, plane.t.to(Uint32))


def _at(rows: Rows, token, inside, pages, group: int, page: int, multiple: int = 1):
    """A pointer ``inside`` the vector of a token, of those in page ``pages[group]``; at a multiple of ``multiple``.

    What differs between lanes is one word, so that the pointer it is added to is the same for all of them.
    """
    if page == 0:
        return (rows.pointer + (token.to(Uint32) * rows.token + inside).to(Int64)).align(multiple)
    at = token & Int32(page - 1) if page & (page - 1) == 0 else token % Int32(page)
    offset = pages[group].to(Int64) * rows.page
    return (rows.pointer + offset + (at.to(Uint32) * rows.token + inside).to(Int64)).align(multiple)


def find_pages(table, where: Where, base, pages, shape: Shape) -> None:
    """The page of every eight tokens of a tile."""
    if shape.page == 0:
        return
    for group in range(TILE // 8):
        token = smaller(base + Int32(8 * group), where.stop - Int32(1))
        block = token.to(Uint32) // Uint32(shape.page)
        offset = where.b.to(Int64) * table.b + block.to(Int64) * table.n
        pages[group] = number(table.pointer, offset).to(Int32)


def key_counts(shape: Shape) -> tuple[int, int]:
    """Words of codes, and scales (pairs of bytes, or one byte), that a lane holds of one key."""
    words = shape.head_dim * CODINGS[shape.keys].bits // 128
    return words, max(1, shape.head_dim // 128) if shape.keys == "nvfp4" else 0


def load_keys(codes: Rows, held: Any, where: Where, base, pages, words, scales, shape: Shape) -> None:
    count, scale_count = key_counts(shape)
    bits = CODINGS[shape.keys].bits
    octets = fragments.key_chunk_bytes(shape.head_dim, bits)
    for group in range(TILE // 8):
        token = base + Int32(8 * group) + fragments.token_of_column(where.g)
        token = smaller(token, where.stop - Int32(1))
        inside = where.t.to(Uint32) * Uint32(octets)
        row = _at(codes, token, inside, pages, group, shape.page, octets)
        for chunk in range(4 * count // octets):
            for i, word in enumerate(fragments.read_words(row + 4 * chunk * octets, octets)):
                words[group * count + chunk * octets // 4 + i] = word
        if shape.keys == "nvfp4":
            per = octets * 2 // 16
            row = _at(held, token, where.t.to(Uint32) * Uint32(per), pages, group, shape.page, per)
            for chunk in range(scale_count):
                kind = cutlass.Uint16 if per == 2 else Uint8
                pointer = cute.recast_ptr(row + 4 * chunk * per, dtype=kind)
                scales[group * scale_count + chunk] = number(pointer).to(Uint32)


def load_token_scales(held: Any, kind: str, where: Where, base, pages, columns, shape: Shape) -> None:
    """The scales of the lane's two columns of every eight tokens, where tokens have some."""
    if CODINGS[kind].scale != "token":
        return
    for group in range(TILE // 8):
        for e in range(2):
            token = smaller(base + Int32(8 * group + 4 * e) + where.t, where.stop - Int32(1))
            columns[2 * group + e] = number(_at(held, token, Uint32(0), pages, group, shape.page, 4))


def products_of(query, words, scales, shape: Shape) -> list:
    """Products of the 16 rows and the keys of a tile: four for each eight tokens, as the fragments have them."""
    groups = TILE // 8
    count, scale_count = key_counts(shape)
    out = [[Float32(0.0)] * 4 for _ in range(groups)]
    per_word = 2 if CODINGS[shape.keys].bits == 4 else 1
    block_scales: list = [None] * groups
    for index in range(count):
        for group in range(groups):
            word = words[group * count + index]
            if shape.keys == "nvfp4":
                halves = fragments.e2m1_halves(word, shape.target)
                if index % 2 == 0:
                    byte = scales[group * scale_count + index // 4]
                    if shape.head_dim >= 128:
                        byte = (byte >> Uint32(index % 4 // 2 * 8)) & Uint32(0xFF)
                    block_scales[group] = fragments.scale_halves(byte, byte)
                halves = [fragments.multiply_halves(half, block_scales[group]) for half in halves]
            else:
                halves = fragments.e4m3_halves(word)
            for part in range(per_word):
                step = index * per_word + part
                out[group] = fragments.multiply(query(step), halves[2 * part : 2 * part + 2], out[group])
    return out


def value_counts(shape: Shape) -> tuple[int, int]:
    """Bytes of codes, and bytes of scales, that a lane holds of one value."""
    return shape.value_dim * CODINGS[shape.values].bits // 64, max(1, shape.value_dim // 128)


def load_values(codes: Rows, held: Any, where: Where, base, pages, words, scales, shape: Shape) -> None:
    octets, scale_count = value_counts(shape)
    at_once = min(16, octets)
    for group in range(TILE // 8):
        for e in range(2):
            token = smaller(base + Int32(8 * group + 4 * e) + where.t, where.stop - Int32(1))
            index = 2 * group + e
            inside = where.g.to(Uint32) * Uint32(octets)
            row = _at(codes, token, inside, pages, group, shape.page, at_once)
            for i, word in enumerate(fragments.read_words(row, octets)):
                words[index * octets // 4 + i] = word
            if shape.values == "nvfp4":
                block = where.g * Int32(scale_count) if shape.value_dim >= 128 else where.g >> Int32(1)
                row = _at(held, token, block.to(Uint32), pages, group, shape.page)
                for i in range(scale_count):
                    scales[index * scale_count + i] = fragments.read_byte(row, i)


def accumulate(weights, words, scales, output, shape: Shape) -> None:
    """Add weights (four for each eight tokens) times the values of a tile to the output."""
    octets, scale_count = value_counts(shape)
    count = octets // 4
    for step in range(TILE // 16):
        near, far = weights[2 * step], weights[2 * step + 1]
        pair = fragments.fp16_pair
        a = [pair(near[0], near[1]), pair(near[2], near[3]), pair(far[0], far[1]), pair(far[2], far[3])]
        for index in range(count):
            parts = []
            for half in range(2):
                at = 4 * step + 2 * half
                first, second = words[at * count + index], words[(at + 1) * count + index]
                if shape.values == "nvfp4":
                    block = index * 8 // 16
                    scale = fragments.scale_halves(
                        scales[at * scale_count + block], scales[(at + 1) * scale_count + block]
                    )
                    even, odd = (
                        fragments.e2m1_halves(word, shape.target)
                        for word in fragments.interleave_nibbles(first, second)
                    )
                    both = [x for two in zip(even, odd, strict=True) for x in two]
                    parts.append([fragments.multiply_halves(x, scale) for x in both])
                else:
                    both = fragments.interleave_bytes(first, second)
                    parts.append([half for word in both for half in fragments.e4m3_halves(word)])
            for i, b in enumerate(zip(*parts, strict=True)):
                at = 4 * (index * len(parts[0]) + i)
                result = fragments.multiply(a, list(b), [output[at + k] for k in range(4)])
                for k in range(4):
                    output[at + k] = result[k]
