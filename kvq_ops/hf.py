"""A Hugging Face cache that keeps keys and values quantized.

    cache = QuantizedCache(model.config, "int8_per_token_head", max_cache_len=4096)
    model.generate(**inputs, past_key_values=cache)                 # eager
    torch.compile(model, backend="kvq")(ids, past_key_values=cache) # compiled: attention reads the codes

The layers are transformers' own static layers, sliding windows included; only what they allocate differs. Layers that evict, and
sliding layers in formats whose newest tokens wait to be coded, are those of ``hf_runs``. Where ``generate``
would compile by itself (on GPUs, for any static cache), pass ``disable_compile=True`` or
``compile_config=CompileConfig(backend="kvq")``: transformers' default backend cannot read codes.

A prompt longer than the window of an empty sliding layer is attended before it is stored, as transformers does it; such a
layer then reads that one prompt unquantized.

What is called keys and values is what the model hands over. Models with latent attention (DeepSeek) store their latent as
keys and the rotary part as values, so ``"key=int8_per_token_head,value=none"`` keeps the latter exact.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .calibration import Calibration
from .errors import (
    FormatError,
    near_names,
)
from .eviction import Eviction, token_unit
from .formats import Format, KVFormat, parse_kv_format
from .handle import QuantizedKV, dense_bytes, storage_bytes
from .hf_layers import CrossLayer, QuantizedLayer, quantized
from .hf_runs import EvictingLayer, WindowLayer
from .hf_shapes import Shape, kv_shapes
from .policy import Policy, Which

__all__ = ["QuantizedCache"]

AnyFormat = str | Format | KVFormat | Policy


class QuantizedCache(StaticCache):
    """A static cache whose keys and values are :class:`QuantizedKV` handles.

    Args:
        config: the model's configuration.
        format: one name for both, ``"key=NAME,value=NAME"``, or a policy.
        max_cache_len: tokens it can hold; sliding layers hold their window at most.
        batch_size, dtype, device: of the states that will come. The cache is allocated at once, so that a first call may
            already be a compiled one; if the first eager call brings states of another shape, dtype or device, the
            still empty cache is allocated anew to fit.
        host_length: tell the model how many tokens are stored as a Python number rather than a tensor. A few models (OPT, MPT)
            slice by that number; under ``torch.compile`` a tensor breaks their graph, and a number costs one compilation more.
        skip: layers that stay unquantized, by index (negative from the end) or by layer type (``"sliding_attention"``).
        layers: other formats for some layers, by index or by layer type; the first that fits counts. See :class:`Policy`.
        calibration: scales and codebooks fitted beforehand, for each layer (``kvq calibrate``, or a checkpoint's own).
        eviction: keep only the heaviest tokens of full-attention layers, see :class:`kvq_ops.eviction.Eviction` for what that
            loses. Such layers allocate ``eviction.capacity`` tokens, and ``max_cache_len`` bounds the tokens that come in all.
            The model must use SDPA or eager attention; compiled steps leave what is to be dropped to the step that follows.
            Sliding layers are not concerned.

    Raises:
        UnknownFormatError, FormatError, HeadDimError: before anything is allocated.
        CalibrationError: scales or codebooks that a format needs are missing, or do not fit the model.
    """

    layers: list[Any]

    def __init__(
        self,
        config: Any,
        format: AnyFormat,
        max_cache_len: int,
        *,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        host_length: bool = False,
        skip: Sequence[Which] | Which = (),
        layers: Mapping[Which, str | Format | KVFormat] | None = None,
        calibration: Calibration | None = None,
        eviction: Eviction | None = None,
        **kwargs: Any,
    ) -> None:
        policy = Policy.of(format, layers=layers, skip=skip, calibration=calibration)
        self.format = policy.default if policy.calibration is None else policy.default.calibrated()
        _check_count("max_cache_len", max_cache_len)
        _check_count("batch_size", batch_size, "rows", "give the rows of a batch, beams counted")
        text = _decoder_config(config)
        super().__init__(config=text, max_cache_len=max_cache_len, **kwargs)
        formats = _layer_formats(policy, _layer_types(text, self.layers))
        _check_windows(self.layers, formats, _layer_types(text, self.layers))
        policy.check_layers(len(self.layers))
        self.eviction = eviction
        if eviction is not None:
            _check_eviction(eviction, config, self.layers, formats)
        self.layers = _run_layers(self.layers, formats, eviction, max_cache_len)
        shapes = kv_shapes(config, len(self.layers))
        target = torch.device(device)
        self._take(self.layers, formats, shapes, batch_size, dtype or _dtype_of(config), target, policy)
        for layer in self.layers:
            if (
                host_length
                and isinstance(layer, QuantizedLayer)
                and not hasattr(layer, "cumulative_length_int")
            ):
                layer.tokens_on_host = 0

    def _take(
        self,
        layers: list[Any],
        formats: list[KVFormat],
        shapes: list[Shape | None],
        batch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        policy: Policy,
    ) -> None:
        """Make ``layers`` quantized ones and allocate them where the shape is known."""
        for layer, pair, shape in zip(layers, formats, shapes, strict=True):
            if isinstance(layer, StaticLayer) and shape is not None:
                pair.key.check_head_dim(shape[0][1])
                pair.value.check_head_dim(shape[1][1])
        self.layers = [
            quantized(layer, pair)
            if isinstance(layer, StaticLayer) and not isinstance(layer, QuantizedLayer)
            else layer
            for layer, pair in zip(layers, formats, strict=True)
        ]
        for i, (layer, shape) in enumerate(zip(self.layers, shapes, strict=True)):
            if isinstance(layer, QuantizedLayer):
                layer.policy, layer.index = policy, i
            if isinstance(layer, QuantizedLayer) and shape is not None:
                # No tokens yet: these carry shape, dtype and device alone.
                states = [
                    torch.zeros(batch_size, heads, 0, d, dtype=dtype, device=device) for heads, d in shape
                ]
                layer.lazy_initialization(*states)

    @classmethod
    def encoder_decoder(
        cls,
        config: Any,
        format: AnyFormat,
        max_cache_len: int,
        encoder_len: int | None = None,
        *,
        cross_format: AnyFormat | None = None,
        batch_size: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> EncoderDecoderCache:
        """Caches for a model that attends to an encoder too.

        The cross-attention cache holds all encoder states whatever the decoder's window, is quantized once, at the first step,
        and is never appended to.

        Args:
            encoder_len: encoder states to come, to allocate ahead of a compiled first call; eager calls need not tell.
            cross_format: of the cross-attention cache; the same by default.
            kwargs: ``skip`` and ``layers`` for the decoder's own cache.
        """
        if kwargs.get("eviction") is not None:
            raise FormatError(
                "QuantizedCache.encoder_decoder with eviction",
                got=f"{kwargs['eviction']}",
                allowed="a model without an encoder",
                do="leave eviction= out",
            )
        own = cls(config, format, max_cache_len, batch_size=batch_size, dtype=dtype, device=device, **kwargs)
        cross = cls.__new__(cls)
        cross.eviction = None
        # A calibration speaks of the decoder's own keys and values.
        crossed = replace(Policy.of(format if cross_format is None else cross_format), calibration=None)
        cross.format = crossed.default
        if encoder_len is not None:
            _check_count("encoder_len", encoder_len)
        length = 1 if encoder_len is None else encoder_len
        Cache.__init__(cross, layers=[CrossLayer(max_cache_len=length) for _ in own.layers])
        shapes = kv_shapes(config, len(own.layers))
        cross._take(
            cross.layers,
            [cross.format] * len(shapes),
            shapes if encoder_len is not None else [None] * len(shapes),
            batch_size,
            dtype or _dtype_of(config),
            torch.device(device),
            crossed,
        )
        return EncoderDecoderCache(own, cross)

    def handles(self) -> Iterator[QuantizedKV]:
        """Keys and values of every layer, in order."""
        for layer in self.layers:
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                if isinstance(tensor, QuantizedKV):
                    yield tensor

    @property
    def layer_formats(self) -> list[KVFormat | None]:
        """Formats of each layer; ``None`` where a layer keeps no keys and values."""
        return [getattr(layer, "kv_format", None) for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all storages behind the cache: codes, scales, lengths."""
        extra = (
            tensor
            for layer in self.layers
            if isinstance(layer, QuantizedLayer)
            for tensor in layer.extra_tensors()
        )
        return storage_bytes((*self.handles(), *extra))

    @property
    def evicted(self) -> list[int]:
        """Tokens of each row and kv head, padding included, that each layer has dropped to stay within its eviction budget."""
        return [layer.dropped if isinstance(layer, EvictingLayer) else 0 for layer in self.layers]

    @property
    def dense_nbytes(self) -> int:
        """Bytes that the same cache would take unquantized."""
        return sum(dense_bytes(handle) for handle in self.handles())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens, as if they had never been there.

        Scales that were fitted to them stay, and what was coded meanwhile of a window of exact tokens stays coded.

        Raises:
            CapacityError: the number is positive, or beyond what is stored.
            UnsupportedWriteError: a sliding layer has already let go of older tokens that would be in its window again.
        """
        layers = [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]
        for layer in layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def __repr__(self) -> str:
        text = f"{self.format}, {len(self.layers)} layers, {self.nbytes} bytes"
        if self.eviction is not None:
            seen = max(
                (
                    int(layer.cumulative_length_int)
                    for layer in self.layers
                    if isinstance(layer, EvictingLayer)
                ),
                default=0,
            )
            text += f", evicted {max(self.evicted)} of {seen} tokens for a budget of {self.eviction.budget}"
        return f"QuantizedCache({text})"


# ------------------------------------------------------------------------------------------- what configurations say


def _check_count(
    name: str,
    number: Any,
    what: str = "tokens",
    do: str = "count the prompt and every token to be generated",
) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise FormatError(
            f"QuantizedCache {name}",
            got=repr(number),
            allowed=f"a positive number of {what}",
            do=do,
        )


def _decoder_config(config: Any) -> Any:
    """The part of ``config`` that speaks of the decoder."""
    text = config.get_text_config(decoder=True)
    count = getattr(text, "num_decoder_layers", None)
    if isinstance(count, int) and count != text.num_hidden_layers:
        # T5 counts its encoder's layers by that name.
        text = copy.deepcopy(text)
        text.num_hidden_layers = count
    return text


def _layer_types(text: Any, layers: list[Any]) -> list[str]:
    """A name of the kind of each layer, as configurations spell it."""
    named = getattr(text, "layer_types", None)
    if named is not None and len(named) == len(layers):
        return list(named)
    return [
        "sliding_attention" if getattr(layer, "is_sliding", False) else "full_attention" for layer in layers
    ]


def _layer_formats(policy: Policy, types: list[str]) -> list[KVFormat]:
    """The format of each layer; one that is skipped keeps the model's dtype.

    Raises:
        FormatError: the policy speaks of a layer or a layer type that the model does not have.
    """
    count = len(types)
    for which in (*policy.skip, *(which for which, _ in policy.layers)):
        known = -count <= which < count if isinstance(which, int) else which in types
        if not known:
            raise FormatError(
                "a layer in layers= or skip=",
                got=repr(which),
                allowed=f"{-count}..{count - 1}, or a layer type: {near_names(str(which), sorted(set(types)))}",
                do="print(model.config) shows how many layers there are, and of which types",
            )
    exact = parse_kv_format("none")
    return [policy.choose(i, kind=kind, count=count) or exact for i, kind in enumerate(types)]


def _check_windows(layers: list[Any], formats: list[KVFormat], types: list[str]) -> None:
    """Layers that slide beside another state of their own keep tokens in their own way."""
    for layer, pair, kind in zip(layers, formats, types, strict=True):
        windowed = [row.name for row in (pair.key, pair.value) if row.windowed]
        if windowed and getattr(layer, "is_sliding", False) and type(layer) is not StaticSlidingWindowLayer:
            raise FormatError(
                f"QuantizedCache format {windowed[0]!r} for a layer of type {kind!r}",
                got=f"a {type(layer).__name__}, which slides over its tokens",
                allowed="formats without a window of exact tokens or per-channel groups, or skip= for these layers",
                do=f"choose another format for them: layers={{{kind!r}: 'int4_group32'}}",
            )


def _run_layers(
    layers: list[Any], formats: list[KVFormat], eviction: Eviction | None, limit: int
) -> list[Any]:
    """``layers`` with others in place of those that drop tokens by themselves."""
    made = []
    # Masks are made once for all full-attention layers, which must therefore drop equally many tokens.
    unit = _eviction_unit(layers, formats)
    for layer, pair in zip(layers, formats, strict=True):
        rows = (pair.key, pair.value)
        if type(layer) is StaticLayer and eviction is not None:
            layer = EvictingLayer(limit, pair, eviction, unit)
        elif type(layer) is StaticSlidingWindowLayer and any(row.windowed for row in rows):
            layer = WindowLayer(layer.max_cache_len, pair, token_unit(rows))
        made.append(layer)
    return made


def _eviction_unit(layers: list[Any], formats: list[KVFormat]) -> int:
    pairs = [pair for layer, pair in zip(layers, formats, strict=True) if type(layer) is StaticLayer]
    return token_unit([row for pair in pairs for row in (pair.key, pair.value)])


def _check_eviction(eviction: Eviction, config: Any, layers: list[Any], formats: list[KVFormat]) -> None:
    if not isinstance(eviction, Eviction):
        raise FormatError(
            "QuantizedCache eviction",
            got=repr(eviction),
            allowed="kvq_ops.eviction.Eviction(budget=512, sinks=4, recent=64), or None",
            do="say how many tokens to keep: Eviction(budget=...)",
        )
    evicting = [type(layer) is StaticLayer for layer in layers]
    other = [
        type(layer).__name__
        for layer, does in zip(layers, evicting, strict=True)
        if isinstance(layer, StaticLayer) and not does and not layer.is_sliding
    ]
    biased = any(getattr(config.get_text_config(decoder=True), name, False) for name in ("alibi",))
    if other or not any(evicting) or biased or config.model_type in ("bloom", "mpt"):
        reason = "positions enter as a bias of the scores, which knows nothing of dropped tokens"
        raise FormatError(
            f"QuantizedCache eviction for a model of type {config.model_type!r}",
            got=f"a {other[0]}" if other else reason if any(evicting) else "no layer with full attention",
            allowed="models with plain full-attention layers whose keys carry their positions",
            do="leave eviction= out",
        )
    unit = _eviction_unit(layers, formats)
    for pair, does in zip(formats, evicting, strict=True):
        if does:
            eviction.check_formats((pair.key, pair.value), unit)


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()
