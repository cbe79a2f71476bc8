"""The script for machines with a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvq_lab import gpu_cases, gpu_check, gpu_oracle, gpu_plan
from kvq_lab.gpu_rows import Budget, Case, Row, run_cases, table
from kvq_ops import reference, registry
from kvq_ops.formats import get_format, parse_kv_format
from kvq_ops.registry import Implementation
from tests.lab import gpu_standin

ROOT = Path(__file__).resolve().parents[2]
MACHINE = gpu_cases.Machine.interpreter()


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "kvq_lab.gpu_check", *arguments],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


# ----------------------------------------------------------------------------------------------------------- the script


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs() -> None:
    done = script()
    assert done.returncode == 2
    assert "no GPU that torch can use" in done.stderr and "--interpret" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_does_not_mistake_the_interpreter_for_a_gpu() -> None:
    done = script(TRITON_INTERPRET="1")
    assert done.returncode == 2 and "TRITON_INTERPRET is set" in done.stderr


@pytest.mark.slow
def test_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the triton extra is not installed")
    done = script("--interpret", "--only", "int8_per_token_head", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu_interpreter.json").read_text())
    assert found["complete"]
    assert {"kvq", "torch", "triton"} <= set(found["environment"])
    assert {row["section"] for row in found["rows"]} == {"codes", "dequantize", "attention"}
    assert len(found["rows"]) >= 11 and all(row["verdict"] == "right" for row in found["rows"])
    # Speed is for GPUs.
    assert not any("seconds" in row for row in found["rows"])


def test_every_listed_format_has_a_case() -> None:
    assert gpu_cases.untested() == []


# ------------------------------------------------------------------------------------------------------- wrong kernels


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch):
    """Kernels that are the torch implementation but for what a test changes."""
    before = {op: list(rows) for op, rows in registry._implementations.items()}

    def install(op: str, change: Any) -> None:
        for one in registry.OPS:
            torch_row = next(row for row in registry.implementations(one) if row.name == "torch")

            def run(*args: Any, _run: Any = torch_row.run, _op: str = one, **kwargs: Any) -> Any:
                found = _run(*args, **kwargs)
                return change(found) if _op == op else found

            registry.register(Implementation("broken", one, run, lambda request: None, -20))
        monkeypatch.setattr(gpu_cases, "KERNELS", "broken")

    yield install
    registry._implementations.update(before)
    registry._choices.clear()


PAIR = parse_kv_format("int8_per_token_head")


def attention_row(**changes: Any) -> Row:
    given = {"queries": 2, "dtype": torch.float32, "dim": 32} | changes
    return gpu_cases.attention(MACHINE, PAIR, "causal", **given)


@pytest.mark.parametrize("dtype", MACHINE.dtypes)
def test_right_kernels_pass(broken: Any, dtype: torch.dtype) -> None:
    broken("none", None)
    assert attention_row(dtype=dtype).ok
    assert gpu_cases.dequantize(MACHINE, PAIR.key, dtype, 32).ok
    assert gpu_cases.codes(MACHINE, PAIR.key, dtype, 32).ok


@pytest.mark.parametrize("variant", list(gpu_cases.variants(MACHINE, 4, 1)))
@pytest.mark.parametrize("name", ["none", "int4_group32", "kivi4", "turbo4", "nuq4"])
def test_the_oracle_agrees_with_the_reference(broken: Any, name: str, variant: str) -> None:
    """It is written apart from it, and its limit must leave room for fp32."""
    broken("none", None)
    pair = parse_kv_format(name)
    row = gpu_cases.attention(MACHINE, pair, variant, queries=3, dtype=torch.float32, dim=32)
    assert row.ok, row
    assert row.allowed is not None and row.allowed < 1e-4


def test_a_token_that_is_missed_is_seen(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand tokens the last does not count, at fp16's tolerance."""
    machine = gpu_cases.Machine("cpu", tokens=1000, heads=4, head_dims=(32,))
    broken("none", None)
    given = {"queries": 1, "dtype": torch.float16, "dim": 32}
    assert gpu_cases.attention(machine, PAIR, "plain", **given).ok
    original = reference._tokens_in_reach
    monkeypatch.setattr(reference, "_tokens_in_reach", lambda *a: min(original(*a), 999))
    missed = gpu_cases.attention(machine, PAIR, "plain", **given)
    assert missed.verdict == "wrong" and missed.error > missed.allowed


@pytest.mark.parametrize(
    ("op", "change", "check"),
    [
        ("attention", lambda out: out * 1.001, attention_row),
        ("attention", lambda out: out.masked_fill(out == out.max(), torch.nan), attention_row),
        (
            "dequantize",
            lambda out: out * (1 + 2.0**-9),
            lambda: gpu_cases.dequantize(MACHINE, PAIR.key, torch.float32, 32),
        ),
        (
            "quantize",
            lambda store: [store[0] ^ 1, *store[1:]],
            lambda: gpu_cases.codes(MACHINE, PAIR.key, torch.float32, 32),
        ),
        ("paged_attention", lambda out: out.flip(0), lambda: attention_row(size=8)),
    ],
    ids=["scaled", "nan", "dequantize", "codes", "pages"],
)
def test_a_wrong_kernel_is_called_wrong(broken: Any, op: str, change: Any, check: Any) -> None:
    broken(op, change)
    row = check()
    assert row.verdict == "wrong" and row.why and row.seconds is None


def test_a_wrong_row_loses_its_speed() -> None:
    row = Row("decode", "x", "timed", seconds=1.0, fraction=0.9, against={"SDPA bf16": 2.0})
    row.refuse("wrong", "error")
    assert row.seconds is None and row.fraction is None and not row.against


# -------------------------------------------------------------------------------------------------------------- budget


class Clock:
    """Time that passes when something is done."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_budget_is_kept_and_the_worthiest_run_first() -> None:
    clock = Clock()
    done: list[str] = []

    def case(name: str, worth: float, expected: float, takes: float) -> Case:
        def run() -> list[Row]:
            done.append(name)
            clock.now += takes
            return [Row("codes", name)]

        return Case("codes", name, run, expected, worth)

    # Everything takes twice as long as expected, which those that come later are charged for.
    cases = [case(f"case {i}", -i, 10, 20) for i in range(10)]
    rows = run_cases(list(reversed(cases)), Budget(100, clock))
    assert done == [f"case {i}" for i in range(len(done))] and 4 <= len(done) <= 5
    assert clock.now <= 100
    assert [row.verdict for row in rows[len(done) :]] == ["not run"] * (10 - len(done))


def test_a_case_that_raises_is_a_row() -> None:
    def run() -> list[Row]:
        raise RuntimeError("out of shared memory")

    (row,) = run_cases([Case("attention", "int8", run, 1, 1)], Budget(10))
    assert row.verdict == "failed" and "out of shared memory" in row.why
    assert "out of shared memory" in table([row])


def test_the_report_holds_what_the_rows_hold() -> None:
    rows = [Row("decode", "a", "timed", seconds=0.5, bytes=10), Row("codes", "b").refuse("wrong", "3 differ")]
    found = json.loads(json.dumps(gpu_check.report({"gpu": "x"}, rows, 3.21)))
    assert found["rows"][0] == {
        "section": "decode",
        "name": "a",
        "verdict": "timed",
        "seconds": 0.5,
        "bytes": 10,
    }
    assert found["rows"][1]["why"] == "3 differ"
    assert gpu_check.file_name({"gpu": "NVIDIA H200"}) == "gpu_nvidia_h200.json"


def test_limits_grow_with_the_arithmetic() -> None:
    query, key, value = (gpu_cases.random((1, 2, 3, 32), torch.float32, seed) for seed in range(3))
    limits = [
        gpu_oracle.attention(
            query, key, value, torch.tensor([3]), gpu_oracle.Options(), u=u, dtype=torch.float32
        ).limit.max()
        for u in (2.0**-24, 2.0**-11, 2.0**-8)
    ]
    assert limits[0] < limits[1] < limits[2] < 0.5


# ------------------------------------------------------------------------------------------------------------- CUTLASS


def test_cutlass_kernels_are_checked_in_host_code(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    from cutlass_kernels import operators
    from kvq_lab import gpu_cutlass

    rows = list(gpu_cutlass.check(MACHINE))
    assert [row.verdict for row in rows] == ["right"] * 2 * len(gpu_cutlass.FORMATS), table(rows)

    original = operators.append_

    def late(store: Any, position: Any, x: Any, fmt: Any) -> None:
        original(store, position + 1, x, fmt)

    monkeypatch.setattr(operators, "append_", late)
    row = gpu_cutlass.codes(MACHINE, get_format("nvfp4"), torch.float16, 32)
    assert row.verdict == "wrong" and row.why.startswith("append_: codes:")


def test_without_cutlass_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlass_kernels import build
    from kvq_lab import gpu_cutlass

    monkeypatch.setattr(build, "why_not", lambda: "nvidia-cutlass-dsl is not installed")
    (row,) = gpu_cutlass.check(MACHINE)
    assert row.verdict == "not run" and "not installed" in row.why


def test_cutlass_attention_is_held_to_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need a GPU: the reference stands in for them, and something that is not attention."""
    import types

    import kvq_ops
    from cutlass_kernels import build, operators
    from kvq_lab import gpu_cutlass

    def attention(query: Any, key: Any, value: Any, key_format: Any, value_format: Any, **more: Any) -> Any:
        with kvq_ops.use_implementation("torch"):
            return kvq_ops.attention(query, key, value, key_format.name, value_format.name, **more)

    launcher = types.ModuleType("cutlass_kernels.attention")
    launcher.attention = attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, launcher.__name__, launcher)
    monkeypatch.setattr(sys.modules["cutlass_kernels"], "attention", launcher, raising=False)
    monkeypatch.setattr(build, "why_not", lambda: None)
    gpu_standin.install(monkeypatch)

    def missing(*_: Any) -> None:
        raise RuntimeError("not compiled")

    monkeypatch.setattr(operators, "append_", missing)
    machine = gpu_cases.Machine("cuda", tokens=19, heads=4, head_dims=(32,))
    with gpu_standin.OnCPU():
        rows = list(gpu_cutlass.check(machine))
        assert [row.verdict for row in rows] == ["failed"] * 12 + ["right"] * 4, table(rows)
        launcher.attention = lambda query, *_, **__: query  # type: ignore[attr-defined]
        assert gpu_cutlass.attention(machine, get_format("nvfp4"), 32).verdict == "wrong"
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
        assert list(gpu_cutlass.check(machine))[-1].verdict == "not run"


# -------------------------------------------------------------------------------------------------------- the whole way


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """As far as ``main`` is concerned there is one."""
    gpu_standin.install(monkeypatch)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from kvq_ops.triton_kernels import availability

    monkeypatch.setattr(availability, "gpu_refusal", lambda: None)


def plan(monkeypatch: pytest.MonkeyPatch, *found: Row | BaseException) -> None:
    def run(cases: Any, make: Any, seconds: Any, tell: Any, count: int) -> None:
        assert make in (gpu_plan.check_cases, gpu_plan.tune_cases) and seconds() > 0 and count > 0
        for row in found:
            if isinstance(row, BaseException):
                raise row
            tell(row)

    monkeypatch.setattr(gpu_plan, "run", run)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (Row("codes", "a"), 0),
        (Row("codes", "a", "wrong", "3 differ"), 1),
        (Row("codes", "a", "failed", "raised"), 1),
        (Row("codes", "a", "not run", "out of time"), 2),
        (KeyboardInterrupt(), 2),
    ],
)
def test_the_exit_code_says_what_was_found(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, row: Any, code: int
) -> None:
    pytest.importorskip("triton")
    plan(monkeypatch, row)
    assert gpu_check.main(["--out", str(tmp_path)]) == code
    found = json.loads((tmp_path / "gpu_stand_in.json").read_text())
    assert found["complete"] == (not isinstance(row, BaseException))
    assert found["environment"]["gpu"] == "Stand-in" and len(found["rows"]) == found["complete"]


def test_what_was_found_before_a_crash_is_kept(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    plan(monkeypatch, Row("codes", "a"), Row("codes", "b"), ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        gpu_check.main(["--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu_stand_in.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["a", "b"] and not found["complete"]


def test_launch_parameters_that_were_found_are_copied(
    gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    plan(monkeypatch, Row("tune", "a", "timed", seconds=1.0))
    assert gpu_check.main(["--tune", "--out", str(tmp_path / "new")]) == 0
    assert "entries" in json.loads((tmp_path / "new" / "configs.json").read_text())


def test_what_is_in_the_way_is_said(
    gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    assert gpu_check.why_not() == "" and gpu_check.prepare(False) == ""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "triton", None)
        assert "pip install" in gpu_check.why_not()
    with monkeypatch.context() as patch:
        patch.setattr(gpu_check, "environment", lambda: (_ for _ in ()).throw(ImportError("no numpy")))
        assert gpu_check.main([]) == 2 and "no numpy" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu_check.why_not() == "no GPU that torch can use"
    # Triton is here already, as a compiler.
    assert "process of its own" in gpu_check.prepare(True)


def test_every_case_of_the_plan_can_be_found_by_its_name(gpu: None) -> None:
    """Workers are told which case to run by its key."""
    pytest.importorskip("triton")
    for cases in (gpu_plan.check_cases(), gpu_plan.tune_cases(), gpu_plan.check_cases(True)):
        assert cases and len({case.key for case in cases}) == len(cases)


def test_cases_are_picked_by_section_and_name() -> None:
    cases = [Case(section, "int8", lambda: [], 1, 1) for section in ("tune", "decode", "codes")]
    assert [case.section for case in gpu_check.chosen(cases, "tune|decode")] == ["tune", "decode"]
    assert [case.section for case in gpu_check.chosen(cases, "codes int")] == ["codes"]
    assert gpu_check.chosen(cases, "") == cases


def test_the_time_is_enough(gpu: None) -> None:
    """On sixteen cores what comes first, and what is timed, are expected to fit into six minutes."""
    pytest.importorskip("triton")
    cases, workers = gpu_plan.check_cases(), 14
    first = [case.seconds for case in cases if not case.alone and case.worth >= gpu_plan.FIRST]
    alone = sum(case.seconds for case in cases if case.alone)
    rest = sum(case.seconds for case in cases if not case.alone) - sum(first)
    assert max(first) < gpu_check.SECONDS * gpu_plan.EARLY
    assert sum(first) / workers < gpu_check.SECONDS * gpu_plan.EARLY
    assert sum(first) / workers + alone + rest / workers < gpu_check.SECONDS


def test_in_the_interpreter_it_runs_here(
    broken: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the way, with kernels that are the torch implementation."""
    broken("none", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu_check.main(["--interpret", "--only", "codes int8_per_token_head"]) == 0
    assert "codes: 2 right" in capsys.readouterr().out
    assert gpu_check.main(["--interpret", "--only", "no such case"]) == 2


@pytest.mark.parametrize("name", ["int4_group32", "kivi4", "mxfp8", "turbo4", "nuq4", "none"])
def test_all_that_is_asked_of_a_gpu(broken: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The cases as a GPU gets them, at its sizes but fewer tokens."""
    broken("none", None)
    gpu_standin.install(monkeypatch)
    machine = gpu_cases.Machine("cuda", tokens=100, heads=4, head_dims=(32, 64))
    with gpu_standin.OnCPU():
        cases = [case for case in gpu_cases.correctness(machine) if case.name == name]
        rows = [row for case in cases for row in case.rows()]
    assert len(cases) == 2 and all(row.ok for row in rows), table(rows)
