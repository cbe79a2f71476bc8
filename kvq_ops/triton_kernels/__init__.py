"""Triton kernels: quantize, append_, dequantize and attention on GPUs, for every format of the table.

Importing this package does not import triton: that happens when an operator first meets a tensor that the kernels may
serve. They serve NVIDIA GPUs from sm_80 on and AMD's gfx94x; where ``TRITON_INTERPRET=1`` was set before ``kvq_ops`` was
imported they also run on the CPU, slowly, in Triton's interpreter, and only when asked for by name
(``kvq_ops.use_implementation("triton")``).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from ..registry import Implementation, register
from .availability import INTERPRETED, refuses
from .launching import is_tracing

__all__ = ["register_kernels"]

# Where the launcher of each operator is.
_LAUNCHERS = {
    "quantize": ("encode", "quantize"),
    "dequantize": ("dequantize", "dequantize"),
    "append_": ("append", "append_"),
    "attention": ("attention", "attention"),
    "paged_append_": ("append", "paged_append_"),
    "paged_attention": ("attention", "paged_attention"),
}


def register_kernels() -> None:
    """Make the kernels known to the registry. Nothing is imported or compiled before an operator wants them."""
    for op in _LAUNCHERS:
        # On a GPU before plain torch. The interpreter is for tests of the kernels: nobody gets it unasked.
        register(
            Implementation(
                "triton", op, _deferred(op), refuses, priority=-10 if INTERPRETED else 20, inlined=True
            )
        )


def _deferred(op: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        result = _launcher(op)(*args, **kwargs)
        if op in ("append_", "paged_append_") and not is_tracing():
            # Autograd and functionalization go by the version of a tensor, which nothing else has moved.
            torch.autograd.graph.increment_version(args[0])
        return result

    return run


@functools.cache
def _launcher(op: str) -> Callable[..., Any]:
    module, name = _LAUNCHERS[op]
    launcher: Callable[..., Any] = getattr(importlib.import_module(f".{module}", __name__), name)
    return launcher
