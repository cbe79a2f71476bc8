"""What the operators ask of their arguments, as far as contiguous and paged caches ask the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .config import is_checked
from .errors import DeviceError, DtypeError, GradientError, NonFiniteError, ShapeError
from .formats import Format
from .options import Options

__all__ = [
    "check_device",
    "check_dtype",
    "check_finite",
    "check_gradient",
    "check_kept",
    "check_over",
    "check_values",
]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_values(op: str, x: Tensor, what: str = "x") -> None:
    if x.dtype not in _FLOATS:
        raise DtypeError(
            f"kvq::{op} of {what}",
            got=str(x.dtype),
            allowed="float32, float16, bfloat16",
            do=f"cast {what} first",
        )
    if x.dim() != 4:
        raise ShapeError(
            f"kvq::{op} of {what}",
            got=f"shape {tuple(x.shape)}",
            allowed="[B, H, T, D]",
            do="unsqueeze or permute to this order",
        )


def check_dtype(op: str, dtype: torch.dtype) -> None:
    if dtype not in (*_FLOATS, torch.float64):
        raise DtypeError(
            f"kvq::{op} into a dtype",
            got=str(dtype),
            allowed="float32, float16, bfloat16, float64",
            do="decode to one of these, then convert",
        )


def check_gradient(op: str, *tensors: Tensor | None) -> None:
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        raise GradientError(
            f"kvq::{op} with an input that requires a gradient",
            got="grad mode on",
            allowed="inference only: rounding has no useful derivative",
            do="run the model under torch.no_grad() or torch.inference_mode()",
        )


def check_device(op: str, *tensors: Tensor | None) -> None:
    devices = [t.device for t in tensors if t is not None]
    if devices.count(devices[0]) < len(devices):
        raise DeviceError(
            f"kvq::{op}",
            got=" and ".join(sorted(set(map(str, devices)))),
            allowed="all tensors on one device",
            do="move the cache with .to(device)",
        )


def check_finite(op: str, x: Tensor) -> None:
    if is_checked() and not bool(x.isfinite().all()):
        raise NonFiniteError(
            f"kvq::{op} in checked mode",
            got=f"{int(x.isnan().sum())} NaN and {int(x.isinf().sum())} infinite values in x {tuple(x.shape)}",
            allowed="finite values",
            do="find where the model produces them, or leave checked mode",
        )


def check_kept(op: str, store: Sequence[Tensor], x: Tensor, fmt: Format) -> None:
    """Values that a format keeps as they are must come in the dtype that it keeps them in."""
    if fmt.keeps_exact:
        kept = next(
            tensor.dtype for plane, tensor in zip(fmt.planes, store, strict=True) if plane.dtype is None
        )
        if x.dtype != kept:
            what = (
                "an unquantized cache"
                if fmt.lossless
                else f"a cache in format {fmt.name!r}, which keeps exact values"
            )
            raise DtypeError(
                f"kvq::{op} into {what}",
                got=str(x.dtype),
                allowed=str(kept),
                do="make the cache in the dtype of the model",
            )


def check_over(op: str, query: Tensor, keys: tuple[int, int, int, int], options: Options) -> None:
    """What attention of ``query`` over keys of the shape ``keys`` asks of its arguments, wherever the keys are kept."""
    batch, heads, tokens, head_dim = keys
    rows, query_heads, queries, width = query.shape
    if rows != batch or width != head_dim or (query_heads % heads if heads else query_heads):
        raise ShapeError(
            f"kvq::{op} over keys {(batch, heads, tokens, head_dim)}",
            got=f"query {tuple(query.shape)}",
            allowed=f"[{batch}, a multiple of {heads}, Tq, {head_dim}]",
            do="check batch size, heads and head_dim of the query against the cache",
        )
    options.check(op, batch, query_heads, queries, tokens)
