"""``kvq eval --suggest``: the best policy for a budget of bits or of KL.

Small errors of different layers are nearly independent and KL is quadratic in them, so the sum of the sensitivities of layers
and sides predicts the KL of a policy. The prediction only ranks policies: the one that is found is streamed through the real
cache, on text that sensitivities were not measured on, and what is reported is what that measured.

Solving is exact for the sum: a knapsack with one choice for each layer and side, by dynamic programming over bytes.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from kvq_lab import eval_models
from kvq_lab.environment import environment
from kvq_lab.eval_caches import Calibrations, Contender, fitting, ours, unquantized
from kvq_lab.eval_models import Subject
from kvq_lab.eval_run import SCHEMA, Settings, stream
from kvq_lab.eval_sensitivity import SIDES, Candidates, Sensitivity, measure_sensitivity
from kvq_lab.eval_specs import Spec, parse_spec
from kvq_lab.progress import Stages
from kvq_ops.errors import FormatError
from kvq_ops.formats import Format, KVFormat, get_format

ROWS, TOKENS = 2, 192
"""Text on which sensitivities are measured."""

ATTEMPTS = 4
"""Policies that are verified before the search for one below a KL gives up."""

_UNITS = 20_000


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a policy must keep to: bits a value, or KL. One of them is ``None``."""

    budget: float | None = None
    max_kl: float | None = None

    def text(self) -> str:
        return (
            f"{self.budget:g} bits a value" if self.budget is not None else f"KL of at most {self.max_kl:g}"
        )


@dataclasses.dataclass(frozen=True)
class Choice:
    """A format for one layer and side: its bytes at the length evaluated, and the KL it costs."""

    format: str
    bytes: int
    kl: float


# -- solving -----------------------------------------------------------------------------------


def solve(places: Sequence[Sequence[Choice]], limit: int) -> tuple[list[int], list[float]]:
    """One choice for each place, with the least sum of KL among those of at most ``limit`` bytes in all.

    Bytes are rounded up to a 20,000th of the limit, so the limit is kept.

    Returns:
        The choices, as numbers; empty if nothing fits. And the least KL for each number of units, for plots and tests.
    """
    unit = max(1, -(-limit // _UNITS))
    room = limit // unit
    best = np.zeros(room + 1)
    taken = []
    for choices in places:
        options = np.full((len(choices), room + 1), np.inf)
        for number, choice in enumerate(choices):
            weight = -(-choice.bytes // unit)
            if weight <= room:
                options[number, weight:] = best[: room + 1 - weight] + choice.kl
        taken.append(options.argmin(0))
        best = options.min(0)
    curve = best.tolist()
    if not np.isfinite(best[room]):
        return [], curve
    chosen: list[int] = []
    at = room
    for choices, numbers in zip(reversed(places), reversed(taken), strict=True):
        number = int(numbers[at])
        chosen.append(number)
        at -= -(-choices[number].bytes // unit)
    return chosen[::-1], curve


def cheapest(places: Sequence[Sequence[Choice]], max_kl: float) -> list[int]:
    """One choice for each place, with the fewest bytes among those whose KL sums to at most ``max_kl``; empty if none."""
    limit = sum(max(choice.bytes for choice in choices) for choices in places)
    # Room for what rounding up adds.
    limit += (len(places) + 1) * max(1, -(-limit // _UNITS))
    unit = max(1, -(-limit // _UNITS))
    _, curve = solve(places, limit)
    fitting_ = [number for number, kl in enumerate(curve) if kl <= max_kl]
    return solve(places, fitting_[0] * unit)[0] if fitting_ else []


def policy_of(pairs: Sequence[tuple[str, str]], name: str = "suggested") -> Spec:
    """A spec of the formats of keys and values of each layer: the commonest is the default."""
    formats = [KVFormat(get_format(key), get_format(value)) for key, value in pairs]
    default = Counter(formats).most_common(1)[0][0]
    layers = tuple((i, pair) for i, pair in enumerate(formats) if pair != default)
    return Spec(name if layers else str(default), default, layers)


# -- everything --------------------------------------------------------------------------------


def candidate_formats(specs: Sequence[Spec], named: bool) -> dict[str, list[str]]:
    """Formats of keys and of values that the specs name; by default no lossless ones."""
    found: dict[str, list[str]] = {}
    for side in SIDES:
        rows: list[Format] = [
            getattr(pair, side) for spec in specs for pair in (spec.default, *(p for _, p in spec.layers))
        ]
        found[side] = list(dict.fromkeys(row.name for row in rows if named or not row.lossless))
    return found


def _places(found: list[dict[str, Any]]) -> tuple[list[tuple[int, str]], list[list[Choice]]]:
    keys = list(dict.fromkeys((entry["layer"], entry["side"]) for entry in found))
    places: dict[tuple[int, str], list[Choice]] = {key: [] for key in keys}
    for entry in found:
        places[entry["layer"], entry["side"]].append(Choice(entry["format"], entry["bytes"], entry["kl"]))
    return keys, list(places.values())


def _spec_of(
    keys: Sequence[tuple[int, str]], places: Sequence[Sequence[Choice]], chosen: Sequence[int]
) -> Spec:
    names = {key: choices[number].format for key, choices, number in zip(keys, places, chosen, strict=True)}
    layers = 1 + max(layer for layer, _ in keys)
    return policy_of([(names[layer, "key"], names[layer, "value"]) for layer in range(layers)])


def _sum(places: Sequence[Sequence[Choice]], chosen: Sequence[int], what: str) -> float:
    return sum(getattr(choices[number], what) for choices, number in zip(places, chosen, strict=True))


def best_uniform(
    places: Sequence[Sequence[Choice]],
    keys: Sequence[tuple[int, str]],
    fits: Callable[[float, float], bool],
    by: str,
) -> tuple[Spec | None, float]:
    """The best policy with one format for all keys and one for all values: the least ``by`` among what ``fits(bytes, kl)``.

    Returns it and its predicted KL.
    """
    names = {
        side: [choice.format for choice in next(c for k, c in zip(keys, places, strict=True) if k[1] == side)]
        for side in SIDES
    }
    best: tuple[float, float, Spec] | None = None
    for key in range(len(names["key"])):
        for value in range(len(names["value"])):
            chosen = [key if side == "key" else value for _, side in keys]
            size, kl = _sum(places, chosen, "bytes"), _sum(places, chosen, "kl")
            cost = kl if by == "kl" else size
            if fits(size, kl) and (best is None or cost < best[0]):
                pair = KVFormat(get_format(names["key"][key]), get_format(names["value"][value]))
                best = (cost, kl, Spec(str(pair), pair))
    return (None, float("nan")) if best is None else (best[2], best[1])


def suggest(
    settings: Settings, goal: Goal, stages: Stages, load: Callable[[str], Subject] = eval_models.load
) -> dict[str, Any]:
    """Measure sensitivities, solve for the goal, verify the policy through the real cache.

    Raises:
        FormatError: if no policy of the candidates keeps to the goal.
    """
    begin = time.monotonic()
    with stages.stage(f"Loading {settings.model}", 1) as advance:
        subject = load(settings.model)
        advance(1)
    calibrations = Calibrations(subject)
    own = [ours(subject, spec, calibrations) for spec in settings.specs]
    with stages.stage("Caches, and what they need fitted", len(own)) as advance:
        kept, refused = fitting(own, settings.named, advance)
    specs = [contender.spec for contender in kept if contender.spec is not None]
    _, ids = eval_models.calibration_ids(subject, ROWS, TOKENS)
    sensitivity = Sensitivity(subject, ids)
    formats = candidate_formats(specs, settings.named)
    if not formats["key"]:
        raise FormatError("kvq eval --suggest", got="no candidate formats", allowed="formats that quantize")
    candidates = Candidates(subject, formats, calibrations, sensitivity.seen, settings.capacity)
    found = measure_sensitivity(sensitivity, candidates, stages)
    keys, places = _places(found)
    values = sum(entry["values"] for entry in {(e["layer"], e["side"]): e for e in found}.values())
    texts, scored = eval_models.windows(subject, settings.windows, settings.capacity + 1)
    rows, tried = _verified(subject, calibrations, settings, goal, stages, (keys, places, values), scored)
    final = tried[-1]
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "environment": environment(),
        "model": {"name": subject.name, "title": subject.title, "note": subject.note},
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "settings": {
            **{k: v for k, v in dataclasses.asdict(settings).items() if k not in ("specs", "model", "named")},
            "errors": False,
            "needle": False,
            "speed": False,
        },
        "protocol": settings.protocol(),
        "texts": texts,
        "calibration_text": calibrations.text,
        "calibrations": calibrations.notes,
        "left_out": refused,
        "rows": rows,
        "suggestion": {
            "goal": dataclasses.asdict(goal),
            "candidates": formats,
            "sensitivity": found,
            "tried": tried,
            "met": final["met"],
            "spec": final["spec"],
            "code": parse_spec(final["spec"]).code(),
        },
        "advice": _lines(goal, tried, found),
    }
    result["seconds"] = time.monotonic() - begin
    return result


def _verified(
    subject: Subject,
    calibrations: Calibrations,
    settings: Settings,
    goal: Goal,
    stages: Stages,
    problem: tuple[list[tuple[int, str]], list[list[Choice]], int],
    ids: Tensor,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the policy that is suggested and of the best uniform one beside it, and every policy that was tried."""
    keys, places, values = problem
    aim = goal.max_kl if goal.max_kl is not None else 0.0
    limit = int((goal.budget or 0.0) * values / 8)
    tried: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    if goal.budget is not None:
        uniform, _ = best_uniform(places, keys, lambda size, kl: size <= limit, "kl")
    else:
        uniform, _ = best_uniform(places, keys, lambda size, kl: kl <= (goal.max_kl or 0.0), "bytes")
    for attempt in range(ATTEMPTS if goal.max_kl is not None else 1):
        chosen = solve(places, limit)[0] if goal.budget is not None else cheapest(places, aim)
        if not chosen and not tried:
            raise _nothing_fits(goal, places, values)
        # Where the sum says that nothing is good enough, the best there is may be all the same.
        chosen = chosen or [min(enumerate(c), key=lambda at: at[1].kl)[0] for c in places]
        spec = _spec_of(keys, places, chosen)
        if spec.text() in [other["spec"] for other in tried]:
            break
        contenders: list[Contender] = [unquantized(subject), ours(subject, spec, calibrations)]
        if attempt == 0 and uniform is not None and uniform.text() != spec.text():
            contenders.append(ours(subject, uniform, calibrations))
        measured = list(stream(subject, contenders, ids, settings, stages).values())
        row = measured[1]
        met = row["bits_per_value"] <= (goal.budget or float("inf")) and row["kl"] <= (
            goal.max_kl or float("inf")
        )
        tried.append(
            {
                "spec": spec.text(),
                "predicted_kl": _sum(places, chosen, "kl"),
                "kl": row["kl"],
                "bits_per_value": row["bits_per_value"],
                "met": met,
            }
        )
        rows = [measured[0], row, *(measured[2:] or rows[2:])]
        if met:
            break
        # The sum was too hopeful by as much as was measured beyond it.
        aim = 0.9 * (goal.max_kl or 0.0) * tried[-1]["predicted_kl"] / row["kl"]
    return rows, tried


def _nothing_fits(goal: Goal, places: Sequence[Sequence[Choice]], values: int) -> FormatError:
    least = 8 * sum(min(choice.bytes for choice in choices) for choices in places) / values
    closest = sum(min(choice.kl for choice in choices) for choices in places)
    return FormatError(
        f"a policy for {goal.text()}",
        got=f"candidates that take {least:.2f} bits a value or more, and cost a KL of {closest:.2g} or more",
        allowed="a goal that the candidates can keep to",
        do="name more candidates with --format, or ask for less",
    )


def _lines(goal: Goal, tried: Sequence[dict[str, Any]], found: Sequence[dict[str, Any]]) -> list[str]:
    """What was found, and the policy to paste."""
    final = tried[-1]
    lines = [
        f"Suggested for {goal.text()}: {final['bits_per_value']:.2f} bits a value, KL {final['kl']:.5f} measured, "
        f"{final['predicted_kl']:.5f} predicted from layers one at a time"
        + ("." if final["met"] else f". It does NOT keep to the goal after {len(tried)} attempts.")
    ]
    for side in SIDES:
        worst: dict[int, float] = {}
        names = Counter(entry["format"] for entry in found if entry["side"] == side)
        fewest = min(
            names, key=lambda n: min(e["bits"] for e in found if (e["side"], e["format"]) == (side, n))
        )
        for entry in found:
            if (entry["side"], entry["format"]) == (side, fewest):
                worst[entry["layer"]] = entry["kl"]
        order = sorted(worst, key=lambda layer: -worst[layer])[:5]
        lines.append(
            f"Most sensitive {side}s (KL of {fewest} there alone): "
            + ", ".join(f"layer {layer} {worst[layer]:.4f}" for layer in order)
        )
    lines += [
        "",
        "In Python:",
        "",
        parse_spec(final["spec"]).code(),
        "",
        "As an argument:",
        "",
        f"--format '{final['spec']}'",
    ]
    return lines
