"""Calibrated scales and codebooks through both doors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import passes
from kvq_ops import errors
from kvq_ops.calibration import Calibration, fit
from kvq_ops.formats import parse_kv_format

from .fake_quantized import compiled
from .toys import CAPACITY, VOCABULARY, B, Decoder, handles

FORMATS = ("nuq4", "nuq3+outlier5%", "fp8_per_head", "key=nuq2_keys+recent4,value=nvfp4")
SIZES = (9, 1, 1, 6)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    passes.clear_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def step_inputs(sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    out, start = [], 0
    for size in sizes:
        ids = torch.randint(0, VOCABULARY, (B, size), generator=generator)
        out.append((ids, torch.arange(start, start + size)))
        start += size
    return out


def calibration_for(model: nn.Module, format: str) -> Calibration:
    """Fitted to what the dense model caches of other tokens."""
    plain = copy.deepcopy(model)
    plain(torch.arange(B * 40).view(B, 40) % VOCABULARY, torch.arange(40))
    pair = parse_kv_format(format)
    result = Calibration()
    for i, layer in enumerate(plain.layers):
        for side, cache, row in (("key", layer.k_cache, pair.key), ("value", layer.v_cache, pair.value)):
            if row.static_planes:
                inv_freq = 1.0 / 100 ** (torch.arange(cache.shape[-1] // 2) / 16)
                result.planes[i, side] = fit(cache[:, :, :40], row, inv_freq=inv_freq)
    return result


def example() -> tuple[Tensor, Tensor]:
    return torch.zeros(B, 1, dtype=torch.long), torch.arange(1)


@pytest.mark.parametrize("format", FORMATS)
def test_compiled_equals_eager(format: str) -> None:
    """The same stores, bit for bit in the first layer, outputs within 1e-5, every site rewritten."""
    model = Decoder().eval()
    calibration = calibration_for(model, format)
    passes.quantize_kv_cache_(model, format, example(), calibration=calibration)
    for i, side in ((0, "key"), (1, "value")):
        handle = handles(model)[2 * i + (side == "value")]
        for name, plane in calibration.planes.get((i, side), {}).items():
            assert torch.equal(
                getattr(handle, f"plane_{name}"), plane.to(getattr(handle, f"plane_{name}").dtype)
            )
    eager = copy.deepcopy(model)
    step = compiled(model)
    for ids, position in step_inputs():
        torch.testing.assert_close(step(ids, position), eager(ids, position), rtol=0, atol=1e-5)
    # Behind the first layer a rounding difference may tip a code.
    for one, other in zip(handles(model)[:2], handles(eager)[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.store, other.store, strict=True))
    report = passes.report()
    assert report.rewritten == report.found == 2 * len(report.graphs)


@pytest.mark.parametrize("format", FORMATS[:2])
def test_exported_equals_eager(format: str, tmp_path: Any) -> None:
    """A decode step with its codebooks in the program's state, saved and loaded."""
    model = Decoder().eval()
    calibration = calibration_for(model, format)
    program = passes.quantize_exported(torch.export.export(model, example()), format, calibration=calibration)
    assert any(name.endswith("codebook") for name in program.state_dict)
    torch.export.save(program, tmp_path / "p.pt2")
    step = torch.export.load(tmp_path / "p.pt2").module()
    passes.quantize_kv_cache_(model, format, example(), calibration=calibration)
    for ids, position in step_inputs((1,) * 6):
        torch.testing.assert_close(step(ids, position), model(ids, position), rtol=0, atol=1e-5)


def test_a_missing_codebook_changes_nothing() -> None:
    model = Decoder().eval()
    with pytest.raises(errors.CalibrationError, match="layer 0"):
        passes.quantize_kv_cache_(model, "nuq4", example())
    part = calibration_for(model, "nuq4").only([(0, "key"), (0, "value")])
    with pytest.raises(errors.CalibrationError, match="layer 1"):
        passes.quantize_kv_cache_(model, "nuq4", example(), calibration=part)
    with pytest.raises(errors.CalibrationError, match="layer 0"):
        passes.quantize_exported(torch.export.export(model, example()), "nuq4")
    assert type(model.layers[0].k_cache) is torch.Tensor and model.layers[0].k_cache.shape[2] == CAPACITY
    passes.quantize_kv_cache_(model, "nuq4", example(), calibration=part, skip=1)
    assert len(handles(model)) >= 2


def test_explain_needs_no_codebook() -> None:
    report = passes.explain(Decoder().eval(), *example(), format="nuq4")
    assert report.rewritten == report.found == 2


def test_an_uncalibrated_handle_refuses_a_compiled_write() -> None:
    """A handle made without its codebook: the write raises in the graph as in eager, and stores nothing."""
    from kvq_ops.handle import QuantizedKV

    model = Decoder(layers=1).eval()
    for name in ("k_cache", "v_cache"):
        dense = getattr(model.layers[0], name)
        setattr(
            model.layers[0],
            name,
            QuantizedKV.empty(dense.shape, f"nuq4_{'keys' if name[0] == 'k' else 'values'}"),
        )
    for step in (model, compiled(model)):
        with pytest.raises(errors.CalibrationError, match="codebook"):
            step(*step_inputs()[0])
        assert all(handle.length.tolist() == [0] * B for handle in handles(model))
