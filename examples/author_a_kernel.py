"""Add a CuTe kernel for an operator that exists, check it without a GPU, and use it through torch.compile.

The kernel decodes int8 codes with a scale for each token and head. It is written once: a loop runs it on this machine's
processor, a launch on a GPU. cutlass_kernels/README.md explains the steps.

    pip install 'kvq-ops[cutlass]'
    python examples/author_a_kernel.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import kvq_ops
from cutlass_kernels import build, checks
from kvq_ops.formats import Format
from kvq_ops.registry import Implementation, Request, register

build.require()  # says what to install

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
from cutlass import Float32, Int8, Int32, Int64  # noqa: E402

from cutlass_kernels import blocks  # noqa: E402
from cutlass_kernels.conversions import HostCvt  # noqa: E402

NAME = "int8_per_token_head"
CHANNELS = 16  # that one thread decodes


# ------------------------------------------------------------------------------------------------------ 1. the kernel


@cute.jit
def decode(
    codes: cute.Pointer, scale: cute.Pointer, out: cute.Pointer, index: Int32, head_dim: cutlass.Constexpr
):
    """Decode channels ``16 index ... 16 index + 15`` of all vectors, one after the other."""
    start = cute.assume(index.to(Int64) * CHANNELS, divby=CHANNELS)
    held = cute.make_tensor(codes + start, cute.make_layout(CHANNELS)).load().to(Float32)
    factor = cute.make_tensor(scale + index // (head_dim // CHANNELS), cute.make_layout(1))[0]
    blocks.store_numbers(out + start, [held[i] * factor for i in range(CHANNELS)], out.dtype, HostCvt)


@cute.kernel
def decode_kernel(
    codes: cute.Pointer, scale: cute.Pointer, out: cute.Pointer, count: Int32, head_dim: cutlass.Constexpr
):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    index = block * 128 + thread
    if index < count:
        decode(codes, scale, out, index, head_dim)


@cute.jit
def launch(
    codes: cute.Tensor,
    scale: cute.Tensor,
    out: cute.Tensor,
    count: Int32,
    head_dim: cutlass.Constexpr,
    stream,
):
    decode_kernel(codes.iterator, scale.iterator, out.iterator, count, head_dim).launch(
        grid=(cute.ceil_div(count, 128), 1, 1), block=(128, 1, 1), stream=stream
    )


@cute.jit
def loop(codes: cute.Tensor, scale: cute.Tensor, out: cute.Tensor, count: Int32, head_dim: cutlass.Constexpr):
    for index in range(count):
        decode(codes.iterator, scale.iterator, out.iterator, index, head_dim)


def make(target: str, dtype: str, head_dim: int) -> build.Made:
    """What to compile for a target and a shape class: numbers of vectors are not in it."""
    arguments = (
        blocks.tensor(Int8, 1, target, align=16),
        blocks.tensor(Float32, 1, target),
        blocks.tensor(blocks.FLOATS[dtype], 1, target, align=16),
        Int32(0),
        head_dim,
    )
    return (loop, arguments) if target == build.HOST else (launch, (*arguments, build.stream()))


KERNEL = build.Kernel("example_int8_decode", make)


# --------------------------------------------------------------------------------------------- 2. one row of the registry

calls = 0


def dequantize(store: Sequence[Tensor], fmt: Format, dtype: torch.dtype) -> Tensor:
    """``kvq::dequantize``: tensors in, kernel, tensor out."""
    global calls
    calls += 1
    codes, scale = build.aligned(store[0].contiguous(), 16), store[1].contiguous()  # as ``make`` promises
    made = torch.float32 if dtype is torch.float64 else dtype
    out = torch.empty_like(codes, dtype=made)
    if out.numel():
        kernel = KERNEL.compiled(
            build.target_of(out.device), dtype=str(made).removeprefix("torch."), head_dim=out.shape[3]
        )
        kernel(codes.view(-1), scale.view(-1), out.view(-1), out.numel() // CHANNELS)
    return out.to(dtype)


def refuses(request: Request) -> str | None:
    if request.formats[0].name != NAME:
        return f"format {request.formats[0]}: only {NAME}"
    if request.head_dims[0] % CHANNELS:
        return f"head_dim {request.head_dims[0]}: multiples of {CHANNELS}"
    return build.why_not()


def main() -> None:
    register(Implementation("example", "dequantize", dequantize, refuses, priority=100))

    # 3. The compile matrix: does it compile for each GPU, to the instructions it was written for, without spilling?
    for target, used in checks.compiles(
        KERNEL, opcodes=["ld.global.v4.b32", "st.global.v4.b32"], registers=64, dtype="bfloat16", head_dim=128
    ).items():
        print(f"{target}: {used.registers} registers, {used.stack} bytes spilled")

    # 4. The run on this machine's processor, against plain torch bit for bit, and opcheck.
    cases = checks.operator("dequantize", "example", [NAME], head_dims=(64, 80))
    print(f"{cases} cases equal plain torch, and opcheck is content")

    # 5. Use.
    print(kvq_ops.explain("dequantize", kvq_ops.get_format(NAME), head_dim=64))
    store = kvq_ops.quantize(torch.randn(1, 2, 5, 64), NAME)
    before = calls
    step = torch.compile(lambda store: kvq_ops.dequantize(store, NAME).sum(2), fullgraph=True)
    same = torch.equal(step(store), kvq_ops.dequantize(store, NAME).sum(2))
    print(f"through torch.compile: equal {same}, {calls - before} calls of the kernel")


if __name__ == "__main__":
    main()
