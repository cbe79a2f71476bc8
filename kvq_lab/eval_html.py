"""One self-contained HTML page of ``kvq eval``: table, plots and advice, with nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvq_lab.decode_steps import UNQUANTIZED
from kvq_lab.eval_caches import KINDS
from kvq_lab.eval_report import _columns, caption_of, mean_error

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: #1b1f24; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.9rem; display: block; overflow-x: auto; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #d8dee4; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace; }
img { max-width: 100%; } pre { background: #f6f8fa; padding: 0.8rem; overflow-x: auto; font-size: 0.85rem; }
p.note { color: #57606a; font-size: 0.9rem; }
"""

_SOURCES = ("scale", "rounding", "accumulation")


def _picture(draw: Callable[[Any], None], size: tuple[float, float], what: str) -> str:
    """An ``<img>`` with the plot inside of it."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    stream = io.BytesIO()
    FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img alt="{html.escape(what)}" src="data:image/svg+xml;base64,{data}">'


def frontier(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of (bits, cost) that nothing with as few bits or fewer undercuts, by ascending bits."""
    best: list[tuple[float, float]] = []
    for bits, cost in sorted(points):
        if not best or cost < best[-1][1]:
            best.append((bits, cost))
    return best


def _frontier(result: dict[str, Any]) -> str:
    rows = [row for row in result["rows"] if row["format"] != UNQUANTIZED]

    def draw(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for axes, value, label in (
            (left, lambda row: 1 + row["perplexity_change"], "perplexity, times the unquantized"),
            (right, lambda row: max(row["kl"], 1e-7), "KL, nats a token"),
        ):
            for peer, colour, name in ((False, "#0969da", "this project"), (True, "#bc4c00", "peers")):
                mine = [row for row in rows if row["peer"] == peer]
                if mine:
                    axes.scatter(
                        [r["bits_per_value"] for r in mine], [value(r) for r in mine], c=colour, label=name
                    )
            line = frontier([(row["bits_per_value"], value(row)) for row in rows])
            axes.step(*zip(*line, strict=True), where="post", color="#8c959f", linewidth=1, zorder=0)
            for row in rows:
                axes.annotate(
                    row["format"],
                    (row["bits_per_value"], value(row)),
                    fontsize=6,
                    xytext=(3, 3),
                    textcoords="offset points",
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xlabel("stored bits a value")
            axes.set_ylabel(label)
            axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)

    return _picture(draw, (12, 5), "frontier of perplexity and KL against bits per value")


def _bytes(result: dict[str, Any]) -> str:
    rows = [row for row in result["rows"] if row["format"] != UNQUANTIZED]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        left = [0.0] * len(rows)
        for kind in KINDS:
            widths = [row["bits_per_value"] * row["bytes"][kind] / row["cache_bytes"] for row in rows]
            if any(widths):
                axes.barh(range(len(rows)), widths, left=left, label=kind)
                left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(rows)), [row["format"] for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("stored bits a value")
        axes.legend(fontsize=7)

    return _picture(draw, (10, 0.6 + 0.26 * len(rows)), "bytes by kind")


def _heads(result: dict[str, Any]) -> str:
    """Error of attention's output by layer and head, a panel for each cache."""
    rows = [row for row in result["rows"] if row.get("layers")]

    def draw(figure: Any) -> None:
        from matplotlib.colors import LogNorm

        columns = min(4, len(rows))
        lines = -(-len(rows) // columns)
        panels = figure.subplots(lines, columns, squeeze=False).flatten()
        norm = LogNorm(1e-4, 2.0)
        image = None
        for panel in panels[len(rows) :]:
            panel.set_axis_off()
        for panel, row in zip(panels, rows, strict=False):
            errors = [layer["attention"]["heads"] for layer in row["layers"]]
            width = max(map(len, errors))
            grid = [
                [*(max(e, 1e-7) for e in heads), *[float("nan")] * (width - len(heads))] for heads in errors
            ]
            image = panel.imshow(grid, aspect="auto", norm=norm, cmap="magma", interpolation="nearest")
            panel.set_title(row["format"], fontsize=7)
            panel.set_xlabel("query head", fontsize=6)
            panel.set_ylabel("layer", fontsize=6)
            panel.tick_params(labelsize=6)
        if image is not None:
            figure.colorbar(image, ax=list(panels), label="relative error", shrink=0.8)

    lines = -(-len(rows) // 4)
    return _picture(draw, (12, 0.6 + 2.8 * lines), "attention error by layer and head")


def _layers(result: dict[str, Any]) -> str:
    """Error of keys, values and attention by layer, a line for each cache."""
    rows = [row for row in result["rows"] if row.get("layers")]

    def draw(figure: Any) -> None:
        panels = figure.subplots(1, 3)
        for panel, side in zip(panels, ("key", "value", "attention"), strict=True):
            for row in rows:
                errors = [layer[side]["total"] for layer in row["layers"]]
                if any(errors):
                    panel.plot(errors, label=row["format"], linewidth=1)
            panel.set_yscale("log")
            panel.set_title(f"{side} error by layer", fontsize=9)
            panel.set_xlabel("layer")
            panel.grid(alpha=0.3)
        panels[-1].legend(fontsize=5, loc="upper left", bbox_to_anchor=(1, 1))

    return _picture(draw, (13, 4.2), "errors by layer")


def _channels(result: dict[str, Any]) -> str:
    """How far each channel of the keys stands out, by layer and kv head."""
    ratios = result["outliers"]["ratios"]
    grid = [head for layer in ratios for head in layer]

    def draw(figure: Any) -> None:
        from matplotlib.colors import LogNorm

        axes = figure.subplots()
        width = max(map(len, grid))
        padded = [[*(max(x, 0.01) for x in head), *[float("nan")] * (width - len(head))] for head in grid]
        image = axes.imshow(
            padded, aspect="auto", norm=LogNorm(0.1, 100), cmap="RdYlBu_r", interpolation="nearest"
        )
        heads = len(ratios[0])
        step = max(1, len(ratios) // 15)
        axes.set_yticks(
            [i * heads for i in range(0, len(ratios), step)], range(0, len(ratios), step), fontsize=7
        )
        axes.set_ylabel(f"layer ({heads} kv head(s) each)")
        axes.set_xlabel("channel")
        figure.colorbar(image, label="rms, times the median channel of the head")

    return _picture(draw, (12, 5), "outlier channels of the keys")


def _sensitivity(result: dict[str, Any]) -> str:
    found = result["suggestion"]["sensitivity"]
    kinds = list(dict.fromkeys((entry["side"], entry["format"]) for entry in found))
    layers = 1 + max(entry["layer"] for entry in found)

    def draw(figure: Any) -> None:
        from matplotlib.colors import LogNorm

        axes = figure.subplots()
        known = {(e["side"], e["format"], e["layer"]): max(e["kl"], 1e-7) for e in found}
        grid = [[known.get((*kind, layer), float("nan")) for layer in range(layers)] for kind in kinds]
        image = axes.imshow(grid, aspect="auto", norm=LogNorm(), cmap="magma", interpolation="nearest")
        axes.set_yticks(range(len(kinds)), [f"{side}: {name}" for side, name in kinds], fontsize=7)
        axes.set_xlabel("layer")
        figure.colorbar(image, label="KL when only this is quantized")

    return _picture(draw, (12, 1.2 + 0.3 * len(kinds)), "sensitivity of each layer")


def _table(headings: list[str], rows: Iterator[list[str]]) -> str:
    def line(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f"<table>\n{line(headings, 'th')}\n{body}\n</table>"


def _main_table(result: dict[str, Any]) -> str:
    columns = _columns(result)
    headings = ["cache", *(heading.replace("\n", " ") for heading, _ in columns)]
    return _table(headings, ([row["format"], *(text(row) for _, text in columns)] for row in result["rows"]))


def _source_table(result: dict[str, Any]) -> str:
    def percent(row: dict[str, Any], side: str, source: str) -> str:
        error = mean_error(row, side, source)
        return "not apart" if error is None else f"{100 * error:.4g}"

    measured = [row for row in result["rows"] if row.get("layers")]
    kinds = [(side, s) for side in ("key", "value") for s in _SOURCES[:2]] + [
        ("attention", s) for s in _SOURCES
    ]
    return _table(
        ["cache", *(f"{side}: {source}" for side, source in kinds)],
        ([row["format"], *(percent(row, *kind) for kind in kinds)] for row in measured),
    )


def _needle_table(result: dict[str, Any]) -> str:
    cells = [(t["length"], t["depth"]) for t in result["rows"][0]["needle"]]
    return _table(
        ["cache", *(f"{length} tokens, depth {depth:g}" for length, depth in cells)],
        (
            [row["format"], *(f"{t['found']}/{t['trials']}" for t in row["needle"])]
            for row in result["rows"]
            if row.get("needle")
        ),
    )


def page(result: dict[str, Any]) -> str:
    """The whole page."""
    parts = [f"<h1>KV caches of {html.escape(result['model']['title'])}</h1>", _main_table(result)]
    parts += [f'<p class="note">{html.escape(line)}</p>' for line in caption_of(result).splitlines()]
    if result.get("advice"):
        parts += ["<h2>Which formats fit</h2>", "<pre>" + html.escape("\n".join(result["advice"])) + "</pre>"]
    if len(result["rows"]) > 1:
        parts += [
            "<h2>Quality against bits</h2>",
            _frontier(result),
            "<h2>Bytes by kind</h2>",
            _bytes(result),
        ]
    if any(row.get("layers") for row in result["rows"]):
        parts += [
            "<h2>Outlier channels of the keys</h2>",
            _channels(result),
            "<h2>Error by layer and head</h2>",
            _heads(result),
            _layers(result),
            "<h2>Error by source, %, mean over layers</h2>",
            _source_table(result),
            '<p class="note">scale: what would remain if codes were real numbers under the stored scales; rounding: what '
            "the codes add; accumulation: the operator's fp32 arithmetic against float64 on the same decoded numbers.</p>",
        ]
    if result["rows"][0].get("needle"):
        parts += ["<h2>Needles found</h2>", _needle_table(result)]
    if result.get("suggestion"):
        parts += ["<h2>Sensitivity</h2>", _sensitivity(result)]
    title = html.escape(f"kvq eval {result['model']['name']}")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def write_html(result: dict[str, Any], path: Path) -> None:
    """Write the page so that the file is complete or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page(result), encoding="utf-8")
    partial.replace(path)
