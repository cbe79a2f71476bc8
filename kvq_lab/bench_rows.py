"""What ``kvq bench`` writes: one row for each measurement, the same columns in CSV and JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_lab.environment import environment, version_of
from kvq_ops.errors import FormatError

SCHEMA = "kvq.bench/1"
OK = "ok"


@dataclasses.dataclass
class Row:
    """One measurement. What does not apply, or was not measured, is ``None``; speeds stand in rows that are ``ok`` alone.

    Attributes:
        part: ``decode``, ``prefill``, ``append``, ``linearity`` or ``model``.
        name: of the contender, unique within its part, dtype and number of tokens.
        format: of the cache; empty for other peoples' attention.
        implementation: what ran it.
        dtype: of the query, or of the model.
        tokens: that are attended to, or stand in the cache.
        allocated: tokens that the cache has room for.
        status: ``ok``; ``wrong: ...`` for a result that was checked and is not right; ``not run: ...``.
        checked: what its result was held against; empty where it was taken as it came.
        max_error, allowed_error: the error that is largest relative to what is allowed, and what is allowed there.
        seconds: median of one call; ``seconds_low`` and ``seconds_high`` are the quartiles, ``seconds_best`` the shortest.
        base: the contender that ``ratio`` refers to: how much faster than it this is, median over rounds.
        share: median over rounds of this time divided by the time of ``share_of``.
        bytes: stored bytes that one call has to read.
        bandwidth: bytes a second that this machine was seen to read in this run.
        kl: of a model's next token from the unquantized fp32 model, in nats.
    """

    part: str
    name: str
    format: str = ""
    implementation: str = ""
    dtype: str = ""
    batch: int | None = None
    query_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    queries: int | None = None
    tokens: int | None = None
    allocated: int | None = None
    status: str = OK
    checked: str = ""
    max_error: float | None = None
    allowed_error: float | None = None
    seconds: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    seconds_best: float | None = None
    rounds: int | None = None
    base: str = ""
    ratio: float | None = None
    share: float | None = None
    share_of: str = ""
    bytes: int | None = None
    bytes_per_second: float | None = None
    bandwidth: float | None = None
    bandwidth_fraction: float | None = None
    tokens_per_second: float | None = None
    kl: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def wrong(self) -> bool:
        return self.status.startswith("wrong")

    def refuse(self, status: str) -> None:
        """Take back every number that a result which is not right must not be quoted with."""
        self.status = status
        for name in TIMED:
            setattr(self, name, None)


TIMED = (
    "seconds",
    "seconds_low",
    "seconds_high",
    "seconds_best",
    "rounds",
    "ratio",
    "share",
    "bytes_per_second",
    "bandwidth_fraction",
    "tokens_per_second",
)
_FIELDS = {field.name: str(field.type) for field in dataclasses.fields(Row)}


def bench_environment() -> dict[str, Any]:
    """What a row is measured on: as for every measurement, with the load at this moment and what only benchmarks compare with."""
    from kvq_ops.cpu import build

    found = environment()
    found["kernels"] = build.capability()
    found["load"] = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    for package in ("torchao", "optimum-quanto", "hqq"):
        found[package] = version_of(package)
    return found


def with_bandwidth(rows: Iterable[Row], bandwidth: float) -> None:
    """Fill in bytes a second and the fraction of ``bandwidth`` where a row is right, timed, and reads a known number of bytes."""
    for row in rows:
        if row.ok and row.seconds and row.bytes is not None:
            row.bytes_per_second = row.bytes / row.seconds
            row.bandwidth = bandwidth
            row.bandwidth_fraction = row.bytes_per_second / bandwidth


# ----------------------------------------------------------------------------------------------------------------- CSV


def _text(value: Any) -> str:
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def csv_columns(environment: Mapping[str, Any], time: str) -> dict[str, Any]:
    """What stands in every row of one run behind the measurement."""
    return {"time": time, **{f"env_{name}": value for name, value in environment.items()}}


def check_csv(path: Path, columns: Mapping[str, Any]) -> str:
    """What the file holds so far, to which rows with these further columns can be added.

    Raises:
        FormatError: it has other columns.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    header = [*_FIELDS, *columns]
    found = next(csv.reader(io.StringIO(before)), header)
    if found != header:
        missing = ", ".join(name for name in header if name not in found)
        extra = ", ".join(name for name in found if name not in header)
        parts = [f"without {missing}"] * bool(missing) + [f"with {extra}"] * bool(extra)
        raise FormatError(
            f"adding rows to {path}",
            got=f"a file {' and '.join(parts) or 'with its columns in another order'}",
            allowed="a file that this release of kvq bench wrote",
            do="name another file, or begin it anew with --new",
        )
    return before


def write_csv(rows: Sequence[Row], columns: Mapping[str, Any], path: Path, *, new: bool = False) -> None:
    """Add ``rows`` to the file, each with ``columns`` behind; a file that is not there is begun.

    Args:
        new: begin anew, whatever is there.

    Raises:
        FormatError: the file has other columns.
    """
    before = "" if new else check_csv(path, columns)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if not before:
        writer.writerow([*_FIELDS, *columns])
    for row in rows:
        values = [*dataclasses.astuple(row), *columns.values()]
        writer.writerow([_text(value) for value in values])
    _replace(path, before + stream.getvalue())


def read_csv(path: Path) -> list[tuple[Row, dict[str, str]]]:
    """Rows with their further columns, as :func:`write_csv` wrote them.

    Raises:
        FormatError: the file lacks a column or holds something that is no number where one belongs.
    """
    found = []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if missing := [name for name in _FIELDS if name not in (reader.fieldnames or ())]:
            raise FormatError(
                f"reading {path}",
                got=f"no column {', '.join(missing)}",
                allowed="a file that kvq bench wrote",
            )
        for line in reader:
            try:
                row = Row(**{name: _value(line[name], kind) for name, kind in _FIELDS.items()})
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"reading {path}, line {reader.line_num}",
                    got=str(error),
                    allowed="numbers where they belong",
                ) from error
            found.append((row, {name: value for name, value in line.items() if name not in _FIELDS}))
    return found


def _value(text: str, kind: str) -> Any:
    if kind == "str":
        return text
    if text == "":
        return None
    return float(text) if kind.startswith("float") else int(text)


# ---------------------------------------------------------------------------------------------------------------- JSON


def write_json(result: Mapping[str, Any], path: Path) -> None:
    """The whole result, rows as objects."""
    plain = dict(result) | {"rows": [dataclasses.asdict(row) for row in result["rows"]]}
    _replace(path, json.dumps(plain, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
