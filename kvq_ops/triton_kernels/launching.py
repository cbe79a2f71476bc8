"""How kernels are started: at once on tensors with memory, as nodes of the graph while a graph is traced.

A graph that is to serve many sizes is traced with symbols for them. To compare one binds the graph to the answer, and to ask for
its ``int(...)`` to that number, so that the next size is compiled for again. Launchers therefore keep sizes in arithmetic
(``torch.sym_min``, ``-(-a // b)``), and compare only what decides how the work is done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["callable_of", "is_tracing", "known_multiple", "tracing"]

_state = threading.local()


def is_tracing() -> bool:
    """Whether launches are to become nodes of a graph."""
    return getattr(_state, "tracing", False)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Inside, launches become nodes of the graph that is being traced."""
    before = is_tracing()
    _state.tracing = True
    try:
        yield
    finally:
        _state.tracing = before


def callable_of(kernel: Any) -> Any:
    """What takes ``[grid](...)`` for a kernel made by ``triton.jit``.

    A launcher calls its kernels as ``callable_of(kernel)[grid](...)`` and serves both ways: in eager this is the kernel itself
    (a detour by way of the graph's operator would cost about a millisecond a launch), while a graph is traced it is
    ``torch.library.wrap_triton(kernel)``.
    """
    return torch.library.wrap_triton(kernel) if is_tracing() else kernel


def known_multiple(size: int, of: int) -> bool:
    """Whether ``size`` is a multiple of ``of``, whatever its symbols stand for."""
    if type(size) is int:
        return size % of == 0
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(size % of == 0)
