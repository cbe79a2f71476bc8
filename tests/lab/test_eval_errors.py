"""Errors of layers: exact where nothing is lost, told apart by source, and the sources add up."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("transformers", reason="the lab extra is not installed")

import kvq_ops
from kvq_lab import eval_errors, eval_outliers
from kvq_lab.eval_caches import Calibrations, ours
from kvq_lab.eval_errors import attend, last_rows, layer_errors, relative
from kvq_lab.eval_models import add_key_outliers_
from kvq_lab.eval_sources import code_range, without_rounding
from kvq_lab.eval_specs import parse_spec
from kvq_ops.errors import ShapeError
from kvq_ops.formats import get_format
from tests.lab import eval_toys

SINGLE = [name for name in kvq_ops.formats.names() if not get_format(name).calibrated]
MORE = [
    "int4_group32+hadamard",
    "int3_group32+outlier5%",
    "int4_group32+recent8+sink2",
    "int2_per_token_head",
]


def _stored(name: str, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    store = kvq_ops.quantize(x, name)
    return store, kvq_ops.dequantize(store, name, torch.float32)


@pytest.mark.parametrize("name", [*SINGLE, *MORE])
def test_scale_and_rounding_are_the_whole_error(name: str) -> None:
    """As vectors by construction; in squares because what is clipped is not rounded."""
    x = torch.randn(1, 2, 67, 64) * torch.logspace(-1, 1, 64)
    fmt = get_format(name)
    store, read = _stored(name, x)
    between = without_rounding(x, store, fmt, read)
    assert between is not None
    total, scale, rounding = (
        e.double().square().sum().item() for e in (read - x, between - x, read - between)
    )
    assert scale <= total * (1 + 1e-6)
    if "norm" not in {plane.name for plane in (fmt.base or fmt).planes}:
        assert scale + rounding == pytest.approx(total, rel=1e-4, abs=1e-9)
    if fmt.lossless:
        assert total == scale == rounding == 0


@pytest.mark.parametrize(
    "name", ["int4_group32", "int8_per_token_head", "fp8_per_token_head", "kivi4_keys+recent0"]
)
def test_scales_that_fit_the_data_leave_only_rounding(name: str) -> None:
    x = torch.randn(1, 2, 64, 64)
    store, read = _stored(name, x)
    between = without_rounding(x, store, get_format(name), read)
    assert relative(between - x, x) < 0.01 * relative(read - x, x)


def test_power_of_two_scales_clip_and_are_seen_to() -> None:
    # OCP's rule gives 7 the scale 1, whose codes end at 6; the other values are codes.
    x = torch.tensor([7.0, *([1.0] * 31)]).view(1, 1, 1, 32)
    store, read = _stored("mxfp4", x)
    between = without_rounding(x, store, get_format("mxfp4"), read)
    assert between[0, 0, 0, 0] == 6.0
    assert torch.equal(between, read)


def test_a_spoiled_scale_is_counted_as_scale_and_spoiled_codes_as_rounding() -> None:
    """Each source has a broken twin: halve the stored scales, or shuffle the codes."""
    x = torch.randn(1, 1, 16, 64)
    fmt = get_format("int8_per_token_head")
    store, _ = _stored(fmt.name, x)

    def sources(planes: list[torch.Tensor]) -> tuple[float, float]:
        read = kvq_ops.dequantize(planes, fmt.name, torch.float32)
        between = without_rounding(x, planes, fmt, read)
        return relative(between - x, x), relative(read - between, x)

    scale, rounding = sources(store)
    halved = [store[0], store[1] / 2, store[2]]
    shuffled = [store[0].flip(-1), *store[1:]]
    assert sources(halved)[0] > 0.1 > 100 * scale
    assert sources(shuffled)[1] > 0.5 > 10 * rounding
    assert sources(shuffled)[0] == scale


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_range_is_that_of_the_codes(bits: int) -> None:
    name = f"int{bits}_group32"
    x = torch.randn(1, 2, 5, 64)
    store, read = _stored(name, x)
    low, high = code_range(store, get_format(name))
    groups = x.unflatten(-1, (2, 32))
    slack = 0.01 * (groups.amax(-1) - groups.amin(-1)).repeat_interleave(32, -1)
    assert ((low - groups.amin(-1).repeat_interleave(32, -1)).abs() <= slack).all()
    assert ((high - groups.amax(-1).repeat_interleave(32, -1)).abs() <= slack).all()
    assert (low <= read).all() and (read <= high).all()


def test_masks_of_the_last_queries() -> None:
    whole = torch.ones(6, 9, dtype=torch.bool).tril()
    assert torch.equal(last_rows(None, True, 6, 9, 2)[0, 0], whole[-2:])
    assert last_rows(None, False, 6, 9, 2).all()
    given = torch.randn(1, 1, 6, 9)
    assert torch.equal(last_rows(given, False, 6, 9, 4), given[..., -4:, :])
    assert last_rows(torch.zeros(1, 1, 1, 9), False, 6, 9, 4).shape == (1, 1, 4, 9)


def test_attention_in_float64_is_that_of_torch() -> None:
    q, k, v = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 16)
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    got = attend(q, k, v, last_rows(None, True, 6, 6, 6), None)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _measure(names: list[str], model=None):
    subject = eval_toys.subject(model)
    calibrations = Calibrations(subject)
    contenders = [ours(subject, parse_spec(name), calibrations) for name in names]
    ids = torch.randint(0, 256, (1, 96))
    return layer_errors(subject, contenders, ids)


def test_every_layer_and_head_is_measured_and_formats_are_ordered() -> None:
    names = ["none", "int8_per_token_head", "int4_group32", "int2_group32"]
    layers, outliers = _measure(names)
    assert list(layers) == names
    assert outliers["tokens"] == 96
    for name in names:
        assert len(layers[name]) == eval_toys.LAYERS
        for layer in layers[name]:
            assert len(layer["key"]["heads"]) == len(layer["value"]["heads"]) == eval_toys.KV_HEADS
            assert len(layer["attention"]["heads"]) == eval_toys.HEADS
    for number in range(eval_toys.LAYERS):
        for side in ("key", "value", "attention"):
            errors = [layers[name][number][side]["total"] for name in names]
            assert errors == sorted(errors)
            assert errors[1] > 0
            assert errors[3] > 5 * errors[1]
        exact = layers["none"][number]
        assert exact["key"]["total"] == exact["value"]["total"] == 0
        assert exact["attention"]["scale"] == exact["attention"]["rounding"] == 0
        # All that is left is the operator's fp32 arithmetic.
        assert exact["attention"]["total"] == exact["attention"]["accumulation"] < 1e-5


def test_layers_see_exact_inputs() -> None:
    """Two formats measured together get the figures each gets alone: nothing is handed on."""
    torch.manual_seed(5)
    together = _measure(["int2_group32", "int4_group32"])[0]["int4_group32"]
    torch.manual_seed(5)
    alone = _measure(["int4_group32"])[0]["int4_group32"]
    assert together == alone


def test_a_policy_is_measured_as_it_is_stored() -> None:
    policy = '{"name": "mine", "format": "none", "layers": {"1": "key=int4_group32,value=none"}}'
    layers = _measure([policy])[0]["mine"]
    assert [layer["key"]["total"] > 0 for layer in layers] == [False, True, False]
    assert all(layer["value"]["total"] == 0 for layer in layers)
    assert layers[1]["attention"]["total"] > 100 * layers[0]["attention"]["total"]


def test_spoiled_accumulation_is_seen_as_such(monkeypatch) -> None:
    real = kvq_ops.attention

    def spoiled(*args, **kwargs):
        return real(*args, **kwargs).bfloat16().float()

    monkeypatch.setattr(eval_errors.kvq_ops, "attention", spoiled)
    for layer in _measure(["none"])[0]["none"]:
        assert layer["attention"]["accumulation"] > 1e-4
        assert layer["attention"]["rounding"] == 0


def test_models_without_attention_calls_are_refused() -> None:
    model = eval_toys.tiny_llama(attn_implementation="eager")
    with pytest.raises(ShapeError, match="no-errors"):
        _measure(["int4_group32"], model)


# -- outlier channels --------------------------------------------------------------------------


def test_the_channels_that_were_made_to_stand_out_are_named() -> None:
    model = eval_toys.tiny_llama()
    plain = _measure(["int4_group32"], model)[1]
    assert plain["channels"] == []
    assert plain["largest_ratio"] < eval_outliers.STANDS_OUT
    channels = add_key_outliers_(model, pairs=(3, 9))
    _, found = _measure(["int4_group32"], model)
    assert {entry["channel"] for entry in found["channels"]} == set(channels)
    assert len(found["channels"]) == len(channels) * eval_toys.LAYERS * eval_toys.KV_HEADS
    lines = eval_outliers.named(found)
    assert [line.split(",")[0] for line in lines] == [
        f"channel {channel} in {eval_toys.LAYERS * eval_toys.KV_HEADS} of 6 kv heads" for channel in channels
    ]
    assert eval_outliers.most_in_a_head(found) == len(channels)


def test_a_channel_of_one_head_is_named_with_its_layer_and_head() -> None:
    keys = torch.randn(1, 3, 50, 16)
    keys[:, 1, :, 7] *= 40
    quiet = eval_outliers.channel_statistics(torch.randn(1, 3, 50, 16))
    lines = eval_outliers.named(eval_outliers.describe([quiet, eval_outliers.channel_statistics(keys)]))
    assert len(lines) == 1
    assert lines[0].startswith("layer 1 head 1 channel 7, ")


def test_ordinary_channels_are_scored_without_the_large_ones() -> None:
    keys = torch.randn(1, 1, 200, 64)
    keys[..., 5] *= 100
    statistics = eval_outliers.channel_statistics(keys)
    errors = {}
    for name in ("int4_per_token_head", "kivi4_keys+recent0"):
        errors[name] = (
            relative(_stored(name, keys)[1] - keys, keys),
            statistics.errors((_stored(name, keys)[1] - keys).double())["ordinary_channels"],
        )
    # The total hides that per-token codes leave nothing of the others.
    assert errors["int4_per_token_head"][0] < 0.3
    assert errors["int4_per_token_head"][1] > 0.9
    assert errors["kivi4_keys+recent0"][1] < 0.2


def _row(name: str, change: float, error: float = 0.001, kl: float = 0.001) -> dict:
    return {
        "format": name,
        "spec": name,
        "perplexity_change": change,
        "perplexity_change_stderr": error,
        "kl": kl,
    }


def test_verdicts_allow_for_noise() -> None:
    assert eval_outliers.verdict(_row("nvfp4", 0.01)) == "holds"
    assert eval_outliers.verdict(_row("nvfp4", -0.02)) == "costs"
    assert eval_outliers.verdict(_row("nvfp4", 0.02, error=0.01)) == "holds"
    assert eval_outliers.verdict(_row("nvfp4", 0.0, kl=0.05)) == "costs"
    assert eval_outliers.verdict(_row("nvfp4", 0.5)) == "fails"
    assert eval_outliers.verdict(_row("nvfp4", 0.5, error=0.4, kl=0.05)) == "costs"
    assert eval_outliers.verdict(_row("nvfp4", 0.0, kl=0.5)) == "fails"
    assert eval_outliers.verdict(_row("nvfp4", 0.01, error=math.nan)) == "holds"


def test_advice_says_why_too_few_outliers_do_not_help() -> None:
    keys = torch.randn(1, 1, 50, 64)
    keys[..., [3, 9, 35, 41]] *= 40
    outliers = eval_outliers.describe([eval_outliers.channel_statistics(keys)])
    rows = [
        _row("int4_group32+outlier1%", 3.0),
        _row("int4_group32+outlier7%", 0.001),
        _row("kivi4", 0.002),
        _row("int4_per_token_head", 9.0),
    ]
    lines = "\n".join(eval_outliers.advice({"rows": rows, "outliers": outliers}))
    assert "keeps 1 value(s) of a vector exactly, while up to 4 channels of a head stand out" in lines
    holds, fails = lines.split("Fails")
    assert "int4_group32+outlier7%" in holds and "kivi4" in holds
    assert "int4_per_token_head" in fails and "one scale for all channels of a token" in fails
    assert "head 0 channel 41" in lines or "channel 41 in 1 of 1" in lines
