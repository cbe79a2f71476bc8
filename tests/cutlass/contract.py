"""What a compiled kernel demands of its arguments, checked where the kernel itself is not called.

On a GPU the function that launches refuses tensors whose address, strides, type or number of axes are not what it was
compiled for. The simulator begins behind it, so whoever simulates a launch asks here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["check_arguments"]


def _multiple(stride: Any) -> int | None:
    """Of what a stride has to be a multiple; ``None`` for one that is fixed."""
    return None if isinstance(stride, int) else int(getattr(stride, "divisibility", 1))


def check_arguments(stand_ins: Sequence[Any], given: Sequence[Any], context: str) -> None:
    """Raise ``AssertionError`` for the first argument that the compiled function would refuse.

    Args:
        stand_ins: what the kernel was compiled with, constants and stream left out.
        given: the arguments of a call.
    """
    assert len(stand_ins) == len(given), f"{context}: {len(given)} arguments, compiled for {len(stand_ins)}"
    for index, (stand_in, argument) in enumerate(zip(stand_ins, given, strict=True)):
        where = f"{context}, argument {index}"
        kind = type(argument).__name__
        assert (stand_in is None) == (argument is None), f"{where}: {kind} for {stand_in}"
        assert hasattr(stand_in, "_assumed_align") == isinstance(argument, Tensor), (
            f"{where}: {kind} for {stand_in}"
        )
        if not isinstance(argument, Tensor):
            continue
        assert argument.dim() == len(stand_in.shape), f"{where}: {argument.dim()} axes"
        dtype = str(argument.dtype).removeprefix("torch.")
        assert dtype == stand_in.element_type.__name__.lower(), (
            f"{where}: {dtype} for {stand_in.element_type}"
        )
        align = stand_in._assumed_align
        assert argument.data_ptr() % align == 0, f"{where}: not at a multiple of {align} bytes"
        for size, step, wanted in zip(argument.shape, argument.stride(), stand_in.stride, strict=True):
            multiple = _multiple(wanted)
            if multiple is None:
                assert size == 1 or step == wanted, f"{where}: a stride of {step}, not {wanted}"
            else:
                assert step % multiple == 0, f"{where}: a stride of {step}, no multiple of {multiple}"
