"""C++ kernels for CPUs: compiled with the system's compiler at first use, chosen before plain torch.

``KVQ_CPU_CAPABILITY`` (``native``, ``avx512``, ``avx2``, ``default``) restricts the instructions they use, ``KVQ_CACHE`` says
where they are kept, ``CXX`` what compiles them. Without a compiler a warning says so once, and plain torch runs.
"""

from __future__ import annotations

from ..registry import Implementation, register
from . import kernels

__all__ = ["register_kernels"]


def register_kernels() -> None:
    """Make the kernels known to the registry. Nothing is compiled before an operator wants them."""
    for op, run in (
        ("quantize", kernels.quantize),
        ("dequantize", kernels.dequantize),
        ("append_", kernels.append_),
        ("attention", kernels.attention),
        ("paged_append_", kernels.paged_append_),
        ("paged_attention", kernels.paged_attention),
    ):
        register(Implementation("cpu", op, run, kernels.refuses, priority=10))
