"""Calibrated scales and codebooks in a Hugging Face cache: fitted to text, kept, required."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvq_lab.calibrate import calibrate, observe
from kvq_ops import errors
from kvq_ops.calibration import Calibration
from kvq_ops.hf import QuantizedCache
from kvq_ops.hf_generate import use_quantized_cache_

from . import models

STATIC = ("fp8_e4m3", "fp8_per_head", "nvfp4", "int8_per_tensor", "int4_per_head_asym")
CODEBOOKS = ("nuq4", "nuq3+outlier5%", "nuq2+recent4", "key=nuq4_keys+hadamard,value=int4_group8")


def logits(model: Any, cache: Any, ids: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    out, start = [], 0
    with torch.no_grad():
        for size in sizes:
            out.append(model(ids[:, start : start + size], past_key_values=cache).logits)
            start += size
    return torch.cat(out, 1)


@pytest.fixture(scope="module")
def sample() -> Any:
    torch.manual_seed(3)
    return models.prompt(rows=3, tokens=40)


@pytest.mark.parametrize("format", [*STATIC, *CODEBOOKS])
def test_a_calibrated_cache_reads_what_was_fitted(format: str, sample: torch.Tensor) -> None:
    """Static planes are those of the calibration before and after tokens and a reset; the model stays near itself."""
    model = models.model("qwen3")
    calibration = calibrate(model, sample, format)
    cache = QuantizedCache(model.config, format, 32, batch_size=2, calibration=calibration)

    def planes() -> list[torch.Tensor]:
        return [
            plane.clone()
            for handle in cache.handles()
            for i, plane in enumerate(handle.planes())
            if i in handle.format.static_planes
        ]

    fitted = planes()
    assert fitted and all(f.any() for f in fitted[:1])
    ids = models.prompt(tokens=20)
    exact = logits(model, None, ids, (20,))
    first = logits(model, cache, ids, (9, 1, 10))
    assert all(torch.equal(a, b) for a, b in zip(planes(), fitted, strict=True))
    cache.reset()
    assert all(torch.equal(a, b) for a, b in zip(planes(), fitted, strict=True))
    assert torch.equal(logits(model, cache, ids, (9, 1, 10)), first)
    kept = (first - exact).norm() / exact.norm()
    broken = Calibration({at: dict(p) for at, p in calibration.planes.items()})
    for at in broken.planes:
        broken.planes[at] = {
            n: p * (0.02 if n in ("scale", "decode_scale", "codebook") else 1)
            for n, p in broken.planes[at].items()
        }
    wrong = QuantizedCache(model.config, format, 32, batch_size=2, calibration=broken)
    assert (logits(model, wrong, ids, (9, 1, 10)) - exact).norm() / exact.norm() > kept


@pytest.mark.parametrize("format", ["nuq4", "fp8_e4m3+static", "key=int8_per_token_head,value=nuq3_values"])
def test_g2_a_missing_scale_is_an_error(format: str, sample: torch.Tensor) -> None:
    model = models.model("llama")
    with pytest.raises(errors.CalibrationError, match="layer 0"):
        QuantizedCache(model.config, format, 16)
    with pytest.raises(errors.CalibrationError, match="layer 0"):
        use_quantized_cache_(model, format)
    calibration = calibrate(model, sample, format)
    with pytest.raises(errors.CalibrationError, match="layer 1"):
        QuantizedCache(
            model.config,
            format,
            16,
            calibration=calibration.only(at for at in calibration.planes if at[0] == 0),
        )
    cache = QuantizedCache(model.config, format, 16, skip=1, calibration=calibration)
    assert cache.layer_formats[1].lossless


def test_g2_planes_for_layers_that_are_not_there(sample: torch.Tensor) -> None:
    model = models.model("llama")
    calibration = calibrate(model, sample, "fp8_per_head")
    calibration.planes[7, "key"] = calibration.planes[0, "key"]
    with pytest.raises(errors.CalibrationError, match="layer 7"):
        QuantizedCache(model.config, "fp8_per_head", 16, calibration=calibration)


def test_g2_a_calibration_that_nothing_uses_is_an_error(sample: torch.Tensor) -> None:
    model = models.model("llama")
    calibration = calibrate(model, sample, "fp8_per_head")
    with pytest.raises(errors.CalibrationError, match="nothing to calibrate"):
        QuantizedCache(model.config, "int8_per_token_head", 16, calibration=calibration)
    with pytest.raises(errors.CalibrationError, match="scale"):
        QuantizedCache(model.config, "nvfp4", 16, calibration=calibration)
    with pytest.raises(errors.CalibrationError, match="compute their scales"):
        calibrate(model, sample, "int4_group32")


def test_g2_scales_of_a_checkpoint(tmp_path: Any) -> None:
    """Names of vLLM and compressed-tensors; saved and loaded bit for bit; a scale for K alone leaves V missing."""
    from safetensors.torch import save_file

    model = models.model("llama")
    weights = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.031),
        "model.layers.0.self_attn.v_scale": torch.tensor([0.027]),
        "model.layers.1.self_attn.k_proj.output_scale": torch.tensor(0.5),
        "model.layers.1.self_attn.v_proj.output_scale": torch.tensor(0.25),
        "model.layers.1.self_attn.q_scale": torch.tensor(9.0),
        "model.layers.1.self_attn.q_proj.weight": torch.zeros(4, 4),
    }
    save_file(weights, str(tmp_path / "model.safetensors"))
    calibration = Calibration.from_checkpoint(tmp_path, "fp8_e4m3")
    assert calibration.ignored == ["model.layers.1.self_attn.q_scale"]
    calibration.save(tmp_path / "scales.kvq")
    again = Calibration.load(tmp_path / "scales.kvq")
    for at, planes in calibration.planes.items():
        assert all(torch.equal(planes[name], again.planes[at][name]) for name in planes)
    cache = QuantizedCache(model.config, "fp8_e4m3", 16, calibration=again)
    scales = [handle.plane_scale.item() for handle in cache.handles()]
    assert scales == [pytest.approx(x) for x in (0.031, 0.027, 0.5, 0.25)]
    # One number for the tensor is the same number for every head; the reverse is not.
    heads = QuantizedCache(model.config, "fp8_per_head", 16, calibration=again)
    assert next(heads.handles()).plane_scale.tolist() == [pytest.approx(0.031)] * 2
    per_head = Calibration({at: {"scale": torch.ones(2)} for at in again.planes})
    with pytest.raises(errors.CalibrationError, match="granularity"):
        QuantizedCache(model.config, "fp8_e4m3", 16, calibration=per_head)
    keys_only = {name: tensor for name, tensor in weights.items() if ".k_" in name}
    with pytest.raises(errors.CalibrationError, match="values of layer 0"):
        QuantizedCache(
            model.config, "fp8_e4m3", 16, calibration=Calibration.from_checkpoint(keys_only, "fp8_e4m3")
        )
    for wrong in (torch.tensor(-1.0), torch.tensor(0.0), torch.tensor(torch.nan)):
        broken = Calibration.from_checkpoint(
            {**weights, "model.layers.0.self_attn.k_scale": wrong}, "fp8_e4m3"
        )
        with pytest.raises(errors.CalibrationError, match="positive"):
            QuantizedCache(model.config, "fp8_e4m3", 16, calibration=broken)


@pytest.mark.parametrize(
    ("name", "undone"),
    [("llama", True), ("qwen3", True), ("gpt2", False), ("bloom", False), ("opt", False)],
)
def test_keys_before_rotary_embedding_where_it_can_be_undone(
    name: str, undone: bool, sample: torch.Tensor
) -> None:
    """Found by the keys of one token alone at several positions, and said in the notes."""
    seen = observe(models.model(name), sample, weighted=False)
    assert sorted(seen.inv_freq) == ([0, 1] if undone else [])
    calibration = seen.fit("nuq3")
    said = "before rotary" if undone else "as they are cached"
    assert all(said in calibration.notes[layer, "key"] for layer in (0, 1))
    assert bool(calibration.planes[0, "key"]["inv_freq"].any()) == undone


def test_sliding_layers_are_fitted_to_keys_as_they_are_cached(sample: torch.Tensor) -> None:
    """Their tokens move from slot to slot. Of two tables of frequencies the full layer's own is found."""
    seen = observe(models.model("gemma3"), sample, weighted=False)
    assert sorted(seen.inv_freq) == [1]
    assert observe(models.model("mistral"), sample, weighted=False).inv_freq == {}
    notes = seen.fit("nuq4").notes
    assert "as they are cached" in notes[0, "key"] and "before rotary" in notes[1, "key"]


def test_squared_gradients_weigh_the_codebook(sample: torch.Tensor) -> None:
    model = models.model("llama")
    weighted = calibrate(model, sample, "nuq2")
    plain = calibrate(model, sample, "nuq2", weighted=False)
    assert not torch.equal(weighted.planes[0, "key"]["codebook"], plain.planes[0, "key"]["codebook"])
    assert torch.equal(weighted.planes[0, "key"]["centre"], plain.planes[0, "key"]["centre"])
    again = calibrate(model, sample, "nuq2")
    assert torch.equal(weighted.planes[1, "value"]["codebook"], again.planes[1, "value"]["codebook"])
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("fitted", "used"),
    [
        ("int8_per_tensor", "int4_per_tensor_sym"),
        ("fp8_e5m2", "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e4m3+hadamard"),
        ("nuq4", "nuq4+hadamard"),
        ("nuq4", "nuq4+outlier5%"),
    ],
)
def test_g2_planes_of_a_format_whose_codes_mean_other_values(
    fitted: str, used: str, sample: torch.Tensor, tmp_path: Any
) -> None:
    """Planes of the right name and shape, fitted for another format, are refused; they would clip or blur everything."""
    model = models.model("qwen3")
    calibrate(model, sample, fitted).save(tmp_path / "planes")
    calibration = Calibration.load(tmp_path / "planes")
    for one in (calibration, calibration.only(calibration.planes)):
        with pytest.raises(errors.CalibrationError, match="mean other values"):
            QuantizedCache(model.config, used, 32, calibration=one)
    windowed = ",".join(f"{side}={fitted}+recent3+sink2" for side in ("key", "value"))
    assert QuantizedCache(model.config, windowed, 32, calibration=calibration).nbytes
