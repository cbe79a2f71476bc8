"""Fit scales and codebooks to what a Hugging Face model writes into its cache while it reads sample text.

    calibration = calibrate(model, ids, "nuq4")
    calibration.save("nuq4.kvq")
    QuantizedCache(model.config, "nuq4", max_cache_len=4096, calibration=calibration)

Errors are weighted by the squared gradient of the text's loss in each key and value, the diagonal of the Fisher information, as
KVQuant takes it. Keys are fitted as they were before rotary embedding where that can be undone: a token alone is attended by
nothing but itself, so that the same token at two positions gives keys that differ by the rotation alone. Every table of
frequencies that the model holds is tried on that, and none is used that does not explain the keys of the layer. Sliding layers
are fitted to keys as they are cached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, StaticCache

from kvq_ops.calibration import Calibration, fit
from kvq_ops.codecs.rotary import turn
from kvq_ops.errors import CalibrationError
from kvq_ops.formats import Format, KVFormat
from kvq_ops.hf_shapes import cache_argument
from kvq_ops.policy import Policy

Pair = tuple[torch.Tensor, torch.Tensor]

_PROBES = (1, 2, 5, 37)
# Between the keys of a token at two positions, relative to their size: fp32 models reach 1e-6, bfloat16 ones 1e-2.
_SAME = 0.03


class _Recorder(DynamicCache):
    """Keeps what is written, by layer, for gradients to be read off."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config=config)
        self.written: dict[int, Pair] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        for states in (key_states, value_states):
            if states.requires_grad:
                states.retain_grad()
        self.written[layer_idx] = (key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@dataclasses.dataclass
class Sample:
    """What a model wrote into its cache while it read some text; several formats can be fitted to it.

    Attributes:
        keys, values: of each layer, fp32 ``[N, H, T, D]``.
        squares: squared gradients of the loss, by layer and side; empty where none were asked for.
        inv_freq: of each layer whose rotary embedding can be undone, ``[D / 2]``.
        kinds: types of the layers, where the model names them.
    """

    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    squares: dict[tuple[int, str], torch.Tensor]
    inv_freq: dict[int, torch.Tensor]
    kinds: list[str] | None
    tokens: int

    def fit(
        self, format: str | Format | KVFormat | Policy, on_layer: Callable[[int], Any] | None = None
    ) -> Calibration:
        """As :func:`calibrate`, from this sample."""
        policy = Policy.of(format)
        _check_calibratable(policy)
        result = Calibration()
        for layer in sorted(self.keys):
            kind = self.kinds[layer] if self.kinds is not None and layer < len(self.kinds) else None
            pair = policy.choose(layer, kind=kind, count=len(self.keys))
            if pair is not None:
                self._fit_side(result, layer, "key", pair.key, self.keys[layer])
                self._fit_side(result, layer, "value", pair.value, self.values[layer])
            if on_layer is not None:
                on_layer(layer)
        return result

    def _fit_side(self, result: Calibration, layer: int, side: str, row: Format, x: torch.Tensor) -> None:
        if not row.static_planes:
            return
        note, inv_freq = f"{self.tokens} tokens", None
        if "inv_freq" in (row.base or row)._index:
            inv_freq = self.inv_freq.get(layer)
            undone = "before rotary embedding" if inv_freq is not None else "as they are cached"
            note += f", keys {undone}"
        result.planes[layer, side] = fit(x, row, weight=self.squares.get((layer, side)), inv_freq=inv_freq)
        result.notes[layer, side] = note
        result.formats[layer, side] = row.name


def observe(model: Any, ids: torch.Tensor, *, weighted: bool = True) -> Sample:
    """Let ``model`` read ``ids [N, T]`` and keep what it caches; arguments as for :func:`calibrate`."""
    if ids.dim() != 2 or ids.shape[1] < 2:
        raise CalibrationError(
            "calibrating", got=f"ids of shape {tuple(ids.shape)}", allowed="[N, T] with T > 1"
        )
    keys, values, squares = _record(model, ids, weighted)
    found = {layer: _rotary(model, probes) for layer, probes in _probe(model, ids[:, :1]).items()}
    # A sliding layer moves its tokens from slot to slot, and the slot is what a cache turns keys back by.
    slides = StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=1 << 20).is_sliding
    inv_freq = {i: table for i, table in found.items() if table is not None and not slides[i]}
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return Sample(keys, values, squares, inv_freq, kinds, ids.numel())


def calibrate(
    model: Any,
    ids: torch.Tensor,
    format: str | Format | KVFormat | Policy,
    *,
    weighted: bool | None = None,
    on_layer: Callable[[int], Any] | None = None,
) -> Calibration:
    """Static planes for every layer of ``model`` that ``format`` quantizes with any.

    Args:
        model: a decoder of transformers; it is run, not changed.
        ids: sample tokens ``[N, T]``, token ``t`` of each row at position ``t``; text that is not evaluated on afterwards.
        format: one name, ``"key=NAME,value=NAME"``, or a policy. Formats with scales that span tokens are fitted, static or not.
        weighted: weigh errors by squared gradients, which takes a backward pass; else all count alike. Default: where there are
            codebooks to fit.
        on_layer: called with the number of each layer that is done.

    Raises:
        CalibrationError: the format has nothing to fit, or the model wrote nothing to a cache.
    """
    policy = Policy.of(format)
    _check_calibratable(policy)
    rows = [row for pair in _pairs(policy) for row in (pair.key, pair.value)]
    codebooks = any("codebook" in row._index for row in rows)
    return observe(model, ids, weighted=codebooks if weighted is None else weighted).fit(policy, on_layer)


def _pairs(policy: Policy) -> list[KVFormat]:
    return [policy.default, *(pair for _, pair in policy.layers)]


def _check_calibratable(policy: Policy) -> None:
    pairs = _pairs(policy)
    if not any(pair.calibratable for pair in pairs):
        raise CalibrationError(
            f"calibrating {', '.join(map(str, pairs))}",
            got="formats that compute their scales from each token",
            allowed="formats with scales that span tokens, or codebooks",
            do="nothing is to be done: use them as they are",
        )


def _record(
    model: Any, ids: torch.Tensor, backward: bool
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor], dict[tuple[int, str], torch.Tensor]]:
    """Keys and values of all layers, each ``[N, H, T, D]``, and squared gradients by layer and side."""
    rows = []
    for row in ids.split(1):
        # One row at a time: what a backward pass keeps grows with all tokens at once.
        recorder = _Recorder(model.config)
        with torch.set_grad_enabled(backward):
            embedded = model.get_input_embeddings()(row).detach().requires_grad_(backward)
            logits = model(inputs_embeds=embedded, use_cache=True, **{cache_argument(model): recorder}).logits
            if backward:
                loss = torch.nn.functional.cross_entropy(logits[0, :-1].float(), row[0, 1:], reduction="sum")
                states = [state for pair in recorder.written.values() for state in pair]
                found = torch.autograd.grad(loss, states)
                squares = [g.detach().float().square() for g in found]
            else:
                squares = []
        written = {i: (k.detach().float(), v.detach().float()) for i, (k, v) in recorder.written.items()}
        rows.append((written, squares))
    if not rows or not rows[0][0]:
        raise CalibrationError(
            "calibrating",
            got=f"{type(model).__name__}, which wrote nothing to its cache",
            allowed="a decoder",
        )
    layers = list(rows[0][0])
    keys = {i: torch.cat([written[i][0] for written, _ in rows]) for i in layers}
    values = {i: torch.cat([written[i][1] for written, _ in rows]) for i in layers}
    gradients = {}
    if backward:
        for at, layer in enumerate(layers):
            for side, offset in (("key", 0), ("value", 1)):
                gradients[layer, side] = torch.cat([squares[2 * at + offset] for _, squares in rows])
    return keys, values, gradients


def _probe(model: Any, token: torch.Tensor) -> dict[int, dict[int, torch.Tensor]]:
    """Keys of one token alone, at position 0 and at others, by layer and position."""
    keys: dict[int, dict[int, torch.Tensor]] = {}
    for position in (0, *_PROBES):
        recorder = _Recorder(model.config)
        with torch.no_grad():
            places = torch.full((1, 1), position, device=token.device)
            model(
                input_ids=token[:1], position_ids=places, use_cache=True, **{cache_argument(model): recorder}
            )
        for layer, (key, _) in recorder.written.items():
            keys.setdefault(layer, {})[position] = key.float()
    return keys


def _frequencies(model: Any) -> Iterator[torch.Tensor]:
    for name, buffer in model.named_buffers():
        if "inv_freq" in name.rsplit(".", 1)[-1] and buffer.dim() == 1 and "original" not in name:
            yield buffer.float()


def _rotary(model: Any, keys: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """The table of frequencies that explains how a layer's keys change with the position, if there is one."""
    first = keys[0]
    if torch.allclose(first, keys[_PROBES[-1]], rtol=_SAME):
        return None  # no rotary embedding, or none that reaches the cache
    for inv_freq in _frequencies(model):
        if inv_freq.shape[0] * 2 != first.shape[-1]:
            continue
        errors = []
        for position in _PROBES:
            place = torch.full((1, 1, 1), position, device=first.device)
            back = turn(keys[position], place, inv_freq, back=True)
            errors.append(float((back - first).norm() / first.norm()))
        if max(errors) < _SAME:
            return inv_freq
    return None
