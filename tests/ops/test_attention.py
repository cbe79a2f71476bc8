"""Attention, right twice: tight against float64 over the decoded codes, and within a bound of attention over exact values.

Every implementation in the registry is tried. ``test_planted_faults`` shows what the checks reject.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvq_ops
from kvq_ops import reference, registry
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.attention_cases import HKV, HQ, INF, OPTIONS, TQ, B, D, T, case, random_bias
from tests.ops.checks import DTYPES, LISTED

IMPLEMENTATIONS = checks.implementations("attention")
MIXED = [("fp8_per_head", "int4_group32"), ("int4_group64", "none"), ("nvfp4", "int8_per_token_head")]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "int4_group32"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_options(implementation: str, name: str, option: str) -> None:
    case(name, **OPTIONS[option]()).check(implementation)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_options_over_ragged_rows(implementation: str, option: str) -> None:
    case("fp8_per_token_head", lengths=[T, 4], **OPTIONS[option]()).check(implementation)


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_formats(implementation: str, name: str) -> None:
    case(name, dim=64, causal=True, mask=random_bias(B, 1, TQ, T)).check(implementation)
    case(name, dim=96, value_dim=64, queries=1).check(implementation)


@pytest.mark.parametrize(("key_format", "value_format"), MIXED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_and_values_in_different_formats(
    implementation: str, key_format: str, value_format: str
) -> None:
    case(key_format, value_format, dim=64, value_dim=32, causal=True).check(implementation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "nvfp4"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dtypes(implementation: str, name: str, dtype: torch.dtype) -> None:
    case(name, dtype=dtype, causal=True, mask=random_bias(B, 1, TQ, T).to(dtype)).check(implementation)
    case(name, dtype=dtype, softcap=2.0, sinks=torch.randn(HQ).to(dtype)).check(implementation)
    # A mask in fp32 beside half queries keeps its precision.
    case(name, dtype=dtype, mask=torch.randn(TQ, T) * 3).check(implementation)


HEADS = {"MHA": (4, 4), "GQA": (6, 2), "MQA": (4, 1), "one": (1, 1), "GQA_of_three": (6, 3)}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("options", ["plain", "causal", "softcap"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_heads(implementation: str, options: str, heads: str) -> None:
    query_heads, kv_heads = HEADS[heads]
    case(heads=query_heads, kv_heads=kv_heads, **OPTIONS[options]()).check(implementation)


@pytest.mark.parametrize(
    ("dim", "value_dim"), [(24, 16), (16, 24), (64, 32), (80, 80), (96, 100), (256, 64), (6, 10)]
)
@pytest.mark.parametrize(
    "name", ["int8_per_token_head", "int4_group32", "int4_group64", "nvfp4", "fp8_per_head"]
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_E4_head_dims(implementation: str, name: str, dim: int, value_dim: int) -> None:
    case(name, dim=dim, value_dim=value_dim, causal=True).check(implementation)
    case(name, dim=dim, value_dim=value_dim, queries=1, softcap=4.0).check(implementation)


@pytest.mark.parametrize("queries", [1, 2, T, T + 3])
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("lengths", [None, [9, 4], [1, 0]])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_causal_is_aligned_to_the_last_key(
    implementation: str, lengths: list[int] | None, window: int, queries: int
) -> None:
    """Also with more queries than keys: the first ones then stand before every key and give zeros."""
    case(queries=queries, lengths=lengths, causal=True, window=window).check(implementation)


@pytest.mark.parametrize("options", ["plain", "causal", "softcap", "sinks", "bool_mask"])
@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_D12_empty_caches_and_batches(implementation: str, name: str, options: str) -> None:
    fmt = get_format(name)
    if reason := checks.refusal(implementation, "attention", [fmt, fmt], [D, D], torch.float32):
        pytest.skip(f"{implementation}: {reason}")
    for batch, kv_heads, queries, tokens in (
        (2, 2, 3, 0),
        (0, 2, 3, 9),
        (2, 2, 0, 9),
        (0, 2, 0, 0),
        (2, 0, 3, 9),
    ):
        heads = kv_heads * 2
        given = OPTIONS[options]()
        if "mask" in given:
            given["mask"] = torch.ones(batch, 1, queries, tokens, dtype=torch.bool)
        if "sinks" in given:
            given["sinks"] = torch.zeros(heads)
        store = fmt.empty_store(batch, kv_heads, tokens, D)
        with registry.use_implementation(implementation):
            out = kvq_ops.attention(torch.randn(batch, heads, queries, D), store, store, name, name, **given)
        assert out.shape == (batch, heads, queries, D) and not out.any()


@pytest.mark.parametrize("name", LISTED)
def test_an_allocated_cache_without_tokens(name: str) -> None:
    """By length nothing may be attended to; as a buffer, nine zero vectors share the weight."""
    fmt = get_format(name)
    store = fmt.empty_store(B, HKV, T, D)
    query = torch.randn(B, HQ, TQ, D)
    for given in ({}, {"causal": True}, {"sinks": torch.zeros(HQ)}, {"softcap": 2.0}):
        for use_length in (True, False):
            assert not kvq_ops.attention(
                query, store, store, name, name, use_length=use_length, **given
            ).any()


@pytest.mark.parametrize("name", ["none", "int8_per_token_head", "nvfp4"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_contiguous_queries_and_stores(implementation: str, name: str) -> None:
    made = case(name, causal=True, mask=random_bias(B, 1, TQ, T))
    made.query = torch.randn(B, TQ, HQ, 2 * D)[..., ::2].transpose(1, 2)
    for store in (made.key_store, made.value_store):
        for i, plane in enumerate(store[:-1]):
            if plane.dim() >= 3:  # tokens before heads, inside a larger buffer
                wide = plane.new_full((B, T + 2, HKV + 1, *plane.shape[3:]), 1)
                view = wide.transpose(1, 2)[:, :HKV, :T]
                view.copy_(plane)
                store[i] = view
    assert not made.query.is_contiguous() and not made.key_store[0].is_contiguous()
    made.check(implementation)


@pytest.mark.parametrize(
    "option", ["plain", "causal", "bias_and_causal", "sinks_causal_window", "mask_of_queries"]
)
@pytest.mark.parametrize("size", [1, 2 * B * HQ * T, 5 * B * HQ * T])
def test_long_prefills_are_cut_without_a_seam(
    monkeypatch: pytest.MonkeyPatch, size: int, option: str
) -> None:
    made = case(queries=TQ, lengths=[T, 6], **OPTIONS[option]())
    whole = made.run()
    monkeypatch.setattr(reference, "_SCORE_ELEMENTS", size)
    cut = []
    attend = reference._attend
    monkeypatch.setattr(reference, "_attend", lambda *a: cut.append(a[0].shape[2]) or attend(*a))
    with registry.use_implementation("torch"):
        out = made.run()
    assert cut == {1: [1, 1, 1], 2 * B * HQ * T: [2, 1]}.get(size, [3]), "the path was not taken"
    made.check_tight(out)
    assert torch.allclose(out, whole, atol=1e-6)


@pytest.mark.parametrize("option", [o for o in OPTIONS if "float64" not in o])
def test_the_float64_reference_is_the_oracle(option: str) -> None:
    made = case("int4_group32", lengths=[T, 5], **OPTIONS[option]())
    fmt = get_format("int4_group32")
    out = reference.attention(
        made.query, made.key_store, made.value_store, fmt, fmt, compute=torch.float64, **made.options
    )
    assert out.dtype == torch.float64
    assert np.allclose(out.numpy(), made.exact(*made.decoded()), rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------ public reports


@pytest.mark.parametrize("sink", [-INF, 0.0, 5.0])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_E2_a_sink_is_one_column_without_value(implementation: str, sink: float) -> None:
    made = case(sinks=torch.full((HQ,), sink), causal=True)
    made.check(implementation)
    # The same softmax with a real column: a key of logit `sink` whose value is zero.
    key, value = (torch.from_numpy(a).double().repeat_interleave(HQ // HKV, 1) for a in made.decoded())
    scores = made.query.double() @ key.transpose(-1, -2) * D**-0.5
    scores = scores.masked_fill(~torch.ones(TQ, T, dtype=torch.bool).tril(T - TQ), -INF)
    column = torch.full((B, HQ, TQ, 1), sink, dtype=torch.float64)
    weights = torch.cat([scores, column], -1).softmax(-1)
    want = weights[..., :-1] @ value
    checks.assert_tight(made.run(), want.numpy())


@pytest.mark.parametrize("kind", ["bool", "-inf"])
@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_E5_a_closed_row_gives_zeros_and_spoils_nothing(implementation: str, name: str, kind: str) -> None:
    mask = torch.ones(B, 1, TQ, T, dtype=torch.bool)
    mask[0, :, 0] = False
    mask[1, :, :, :4] = False  # left padding
    given = mask if kind == "bool" else torch.where(mask, 0.0, -INF)
    for extra in ({}, {"softcap": 3.0}, {"causal": True}):
        made = case(name, mask=given, **extra)
        made.check(implementation)
        out = made.run()
        assert out.isfinite().all() and not out[0, :, 0].any()
        opened = torch.where(mask.any(-1, keepdim=True), mask, True)
        rest = made.run(mask=opened)
        assert torch.allclose(out[0, :, 1:], rest[0, :, 1:], atol=1e-6)
        assert torch.allclose(out[1], rest[1], atol=1e-6)
        # Padded rows hold garbage, NaN included; what is stored stays finite and masked tokens stay out.
        if name != "none":
            made.key[1, :, :4] = float("nan")
            made.value[1, :, :4] = float("nan")
            stores = [kvq_ops.quantize(x, name) for x in (made.key, made.value)]
            again = made.run(key_store=stores[0], value_store=stores[1])
            assert again.isfinite().all()
            if not get_format(name).static_planes:
                assert torch.allclose(again, out, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_per_head"])
@pytest.mark.parametrize("options", ["plain", "causal", "softcap", "sinks", "bias"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_F3_key_and_value_scales_apply_on_every_branch(
    implementation: str, options: str, name: str, dtype: torch.dtype
) -> None:
    """k_scale 0.5 and v_scale 2 on every query dtype and option; swapping them must show."""
    made = case(name, dtype=dtype, **OPTIONS[options]())
    fmt = get_format(name)
    (index,) = fmt.static_planes
    for store, x, scale in ((made.key_store, made.key, 0.5), (made.value_store, made.value, 2.0)):
        store[index].fill_(scale)
        kvq_ops.append_(store, torch.arange(T), x, name)
        assert (store[index] == scale).all()
    with registry.use_implementation(implementation):
        out = made.run()
    beyond = made.beyond(implementation)
    made.check_tight(out, beyond)
    swapped = [checks.copy(made.key_store), checks.copy(made.value_store)]
    swapped[0][index].fill_(2.0), swapped[1][index].fill_(0.5)
    with registry.use_implementation(implementation), pytest.raises(AssertionError):
        made.check_tight(made.run(key_store=swapped[0], value_store=swapped[1]), beyond)
