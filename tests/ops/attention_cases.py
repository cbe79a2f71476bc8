"""Attentions to try, each with its two checks: tight, and bounded (see ``checks.quantization_bound``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import registry
from kvq_ops.formats import get_format
from tests.ops import checks

B, HQ, HKV, TQ, T, D = 2, 4, 2, 3, 9, 16
INF = float("inf")


@dataclass
class Case:
    """One attention: what is stored, asked and expected."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_format: str
    value_format: str
    options: dict[str, Any] = field(default_factory=dict)
    lengths: list[int] | None = None  # what each row of the store holds; None: all
    key_store: list[Tensor] = field(init=False)
    value_store: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.key_store = kvq_ops.quantize(self.key, self.key_format)
        self.value_store = kvq_ops.quantize(self.value, self.value_format)
        if self.lengths is not None:
            for store in (self.key_store, self.value_store):
                store[-1].copy_(torch.tensor(self.lengths))

    def run(self, **changed: Any) -> Tensor:
        given = {
            "query": self.query,
            "key_store": self.key_store,
            "value_store": self.value_store,
            "key_format": self.key_format,
            "value_format": self.value_format,
            **self.options,
            **changed,
        }
        return kvq_ops.attention(**given)

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        return (
            checks.decoded(get_format(self.key_format), self.key_store),
            checks.decoded(get_format(self.value_format), self.value_store),
        )

    def exact(self, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        options = dict(self.options)
        lengths = None
        if options.pop("use_length", True):
            lengths = self.key_store[-1].tolist()
        return checks.exact_attention(self.query, key, value, lengths=lengths, **options)

    def check_tight(self, out: Tensor, beyond: np.ndarray | float = 0.0) -> None:
        """Args: beyond: what arithmetic in less than fp32 may add to the error."""
        assert out.dtype == self.query.dtype and out.is_contiguous()
        checks.assert_tight(out, self.exact(*self.decoded()), beyond=beyond)

    def pairs(self) -> np.ndarray:
        """Which key each query may see."""
        mask = self.options.get("mask")
        return checks.allowed_pairs(
            self.query.shape,
            self.key.shape[2],
            mask=None if mask is None else checks.array(mask),
            causal=self.options.get("causal", False),
            window=self.options.get("window", 0),
            lengths=self.key_store[-1].tolist() if self.options.get("use_length", True) else None,
        )

    def beyond(self, implementation: str) -> np.ndarray | float:
        """What an implementation may lose by computing in fp16 where tensor cores are, from the data; 0 for the others."""
        if implementation != "triton" or self.query.dtype is torch.float32:
            return 0.0
        from tests.triton.attention_bound import half_bound

        return half_bound(
            self.query,
            [self.key_store, self.value_store],
            [get_format(self.key_format), get_format(self.value_format)],
            self.exact(*self.decoded()),
            self.pairs(),
            self.options.get("scale") or self.query.shape[-1] ** -0.5,
        )

    def limit(self) -> np.ndarray:
        key, value = checks.array(self.key), checks.array(self.value)
        key2, value2 = self.decoded()
        return checks.quantization_bound(
            self.query,
            key,
            key2,
            value,
            value2,
            self.pairs(),
            scale=self.options.get("scale"),
            sinks=self.options.get("sinks"),
        )

    def check_bounded(self, out: Tensor, beyond: np.ndarray | float = 0.0) -> None:
        exact = self.exact(checks.array(self.key), checks.array(self.value))
        limit = self.limit() + beyond + 1e-5 * (1 + np.abs(exact))
        if out.dtype != torch.float32:
            limit = limit + torch.finfo(out.dtype).eps * (np.abs(exact) + 1)
        error = np.abs(checks.array(out).astype(np.float64) - exact)
        assert (error <= limit).all(), f"{(error - limit).max():.3g} beyond the bound"

    def check(self, implementation: str) -> None:
        fmts = [get_format(self.key_format), get_format(self.value_format)]
        dims = [self.key.shape[-1], self.value.shape[-1]]
        if reason := checks.refusal(implementation, "attention", fmts, dims, self.query.dtype):
            pytest.skip(f"{implementation}: {reason}")
        with registry.use_implementation(implementation):
            out = self.run()
        beyond = self.beyond(implementation)
        self.check_tight(out, beyond)
        self.check_bounded(out, beyond)


def case(
    key_format: str = "int8_per_token_head",
    value_format: str | None = None,
    *,
    batch: int = B,
    heads: int = HQ,
    kv_heads: int = HKV,
    queries: int = TQ,
    tokens: int = T,
    dim: int = D,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    lengths: list[int] | None = None,
    **options: Any,
) -> Case:
    value_format = value_format or key_format
    query = torch.randn(batch, heads, queries, dim).to(dtype)
    key = torch.randn(batch, kv_heads, tokens, dim).to(dtype)
    value = torch.randn(batch, kv_heads, tokens, value_dim or dim).to(dtype)
    return Case(query, key, value, key_format, value_format, options, lengths)


# ----------------------------------------------------------------------------------------------------------- the matrix


def random_mask(*shape: int) -> Tensor:
    """Bool, with at least one open key in each row."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    return mask


def random_bias(*shape: int) -> Tensor:
    return torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, -INF)


# Options of attention that every implementation and format has to get right.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.3},
    "negative_scale": lambda: {"scale": -0.2},
    "causal": lambda: {"causal": True},
    "bool_mask": lambda: {"mask": random_mask(B, 1, TQ, T)},
    "bias": lambda: {"mask": random_bias(B, 1, TQ, T)},
    "mask_one_axis": lambda: {"mask": random_mask(T)},
    "mask_two_axes": lambda: {"mask": random_bias(TQ, T)},
    "mask_per_head": lambda: {"mask": random_mask(1, HQ, TQ, T)},
    "mask_per_batch": lambda: {"mask": random_bias(B, 1, 1, T)},
    "mask_three_axes": lambda: {"mask": random_mask(HQ, 1, T)},
    "mask_full": lambda: {"mask": random_bias(B, HQ, TQ, T)},
    "mask_of_queries": lambda: {"mask": torch.randn(B, HQ, TQ, 1)},
    "bool_of_queries": lambda: {"mask": torch.tensor([True, False, True]).view(1, 1, TQ, 1)},
    "mask_scalar": lambda: {"mask": torch.tensor(0.5)},
    "mask_scalar_closed": lambda: {"mask": torch.tensor(False)},
    "mask_float64": lambda: {"mask": random_bias(TQ, T).double()},
    "mask_float16": lambda: {"mask": random_bias(TQ, T).half()},
    "mask_of_finfo_min": lambda: {
        "mask": torch.where(random_mask(B, 1, TQ, T), 0.0, torch.finfo(torch.float32).min)
    },
    "mask_non_contiguous": lambda: {"mask": random_bias(T, TQ, B).permute(2, 1, 0).unsqueeze(1)},
    "mask_expanded": lambda: {"mask": random_mask(B, 1, 1, T).expand(B, HQ, TQ, T)},
    "mask_closes_the_tail": lambda: {"mask": torch.arange(T).lt(5).view(1, 1, 1, T)},
    "mask_and_causal": lambda: {"mask": random_mask(B, 1, TQ, T), "causal": True},
    "bias_and_causal": lambda: {"mask": random_bias(1, HQ, TQ, T), "causal": True},
    "window": lambda: {"window": 4},
    "window_and_causal": lambda: {"window": 4, "causal": True},
    "window_of_one": lambda: {"window": 1, "causal": True},
    "softcap": lambda: {"softcap": 1.5, "scale": 2.0},
    "softcap_and_bias": lambda: {"softcap": 5.0, "mask": random_bias(B, 1, TQ, T), "causal": True},
    "sinks": lambda: {"sinks": torch.tensor([0.0, 5.0, -INF, -1.0])},
    "sinks_causal_window": lambda: {"sinks": torch.randn(HQ), "causal": True, "window": 3},
    "everything": lambda: {
        "mask": random_bias(B, HQ, TQ, T),
        "causal": True,
        "scale": 0.4,
        "window": 5,
        "softcap": 3.0,
        "sinks": torch.randn(HQ),
    },
    "closed_row_bool": lambda: {"mask": torch.tensor([True, False, True]).view(TQ, 1).expand(TQ, T)},
    "closed_row_bias": lambda: {"mask": torch.tensor([0.0, -INF, 1.0]).view(TQ, 1).expand(TQ, T).clone()},
    "all_closed": lambda: {"mask": torch.zeros(B, 1, TQ, T, dtype=torch.bool)},
    "all_closed_bias_sinks": lambda: {"mask": torch.full((TQ, T), -INF), "sinks": torch.zeros(HQ)},
    "whole_buffer": lambda: {"use_length": False},
    "whole_buffer_causal": lambda: {"use_length": False, "causal": True, "window": 4},
}
