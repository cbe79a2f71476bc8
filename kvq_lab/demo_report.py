"""What a person sees of ``kvq demo``: answers, one table, how its columns were measured, and the report of the pass."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

import kvq_ops
from kvq_lab.decode_steps import UNQUANTIZED
from kvq_lab.environment import one_line


def size_text(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def change_text(row: dict[str, Any]) -> str:
    return f"{100 * row['perplexity_change']:+.2f} ± {100 * row['perplexity_change_stderr']:.2f}"


def _speed(row: dict[str, Any]) -> str:
    if row["decode_speed"] is None:
        return "not timed"
    if row["format"] == UNQUANTIZED:
        return f"{row['decode_tokens_per_second']:.1f} tok/s"
    return f"{row['decode_speed']:.2f}x"


def table_of(result: dict[str, Any]) -> Table:
    """The table, one row for each cache."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("cache", no_wrap=True)
    for heading in (
        "bytes",
        "ratio",
        "ppl",
        "change, %",
        "KL",
        "attention\nerror, %",
        "top-1\nsame, %",
        "decode\nspeed",
        "sites\nrewritten",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        plain = row["format"] == UNQUANTIZED
        table.add_row(
            row["format"],
            size_text(row["cache_bytes"]),
            f"{row['ratio']:.2f}x",
            f"{row['perplexity']:.3f}",
            "" if plain else change_text(row),
            "" if plain else f"{row['kl']:.5f}",
            "" if plain else f"{100 * row['attention_error']:.2f}",
            "" if plain else f"{100 * row['top1_agreement']:.1f}",
            _speed(row),
            "" if row["sites_found"] is None else f"{row['sites_rewritten']}/{row['sites_found']}",
        )
    return table


def caption_of(result: dict[str, Any]) -> str:
    """How each column was measured, for under the table."""
    settings = result["settings"]
    scored = result["scored_tokens"]
    filled = settings["context"] + scored
    short = "" if scored == settings["tokens"] else f" (of {settings['tokens']}: time ran short)"
    codebooks = any(
        row["format"] != UNQUANTIZED and kvq_ops.parse_kv_format(row["format"]).needs_calibration
        for row in result["rows"]
    )
    untimed = [row["format"] for row in result["rows"] if row["decode_speed"] is None]
    return "\n".join(
        (
            f"{result['model']} in {result['dtype']}; {one_line(result['environment'])}.",
            f"bytes, ratio: every storage behind the cache, allocated for {settings['capacity']} tokens; "
            f"the unquantized cache is {result['dtype']} like the model.",
            f"ppl, change ± standard error, KL, top-1: {scored} tokens{short} of {result['text']} after "
            f"{settings['context']} of context, {settings['chunk']} at a time through the cache, in eager mode; "
            "all against the unquantized model.",
            "attention error: relative L2 error of attention's output from exact inputs, mean over "
            f"sites, first {settings['inspected']} tokens.",
            *(
                [f"codebooks are fitted to {settings['calibrated']} tokens that are not scored."]
                if codebooks
                else []
            ),
            f"decode speed: one compiled step at about {filled} tokens against the unquantized model under "
            f"torch.compile; median of {settings['rounds']} interleaved rounds.",
            "sites rewritten: attention calls of the compiled decode step that read the cache's codes.",
            *(
                [
                    f"not timed: {len(untimed)} format{'s' * (len(untimed) != 1)} whose turn to be compiled came too late for "
                    f"{settings['minutes']:g} minutes; --minutes gives more."
                ]
                if untimed
                else []
            ),
        )
    )


def show(result: dict[str, Any], console: Console) -> None:
    """Print answers, table, caption and the pass's report."""

    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"\nPrompt: {result['prompt']}")
    for answer in result["answers"]:
        say(f"\n{answer['format']}:\n  {answer['text']}")
    say()
    console.print(table_of(result))
    say()
    say(caption_of(result))
    say(f"\nThe pass on {result['report_format']}:\n{result['report_text']}")
    say(f"\n{result['seconds']:.0f} seconds in all.")
