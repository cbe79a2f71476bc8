"""``kvq eval``: what each cache costs and saves on one model, the same prompts and the same lengths.

Quality is streamed: the context's exact keys and values are handed to every cache, and the scored tokens then run through
all caches in lockstep, each reading what it stored. By default they run token by token, with the windows of text as rows of
one batch; with ``chunk=64`` they run in chunks, which is faster and reads the same caches, except that the first tokens of a
chunk find a window of exact tokens shorter by the rest of the chunk, which was written before they read.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvq_lab import demo, eval_models
from kvq_lab.decode_steps import UNQUANTIZED, Decoder, room_for_recompiles
from kvq_lab.environment import environment
from kvq_lab.eval_caches import (
    Calibrations,
    Contender,
    Prefill,
    cached_values,
    fitting,
    ours,
    storage_of,
    through,
    unquantized,
)
from kvq_lab.eval_models import Subject
from kvq_lab.eval_outliers import advice
from kvq_lab.eval_specs import Spec
from kvq_lab.evaluate import Quality, Step, interleaved, live_bytes, score
from kvq_lab.progress import Stages
from kvq_ops.hf_shapes import cache_argument

SCHEMA = "kvq.eval/1"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        model: as :func:`kvq_lab.eval_models.load` takes it.
        specs: our caches.
        named: whether the user chose them; a chosen one that does not fit the model is an error, a default one is left out.
        peers: other projects' caches, by the names in :mod:`kvq_lab.eval_peers`.
        tokens: scored tokens of all windows together.
        context: tokens before the scored ones in each window.
        windows: stretches of text, which run as rows of one batch.
        chunk: scored tokens that run through a cache at a time.
        own_prefill: let each cache take the context through its own codes rather than be handed it exactly.
        errors, needle, speed: which parts are measured beside quality.
        inspected: tokens over which errors of layers are measured.
        needle_lengths, needle_depths, needle_trials: tokens of haystack, shares of it before the needle, needles for each.
        rounds: timed decode steps.
    """

    model: str
    specs: tuple[Spec, ...]
    named: bool = True
    peers: tuple[str, ...] = ()
    tokens: int = 512
    context: int = 1536
    windows: int = 4
    chunk: int = 1
    own_prefill: bool = False
    errors: bool = True
    needle: bool = True
    speed: bool = True
    inspected: int = 512
    needle_lengths: tuple[int, ...] = (1024,)
    needle_depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    needle_trials: int = 2
    rounds: int = 8

    @property
    def per_window(self) -> int:
        """Scored tokens of one window."""
        return -(-self.tokens // self.windows)

    @property
    def capacity(self) -> int:
        """Tokens that each cache holds in the end."""
        return self.context + self.per_window

    def protocol(self) -> str:
        """How quality was measured, in a sentence."""
        step = "token by token" if self.chunk == 1 else f"in chunks of {self.chunk} tokens"
        start = (
            "each cache takes the context through its own codes"
            if self.own_prefill
            else "every cache is handed the same exact keys and values of the context"
        )
        return (
            f"{self.windows} windows as rows of one batch; {start} ({self.context} tokens), then {self.per_window} tokens "
            f"of each window run {step} through it"
        )


# -- quality and bytes -------------------------------------------------------------------------


def stream(
    subject: Subject,
    contenders: Sequence[Contender],
    ids: torch.Tensor,
    settings: Settings,
    stages: Stages,
) -> dict[str, dict[str, Any]]:
    """Rows of quality and bytes by contender; the first is the reference."""
    prefill = None
    with stages.stage("Context", settings.context) as advance:
        prefill = Prefill(subject.model, ids[:, : settings.context], advance)
    caches: dict[str, Any] = {}
    steps: dict[str, Step] = {}
    for contender in contenders:
        cache = caches[contender.name] = contender.new_cache(settings.windows, settings.capacity)
        steps[contender.name] = through(subject.model, cache, None if settings.own_prefill else prefill)
    peak: dict[str, int] = dict.fromkeys(caches, 0)
    kinds: dict[str, dict[str, int]] = {}

    def weigh() -> None:
        # Peers grow and shrink as their exact tokens come and go; what must be had is the largest size.
        for contender in contenders:
            name, cache = contender.name, caches[contender.name]
            if (contender.peer or name not in kinds) and live_bytes(cache) > peak[name]:
                peak[name] = live_bytes(cache)
                kinds[name] = contender.kinds(cache)

    reference = contenders[0].name
    with stages.stage(f"Perplexity and KL of {len(steps)} caches", settings.per_window) as advance:

        def on_chunk(count: int) -> None:
            weigh()
            advance(count // settings.windows)

        quality = score(steps, reference, ids, settings.context, settings.chunk, on_chunk)
    values = cached_values(prefill, caches[reference])
    return {
        contender.name: row_of(contender, quality[contender.name]) | storage_of(kinds[contender.name], values)
        for contender in contenders
    }


def row_of(contender: Contender, quality: Quality) -> dict[str, Any]:
    """What a row says of quality."""
    return {
        "format": contender.name,
        "spec": contender.spec.text() if contender.spec else None,
        "peer": contender.peer,
        "perplexity": quality.perplexity,
        "perplexity_change": quality.perplexity_change,
        "perplexity_change_stderr": quality.perplexity_change_error,
        "kl": quality.kl,
        "top1_agreement": quality.agreement,
        "tokens": quality.tokens,
    }


def _one_more(advance: Callable[[int], None], number: int) -> None:
    advance(1)


# -- speed -------------------------------------------------------------------------------------


def speeds(
    subject: Subject, contenders: Sequence[Contender], settings: Settings, stages: Stages
) -> dict[str, dict[str, Any]]:
    """Seconds of a decode step at the end of the context, one row of a batch, in turn with the unquantized model.

    Our caches and the unquantized one run compiled, as the demo runs them; the caches of peers do not compile and run eagerly,
    beside an eager unquantized cache.
    """
    model, argument = subject.model, cache_argument(subject.model)
    _, ids = eval_models.windows(subject, 1, settings.context + 1)
    last = torch.tensor([[int(ids[0, -1])]])
    prefill = Prefill(model, ids[:, : settings.context])
    room = 64 * -(-(settings.context + settings.rounds + 4) // 64)
    found: dict[str, dict[str, Any]] = {}
    own = [contender for contender in contenders if not contender.peer]
    # The demo's models, compiled for each; the caches are made here, since a row may be a policy.
    compiled = demo.make_variants(model, demo.Settings(formats=tuple(c.name for c in own[1:])), {})
    decoders: dict[str, Any] = {}
    with torch.no_grad(), room_for_recompiles(len(own)):
        with stages.stage("Compiling a decode step for each cache", len(own)) as advance:
            for contender, variant in zip(own, compiled, strict=True):
                cache = contender.new_cache(1, room)
                prefill.fill(cache)
                decode = decoders[contender.name] = Decoder(variant.compiled, argument, cache, last)
                begin = time.monotonic()
                decode()
                found[contender.name] = {"compile_seconds": time.monotonic() - begin, "decode_compiled": True}
                advance(1)
        groups = [decoders]
        if peers := [contender for contender in contenders if contender.peer]:
            eager = {}
            for contender in (contenders[0], *peers):
                cache = contender.new_cache(1, room)
                prefill.fill(cache)
                eager[contender.name] = Decoder(model, argument, cache, last)
            groups.append(eager)
        for number, group in enumerate(groups):
            kind = "eager" if number else "compiled"
            with stages.stage(f"Decode speed, {kind}, in turn", settings.rounds + 1) as advance:
                timings = interleaved(group, settings.rounds, on_round=functools.partial(_one_more, advance))
            for name, timing in timings.items():
                if number and name == UNQUANTIZED:
                    continue
                found.setdefault(name, {"decode_compiled": False})
                found[name] |= {
                    "decode_seconds": timing.seconds,
                    "decode_tokens_per_second": 1 / timing.seconds,
                    "decode_speed": timing.ratio,
                }
    return found


# -- everything --------------------------------------------------------------------------------


def contenders_of(
    subject: Subject, settings: Settings, calibrations: Calibrations, stages: Stages
) -> tuple[list[Contender], list[dict[str, str]]]:
    """The unquantized cache, ours, and peers'; and which of ours the model cannot have."""
    own = [ours(subject, spec, calibrations) for spec in settings.specs]
    with stages.stage("Caches, and what they need fitted", len(own)) as advance:
        kept, refused = fitting(own, settings.named, advance)
    peers: list[Contender] = []
    if settings.peers:
        from kvq_lab.eval_peers import peer

        peers, _ = fitting([peer(name, subject.model.config) for name in settings.peers], True)
    return [unquantized(subject), *kept, *peers], refused


def measure(
    settings: Settings,
    stages: Stages,
    load: Callable[[str], Subject] = eval_models.load,
) -> dict[str, Any]:
    """Run what the settings ask for; the result is what ``--json`` writes."""
    begin = time.monotonic()
    with stages.stage(f"Loading {settings.model}", 1) as advance:
        subject = load(settings.model)
        advance(1)
    calibrations = Calibrations(subject)
    contenders, refused = contenders_of(subject, settings, calibrations, stages)
    texts, ids = eval_models.windows(subject, settings.windows, settings.capacity + 1)
    rows = stream(subject, contenders, ids, settings, stages)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(),
        "model": {"name": subject.name, "title": subject.title, "note": subject.note},
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "settings": {
            key: value
            for key, value in dataclasses.asdict(settings).items()
            if key not in ("specs", "model", "named")
        },
        "protocol": settings.protocol(),
        "texts": texts,
        "calibration_text": None,
        "left_out": refused,
    }
    if settings.errors:
        from kvq_lab.eval_errors import layer_errors

        with stages.stage("Errors of each layer", 1) as advance:
            errors, result["outliers"] = layer_errors(
                subject,
                [c for c in contenders if c.spec],
                eval_models.windows(subject, 1, settings.inspected)[1],
            )
            advance(1)
        for name, layers in errors.items():
            rows[name]["layers"] = layers
    if settings.needle:
        from kvq_lab.eval_needle import needles

        for name, found in needles(subject, contenders, settings, stages).items():
            rows[name]["needle"] = found
    if settings.speed:
        for name, timed in speeds(subject, contenders, settings, stages).items():
            rows[name] |= timed
    result["calibration_text"], result["calibrations"] = calibrations.text, calibrations.notes
    result["rows"] = list(rows.values())
    result["advice"] = advice(result)
    result["seconds"] = time.monotonic() - begin
    return result
