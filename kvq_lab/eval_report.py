"""The table of ``kvq eval``, its caption, and JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kvq_lab.decode_steps import UNQUANTIZED
from kvq_lab.demo_report import change_text, size_text
from kvq_lab.environment import one_line


def _columns(result: dict[str, Any]) -> list[tuple[str, Any]]:
    """(heading, text of a row) of every column that was measured."""
    settings = result["settings"]

    def unless_plain(text):
        return lambda row: "" if row["format"] == UNQUANTIZED else text(row)

    columns: list[tuple[str, Any]] = [
        ("bits a\nvalue", lambda row: f"{row['bits_per_value']:.2f}"),
        ("bytes", lambda row: size_text(row["cache_bytes"])),
        ("ppl", lambda row: f"{row['perplexity']:.3f}"),
        ("change, %", unless_plain(change_text)),
        ("KL", unless_plain(lambda row: f"{row['kl']:.5f}")),
        ("top-1\nsame, %", unless_plain(lambda row: f"{100 * row['top1_agreement']:.1f}")),
    ]
    if settings["errors"]:
        for side in ("key", "value", "attention"):
            columns.append((f"{side}\nerror, %", lambda row, side=side: _mean_error(row, side)))
    if settings["needle"]:
        columns.append(("needles\nfound", _needles))
    if settings["speed"]:
        columns.append(("decode\nspeed", _speed))
    return columns


def mean_error(row: dict[str, Any], side: str, source: str = "total") -> float | None:
    """Mean over layers of the relative error of keys, values or attention; ``None`` where it was not measured."""
    found = [layer[side][source] for layer in row.get("layers", ())]
    return None if not found or None in found else sum(found) / len(found)


def _mean_error(row: dict[str, Any], side: str) -> str:
    error = mean_error(row, side)
    return "" if error is None else f"{100 * error:.2f}"


def _needles(row: dict[str, Any]) -> str:
    trials = row.get("needle")
    if not trials:
        return ""
    return f"{sum(t['found'] for t in trials)}/{sum(t['trials'] for t in trials)}"


def _speed(row: dict[str, Any]) -> str:
    if row.get("decode_speed") is None:
        return ""
    if row["format"] == UNQUANTIZED:
        return f"{row['decode_tokens_per_second']:.1f} tok/s"
    return f"{row['decode_speed']:.2f}x" + ("" if row["decode_compiled"] else " *")


def table_of(result: dict[str, Any]) -> Table:
    """One row for each cache."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("cache", no_wrap=True)
    columns = _columns(result)
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(row["format"], *(text(row) for _, text in columns))
    return table


def markdown_of(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    columns = _columns(result)
    lines = ["| cache | " + " | ".join(heading.replace("\n", " ") for heading, _ in columns) + " |"]
    lines.append("|---|" + "---:|" * len(columns))
    lines += [
        f"| `{row['format']}` | " + " | ".join(text(row) for _, text in columns) + " |"
        for row in result["rows"]
    ]
    return "\n".join(lines)


def caption_of(result: dict[str, Any]) -> str:
    """How each column was measured, for under the table."""
    settings = result["settings"]
    scored = result["rows"][0]["tokens"]
    lines = [
        f"{result['model']['title']} in {result['dtype']}; {one_line(result['environment'])}.",
        *([f"{result['model']['note']}."] if result["model"]["note"] else []),
        f"ppl, change ± standard error, KL, top-1: {scored} tokens; {result['protocol']}; all against the unquantized cache. "
        f"Texts: {', '.join(result['texts'])}.",
        f"bits a value, bytes: every storage behind a cache filled with {settings['windows']} x "
        f"{settings['context'] + scored // settings['windows']} tokens, scales and exact tokens included; of peers the largest "
        "size during scoring.",
    ]
    if settings["errors"]:
        lines.append(
            f"errors: relative L2 error of keys, values and attention's output, mean over layers, each layer on exact inputs; "
            f"{result['outliers']['tokens']} tokens of {result['texts'][0]}."
        )
    if settings["needle"]:
        lines.append(
            f"needles: a secret number in {', '.join(map(str, settings['needle_lengths']))} tokens of a novel, at depths "
            f"{', '.join(f'{depth:g}' for depth in settings['needle_depths'])}, {settings['needle_trials']} of each; found "
            "means every digit right."
        )
    if settings["speed"]:
        lines.append(
            f"decode speed: one compiled step at {settings['context']} tokens against the unquantized model under torch.compile; "
            f"median of {settings['rounds']} interleaved rounds"
            + ("; * eager, against eager" if settings["peers"] else "")
            + "."
        )
    if result["calibration_text"]:
        fitted = "; ".join(f"{name}: {' and '.join(notes)}" for name, notes in result["calibrations"].items())
        lines.append(f"calibrated on {result['calibration_text']}, which is not scored ({fitted}).")
    lines += [f"left out: {row['format']}: {row['why']}." for row in result["left_out"]]
    return "\n".join(lines)


def show(result: dict[str, Any], console: Console) -> None:
    """Print table, caption, and what the keys' outlier channels mean for the choice."""

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say()
    console.print(table_of(result))
    say()
    say(caption_of(result))
    if advice := result.get("advice"):
        say()
        for line in advice:
            say(line)
    say(f"\n{result['seconds']:.0f} seconds in all.")
