"""``kvq bench`` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvq_ops

DTYPES = ("float32", "float16", "bfloat16")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


_count.__name__ = "whole number from 1"  # argparse names the type in its message


def _several(one: Callable[[str], Any], name: str) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        found = tuple(dict.fromkeys(one(part.strip()) for part in text.split(",") if part.strip()))
        if not found:
            raise ValueError(text)
        return found

    parse.__name__ = name
    return parse


def _choice(allowed: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(allowed)}")
        return text

    return parse


def _output(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in an existing folder")
    return path


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``bench`` to the subcommands of ``kvq``; its ``run`` is :func:`run`."""
    from kvq_lab.bench_parts import CONTEXTS, LENGTHS, LLAMA_CACHES, MODEL_DTYPES, MODEL_FORMATS, PARTS

    def listed(values: tuple[Any, ...]) -> str:
        return ",".join(map(str, values))

    counts = _several(_count, "list of whole numbers from 1")
    dtypes = _several(_choice(DTYPES), "list of dtypes")
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        help="measure attention over the cache and decoding, next to what there is without it",
        description="Measure in one run, all taking turns: decode attention of every format by every implementation, prefill, "
        "append, cost against filled tokens, and decoding with a real model; next to PyTorch's attention, torchao's, "
        "transformers' quantized caches (pip install 'kvq-ops[peers]') and llama.cpp where they run. Every result is checked "
        "against float64 first; for one that is not right no speed is given, and the exit status is 1.",
        epilog="formats: " + ", ".join(kvq_ops.formats.kv_names()) + "; or key=NAME,value=NAME",
    )
    add = parser.add_argument
    add(
        "--parts",
        type=_several(_choice(PARTS), "list of parts"),
        default=PARTS,
        metavar="A,B",
        help=f"of {listed(PARTS)} (default: all)",
    )
    add("--formats", metavar="A,B", help="of attention (default: all of them)")
    add(
        "--implementations",
        type=_several(str, "list of names"),
        default=(),
        metavar="A,B",
        help="of decode attention (default: all that serve a format; plain torch takes most of the time)",
    )
    add("--batch", type=_count, default=1, metavar="N", help="default: %(default)s")
    add("--query-heads", type=_count, default=32, metavar="N", help="default: %(default)s")
    add("--kv-heads", type=_count, default=8, metavar="N", help="default: %(default)s")
    add("--head-dim", type=_count, default=128, metavar="N", help="default: %(default)s")
    add(
        "--lengths",
        type=counts,
        default=LENGTHS,
        metavar="N,N",
        help=f"tokens in the cache of decode attention (default: {listed(LENGTHS)})",
    )
    add("--dtypes", type=dtypes, default=("float32",), metavar="A,B", help="of queries (default: float32)")
    add(
        "--tokens",
        type=_count,
        default=16384,
        metavar="N",
        help="in the cache of prefill, append and linearity (default: %(default)s)",
    )
    add("--prefill", type=_count, default=2048, metavar="N", help="new tokens (default: %(default)s)")
    add(
        "--profile",
        action="store_true",
        help="instead: cycles of every stage of the C++ kernels' decode attention, for --formats at --tokens",
    )
    add("--threads", type=_count, metavar="N", help="default: as PyTorch chooses")
    add("--rounds", type=_count, default=21, metavar="N", help="default: %(default)s")
    add(
        "--budget",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds for the rounds of contenders that take turns; they then have fewer, but 3 (default: %(default)g)",
    )
    add(
        "--contexts",
        type=counts,
        default=CONTEXTS,
        metavar="N,N",
        help=f"tokens in the cache of the model (default: {listed(CONTEXTS)})",
    )
    add(
        "--model-formats",
        metavar="A,B",
        default=listed(MODEL_FORMATS),
        help="of the model's cache (default: %(default)s)",
    )
    add(
        "--model-dtypes",
        type=dtypes,
        default=MODEL_DTYPES,
        metavar="A,B",
        help=f"of the model (default: {listed(MODEL_DTYPES)})",
    )
    add(
        "--llama-bench",
        metavar="PATH",
        help="llama.cpp's llama-bench, to compare decoding with ($LLAMA_BENCH)",
    )
    add(
        "--llama-caches",
        type=_several(_choice(LLAMA_CACHES), "a type of llama.cpp's caches"),
        default=LLAMA_CACHES,
        metavar="A,B",
        help=f"types of llama.cpp's caches; each reads the whole context anew (default: {listed(LLAMA_CACHES)})",
    )
    add("--csv", type=_output, metavar="FILE", help="add the rows to this file, environment in each")
    add("--new", action="store_true", help="begin the CSV file anew")
    add("--json", type=_output, metavar="FILE", help="write everything as JSON")
    add("--plot", type=_output, metavar="FILE.svg", help="draw ratios and bandwidth over tokens")
    parser.set_defaults(run=run)
    return parser


def run(arguments: argparse.Namespace) -> None:
    """Measure with progress on stderr, print on stdout, write what was asked for.

    Raises:
        SystemExit: status 1, after all was written, if a result was not right.
        KeyboardInterrupt: after what there was until then was written.
        KVQError: on names that are no formats, shapes that fit no format, files that cannot be added to.
    """
    from kvq_lab.assets import no_hub
    from kvq_lab.cli import split_formats

    # What was typed is checked before anything slow.
    formats = split_formats(arguments.formats) if arguments.formats is not None else ()
    model_formats = split_formats(arguments.model_formats)
    no_hub()
    import torch
    from rich.console import Console

    from kvq_lab import bench, bench_llama, bench_show
    from kvq_lab.bench_attention import Shape
    from kvq_lab.bench_rows import bench_environment, check_csv, csv_columns, write_csv, write_json
    from kvq_lab.environment import one_line
    from kvq_lab.progress import Stages

    shape = Shape(arguments.batch, arguments.query_heads, arguments.kv_heads, arguments.head_dim)
    settings = bench.Settings(
        parts=arguments.parts,
        formats=formats,
        implementations=arguments.implementations,
        shape=shape,
        lengths=arguments.lengths,
        dtypes=tuple(getattr(torch, name) for name in arguments.dtypes),
        tokens=arguments.tokens,
        prefill=arguments.prefill,
        rounds=arguments.rounds,
        budget=arguments.budget,
        contexts=arguments.contexts,
        model_formats=model_formats,
        model_dtypes=tuple(getattr(torch, name) for name in arguments.model_dtypes),
        llama_bench=bench_llama.find(arguments.llama_bench),
        llama_caches=arguments.llama_caches,
    )
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    if arguments.csv is not None and not arguments.new:
        check_csv(arguments.csv, csv_columns(bench_environment(), ""))
    settings.check()
    if arguments.profile:
        from kvq_lab import bench_profile

        pairs = (
            settings.pairs if formats else [kvq_ops.parse_kv_format(name) for name in bench_profile.FORMATS]
        )
        print(bench_profile.show(bench_profile.profiles(pairs, shape, arguments.tokens), shape))
        return

    result = bench.measure(settings, Stages())
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no edge to wrap at
    bench_show.show(result, console)
    written = []
    if arguments.csv is not None:
        columns = csv_columns(result["environment"], result["time"])
        write_csv(result["rows"], columns, arguments.csv, new=arguments.new)
        written.append(arguments.csv)
    if arguments.json is not None:
        write_json(result, arguments.json)
        written.append(arguments.json)
    if arguments.plot is not None:
        from kvq_lab.bench_plot import PLOTTED, plot

        if any(row.ok and row.seconds and row.part in PLOTTED for row in result["rows"]):
            plot(result["rows"], arguments.plot, one_line(result["environment"]))
            written.append(arguments.plot)
        else:
            console.print(
                f"Nothing to plot: no result of {' or '.join(PLOTTED)} is right and timed", markup=False
            )
    for path in written:
        console.print(f"Written to {path}", markup=False, highlight=False, soft_wrap=True)
    if result["stopped"]:
        raise KeyboardInterrupt
    if any(row.wrong for row in result["rows"]):
        raise SystemExit(1)
