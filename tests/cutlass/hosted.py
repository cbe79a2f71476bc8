"""The kernels on CPU tensors, under a name of their own in the registry: the same source, compiled for this processor."""

from __future__ import annotations

from cutlass_kernels import OPS, operators
from cutlass_kernels.coding import why_not_format
from kvq_ops.registry import Implementation, Request, register

NAME = "cutlass_on_cpu"
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_per_token_head", "fp8_per_head", "fp8_e4m3")
BITS = ("quantize", "dequantize", "append_", "paged_append_")
"""Operators whose results are the same bytes everywhere."""


def _refuses(request: Request) -> str | None:
    if request.device != "cpu":
        return f"tensors on {request.device}"
    pairs = zip(request.formats, request.head_dims, strict=True)
    return next((reason for fmt, dim in pairs if (reason := why_not_format(fmt, dim))), None)


def register_hosted() -> None:
    """Add the rows, below every other: whoever wants them says so."""
    for op in BITS:
        assert op in OPS
        register(Implementation(NAME, op, getattr(operators, op), _refuses, priority=-100))
