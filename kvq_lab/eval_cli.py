"""Arguments of ``kvq eval``, and running it. What was typed is checked before anything slow is loaded."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvq_ops
from kvq_lab.eval_specs import parse_specs
from kvq_ops.errors import FormatError

_EPILOG = """\
models:  smollm2 (the default weights), smollm2-outliers (the same function with outlier channels in its keys: the hard
         case), gemma3 (needs its weights packages), or a local Hugging Face folder
formats: {formats};
         modifiers +recentR +sinkS +hadamard +outlierP%; key=NAME,value=NAME; or a policy as --suggest prints it, in
         JSON or a file that ends in .json. Repeat the option for more.
peers:   quanto4, quanto2 (each also -per-channel), hqq8, hqq4, hqq2, hqq4-axis0, through transformers; they need
         pip install 'kvq-ops[peers]'

examples:
  kvq eval smollm2 --format kivi4 --format key=int8_per_token_head,value=int4_group32 --html report.html
  kvq eval smollm2 --format kivi4+recent128 --peer quanto4 --chunk 64 --tokens 2048 --no-needle --no-speed
  kvq eval smollm2 --suggest --budget 4.5bits
"""


def _numbers(
    kind: Callable[[str], Any], fits: Callable[[Any], bool], what: str
) -> Callable[[str], tuple[Any, ...]]:
    def read(text: str) -> tuple[Any, ...]:
        values = tuple(kind(part) for part in text.split(","))
        if not values or not all(fits(value) for value in values):
            raise ValueError(text)
        return values

    read.__name__ = what  # argparse names the type in its message
    return read


def _bits(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:bits?)?\s*", text)
    if not match or float(match[1]) <= 0:
        raise ValueError(text)
    return float(match[1])


_bits.__name__ = "number of bits such as 4.5bits"


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


_positive.__name__ = "number above 0"


def add_parser(commands: Any, count: Callable[[str], int], new_file: Callable[[str], Path]) -> None:
    """Add ``eval`` to the commands.

    Args:
        count: type of whole numbers from 1.
        new_file: type of files to write.
    """
    parser = commands.add_parser(
        "eval",
        help="measure what caches cost and save on a model, or find a policy for a budget",
        description="Compare caches on the same model, prompts and lengths: perplexity, KL and top-1 agreement streamed through "
        "the real cache, errors of each layer by source, needle retrieval, bytes by kind, decode speed.",
        epilog=_EPILOG.format(formats=", ".join(kvq_ops.formats.kv_names())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="smollm2, smollm2-outliers, gemma3, or a local folder")
    parser.add_argument(
        "--format",
        action="append",
        metavar="F",
        help="a cache to measure; may be repeated (default: all listed)",
    )
    parser.add_argument(
        "--peer", action="append", metavar="P", default=[], help="another project's cache; may be repeated"
    )
    parser.add_argument(
        "--tokens",
        type=count,
        default=512,
        metavar="N",
        help="tokens to score, over all windows (default: %(default)s)",
    )
    parser.add_argument(
        "--context",
        type=count,
        default=1536,
        metavar="N",
        help="tokens before them in each window (default: %(default)s)",
    )
    parser.add_argument(
        "--windows",
        type=count,
        default=4,
        metavar="N",
        help="stretches of text, run as one batch (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk",
        type=count,
        default=1,
        metavar="N",
        help="scored tokens that run through a cache at a time (default: 1, token by token)",
    )
    parser.add_argument(
        "--own-prefill",
        action="store_true",
        help="let each cache take the context through its own codes, instead of handing all the same exact one",
    )
    for part, what in (
        ("errors", "errors of layers"),
        ("needle", "needle retrieval"),
        ("speed", "decode speed"),
    ):
        parser.add_argument(f"--no-{part}", action="store_true", help=f"leave out {what}")
    parser.add_argument(
        "--needle-lengths",
        type=_numbers(int, lambda n: n >= 64, "list of whole numbers from 64"),
        default=(1024,),
        metavar="N,N",
        help="tokens of haystack, up to the model's context (default: 1024)",
    )
    parser.add_argument(
        "--needle-depths",
        type=_numbers(float, lambda d: 0 <= d <= 1, "list of numbers from 0 to 1"),
        default=(0.1, 0.5, 0.9),
        metavar="D,D",
        help="where in it the needle lies (default: 0.1,0.5,0.9)",
    )
    parser.add_argument(
        "--needle-trials",
        type=count,
        default=2,
        metavar="N",
        help="needles for each length and depth (default: %(default)s)",
    )
    parser.add_argument("--json", type=new_file, metavar="FILE", help="also write the numbers as JSON")
    parser.add_argument(
        "--html", type=new_file, metavar="FILE", help="also write one self-contained page with plots"
    )
    parser.add_argument("--markdown", type=new_file, metavar="FILE", help="also write the table in Markdown")
    parser.add_argument(
        "--suggest",
        action="store_true",
        help="measure each layer's sensitivity and print the best policy under --budget or --max-kl; "
        "--format then names the candidates",
    )
    parser.add_argument(
        "--budget", type=_bits, metavar="BITS", help="with --suggest: bits a cached value, as 4.5bits"
    )
    parser.add_argument(
        "--max-kl", type=_positive, metavar="KL", help="with --suggest: largest KL, in nats a token"
    )
    parser.set_defaults(run=run)


def settings_of(arguments: argparse.Namespace) -> Any:
    """:class:`kvq_lab.eval_run.Settings` from what was typed.

    Raises:
        FormatError: on unknown models, formats and peers, and options that do not go together.
        PeerError: when a peer's package is missing.
    """
    specs = parse_specs(arguments.format)
    _check_options(arguments)
    from kvq_lab.assets import no_hub

    no_hub()
    from kvq_lab.eval_models import check_model

    check_model(arguments.model)
    from kvq_lab.eval_peers import check_peer
    from kvq_lab.eval_run import Settings

    for name in arguments.peer:
        check_peer(name)
    return Settings(
        model=arguments.model,
        specs=specs,
        named=arguments.format is not None,
        peers=tuple(dict.fromkeys(arguments.peer)),
        tokens=arguments.tokens,
        context=arguments.context,
        windows=arguments.windows,
        chunk=arguments.chunk,
        own_prefill=arguments.own_prefill,
        errors=not arguments.no_errors,
        needle=not arguments.no_needle,
        speed=not arguments.no_speed,
        needle_lengths=arguments.needle_lengths,
        needle_depths=arguments.needle_depths,
        needle_trials=arguments.needle_trials,
    )


def _check_options(arguments: argparse.Namespace) -> None:
    limits = [name for name in ("budget", "max_kl") if getattr(arguments, name) is not None]
    if arguments.suggest and len(limits) != 1:
        raise FormatError(
            "kvq eval --suggest",
            got="both --budget and --max-kl" if limits else "neither --budget nor --max-kl",
            allowed="one of them, such as --budget 4.5bits or --max-kl 0.01",
        )
    if limits and not arguments.suggest:
        raise FormatError(
            f"kvq eval --{limits[0].replace('_', '-')}",
            got="no --suggest",
            allowed="this option together with --suggest",
            do="add --suggest",
        )


def run(arguments: argparse.Namespace) -> None:
    """The command: measure with progress on stderr, print on stdout, write files if asked."""
    settings = settings_of(arguments)
    from rich.console import Console

    from kvq_lab import eval_report
    from kvq_lab.demo import write_json
    from kvq_lab.progress import Stages

    if arguments.suggest:
        from kvq_lab.eval_suggest import Goal, suggest

        result = suggest(settings, Goal(arguments.budget, arguments.max_kl), Stages())
    else:
        from kvq_lab.eval_run import measure

        result = measure(settings, Stages())
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # a log has no edge to wrap at
    eval_report.show(result, console)
    written = []
    if arguments.json:
        write_json(result, arguments.json)
        written.append(arguments.json)
    if arguments.html:
        from kvq_lab.eval_html import write_html

        write_html(result, arguments.html)
        written.append(arguments.html)
    if arguments.markdown:
        arguments.markdown.write_text(eval_report.markdown_of(result) + "\n", encoding="utf-8")
        written.append(arguments.markdown)
    for path in written:
        console.print(f"Written to {path}", markup=False, highlight=False, soft_wrap=True)
