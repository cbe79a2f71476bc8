"""``kvq calibrate``: from a model to a file that a cache takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from kvq_lab import cli, eval_models  # noqa: E402
from kvq_ops.calibration import Calibration  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf import models  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    model = models.model("llama")
    monkeypatch.setattr(eval_models, "load", lambda name: SimpleNamespace(model=model, name=name))
    monkeypatch.setattr(
        eval_models,
        "calibration_ids",
        lambda subject, rows, length: ("toy text", models.prompt(rows, length)),
    )
    return model


@pytest.mark.parametrize("format", ["nuq3", "fp8_per_head", "key=nuq4_keys,value=int8_per_token_head"])
def test_a_file_that_a_cache_takes(
    toy: Any, tmp_path: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.kvq"
    command = [
        "calibrate",
        "smollm2",
        "--format",
        format,
        "--out",
        str(path),
        "--rows",
        "2",
        "--length",
        "24",
    ]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert "48 tokens" in said and str(path) in said
    assert ("before rotary embedding" in said) == ("nuq" in format)
    calibration = Calibration.load(path)
    cache = QuantizedCache(toy.config, format, 16, calibration=calibration)
    with torch.no_grad():
        toy(models.prompt(1, 9), past_key_values=cache)
    for (layer, side), planes in calibration.planes.items():
        handle = getattr(cache.layers[layer], f"{side}s")
        for name, plane in planes.items():
            assert torch.equal(getattr(handle, f"plane_{name}"), plane)


def test_what_has_nothing_to_fit_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.kvq"
    assert cli.main(["calibrate", "smollm2", "--format", "int4_group32", "--out", str(path)]) == 2
    assert "nothing has to be fitted" in capsys.readouterr().err and not path.exists()
    assert cli.main(["calibrate", "no-such-model", "--format", "nuq4", "--out", str(path)]) == 2
    assert "no-such-model" in capsys.readouterr().err
