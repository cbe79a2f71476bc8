"""Arguments of kvq eval: what is refused at once, and what reaches the measurement."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("rich", reason="the lab extra is not installed")
pytest.importorskip("transformers", reason="the lab extra is not installed")

import kvq_ops
from kvq_lab import cli, eval_report, eval_run, eval_suggest
from kvq_lab.eval_run import Settings
from kvq_lab.eval_specs import parse_specs


@pytest.fixture
def seen(monkeypatch) -> list:
    calls: list = []

    def measure(*arguments):
        calls.append(arguments)
        return {}

    monkeypatch.setattr(eval_run, "measure", measure)
    monkeypatch.setattr(eval_suggest, "suggest", measure)
    monkeypatch.setattr(eval_report, "show", lambda result, console: None)
    return calls


def test_the_defaults_are_every_listed_format_token_by_token(seen) -> None:
    assert cli.main(["eval", "smollm2"]) == 0
    settings = seen[0][0]
    assert [spec.name for spec in settings.specs] == list(kvq_ops.formats.kv_names())
    assert (settings.model, settings.named, settings.chunk) == ("smollm2", False, 1)
    assert settings.errors and settings.needle and settings.speed
    assert settings == Settings("smollm2", settings.specs, named=False)


def test_the_options_reach_the_measurement(seen, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    formats = ["key=int8_per_token_head,value=int4_group32", '{"format": "nvfp4", "skip": [0]}', "nvfp4"]
    options = [text for name in formats for text in ("--format", name)]
    numbers = "--tokens 8 --context 16 --windows 2 --chunk 4 --needle-lengths 64,128 --needle-depths 0,1 --needle-trials 5"
    done = cli.main(
        ["eval", str(tmp_path), *options, *numbers.split(), "--own-prefill", "--no-errors", "--no-speed"]
    )
    assert done == 0
    assert seen[0][0] == Settings(
        str(tmp_path),
        parse_specs(formats),
        tokens=8,
        context=16,
        windows=2,
        chunk=4,
        own_prefill=True,
        errors=False,
        speed=False,
        needle_lengths=(64, 128),
        needle_depths=(0.0, 1.0),
        needle_trials=5,
    )


@pytest.mark.parametrize(
    ("option", "goal"),
    [
        (["--budget", "4.5bits"], (4.5, None)),
        (["--budget", "4"], (4.0, None)),
        (["--max-kl", "0.01"], (None, 0.01)),
    ],
)
def test_suggest_takes_a_goal(seen, option: list[str], goal: tuple) -> None:
    assert cli.main(["eval", "smollm2", "--suggest", *option]) == 0
    assert (seen[0][1].budget, seen[0][1].max_kl) == goal


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["smolm2"], "smollm2-outliers"),
        (["smollm2", "--format", "int8_per_tokn"], "did you mean 'int8_per_token_head'"),
        (["smollm2", "--format", "{}"], "a policy in JSON"),
        (["smollm2", "--peer", "quanto3"], "quanto4-per-channel"),
        (["smollm2", "--suggest"], "neither --budget nor --max-kl"),
        (["smollm2", "--suggest", "--budget", "4", "--max-kl", "1"], "both"),
        (["smollm2", "--budget", "4"], "add --suggest"),
    ],
)
def test_what_was_asked_wrongly_exits_with_2_before_anything_is_loaded(seen, arguments, says, capsys) -> None:
    assert cli.main(["eval", *arguments]) == 2
    assert seen == []
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--budget", "none"],
        ["--budget", "0"],
        ["--max-kl", "-1"],
        ["--tokens", "0"],
        ["--needle-lengths", "10"],
        ["--needle-depths", "2"],
        ["--html", "/no/such/folder/x.html"],
    ],
)
def test_malformed_options_exit_with_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["eval", "smollm2", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_a_missing_peer_says_what_to_install(monkeypatch, seen, capsys) -> None:
    from kvq_lab import eval_peers

    monkeypatch.setattr(eval_peers, "version_of", lambda package: None)
    assert cli.main(["eval", "smollm2", "--peer", "hqq4"]) == 1
    assert "pip install" in capsys.readouterr().err
    assert seen == []


def test_help_lists_models_formats_and_peers(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["eval", "--help"])
    shown = capsys.readouterr().out
    from kvq_lab.eval_models import MODELS
    from kvq_lab.eval_peers import PEERS

    for name in MODELS:
        assert name in shown
    for name in kvq_ops.formats.kv_names():
        assert name in shown.replace("\n", " ")
    for name in PEERS:
        assert name.removesuffix("-per-channel") in shown
