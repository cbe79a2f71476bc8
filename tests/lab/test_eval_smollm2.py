"""The evaluation on the real model: what each format costs, the hard case, and needles."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the lab extra is not installed")

from kvq_lab.eval_models import Subject, add_key_outliers_
from kvq_lab.eval_run import Settings, measure
from kvq_lab.eval_specs import parse_specs
from kvq_lab.progress import Stages

pytestmark = [pytest.mark.model, pytest.mark.slow]


def _measure(subject: Subject, *formats: str, **changes: Any) -> dict[str, Any]:
    options = {"tokens": 256, "context": 256, "windows": 4, "chunk": 64, "speed": False, "needle": False}
    settings = Settings(subject.name, parse_specs(formats), **options | changes)
    return measure(settings, Stages(io.StringIO()), lambda name: subject)


@pytest.fixture(scope="module")
def plain(smollm2) -> Subject:
    model, tokenizer = smollm2
    return Subject("smollm2", "SmolLM2", model, tokenizer)


@pytest.fixture(scope="module")
def hard(smollm2) -> Subject:
    model, tokenizer = smollm2
    model = copy.deepcopy(model)
    add_key_outliers_(model)
    return Subject("smollm2-outliers", "SmolLM2 with outliers", model, tokenizer)


def test_outlier_channels_change_no_logits_beyond_rounding(plain, hard) -> None:
    ids = plain.tokenizer(
        "Emma Woodhouse, handsome, clever, and rich, with a comfortable home", return_tensors="pt"
    )
    with torch.no_grad():
        want, got = (subject.model(ids.input_ids).logits for subject in (plain, hard))
    assert 0 < (got - want).abs().max() < 1e-4 * want.abs().max()


def test_formats_are_ordered_and_nothing_lost_costs_nothing(plain) -> None:
    result = _measure(plain, "none", "int8_per_token_head", "kivi4+recent0", "int4_group32", inspected=128)
    rows = {row["format"]: row for row in result["rows"]}
    assert abs(rows["none"]["kl"]) < 1e-8
    kl = [rows[name]["kl"] for name in ("int8_per_token_head", "kivi4+recent0", "int4_group32")]
    assert kl == sorted(kl)
    assert 0 < kl[0] < 0.001
    assert not [entry for entry in result["outliers"]["channels"] if entry["ratio"] > 20]
    for layer in rows["none"]["layers"]:
        assert layer["attention"]["total"] < 1e-5


def test_the_hard_case_separates_formats(hard) -> None:
    names = (
        "int4_group32",
        "int4_group32+hadamard",
        "int4_group32+outlier7%",
        "fp8_per_token_head",
        "kivi4+recent0",
    )
    result = _measure(hard, *names, inspected=128)
    rows = {row["format"]: row for row in result["rows"]}
    per_token, rotated, outliers, fp8, kivi = (rows[name] for name in names)
    assert per_token["kl"] > 1 > rotated["kl"] > 0.1
    for row in (outliers, fp8, kivi):
        assert row["kl"] < 0.05
        # Beyond noise: these 256 tokens tell changes apart by one or two percent.
        assert abs(row["perplexity_change"]) < 0.015 + 2 * row["perplexity_change_stderr"]
    advice = "\n".join(result["advice"])
    for channel in (5, 17, 37, 49):
        assert f"channel {channel} in " in advice
    holds, fails = advice.split("Fails")
    assert "int4_group32:" in fails and "int4_group32+hadamard:" in fails
    assert "kivi4+recent0:" in holds


def test_needles_are_found_without_quantization_and_lost_at_two_bits(plain) -> None:
    result = _measure(
        plain,
        "int8_per_token_head",
        "int2_per_token_head",
        tokens=4,
        errors=False,
        needle=True,
        needle_lengths=(512,),
        needle_trials=1,
    )
    found = {row["format"]: sum(t["found"] for t in row["needle"]) for row in result["rows"]}
    assert found["unquantized"] == found["int8_per_token_head"] == 3
    assert found["int2_per_token_head"] == 0
