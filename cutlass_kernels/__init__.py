"""Kernels written in CuTe DSL, CUTLASS's Python language, for NVFP4 and other narrow floats on Blackwell GPUs.

Importing the package needs nothing but torch; modules with kernels in them import ``cutlass``, and are imported when an operator
first wants one. No kernel here has run on a Blackwell GPU yet; how they are tested instead, ``README.md`` says.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_ops.registry import Request

__all__ = ["OPS", "PRIORITY", "register_kernels"]

_MODULES = {
    "quantize": "operators",
    "dequantize": "operators",
    "append_": "operators",
    "paged_append_": "operators",
    "attention": "attention",
    "paged_attention": "attention",
}
OPS = tuple(_MODULES)
PRIORITY = 30


def _module(op: str) -> Any:
    return importlib.import_module(f".{_MODULES[op]}", __name__)


def _refuses(request: Request) -> str | None:
    # What most requests are, without importing anything.
    if request.device != "cuda":
        return f"tensors on {request.device}: Blackwell GPUs are served"
    reason: str | None = _module(request.op).refuses(request)
    return reason


def _runner(op: str) -> Any:
    def run(*arguments: Any, **options: Any) -> Any:
        return getattr(_module(op), op)(*arguments, **options)

    return run


def register_kernels() -> None:
    """Make the kernels known to the registry. Nothing is imported or compiled before an operator wants them."""
    from kvq_ops.registry import Implementation, register

    for op in OPS:
        register(Implementation("cutlass", op, _runner(op), _refuses, priority=PRIORITY))
