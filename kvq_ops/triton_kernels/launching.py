"""How kernels are started: at once on tensors with memory, as nodes of the graph while a graph is traced."""

from __future__ import annotations

from typing import Any

__all__ = ["callable_of"]


def callable_of(kernel: Any) -> Any:
    """What takes ``[grid](...)`` for a kernel made by ``triton.jit``."""
    return kernel
