"""What every kernel does with a unit of channels: load, find the largest magnitude, code, store, and back.

The functions stand for code: they run while a kernel is traced, on values that are registers later, so that a ``for`` in them
is unrolled. Arithmetic is that of ``kvq_ops.codecs``, operation by operation: fp32, IEEE division, ties to even.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint8, Uint32
from cutlass.cute.runtime import make_fake_tensor

from .build import HOST
from .coding import Coding
from .conversions import choose, magnitude_bits

__all__ = [
    "FLOATS",
    "Index",
    "View",
    "decode_unit",
    "encode_unit",
    "first",
    "fitted_scale",
    "larger",
    "largest_in_group",
    "largest_magnitude",
    "load_unit",
    "load_words",
    "scale_tensor",
    "store_numbers",
    "store_words",
    "tensor",
    "view",
]

FLOATS = {"float32": Float32, "float16": cutlass.Float16, "bfloat16": cutlass.BFloat16}
_INFINITY = 0x7F800000
_SMALLEST_AMAX = 1e-8


class View(NamedTuple):
    """A tensor ``[B, H, T, ...]`` whose last axis has no gaps: where it starts, and its strides."""

    pointer: cute.Pointer
    b: Int64
    h: Int64
    t: Int64

    def row(self, b, h, t, multiple: int = 1):
        """Pointer to the first element of the vector at ``b``, ``h``, ``t``, which lies at a multiple of ``multiple``."""
        offset = b.to(Int64) * self.b + h.to(Int64) * self.h + t.to(Int64) * self.t
        return self.pointer + cute.assume(offset, divby=multiple)


class Index(NamedTuple):
    """A table of integers ``[B, N]``."""

    pointer: cute.Pointer
    b: Int64
    n: Int64

    def at(self, b, n):
        offset = b.to(Int64) * self.b + n.to(Int64) * self.n
        return cute.make_tensor(self.pointer + offset, cute.make_layout(1))[0].to(Int64)


def view(tensor) -> View:
    """The view of a tensor argument of three or four axes."""
    return View(tensor.iterator, *(Int64(tensor.stride[axis]) for axis in range(3)))


def tensor(dtype, axes: int, target: str, *, last: bool = True, multiple: int = 1, align: int | None = None):
    """A stand-in for a tensor, to compile with: any sizes and strides.

    Args:
        last: the stride of the last axis is one.
        multiple: elements, of which other strides are multiples.
        align: bytes, of which the address is a multiple.
    """
    strides = [cute.sym_int64(divisibility=multiple) for _ in range(axes - last)] + [1] * last
    space = cute.AddressSpace.generic if target == HOST else cute.AddressSpace.gmem
    sizes = tuple(cute.sym_int32() for _ in range(axes))
    return make_fake_tensor(dtype, sizes, tuple(strides), memspace=space, assumed_align=align)


def scale_tensor(coding: Coding, target: str):
    """The stand-in for the plane with scales of blocks or of tokens; ``None`` where there is no such plane."""
    if coding.scale_bytes:
        return tensor(Uint8, 4, target)
    return tensor(Float32, 3, target, last=False) if coding.scale == "token" else None


def first(pointer, index=0):
    """A tensor of the one element at ``pointer + index``."""
    return cute.make_tensor(pointer + index, cute.make_layout(1))


# ------------------------------------------------------------------------------------------------------------- memory


def load_unit(pointer, count: int, *, wide: bool) -> list[Float32]:
    """``count`` numbers from ``pointer`` on, as fp32; in loads of 16 bytes where the pointer is a multiple of that."""
    source = cute.make_tensor(pointer, cute.make_layout(count))
    if not wide:
        return [source[i].to(Float32) for i in range(count)]
    values = source.load().to(Float32)
    return [values[i] for i in range(count)]


def load_words(pointer, count: int, *, wide: bool) -> list[Uint32]:
    """``count`` words from bytes."""
    if not wide:
        source = cute.make_tensor(pointer, cute.make_layout(4 * count))
        octets = [source[i].to(Uint32) for i in range(4 * count)]
        return [
            octets[4 * i]
            | (octets[4 * i + 1] << Uint32(8))
            | (octets[4 * i + 2] << Uint32(16))
            | (octets[4 * i + 3] << Uint32(24))
            for i in range(count)
        ]
    words = cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(count)).load()
    return [words[i] for i in range(count)]


def store_words(pointer, words: list[Uint32], *, wide: bool) -> None:
    """Words to bytes from ``pointer`` on; in stores of up to 16 bytes where the pointer is a multiple of their size."""
    if not wide:
        target = cute.make_tensor(pointer, cute.make_layout(4 * len(words)))
        for i, word in enumerate(words):
            for k in range(4):
                target[4 * i + k] = ((word >> Uint32(8 * k)) & Uint32(0xFF)).to(Uint8)
        return
    held = cute.make_rmem_tensor(cute.make_layout(len(words)), Uint32)
    for i, word in enumerate(words):
        held[i] = word
    cute.autovec_copy(
        held, cute.make_tensor(cute.recast_ptr(pointer, dtype=Uint32), cute.make_layout(len(words)))
    )


def store_numbers(pointer, values: list[Float32], dtype, cvt) -> None:
    """Numbers as ``dtype`` from ``pointer`` on, a multiple of 16 bytes, saturating at the largest one of ``dtype``."""
    limit = {cutlass.Float16: 65504.0, cutlass.BFloat16: 3.3895313892515355e38}.get(
        dtype, 3.4028234663852886e38
    )
    held = cute.make_rmem_tensor(cute.make_layout(len(values)), dtype)
    for i, value in enumerate(values):
        # Not a minimum and a maximum, which would drop NaN.
        value = choose(value > Float32(limit), Float32(limit), value)
        value = choose(value < Float32(-limit), Float32(-limit), value)
        held[i] = cvt.narrow(value, dtype)
    cute.autovec_copy(held, cute.make_tensor(pointer, cute.make_layout(len(values))))


# ------------------------------------------------------------------------------------------------------------ numbers


def _divided(x, scale):
    """``x / scale``, and zero where the scale is zero."""
    usable = scale != Float32(0.0)
    return choose(usable, x / choose(usable, scale, Float32(1.0)), Float32(0.0))


def _without_nan(x):
    return choose(magnitude_bits(x) > Uint32(_INFINITY), Float32(0.0), x)


def larger(a, b):
    """The larger of two numbers, neither of them NaN."""
    return choose(a > b, a, b)


def largest_magnitude(values: list[Float32]) -> Uint32:
    """The bits of the largest finite magnitude; zero where there is none."""
    largest = Uint32(0)
    for value in values:
        bits = magnitude_bits(value)
        largest = larger(choose(bits < Uint32(_INFINITY), bits, Uint32(0)), largest)
    return largest


def largest_in_group(bits: Uint32, lanes: int) -> Uint32:
    """The largest of the ``lanes`` neighbouring threads that share a vector; each of the warp has to come here."""
    offset = lanes // 2
    while offset:
        bits = larger(bits, Uint32(cute.arch.shuffle_sync_bfly(bits, offset=offset)))
        offset //= 2
    return bits


def fitted_scale(coding: Coding, bits: Uint32) -> Float32:
    """The scale fitted to tokens whose largest magnitude has these bits."""
    amax = bits.bitcast(Float32)
    held = choose(amax > Float32(_SMALLEST_AMAX), amax, Float32(_SMALLEST_AMAX))
    return choose(bits > Uint32(0), held / Float32(coding.divisor), Float32(0.0))


def _pack(coding: Coding, values: list[Float32], cvt) -> list[Uint32]:
    convert, count = (cvt.e2m1x8, 8) if coding.bits == 4 else (cvt.e4m3x4, 4)
    return [convert(values[i : i + count]) for i in range(0, len(values), count)]


def _power_of_two(exponent: Uint32) -> Float32:
    """``2^(exponent - 127)``; zero stands for ``2^-127``, which is not a normal number."""
    return choose(exponent == Uint32(0), Uint32(0x00400000), exponent << Uint32(23)).bitcast(Float32)


def encode_unit(coding: Coding, values: list[Float32], scale: Float32, cvt):
    """Codes of a unit and, where its block has one, the byte of its scale.

    Args:
        scale: of the token, head or tensor; ignored where blocks have scales alone.
        cvt: ``HostCvt`` or ``DeviceCvt``.

    Returns:
        words of codes, and a word with the byte, or ``None``.
    """
    if coding.name == "nvfp4":
        amax = largest_magnitude(values).bitcast(Float32)
        ratio = _divided(amax, Float32(6.0) * scale)
        # A block that would be erased takes the smallest scale, where anything in it has a code other than zero then. A ratio
        # above 448 saturates when it is converted.
        worth = _divided(amax, scale) > Float32(2.0**-11)
        smallest = Float32(2.0**-9)
        ratio = choose(worth, choose(ratio < smallest, smallest, ratio), ratio)
        byte = cvt.e4m3(ratio)
        wide = cvt.from_e4m3(byte) * scale
        return _pack(coding, [_divided(_without_nan(x), wide) for x in values], cvt), byte
    if coding.scale == "block":
        # OCP MX: 2^(floor(log2 amax) - emax). Dividing by a power of two is multiplying by its reciprocal.
        exponent = largest_magnitude(values) >> Uint32(23)
        emax = Uint32(2 if coding.bits == 4 else 8)
        exponent = choose(exponent > emax, exponent - emax, Uint32(0))
        reciprocal = _power_of_two(Uint32(254) - exponent)
        return _pack(coding, [_without_nan(x) * reciprocal for x in values], cvt), exponent
    return _pack(coding, [_divided(_without_nan(x), scale) for x in values], cvt), None


def decode_unit(
    coding: Coding, words: list[Uint32], byte: Uint32 | None, scale: Float32 | None, cvt
) -> list[Float32]:
    """The numbers of a unit.

    Args:
        byte: of the block's scale.
        scale: of the token, head or tensor.
    """
    convert = cvt.from_e2m1x8 if coding.bits == 4 else cvt.from_e4m3x4
    values = [value for word in words for value in convert(word)]
    if coding.name == "nvfp4":
        scale = cvt.from_e4m3(byte) * scale
    elif coding.scale == "block":
        scale = _power_of_two(byte)
    return [value * scale for value in values]
