"""The command line: help, versions, and errors on stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kvq_ops
from kvq_lab import cli
from kvq_lab.assets import AssetError
from kvq_ops.errors import FormatError, UnknownFormatError


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("none", ("none",)),
        ("none, int4_group32 ,none", ("none", "int4_group32")),
        ("key=int8_per_token_head,value=int4_group32", ("key=int8_per_token_head,value=int4_group32",)),
        (
            "none,key=fp8_e4m3,value=none,nvfp4",
            ("none", "key=fp8_e4m3,value=none", "nvfp4"),
        ),
        ("key=none,value=none", ("none",)),
    ],
)
def test_a_list_of_formats_is_split_at_the_right_commas(text: str, formats: tuple[str, ...]) -> None:
    assert cli.split_formats(text) == formats


@pytest.mark.parametrize("text", ["", " , ", "key=none", "key=none,none", "value=none,value=none"])
def test_a_malformed_list_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        cli.split_formats(text)


def test_an_unknown_format_names_the_near_ones() -> None:
    with pytest.raises(UnknownFormatError, match="int8_per_token_head"):
        cli.split_formats("none,int8_per_tokn")


def _kvq(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(cli.__file__).parent.parent
    return subprocess.run(
        [sys.executable, "-m", "kvq_lab.cli", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_unknown_format_exits_with_2_before_anything_slow() -> None:
    done = _kvq("demo", "--formats", "int8_per_tokn")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "did you mean 'int8_per_token_head'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_version_is_the_package_version() -> None:
    done = _kvq("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"kvq {kvq_ops.__version__}")


def test_help_lists_every_format(capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    for name in kvq_ops.formats.kv_names():
        assert name in shown
    for option in ("--formats", "--tokens", "--json"):
        assert option in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "COMMAND"),
        (["demo", "--tokens", "0"], "whole number from 1"),
        (["demo", "--json", "/no/such/folder/x.json"], "no file in an existing folder"),
        (["dem"], "invalid choice"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], says: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_a_missing_asset_exits_with_1(monkeypatch, capsys) -> None:
    pytest.importorskip("rich", reason="the lab extra is not installed")
    from kvq_lab import demo

    def run(settings, path) -> None:
        raise AssetError("the weights", got="nothing", do="run `make venv`")

    monkeypatch.setattr(demo, "run", run)
    assert cli.main(["demo", "--formats", "none"]) == 1
    assert "kvq: the weights\n  got:     nothing\n  do:      run `make venv`" in capsys.readouterr().err


def test_the_arguments_reach_the_demo(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("rich", reason="the lab extra is not installed")
    from kvq_lab import demo

    seen = []
    monkeypatch.setattr(demo, "run", lambda *arguments: seen.append(arguments))
    file = tmp_path / "a.json"
    assert cli.main(["demo", "--formats", "none,nvfp4", "--tokens", "7", "--json", str(file)]) == 0
    assert cli.main(["demo"]) == 0
    assert seen[0] == (demo.Settings(formats=("none", "nvfp4"), tokens=7), file)
    assert seen[1] == (demo.Settings(formats=kvq_ops.formats.kv_names()), None)
