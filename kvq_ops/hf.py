"""A Hugging Face cache that keeps keys and values quantized.

    cache = QuantizedCache(model.config, "int8_per_token_head", max_cache_len=4096)
    model.generate(**inputs, past_key_values=cache)                 # eager
    torch.compile(model, backend="kvq")(ids, past_key_values=cache) # compiled: attention reads the codes

The layers are transformers' own static layers, sliding windows included; only what they allocate differs. Where ``generate``
would compile by itself (on GPUs, for any static cache), pass ``disable_compile=True`` or
``compile_config=CompileConfig(backend="kvq")``: transformers' default backend cannot read codes.

A prompt longer than the window of an empty sliding layer is attended before it is stored, as transformers does it; such a
layer then reads that one prompt unquantized.

What is called keys and values is what the model hands over. Models with latent attention (DeepSeek) store their latent as
keys and the rotary part as values, so ``"key=int8_per_token_head,value=none"`` keeps the latter exact.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticCache, StaticLayer

from .cache import crop_
from .errors import (
    CapacityError,
    DeviceError,
    DtypeError,
    FormatError,
    ShapeError,
    UnsupportedWriteError,
    near_names,
)
from .formats import Format, KVFormat, parse_kv_format
from .handle import QuantizedKV, dense_bytes, storage_bytes
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

    Raises:
        UnknownFormatError, FormatError, HeadDimError: before anything is allocated.
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
        **kwargs: Any,
    ) -> None:
        policy = Policy.of(format, layers=layers, skip=skip)
        self.format = policy.default
        _check_count("max_cache_len", max_cache_len)
        text = _decoder_config(config)
        super().__init__(config=text, max_cache_len=max_cache_len, **kwargs)
        formats = _layer_formats(policy, _layer_types(text, self.layers))
        _check_windows(self.layers, formats, _layer_types(text, self.layers))
        shapes = kv_shapes(config, len(self.layers))
        self._take(self.layers, formats, shapes, batch_size, dtype or _dtype_of(config), torch.device(device))
        for layer in self.layers:
            if (
                host_length
                and isinstance(layer, _QuantizedLayer)
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
    ) -> None:
        """Make ``layers`` quantized ones and allocate them where the shape is known."""
        for layer, pair, shape in zip(layers, formats, shapes, strict=True):
            if isinstance(layer, StaticLayer) and shape is not None:
                pair.key.check_head_dim(shape[0][1])
                pair.value.check_head_dim(shape[1][1])
        self.layers = [
            _quantized(layer, pair) if isinstance(layer, StaticLayer) else layer
            for layer, pair in zip(layers, formats, strict=True)
        ]
        for layer, shape in zip(self.layers, shapes, strict=True):
            if isinstance(layer, _QuantizedLayer) and shape is not None:
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
        own = cls(config, format, max_cache_len, batch_size=batch_size, dtype=dtype, device=device, **kwargs)
        cross = cls.__new__(cls)
        cross.format = Policy.of(format if cross_format is None else cross_format).default
        if encoder_len is not None:
            _check_count("encoder_len", encoder_len)
        length = 1 if encoder_len is None else encoder_len
        Cache.__init__(cross, layers=[_CrossLayer(max_cache_len=length) for _ in own.layers])
        shapes = kv_shapes(config, len(own.layers))
        cross._take(
            cross.layers,
            [cross.format] * len(shapes),
            shapes if encoder_len is not None else [None] * len(shapes),
            batch_size,
            dtype or _dtype_of(config),
            torch.device(device),
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
        return storage_bytes(self.handles())

    @property
    def dense_nbytes(self) -> int:
        """Bytes that the same cache would take unquantized."""
        return sum(dense_bytes(handle) for handle in self.handles())

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens, as if they had never been there.

        Raises:
            CapacityError: the number is positive, or beyond what is stored.
            UnsupportedWriteError: a sliding layer has already let go of older tokens that would be in its window again.
        """
        layers = [layer for layer in self.layers if isinstance(layer, _QuantizedLayer)]
        for layer in layers:
            layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)

    def __repr__(self) -> str:
        return f"QuantizedCache({self.format}, {len(self.layers)} layers, {self.nbytes} bytes)"


# ------------------------------------------------------------------------------------------- what configurations say


def _check_count(name: str, number: Any) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise FormatError(
            f"QuantizedCache {name}",
            got=repr(number),
            allowed="a positive number of tokens",
            do="count the prompt and every token to be generated",
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
    """Sliding layers move their tokens at every step, which tokens that wait to be coded cannot follow."""
    for layer, pair, kind in zip(layers, formats, types, strict=True):
        windowed = [row.name for row in (pair.key, pair.value) if row.windowed]
        if windowed and getattr(layer, "is_sliding", False):
            raise FormatError(
                f"QuantizedCache format {windowed[0]!r} for a layer of type {kind!r}",
                got="a layer that slides over its tokens",
                allowed="formats without a window of exact tokens or per-channel groups, or skip= for these layers",
                do=f"choose another format for them: layers={{{kind!r}: 'int4_group32'}}",
            )


def _dtype_of(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else torch.get_default_dtype()


# ------------------------------------------------------------------------------------------------------------ layers


class _QuantizedLayer:
    """What a static layer of any kind does differently: it allocates handles, and looks before it writes."""

    kv_format: KVFormat
    max_cache_len: int
    is_initialized: bool
    keys: Any
    values: Any
    cumulative_length: Tensor
    # Tokens seen so far, where they are counted outside of tensors too.
    tokens_on_host: int | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.kv_format.key.check_head_dim(key_states.shape[-1])
        self.kv_format.value.check_head_dim(value_states.shape[-1])
        self.device = key_states.device
        self.batch_size, self.num_heads = key_states.shape[:2]
        self.k_head_dim, self.v_head_dim = key_states.shape[-1], value_states.shape[-1]
        for name, states, row in (
            ("keys", key_states, self.kv_format.key),
            ("values", value_states, self.kv_format.value),
        ):
            shape = (*states.shape[:2], self.max_cache_len, states.shape[-1])
            setattr(self, name, None)  # let go of an old one first
            setattr(self, name, QuantizedKV.empty(shape, row, dtype=states.dtype, device=states.device))
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            # CUDA graphs rely on the addresses of what is updated in place.
            for tensor in (*self.keys.store, *self.values.store, self.cumulative_length):
                torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            self._prepare(key_states, value_states)
        if self.tokens_on_host is not None:
            self.tokens_on_host += key_states.shape[-2]
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc,no-any-return]

    def get_seq_length(self) -> Any:
        """Tokens seen so far, as transformers asks."""
        if self.tokens_on_host is None:
            return super().get_seq_length()  # type: ignore[misc]
        return self.tokens_on_host

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        if self.tokens_on_host is not None:
            self.tokens_on_host = 0

    def _stored(self) -> int:
        """Tokens seen so far."""
        seen = getattr(self, "cumulative_length_int", None)
        return int(self.cumulative_length) if seen is None else int(seen)

    def _prepare(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate anew if the cache is empty and does not fit; otherwise everything that is wrong raises here."""
        if self.is_initialized and not self._fits(key_states, value_states):
            if self._stored() != 0:
                self._refuse(key_states, value_states)
            self.is_initialized = False
        tokens = key_states.shape[-2]
        # Elsewhere than on a CPU this question would stop the device, and the write itself fails.
        if not getattr(self, "is_sliding", False) and key_states.device.type == "cpu":
            stored = self._stored() if self.is_initialized else 0
            if stored + tokens > self.max_cache_len:
                raise CapacityError(
                    f"appending {tokens} token(s) to a QuantizedCache",
                    got=f"{stored} tokens are stored already",
                    allowed=f"{self.max_cache_len} in all",
                    do="make the cache with a larger max_cache_len, or reset() or crop() it; nothing was written",
                )

    def _sides(self, key_states: Tensor, value_states: Tensor) -> Iterator[tuple[str, QuantizedKV, Tensor]]:
        yield "keys", self.keys, key_states
        yield "values", self.values, value_states

    def _fits(self, key_states: Tensor, value_states: Tensor) -> bool:
        return all(
            handle.shape[0] == states.shape[0]
            and handle.shape[1] == states.shape[1]
            and handle.shape[3] == states.shape[3]
            and handle.dtype == states.dtype
            and handle.device == states.device
            for _, handle, states in self._sides(key_states, value_states)
        )

    def _refuse(self, key_states: Tensor, value_states: Tensor) -> None:
        for side, handle, states in self._sides(key_states, value_states):
            asked = f"appending {side} to a QuantizedCache that holds tokens"
            do = "make a cache for this batch and model, or reset() this one first"
            if handle.dtype != states.dtype:
                raise DtypeError(asked, got=str(states.dtype), allowed=str(handle.dtype), do=do)
            if handle.device != states.device:
                raise DeviceError(asked, got=str(states.device), allowed=str(handle.device), do=do)
            b, h, _, d = handle.shape
            if (b, h, d) != (states.shape[0], states.shape[1], states.shape[3]):
                raise ShapeError(asked, got=str(tuple(states.shape)), allowed=f"[{b}, {h}, T, {d}]", do=do)

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what :meth:`QuantizedCache.crop` promises, before anything changes."""
        stored = self._stored() if self.is_initialized else 0
        if tokens_to_remove > 0 or -tokens_to_remove > stored:
            raise CapacityError(
                "QuantizedCache.crop",
                got=str(tokens_to_remove),
                allowed=f"{-stored}..0: minus the number of tokens to remove",
            )
        if tokens_to_remove and getattr(self, "is_sliding", False) and stored > self.max_cache_len:
            raise UnsupportedWriteError(
                f"QuantizedCache.crop({tokens_to_remove}) past the window of {self.max_cache_len} tokens",
                got=f"{stored} tokens seen, of which the oldest are gone",
                allowed="cropping before a sliding layer has passed its window",
                do="generate without drafting, or rebuild the cache from the prompt",
            )

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if not self.is_initialized or tokens_to_remove == 0:
            return
        super().crop(tokens_to_remove)  # type: ignore[misc]
        if self.tokens_on_host is not None:
            self.tokens_on_host += tokens_to_remove
        for handle in (self.keys, self.values):
            crop_(handle, min(self._stored(), self.max_cache_len))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.is_initialized and self._stored():
            self._select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        if self.is_initialized and self._stored():
            self._select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        if self.is_initialized and self._stored():
            rows = torch.arange(self.keys.shape[0], device=self.keys.device)
            self._select_rows(rows.repeat_interleave(repeats))

    def _select_rows(self, rows: Tensor) -> None:
        for name in ("keys", "values"):
            handle = getattr(self, name)
            moved = handle.index_select(0, rows.to(handle.device))
            if moved.shape == handle.shape:
                handle.copy_(moved)  # in place: compiled graphs know the addresses
            else:
                setattr(self, name, moved)
        self.batch_size = self.keys.shape[0]

    def __reduce__(self) -> Any:
        # The class is made when it is asked for, so it is stored by what it was made from.
        return _blank_layer, (type(self).__mro__[2],), self.__dict__


class _CrossLayer(StaticLayer):
    """States of an encoder: as many as come, once."""

    is_initialized: bool
    max_cache_len: int

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            if self.is_initialized and int(self.cumulative_length):
                raise UnsupportedWriteError(
                    "appending to the cross-attention cache",
                    got=f"{key_states.shape[-2]} more tokens",
                    allowed="one update with all encoder states",
                    do="reset() the cache before another input is encoded",
                )
            if key_states.shape[-2] != self.max_cache_len:
                # Padding would be attended to, so the cache is exactly as long as the input.
                self.max_cache_len, self.is_initialized = key_states.shape[-2], False
        return super().update(key_states, value_states, *args, **kwargs)  # type: ignore[no-any-return]

    def crop(self, tokens_to_remove: int) -> None:
        """Encoder states do not belong to generated tokens and stay."""


class _QuantizedCrossLayer(_QuantizedLayer, _CrossLayer):
    def _prepare(self, key_states: Tensor, value_states: Tensor) -> None:
        if (
            self.is_initialized
            and int(self.cumulative_length) == 0
            and not self._fits(key_states, value_states)
        ):
            self.is_initialized = False

    def check_crop(self, tokens_to_remove: int) -> None:
        pass

    def crop(self, tokens_to_remove: int) -> None:
        pass


@functools.cache
def _quantized_class(layer: type[Any]) -> type[Any]:
    if layer is _CrossLayer:
        return _QuantizedCrossLayer
    # Without a layer type of its own the class does not enter transformers' table of layer types.
    return type(f"Quantized{layer.__name__}", (_QuantizedLayer, layer), {"_layer_type": None})


def _blank_layer(layer: type[Any]) -> Any:
    cls: Any = _quantized_class(layer)  # type: ignore[arg-type, unused-ignore]
    return cls.__new__(cls)


def _quantized(layer: Any, format: KVFormat) -> Any:
    """``layer``, which holds nothing yet, as one that allocates handles."""
    result = _blank_layer(type(layer))
    result.__dict__.update(layer.__dict__, kv_format=format)
    return result
