"""The plot of ``kvq bench``: ratio to bf16 SDPA, fraction of bandwidth, and decode of the model, over tokens in the cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvq_lab.bench_rows import Row
from kvq_ops.errors import FormatError

# Peers are grey, so that colour always means one of our formats.
_GREY = "0.55"
_PEERS = ("torch SDPA", "torch.compile", "transformers, eager", "llama.cpp", "torchao")
_STYLES = ("-", "--", "-.", ":")
_MARKERS = "os^vD<>P*X"

PLOTTED = ("decode", "model")

Value = Callable[[Row], float | None]


def label(row: Row) -> str:
    """Name of the contender with its dtype."""
    return row.name if row.dtype in row.name else f"{row.name}, {row.dtype}"


def curves(rows: Iterable[Row], part: str, value: Value) -> dict[str, list[tuple[int, float]]]:
    """By contender, ``(tokens, value)`` in order of tokens, where a row is right and has the value.

    Several values for the same tokens, as of several runs in one file, become their median.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        got = value(row)
        if row.part == part and row.ok and row.tokens is not None and got is not None:
            found.setdefault(label(row), {}).setdefault(row.tokens, []).append(got)
    return {
        name: sorted((tokens, statistics.median(values)) for tokens, values in points.items())
        for name, points in found.items()
    }


def _fastest_of_each(rows: Sequence[Row]) -> list[Row]:
    """Of a format's implementations the one that is fastest; every line of a slow one would hide those that matter."""
    best: dict[tuple[Any, ...], Row] = {}
    others = []
    for row in rows:
        if row.part != "decode" or not row.format or row.implementation == "torchao":
            others.append(row)
        elif row.ok and row.seconds:
            key = (row.format, row.dtype, row.tokens)
            if key not in best or row.seconds < (best[key].seconds or 0.0):
                best[key] = row
    return [*others, *best.values()]


def plot(rows: Sequence[Row], path: Path, caption: str = "") -> None:
    """Write the plot in the format that the file's ending names.

    Raises:
        FormatError: matplotlib does not write such files, or there is nothing to plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = _fastest_of_each(rows)
    panels: list[tuple[str, str, float | None, dict[str, list[tuple[int, float]]]]] = [
        ("decode attention", "times as fast as bf16 SDPA", 1.0, curves(rows, "decode", lambda r: r.ratio)),
        (
            "decode attention",
            "fraction of read bandwidth",
            None,
            curves(rows, "decode", lambda r: r.bandwidth_fraction),
        ),
        (
            "decode of the model",
            "times as fast as compiled, bf16",
            1.0,
            curves(rows, "model", lambda r: r.ratio),
        ),
    ]
    panels = [panel for panel in panels if panel[3]]
    if not panels:
        raise FormatError(
            f"plotting {path}",
            got="no decode that is right and timed",
            do="measure the parts decode or model",
        )
    styles = _styles(rows)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(9.0 * len(panels), 6.5), squeeze=False, constrained_layout=True
    )
    for axis, (title, label, line, lines) in zip(axes[0], panels, strict=True):
        _panel(axis, lines, styles)
        axis.set(title=title, xlabel="tokens in the cache", ylabel=label)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}")
        if line is None:
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
            axis.axhline(line, color="black", linewidth=0.8)
        axis.grid(alpha=0.3)
    if caption:
        figure.suptitle(caption, fontsize=8)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except ValueError as error:
        raise FormatError(
            f"plotting {path}", got=str(error), allowed="a file that ends in .svg, .png or .pdf"
        ) from error
    finally:
        pyplot.close(figure)


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """How each contender is drawn, the same in every panel."""
    from matplotlib import colormaps

    colours = [colormaps["tab10"](at) for at in range(10) if at != 7]  # that one is grey
    ours = {label(row): row.implementation not in _PEERS for row in rows}
    seen = {True: 0, False: 0}
    found = {}
    for name, own in ours.items():
        at = seen[own]
        seen[own] += 1
        round_ = at // len(colours) if own else at // len(_MARKERS)
        found[name] = {
            "color": colours[at % len(colours)] if own else _GREY,
            "linestyle": _STYLES[round_ % len(_STYLES)],
            "marker": _MARKERS[at % len(_MARKERS)],
        }
    return found


def _panel(axis: Any, lines: dict[str, list[tuple[int, float]]], styles: dict[str, dict[str, Any]]) -> None:
    # The legend lists lines as they end, from top to bottom.
    for name in sorted(lines, key=lambda name: -lines[name][-1][1]):
        tokens, values = zip(*lines[name], strict=True)
        axis.plot(tokens, values, markersize=4, linewidth=1.4, label=name, **styles[name])
    axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
