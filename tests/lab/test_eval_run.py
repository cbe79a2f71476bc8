"""Streaming through real caches, bytes by kind, needles, speed, and the whole measurement on a toy."""

from __future__ import annotations

import dataclasses
import io
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="the lab extra is not installed")

from kvq_lab import demo, eval_html, eval_models, eval_report, eval_run
from kvq_lab.eval_caches import (
    KINDS,
    Calibrations,
    Prefill,
    bytes_by_kind,
    fitting,
    ours,
    sized,
    through,
    unquantized,
)
from kvq_lab.eval_needle import ask, check_lengths, make_trial, needles
from kvq_lab.eval_run import Settings, contenders_of, measure
from kvq_lab.eval_specs import parse_spec, parse_specs
from kvq_lab.evaluate import live_bytes, score
from kvq_lab.progress import Stages
from kvq_ops.errors import FormatError, ShapeError
from tests.lab import eval_toys


@pytest.fixture(autouse=True)
def short_texts(monkeypatch) -> None:
    monkeypatch.setattr(eval_models, "texts", eval_toys.texts)


QUIET = Stages(io.StringIO())


def _settings(*formats: str, **changes) -> Settings:
    options = {
        "tokens": 24,
        "context": 48,
        "windows": 2,
        "chunk": 4,
        "errors": False,
        "needle": False,
        "speed": False,
    }
    return Settings("toy", parse_specs(formats), **options | changes)


def _rows(settings: Settings, subject=None) -> dict[str, dict]:
    result = measure(settings, Stages(io.StringIO()), lambda name: subject or eval_toys.subject())
    return {row["format"]: row for row in result["rows"]}


# -- quality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5])
def test_nothing_lost_is_nothing_changed(chunk: int) -> None:
    rows = _rows(_settings("none", "int8_per_token_head", "int2_group32", chunk=chunk))
    assert list(rows) == ["unquantized", "none", "int8_per_token_head", "int2_group32"]
    exact = rows["none"]
    assert exact["kl"] == pytest.approx(0.0, abs=1e-8)
    assert exact["perplexity_change"] == pytest.approx(0.0, abs=1e-6)
    assert exact["top1_agreement"] == 1.0
    assert 0 < rows["int8_per_token_head"]["kl"] < 0.2 * rows["int2_group32"]["kl"]
    assert rows["int2_group32"]["top1_agreement"] < 1
    assert all(row["tokens"] == 24 for row in rows.values())


def test_the_reference_is_the_model_itself() -> None:
    """Perplexity of the unquantized row equals one pass over each window without a cache."""
    subject = eval_toys.subject()
    settings = _settings("none")
    _, ids = eval_models.windows(subject, 2, settings.capacity + 1)
    with torch.no_grad():
        logits = subject.model(ids[:, :-1], use_cache=False).logits[:, settings.context :]
    loss = torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), ids[:, settings.context + 1 :].flatten()
    )
    assert _rows(settings, subject)["unquantized"]["perplexity"] == pytest.approx(loss.exp().item(), rel=1e-5)


def test_windows_in_a_batch_score_what_each_scores_alone() -> None:
    subject = eval_toys.subject()
    settings = _settings("int4_group32", tokens=24)
    contenders, _ = contenders_of(subject, settings, Calibrations(subject), QUIET)
    _, ids = eval_models.windows(subject, 2, settings.capacity + 1)

    def quality(rows: torch.Tensor):
        prefill = Prefill(subject.model, rows[:, : settings.context])
        steps = {
            c.name: through(subject.model, c.new_cache(len(rows), settings.capacity), prefill)
            for c in contenders
        }
        return score(steps, "unquantized", rows, settings.context, 1)["int4_group32"]

    together = quality(ids)
    apart = [quality(row[None]) for row in ids]
    assert together.kl_sum == pytest.approx(sum(q.kl_sum for q in apart), rel=1e-3)
    assert together.loss_sum == pytest.approx(sum(q.loss_sum for q in apart), rel=1e-5)


def test_a_cache_that_forgets_is_seen() -> None:
    """The broken twin of the lossless cache: values of the context are zeroed after they were handed over."""
    subject = eval_toys.subject()
    settings = _settings("none")
    contenders, _ = contenders_of(subject, settings, Calibrations(subject), QUIET)
    _, ids = eval_models.windows(subject, 2, settings.capacity + 1)
    prefill = Prefill(subject.model, ids[:, : settings.context])
    caches = [c.new_cache(2, settings.capacity) for c in contenders]
    exact, broken = (through(subject.model, cache, prefill) for cache in caches)

    def forgetful(tokens, start):
        result = broken(tokens, start)
        if start == 0:
            for handle in caches[1].handles():
                handle.zero_()
        return result

    found = score({"exact": exact, "broken": forgetful}, "exact", ids, settings.context, 1)
    assert found["broken"].kl > 0.01


def test_every_cache_is_handed_the_same_context() -> None:
    subject = eval_toys.subject()
    ids = torch.randint(0, 256, (2, 40))
    prefill = Prefill(subject.model, ids)
    cache = ours(subject, parse_spec("none"), Calibrations(subject)).new_cache(2, 48)
    prefill.fill(cache)
    assert int(cache.get_seq_length()) == 40
    for layer, (keys, values) in zip(cache.layers, prefill.layers, strict=True):
        assert torch.equal(layer.keys.dequantize()[:, :, :40], keys)
        assert torch.equal(layer.values.dequantize()[:, :, :40], values)


def test_own_prefill_runs_the_context_through_the_codes() -> None:
    handed = _rows(_settings("int2_group32"))["int2_group32"]
    own = _rows(_settings("int2_group32", own_prefill=True))
    assert own["int2_group32"]["kl"] != handed["kl"]
    assert own["unquantized"]["kl"] == 0


def test_the_protocol_is_said() -> None:
    assert "token by token" in _settings("none", chunk=1).protocol()
    assert "chunks of 64" in _settings("none", chunk=64).protocol()
    assert "same exact keys" in _settings("none").protocol()
    assert "own codes" in _settings("none", own_prefill=True).protocol()


# -- bytes -------------------------------------------------------------------------------------

COUNT = 2 * eval_toys.LAYERS * eval_toys.KV_HEADS * 60
"""Vectors of a cache of one row and 60 tokens."""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", {"exact": 4 * 32}),
        ("int8_per_token_head", {"codes": 32, "scales": 4}),
        ("int4_group32", {"codes": 16, "scales": 2, "minima": 2}),
        ("int4_group32+outlier3%", {"codes": 16, "scales": 2, "minima": 2, "outliers": 2 + 4}),
        ("nvfp4", {"codes": 16, "scales": 2}),
    ],
)
def test_bytes_by_kind_are_those_of_the_planes(name: str, expected: dict[str, int]) -> None:
    subject = eval_toys.subject()
    cache = ours(subject, parse_spec(name), Calibrations(subject)).new_cache(1, 60)
    found = bytes_by_kind(cache)
    assert set(found) == set(KINDS)
    few = {"scales": 4 * 2 * eval_toys.LAYERS, "other": 1000}  # one scale for a tensor; lengths
    for kind in KINDS:
        least = expected.get(kind, 0) * COUNT
        assert least <= found[kind] <= least + few.get(kind, 0), kind
    assert sum(found.values()) == live_bytes(cache)


def test_a_window_of_exact_tokens_is_counted() -> None:
    subject = eval_toys.subject()
    cache = ours(subject, parse_spec("kivi4+recent16"), Calibrations(subject)).new_cache(1, 64)
    # Keys are coded in groups of 32 tokens, values one by one, so the rings differ.
    keys, values = (cache.layers[0].keys, cache.layers[0].values)
    rings = [handle.plane_recent for handle in (keys, values)]
    assert bytes_by_kind(cache)["exact"] == eval_toys.LAYERS * sum(ring.nbytes for ring in rings) > 0


def test_a_storage_that_two_tensors_share_is_counted_once() -> None:
    whole = torch.zeros(10)
    found = sized(iter([("codes", whole[:5]), ("scales", whole[5:]), ("minima", torch.zeros(3))]))
    assert (found["codes"], found["scales"], found["minima"]) == (40, 0, 12)


def test_bits_a_value_are_those_of_a_filled_cache() -> None:
    rows = _rows(_settings("none", "int8_per_token_head"))
    assert rows["unquantized"]["bits_per_value"] == pytest.approx(32, rel=1e-3)
    assert rows["none"]["bits_per_value"] == pytest.approx(32, rel=1e-2)
    assert rows["int8_per_token_head"]["bits_per_value"] == pytest.approx(8 + 32 / 32, rel=1e-2)


# -- which caches ------------------------------------------------------------------------------


def test_formats_that_do_not_fit_are_left_out_only_by_default() -> None:
    subject = eval_toys.subject(
        eval_toys.tiny_llama(head_dim=30, num_attention_heads=2, num_key_value_heads=2)
    )
    specs = parse_specs(["int8_per_token_head", "int2_group32"])
    contenders = [ours(subject, spec, Calibrations(subject)) for spec in specs]
    kept, refused = fitting(contenders, asked=False)
    assert [c.name for c in kept] == ["int8_per_token_head"]
    assert refused[0]["format"] == "int2_group32" and "head_dim" in refused[0]["why"]
    with pytest.raises(ValueError, match="head_dim"):
        fitting(contenders, asked=True)


def test_policies_stand_beside_formats() -> None:
    policy = '{"name": "mine", "format": "int4_group32", "layers": {"0": "int8_per_token_head"}}'
    rows = _rows(_settings("int8_per_token_head", "int4_group32", policy))
    bits = [rows[name]["bits_per_value"] for name in ("int4_group32", "mine", "int8_per_token_head")]
    assert bits == sorted(bits) and len(set(bits)) == 3
    assert parse_spec(rows["mine"]["spec"]).layers[0][0] == 0


def test_codebooks_are_fitted_to_text_that_is_not_scored() -> None:
    result = measure(_settings("nuq4", "int4_group32"), QUIET, lambda name: eval_toys.subject())
    assert result["calibration_text"] == "persuasion"
    assert not any("persuasion" in text for text in result["texts"])
    assert list(result["calibrations"]) == ["nuq4"]
    assert any("before rotary embedding" in note for note in result["calibrations"]["nuq4"])
    assert 0 < result["rows"][1]["kl"] < 1
    assert "calibrated on persuasion" in eval_report.caption_of(result)


# -- needles -----------------------------------------------------------------------------------


def test_a_haystack_is_as_long_as_asked_with_its_needle_at_the_depth() -> None:
    subject = eval_toys.subject()
    hay = subject.tokenizer(eval_toys.texts()["emma"]).input_ids[0]
    for depth in (0.0, 0.5, 1.0):
        trial = make_trial(subject, hay, 400, depth, random.Random(3))
        text = bytes(trial.haystack.tolist()).decode()
        answer = bytes(trial.answer.tolist()).decode()
        needle = f"vault is{answer}.\n\n"
        assert len(trial.haystack) == 400
        assert text.count(needle) == 1
        begin = text.index("\n\nThe secret number")
        assert begin == int((400 - len(text[begin : text.index(needle) + len(needle)])) * depth)
        assert answer.strip().isdigit()
        assert bytes(trial.question.tolist()).decode().endswith("vault is")


def _greedy(model, ids: torch.Tensor, count: int) -> torch.Tensor:
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return ids[:, -count:]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_needle_is_found_when_greedy_decoding_gives_the_answer(chunk: int) -> None:
    subject = eval_toys.subject()
    haystack, question = torch.randint(0, 256, (2, 50)), torch.randint(0, 256, (2, 9))
    answer = _greedy(subject.model, torch.cat([haystack, question], 1), 4)
    prefill = Prefill(subject.model, haystack)
    contender = unquantized(subject)
    assert ask(subject, contender.new_cache(2, 70), prefill, question, answer, chunk).tolist() == [True, True]
    wrong = answer.clone()
    wrong[1, -1] = (wrong[1, -1] + 1) % 256
    assert ask(subject, contender.new_cache(2, 70), prefill, question, wrong, chunk).tolist() == [True, False]


def test_every_cache_is_asked_the_same_and_two_bits_lose_it(monkeypatch) -> None:
    subject = eval_toys.subject()
    settings = _settings(
        "none", "int2_group32", chunk=64, needle=True, needle_lengths=(300,), needle_depths=(0.2, 0.8)
    )
    contenders, _ = contenders_of(subject, settings, Calibrations(subject), QUIET)

    # The toy knows no numbers: the answer is what it says itself.
    from kvq_lab import eval_needle

    made = eval_needle.make_trial

    def self_answering(*arguments):
        trial = made(*arguments)
        whole = torch.cat([trial.haystack, trial.question])[None]
        return dataclasses.replace(trial, answer=_greedy(subject.model, whole, 6)[0])

    monkeypatch.setattr(eval_needle, "make_trial", self_answering)
    found = needles(subject, contenders, settings, Stages(io.StringIO()))
    for name in ("unquantized", "none"):
        assert [(t["length"], t["depth"], t["trials"], t["found"]) for t in found[name]] == [
            (300, 0.2, 2, 2),
            (300, 0.8, 2, 2),
        ]
    assert sum(t["found"] for t in found["int2_group32"]) < 4


def test_haystacks_beyond_model_or_text_are_refused() -> None:
    subject = eval_toys.subject()
    check_lengths(subject, (1024,))
    with pytest.raises(ShapeError, match="2048 positions"):
        check_lengths(subject, (1024, 2048))
    with pytest.raises(ShapeError, match="needle-lengths"):
        make_trial(subject, torch.zeros(100, dtype=torch.long), 400, 0.5, random.Random(0))


# -- the whole ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> dict:
    patch = pytest.MonkeyPatch()
    patch.setattr(eval_models, "texts", eval_toys.texts)
    settings = _settings(
        "int4_group32",
        "kivi2+recent0",
        errors=True,
        needle=True,
        inspected=80,
        needle_lengths=(200,),
        needle_trials=1,
    )
    try:
        return measure(settings, Stages(io.StringIO()), lambda name: eval_toys.subject())
    finally:
        patch.undo()


def test_the_result_is_json(whole, tmp_path: Path) -> None:
    demo.write_json(whole, tmp_path / "out.json")
    read = json.loads((tmp_path / "out.json").read_text())
    assert read["schema"] == "kvq.eval/1"
    assert read["rows"] == whole["rows"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_table_shows_what_was_measured(whole) -> None:
    stream = io.StringIO()
    eval_report.show(whole, Console(file=stream, width=160))
    shown = stream.getvalue()
    for row in whole["rows"]:
        assert f"{row['perplexity']:.3f}" in shown
        assert f"{row['bits_per_value']:.2f}" in shown
    assert "needles" in shown and "decode" not in shown.splitlines()[1]
    assert whole["protocol"] in shown
    markdown = eval_report.markdown_of(whole).splitlines()
    assert len(markdown) == 2 + len(whole["rows"])
    assert len({line.count("|") for line in markdown}) == 1


def test_the_page_is_whole_and_loads_nothing(whole, tmp_path: Path) -> None:
    eval_html.write_html(whole, tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text()
    for loading in ("http://", "https://", "<script", "<link", "@import", "url("):
        assert loading not in page
    assert page.count("<img ") == page.count('src="data:image/svg+xml;base64,')
    assert page.count("<img ") == 5
    for words in ("Quality against bits", "Error by layer and head", "Outlier channels", "Needles found"):
        assert words in page
    for row in whole["rows"]:
        assert f"<td>{row['format']}</td>" in page
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]


def test_names_are_escaped_in_the_page(whole) -> None:
    row = dict(whole["rows"][1], format="<b>bold</b>")
    page = eval_html.page(whole | {"rows": [whole["rows"][0], row]})
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page


def test_the_frontier_drops_what_is_undercut() -> None:
    points = [(4, 0.5), (2, 0.9), (8, 0.1), (5, 0.7), (4, 0.4), (9, 0.1)]
    assert eval_html.frontier(points) == [(2, 0.9), (4, 0.4), (8, 0.1)]


@pytest.mark.slow
@pytest.mark.no_poison
def test_speed_is_timed_for_formats_and_policies() -> None:
    policy = '{"name": "mine", "format": "int4_group32", "layers": {"0": "int8_per_token_head"}}'
    rows = _rows(_settings("int8_per_token_head", policy, speed=True, rounds=2))
    for row in rows.values():
        assert row["decode_compiled"]
        assert row["decode_seconds"] > 0
    assert rows["unquantized"]["decode_speed"] == 1.0


# -- peers -------------------------------------------------------------------------------------


def test_unknown_peers_are_listed_and_missing_ones_say_what_to_install(monkeypatch) -> None:
    from kvq_lab import eval_peers

    with pytest.raises(FormatError, match="quanto4-per-channel"):
        eval_peers.check_peer("quanto5")
    monkeypatch.setattr(eval_peers, "version_of", lambda package: None)
    with pytest.raises(eval_peers.PeerError, match=r"(?s)optimum-quanto is not installed.*pip install"):
        eval_peers.check_peer("quanto4")


def test_bytes_of_a_peer_are_told_apart() -> None:
    from kvq_lab.eval_peers import _peer_bytes

    hqq = (torch.zeros(100, dtype=torch.uint8), {"scale": torch.zeros(3), "zero": torch.zeros(3)})
    quanto = SimpleNamespace(
        _data=SimpleNamespace(_data=torch.zeros(50, dtype=torch.uint8)),
        _scale=torch.zeros(2),
        _shift=torch.zeros(2),
    )
    layer = SimpleNamespace(
        _quantized_keys=hqq,
        _quantized_values=quanto,
        keys=torch.zeros(7),
        values=torch.zeros(0),
        spare=torch.zeros(1),
    )
    found = _peer_bytes(SimpleNamespace(layers=[layer]))
    assert found == {"codes": 150, "scales": 20, "minima": 20, "exact": 28, "outliers": 0, "other": 4}


@pytest.mark.parametrize("name", ["quanto4", "quanto4-per-channel", "hqq4"])
def test_a_peer_runs_by_the_same_protocol(name: str) -> None:
    pytest.importorskip(
        "hqq" if name.startswith("hqq") else "optimum.quanto", reason="the peers extra is not installed"
    )
    subject = eval_toys.subject()
    settings = _settings("int4_group32+recent128", peers=(name,), context=64, tokens=16)
    row = _rows(settings, subject)[name]
    assert row["peer"] and row["spec"] is None
    assert 0 < row["kl"] < 1
    assert row["bytes"]["exact"] > 0  # the newest tokens wait
    assert sum(row["bytes"].values()) == row["cache_bytes"]


def test_peers_report_their_largest_size(monkeypatch) -> None:
    """A peer's exact tokens come and go; the size is taken when it is largest."""
    from kvq_lab.eval_caches import Contender

    subject = eval_toys.subject()
    own = ours(subject, parse_spec("none"), Calibrations(subject))
    sizes = iter([100, 100, 300, 300, 200] + [50] * 40)
    peer = Contender("peer", own.new_cache, lambda cache: dict.fromkeys(KINDS, 0) | {"codes": 300}, peer=True)
    real = eval_run.live_bytes
    monkeypatch.setattr(
        eval_run, "live_bytes", lambda cache: next(sizes) if hasattr(cache, "handles") else real(cache)
    )
    settings = _settings("none")
    _, ids = eval_models.windows(subject, 2, settings.capacity + 1)
    rows = eval_run.stream(subject, [unquantized(subject), peer], ids, settings, Stages(io.StringIO()))
    assert rows["peer"]["cache_bytes"] == 300
