"""The launchers of ``cutlass_kernels.operators`` with the PTX simulator in place of a GPU.

Everything else is as on one: launchers pick shape classes and arguments, ``build`` compiles for a named target, and the
PTX of that is executed on CPU tensors. Only the host function between them, which turns tensors into a kernel's parameters, is
restated here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cutlass_kernels import build, operators
from cutlass_kernels.build import Compiled
from cutlass_kernels.coding import CODINGS
from tests.cutlass.contract import check_arguments
from tests.cutlass.ptxsim import GlobalMemory, run

__all__ = ["simulated"]

THREADS = 128


class _Memory:
    """Tensors as addresses; tensors that share memory share a buffer."""

    def __init__(self) -> None:
        self.memory = GlobalMemory()
        self._known: dict[int, int] = {}

    def address(self, tensor: Tensor, writable: bool | str) -> int:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            octets: np.ndarray = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            self._known[storage.data_ptr()] = self.memory.add(octets, writable=writable)
        return self._known[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()

    def view(self, tensor: Tensor | None, axes: int, writable: bool | str) -> list[int]:
        """Address and the strides of the first ``axes`` axes."""
        return [] if tensor is None else [self.address(tensor, writable), *tensor.stride()[:axes]]


def _encode(
    memory: _Memory, arguments: tuple[Tensor | None, ...], shape: dict[str, Any]
) -> tuple[int, list[int]]:
    x, codes, scales, static, seen, length, position, table = arguments
    assert x is not None and codes is not None
    batch, heads, tokens, dim = x.shape
    rows = batch * heads * tokens
    sizes = [rows, heads, tokens, codes.shape[2], codes.shape[0], 0 if table is None else table.shape[1]]
    given = [
        *memory.view(x, 3, False),
        *sizes,
        *memory.view(position, 2, False),
        *memory.view(table, 2, False),
    ]
    # Each byte of codes and scales is written by one thread; the rest goes by atomics, or has one writer.
    given += [
        *memory.view(codes, 3, "once"),
        *memory.view(scales, 3, "once"),
        *memory.view(static, 0, "once"),
    ]
    given += [*memory.view(seen, 0, True), *memory.view(length, 0, True)]
    units = dim // CODINGS[shape["coding"]].unit
    return rows * (1 << (units - 1).bit_length()), given


def _decode(
    memory: _Memory, arguments: tuple[Tensor | None, ...], shape: dict[str, Any]
) -> tuple[int, list[int]]:
    codes, scales, static, out = arguments
    assert codes is not None and out is not None
    count = out.numel() // CODINGS[shape["coding"]].unit
    given = [*memory.view(codes, 3, False), *memory.view(scales, 3, False), *memory.view(static, 0, False)]
    return count, [*given, *memory.view(out, 3, "once"), count, codes.shape[1], codes.shape[2]]


_PARAMETERS = {"encode": _encode, "measure": _encode, "decode": _decode}


@contextlib.contextmanager
def simulated(
    target: str, *, schedule: int | None = None, change: Callable[[str, str], str] = lambda kernel, ptx: ptx
) -> Iterator[dict[str, int]]:
    """Run kernels for ``target`` in the simulator.

    Args:
        schedule: seed of a random order of warps; lockstep unless given.
        change: of the PTX of a kernel before it runs, to plant a fault.

    Yields:
        how many launches there were, by kernel.
    """
    launches: dict[str, int] = {}

    def call(compiled: Compiled, *arguments: Any) -> None:
        assert compiled.target == target
        kernel = {"encode": operators.ENCODE, "measure": operators.MEASURE, "decode": operators.DECODE}[
            compiled.kernel
        ]
        stand_ins = kernel.make(target, **compiled.shape)[1]
        check_arguments(stand_ins[: len(arguments)], arguments, f"{compiled.kernel} {compiled.shape}")
        memory = _Memory()
        threads, given = _PARAMETERS[compiled.kernel](memory, arguments, compiled.shape)
        grid = (-(-threads // THREADS), 1, 1)
        run(
            change(compiled.kernel, compiled.ptx),
            grid,
            (THREADS, 1, 1),
            given,
            memory.memory,
            schedule=schedule,
        )
        launches[compiled.kernel] = launches.get(compiled.kernel, 0) + 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "target_of", lambda device: target)
        patch.setattr(Compiled, "__call__", call)
        yield launches
