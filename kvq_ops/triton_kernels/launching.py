"""How kernels are started: at once on tensors with memory, as nodes of the graph while a graph is traced."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["callable_of", "is_tracing", "tracing"]

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
