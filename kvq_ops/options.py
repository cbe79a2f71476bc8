"""What attention may be asked for beyond a query and what it reads: one list for all operators and kernels.

The schemas take ``SCHEMA``, every implementation takes keywords and makes :class:`Options` of them. A new option is a field here,
an argument of ``kvq_ops.attention`` and ``kvq_ops.paged_attention``, and whatever the implementations do about it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import DtypeError, ShapeError

__all__ = ["NO_OPTIONS", "SCHEMA", "Options"]

SCHEMA = "Tensor? mask=None, bool causal=False, float? scale=None, int window=0, float softcap=0.0, Tensor? sinks=None"
"""The fields of :class:`Options` as arguments of an operator."""


class Options(NamedTuple):
    """Options of ``kvq::attention`` and ``kvq::paged_attention``; for their meaning see :func:`kvq_ops.attention`.

    ``use_length`` is not among them, since pages have no other way.
    """

    mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def check(self, op: str, batch: int, heads: int, queries: int, tokens: int) -> None:
        """Raise on anything that does not fit ``queries`` of ``heads`` over ``tokens``.

        Raises:
            ShapeError: shapes of mask and sinks, numbers of window and softcap.
            DtypeError: dtypes of mask and sinks.
        """
        mask, _, _, window, softcap, sinks = self
        if mask is not None:
            full, shape = (batch, heads, queries, tokens), mask.shape
            fits = len(shape) <= 4
            for m, f in zip(reversed(shape), reversed(full), strict=False):
                fits = fits and (m == f or m == 1)
            if not fits:
                raise ShapeError(
                    f"kvq::{op} mask",
                    got=f"{tuple(shape)}",
                    allowed=f"broadcastable to {full}",
                    do="the last axis counts every allocated token of the cache",
                )
            if mask.dtype is not torch.bool and not mask.dtype.is_floating_point:
                raise DtypeError(
                    f"kvq::{op} mask",
                    got=str(mask.dtype),
                    allowed="bool (True may attend) or floating (added to the scores)",
                    do="compare integer masks with != 0",
                )
        if sinks is not None and tuple(sinks.shape) != (heads,):
            raise ShapeError(
                f"kvq::{op} sinks",
                got=f"{tuple(sinks.shape)}",
                allowed=f"[{heads}]",
                do="give one logit for each query head",
            )
        if sinks is not None and not sinks.dtype.is_floating_point:
            raise DtypeError(
                f"kvq::{op} sinks",
                got=str(sinks.dtype),
                allowed="a floating dtype",
                do="cast the logits to the dtype of the query",
            )
        if window < 0 or not 0 <= softcap < math.inf:
            raise ShapeError(
                f"kvq::{op} window and softcap",
                got=f"{window} and {softcap}",
                allowed="finite and not negative; 0 turns them off",
                do="leave out the one that the model does not have",
            )


NO_OPTIONS = Options()
"""For calls that pass none, which are decode steps and hasty."""
