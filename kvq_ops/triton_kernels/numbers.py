"""Stored codes to numbers inside of Triton kernels, exactly, on any target and in the interpreter.

Packed codes become fp16 by bit patterns: a code ``n`` below 1024 in the mantissa of 1024.0 is ``1024 + n``. Bytes of float8 are
shifted into the fields of an fp16, which leaves a power of two to be multiplied in elsewhere (``e4m3`` and ``e2m1`` below).
Each of these has a short form in PTX, ``ASM``, that handles four bytes at once, and the same in plain operations.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

__all__ = [
    "byte_half",
    "channel_signs",
    "circle",
    "e2m1_half",
    "e4m3_half",
    "e5m2_half",
    "hadamard",
    "hadamard_matrix",
    "look_up",
    "nibbles_half",
    "normal_entry",
    "normal_half",
    "power_below",
    "quarters_half",
    "signed_byte_half",
    "threes_half",
    "weave4",
    "weave8",
    "whole_half",
]

# Four bytes in, two registers of two fp16 each out: bytes spread over halves under 0x64 are 1024 + n.
_BYTE_ASM = tl.constexpr(
    "{ .reg .b32 t, u, c; mov.b32 c, 0xE400E400;"
    " prmt.b32 t, $2, 0x64646464, 0x4140; prmt.b32 u, $2, 0x64646464, 0x4342;"
    " add.rn.f16x2 $0, t, c; add.rn.f16x2 $1, u, c; }"
)
_SIGNED_BYTE_ASM = tl.constexpr(
    "{ .reg .b32 t, u, c; xor.b32 c, $2, 0x80808080;"
    " prmt.b32 t, c, 0x64646464, 0x4140; prmt.b32 u, c, 0x64646464, 0x4342;"
    " mov.b32 c, 0xE480E480; add.rn.f16x2 $0, t, c; add.rn.f16x2 $1, u, c; }"
)
# lop3 0xea is (a & b) | c. The upper nibble is 1024 + 16 n: times 1/16, minus 64.
_NIBBLES_ASM = tl.constexpr(
    "{ .reg .b32 t, u, c, f; prmt.b32 t, $4, 0, 0x4140; prmt.b32 u, $4, 0, 0x4342; mov.b32 c, 0xE400E400;"
    " lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xea; lop3.b32 $1, u, 0x000f000f, 0x64006400, 0xea;"
    " lop3.b32 $2, t, 0x00f000f0, 0x64006400, 0xea; lop3.b32 $3, u, 0x00f000f0, 0x64006400, 0xea;"
    " add.rn.f16x2 $0, $0, c; add.rn.f16x2 $1, $1, c; mov.b32 f, 0x2C002C00; mov.b32 c, 0xD400D400;"
    " fma.rn.f16x2 $2, $2, f, c; fma.rn.f16x2 $3, $3, f, c; }"
)
_QUARTERS_ASM = tl.constexpr(
    "{ .reg .b32 t, u, c, f; prmt.b32 t, $8, 0, 0x4140; prmt.b32 u, $8, 0, 0x4342; mov.b32 c, 0xE400E400;"
    " lop3.b32 $0, t, 0x00030003, 0x64006400, 0xea; lop3.b32 $1, u, 0x00030003, 0x64006400, 0xea;"
    " lop3.b32 $2, t, 0x000c000c, 0x64006400, 0xea; lop3.b32 $3, u, 0x000c000c, 0x64006400, 0xea;"
    " lop3.b32 $4, t, 0x00300030, 0x64006400, 0xea; lop3.b32 $5, u, 0x00300030, 0x64006400, 0xea;"
    " lop3.b32 $6, t, 0x00c000c0, 0x64006400, 0xea; lop3.b32 $7, u, 0x00c000c0, 0x64006400, 0xea;"
    " add.rn.f16x2 $0, $0, c; add.rn.f16x2 $1, $1, c; mov.b32 f, 0x34003400; mov.b32 c, 0xDC00DC00;"
    " fma.rn.f16x2 $2, $2, f, c; fma.rn.f16x2 $3, $3, f, c; mov.b32 f, 0x2C002C00; mov.b32 c, 0xD400D400;"
    " fma.rn.f16x2 $4, $4, f, c; fma.rn.f16x2 $5, $5, f, c; mov.b32 f, 0x24002400; mov.b32 c, 0xCC00CC00;"
    " fma.rn.f16x2 $6, $6, f, c; fma.rn.f16x2 $7, $7, f, c; }"
)
# A byte in the upper half of 16 bits: its sign stays, the rest moves down by one.
_E4M3_ASM = tl.constexpr(
    "{ .reg .b32 a, b, s; prmt.b32 a, $2, 0, 0x1404; prmt.b32 b, $2, 0, 0x3424;"
    " shr.u32 s, a, 1; and.b32 s, s, 0x3f803f80; lop3.b32 $0, a, 0x80008000, s, 0xea;"
    " shr.u32 s, b, 1; and.b32 s, s, 0x3f803f80; lop3.b32 $1, b, 0x80008000, s, 0xea; }"
)
_E2M1_ASM = tl.constexpr(
    "{ .reg .b32 a, b, s; prmt.b32 a, $4, 0, 0x1404; prmt.b32 b, $4, 0, 0x3424;"
    " shr.u32 s, a, 3; and.b32 s, s, 0x0e000e00; lop3.b32 $2, a, 0x80008000, s, 0xea;"
    " shr.u32 s, b, 3; and.b32 s, s, 0x0e000e00; lop3.b32 $3, b, 0x80008000, s, 0xea;"
    " shl.b32 s, a, 1; and.b32 s, s, 0x0e000e00; shl.b32 a, a, 4; lop3.b32 $0, a, 0x80008000, s, 0xea;"
    " shl.b32 s, b, 1; and.b32 s, s, 0x0e000e00; shl.b32 b, b, 4; lop3.b32 $1, b, 0x80008000, s, 0xea; }"
)
# The positive half of the 16 entries of ``normal_entry``, which mirror each other. Where bit 3 of a code is unset the entry is
# negative, and its magnitude is that of the other bits inverted. Bytes of magnitudes are looked up by prmt, four at once.
_UPPER_HALF = (
    0.128395029851147, 0.3880482994902902, 0.6567591185324634, 0.9423404564869613,
    1.2562311973471771, 1.6180463860218827, 2.0690172265313866, 2.7325895709951632,
)  # fmt: skip


def _normal_asm() -> str:
    halves = [struct.pack("<e", entry) for entry in _UPPER_HALF]
    low, high = (
        [
            f"0x{int.from_bytes(bytes(half[byte] for half in part), 'little'):08x}"
            for part in (halves[:4], halves[4:])
        ]
        for byte in (0, 1)
    )
    return (
        "{ .reg .b32 n, m, t, l, h, u;"
        " not.b32 n, $4; and.b32 n, n, 0x88888888; shr.u32 m, n, 3; sub.u32 m, n, m;"
        " and.b32 t, $4, 0x77777777; xor.b32 m, m, t;"
        f" mov.b32 t, {low[0]}; prmt.b32 l, t, {low[1]}, m; mov.b32 t, {high[0]}; prmt.b32 h, t, {high[1]}, m;"
        " prmt.b32 $0, l, h, 0x6240; prmt.b32 $2, l, h, 0x7351; prmt.b32 u, n, 0, 0x1404;"
        " lop3.b32 $2, u, 0x80008000, $2, 0xea; shl.b32 u, u, 4; lop3.b32 $0, u, 0x80008000, $0, 0xea;"
        " shr.u32 m, m, 16;"
        f" mov.b32 t, {low[0]}; prmt.b32 l, t, {low[1]}, m; mov.b32 t, {high[0]}; prmt.b32 h, t, {high[1]}, m;"
        " prmt.b32 $1, l, h, 0x6240; prmt.b32 $3, l, h, 0x7351; prmt.b32 u, n, 0, 0x3424;"
        " lop3.b32 $3, u, 0x80008000, $3, 0xea; shl.b32 u, u, 4; lop3.b32 $1, u, 0x80008000, $1, 0xea; }"
    )


_NORMAL_ASM = tl.constexpr(_normal_asm())

# Two words of eight 3-bit codes in, eight registers out: code 0 of either word, code 1, ... Those that lie further up in the
# mantissa of 1024 count 8, 64 or 128 times.
_THREES_ASM = tl.constexpr(
    "{ .reg .b32 v, x, c, f; prmt.b32 v, $8, $9, 0x5410; prmt.b32 x, $8, $9, 0x6521;"
    " lop3.b32 $0, v, 0x00070007, 0x64006400, 0xea; lop3.b32 $1, v, 0x00380038, 0x64006400, 0xea;"
    " lop3.b32 $2, v, 0x01c001c0, 0x64006400, 0xea; lop3.b32 $5, x, 0x03800380, 0x64006400, 0xea;"
    " shr.u32 v, v, 9; lop3.b32 $3, v, 0x00070007, 0x64006400, 0xea; lop3.b32 $4, v, 0x00380038, 0x64006400, 0xea;"
    " shr.u32 x, x, 10; lop3.b32 $6, x, 0x00070007, 0x64006400, 0xea; lop3.b32 $7, x, 0x00380038, 0x64006400, 0xea;"
    " mov.b32 c, 0xE400E400; add.rn.f16x2 $0, $0, c; add.rn.f16x2 $3, $3, c; add.rn.f16x2 $6, $6, c;"
    " mov.b32 f, 0x30003000; mov.b32 c, 0xD800D800; fma.rn.f16x2 $1, $1, f, c; fma.rn.f16x2 $4, $4, f, c;"
    " fma.rn.f16x2 $7, $7, f, c; mov.b32 f, 0x24002400; mov.b32 c, 0xCC00CC00; fma.rn.f16x2 $2, $2, f, c;"
    " mov.b32 f, 0x20002000; mov.b32 c, 0xC800C800; fma.rn.f16x2 $5, $5, f, c; }"
)


def _threes_asm(entries: tuple[float, ...]) -> str:
    """Two words of eight 3-bit codes in, eight registers out: entries for code 0 of either word, for code 1, ...

    A selector of prmt has four bits for each byte; two codes of each word at a time are moved there. Shifts are those that bring
    code ``k`` of the first word, of the second, and codes ``k + 1`` to bits 0, 4, 8 and 12.
    """
    halves = [struct.pack("<e", entry) for entry in entries]
    low, high = (
        [
            f"0x{int.from_bytes(bytes(half[byte] for half in part), 'little'):08x}"
            for part in (halves[:4], halves[4:])
        ]
        for byte in (0, 1)
    )
    text = "{ .reg .b32 v, s, t, l, h;"
    for first, bits, shifts in (
        (0, "0x5410", (0, 12, -5, 7)),
        (2, "", (6, 18, 1, 13)),
        (4, "0x6521", (4, 16, -1, 11)),
        (6, "", (10, 22, 5, 17)),
    ):
        if bits:
            text += f" prmt.b32 v, $8, $9, {bits};"
        for at, shift in enumerate(shifts):
            moved = f"shl.b32 t, v, {-shift};" if shift < 0 else f"shr.u32 t, v, {shift};"
            text += f" {moved} and.b32 t, t, 0x{7 << 4 * at:x};"
            text += " mov.b32 s, t;" if at == 0 else " or.b32 s, s, t;"
        text += (
            f" mov.b32 t, {low[0]}; prmt.b32 l, t, {low[1]}, s; mov.b32 t, {high[0]}; prmt.b32 h, t, {high[1]}, s;"
            f" prmt.b32 ${first}, l, h, 0x5140; prmt.b32 ${first + 1}, l, h, 0x7362;"
        )
    return text + " }"


_UPPER_THREES = (0.24509417894422167, 0.7560052812058773, 1.3439092785049998, 2.1519457045369874)
_NORMAL_THREES_ASM = tl.constexpr(
    _threes_asm(tuple(-entry for entry in reversed(_UPPER_THREES)) + _UPPER_THREES)
)
# Turns as signed numbers lie within half a turn of zero, where the instructions are good to 2**-20.9.
_CIRCLE_ASM = tl.constexpr(
    "{ .reg .f32 a; cvt.rn.f32.s32 a, $2; mul.f32 a, a, 0f30C90FDB; sin.approx.f32 $0, a; cos.approx.f32 $1, a; }"
)


@triton.jit
def byte_half(b, ASM: tl.constexpr):
    """uint8 -> fp16 of the same value."""
    if ASM:
        return tl.inline_asm_elementwise(_BYTE_ASM, "=r,=r,r", [b], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return (b.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def signed_byte_half(b, ASM: tl.constexpr):
    """int8 -> fp16 of the same value."""
    if ASM:
        return tl.inline_asm_elementwise(
            _SIGNED_BYTE_ASM, "=r,=r,r", [b], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        return b.to(tl.float16)


@triton.jit
def nibbles_half(b, ASM: tl.constexpr):
    """The lower and the upper 4 bits of bytes as fp16."""
    if ASM:
        return tl.inline_asm_elementwise(
            _NIBBLES_ASM,
            "=r,=r,=r,=r,r",
            [b],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        w = b.to(tl.uint16)
        low = ((w & 0x0F) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
        high = ((w & 0xF0) | 0x6400).to(tl.float16, bitcast=True) * 0.0625 - 64.0
        return low, high


@triton.jit
def quarters_half(b, ASM: tl.constexpr):
    """The four 2-bit codes of bytes, lowest first, as fp16."""
    if ASM:
        return tl.inline_asm_elementwise(
            _QUARTERS_ASM,
            "=r,=r,=r,=r,=r,=r,=r,=r,r",
            [b],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        w = b.to(tl.uint16)
        return (
            (w & 3).to(tl.float16),
            ((w >> 2) & 3).to(tl.float16),
            ((w >> 4) & 3).to(tl.float16),
            (w >> 6).to(tl.float16),
        )


@triton.jit
def e4m3_half(b, ASM: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of e4m3 as fp16 times 2**-8, exactly; NaN reads as 480. Native conversions give the value itself."""
    if NATIVE:
        return b.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif ASM:
        return tl.inline_asm_elementwise(_E4M3_ASM, "=r,=r,r", [b], dtype=tl.float16, is_pure=True, pack=4)
    else:
        w = b.to(tl.uint16)
        return (((w & 0x80) << 8) | ((w & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def e5m2_half(b):
    """Bytes of e5m2 as fp16, exactly."""
    return (b.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def e2m1_half(b, ASM: tl.constexpr):
    """The lower and the upper 4 bits of bytes, read as e2m1, as fp16 times 2**-14, exactly."""
    if ASM:
        return tl.inline_asm_elementwise(
            _E2M1_ASM,
            "=r,=r,=r,=r,r",
            [b],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        w = b.to(tl.uint16)
        low = (((w & 0x08) << 12) | ((w & 0x07) << 9)).to(tl.float16, bitcast=True)
        high = (((w & 0x80) << 8) | ((w & 0x70) << 5)).to(tl.float16, bitcast=True)
        return low, high


@triton.jit
def normal_entry(code, BITS: tl.constexpr):
    """fp32 entries of the tables for N(0, 1) of ``kvq_ops.codecs.codebook``, which are symmetric."""
    HALF: tl.constexpr = 1 << (BITS - 1)
    upper = code >= HALF
    i = tl.where(upper, code - HALF, HALF - 1 - code)
    if BITS == 2:
        entry = tl.where(i == 0, 0.452780034636492, 1.5104176084990955)
    elif BITS == 3:
        near = tl.where((i & 1) == 0, 0.24509417894422167, 0.7560052812058773)
        far = tl.where((i & 1) == 0, 1.3439092785049998, 2.1519457045369874)
        entry = tl.where(i < 2, near, far)
    else:
        odd = (i & 1) != 0
        a = tl.where(odd, 0.3880482994902902, 0.128395029851147)
        b = tl.where(odd, 0.9423404564869613, 0.6567591185324634)
        c = tl.where(odd, 1.6180463860218827, 1.2562311973471771)
        d = tl.where(odd, 2.7325895709951632, 2.0690172265313866)
        second = (i & 2) != 0
        entry = tl.where(i < 4, tl.where(second, b, a), tl.where(second, d, c))
    entry = entry.to(tl.float32)
    return tl.where(upper, entry, -entry)


@triton.jit
def normal_half(b):
    """What the lower and the upper 4 bits of bytes stand for in that table, rounded to fp16. PTX only."""
    return tl.inline_asm_elementwise(
        _NORMAL_ASM, "=r,=r,=r,=r,r", [b], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
    )


@triton.jit
def threes_half(w, NORMALS: tl.constexpr):
    """The eight 3-bit codes of words, or with ``NORMALS`` what they stand for in that table, as fp16. PTX only."""
    return tl.inline_asm_elementwise(
        _NORMAL_THREES_ASM if NORMALS else _THREES_ASM,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
        [w],
        dtype=(
            tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16
        ),
        is_pure=True,
        pack=2,
    )  # fmt: skip


@triton.jit
def whole_half(code, zero):
    """Whole numbers ``code - zero`` of ``code`` 0..255 as fp16; there are few converters, and many adders."""
    return (code | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True) - (
        tl.full((), 1024, tl.int32) + zero
    ).to(tl.float16)


@triton.jit
def look_up(table, entry, ASM: tl.constexpr):
    """Entries of a small table in memory."""
    if ASM and table.dtype.element_ty == tl.float32:
        # A compiler that saw a load here would load these ahead, into shared memory, and not the codes that they hang on.
        return tl.inline_asm_elementwise(
            "{ .reg .b64 a; mad.wide.u32 a, $1, 4, $2; ld.global.nc.f32 $0, [a]; }",
            "=f,r,l",
            [entry, table.to(tl.uint64)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.load(table + entry)


@triton.jit
def weave4(a, b, c, d):
    """Four ``[R, C]`` as ``[R, 4 C]``: a0 b0 c0 d0 a1 ..."""
    return tl.interleave(tl.interleave(a, c), tl.interleave(b, d))


@triton.jit
def weave8(a, b, c, d, e, f, g, h):
    """Eight ``[R, C]`` as ``[R, 8 C]``: a0 b0 ... h0 a1 ..."""
    return tl.interleave(weave4(a, c, e, g), weave4(b, d, f, h))


@triton.jit
def power_below(x):
    """The largest power of two not above ``x >= 0`` (fp32, at least 2**-126), and its reciprocal."""
    bits = tl.minimum(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 0x00800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, COLS: tl.constexpr, LOG: tl.constexpr, NORM: tl.constexpr):
    """``x [ROWS, COLS]`` times the Sylvester matrix of ``2**LOG`` channels, block by block, times ``NORM``.

    The sums are those of ``kvq_ops.codecs.rotation``, in the same order.
    """
    for k in tl.static_range(LOG):
        pairs = tl.reshape(x, (ROWS * COLS // (2 << k), 2, 1 << k))
        low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
        x = tl.reshape(tl.permute(tl.join(low + high, low - high), (0, 2, 1)), (ROWS, COLS))
    return x * NORM


@triton.jit
def hadamard_matrix(rows, cols, LOG: tl.constexpr, NORM: tl.constexpr):
    """Entries of the same matrix at ``rows [R, 1]`` and ``cols [1, C]``, fp32."""
    v = rows & cols & ((1 << LOG) - 1)
    v = v ^ (v >> 8)
    v = v ^ (v >> 4)
    v = v ^ (v >> 2)
    v = v ^ (v >> 1)
    entry = tl.where((v & 1) == 0, NORM, -NORM)
    return tl.where((rows >> LOG) == (cols >> LOG), entry, 0.0)


@triton.jit
def channel_signs(channel):
    """fp32 ``1.0`` or ``-1.0`` for each channel, see ``kvq_ops.codecs.rotation.sign_pattern``."""
    h = (channel + 1).to(tl.uint32) * 0x9E3779B9
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return tl.where((h >> 31) != 0, -1.0, 1.0)


@triton.jit
def circle(turns, FAST: tl.constexpr):
    """fp32 sine and cosine of ``turns`` (uint32) times ``2 pi / 2**32``: within 1e-7, or with ``FAST``, in PTX, 2**-20."""
    if FAST:
        return tl.inline_asm_elementwise(
            _CIRCLE_ASM, "=f,=f,r", [turns], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        quarter = (turns + 0x20000000) >> 30
        rest = (turns - (quarter << 30)).to(tl.int32, bitcast=True)
        a = rest.to(tl.float32) * 1.4629180792671596e-09
        z = a * a
        sine = a * (
            1.0
            + z
            * (
                -0.16666666666666666
                + z * (0.008333333333333333 + z * (-0.0001984126984126984 + z * 2.7557e-06))
            )
        )
        cosine = 1.0 + z * (
            -0.5
            + z
            * (
                0.041666666666666664
                + z * (-0.001388888888888889 + z * (2.48015873015873e-05 + z * -2.755731922398589e-07))
            )
        )
        swapped = (quarter & 1) != 0
        s = tl.where(swapped, cosine, sine)
        c = tl.where(swapped, sine, cosine)
        return tl.where((quarter & 2) != 0, -s, s), tl.where(((quarter + 1) & 2) != 0, -c, c)
