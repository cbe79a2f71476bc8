"""``kvq demo``: SmolLM2 with each cache format, measured, in one table.

Quality is scored in eager mode and speed on compiled decode steps, both on the same caches: to
compile a scoring graph for each format as well would double the time and change no number that
means anything (in eager mode a handle's stored values are read by the model's own attention).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import kvq_ops
import passes
from kvq_lab import assets
from kvq_lab.calibrate import observe
from kvq_lab.decode_steps import UNQUANTIZED, Decoder, compiled_apart, room_for_recompiles
from kvq_lab.demo_report import show
from kvq_lab.environment import environment
from kvq_lab.evaluate import AttentionError, RoundTrip, interleaved, live_bytes, score
from kvq_lab.progress import Stages
from kvq_ops.calibration import Calibration
from kvq_ops.errors import ShapeError
from kvq_ops.formats import Format
from kvq_ops.handle import QuantizedKV
from kvq_ops.hf_shapes import cache_argument
from kvq_ops.policy import Policy

SCHEMA = "kvq.demo/1"
PROMPT = "Explain in two sentences why the sky is blue."
SHOWN = "int8_per_token_head"
# What remains to do after the last compilation: timed steps and answers.
RESERVED_SECONDS = 60.0
# The share of the time that may be over when scoring stops early.
SCORING_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the demo measures.

    Attributes:
        formats: cache formats, as :func:`kvq_ops.parse_kv_format` reads them.
        tokens: scored tokens.
        context: tokens that are prefilled before the scored ones.
        chunk: scored tokens run through the model this many at a time.
        rounds: timed decode steps of each variant; one more goes before, untimed.
        answer: the longest answer, in tokens.
        inspected: tokens over which attention's own error is measured.
        calibrated: tokens that codebooks are fitted to, from behind those that are scored.
        minutes: the time to keep within on a slow or busy machine. Scoring stops early after its share of
            it, after the same token for all, and a format is not compiled when that would end later; its
            row then has no speed and no count of sites. Both are said in the result.
    """

    formats: tuple[str, ...]
    tokens: int = 2048
    context: int = 512
    chunk: int = 64
    rounds: int = 12
    answer: int = 48
    inspected: int = 256
    calibrated: int = 512
    minutes: float = 10.0

    @property
    def capacity(self) -> int:
        """Tokens that each cache has room for: text, compiling step, timed steps."""
        steps = self.context + self.tokens + self.rounds + 2
        return 64 * math.ceil(steps / 64)

    @property
    def shown(self) -> str:
        """The format whose answer and report are shown."""
        return SHOWN if SHOWN in self.formats else self.formats[-1]


# -- the variants ------------------------------------------------------------------------------


@dataclasses.dataclass
class Variant:
    """One row of the table: how to make its cache, and the model compiled for it."""

    name: str
    new_cache: Callable[[], Any]
    compiled: Callable[..., Any]
    cache: Any = None


def make_variants(model: Any, settings: Settings, fitted: Mapping[str, Calibration | None]) -> list[Variant]:
    """The unquantized model under plain torch.compile, then each format under backend="kvq"."""
    from transformers import StaticCache

    from kvq_ops.hf import QuantizedCache

    config, room = model.config, settings.capacity
    variants = [
        Variant(
            UNQUANTIZED,
            functools.partial(StaticCache, config=config, max_cache_len=room),
            compiled_apart(model),
        )
    ]
    for name in settings.formats:
        variants.append(
            Variant(
                name,
                functools.partial(
                    QuantizedCache, config, name, max_cache_len=room, calibration=fitted.get(name)
                ),
                compiled_apart(model, backend="kvq"),
            )
        )
    return variants


def compile_order(variants: Sequence[Variant], settings: Settings) -> list[Variant]:
    """Unquantized and the shown format, then one format of each number system, then the others.

    So that what is missing where time runs out is what resembles something that was timed.
    """
    seen: Counter[str] = Counter()
    ranks = {}
    for variant in variants:
        if variant.name in (UNQUANTIZED, settings.shown):
            ranks[variant.name] = -1
        else:
            codec = kvq_ops.parse_kv_format(variant.name).key.codec
            ranks[variant.name] = seen[codec]
            seen[codec] += 1
    return sorted(variants, key=lambda variant: ranks[variant.name])


# What a row says of the compiled decode step, and leaves None where there was no time for it.
TIMED = (
    "compile_seconds",
    "graphs",
    "sites_found",
    "sites_rewritten",
    "decode_seconds",
    "decode_tokens_per_second",
    "decode_speed",
)


# -- the measurements --------------------------------------------------------------------------


def text_ids(tokenizer: Any, settings: Settings) -> tuple[str, torch.Tensor]:
    """(description of the text, ids [1, context + tokens + 1])."""
    name, text = assets.passage()
    wanted = settings.context + settings.tokens + 1
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :wanted]
    if ids.shape[1] < wanted:
        raise ShapeError(
            f"{settings.tokens} scored tokens after {settings.context} of context",
            got=f"a text of {ids.shape[1]} tokens ({name})",
            allowed=f"at most {max(ids.shape[1] - settings.context - 1, 0)} scored tokens",
            do=f"ask for fewer with --tokens, or name a longer text in {assets.TEXT_VARIABLE}",
        )
    return name, ids


def _round_trips(name: str, calibration: Calibration | None) -> tuple[RoundTrip, RoundTrip]:
    policy = Policy.of(name, calibration=calibration)

    def through(side: str, row: Format) -> RoundTrip:
        def trip(x: torch.Tensor, layer: int) -> torch.Tensor:
            static = policy.static(layer, side, row, x.shape)
            return QuantizedKV.from_dense(x, row, static=static).dequantize()

        return trip

    return through("key", policy.default.key), through("value", policy.default.value)


def attention_errors(
    model: Any, ids: torch.Tensor, formats: Mapping[str, Calibration | None]
) -> dict[str, float]:
    """Mean relative L2 error of attention's output over all sites, each on exact inputs."""
    trips = {name: _round_trips(name, calibration) for name, calibration in formats.items()}
    with AttentionError(trips) as measured, torch.no_grad():
        model(ids, use_cache=False)
    return {name: measured.relative_l2(name) for name in formats}


def calibrations(
    model: Any, tokenizer: Any, settings: Settings, advance: Callable[[int], None]
) -> dict[str, Calibration | None]:
    """What each format needs fitted beforehand, from text that is not scored."""
    wanting = [name for name in settings.formats if kvq_ops.parse_kv_format(name).needs_calibration]
    fitted: dict[str, Calibration | None] = dict.fromkeys(settings.formats)
    if wanting:
        ids = tokenizer(assets.passage()[1], return_tensors="pt").input_ids
        after = ids[:, settings.context + settings.tokens + 1 :][:, -settings.calibrated :]
        # Of a text that is not longer, the part that is not scored.
        sample = observe(model, after if after.shape[1] > settings.context else ids[:, : settings.context])
        for name in wanting:
            fitted[name] = sample.fit(name)
            advance(1)
    return fitted


def _graphs_compiled() -> int:
    """Graphs that Dynamo has handed to a backend so far in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def _answer(
    model: Any, tokenizer: Any, variant: Variant, argument: str, settings: Settings
) -> dict[str, Any]:
    """What the variant answers to the prompt: prefilled in eager mode, decoded compiled."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    cache = variant.new_cache()
    first = model(chat["input_ids"], **{argument: cache, "use_cache": True}).logits[:, -1:].argmax(-1)
    decode = Decoder(variant.compiled, argument, cache, first)
    tokens = [first]
    while len(tokens) < settings.answer and tokens[-1].item() != tokenizer.eos_token_id:
        tokens.append(decode())
    text = tokenizer.decode(torch.cat(tokens, 1)[0], skip_special_tokens=True).strip()
    return {"format": variant.name, "text": text}


def measure(
    settings: Settings,
    stages: Stages,
    load: Callable[[], tuple[Any, Any]] = assets.load_smollm2,
) -> dict[str, Any]:
    """Run the whole demo; the result is what ``--json`` writes.

    ``load`` gives (model, tokenizer); the model must attend through
    ``scaled_dot_product_attention``.
    """
    begin = time.monotonic()
    with stages.stage("Loading SmolLM2-135M-Instruct (converted on first use)", 1) as advance:
        model, tokenizer = load()
        advance(1)
    argument = cache_argument(model)
    text_name, ids = text_ids(tokenizer, settings)
    with stages.stage("Fitting codebooks", len(settings.formats)) as advance:
        fitted = calibrations(model, tokenizer, settings, advance)
    variants = make_variants(model, settings, fitted)
    rows: dict[str, dict[str, Any]] = {variant.name: {"format": variant.name} for variant in variants}

    with stages.stage("Attention error at each site", 1) as advance:
        errors = attention_errors(model, ids[:, : settings.inspected], fitted)
        advance(1)
    rows[UNQUANTIZED]["attention_error"] = 0.0
    for name, error in errors.items():
        rows[name]["attention_error"] = error

    def eager_step(cache: Any) -> Callable[[torch.Tensor, int], torch.Tensor]:
        return lambda tokens, start: model(tokens, **{argument: cache, "use_cache": True}).logits

    with stages.stage(f"Perplexity and KL of {len(variants)} caches", settings.tokens) as advance:
        for variant in variants:
            variant.cache = variant.new_cache()
        steps = {variant.name: eager_step(variant.cache) for variant in variants}
        late = begin + 60 * settings.minutes * SCORING_SHARE
        quality = score(
            steps,
            UNQUANTIZED,
            ids,
            settings.context,
            settings.chunk,
            advance,
            enough=lambda: time.monotonic() > late,
        )
    scored = quality[UNQUANTIZED].tokens
    full = live_bytes(variants[0].cache)
    for variant in variants:
        result, used = quality[variant.name], live_bytes(variant.cache)
        rows[variant.name] |= {
            "cache_bytes": used,
            "ratio": full / used,
            "perplexity": result.perplexity,
            "perplexity_change": result.perplexity_change,
            "perplexity_change_stderr": result.perplexity_change_error,
            "kl": result.kl,
            "top1_agreement": result.agreement,
        }

    reports: dict[str, Any] = {}
    decoders: dict[str, Decoder] = {}
    deadline = begin + 60 * settings.minutes - RESERVED_SECONDS
    # Not a slice: its strides would differ from a decoded token's and compile a graph of their own.
    last = torch.tensor([[int(ids[0, -1])]])
    graphs = _graphs_compiled()
    with torch.no_grad(), room_for_recompiles(len(variants)):
        with stages.stage("Compiling a decode step for each cache", len(variants)) as advance:
            longest = 0.0
            for variant in compile_order(variants, settings):
                row = rows[variant.name]
                row |= dict.fromkeys(TIMED)
                advance(1)
                started = time.monotonic()
                needed = variant.name in (UNQUANTIZED, settings.shown)
                if not needed and started + longest > deadline:
                    continue
                before = _graphs_compiled()
                passes.clear_report()
                decoder = Decoder(variant.compiled, argument, variant.cache, last)
                decoder()
                row["compile_seconds"] = time.monotonic() - started
                row["graphs"] = _graphs_compiled() - before
                longest = max(longest, row["compile_seconds"])
                decoders[variant.name] = decoder
                if variant.name != UNQUANTIZED:
                    report = reports[variant.name] = passes.report()
                    row |= {"sites_found": report.found, "sites_rewritten": report.rewritten}
        with stages.stage("Decode speed, in turn", settings.rounds + 1) as advance:
            timings = interleaved(decoders, settings.rounds, on_round=lambda _: advance(1))
        for name, timing in timings.items():
            rows[name] |= {
                "decode_seconds": timing.seconds,
                "decode_tokens_per_second": 1 / timing.seconds,
                "decode_speed": timing.ratio,
            }
        graphs = _graphs_compiled() - graphs
        answers = []
        with stages.stage("Answering a question", 2) as advance:
            for variant in variants:
                if variant.name in (UNQUANTIZED, settings.shown):
                    answers.append(_answer(model, tokenizer, variant, argument, settings))
                    advance(1)

    return {
        "schema": SCHEMA,
        "environment": environment(),
        "settings": dataclasses.asdict(settings) | {"capacity": settings.capacity},
        "model": "SmolLM2-135M-Instruct",
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "text": text_name,
        "scored_tokens": scored,
        "rows": list(rows.values()),
        "graphs_compiled": graphs,
        "prompt": PROMPT,
        "answers": answers,
        "reports": {name: report.data() for name, report in reports.items()},
        "report_format": settings.shown,
        "report_text": reports[settings.shown].text(),
        "seconds": time.monotonic() - begin,
    }


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write the result so that the file is complete or absent."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def run(settings: Settings, json_path: Path | None = None) -> None:
    """The command: measure with progress on stderr, print on stdout, write JSON if asked."""
    result = measure(settings, Stages())
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a log has no edge to wrap at
    show(result, console)
    if json_path:
        write_json(result, json_path)
        console.print(f"Written to {json_path}", markup=False, highlight=False, soft_wrap=True)
