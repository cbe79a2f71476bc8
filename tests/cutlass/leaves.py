"""Kernels that convert numbers and do nothing else, for tests of the conversions themselves."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, Uint32

from cutlass_kernels import blocks
from cutlass_kernels.build import HOST, Kernel, stream
from cutlass_kernels.conversions import DeviceCvt, HostCvt

FORMS = {"HostCvt": HostCvt, "DeviceCvt": DeviceCvt}


def _words(cvt, what: str, x):
    """Eight numbers to words, or words to eight numbers."""
    if what == "to_e4m3":
        return [cvt.e4m3x4(x[:4]), cvt.e4m3x4(x[4:])]
    if what == "to_e4m3_singly":
        codes = [cvt.e4m3(value) for value in x]
        return [
            codes[i]
            | (codes[i + 1] << Uint32(8))
            | (codes[i + 2] << Uint32(16))
            | (codes[i + 3] << Uint32(24))
            for i in (0, 4)
        ]
    return [cvt.e2m1x8(x)]


@cute.jit
def convert(
    x: cute.Pointer, out: cute.Pointer, index: Int32, what: cutlass.Constexpr, form: cutlass.Constexpr
):
    cvt, bits = FORMS[form], 4 if "e2m1" in what else 8
    numbers, octets = index * Int32(8), index * Int32(bits)
    if cutlass.const_expr(what.startswith("to_")):
        values = blocks.load_unit(x + numbers, 8, wide=False)
        blocks.store_words(out + octets, _words(cvt, what, values), wide=False)
    else:
        words = blocks.load_words(x + octets, bits // 4, wide=False)
        convert_words = cvt.from_e2m1x8 if bits == 4 else cvt.from_e4m3x4
        values = [value for word in words for value in convert_words(word)]
        target = cute.make_tensor(out + numbers, cute.make_layout(8))
        for i in cutlass.range_constexpr(8):
            target[i] = values[i]


@cute.kernel
def convert_kernel(
    x: cute.Pointer, out: cute.Pointer, count: Int32, what: cutlass.Constexpr, form: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * 128 + thread
    if index < count:
        convert(x, out, index, what, form)


@cute.jit
def launch(
    x: cute.Tensor, out: cute.Tensor, count: Int32, what: cutlass.Constexpr, form: cutlass.Constexpr, stream
):
    convert_kernel(x.iterator, out.iterator, count, what, form).launch(
        grid=(cute.ceil_div(count, 128), 1, 1), block=(128, 1, 1), stream=stream
    )


@cute.jit
def loop(x: cute.Tensor, out: cute.Tensor, count: Int32, what: cutlass.Constexpr, form: cutlass.Constexpr):
    for index in range(count):
        convert(x.iterator, out.iterator, index, what, form)


def make(target: str, what: str, form: str):
    kinds = (Float32, Uint8) if what.startswith("to_") else (Uint8, Float32)
    arguments = (*(blocks.tensor(kind, 1, target) for kind in kinds), Int32(1), what, form)
    return (loop, arguments) if target == HOST else (launch, (*arguments, stream()))


CONVERT = Kernel("convert", make)
"""``x``, ``out`` and how many groups of eight numbers; see ``make`` for the shape class."""
