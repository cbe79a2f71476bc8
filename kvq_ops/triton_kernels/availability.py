"""Whether the kernels can serve a request, asked without importing triton for tensors that are on the CPU anyway."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

import torch

from ..registry import Request

__all__ = ["INTERPRETED", "refuses"]

_OLDEST_TRITON = (3, 6)
_OLDEST_CAPABILITY = (8, 0)

# Triton reads this once, when it is imported, so that one process is either the compiler's or the interpreter's.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").strip().lower() in ("1", "true", "on", "yes", "y")


def refuses(request: Request) -> str | None:
    """Why the kernels cannot serve a request, or ``None``."""
    if request.device not in ("cpu", "cuda"):
        return f"tensors on {request.device}"
    if request.device == "cpu" and not INTERPRETED:
        return "tensors on cpu"
    reason = without_triton() or (gpu_refusal() if request.device == "cuda" else None)
    if reason is not None:
        return reason
    for fmt in request.formats:
        reason = format_refusal(fmt)
        if reason is not None:
            return f"format {fmt.name}: {reason}"
    from .spec import MAX_DIM

    if any(dim > MAX_DIM for dim in request.head_dims):
        return f"head_dim {max(request.head_dims)} above {MAX_DIM}"
    if request.dtype is torch.float64:
        return "float64"
    return None


@functools.cache
def without_triton() -> str | None:
    """Why there is no triton to compile with, or ``None``."""
    try:
        import triton
    except ImportError as error:
        return f"triton is not installed (pip install 'triton>=3.6'): {error}"
    except Exception as error:  # a package of the wrong build fails in ways of its own
        return f"triton cannot be imported: {type(error).__name__}: {error}"
    return version_refusal(str(getattr(triton, "__version__", "0")))


def version_refusal(version: str) -> str | None:
    """Why triton of this version will not do, or ``None``."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST_TRITON:
        return f"triton {version}, older than 3.6"
    return None


@functools.cache
def gpu_refusal() -> str | None:
    """Why the kernels cannot run on this machine's GPUs, or ``None``; also where there are none, which tracing may imagine."""
    if not torch.cuda.is_available():
        return None
    return next(filter(None, map(device_refusal, map(properties, range(torch.cuda.device_count())))), None)


def properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def device_refusal(device: Any) -> str | None:
    """Why the kernels cannot run on a device, given what ``torch.cuda.get_device_properties`` says of it, or ``None``."""
    if torch.version.hip:
        arch = str(device.gcnArchName).partition(":")[0]
        return None if arch.startswith("gfx94") else f"{device.name} is {arch}; the kernels are for gfx94x"
    if (device.major, device.minor) < _OLDEST_CAPABILITY:
        return f"{device.name} is sm_{device.major}{device.minor}; the kernels are for sm_80 and later"
    return None


@functools.cache
def format_refusal(fmt: Any) -> str | None:
    """Why no kernel knows a format, or ``None``."""
    from .spec import spec_of

    spec = spec_of(fmt)
    return spec if isinstance(spec, str) else None
