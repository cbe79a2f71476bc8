"""The ``kvq`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import kvq_ops
from kvq_lab.bench_cli import add_parser as add_bench_parser
from kvq_lab.calibrate_cli import add_parser as add_calibrate_parser
from kvq_lab.eval_cli import add_parser as add_eval_parser
from kvq_ops.errors import FormatError, KVQError


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


_count.__name__ = "whole number from 1"  # argparse names the type in its message


def split_formats(text: str) -> tuple[str, ...]:
    """Formats from ``"a,b,key=c,value=d"``: a comma separates, except inside a key/value pair.

    Raises:
        FormatError: on an empty list; UnknownFormatError on a name that is not in the table.
    """
    found: list[str] = []
    for part in (piece.strip() for piece in text.split(",")):
        if not part:
            continue
        previous = found[-1] if found else ""
        if "=" in part and previous.count("=") == 1:
            found[-1] = f"{previous},{part}"
        else:
            found.append(part)
    if not found:
        raise FormatError("formats to compare", got=repr(text), allowed=", ".join(kvq_ops.formats.kv_names()))
    return tuple(dict.fromkeys(str(kvq_ops.parse_kv_format(name)) for name in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvq", description="Quantized KV caches for any PyTorch model.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"kvq {kvq_ops.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="measure every cache format on a real model and print one table",
        description="Load SmolLM2-135M-Instruct, compile it with backend='kvq', generate text, and compare "
        "cache bytes, quality and decode speed of every format with the unquantized model. "
        "Takes some minutes on two cores.",
        epilog="formats: " + ", ".join(kvq_ops.formats.kv_names()) + "; or key=NAME,value=NAME",
    )
    demo.add_argument("--formats", metavar="A,B", help="only these formats (default: all of them)")
    demo.add_argument(
        "--tokens", type=_count, default=2048, metavar="N", help="tokens to score (default: %(default)s)"
    )
    demo.add_argument(
        "--minutes",
        type=float,
        default=10.0,
        metavar="M",
        help="on a slow machine score fewer tokens and time fewer formats to stay within this "
        "(default: %(default)g)",
    )
    demo.add_argument("--json", type=_new_file, metavar="FILE", help="also write the numbers as JSON")
    demo.set_defaults(run=_demo)

    formats = commands.add_parser(
        "formats",
        help="print the formats as a Markdown table",
        description="Print every listed format with its stored bits, as a Markdown table.",
    )
    formats.add_argument(
        "--head-dim", type=_count, default=128, metavar="D", help="channels of a head (default: %(default)s)"
    )
    formats.set_defaults(run=_formats)

    build = commands.add_parser(
        "build",
        help="compile the C++ kernels for this processor ahead of their first use",
        description="Compile the C++ kernels for this processor with the system's compiler ($CXX, c++, g++ or clang++) and "
        "print where they lie. Without this they are compiled at first use, in some seconds.",
    )
    build.set_defaults(run=_build)

    models = commands.add_parser(
        "models",
        help="run small models of many families through both doors and print a Markdown table",
        description="Build two-layer models of transformers' families with random weights, run them through "
        "torch.compile and torch.export, and print what was rewritten, what was left and why.",
    )
    models.add_argument("--family", action="append", metavar="NAME", help="only this family; may be repeated")
    models.add_argument(
        "--lower",
        choices=("inductor", "eager"),
        default="inductor",
        help="how compiled rows run: eager executes the rewritten graph without Inductor (default: inductor)",
    )
    models.add_argument("--json", type=_new_file, metavar="FILE", help="also write the rows as JSON")
    models.set_defaults(run=_models)

    add_eval_parser(commands, _count, _new_file)
    add_calibrate_parser(commands, _count, _new_file)
    add_bench_parser(commands)
    return parser


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in an existing folder")
    return path


def _demo(arguments: argparse.Namespace) -> None:
    # Formats are checked before the slow imports, so that a typo answers at once.
    from kvq_lab.assets import no_hub

    names = arguments.formats if arguments.formats is not None else ",".join(kvq_ops.formats.kv_names())
    formats = split_formats(names)
    no_hub()
    from kvq_lab import demo

    settings = demo.Settings(formats=formats, tokens=arguments.tokens, minutes=arguments.minutes)
    demo.run(settings, arguments.json)


def _formats(arguments: argparse.Namespace) -> None:
    print(f"| format | bits a value at head_dim {arguments.head_dim} | stored |")
    print("|---|---|---|")
    for name in kvq_ops.formats.kv_names():
        pair = kvq_ops.parse_kv_format(name)
        rows = [pair.key] if pair.key == pair.value else [pair.key, pair.value]
        bits = sum(row.bits_per_value(arguments.head_dim) for row in rows) / len(rows)
        stored = rows[0].summary if len(rows) == 1 else f"keys: {rows[0].summary}; values: {rows[1].summary}"
        print(f"| `{name}` | {'as the model' if pair.key.lossless else f'{bits:.2f}'} | {stored} |")


def _build(arguments: argparse.Namespace) -> None:
    from kvq_ops.cpu.build import build

    print(build(verbose=True))


def _models(arguments: argparse.Namespace) -> None:
    from kvq_lab import family_runs

    options = [option for name in arguments.family or () for option in ("--family", name)]
    if arguments.json is not None:
        options += ["--json", str(arguments.json)]
    if family_runs.main([*options, "--lower", arguments.lower]):
        raise SystemExit(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 for what was asked wrongly, 1 for other errors."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except KVQError as error:
        print(f"kvq: {error}", file=sys.stderr)
        return 2 if isinstance(error, FormatError) else 1
    except KeyboardInterrupt:
        print("kvq: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
