"""What is fitted beforehand: scales and codebooks, and what happens where they are missing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kvq_ops
from kvq_ops import QuantizedKV, errors
from kvq_ops.calibration import Calibration, check_static, fit
from kvq_ops.codecs.kmeans import fit_entries
from kvq_ops.formats import get_format, names, parse_kv_format
from tests.ops import checks, oracle_numbers, oracles
from tests.ops.calibrated import CALIBRATED, SCALED, D, fitted, sample
from tests.ops.checks import STATIC

# ----------------------------------------------------------------------------------------------------------------- fit


@pytest.mark.parametrize("name", STATIC)
def test_fitted_scales_are_those_of_a_first_write(name: str) -> None:
    """Bit for bit, whether or not the name says ``+static``."""
    x = torch.randn(2, 3, 9, 64)
    x[0, 0, 0, 0], x[0, 0, 0, 1] = float("nan"), float("inf")
    want = checks.first_fit(get_format(name), x)
    for row in (get_format(name), get_format(f"{name}+static"), get_format(f"{name}+static+recent4")):
        got = fit(x, row)
        assert set(got) == set(want)
        assert all(np.array_equal(got[plane].numpy(), want[plane]) for plane in want)


def test_outliers_do_not_enter_a_fitted_scale() -> None:
    x = torch.randn(1, 2, 20, 64)
    x[..., 7] = 1000.0
    row = get_format("int8_per_tensor+outlier2%+static")
    scale = fit(x, row)["scale"]
    assert scale.item() < 10 / 127 and np.array_equal(scale.numpy(), checks.first_fit(row, x)["scale"])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "name",
    ["nuq3_keys", "nuq3_keys+outlier10%", "nuq2_values", "nuq3_values+outlier10%", "nuq3_keys+hadamard"],
)
def test_a_codebook_is_fitted_to_what_it_codes(name: str, weighted: bool) -> None:
    """Centres, half-ranges, outliers and weights by numpy; k-means has tests of its own."""
    fmt = get_format(name)
    x = torch.randn(2, 2, 60, D) * torch.linspace(0.2, 4, D) + 0.5
    x[0, 0, 3, 3], x[0, 1, 4, 5] = torch.nan, torch.inf
    weight = torch.rand(x.shape) if weighted else torch.ones(x.shape)
    inv_freq = torch.linspace(1, 0.01, D // 2)
    got = fit(x, fmt, inv_freq=inv_freq, weight=weight if weighted else None)

    values, measure = np.nan_to_num(x.numpy(), nan=0, posinf=0), weight.numpy().astype(np.float64)
    static: dict[str, np.ndarray] = {}
    if fmt.group is None:
        values = oracles.turned(
            values, np.broadcast_to(np.arange(60), (2, 1, 60)), inv_freq.numpy(), back=True
        )
        measure = np.tile((measure[..., : D // 2] + measure[..., D // 2 :]) / 2, 2)
    if fmt.rotation:
        values, measure = (
            oracles.rotated(fmt, values),
            np.broadcast_to(measure.mean(-1, keepdims=True), x.shape),
        )
    if fmt.group is None:
        rest = values
        for turn in range(3 if fmt.outliers else 1):
            if turn:  # the range holds what is not kept exactly, which depends on the range
                rest = oracles.split_outliers(fmt, values, static)[1]
            low, high = np.nanmin(rest, (0, 2)), np.nanmax(rest, (0, 2))
            static = {
                "centre": ((high + low) / 2).astype(np.float16),
                "half_range": ((high - low) / 2).astype(np.float16),
            }
        assert all(np.array_equal(got[plane].numpy(), want) for plane, want in static.items())
        assert torch.equal(got["inv_freq"], inv_freq)
    else:
        values = x.numpy()
        assert set(got) == {"codebook"}
    if fmt.outliers:
        values = oracles.split_outliers(fmt, values, static)[1]
    if fmt.group is None:
        centre, half = (static[n].astype(np.float32)[None, :, None] for n in ("centre", "half_range"))
    else:
        low, high = oracle_numbers.extremes(values, D)
        centre, half = (((high + s * low) / 2).astype(np.float16).astype(np.float32) for s in (1, -1))
    z = (values - centre) / half
    used = np.isfinite(z)
    mass = (measure * np.broadcast_to(half, x.shape).astype(np.float64) ** 2)[used]
    want = fit_entries(torch.from_numpy(z[used]), torch.from_numpy(mass), 2**fmt.bits)
    assert torch.allclose(got["codebook"], want, atol=1e-5)
    plain = fit_entries(torch.from_numpy(z[used]), torch.ones(int(used.sum())), 2**fmt.bits)
    assert not torch.allclose(got["codebook"], plain, atol=1e-3), "half-ranges and weights would not show"


def test_a_format_without_such_planes_needs_nothing() -> None:
    for name in ("int8_per_token_head", "kivi4_keys", "turbo4", "none"):
        assert fit(sample(), get_format(name)) == {}
        assert Calibration().static(0, "key", get_format(name), (1, 2, 9, D)) is None
        assert not parse_kv_format(name.replace("_keys", "")).calibratable


@pytest.mark.parametrize("name", CALIBRATED)
@pytest.mark.parametrize(
    "x", [torch.zeros(1, 2, 5, D), torch.zeros(1, 2, 0, D), torch.full((1, 2, 5, D), torch.nan)]
)
def test_nothing_to_fit_to_is_an_error(name: str, x: Tensor) -> None:
    with pytest.raises(errors.CalibrationError, match="without a finite value other than zero"):
        fit(x, get_format(name))


def test_a_sample_without_spread_is_an_error() -> None:
    for name in ("nuq4_values", "nuq4_keys"):
        with pytest.raises(errors.CalibrationError, match="without spread"):
            fit(torch.full((1, 2, 5, D), 3.0), get_format(name))


def test_frequencies_of_another_head_size_are_an_error() -> None:
    with pytest.raises(errors.CalibrationError, match="half of head_dim"):
        fitted("nuq4_keys", inv_freq=torch.ones(D))
    assert set(fitted("nuq4_values", inv_freq=torch.ones(D))) == {"codebook"}, "values are never turned"


def test_calibrated_names() -> None:
    pair = parse_kv_format("key=fp8_e4m3+recent4,value=int8_per_token_head").calibrated()
    assert pair.key.name == "fp8_e4m3+recent4+static" and pair.key.calibrated
    assert pair.key.base is not None and pair.key.base.calibrated and pair.key.recent == 4
    assert pair.value.name == "int8_per_token_head"
    assert parse_kv_format("nuq4").calibrated() == parse_kv_format("nuq4")
    assert all(get_format(n).calibrated for n in names() if n.startswith("nuq"))


# ------------------------------------------------------------------------------------------------ missing is an error


@pytest.mark.parametrize("name", CALIBRATED)
def test_g2_a_missing_scale_is_an_error_and_never_one(name: str) -> None:
    fmt = get_format(name)
    x = torch.randn(1, 2, 9, D)
    handle = QuantizedKV.empty((1, 2, 12, D), name)
    before = checks.copy(handle.store)
    for write in (
        lambda: kvq_ops.quantize(x, name),
        lambda: kvq_ops.append_(handle.store, torch.arange(9), x, name),
        lambda: handle.index_copy_(2, torch.arange(9), x),
        lambda: handle[:, :, :9].copy_(x),
        lambda: QuantizedKV.from_dense(x, name),
    ):
        with pytest.raises(errors.CalibrationError, match="(?s)no calibrated.*no default"):
            write()
        checks.assert_same_planes(handle.store, before, fmt)
        assert not any(plane.any() for plane in handle.store), "nothing was made up"
    handle.calibrate_(fitted(name))
    handle.index_copy_(2, torch.arange(9), x)
    assert handle.length.item() == 9 and handle.dequantize()[:, :, :9].any()


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrated_planes_stay_when_the_cache_is_emptied(name: str) -> None:
    static = fitted(name)
    handle = QuantizedKV.empty((1, 2, 12, D), name, static=static)
    for scale in (1.0, 50.0):
        handle.index_copy_(2, torch.arange(9), torch.randn(1, 2, 9, D) * scale)
        for empty in (lambda: handle.zero_(), lambda: handle.fill_(0)):
            for plane, want in static.items():
                assert torch.equal(getattr(handle, f"plane_{plane}"), want), f"{plane} moved"
            empty()
        assert not handle.length.any() and not handle.dequantize().any()


@pytest.mark.parametrize("name", STATIC)
def test_a_format_without_static_is_fitted_again(name: str) -> None:
    handle = QuantizedKV.empty((1, 2, 12, 64), name, static=fit(torch.randn(1, 2, 9, 64), get_format(name)))
    kept = [plane.clone() for plane in handle.store]
    x = torch.randn(1, 2, 4, 64) * 30
    handle.index_copy_(2, torch.arange(4), x)
    index = get_format(name).static_planes
    assert all(torch.equal(handle.store[i], kept[i]) for i in index), "what was set counts for the first text"
    handle.zero_()
    handle.index_copy_(2, torch.arange(4), x)
    want = checks.first_fit(get_format(name), x)
    assert all(np.array_equal(handle.store[i].numpy(), want[get_format(name).planes[i].name]) for i in index)


def test_codes_under_a_calibrated_scale_are_the_oracles() -> None:
    for name in SCALED:
        fmt, static = get_format(name), fitted(name)
        for x in (torch.randn(2, 2, 9, D), torch.randn(2, 2, 9, D) * 100):
            handle = QuantizedKV.from_dense(x, name, static=static)
            want = checks.expected(fmt, x, {plane: t.numpy() for plane, t in static.items()})
            checks.assert_planes(handle.store, fmt, want, name)
            assert np.array_equal(handle.dequantize().numpy(), checks.decoded(fmt, handle.store))


@pytest.mark.parametrize(
    "name", ["fp8_e4m3", "nvfp4", "int8_per_head", "int4_per_tensor", "fp8_per_head+static", "nuq4_keys"]
)
def test_g1_scales_are_not_frozen_by_a_warm_up(name: str) -> None:
    """Warm up on zeros, compile, feed data, then ten times as loud, then calibrate: each scale is seen, in one compilation."""
    fmt = get_format(name)

    def step(store: list[Tensor], position: Tensor, x: Tensor, query: Tensor) -> Tensor:
        kvq_ops.append_(store, position, x, name)
        return kvq_ops.attention(query, store, store, name, name)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    position, x, query = torch.arange(3), torch.randn(1, 2, 3, 64), torch.randn(1, 2, 1, 64)
    store, eager = fmt.empty_store(1, 2, 4, 64), fmt.empty_store(1, 2, 4, 64)
    if fmt.calibrated:
        with pytest.raises(errors.CalibrationError):
            compiled(store, position, x, query)
        assert not any(plane.any() for plane in store)
    else:
        compiled(store, position, torch.zeros(1, 2, 3, 64), query)
        assert not any(store[i].any() for i in fmt.static_planes), "zeros were taken for data"
    for loudness in (1.0, 10.0, 0.1):
        scales = []
        for planes, run in ((store, compiled), (eager, step)):
            handle = QuantizedKV(planes, name, "bhtd", torch.float32).zero_()
            if fmt.calibrated:
                handle.calibrate_(fit(x * loudness, fmt))
            out = run(planes, position, x * loudness, query)
            want = checks.exact_attention(query, *[checks.decoded(fmt, planes)] * 2, lengths=[3])
            checks.assert_tight(out, want)
            scales.append([planes[i] for i in fmt.static_planes])
        assert all(torch.equal(a, b) for a, b in zip(*scales, strict=True))
        if not fmt.calibrated:
            want = checks.first_fit(fmt, x * loudness)
            assert all(np.array_equal(store[i].numpy(), want[fmt.planes[i].name]) for i in fmt.static_planes)
    assert counter.frame_count == 1, "compiled again"


# --------------------------------------------------------------------------------------------- what fits, and what not


def test_g2_one_scale_for_the_tensor_serves_every_head_and_not_the_reverse() -> None:
    heads = get_format("fp8_per_head+static")
    shape = (2, 4, 8, D)
    for given in (torch.tensor(0.37), torch.tensor([0.37]), torch.tensor([0.37], dtype=torch.float64)):
        got = check_static({"scale": given}, heads, shape)["scale"]
        assert got.dtype == torch.float32 and torch.equal(got, torch.full((4,), 0.37))
        handle = QuantizedKV.empty(shape, heads, static={"scale": given})
        x = torch.randn(2, 4, 8, D)
        handle.copy_(x)
        tensor = QuantizedKV.from_dense(x, "fp8_e4m3+static", static={"scale": torch.tensor([0.37])})
        assert torch.equal(handle.store[0], tensor.store[0]), "the very same codes"
    for wrong, name in (
        (torch.ones(4), "fp8_e4m3+static"),
        (torch.ones(3), "fp8_per_head+static"),
        (torch.ones(1, 4), "fp8_per_head+static"),
    ):
        with pytest.raises(errors.CalibrationError, match="that granularity"):
            QuantizedKV.empty(shape, name, static={"scale": wrong})


@pytest.mark.parametrize("name", CALIBRATED)
def test_g2_missing_extra_and_useless_planes(name: str) -> None:
    good = fitted(name)
    first = next(iter(good))
    first = "codebook" if "codebook" in good else first
    shape = (1, 2, 8, D)
    bad: dict[str, dict[str, Tensor]] = {
        "no planes": {},
        "one is missing": {k: v for k, v in good.items() if k != first},
        "one too many": {**good, "offset": torch.ones(1)},
        "zero": {**good, first: torch.zeros_like(good[first])},
        "negative, as where nothing was calibrated": {**good, first: -good[first].abs()},
        "NaN": {**good, first: torch.full_like(good[first], torch.nan)},
        "infinite": {**good, first: torch.full_like(good[first], torch.inf)},
        "of another shape": {**good, first: torch.ones(5, 7)},
    }
    if first == "codebook":
        bad["negative, as where nothing was calibrated"] = {**good, first: good[first].flip(0)}
    for what, planes in bad.items():
        handle = QuantizedKV.empty(shape, name)
        for call in (
            lambda planes=planes: check_static(planes, get_format(name), shape, "the keys of layer 3"),
            lambda planes=planes: QuantizedKV.empty(shape, name, static=planes),
            lambda planes=planes, handle=handle: handle.calibrate_(planes),
        ):
            with pytest.raises(errors.CalibrationError) as caught:
                call()
            assert caught.value.asked and caught.value.got and caught.value.allowed, what
        assert not any(plane.any() for plane in handle.store), f"{what}: something was set"


def test_a_cache_that_holds_tokens_is_not_calibrated() -> None:
    name = "fp8_e4m3+static"
    handle = QuantizedKV.empty((2, 2, 8, D), name, static={"scale": torch.tensor([0.5])})
    handle[:, :, :3] = 1.0
    with pytest.raises(errors.CalibrationError, match="holds"):
        handle.calibrate_({"scale": torch.tensor([2.0])})
    with pytest.raises(errors.CalibrationError, match="slice"):
        QuantizedKV.empty((2, 2, 8, D), name)[:, :, :4].calibrate_({"scale": torch.tensor([2.0])})
    assert handle.store[1].item() == 0.5
    handle.zero_()
    assert handle.calibrate_({"scale": torch.tensor([2.0])}).store[1].item() == 2.0
