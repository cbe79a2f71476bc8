"""Ready-made checks for a new kernel; none of them needs a GPU.

    compiles(KERNEL, opcodes=[...], **shape)      for every Blackwell target: instructions, registers, no spills
    refused(KERNEL, "sm_90a", **shape)            and where it must not compile
    operator("dequantize", "mine", ["nvfp4"])     what is registered under a name: equal to plain torch bit for bit (attention:
                                                  within rounding of the fp64 oracle), and accepted by opcheck

``tests/cutlass`` uses them for the kernels of this package, ``examples/author_a_kernel.py`` for a new one.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvq_ops.errors import ImplementationError
from kvq_ops.formats import Format, get_format
from kvq_ops.registry import Request, implementations, use_implementation

from .build import NATIVE, BuildError, Compiled, Kernel

__all__ = ["Resources", "compiles", "disassembly", "operator", "refused", "resources"]


# ------------------------------------------------------------------------------------------------------------ assembly


@functools.cache
def _tool(name: str) -> str:
    """``cuobjdump`` or ``nvdisasm``: of a CUDA toolkit, or of NVIDIA's packages of these names."""
    found = shutil.which(name)
    places = [Path("/usr/local/cuda/bin"), *Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin")]
    for place in places:
        found = found or shutil.which(name, path=str(place))
    if found is None:
        raise ImplementationError(
            f"looking into machine code with {name}",
            got="it is not installed",
            do=f"pip install nvidia-cuda-{name}; it needs no GPU",
        )
    return found


@functools.cache
def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@dataclass(frozen=True)
class Resources:
    """What ``ptxas`` gave a kernel: registers of a thread, bytes of its stack (spills lie there) and of shared memory."""

    registers: int
    stack: int
    shared: int


def resources(compiled: Compiled) -> dict[str, Resources]:
    """Resources of each kernel of a compiled module, by name."""
    said = _output(_tool("cuobjdump"), "-res-usage", str(compiled.cubin))
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
    return {name: Resources(*map(int, numbers)) for name, *numbers in found}


def disassembly(compiled: Compiled) -> str:
    """The machine code (SASS) as text."""
    return _output(_tool("nvdisasm"), "-c", str(compiled.cubin))


def compiles(
    kernel: Kernel,
    *,
    targets: Sequence[str] = NATIVE,
    opcodes: Sequence[str] = (),
    registers: int = 128,
    **shape: Any,
) -> dict[str, Resources]:
    """Compile for every target and look at what came out.

    Args:
        opcodes: texts that the PTX has to hold, such as ``"cvt.rn.satfinite.e2m1x2"``. That a kernel compiles says little: one
            that was meant to use an instruction and does not, compiles too.
        registers: at most so many for a thread.
        shape: the shape class.

    Returns:
        what the largest kernel of the module takes, by target.

    Raises:
        AssertionError: an instruction is missing, registers are too many, or some are spilled.
        BuildError: it does not compile.
    """
    made = {}
    for target in targets:
        compiled = kernel.compiled(target, **shape)
        text = compiled.ptx
        assert f".target {target}" in text, f"{kernel.name} was not compiled for {target}"
        for opcode in opcodes:
            assert opcode in text, f"{kernel.name} for {target}, {shape}: no {opcode}"
        found = resources(compiled)
        assert found, f"{kernel.name} for {target}: no kernel in the module"
        for name, used in found.items():
            assert used.registers <= registers, (
                f"{name} for {target}: {used.registers} registers, over {registers}"
            )
            spilled = re.findall(r"\b(?:STL|LDL)\b", disassembly(compiled)) if used.stack else []
            assert not used.stack and not spilled, f"{name} for {target}: {used.stack} bytes of stack"
        made[target] = max(found.values(), key=lambda used: used.registers)
    return made


def refused(kernel: Kernel, target: str, **shape: Any) -> str:
    """What the compiler says against a kernel that it must refuse for a target; ``AssertionError`` if it takes it."""
    try:
        kernel.compiled(target, **shape)
    except BuildError as error:
        return str(error)
    raise AssertionError(f"{kernel.name} compiles for {target}, and must not")


# ----------------------------------------------------------------------------------------------------------- operators


def _values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random values of many magnitudes, with what is awkward in some tokens: zeros, ties, NaN, infinities, huge and tiny."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[2])[:, None]
    x[0, 0, 0] = 0
    x[0, -1, 1, ::3] = -0.0
    x[-1, 0, 2] = torch.randint(-12, 13, (shape[3],), generator=generator) / 2
    x[-1, -1, 3, 1], x[-1, -1, 3, 5], x[0, 0, 3, 2] = torch.nan, torch.inf, -torch.inf
    x[0, -1, 4] *= 1e-12
    x[-1, 0, 4] *= 1e30 if dtype is not torch.float16 else 100
    return x.to(dtype)


def _raw(plane: Tensor) -> Tensor:
    return plane.contiguous().reshape(-1).view(torch.uint8)


def _same(got: Sequence[Tensor], want: Sequence[Tensor], fmt: Format, context: str) -> None:
    for plane, a, b in zip(fmt.planes, got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, f"{context}: plane {plane.name} of another kind"
        wrong = int((_raw(a) != _raw(b)).sum())
        assert not wrong, f"{context}: {wrong} bytes of plane {plane.name} differ from plain torch"


def _torch(op: str) -> Any:
    return next(row for row in implementations(op) if row.name == "torch").run


def operator(
    op: str,
    name: str,
    formats: Sequence[str],
    *,
    head_dims: Sequence[int] = (64,),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    device: str = "cpu",
    opcheck: bool = True,
) -> int:
    """Run an operator by the implementation ``name``, and compare with plain torch.

    Args:
        op: ``quantize``, ``dequantize``, ``append_`` or ``paged_append_``.
        name: of the registry's row.
        formats: the formats, none calibrated beforehand, that it is to serve.
        device: where; on a CPU a kernel for the host is what runs.
        opcheck: also ask ``torch.library.opcheck``, once for a format.

    Returns:
        how many cases were compared.

    Raises:
        AssertionError: a byte differs, or opcheck finds fault.
        ImplementationError: the row is not there, or refuses.
    """
    cases = 0
    for fmt in map(get_format, formats):
        for head_dim in head_dims:
            for dtype in dtypes:
                context = f"{op} of {fmt.name} by {name}, head_dim {head_dim}, {dtype}"
                x = _values((2, 3, 5, head_dim), dtype, seed=cases).to(device)
                request = Request(op, x.device.type, (fmt,), (head_dim,), dtype)
                row = next((row for row in implementations(op) if row.name == name), None)
                reason = "no such row" if row is None else row.refuses(request)
                if row is None or reason:
                    raise ImplementationError(context, got=str(reason), do="register a row that serves it")
                _CHECKS[op](row.run, x, fmt, dtype, context)
                if opcheck and head_dim == head_dims[0] and dtype == dtypes[0]:
                    arguments = _arguments(op, x, fmt, dtype)
                    with use_implementation(name):
                        found = torch.library.opcheck(getattr(torch.ops.kvq, op).default, arguments)
                    assert set(found.values()) == {"SUCCESS"}, f"{context}: {found}"
                cases += 1
    return cases


def _positions(x: Tensor) -> list[Tensor]:
    """For a cache of 8 tokens: in order, and for rows that stand at different lengths, one of them backwards."""
    count = x.shape[2]
    order = torch.arange(count, device=x.device)
    return [order + 2, torch.stack([order, 7 - order]).int()]


_TABLE = [[4, 1, -1], [0, 6, 3]]


def _arguments(op: str, x: Tensor, fmt: Format, dtype: torch.dtype) -> tuple[Any, ...]:
    if op == "quantize":
        return x, fmt.name
    if op == "dequantize":
        return _torch("quantize")(x, fmt), fmt.name, dtype
    if op == "append_":
        store = fmt.empty_store(x.shape[0], x.shape[1], 8, x.shape[3], dtype=dtype, device=x.device)
        return store, _positions(x)[1], x, fmt.name
    pages = fmt.empty_store(7, x.shape[1], 4, x.shape[3], dtype=dtype, device=x.device)
    table = torch.tensor(_TABLE, dtype=torch.int32, device=x.device)
    position = torch.tensor([[0, -1, 5, 3, 7], [11, 0, 9, -1, 4]], device=x.device)
    return pages, table, position, x, fmt.name


def _check_quantize(run: Any, x: Tensor, fmt: Format, dtype: torch.dtype, context: str) -> None:
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x[..., :0, :]):
        _same(run(given, fmt), _torch("quantize")(given, fmt), fmt, context)


def _check_dequantize(run: Any, x: Tensor, fmt: Format, dtype: torch.dtype, context: str) -> None:
    store = _torch("quantize")(x, fmt)
    for wanted in (dtype, torch.float64):
        got, want = run(store, fmt, wanted), _torch("dequantize")(store, fmt, wanted)
        assert got.dtype is want.dtype and got.shape == want.shape, f"{context}: of another kind"
        wrong = int((_raw(got) != _raw(want)).sum())
        assert not wrong, f"{context}: {wrong} bytes differ from plain torch"


def _check_append(run: Any, x: Tensor, fmt: Format, dtype: torch.dtype, context: str) -> None:
    got, want = (_arguments("append_", x, fmt, dtype)[0] for _ in range(2))
    for position in _positions(x):
        run(got, position, x, fmt)
        _torch("append_")(want, position, x, fmt)
        _same(got, want, fmt, context)
    run(got, position[:, :1], x[:, :, 4:] * 3, fmt)
    _torch("append_")(want, position[:, :1], x[:, :, 4:] * 3, fmt)
    _same(got, want, fmt, f"{context}, again")


def _check_paged_append(run: Any, x: Tensor, fmt: Format, dtype: torch.dtype, context: str) -> None:
    got, want = (_arguments("paged_append_", x, fmt, dtype) for _ in range(2))
    for step in (x, x * 2):
        run(*got[:3], step, fmt)
        _torch("paged_append_")(*want[:3], step, fmt)
        _same(got[0], want[0], fmt, context)


_CHECKS = {
    "quantize": _check_quantize,
    "dequantize": _check_dequantize,
    "append_": _check_append,
    "paged_append_": _check_paged_append,
}
