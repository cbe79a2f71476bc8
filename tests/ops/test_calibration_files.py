"""Calibrations of whole models: what is missing or too much, files of them, and the scales of checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvq_ops import QuantizedKV, errors
from kvq_ops.calibration import Calibration
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.calibrated import CODEBOOKS, SCALED, D, fitted

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
