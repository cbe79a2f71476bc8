"""Conversions between fp32 and the narrow floats of caches: the leaves of every kernel here, in two forms.

``HostCvt`` is integer and float arithmetic. It runs on the processor of this machine and on every GPU. ``DeviceCvt`` is the
instructions of Blackwell, ``cvt.rn.satfinite.e2m1x2`` and its kin. Kernels are written once, over either.

Both round to nearest, ties to even, and saturate: an infinity becomes the largest number of its sign. NaN becomes 0x7f in e4m3
and, as there is no NaN in it, 6 in e2m1; codecs replace NaN before they get here. Signs of zeros are kept.
"""

from __future__ import annotations

from cutlass import BFloat16, Float32, Uint16, Uint32, select_
from cutlass.cute.arch import inline_ptx

from .build import NATIVE

__all__ = ["DeviceCvt", "HostCvt", "choose", "magnitude_bits", "conversions_for"]

_SIGN, _INFINITY = 0x80000000, 0x7F800000


def choose(condition, yes, no):
    """``yes`` where the condition holds, else ``no``, of the type of ``yes``."""
    return type(yes)(select_(condition, yes, no))


def magnitude_bits(x):
    """The bits of ``|x|``, which order as the magnitudes do; infinities and NaN are at ``0x7f800000`` and above."""
    return x.bitcast(Uint32) & Uint32(~_SIGN & 0xFFFFFFFF)


def _narrow(x, mantissa: int, bias: int, largest: int, nan: int):
    """The code of the nearest number with so many bits of mantissa: sign, exponent, mantissa from the top down."""
    magnitude = magnitude_bits(x)
    sign_shift = {1: 28, 3: 24}[mantissa]
    sign = (x.bitcast(Uint32) & Uint32(_SIGN)) >> Uint32(sign_shift)
    # Adding half of the last place, less one unless the place is odd, carries into the exponent exactly where that is due.
    drop = 23 - mantissa
    half = Uint32((1 << (drop - 1)) - 1) + ((magnitude >> Uint32(drop)) & Uint32(1))
    normal = ((magnitude + half) >> Uint32(drop)) - Uint32((127 - bias) << mantissa)
    # Below the smallest normal number steps are equal: 2^k is where fp32 has the same ones, and its adder rounds.
    k = 24 - bias - mantissa
    small = (magnitude.bitcast(Float32) + Float32(2.0**k)).bitcast(Uint32) - Uint32((127 + k) << 23)
    code = choose(magnitude < Uint32((128 - bias) << 23), small, normal)
    code = choose(code > Uint32(largest), Uint32(largest), code)
    return choose(magnitude > Uint32(_INFINITY), Uint32(nan), code | sign)


class HostCvt:
    """Conversions by arithmetic."""

    @staticmethod
    def e4m3(x):
        """The code of ``x``, as the low byte of a word."""
        return _narrow(x, 3, 7, 0x7E, 0x7F)

    @staticmethod
    def e4m3x4(x):
        """The codes of four numbers in a word, the first in its low byte."""
        word = HostCvt.e4m3(x[0])
        for i in range(1, 4):
            word = word | (HostCvt.e4m3(x[i]) << Uint32(8 * i))
        return word

    @staticmethod
    def e2m1x8(x):
        """The codes of eight numbers in a word, the first in its low half byte."""
        word = _narrow(x[0], 1, 1, 7, 7)
        for i in range(1, 8):
            word = word | (_narrow(x[i], 1, 1, 7, 7) << Uint32(4 * i))
        return word

    @staticmethod
    def from_e4m3(code):
        """The number of a code, whose word holds nothing else."""
        magnitude = code & Uint32(0x7F)
        normal = ((magnitude << Uint32(20)) + Uint32((127 - 7) << 23)).bitcast(Float32)
        small = magnitude.to(Float32) * Float32(2.0**-9)
        value = choose(magnitude < Uint32(8), small, normal)
        value = choose(magnitude == Uint32(0x7F), Uint32(0x7FC00000).bitcast(Float32), value)
        return (value.bitcast(Uint32) | ((code & Uint32(0x80)) << Uint32(24))).bitcast(Float32)

    @staticmethod
    def from_e4m3x4(word):
        return [HostCvt.from_e4m3((word >> Uint32(8 * i)) & Uint32(0xFF)) for i in range(4)]

    @staticmethod
    def from_e2m1x8(word):
        """The numbers of eight codes. Twice an e2m1 number is an integer, of 0, 1, 2, 3, 4, 6, 8, 12."""
        values = []
        for i in range(8):
            code = (word >> Uint32(4 * i)) & Uint32(0xF)
            doubled = (Uint32(0xC8643210) >> ((code & Uint32(7)) << Uint32(2))) & Uint32(0xF)
            half = doubled.to(Float32) * Float32(0.5)
            values.append((half.bitcast(Uint32) | ((code & Uint32(8)) << Uint32(28))).bitcast(Float32))
        return values

    @staticmethod
    def narrow(x, dtype):
        """``x`` as fp32, fp16 or bf16."""
        if dtype is not BFloat16:
            return x.to(dtype)
        # An instruction of some processors takes fp32 numbers below 2^-126 for zero.
        bits = x.bitcast(Uint32)
        rounded = (bits + Uint32(0x7FFF) + ((bits >> Uint32(16)) & Uint32(1))) >> Uint32(16)
        code = choose(magnitude_bits(x) > Uint32(_INFINITY), Uint32(0x7FC0), rounded)
        return code.to(Uint16).bitcast(BFloat16)


class DeviceCvt:
    """Conversions by the instructions of sm_100a, sm_103a, sm_120a and sm_121a."""

    @staticmethod
    def e4m3(x):
        # The second source lands in the low byte. A constant operand would not assemble before DSL 4.8, hence the text.
        both = inline_ptx(
            "cvt.rn.satfinite.e4m3x2.f32 {$w0}, 0f00000000, {$r0};",
            write_only_types=[Uint16],
            read_only_args=[x],
        )
        return both.to(Uint32)

    @staticmethod
    def e4m3x4(x):
        return inline_ptx(
            "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, {$r1}, {$r0}; "
            "cvt.rn.satfinite.e4m3x2.f32 h, {$r3}, {$r2}; mov.b32 {$w0}, {l, h}; }",
            write_only_types=[Uint32],
            read_only_args=[x[i] for i in range(4)],
        )

    @staticmethod
    def e2m1x8(x):
        pairs = " ".join(
            f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};" for i in range(4)
        )
        return inline_ptx(
            f"{{ .reg .b8 b0, b1, b2, b3; {pairs} mov.b32 {{$w0}}, {{b0, b1, b2, b3}}; }}",
            write_only_types=[Uint32],
            read_only_args=[x[i] for i in range(8)],
        )

    @staticmethod
    def from_e4m3(code):
        return DeviceCvt.from_e4m3x4(code)[0]

    @staticmethod
    def from_e4m3x4(word):
        # Every e4m3 number is one of fp16, and every one of those one of fp32.
        return list(
            inline_ptx(
                "{ .reg .b16 l, h, a, b, c, d; .reg .b32 x, y; mov.b32 {l, h}, {$r0}; "
                "cvt.rn.f16x2.e4m3x2 x, l; cvt.rn.f16x2.e4m3x2 y, h; mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
                "cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; cvt.f32.f16 {$w2}, c; cvt.f32.f16 {$w3}, d; }",
                write_only_types=[Float32] * 4,
                read_only_args=[word],
            )
        )

    @staticmethod
    def from_e2m1x8(word):
        registers = (
            ".reg .b8 b0, b1, b2, b3; .reg .b32 w0, w1, w2, w3; .reg .b16 l0, l1, l2, l3, h0, h1, h2, h3;"
        )
        steps = " ".join(
            f"cvt.rn.f16x2.e2m1x2 w{i}, b{i}; mov.b32 {{l{i}, h{i}}}, w{i}; "
            f"cvt.f32.f16 {{$w{2 * i}}}, l{i}; cvt.f32.f16 {{$w{2 * i + 1}}}, h{i};"
            for i in range(4)
        )
        return list(
            inline_ptx(
                f"{{ {registers} mov.b32 {{b0, b1, b2, b3}}, {{$r0}}; {steps} }}",
                write_only_types=[Float32] * 8,
                read_only_args=[word],
            )
        )

    @staticmethod
    def narrow(x, dtype):
        return x.to(dtype)


def conversions_for(target: str):
    """The form of conversions that a target has."""
    return DeviceCvt if target in NATIVE else HostCvt
