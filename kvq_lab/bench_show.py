"""What a person sees of ``kvq bench``: a table for each part, and how it was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvq_lab.bench_attention import MOST_COPIES
from kvq_lab.bench_rows import Row
from kvq_lab.environment import one_line

Cell = Callable[[Row], str]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.2f} MiB"


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:.2f} GB/s"


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f}%"


def _number(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def _faster(row: Row) -> str:
    return _number(row.ratio, ".2f", "x")


# Of each part, its heading and its columns behind name and dtype.
PARTS: dict[str, tuple[str, dict[str, Cell]]] = {
    "decode": (
        "Decode attention",
        {
            "tokens": lambda row: str(row.tokens),
            "time": lambda row: _time(row.seconds),
            "against\nbf16 SDPA": _faster,
            "stored": lambda row: _size(row.bytes),
            "read": lambda row: _rate(row.bytes_per_second),
            "of bandwidth": lambda row: _percent(row.bandwidth_fraction),
        },
    ),
    "prefill": (
        "Prefill",
        {
            "new": lambda row: str(row.queries),
            "tokens": lambda row: str(row.tokens),
            "time": lambda row: _time(row.seconds),
            "against\nbf16 SDPA": _faster,
        },
    ),
    "append": (
        "Append of one token",
        {
            "tokens": lambda row: str(row.tokens),
            "time": lambda row: _time(row.seconds),
            "of decode\nattention": lambda row: _percent(row.share),
        },
    ),
    "linearity": (
        "Cost against filled tokens, at one allocation",
        {
            "filled": lambda row: str(row.tokens),
            "allocated": lambda row: str(row.allocated),
            "time": lambda row: _time(row.seconds),
            "of the time\nwhen full": lambda row: _percent(row.share),
            "of the\ntokens": lambda row: _percent((row.tokens or 0) / (row.allocated or 1)),
        },
    ),
    "model": (
        "Decode of SmolLM2-135M-Instruct",
        {
            "context": lambda row: str(row.tokens),
            "step": lambda row: _time(row.seconds),
            "tok/s": lambda row: _number(row.tokens_per_second, ".1f"),
            "against\ncompiled bf16": _faster,
            "of bandwidth": lambda row: _percent(row.bandwidth_fraction),
            "KL": lambda row: _number(row.kl, ".2g"),
        },
    ),
}


def table_of(part: str, rows: Sequence[Row]) -> Table:
    """The table of one part; a row that is not right shows what is wrong and no number."""
    title, columns = PARTS[part]
    table = Table(
        title=title, title_justify="left", box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0)
    )
    table.add_column("what", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("max error", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in rows:
        cells = [cell(row) for cell in columns.values()]
        error = "" if row.max_error is None else f"{row.max_error:.1e}"
        table.add_row(row.name, row.dtype, *cells, error, "" if row.ok else row.status)
    return table


def caption_of(result: dict[str, Any]) -> str:
    """How it was measured, for under the tables."""
    settings, bandwidth = result["settings"], result["bandwidth"]
    shape = settings["shape"]
    wrong = sum(row.wrong for row in result["rows"])
    lines = [
        f"{one_line(result['environment'])}, kernels {result['environment']['kernels']}, {result['time']}.",
        f"attention: batch {shape['batch']}, {shape['query_heads']} query and {shape['kv_heads']} kv heads of "
        f"{shape['head_dim']}; random values; calls take turns on copies (up to {MOST_COPIES}) that no cache holds together.",
        f"times: medians of up to {settings['rounds']} rounds in which all take turns; ratios: medians over rounds.",
        "max error: against the definition in float64, before and after timing; the one that is largest relative to what fp32 "
        "arithmetic and the rounding of its dtype allow. For models: of the logits, relative to their size.",
        f"bandwidth: {bandwidth['best'] / 1e9:.2f} GB/s, the best of {bandwidth['passes']} passes of {bandwidth['threads']} "
        f"threads over {bandwidth['buffer'] / 2**20:.0f} MiB ({bandwidth['reader']}).",
        *(f"note: {note}" for note in result["notes"]),
        f"{result['seconds']:.0f} seconds in all.",
    ]
    if wrong:
        lines.append(
            f"{wrong} result{'s' * (wrong != 1)} not right: no speed is given for {'them' if wrong > 1 else 'it'}."
        )
    return "\n".join(lines)


def show(result: dict[str, Any], console: Console) -> None:
    """Print the tables and the caption."""
    for part in PARTS:
        rows = [row for row in result["rows"] if row.part == part]
        if rows:
            console.print()
            console.print(table_of(part, rows), markup=False)
    console.print()
    console.print(caption_of(result), markup=False, highlight=False, soft_wrap=True)
