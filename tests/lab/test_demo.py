"""The demo on a tiny random model, and what it prints."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from kvq_ops.hf_shapes import cache_argument

pytest.importorskip("transformers", reason="the lab extra is not installed")

from kvq_lab import assets, demo, demo_report
from kvq_lab.calibrate import observe
from kvq_lab.progress import Stages
from kvq_ops.errors import ShapeError


class ByteTokenizer:
    """A token for each byte, with just what the demo asks of a tokenizer."""

    eos_token_id = 0

    def __call__(self, text: str, return_tensors: str) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([list(text.encode())]))

    def apply_chat_template(self, messages, **_) -> dict[str, torch.Tensor]:
        return {"input_ids": self(messages[0]["content"], "pt").input_ids}

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool) -> str:
        return " ".join(str(int(token)) for token in ids)


def tiny_llama() -> tuple[Any, ByteTokenizer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval(), ByteTokenizer()


SMALL = demo.Settings(
    formats=("none", "int8_per_token_head"), tokens=24, context=16, chunk=8, rounds=2, answer=4
)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return demo.measure(SMALL, Stages(io.StringIO()), tiny_llama)


@pytest.mark.slow
@pytest.mark.no_poison
def test_every_row_is_measured(result) -> None:
    rows = {row["format"]: row for row in result["rows"]}
    assert list(rows) == ["unquantized", "none", "int8_per_token_head"]
    plain, exact, coded = rows.values()
    assert plain["ratio"] == 1.0
    assert plain["kl"] == 0.0
    assert plain["sites_found"] is None
    # 2 layers, keys and values, 2 heads, 64 tokens, 32 channels of 4 bytes, and one length a layer
    dense = 2 * 2 * 2 * 64 * 32 * 4
    assert dense <= plain["cache_bytes"] <= dense + 64
    codes_and_scales = 2 * 2 * 2 * 64 * (32 + 4)
    assert codes_and_scales <= coded["cache_bytes"] <= codes_and_scales + 128
    assert coded["ratio"] == plain["cache_bytes"] / coded["cache_bytes"]
    # The lossless format takes the same path, so only the order of sums may differ.
    assert exact["attention_error"] == 0.0
    assert abs(exact["kl"]) < 1e-8
    assert exact["top1_agreement"] == 1.0
    assert 0 < coded["kl"] < 0.01
    assert 0 < coded["attention_error"] < 0.05
    for row in (exact, coded):
        assert (row["sites_found"], row["sites_rewritten"]) == (2, 2)
    for row in rows.values():
        assert row["decode_seconds"] > 0
        assert row["graphs"] == 1
    assert result["scored_tokens"] == 24
    # A graph for each variant and no more: not for timed steps, nor for caches of the same kind.
    assert result["graphs_compiled"] == 3


@pytest.mark.slow
@pytest.mark.no_poison
def test_the_compiled_answers_agree_where_nothing_is_lost(result) -> None:
    assert [answer["format"] for answer in result["answers"]] == ["unquantized", "int8_per_token_head"]
    model, tokenizer = tiny_llama()
    prompt = tokenizer.apply_chat_template([{"content": demo.PROMPT}])["input_ids"]
    expected = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False, eos_token_id=0
    )
    assert result["answers"][0]["text"] == tokenizer.decode(expected[0, prompt.shape[1] :], True)


@pytest.mark.slow
@pytest.mark.no_poison
def test_the_result_is_json_and_prints(result, tmp_path: Path) -> None:
    demo.write_json(result, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["schema"] == "kvq.demo/1"
    assert read["rows"] == result["rows"]
    assert read["environment"]["torch"] == torch.__version__
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    shown = io.StringIO()
    demo_report.show(read, Console(file=shown, width=140))
    for row in result["rows"]:
        assert row["format"] in shown.getvalue()
    assert "2/2" in shown.getvalue()
    assert result["report_text"] in shown.getvalue()


@pytest.mark.slow
@pytest.mark.no_poison
def test_where_time_runs_out_the_rest_is_not_timed_and_says_so() -> None:
    settings = dataclasses.replace(SMALL, minutes=0.0, rounds=1, answer=2)
    result = demo.measure(settings, Stages(io.StringIO()), tiny_llama)
    rows = {row["format"]: row for row in result["rows"]}
    assert rows["none"]["decode_speed"] is None is rows["none"]["sites_found"]
    assert rows["none"]["kl"] is not None
    assert rows["int8_per_token_head"]["decode_speed"] > 0  # its answer and report are shown
    shown = io.StringIO()
    demo_report.show(result, Console(file=shown, width=140))
    assert "not timed: 1 format " in shown.getvalue()
    assert result["scored_tokens"] == 8
    assert "8 tokens (of 24: time ran short)" in shown.getvalue()


def test_formats_are_compiled_in_an_order_that_shows_each_number_system_first() -> None:
    names = ("none", "fp8_e4m3", "fp8_e5m2", "int4_group64", "int4_group32", "nvfp4", "int8_per_token_head")
    variants = [demo.Variant(name, list, print) for name in ("unquantized", *names)]
    order = demo.compile_order(variants, demo.Settings(formats=names))
    assert [variant.name for variant in order] == [
        "unquantized",
        "int8_per_token_head",
        "none",
        "fp8_e4m3",
        "int4_group64",
        "nvfp4",
        "fp8_e5m2",
        "int4_group32",
    ]


def _row(name: str, **changes: Any) -> dict[str, Any]:
    row = {
        "format": name,
        "cache_bytes": 3 * 2**20,
        "ratio": 3.764,
        "perplexity": 22.3456,
        "perplexity_change": 0.0031,
        "perplexity_change_stderr": 0.0015,
        "kl": 0.000471,
        "attention_error": 0.0193,
        "top1_agreement": 0.988,
        "decode_tokens_per_second": 17.52,
        "decode_speed": 1.284,
        "sites_found": 30,
        "sites_rewritten": 29,
    }
    return row | changes


def test_the_table_shows_the_measured_numbers() -> None:
    rows = [_row("unquantized", ratio=1.0, sites_found=None), _row("int4_group32", cache_bytes=2048)]
    stream = io.StringIO()
    Console(file=stream, width=140).print(demo_report.table_of({"rows": rows}))
    *_, plain, coded = (line.split() for line in stream.getvalue().rstrip().splitlines())
    assert plain == ["unquantized", "3.0", "MiB", "1.00x", "22.346", "17.5", "tok/s"]
    assert coded[:4] == ["int4_group32", "2.0", "KiB", "3.76x"]
    assert coded[4:] == ["22.346", "+0.31", "±", "0.15", "0.00047", "1.93", "98.8", "1.28x", "29/30"]


def test_the_caches_have_room_for_every_step() -> None:
    settings = demo.Settings(formats=("none",), tokens=512, context=512, rounds=12)
    # After the text come the compiling step, one untimed and twelve timed ones.
    assert settings.capacity >= 512 + 512 + 14
    assert settings.capacity % 64 == 0


def test_more_tokens_than_the_text_has_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "short.txt").write_text("A short text of fifty bytes, as it happens to be.\n")
    monkeypatch.setenv("KVQ_TEXT", str(tmp_path / "short.txt"))
    with pytest.raises(ShapeError, match=r"(?s)a text of 50 tokens.*at most 33 scored.*KVQ_TEXT"):
        demo.text_ids(ByteTokenizer(), dataclasses.replace(SMALL, tokens=34))
    name, ids = demo.text_ids(ByteTokenizer(), SMALL)
    assert name == "short (KVQ_TEXT)"
    assert ids.shape == (1, 41)


def test_attention_errors_order_the_formats() -> None:
    model, tokenizer = tiny_llama()
    ids = tokenizer(assets.passage()[1][:60], "pt").input_ids
    errors = demo.attention_errors(model, ids, dict.fromkeys(("none", "int8_per_token_head", "int4_group32")))
    assert errors["none"] == 0.0 < errors["int8_per_token_head"] < errors["int4_group32"]
    # Keys alone and values alone each cost something, and both together more.
    parts = ("key=int4_group32,value=none", "key=none,value=int4_group32")
    sides = demo.attention_errors(model, ids, dict.fromkeys(parts))
    assert min(sides.values()) > 0
    assert max(sides.values()) < errors["int4_group32"]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_quality_in_eager_mode(smollm2) -> None:
    model, tokenizer = smollm2
    settings = demo.Settings(formats=("none", "int8_per_token_head"), tokens=64, context=128)
    _, ids = demo.text_ids(tokenizer, settings)
    from kvq_lab.evaluate import score

    argument = cache_argument(model)

    def step(cache):
        return lambda x, start: model(x, **{argument: cache, "use_cache": True}).logits

    variants = demo.make_variants(model, settings, {})
    steps = {variant.name: step(variant.new_cache()) for variant in variants}
    quality = score(steps, "unquantized", ids, 128, 32)
    assert abs(quality["none"].kl) < 1e-8
    assert 10 < quality["unquantized"].perplexity < 60
    assert 0 < quality["int8_per_token_head"].kl < 0.005
    assert math.isfinite(quality["int8_per_token_head"].perplexity_change_error)


def test_codebooks_are_fitted_to_text_that_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_llama()
    settings = demo.Settings(formats=("none", "nuq4"), tokens=16, context=16, calibrated=24)
    seen = []
    monkeypatch.setattr(demo, "observe", lambda model, ids: seen.append(ids) or observe(model, ids))
    fitted = demo.calibrations(model, tokenizer, settings, lambda count: None)
    assert fitted["none"] is None and (0, "key") in fitted["nuq4"].planes
    whole = tokenizer(assets.passage()[1], "pt").input_ids
    assert torch.equal(seen[0], whole[:, -24:]) and seen[0].shape == (1, 24)
    _, ids = demo.text_ids(tokenizer, settings)
    errors = demo.attention_errors(model, ids, fitted)
    assert 0 == errors["none"] < errors["nuq4"] < 0.5
    (_, plain, nuq) = demo.make_variants(model, settings, fitted)
    assert nuq.new_cache().layer_formats[0].needs_calibration and plain.name == "none"
