"""What quantizing the keys or the values of one layer alone does to a model's output.

*Sensitivity* is measured, not modelled: the KL of the model's output when the keys, or the values, of one layer alone read back
as a candidate stores them. Layers before it give what they always give and are not run again.

Formats with a window of exact tokens are measured without it, as they are for long contexts, and weighed with it, at the length
that is evaluated.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from kvq_lab.eval_caches import Calibrations, ours
from kvq_lab.eval_models import Subject
from kvq_lab.eval_specs import Spec
from kvq_lab.evaluate import Quality, log_probabilities
from kvq_lab.progress import Stages
from kvq_ops.errors import ShapeError
from kvq_ops.formats import KVFormat, get_format
from kvq_ops.handle import storage_bytes

SIDES = ("key", "value")
WARM = 64
"""Positions that are not counted: their context is short."""


class _Swap(TorchFunctionMode):
    """While entered, chosen attention calls read other keys or values; ``seen`` records those of every call."""

    def __init__(self, reads: dict[tuple[int, str], Tensor], first: int = 0, record: bool = False) -> None:
        super().__init__()
        self.reads, self.call = reads, first
        self.record = record
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value, *rest = args
        if self.record:
            self.seen.append((key, value))
        key, value = (self._read(side, exact) for side, exact in zip(SIDES, (key, value), strict=True))
        self.call += 1
        return func(query, key, value, *rest, **(kwargs or {}))

    def _read(self, side: str, exact: Tensor) -> Tensor:
        read = self.reads.get((self.call, side))
        if read is None:
            return exact
        return read.repeat_interleave(exact.shape[1] // read.shape[1], 1)


def _known(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output


def _decoder_layers(model: Any, count: int) -> list[torch.nn.Module]:
    """The modules that run one after another, a layer each; empty where that cannot be told."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count:
            return list(module)
    return []


class Sensitivity:
    """Measures what reading chosen keys and values back from a cache does to a model's output on ``ids [N, T]``."""

    def __init__(self, subject: Subject, ids: Tensor, warm: int = WARM) -> None:
        self.model, self.ids, self.warm = subject.model, ids, warm
        with _Swap({}, record=True) as swap:
            self.exact = self._log_probabilities()
        self.seen = swap.seen
        if not self.seen:
            raise ShapeError(
                "sensitivity of layers",
                got="no call of scaled_dot_product_attention",
                allowed="models that attend through it",
                do="load the model with attn_implementation='sdpa'",
            )
        self.layers = _decoder_layers(self.model, len(self.seen))
        self.outputs: list[Any] = []
        if self.layers:
            hooks = [
                layer.register_forward_hook(lambda module, args, output: self.outputs.append(output))
                for layer in self.layers
            ]
            try:
                self._log_probabilities()
            finally:
                for hook in hooks:
                    hook.remove()

    def _log_probabilities(self) -> Tensor:
        with torch.no_grad():
            kept = self.ids.shape[1] - self.warm
            return log_probabilities(self.model(self.ids, use_cache=False, logits_to_keep=kept).logits)

    @contextlib.contextmanager
    def _from(self, layer: int) -> Iterator[int]:
        """Skip the layers before ``layer``, whose outputs are known; yields how many are skipped."""
        skipped = self.layers[:layer] if self.outputs else []
        for module, output in zip(skipped, self.outputs, strict=False):
            module.forward = functools.partial(_known, output)
        try:
            yield len(skipped)
        finally:
            for module in skipped:
                del module.forward

    def kl(self, reads: dict[tuple[int, str], Tensor]) -> float:
        """Mean KL against the exact output when (layer, side) read as given, ``[N, H, T, D]``."""
        first = min((layer for layer, _ in reads), default=0)
        with self._from(first) as skipped, _Swap(reads, first=skipped):
            got = self._log_probabilities()
        quality = Quality()
        quality.add(got, self.exact, torch.zeros(got.shape[:-1], dtype=torch.long))
        return max(quality.kl, 0.0)


def without_window(name: str) -> str:
    """The format with no recent tokens kept exact; sinks stay."""
    if not get_format(name).recent:
        return name
    return re.sub(r"\+recent\d+", "", name) + "+recent0"


class Candidates:
    """What each candidate format gives and takes in every layer of a model."""

    def __init__(
        self,
        subject: Subject,
        formats: dict[str, list[str]],
        calibrations: Calibrations,
        seen: Any,
        tokens: int,
    ) -> None:
        self.subject, self.calibrations, self.seen, self.tokens = subject, calibrations, seen, tokens
        self.formats = formats
        self._bytes: dict[tuple[str, str], list[tuple[int, int]]] = {}

    def _cache(self, side: str, name: str, rows: int, tokens: int) -> Any:
        other = get_format("none")
        pair = KVFormat(get_format(name), other) if side == "key" else KVFormat(other, get_format(name))
        return ours(self.subject, Spec(str(pair), pair), self.calibrations).new_cache(rows, tokens)

    def reads(self, side: str, name: str) -> list[Tensor]:
        """Each layer's exact keys or values as they come back from a real cache."""
        rows, tokens = self.seen[0][0].shape[0], self.seen[0][0].shape[2]
        cache = self._cache(side, without_window(name), rows, tokens)
        found = []
        for number, (keys, values) in enumerate(self.seen):
            heads = cache.layers[number].keys.shape[1]
            keys, values = (t[:, :: t.shape[1] // heads].contiguous() for t in (keys, values))
            cache.update(keys, values, number)
            layer = cache.layers[number]
            found.append((layer.keys if side == "key" else layer.values).dequantize())
        return found

    def bytes(self, side: str, name: str) -> list[tuple[int, int]]:
        """For each layer the bytes of a row at the length evaluated, and the numbers it stands for."""
        if (side, name) not in self._bytes:
            cache = self._cache(side, name, 1, self.tokens)
            handles = [layer.keys if side == "key" else layer.values for layer in cache.layers]
            self._bytes[side, name] = [(storage_bytes([h]), h.numel()) for h in handles]
        return self._bytes[side, name]

    def bits(self, side: str, name: str) -> float:
        """Bits a value over all layers."""
        found = self.bytes(side, name)
        return 8 * sum(size for size, _ in found) / sum(count for _, count in found)


def undominated(costs: dict[str, tuple[float, float]]) -> list[str]:
    """Names for which no other has both fewer bits and less KL, by ascending bits."""
    kept: list[str] = []
    least = float("inf")
    for name in sorted(costs, key=lambda name: costs[name]):
        if costs[name][1] < least:
            least = costs[name][1]
            kept.append(name)
    return kept


def measure_sensitivity(
    sensitivity: Sensitivity, candidates: Candidates, stages: Stages
) -> list[dict[str, Any]]:
    """KL and bytes of every undominated candidate, for each layer and side."""
    kept: dict[str, dict[str, list[Tensor]]] = {side: {} for side in SIDES}
    total = sum(len(names) for names in candidates.formats.values())
    with stages.stage(f"Candidates: {total}, in all layers at once", total) as advance:
        for side in SIDES:
            costs: dict[str, tuple[float, float]] = {}
            found_reads: dict[str, list[Tensor]] = {}
            for name in candidates.formats[side]:
                found_reads[name] = candidates.reads(side, name)
                whole = {(layer, side): read for layer, read in enumerate(found_reads[name])}
                costs[name] = (candidates.bits(side, name), sensitivity.kl(whole))
                advance(1)
            kept[side] = {name: found_reads[name] for name in undominated(costs)}
    layers = len(sensitivity.seen)
    found = []
    total = layers * sum(len(names) for names in kept.values())
    with stages.stage(f"Sensitivity of {layers} layers, keys and values apart", total) as advance:
        for layer in range(layers):
            for side in SIDES:
                for name, reads in kept[side].items():
                    size, count = candidates.bytes(side, name)[layer]
                    kl = sensitivity.kl({(layer, side): reads[layer]})
                    found.append(
                        {
                            "layer": layer,
                            "side": side,
                            "format": name,
                            "kl": kl,
                            "bytes": size,
                            "values": count,
                            "bits": 8 * size / count,
                        }
                    )
                    advance(1)
    return found
