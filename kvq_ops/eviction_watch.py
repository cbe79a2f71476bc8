"""Seeing how much attention each cached token receives, without changing the model.

A cache hands out its keys as :class:`WatchedKeys`. Whatever the model does to them is followed, by ``__torch_function__``, until
attention happens: ``scaled_dot_product_attention``, or the softmax of scores that a matrix product made of them. There the
probabilities are summed for each key and reported; from then on tensors are ordinary ones again. Dynamo follows all of this too,
so that a compiled graph reports in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import eviction_ops  # noqa: F401  registers the operators

__all__ = ["Watch", "WatchedKeys"]

_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "bmm", "baddbmm", "einsum")

Report = Callable[[Tensor, Tensor], None]


class Watch:
    """Waits for one attention at a time.

    Args:
        report: called once for each with the mass ``[B, H, T]`` in fp32, summed over queries and over the query heads of each kv
            head, and with which keys any query may attend to, bool ``[B, T]``. Queries that may attend to nothing, such as
            padding, count for nothing.

    Attributes:
        done: nothing is waited for.
    """

    def __init__(self, report: Report) -> None:
        self.report = report
        self.done = True
        self.batch = self.heads = self.tokens = 0
        self.floor = 0.0
        # What a tensor is part of must be seen from its type: Dynamo keeps no attributes of tensors.
        self.keys_type = type("WatchedKeys", (WatchedKeys,), {"watch": self})
        self.scores_type = type("WatchedScores", (WatchedKeys,), {"watch": self})

    def begin(self, keys: Tensor) -> Tensor:
        """``keys [B, H, T, D]``, to be handed to the model."""
        self.batch, self.heads, self.tokens = keys.shape[:3]
        # Masks close a key by the smallest number of a dtype, or by -inf.
        self.floor = torch.finfo(keys.dtype).min / 2
        self.done = False
        return keys.as_subclass(self.keys_type)

    def _found(self, mass: Tensor, visible: Tensor) -> None:
        self.done = True
        self.report(mass, visible)

    def softmax(self, scores: Tensor, softmax: Tensor) -> None:
        """Take the softmax of scores ``[B, Hq, R, T or more]``, or with heads folded into rows; nothing else is understood."""
        if scores.dim() == 3 and self.batch and scores.shape[0] % (self.batch * self.heads) == 0:
            scores, softmax = (x.unflatten(0, (self.batch, -1)) for x in (scores, softmax))
        fits = scores.dim() == 4 and scores.shape[0] == self.batch and scores.shape[1] % self.heads == 0
        if not fits or scores.shape[3] < self.tokens:
            return
        # In a graph the model's own softmax becomes a part of kvq::attention, whose probabilities nobody sees.
        probabilities = None if torch.compiler.is_compiling() else softmax
        mass, visible = torch.ops.kvq.scores_mass(scores, probabilities, self.heads, self.tokens, self.floor)
        self._found(mass, visible)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        """Work out the probabilities of ``scaled_dot_product_attention`` on the same arguments, by a product of its own."""
        if query.dim() != 4 or key.shape[2] > self.tokens or query.shape[1] % self.heads:
            return
        mass, visible = torch.ops.kvq.attention_mass(query, key, self.heads, attn_mask, is_causal, scale)
        missing = self.tokens - key.shape[2]
        if missing:
            mass = torch.nn.functional.pad(mass, (0, missing))
            visible = torch.nn.functional.pad(visible, (0, missing))
        self._found(mass, visible)


class WatchedKeys(Tensor):
    """Keys on their way to attention, or scores made of them."""

    watch: Watch

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            watch, name = cls.watch, getattr(func, "__name__", "")
            if watch.done:
                return result
            scores = cls is watch.scores_type or any(kind is watch.scores_type for kind in types)
            if name == "scaled_dot_product_attention":
                watch.attention(*args, **kwargs)
                return result
            if name == "softmax" and scores and _is_over_keys(*args, **kwargs):
                watch.softmax(args[0] if args else kwargs["input"], result)
                return result
            if not isinstance(result, Tensor) or not result.is_floating_point():
                return result
            return result.as_subclass(watch.scores_type if scores or name in _PRODUCTS else watch.keys_type)


def _is_over_keys(input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> bool:
    """Whether a softmax of these arguments runs over the last axis."""
    return dim in (-1, input.dim() - 1)
