"""Rows of the benchmark as CSV and JSON, and what a row says that is not right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="the lab extra is not installed")

from kvq_lab.bench_rows import (
    TIMED,
    Row,
    bench_environment,
    csv_columns,
    read_csv,
    with_bandwidth,
    write_csv,
    write_json,
)
from kvq_ops.errors import FormatError

COLUMNS = {
    "time": "2026-01-02T03:04:05+00:00",
    "env_cpu": "Some, processor",
    "env_gpu": None,
    "env_threads": 2,
}


def rows() -> list[Row]:
    timed = Row(
        "decode",
        'int8, "quoted"',
        format="int8_per_token_head",
        tokens=512,
        seconds=0.1 + 0.2,
        ratio=1 / 3,
        bytes=2**40,
        max_error=1e-300,
        rounds=21,
    )
    wrong = Row("decode", "int4", status="wrong: max error 0.5,\nallowed 1e-05")
    return [timed, wrong]


def test_rows_come_back_from_csv_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(rows(), COLUMNS, path)
    found = read_csv(path)
    assert [row for row, _ in found] == rows()
    assert found[0][1] == {
        "time": COLUMNS["time"],
        "env_cpu": "Some, processor",
        "env_gpu": "",
        "env_threads": "2",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_a_second_run_is_added_and_a_new_one_replaces(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(rows(), COLUMNS, path)
    write_csv(rows()[:1], COLUMNS | {"env_threads": 1}, path)
    found = read_csv(path)
    assert [row for row, _ in found] == [*rows(), rows()[0]]
    assert [columns["env_threads"] for _, columns in found] == ["2", "2", "1"]
    write_csv(rows()[1:], COLUMNS, path, new=True)
    assert [row for row, _ in read_csv(path)] == rows()[1:]


def test_rows_are_not_added_to_a_file_with_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write_csv(rows(), COLUMNS, path)
    before = path.read_text()
    with pytest.raises(FormatError, match=r"(?s)without env_more and with env_gpu.*--new"):
        write_csv(rows(), {"time": "", "env_cpu": "", "env_threads": 1, "env_more": 1}, path)
    with pytest.raises(FormatError, match="in another order"):
        write_csv(rows(), dict(reversed(COLUMNS.items())), path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("part,name\ndecode,x\n", "no column format"), (None, "line 2")],
)
def test_what_is_no_such_file_is_refused(tmp_path: Path, text: str | None, complaint: str) -> None:
    path = tmp_path / "out.csv"
    write_csv([Row("decode", "x", tokens=77123)], {}, path)
    path.write_text(text or path.read_text().replace("77123", "many"))
    with pytest.raises(FormatError, match=complaint):
        read_csv(path)


def test_json_holds_the_rows(tmp_path: Path) -> None:
    write_json({"schema": "s", "rows": rows()}, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert [Row(**row) for row in found["rows"]] == rows()


def test_a_row_that_is_not_right_keeps_no_speed() -> None:
    row = Row("decode", "x", max_error=0.5, allowed_error=0.1, **{name: 2 for name in TIMED})
    assert row.ok and not row.wrong
    row.refuse("wrong: max error 0.5")
    assert row.wrong and not row.ok
    assert [getattr(row, name) for name in TIMED] == [None] * len(TIMED)
    assert (row.max_error, row.allowed_error) == (0.5, 0.1)
    not_run = Row("decode", "x", status="not run: not installed")
    assert not not_run.ok and not not_run.wrong


def test_bandwidth_is_for_rows_that_are_right_and_read_a_known_number_of_bytes() -> None:
    read = Row("decode", "a", seconds=0.5, bytes=1000)
    others = [
        Row("append", "b", seconds=0.5),
        Row("decode", "c", bytes=1000),
        Row("decode", "d", status="wrong: x", seconds=0.5, bytes=1000),
    ]
    with_bandwidth([read, *others], 8000.0)
    assert (read.bytes_per_second, read.bandwidth, read.bandwidth_fraction) == (2000.0, 8000.0, 0.25)
    assert all(row.bandwidth_fraction is None is row.bytes_per_second for row in others)


def test_the_environment_of_a_row_says_versions_threads_and_kernels() -> None:
    import torch

    import kvq_ops

    columns = csv_columns(bench_environment(), "now")
    assert columns["env_kvq"] == kvq_ops.__version__
    assert columns["env_torch"] == torch.__version__
    assert columns["env_threads"] == torch.get_num_threads()
    assert columns["env_kernels"]
    assert list(columns)[0] == "time"
    assert {"env_torchao", "env_optimum-quanto", "env_hqq"} <= set(columns)
