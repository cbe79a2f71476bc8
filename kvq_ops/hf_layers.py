"""What the layers of a :class:`kvq_ops.hf.QuantizedCache` do differently from transformers' own: they allocate handles, and
look before they write.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from .cache import crop_
from .errors import CapacityError, DeviceError, DtypeError, ShapeError, UnsupportedWriteError
from .formats import KVFormat
from .handle import QuantizedKV
from .policy import Policy

__all__ = ["CrossLayer", "QuantizedLayer", "quantized"]


class QuantizedLayer:
    """What a static layer of any kind does differently: it allocates handles, and looks before it writes."""

    kv_format: KVFormat
    # Where calibrated planes come from, and the number by which they go.
    policy: Policy
    index: int
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
            static = self.policy.static(self.index, name.removesuffix("s"), row, shape)
            setattr(self, name, None)  # let go of an old one first
            handle = QuantizedKV.empty(shape, row, dtype=states.dtype, device=states.device, static=static)
            setattr(self, name, handle)
        self.cumulative_length = self.cumulative_length.to(self.device)
        if not torch.compiler.is_compiling():
            # CUDA graphs rely on the addresses of what is updated in place. Graphs know the planes by their handle's mark.
            handles = (self.keys, self.values)
            planes = (*self.keys.store, *self.values.store)
            for tensor in (*handles, *planes, self.cumulative_length):
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
        self._check_room(key_states.shape[-2], key_states.device)

    def _check_room(self, tokens: int, device: torch.device) -> None:
        # Elsewhere than on a CPU this question would stop the device, and the write itself fails.
        if not getattr(self, "is_sliding", False) and device.type == "cpu":
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

    def extra_tensors(self) -> Iterator[Tensor]:
        """What the layer keeps besides keys and values."""
        yield from ()

    def check_crop(self, tokens_to_remove: int) -> None:
        """Raise what :meth:`QuantizedCache.crop` promises, before anything changes."""
        stored = self._stored() if self.is_initialized else 0
        if tokens_to_remove > 0 or -tokens_to_remove > stored:
            raise CapacityError(
                "QuantizedCache.crop",
                got=str(tokens_to_remove),
                allowed=f"{-stored}..0: minus the number of tokens to remove",
                do="give how many of the newest tokens to take back, as a negative number",
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


class CrossLayer(StaticLayer):
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


class _QuantizedCrossLayer(QuantizedLayer, CrossLayer):
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
    if layer is CrossLayer:
        return _QuantizedCrossLayer
    # Without a layer type of its own the class does not enter transformers' table of layer types.
    return type(f"Quantized{layer.__name__}", (QuantizedLayer, layer), {"_layer_type": None})


def _blank_layer(layer: type[Any]) -> Any:
    cls: Any = _quantized_class(layer)  # type: ignore[arg-type, unused-ignore]
    return cls.__new__(cls)


def quantized(layer: Any, format: KVFormat) -> Any:
    """``layer``, which holds nothing yet, as one that allocates handles."""
    result = _blank_layer(type(layer))
    result.__dict__.update(layer.__dict__, kv_format=format)
    return result
