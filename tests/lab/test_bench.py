"""The benchmark of attention on tiny shapes: every contender has its row, and wrong ones have no speed."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the lab extra is not installed")

import kvq_ops
from kvq_lab import bench, bench_attention, bench_cli
from kvq_lab.bench_attention import Inputs, Shape
from kvq_lab.bench_bandwidth import Bandwidth
from kvq_lab.bench_plot import curves, plot
from kvq_lab.bench_rows import Row, read_csv
from kvq_lab.bench_timing import time_contenders
from kvq_lab.progress import Stages
from kvq_ops import reference, registry
from kvq_ops.errors import FormatError, HeadDimError, KVQError, ShapeError
from tests.lab.bench_cases import Ticking, implementation, only

SHAPE = Shape(batch=1, query_heads=4, kv_heads=2, head_dim=32)
FORMATS = ("none", "int8_per_token_head", "kivi2", "nuq4", "fp8_e4m3")
SMALL = bench.Settings(
    parts=("decode", "prefill", "append", "linearity"),
    formats=FORMATS,
    shape=SHAPE,
    lengths=(16, 40),
    tokens=72,
    prefill=9,
    rounds=2,
)


@pytest.fixture(autouse=True)
def few_copies(monkeypatch) -> None:
    monkeypatch.setattr(bench_attention, "MOST_COPIES", 2)


def small_bandwidth() -> Bandwidth:
    return Bandwidth(threads=2, buffer=2**12)


def measure(settings: bench.Settings) -> dict[str, Any]:
    return bench.measure(settings, Stages(io.StringIO()), Ticking(), small_bandwidth())


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_attention, "MOST_COPIES", 2)
        return measure(SMALL)


def of(result: dict[str, Any], part: str) -> list[Row]:
    return [row for row in result["rows"] if row.part == part]


def serving(name: str) -> list[str]:
    pair = kvq_ops.parse_kv_format(name)
    request = registry.Request("attention", "cpu", (pair.key, pair.value), (32, 32), torch.float32)
    return [row.name for row in registry.implementations("attention") if row.refuses(request) is None]


def test_every_format_is_measured_by_every_implementation_that_serves_it(result) -> None:
    expected = {"SDPA bfloat16", "SDPA float32", "torchao int8 SDPA"}
    for name in FORMATS:
        expected |= {f"{name} {by}" for by in serving(name)}
        if name != "none":
            expected.add(f"{name} dequantize+SDPA")
    for tokens in SMALL.lengths:
        names = [row.name for row in of(result, "decode") if row.tokens == tokens]
        assert len(names) == len(set(names)) and set(names) == expected


def test_whatever_ran_is_right_and_has_a_speed(result) -> None:
    for row in result["rows"]:
        if row.implementation == "torchao" and not row.ok:
            assert row.status.startswith("not run")
            continue
        assert row.ok, f"{row.name}: {row.status}"
        assert row.seconds > 0 and row.rounds == 2
        assert row.max_error <= row.allowed_error
        assert row.checked.startswith("float64")


def test_rows_say_what_is_read_and_how_fast(result) -> None:
    for row in of(result, "decode"):
        if not row.ok:
            continue
        assert row.base == "SDPA bfloat16" and row.ratio > 0
        assert row.bytes_per_second == pytest.approx(row.bytes / row.seconds)
        assert row.bandwidth == result["bandwidth"]["best"]
        assert row.bandwidth_fraction == pytest.approx(row.bytes_per_second / row.bandwidth)
    (int8,) = [r for r in of(result, "decode") if r.name == "int8_per_token_head torch" and r.tokens == 40]
    # Keys and values, two heads, 40 tokens of 32 codes and a scale; one length each.
    assert int8.bytes == 2 * (2 * 40 * (32 + 4) + 8)
    (dense,) = [r for r in of(result, "decode") if r.name == "SDPA bfloat16" and r.tokens == 40]
    assert dense.bytes == 2 * 2 * 40 * 32 * 2


def test_prefill_append_and_linearity_have_their_rows(result) -> None:
    prefill = of(result, "prefill")
    assert {row.name for row in prefill} == {"SDPA bfloat16", "SDPA float32"} | {
        f"{name} {serving(name)[0]}" for name in FORMATS
    }
    assert {(row.queries, row.tokens) for row in prefill} == {(9, 72)}
    appends = {row.name: row for row in of(result, "append")}
    for name in FORMATS:
        row = appends[f"{name} append"]
        assert row.share_of == f"{name} decode" and row.share > 0
        assert row.tokens == 72 and row.allocated > 72
    linear = of(result, "linearity")
    assert len(linear) == len(FORMATS) * 2 * 4
    for row in linear:
        # By this clock all calls take the same time.
        assert row.share_of.endswith("72 filled") and row.share == pytest.approx(1.0)
        assert row.allocated == 72
    assert {row.tokens for row in linear} == {9, 18, 36, 72}


def test_a_mask_and_a_length_see_the_same_tokens() -> None:
    from kvq_lab.bench_cache import linearity_contenders

    pair = kvq_ops.parse_kv_format("int8_per_token_head")
    found = linearity_contenders(SHAPE, Inputs.random(SHAPE, 24), pair, (8, 24), torch.float32, set())
    by_name = {contender.row.name: contender.expected.value for contender in found}
    length, mask = (by_name[f"{pair} by {form}, 8 filled"] for form in ("length", "mask"))
    assert torch.allclose(length, mask, rtol=0, atol=1e-12)
    assert not torch.allclose(length, by_name[f"{pair} by length, 24 filled"])


def _off_by_a_little(*args: Any, **options: Any) -> torch.Tensor:
    out = reference.attention(*args, **options)
    out[..., -1] += 1e-3
    return out


def test_a_kernel_that_is_wrong_is_refused_and_the_command_fails(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Bandwidth, "of_this_machine", lambda threads: small_bandwidth())
    with implementation("attention", _off_by_a_little, only("int8_per_token_head")):
        status = command(
            "--formats=int8_per_token_head,int4_group32", "--lengths=24", f"--csv={tmp_path / 'out.csv'}"
        )
    assert status == 1
    rows = {row.name: row for row, _ in read_csv(tmp_path / "out.csv") if row.part == "decode"}
    broken = rows["int8_per_token_head broken"]
    assert broken.status.startswith("wrong: max error 0.001, allowed 1")
    assert (broken.seconds, broken.ratio, broken.bandwidth_fraction) == (None, None, None)
    # By another implementation the same format is right, and so is another format.
    assert rows["int8_per_token_head torch"].seconds > 0
    assert rows["int4_group32 torch"].seconds > 0
    shown = capsys.readouterr().out
    assert "wrong: max error 0.001" in shown
    assert "no speed is given" in shown


@pytest.mark.parametrize("part", ["prefill", "append", "linearity"])
def test_wrong_kernels_are_refused_in_every_part(part: str) -> None:
    def forgets(store: Any, position: Any, x: Any, fmt: Any) -> None:
        reference.append_(store, position, x * 1.5, fmt)

    op, run = ("append_", forgets) if part == "append" else ("attention", _off_by_a_little)
    settings = dataclasses.replace(SMALL, parts=(part,), formats=("int8_per_token_head",))
    with implementation(op, run, only("int8_per_token_head")):
        found = measure(settings)
    wrong = [row for row in found["rows"] if row.wrong]
    assert wrong and all(row.seconds is None for row in wrong)
    if part == "append":
        assert [row.name for row in wrong] == ["int8_per_token_head append"]
    else:
        assert {row.implementation for row in wrong} == {"broken"}


def test_only_the_implementations_that_were_asked_for_are_measured() -> None:
    settings = dataclasses.replace(
        SMALL, parts=("decode",), lengths=(8,), formats=("int4_group32",), implementations=("torch",)
    )
    ours = [row.name for row in measure(settings)["rows"] if row.format.startswith("int4")]
    assert ours == ["int4_group32 torch", "int4_group32 dequantize+SDPA"]


def test_why_an_implementation_does_not_serve_a_format_is_noted() -> None:
    with implementation("attention", _off_by_a_little, only("int8_per_token_head")):
        settings = dataclasses.replace(SMALL, parts=("decode",), lengths=(8,), formats=("int4_group32",))
        assert "broken does not serve int4_group32: not this format" in measure(settings)["notes"]


def test_each_sample_appends_tokens_that_are_new() -> None:
    from kvq_lab.bench_cache import APPENDS, append_contenders, append_room

    pair = kvq_ops.parse_kv_format("kivi2")
    inputs = Inputs.random(SHAPE, 8 + append_room(2))
    append, decode = append_contenders(SHAPE, inputs, pair, 8, torch.float32, set())
    time_contenders([append, decode], None, 2, clock=Ticking(), shares={append.row.name: decode.row.name})
    assert append.row.ok, append.row.status
    (step,) = append.calls
    # Two checks, an estimate, a warm-up and two rounds.
    assert step.stored.key[-1].tolist() == [8 + 3 + 3 * APPENDS]


def test_copies_fill_what_caches_could_hold() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_attention, "MOST_COPIES", 64)
        assert bench_attention.copies(100, cold=1000) == 10
        assert bench_attention.copies(2000, cold=1000) == 1
        assert bench_attention.copies(1, cold=1000) == 64


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_without_torchao_a_row_says_so() -> None:
    row = bench_attention.torchao_int8(SHAPE, Inputs.random(SHAPE, 8)).row
    assert row.status == "not run: torchao is not installed: pip install 'kvq-ops[peers]'"


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_torchaos_kernel_is_held_to_its_own_rounding(monkeypatch) -> None:
    factor = 1.0

    def kernel(q, k, v, mask, dropout, causal, scale, *numbers):
        (qs, qz, ks, kz, vs, vz, ws, wz, os, oz) = numbers
        q, k, v = ((x.float() - z) * s for x, s, z in ((q, qs, qz), (k, ks, kz), (v, vs, vz)))
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        weights = (torch.round(weights / ws) + wz).clamp(0, 255) * ws
        return (torch.round(weights @ v * factor / os) + oz).clamp(0, 255).to(torch.uint8)

    library = torch.library.Library("torchao", "FRAGMENT")
    library.define(
        "qscaled_dot_product(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, "
        "bool is_causal=False, float? scale=None, float q_scale=1.0, int q_zp=0, float k_scale=1.0, int k_zp=0, "
        "float v_scale=1.0, int v_zp=0, float a_scale=1.0, int a_zp=0, float o_scale=1.0, int o_zp=0) -> Tensor"
    )
    library.impl("qscaled_dot_product", kernel, "CPU")
    monkeypatch.setattr(bench_attention.importlib, "import_module", lambda name: None)
    good = bench_attention.torchao_int8(SHAPE, Inputs.random(SHAPE, 24))
    assert good.check(), good.row.status
    # No grouped heads: four heads of 24 tokens of 32 channels, keys and values.
    assert good.row.bytes == 2 * 4 * 24 * 32
    factor = 0.5
    bad = bench_attention.torchao_int8(SHAPE, Inputs.random(SHAPE, 24))
    assert not bad.check() and bad.row.wrong
    library._destroy()


# -- the command --------------------------------------------------------------------------------------------------------


def command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    bench_cli.add_parser(parser.add_subparsers())
    shape = ("--query-heads=4", "--kv-heads=2", "--head-dim=32")
    arguments = parser.parse_args(["bench", "--parts=decode", "--rounds=2", "--budget=1", *shape, *words])
    try:
        arguments.run(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_the_command_prints_and_writes_everything(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(Bandwidth, "of_this_machine", lambda threads: small_bandwidth())
    files = [tmp_path / name for name in ("out.csv", "out.json", "out.svg")]
    options = [f"--{name}={path}" for name, path in zip(("csv", "json", "plot"), files, strict=True)]
    words = ("--formats=int8_per_token_head,key=int4_group32,value=nvfp4", "--lengths=8,24", *options)
    assert command(*words) == 0
    written = read_csv(files[0])
    content = json.loads(files[1].read_text())
    assert content["schema"] == "kvq.bench/1"
    assert [row for row, _ in written] == [Row(**row) for row in content["rows"]]
    assert {columns["env_torch"] for _, columns in written} == {torch.__version__}
    assert {columns["time"] for _, columns in written} == {content["time"]}
    assert content["settings"]["lengths"] == [8, 24]
    assert "<svg" in files[2].read_text()
    shown = capsys.readouterr().out
    for name in ("SDPA bfloat16", "int8_per_token_head torch", "key=int4_group32,value=nvfp4 torch"):
        assert name in shown
    assert torch.__version__ in shown and "GB/s, the best of" in shown
    # A second run is added.
    assert command(*words[:3]) == 0
    assert len(read_csv(files[0])) == 2 * len(written)
    assert command(*words[:3], "--new") == 0
    assert len(read_csv(files[0])) == len(written)


def test_what_was_measured_before_an_interruption_is_written(tmp_path: Path, monkeypatch, capsys) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bandwidth, "of_this_machine", lambda threads: small_bandwidth())
    monkeypatch.setattr(bench.Run, "append", interrupted)
    path = tmp_path / "out.csv"
    words = ("--tokens=16", "--formats=int8_per_token_head", f"--plot={tmp_path / 'out.svg'}")
    with pytest.raises(KeyboardInterrupt):
        command("--parts=prefill,append,linearity", "--prefill=3", f"--csv={path}", *words)
    rows = [row for row, _ in read_csv(path)]
    assert {row.part for row in rows} == {"prefill"} and all(row.bandwidth is None for row in rows)
    shown = capsys.readouterr().out
    assert "stopped before the end" in shown and "Nothing to plot" in shown
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_what_was_typed_wrongly_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    def measured(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(bench, "measure", measured)
    for words in (("--parts=decoding",), ("--lengths=0",), ("--dtypes=int8",), ("--lengths=,",)):
        with pytest.raises(SystemExit):
            argparse_only(*words)
        assert f"{words[0].partition('=')[0]}: " in capsys.readouterr().err
    with pytest.raises(KVQError, match="int8_per_token_head"):
        command("--formats=int8_per_token_hed")
    with pytest.raises(ShapeError, match="4 query heads for 3 kv heads"):
        command("--kv-heads=3")
    with pytest.raises(KVQError, match="torch"):
        command("--implementations=torhc")
    with pytest.raises(HeadDimError):
        command("--head-dim=25", "--formats=nvfp4")
    with pytest.raises(KVQError, match="cmake"):
        command(f"--llama-bench={tmp_path / 'none'}")
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(FormatError, match="--new"):
        command(f"--csv={other}")
    assert other.read_text() == "a,b\n1,2\n"


def argparse_only(*words: str) -> None:
    parser = argparse.ArgumentParser()
    bench_cli.add_parser(parser.add_subparsers())
    parser.parse_args(["bench", *words])


# -- the plot -----------------------------------------------------------------------------------------------------------


def _plotted() -> list[Row]:
    def row(name: str, tokens: int, **more: Any) -> Row:
        return Row("decode", name, dtype="float32", tokens=tokens, **more)

    return [
        row(
            "int8 cpu",
            512,
            format="int8",
            implementation="cpu",
            seconds=1.0,
            ratio=4.0,
            bandwidth_fraction=0.5,
        ),
        row("int8 torch", 512, format="int8", implementation="torch", seconds=9.0, ratio=0.5),
        row(
            "int8 cpu",
            1024,
            format="int8",
            implementation="cpu",
            seconds=1.0,
            ratio=5.0,
            bandwidth_fraction=0.6,
        ),
        row(
            "int8 cpu",
            1024,
            format="int8",
            implementation="cpu",
            seconds=1.0,
            ratio=7.0,
            bandwidth_fraction=0.8,
        ),
        row("int4 cpu", 512, format="int4", implementation="cpu", status="wrong: x", ratio=99.0),
    ]


def test_curves_leave_out_what_is_not_right_and_join_runs() -> None:
    found = curves(_plotted(), "decode", lambda row: row.ratio)
    assert found == {"int8 cpu, float32": [(512, 4.0), (1024, 6.0)], "int8 torch, float32": [(512, 0.5)]}


def test_the_plot_shows_the_fastest_implementation_of_a_format(tmp_path: Path) -> None:
    path = tmp_path / "out.svg"
    plot(_plotted(), path, "a caption")
    assert "<svg" in path.read_text()[:1000]
    assert "int8 cpu, float32" in path.read_text() and "int8 torch" not in path.read_text()
    with pytest.raises(FormatError, match="no decode that is right"):
        plot(_plotted()[-1:], path)
    with pytest.raises(FormatError, match=".svg"):
        plot(_plotted(), tmp_path / "out.nonsense")
