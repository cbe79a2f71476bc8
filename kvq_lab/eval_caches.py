"""The caches that ``kvq eval`` compares: how to make each, how to fill it, and what it stores.

All of them begin with the same exact keys and values of the context, computed once without quantization and handed to each
cache's ``update``; from there on each reads what it stored. So what differs is the cache alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kvq_lab.decode_steps import UNQUANTIZED
from kvq_lab.eval_models import Subject, calibration_ids
from kvq_lab.eval_specs import Spec
from kvq_lab.evaluate import Step, live_bytes
from kvq_ops.errors import FormatError, KVQError
from kvq_ops.hf_shapes import cache_argument

KINDS = ("codes", "scales", "minima", "exact", "outliers", "other")
"""Kinds of stored bytes."""

_KIND_OF_PLANE = {
    "codes": "codes",
    "minimum": "minima",
    "centre": "minima",
    "center": "minima",
    "recent": "exact",
    "sinks": "exact",
    "outlier_index": "outliers",
    "outlier_value": "outliers",
    "length": "other",
    "coded": "other",
}
_SCALES = ("scale", "exponent", "norm", "range")

# Tokens that are prefilled at once.
_PREFILL = 1024


@dataclasses.dataclass
class Contender:
    """One row of the table.

    Attributes:
        name: of the row.
        new_cache: makes an empty cache for (rows, tokens).
        spec: for our own caches, what is stored; ``None`` for the unquantized cache and for peers.
        peer: whether it is another project's cache.
        kinds: bytes by kind of a filled cache.
    """

    name: str
    new_cache: Callable[[int, int], Any]
    kinds: Callable[[Any], dict[str, int]]
    spec: Spec | None = None
    peer: bool = False


# -- making them -------------------------------------------------------------------------------


class Calibrations:
    """What the formats of a spec need fitted beforehand, on text that is not scored; made when asked for, and kept.

    Attributes:
        text: the text that was read, once one was.
        notes: by spec, how its planes were fitted.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.text: str | None = None
        self.notes: dict[str, list[str]] = {}
        self._sample: Any = None
        self._found: dict[str, Any] = {}

    def keywords(self, spec: Spec) -> dict[str, Any]:
        """``calibration=`` for a cache of ``spec``; nothing where no format needs one."""
        pairs = [spec.default, *(pair for _, pair in spec.layers)]
        if not any(pair.needs_calibration for pair in pairs):
            return {}
        if spec.text() not in self._found:
            if self._sample is None:
                from kvq_lab.calibrate import observe

                self.text, ids = calibration_ids(self.subject)
                self._sample = observe(self.subject.model, ids)
            fitted = self._found[spec.text()] = self._sample.fit(spec.policy)
            self.notes[spec.name] = sorted(set(fitted.notes.values()))
        return {"calibration": self._found[spec.text()]}


def ours(subject: Subject, spec: Spec, calibrations: Calibrations) -> Contender:
    """A quantized cache of this project."""
    from kvq_ops.hf import QuantizedCache

    def new_cache(rows: int, tokens: int) -> Any:
        return QuantizedCache(
            subject.model.config,
            spec.policy,
            tokens,
            batch_size=rows,
            dtype=subject.model.dtype,
            **calibrations.keywords(spec),
        )

    return Contender(spec.name, new_cache, bytes_by_kind, spec)


def unquantized(subject: Subject) -> Contender:
    """The static cache of transformers: the same shapes and masks as a quantized one, so only values differ."""
    from transformers import StaticCache

    def new_cache(rows: int, tokens: int) -> Any:
        return StaticCache(config=subject.model.config, max_cache_len=tokens)

    return Contender(UNQUANTIZED, new_cache, lambda cache: _whole(cache, "exact"))


def fitting(
    contenders: list[Contender], asked: bool, advance: Callable[[int], None] = lambda count: None
) -> tuple[list[Contender], list[dict[str, str]]]:
    """Contenders whose cache the model can have, and for the others why not. What they need fitted is fitted here.

    Args:
        asked: whether formats were named; then one that does not fit is an error at once.
    """
    kept, refused = [], []
    for contender in contenders:
        try:
            contender.new_cache(1, 8)
        except KVQError as error:
            if asked:
                raise
            refused.append({"format": contender.name, "why": f"{error.asked}: {error.got}"})
        else:
            kept.append(contender)
        advance(1)
    return kept, refused


# -- filling them ------------------------------------------------------------------------------


class Prefill:
    """Exact keys and values ``[rows, heads, context, D]`` of every layer for ``ids [rows, context]``."""

    def __init__(self, model: Any, ids: torch.Tensor, advance: Callable[[int], None] | None = None) -> None:
        from transformers import DynamicCache

        # Without a configuration no layer slides, so that every cache can be given the whole context.
        cache = DynamicCache()
        keywords = {cache_argument(model): cache, "use_cache": True, "logits_to_keep": 1}
        with torch.no_grad():
            for start in range(0, ids.shape[1], _PREFILL):
                part = ids[:, start : start + _PREFILL]
                model(part, **keywords)
                if advance:
                    advance(part.shape[1])
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number, layer in enumerate(cache.layers):
            keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
            if keys is None or values is None or keys.dim() != 4:
                raise FormatError(
                    f"layer {number} of {type(model).__name__}",
                    got=f"a cache layer {type(layer).__name__} without keys and values",
                    allowed="models whose every layer caches keys and values",
                    do="leave this model out: eval compares caches of attention only",
                )
            self.layers.append((keys, values))

    def fill(self, cache: Any) -> None:
        """Hand the context to an empty cache."""
        with torch.no_grad():
            for number, (keys, values) in enumerate(self.layers):
                cache.update(keys.clone(), values.clone(), number)


def through(model: Any, cache: Any, prefill: Prefill | None) -> Step:
    """A step of :func:`kvq_lab.evaluate.score`: the context is filled in, or without a prefill run through the cache."""
    argument = cache_argument(model)

    def step(tokens: torch.Tensor, start: int) -> torch.Tensor:
        if start == 0 and prefill is not None:
            prefill.fill(cache)
            return tokens.new_empty(0)
        keep = {"logits_to_keep": 1} if start == 0 else {}
        return model(tokens, **{argument: cache, "use_cache": True}, **keep).logits

    return step


# -- what they store ---------------------------------------------------------------------------


def _kind(plane: str, lossless: bool) -> str:
    if lossless and plane == "codes":
        return "exact"
    if plane in _KIND_OF_PLANE:
        return _KIND_OF_PLANE[plane]
    return "scales" if any(word in plane for word in _SCALES) else "other"


def sized(parts: Iterator[tuple[str, torch.Tensor]]) -> dict[str, int]:
    """Bytes by kind of (kind, tensor), each storage counted once and whole, under the first kind that names it."""
    found = dict.fromkeys(KINDS, 0)
    seen: dict[int, torch.UntypedStorage] = {}
    for kind, tensor in parts:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            found[kind] += storage.nbytes()
    return found


def _planes(cache: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for handle in cache.handles():
        for plane, tensor in zip(handle.format.planes, handle.planes(), strict=True):
            yield _kind(plane.name, handle.format.lossless), tensor


def bytes_by_kind(cache: Any) -> dict[str, int]:
    """Bytes of a quantized cache by kind, from its real storages; together they are all that is alive behind it."""
    found = sized(_planes(cache))
    found["other"] += live_bytes(cache) - sum(found.values())
    return found


def _whole(cache: Any, kind: str) -> dict[str, int]:
    return dict.fromkeys(KINDS, 0) | {kind: live_bytes(cache)}


def cached_values(prefill: Prefill, reference: Any) -> int:
    """Numbers that the unquantized cache holds: its layers' shapes, which a sliding layer cuts to its window."""
    total = 0
    for layer, (keys, values) in zip(reference.layers, prefill.layers, strict=True):
        tokens = layer.keys.shape[2]
        total += sum(math.prod((t.shape[0], t.shape[1], tokens, t.shape[3])) for t in (keys, values))
    return total


def storage_of(kinds: Mapping[str, int], values: int) -> dict[str, Any]:
    """What a row says of bytes."""
    total = sum(kinds.values())
    return {"cache_bytes": total, "bytes": dict(kinds), "bits_per_value": 8 * total / values}
