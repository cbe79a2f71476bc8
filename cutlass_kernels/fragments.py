"""Tensor-core fragments of cached codes: load, bring to fp16, multiply. One warp, one lane's share of everything.

``mma.sync.m16n8k16`` takes 16 query rows against 8 columns over 16 terms. Lane ``l`` is ``g = l // 4``, ``t = l % 4``. Which
channel or token a fragment's index stands for is ours to choose, as long as both operands agree, and is chosen so that what
a lane needs lies side by side in memory:

* keys: lane ``(g, t)`` takes, of token ``TOKEN_OF_COLUMN[g]`` of each 8, the ``t``-th 16 bytes of every 64 (or, for rows of 32
  bytes, the ``t``-th 8). Four channels in a row are its four places in one ``mma``;
* values: the lane takes, of tokens ``t`` and ``4 + t`` of each 8, the ``g``-th eighth of the row. The same two tokens are its
  columns of the scores, so that weights go from one product to the next without leaving their lane.

Codes become fp16 exactly: every product of an e2m1 number and an e4m3 scale is an fp16 number. What scales a whole token, head
or tensor stays outside, in fp32.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32
from cutlass.cute.arch import inline_ptx

from .build import NATIVE
from .conversions import choose

__all__ = [
    "channel_of",
    "e2m1_halves",
    "e4m3_halves",
    "exp2",
    "fp16_pair",
    "interleave_bytes",
    "interleave_nibbles",
    "key_chunk_bytes",
    "largest_of_quad",
    "log2",
    "multiply",
    "read_words",
    "scale_halves",
    "sum_of_quad",
    "token_of_column",
]


# ------------------------------------------------------------------------------------------------- who holds what


def key_chunk_bytes(head_dim: int, bits: int) -> int:
    """Bytes of a key that a lane loads at once: 16, or a quarter of a row that is shorter than 64."""
    return min(16, head_dim * bits // 32)


def channel_of(step: int, lane_in_quad, head_dim: int, bits: int):
    """The first of the four channels in a row that a lane contributes to the ``step``-th product over 16 channels."""
    per_chunk = key_chunk_bytes(head_dim, bits) * 8 // bits
    chunk, inside = divmod(4 * step, per_chunk)
    return Int32(chunk * 4 * per_chunk + inside) + lane_in_quad * Int32(per_chunk)


def token_of_column(column):
    """The token, of each 8, of a column of the scores; a lane's columns ``2 t`` and ``2 t + 1`` are tokens ``t``, ``4 + t``."""
    return (column >> Int32(1)) + (column & Int32(1)) * Int32(4)


# ---------------------------------------------------------------------------------------------------------- memory


def read_words(pointer, octets: int) -> list:
    """What lies at a pointer to bytes that is a multiple of ``min(octets, 16)``, as words, in loads of up to 16 bytes."""
    words = cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(octets // 4)).load()
    return [words[i] for i in range(octets // 4)]


def read_byte(pointer, index=0):
    return cute.make_tensor(cute.recast_ptr(pointer + index, dtype=Uint8), cute.make_layout(1))[0].to(Uint32)


# ------------------------------------------------------------------------------------------------------ conversions


def e2m1_halves(word, target: str) -> list:
    """Four pairs of fp16 of the eight e2m1 codes of a word, the pair of the lowest byte first, its low half byte low.

    Only ``NATIVE`` targets have an instruction. Elsewhere sign, exponent and mantissa move to where fp16 has them, which gives
    the number times 2^-14, subnormal numbers included.
    """
    if target in NATIVE:
        converts = " ".join(f"cvt.rn.f16x2.e2m1x2 {{$w{i}}}, b{i};" for i in range(4))
        text = f"{{ .reg .b8 b0, b1, b2, b3; mov.b32 {{b0, b1, b2, b3}}, {{$r0}}; {converts} }}"
        return list(inline_ptx(text, write_only_types=[Uint32] * 4, read_only_args=[word]))
    pairs = []
    for i in range(4):
        byte = word >> Uint32(8 * i)
        both = (byte & Uint32(0xF)) | ((byte & Uint32(0xF0)) << Uint32(12))
        small = ((both & Uint32(0x00080008)) << Uint32(12)) | ((both & Uint32(0x00070007)) << Uint32(9))
        # 2^14 twice; mul takes no constants.
        pairs.append(
            inline_ptx(
                "{ .reg .b32 c; mov.b32 c, 0x74007400; mul.rn.f16x2 {$w0}, {$r0}, c; }",
                write_only_types=[Uint32],
                read_only_args=[small],
            )
        )
    return pairs


def e4m3_halves(word) -> list:
    """Two pairs of fp16 of the four e4m3 codes of a word, the lower one first."""
    return list(
        inline_ptx(
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; "
            "cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
            write_only_types=[Uint32] * 2,
            read_only_args=[word],
        )
    )


def scale_halves(first, second):
    """Two e4m3 scales as a pair of fp16."""
    return inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, low; }",
        write_only_types=[Uint32],
        read_only_args=[first | (second << Uint32(8))],
    )


def multiply_halves(a, b):
    return inline_ptx("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def interleave_nibbles(first, second):
    """Codes of two tokens, eight each, as two words: (first, second) of the even channels, and of the odd ones."""
    low = Uint32(0x0F0F0F0F)
    high = Uint32(0xF0F0F0F0)
    even = (first & low) | ((second << Uint32(4)) & high)
    odd = ((first >> Uint32(4)) & low) | (second & high)
    return even, odd


def interleave_bytes(first, second) -> list:
    """Codes of two tokens, four each, as two words: (first, second) of the first two channels, and of the others."""
    return [
        inline_ptx(
            f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};",
            write_only_types=[Uint32],
            read_only_args=[first, second],
        )
        for selector in ("0x5140", "0x7362")
    ]


def fp16_pair(low, high):
    """Two fp32 numbers rounded to a pair of fp16."""
    return inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[low, high]
    )


# ------------------------------------------------------------------------------------------------------- arithmetic


def multiply(a: list, b: list, c: list) -> list:
    """``a b + c``: fp16 fragments of 16 x 16 and 16 x 8, fp32 sums of 16 x 8."""
    return list(
        inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )


def exp2(x):
    return cute.math.exp2(x, fastmath=True)


def log2(x):
    return inline_ptx("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def largest_of_quad(x):
    """The largest of four neighbouring lanes; NaN does not win."""
    for offset in (1, 2):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=offset))
    return x


def sum_of_quad(x):
    for offset in (1, 2):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=offset)
    return x


def finite_base(largest):
    """What is subtracted from scores before ``exp2``: their largest, or zero where every key is closed."""
    return choose(largest == Float32(-float("inf")), Float32(0.0), largest)
