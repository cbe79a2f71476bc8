"""Attention in the rotated space: the query is rotated and the output rotated back, instead of every key and value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvq_ops
from kvq_ops import reference, registry
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.attention_cases import OPTIONS, case, random_bias

ROTATED = (
    "int4_group32+hadamard", "int8_per_token_head+hadamard", "nvfp4+hadamard", "turbo4", "turbo2",
    "int4_per_token_head+hadamard+outlier3%", "turbo4+outlier5%", "int4_per_head_sym+hadamard",
)  # fmt: skip
HEADS = ((4, 4), (6, 2), (4, 1))
WINDOWED = (
    ("int4_group32+hadamard+recent4", "turbo4+recent3+sink2"),
    ("int3_group32+hadamard+recent3+sink2", "int8_per_token_head"),
    ("test_keys_g8r8", "turbo2+sink4"),
    ("kivi2_keys+hadamard+recent8", "int4_group32+outlier5%+hadamard+recent4"),
)
IMPLEMENTATIONS = checks.implementations("attention")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_folding_changes_nothing(implementation: str, name: str, heads: tuple[int, int]) -> None:
    """Tight against float64 over the values as they are read, also where head_dim is no power of two.

    Interpreted kernels take one option for each size, another one for other heads and formats: what they do with the rotation and
    with the sizes does not depend on options of the softmax, and over the formats each size meets each option.
    """
    options: list[dict[str, Any]] = [
        {"causal": True},
        {"softcap": 2.0, "scale": 0.4},
        {"sinks": torch.randn(heads[0]), "window": 4, "causal": True},
        {"mask": random_bias(2, 1, 3, 9)},
    ]
    for i, (dim, value_dim) in enumerate(((64, 32), (96, 80), (24, 40), (8, 120))):
        at = (i + HEADS.index(heads) + ROTATED.index(name)) % len(options)
        for option in [options[at]] if implementation == "triton" else options:
            made = case(name, heads=heads[0], kv_heads=heads[1], dim=dim, value_dim=value_dim, **option)
            made.check(implementation)


@pytest.mark.parametrize(
    ("key_format", "value_format"),
    [
        ("int4_group32+hadamard", "int8_per_token_head"),
        ("none", "turbo4"),
        ("turbo4", "int4_group32+hadamard"),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_side_rotated_or_each_in_its_way(implementation: str, key_format: str, value_format: str) -> None:
    for option in ("plain", "everything", "closed_row_bool", "all_closed", "whole_buffer_causal"):
        case(key_format, value_format, dim=96, value_dim=40, **OPTIONS[option]()).check(implementation)
        case(key_format, value_format, dim=96, value_dim=40, lengths=[9, 4], **OPTIONS[option]()).check(
            implementation
        )


@pytest.mark.parametrize("dtype", checks.DTYPES)
@pytest.mark.parametrize("name", ["int4_group32+hadamard", "turbo4"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_half_queries(implementation: str, name: str, dtype: torch.dtype) -> None:
    case(name, dim=80, dtype=dtype, causal=True).check(implementation)


def windowed(name: str, x: Tensor, lengths: list[int]) -> list[Tensor]:
    return kvq_ops.QuantizedKV.from_dense(x, name, length=torch.tensor(lengths)).store


@pytest.mark.parametrize("dim", [32, 24, 96])
@pytest.mark.parametrize("names", WINDOWED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_exact_tokens_are_rotated_with_the_others(
    implementation: str, names: tuple[str, str], dim: int
) -> None:
    from tests.ops import windows  # noqa: F401  registers formats of small groups

    lengths = [43, 21, 3]
    fmts = [get_format(name) for name in names]
    if reason := checks.refusal(implementation, "attention", fmts, [dim, 40], torch.float32):
        pytest.skip(f"{implementation}: {reason}")
    dims = [*checks.head_dims(fmts[0], dim), *checks.head_dims(fmts[1], 40)]
    stores = [windowed(n, torch.randn(3, 2, 43, d), lengths) for n, d in zip(names, dims, strict=True)]
    dense = [kvq_ops.dequantize(store, name).numpy() for store, name in zip(stores, names, strict=True)]
    query = torch.randn(3, 4, 5, dims[0])
    for options in (
        {},
        {"causal": True, "window": 9},
        {"softcap": 3.0},
        {"sinks": torch.randn(4), "causal": True},
    ):
        with registry.use_implementation(implementation):
            out = kvq_ops.attention(query, *stores, *names, **options)
        checks.assert_tight(out, checks.exact_attention(query, *dense, lengths=lengths, **options))


@pytest.mark.parametrize("name", ["int4_group32+hadamard", "turbo3"])
def test_the_unfolded_way_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(name, dim=96, value_dim=64, causal=True)
    with registry.use_implementation("torch"):
        folded = made.run()
        monkeypatch.setattr(reference, "folds_rotation", lambda fmt: False)
        unfolded = made.run()
    assert torch.allclose(folded, unfolded, atol=1e-5) and not torch.equal(folded, unfolded)
    made.check_tight(unfolded)


FAULTS: dict[str, tuple[str, Any]] = {
    "the query is not rotated": ("rotate", lambda x, kind: x),
    "the query is rotated without signs": ("rotate", lambda x, kind: reference_hadamard(x)),
    "the output is not rotated back": ("unrotate", lambda x, kind: x),
    "the output is rotated as a query": ("unrotate", lambda x, kind: kvq_ops.codecs.rotation.rotate(x, kind)),
}


def reference_hadamard(x: Tensor) -> Tensor:
    return kvq_ops.codecs.rotation.hadamard(x)


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_folding_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = case("turbo4", dim=96, value_dim=64, causal=True)
    with registry.use_implementation("torch"):
        made.check_tight(made.run())
        monkeypatch.setattr(reference, *FAULTS[fault])
        with pytest.raises(AssertionError):
            made.check_tight(made.run())


def test_keys_that_are_turned_by_their_position_are_not_folded() -> None:
    """Rotary embedding comes after the rotation and does not commute with it."""
    for name, folds in (
        ("nuq3_keys+hadamard", False),
        ("nuq3_values+hadamard", True),
        ("turbo4", True),
        ("nuq3_keys", False),
    ):
        assert reference.folds_rotation(get_format(name)) is folds
    name = "nuq3_keys+hadamard"
    x, query = torch.randn(2, 2, 9, 32), torch.randn(2, 4, 3, 32)
    store = checks.stored(x, name)
    values = kvq_ops.quantize(torch.randn(2, 2, 9, 16), "none")
    dense = [kvq_ops.dequantize(store, name).numpy(), values[0].numpy()]
    with registry.use_implementation("torch"):
        out = kvq_ops.attention(query, store, values, name, "none", causal=True)
    checks.assert_tight(out, checks.exact_attention(query, *dense, causal=True, lengths=[9, 9]))
    assert np.abs(dense[0] - x.numpy()).max() > 1e-3


@pytest.mark.parametrize(
    "name", ["nuq4_keys", "nuq3_values", "nuq3_keys+outlier1%+hadamard", "nuq4_keys+recent4+sink2"]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_over_codebooks(implementation: str, name: str) -> None:
    fmt = get_format(name)
    if reason := checks.refusal(implementation, "attention", [fmt, fmt], [32, 32], torch.float32):
        pytest.skip(f"{implementation}: {reason}")
    stores = [checks.stored(torch.randn(2, 2, 21, 32), name) for _ in range(2)]
    dense = [kvq_ops.dequantize(store, name).numpy() for store in stores]
    query = torch.randn(2, 4, 3, 32)
    for options in ({}, {"causal": True}, {"softcap": 2.0, "window": 6}, {"mask": random_bias(2, 1, 3, 21)}):
        with registry.use_implementation(implementation):
            out = kvq_ops.attention(query, *stores, name, name, **options)
        checks.assert_tight(out, checks.exact_attention(query, *dense, lengths=[21, 21], **options))
