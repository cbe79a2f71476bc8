"""Broken twins: the checks of attention must reject each fault that is planted here, or they prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.attention_cases import HKV, HQ, OPTIONS, TQ, Case, T, case


def _swap_planes(made: Case) -> Tensor:
    """Scales of the keys used for the values, and the other way round."""
    fmt = get_format(made.key_format)
    i = fmt.index("scale" if "scale" in fmt._index else "block_scale")
    key, value = checks.copy(made.key_store), checks.copy(made.value_store)
    key[i], value[i] = made.value_store[i], made.key_store[i]
    return made.run(key_store=key, value_store=value)


def _permute_groups(made: Case) -> Tensor:
    fmt = get_format(made.value_format)
    value = checks.copy(made.value_store)
    for i, plane in enumerate(fmt.planes):
        if plane.per_token and plane.name != "codes":
            value[i] = value[i].flip(-1)  # groups of a token, or the tokens of a per-token scale
    return made.run(value_store=value)


def _swap_nibbles(made: Case) -> Tensor:
    codes = made.value_store[0]
    return made.run(value_store=[(codes << 4) | (codes >> 4), *made.value_store[1:]])


def _tile_heads(made: Case) -> Tensor:
    """kv head h % Hkv for query head h, in place of h // (Hq / Hkv)."""
    order = torch.arange(HQ).view(HKV, HQ // HKV).t().flatten()
    return made.run(query=made.query[:, order])[:, order.argsort()]


def _causal_off_by_one(made: Case) -> Tensor:
    late = torch.ones(TQ, T, dtype=torch.bool).tril(T - TQ + 1)
    return made.run(causal=False, mask=late)


def _causal_from_the_start(made: Case) -> Tensor:
    return made.run(causal=False, mask=torch.ones(TQ, T, dtype=torch.bool).tril())


def _keys_for_values(made: Case) -> Tensor:
    return made.run(key_store=made.value_store, value_store=made.key_store)


def _inverted_bool(made: Case) -> Tensor:
    return made.run(mask=~made.options["mask"])


def _bool_as_bias(made: Case) -> Tensor:
    return made.run(mask=made.options["mask"].float())


def _ignored_length(made: Case) -> Tensor:
    return made.run(use_length=False)


def _dropped(*names: str, **to: Any) -> Callable[[Case], Tensor]:
    return lambda made: made.run(**dict.fromkeys(names), **to)


# What is asked, and the fault that is planted in the answer.
FAULTS: dict[str, tuple[str, str, Callable[[Case], Tensor]]] = {
    "scales of keys and values swapped": ("int8_per_token_head", "plain", _swap_planes),
    "block scales of keys and values swapped": ("nvfp4", "plain", _swap_planes),
    "group scales permuted": ("int4_group32", "plain", _permute_groups),
    "block scales permuted": ("nvfp4", "plain", _permute_groups),
    "token scales permuted": ("int8_per_token_head", "plain", _permute_groups),
    "nibbles swapped": ("int4_group32", "plain", _swap_nibbles),
    "keys taken for values": ("int8_per_token_head", "plain", _keys_for_values),
    "heads tiled": ("int8_per_token_head", "plain", _tile_heads),
    "mask dropped": ("int8_per_token_head", "bool_mask", _dropped("mask")),
    "bias dropped": ("int8_per_token_head", "bias", _dropped("mask")),
    "mask inverted": ("int8_per_token_head", "bool_mask", _inverted_bool),
    "bool mask added": ("int8_per_token_head", "bool_mask", _bool_as_bias),
    "causal dropped": ("int8_per_token_head", "causal", _dropped(causal=False)),
    "causal one late": ("int8_per_token_head", "causal", _causal_off_by_one),
    "causal from the first key": ("int8_per_token_head", "causal", _causal_from_the_start),
    "window dropped": ("int8_per_token_head", "window", _dropped(window=0)),
    "window one wide": ("int8_per_token_head", "window", _dropped(window=5)),
    "softcap dropped": ("int8_per_token_head", "softcap", _dropped(softcap=0.0)),
    "scale dropped": ("int8_per_token_head", "scale", _dropped("scale")),
    "sinks dropped": ("int8_per_token_head", "sinks", _dropped("sinks")),
    "length ignored": ("int8_per_token_head", "ragged", _ignored_length),
}


def _faulty(fault: str) -> tuple[Case, Tensor]:
    name, option, plant = FAULTS[fault]
    options = {} if option == "ragged" else OPTIONS[option]()
    made = case(name, dim=64, lengths=[T, 4] if option == "ragged" else None, **options)
    # Tokens and channels of very different size, so that a scale out of its place matters.
    loud = torch.logspace(-1, 1, T).view(1, 1, T, 1) * torch.logspace(0, 1, 64)
    made = Case(
        made.query / 8, made.key * loud.flip(2) / 4, made.value * loud, name, name, options, made.lengths
    )
    return made, plant(made)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tight_check_rejects_a_planted_fault(fault: str) -> None:
    made, out = _faulty(fault)
    made.check_tight(made.run())
    with pytest.raises(AssertionError, match="off by"):
        made.check_tight(out)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_bound_rejects_a_planted_fault(fault: str) -> None:
    made, out = _faulty(fault)
    made.check_bounded(made.run())
    with pytest.raises(AssertionError, match="beyond the bound"):
        made.check_bounded(out)


def test_the_bound_is_neither_broken_nor_idle() -> None:
    """It holds for the worst change of weights that its derivation allows, and grows with quantization."""
    # Two keys of equal score apart by +-d: the weight of one goes from 1/(1+e^d) to e^d/(1+e^d).
    d, dim = 0.7, 4
    query = torch.ones(1, 1, 1, dim)
    key = np.zeros((1, 1, 2, dim), np.float32)
    key[0, 0, 0, 0] = -d / 2 - d / 2  # scores at scale 1: -d and 0, so that p = 1 / (1 + e^d)
    moved = key.copy()
    moved[0, 0, 0, 0] += d
    moved[0, 0, 1, 0] -= d
    value = np.zeros((1, 1, 2, 1), np.float32)
    value[0, 0, 0, 0] = 1.0
    before, after = (checks.exact_attention(query, k, value, scale=1.0) for k in (key, moved))
    open_ = np.ones((1, 1, 1, 2), bool)
    limit = checks.quantization_bound(query, key, moved, value, value, open_, scale=1.0)
    assert abs(after - before).item() == pytest.approx(limit.item(), rel=1e-6), "the bound is attained"

    torch.manual_seed(0)
    sizes = []
    for name in ("none", "int8_per_token_head", "int4_group32"):
        torch.manual_seed(1)
        sizes.append(case(name, dim=64).limit().max())
    assert sizes[0] == 0 < sizes[1] < sizes[2] / 4
    assert sizes[1] < 0.1, "8 bits: far below the values themselves"
