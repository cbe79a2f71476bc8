"""What is fitted beforehand: scales and codebooks, files of them, the scales of checkpoints, and k-means."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kvq_ops
from kvq_ops import QuantizedKV, calibration, errors
from kvq_ops.calibration import Calibration, check_static, fit
from kvq_ops.codecs.kmeans import fit_entries
from kvq_ops.formats import get_format, names, parse_kv_format
from tests.ops import checks, oracles
from tests.ops.checks import STATIC

SCALED = (
    "fp8_e4m3+static",
    "fp8_per_head+static",
    "nvfp4+static",
    "int8_per_tensor+static",
    "int4_per_head+static",
)
CODEBOOKS = ("nuq4_keys", "nuq3_values", "nuq2_keys+outlier1%")
CALIBRATED = (*SCALED, *CODEBOOKS, "fp8_e4m3+static+recent2", "nuq4_values+sink2", "fp8_e5m2+hadamard+static")
D = 16


def sample(heads: int = 2, tokens: int = 40) -> Tensor:
    return torch.randn(2, heads, tokens, D) * torch.linspace(0.5, 3, heads).view(1, -1, 1, 1)


def fitted(name: str, heads: int = 2, **given: Any) -> dict[str, Tensor]:
    return fit(sample(heads), get_format(name), **given)


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
        low, high = oracles.extremes(values, D)
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


# ------------------------------------------------------------------------------------------------------- of a whole model


def two_layers(name: str = "fp8_per_head+static") -> Calibration:
    made = Calibration()
    for at in itertools.product((0, 1), ("key", "value")):
        made.planes[at], made.notes[at] = fitted(name), f"text, layer {at[0]}"
    return made


def test_g2_missing_extra_and_values_alone() -> None:
    row = get_format("fp8_per_head+static")
    shape = (1, 2, 8, D)
    made = two_layers()
    assert set(made.static(1, "value", row, shape) or {}) == {"scale"}
    with pytest.raises(errors.CalibrationError, match=r"the keys of layer 2(?s:.)*there are 4"):
        made.static(2, "key", row, shape)
    values_only = made.only([(0, "value"), (1, "value")])
    assert values_only.static(0, "value", row, shape) and values_only.notes[0, "value"] == "text, layer 0"
    with pytest.raises(errors.CalibrationError, match="the keys of layer 0"):
        values_only.static(0, "key", row, shape)
    with pytest.raises(errors.CalibrationError, match="granularity"):
        made.static(0, "key", get_format("fp8_e4m3+static"), shape)
    made.check_layers(2)
    with pytest.raises(errors.CalibrationError, match=r"planes for layer 1(?s:.)*the model has 1 layers"):
        made.check_layers(1)


@pytest.mark.parametrize("name", [*SCALED, *CODEBOOKS])
def test_g2_a_file_gives_back_every_bit(name: str, tmp_path: Path) -> None:
    made = two_layers(name)
    made.save(tmp_path / "scales.kvq")
    again = Calibration.load(tmp_path / "scales.kvq")
    assert again.notes == made.notes and set(again.planes) == set(made.planes)
    for at, planes in made.planes.items():
        assert {k: (v.dtype, v.shape) for k, v in planes.items()} == {
            k: (v.dtype, v.shape) for k, v in again.planes[at].items()
        }
        assert all(torch.equal(checks.raw(v), checks.raw(again.planes[at][k])) for k, v in planes.items())
    x = torch.randn(1, 2, 9, D)
    stores = [
        QuantizedKV.from_dense(x, name, static=c.static(0, "key", get_format(name), x.shape)).store
        for c in (made, again)
    ]
    checks.assert_same_planes(stores[0], stores[1], get_format(name))


def _foreign(path: Path) -> None:
    torch.save({"kind": "kvq.cache", "version": 1, "caches": []}, path)


def _other_version(path: Path) -> None:
    torch.save({"kind": "kvq.calibration", "version": 99, "entries": []}, path)


def _bad_entry(path: Path) -> None:
    torch.save(
        {"kind": "kvq.calibration", "version": 1, "entries": [{"layer": 0, "side": "query", "planes": {}}]},
        path,
    )


def _no_tensors(path: Path) -> None:
    entry = {"layer": 0, "side": "key", "planes": {"scale": 1.0}, "note": ""}
    torch.save({"kind": "kvq.calibration", "version": 1, "entries": [entry]}, path)


def _without_entries(path: Path) -> None:
    torch.save({"kind": "kvq.calibration", "version": 1}, path)


def _cut_off(path: Path) -> None:
    two_layers().save(path)
    path.write_bytes(path.read_bytes()[:-200])


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "another kind": _foreign,
    "another version": _other_version,
    "a bad entry": _bad_entry,
    "no tensors": _no_tensors,
    "without entries": _without_entries,
    "cut off": _cut_off,
    "text": lambda path: path.write_text("k_scale: 1.0\n"),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_damaged_and_foreign_files_say_so(how: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    DAMAGE[how](path)
    with pytest.raises(errors.CorruptStoreError) as caught:
        Calibration.load(path)
    assert str(path) in caught.value.asked and caught.value.got


def test_a_failed_save_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "scales.kvq"
    two_layers().save(path)
    before = path.read_bytes()

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="disk full"):
        two_layers("nvfp4+static").save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        Calibration.load(tmp_path / "elsewhere")


# ---------------------------------------------------------------------------------------------- scales of a checkpoint

SPELLINGS = {
    "vLLM": ("model.layers.{}.self_attn.attn.k_scale", "model.layers.{}.self_attn.attn.v_scale"),
    "ModelOpt": ("model.layers.{}.self_attn.k_proj.k_scale", "model.layers.{}.self_attn.v_proj.v_scale"),
    "compressed-tensors": ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"),
    "AutoFP8": (
        "model.layers.{}.self_attn.k_proj.output_scale",
        "model.layers.{}.self_attn.v_proj.output_scale",
    ),
    "GPT": ("transformer.h.{}.attn.k_scale", "transformer.h.{}.attn.v_scale"),
    "no prefix": ("layers.{}.k_scale", "layers.{}.v_scale"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_g2_checkpoint_scales_are_read(spelling: str, tmp_path: Path) -> None:
    weights = {}
    for layer in (0, 11):
        for name, scale in zip(SPELLINGS[spelling], (0.5, 2.0), strict=True):
            weights[name.format(layer)] = torch.tensor([scale + layer], dtype=torch.bfloat16)
    weights["model.layers.0.mlp.gate_proj.weight_scale"] = torch.tensor([9.0])
    weights["model.layers.0.self_attn.k_proj.weight_scale"] = torch.tensor([9.0])
    weights["model.layers.0.self_attn.k_proj.input_scale"] = torch.tensor([9.0])
    pytest.importorskip("safetensors")
    from safetensors.torch import save_file

    save_file(weights, tmp_path / "model.safetensors")
    for source in (weights, tmp_path / "model.safetensors", str(tmp_path)):
        made = Calibration.from_checkpoint(source, "fp8_e4m3")
        got = {at: planes["scale"].tolist() for at, planes in made.planes.items()}
        assert got == {(0, "key"): [0.5], (0, "value"): [2.0], (11, "key"): [11.5], (11, "value"): [13.0]}
        assert made.notes[11, "key"] == SPELLINGS[spelling][0].format(11)
        static = made.static(11, "value", get_format("fp8_e4m3+static"), (1, 2, 8, D))
        assert static is not None and static["scale"].dtype == torch.float32


def test_g2_other_scales_of_a_checkpoint() -> None:
    prefix = "model.layers.3.self_attn."
    one = Calibration.from_checkpoint({prefix + "kv_scale": torch.tensor(0.25)}, "nvfp4")
    assert one.planes == {
        (3, "key"): {"decode_scale": torch.tensor([0.25])},
        (3, "value"): {"decode_scale": torch.tensor([0.25])},
    }
    heads = Calibration.from_checkpoint({prefix + "k_scale": torch.rand(4) + 1}, "fp8_per_head")
    assert heads.planes[3, "key"]["scale"].shape == (4,) and (3, "value") not in heads.planes
    with pytest.raises(errors.CalibrationError, match="granularity"):
        heads.static(3, "key", get_format("fp8_e4m3+static"), (1, 4, 8, D))
    ignored = Calibration.from_checkpoint(
        {prefix + "k_scale": torch.ones(1), prefix + "q_scale": torch.ones(1), prefix + "prob_scale": torch.ones(1),
         prefix + "k_zero_point": torch.zeros(1)},
        "fp8_e4m3",
    )  # fmt: skip
    assert ignored.ignored == [prefix + "q_scale", prefix + "prob_scale"] and list(ignored.planes) == [
        (3, "key")
    ]
    unusable = Calibration.from_checkpoint({prefix + "k_scale": torch.tensor(-1.0)}, "fp8_e4m3")
    with pytest.raises(errors.CalibrationError, match="-1 or 0 here was never calibrated"):
        unusable.static(3, "key", get_format("fp8_e4m3+static"), (1, 4, 8, D))


@pytest.mark.parametrize(
    ("weights", "name", "message"),
    [
        ({}, "fp8_e4m3", "none of the names"),
        ({"model.layers.0.mlp.weight_scale": torch.ones(1)}, "fp8_e4m3", "none of the names"),
        ({"k_scale": torch.ones(1)}, "fp8_e4m3", "none of the names"),
        ({"layers.0.k_scale": torch.ones(1), "layers.0.kv_scale": torch.ones(1)}, "fp8_e4m3", "one of them"),
        (
            {"layers.0.k_scale": torch.ones(1), "layers.0.k_zero_point": torch.ones(1)},
            "fp8_e4m3",
            "symmetric",
        ),
        ({"layers.0.k_scale": torch.ones(1)}, "int4_group32", "a format with one scale"),
        ({"layers.0.k_scale": torch.ones(1)}, "nuq4", "a format with one scale"),
        ({"layers.0.k_scale": torch.ones(1)}, "int8_per_tensor_asym", "a format with one scale"),
    ],
)
def test_g2_checkpoints_that_are_refused(weights: dict[str, Tensor], name: str, message: str) -> None:
    with pytest.raises(errors.CalibrationError) as caught:
        Calibration.from_checkpoint(weights, name)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------------------- k-means


def cost(z: np.ndarray, weight: np.ndarray, entries: np.ndarray) -> float:
    return float((weight * ((z[:, None] - entries) ** 2).min(1)).sum())


def best_by_force(z: np.ndarray, weight: np.ndarray, count: int) -> np.ndarray:
    """Every way to cut the sorted values into intervals."""
    order = np.argsort(z)
    z, weight = z[order], weight[order]
    best: tuple[float, np.ndarray] | None = None
    for cuts in itertools.combinations(range(1, len(z)), count - 1):
        parts = [slice(a, b) for a, b in zip((0, *cuts), (*cuts, len(z)), strict=True)]
        entries = np.array([(weight[p] * z[p]).sum() / weight[p].sum() for p in parts])
        found = cost(z, weight, entries)
        if best is None or found < best[0]:
            best = found, entries
    assert best is not None
    return best[1]


def lloyd(z: np.ndarray, weight: np.ndarray, entries: np.ndarray) -> np.ndarray:
    """Plain Lloyd iterations: assign to the nearest, move to the weighted mean."""
    for _ in range(1000):
        nearest = np.abs(z[:, None] - entries).argmin(1)
        moved = entries.copy()
        for k in range(len(entries)):
            mine = nearest == k
            if weight[mine].sum() > 0:
                moved[k] = (weight[mine] * z[mine]).sum() / weight[mine].sum()
        if np.abs(moved - entries).max() < 1e-12:
            break
        entries = moved
    return entries


def test_clusters_that_lie_apart_are_found_as_by_force() -> None:
    rng = np.random.default_rng(0)
    for count in (2, 3, 4):
        centres = np.arange(count) * 10.0 + rng.standard_normal(count)
        z = np.concatenate([c + rng.standard_normal(4) for c in centres])
        weight = rng.uniform(0.5, 1.5, len(z))
        rng.shuffle(order := np.arange(len(z)))
        got = fit_entries(torch.from_numpy(z[order]), torch.from_numpy(weight[order]), count).numpy()
        want = best_by_force(z, weight, count)
        assert got.dtype == np.float32 and np.allclose(got, want, rtol=1e-6)
        unweighted = fit_entries(torch.from_numpy(z), torch.ones(len(z)), count).numpy()
        assert not np.allclose(unweighted, want, rtol=1e-6), (
            "the check would not see weights that are ignored"
        )


@pytest.mark.parametrize("kind", ["normal", "long tails", "uniform"])
@pytest.mark.parametrize("count", [4, 8, 16])
def test_entries_are_a_fixed_point_of_lloyd(kind: str, count: int) -> None:
    rng = np.random.default_rng(count)
    z = {"normal": rng.standard_normal, "long tails": lambda n: rng.standard_t(3, n), "uniform": rng.random}[
        kind
    ](2000)
    weight = rng.uniform(0, 1, len(z)) ** 3
    got = fit_entries(torch.from_numpy(z), torch.from_numpy(weight), count, steps=1000).double().numpy()
    span = np.ptp(z)
    assert np.allclose(lloyd(z, weight, got), got, atol=1e-4 * span), (
        "an entry is not the mean of what it serves"
    )
    assert cost(z, weight, got) <= cost(z, weight, lloyd(z, weight, got)) * (1 + 1e-4)
    order = np.argsort(z)
    share = (np.arange(count) + 0.5) / count * weight.sum()
    quantiles = z[order][np.searchsorted(np.cumsum(weight[order]), share).clip(0, len(z) - 1)]
    assert cost(z, weight, got) < 0.99 * cost(z, weight, quantiles), (
        "as good without a step: nothing was shown"
    )
    assert not np.allclose(
        lloyd(z, weight, quantiles + 0.05 * span), quantiles + 0.05 * span, atol=1e-4 * span
    )


def test_entries_ascend_whatever_there_is() -> None:
    for values in ([1.0], [0.0, 0.0, 0.0], [-2.0, 5.0], [1e30, -1e30], list(range(3))):
        z = torch.tensor(values, dtype=torch.float32)
        for weight in (torch.ones(len(z)), torch.zeros(len(z))):
            entries = fit_entries(z, weight, 16)
            assert entries.shape == (16,) and (entries.diff() > 0).all() and entries.isfinite().all()
            assert all((entries - v).abs().min() <= 1e-6 * abs(v) for v in values), "each value has its entry"


def test_weights_of_zero_count_as_none_and_order_does_not_matter() -> None:
    z, weight = torch.randn(500), torch.rand(500)
    assert torch.equal(fit_entries(z, torch.zeros(500), 8), fit_entries(z, torch.ones(500), 8))
    order = torch.randperm(500)
    assert torch.allclose(fit_entries(z[order], weight[order], 8), fit_entries(z, weight, 8), atol=1e-6)
    far = torch.cat([z, torch.full((50,), 100.0)])
    ignored = fit_entries(far, torch.cat([weight, torch.zeros(50)]), 8)
    assert torch.allclose(ignored, fit_entries(z, weight, 8), atol=1e-6)


@pytest.mark.parametrize("name", ["nuq3_keys", "nuq3_values", "nuq2_values+hadamard", "nuq3_keys+outlier1%"])
def test_weights_move_the_codebook_to_where_errors_matter(name: str) -> None:
    """Each of two codebooks is the better one by its own measure."""
    fmt = get_format(name)
    x = torch.randn(1, 2, 400, D)
    matters = torch.where(x.abs() > 1.5, 20.0, 0.1)
    if fmt.rotation:
        matters = matters.mean(-1, keepdim=True).expand(x.shape).contiguous()
    plain, weighted = fit(x, fmt), fit(x, fmt, weight=matters)
    assert not torch.equal(plain["codebook"], weighted["codebook"])
    assert all(torch.equal(plain[k], weighted[k]) for k in plain if k != "codebook")

    def error(static: dict[str, Tensor], weight: Tensor) -> float:
        back = QuantizedKV.from_dense(x, name, static=static).dequantize()
        return float((weight * (back - x) ** 2).sum())

    assert error(weighted, matters) < error(plain, matters)
    assert error(plain, torch.ones_like(x)) < error(weighted, torch.ones_like(x))
    if not fmt.rotation and not fmt.outliers:
        outer = plain["codebook"].abs()[[0, -1]].sum() - weighted["codebook"].abs()[[0, -1]].sum()
        assert error(weighted, matters) < 0.9 * error(plain, matters) and outer != 0


def test_weights_of_pairs_are_shared_where_keys_are_turned() -> None:
    """A weight on one half alone is one on its pair: turned back, a value is made of both."""
    fmt = get_format("nuq3_keys")
    x, inv_freq = torch.randn(1, 1, 300, D), torch.rand(D // 2)
    one = torch.zeros_like(x)
    one[..., : D // 2] = torch.rand(1, 1, 300, D // 2)
    both = (one[..., : D // 2] / 2).repeat(1, 1, 1, 2)
    a, b = (fit(x, fmt, weight=w, inv_freq=inv_freq)["codebook"] for w in (one, both))
    assert torch.allclose(a, b, atol=1e-6)
    assert calibration.SIDES == ("key", "value")
