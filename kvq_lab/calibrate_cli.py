"""``kvq calibrate``: fit scales and codebooks to what a model caches while it reads text, and keep them in a file."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kvq_ops
from kvq_ops.errors import FormatError


def add_parser(commands: Any, count: Callable[[str], int], new_file: Callable[[str], Path]) -> None:
    """Add the command to an argparse group of commands.

    Args:
        count, new_file: argument types, a number from 1 and a file that can be written.
    """
    parser = commands.add_parser(
        "calibrate",
        help="fit scales and codebooks of a format to a model, for calibration=",
        description="Let a model read sample text and fit what a format needs before it is used: codebooks (nuq4, nuq3, nuq2) "
        "and scales that span tokens (fp8_e4m3, fp8_per_head, nvfp4, ...).",
        epilog="The file is read by kvq_ops.calibration.Calibration.load. Text that is scored later should not be sample text.",
    )
    parser.add_argument("model", metavar="MODEL", help="smollm2, gemma3, or a local Hugging Face folder")
    parser.add_argument("--format", required=True, metavar="F", help="one name, or key=NAME,value=NAME")
    parser.add_argument("--out", required=True, type=new_file, metavar="FILE", help="where to write")
    parser.add_argument("--rows", type=count, default=4, metavar="N", help="stretches of text (default: 4)")
    parser.add_argument(
        "--length", type=count, default=512, metavar="N", help="tokens of each (default: 512)"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    pair = kvq_ops.parse_kv_format(arguments.format)
    if not pair.calibratable:
        raise FormatError(
            f"kvq calibrate --format {arguments.format}",
            got="a format that computes its scales from each token",
            allowed="formats with codebooks or scales that span tokens",
            do="use it as it is: nothing has to be fitted",
        )
    from kvq_lab import eval_models
    from kvq_lab.assets import no_hub
    from kvq_lab.progress import Stages

    no_hub()
    eval_models.check_model(arguments.model)
    from kvq_lab.calibrate import calibrate

    stages = Stages()
    with stages.stage(f"Loading {arguments.model}", 1) as advance:
        subject = eval_models.load(arguments.model)
        advance(1)
    text, ids = eval_models.calibration_ids(subject, rows=arguments.rows, length=arguments.length)
    layers = subject.model.config.get_text_config(decoder=True).num_hidden_layers
    with stages.stage(f"Fitting {pair} to {ids.numel()} tokens of {text}", layers) as advance:
        calibration = calibrate(subject.model, ids, pair, on_layer=lambda _: advance(1))
    calibration.save(arguments.out)
    for note, number in Counter(calibration.notes.values()).items():
        print(f"{number} caches: {note}")
    print(f"Written to {arguments.out}")
