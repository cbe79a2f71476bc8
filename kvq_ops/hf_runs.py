"""Layers that hold a run of tokens and let go of some: by weight, or those that a sliding window has left.

Such a layer says at which position the first of its tokens stands, and transformers' masks then fit by themselves. Where tokens
were dropped in between, what is left counts as the newest; padding on the left goes first, so that as much of it is left as those
masks expect.

What comes is written behind what is held. Where that does not fit, as with a long prompt, the layer works in memory of its own
until attention is done, and keeps what is to stay.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import StaticLayer

from .cache import crop_, grow
from .errors import CapacityError, UnsupportedWriteError
from .eviction import Eviction, choose_tokens, keep_newest, keep_tokens_
from .eviction_watch import Watch
from .formats import KVFormat
from .handle import QuantizedKV
from .hf_layers import QuantizedLayer

__all__ = ["EvictingLayer", "RunLayer", "WindowLayer"]


_ROOM = 16
"""Tokens beyond its window that a sliding layer gathers before it moves codes."""


class RunLayer(QuantizedLayer, StaticLayer):
    """A layer that holds ``held`` of the ``cumulative_length_int`` tokens that it has seen.

    Attributes:
        max_cache_len: tokens that it allocates.
        unit: tokens that are dropped together.
    """

    is_initialized: bool
    max_cache_len: int
    what = "a layer that drops tokens"

    def __init__(self, capacity: int, format: KVFormat, unit: int) -> None:
        super().__init__(max_cache_len=capacity)
        self.kv_format, self.unit = format, unit
        self.cumulative_length_int = 0
        self.held = 0

    @property
    def dropped(self) -> int:
        """Tokens that were seen and are no longer held."""
        return self.cumulative_length_int - self.held

    def get_seq_length(self) -> int:
        return self.cumulative_length_int

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        stay = self.held - self._leaving(query_length)
        return max(stay + query_length, self.max_cache_len), self.cumulative_length_int - stay

    def _leaving(self, tokens: int) -> int:
        """How many tokens are dropped before ``tokens`` more are written."""
        raise NotImplementedError

    def _drop(self, tokens: int) -> None:
        """Drop so many of the tokens held."""
        raise NotImplementedError

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        tokens = key_states.shape[2]
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._prepare(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if leaving := self._leaving(tokens):
            self._drop(leaving)
        total = self.held + tokens
        if compiling and self._too_much_to_compile(tokens):
            _refuse_compiling(self, tokens)
        position = torch.arange(tokens, device=self.device) + self.held
        handles = [
            handle if total <= self.max_cache_len else grow(handle, total)
            for handle in (self.keys, self.values)
        ]
        for handle, states in zip(handles, (key_states, value_states), strict=True):
            handle.index_copy_(2, position, states)
        self.held = total
        self.cumulative_length_int += tokens
        return self._hand_out(handles[0], handles[1])

    def _too_much_to_compile(self, tokens: int) -> bool:
        return self.held + tokens > self.max_cache_len

    def refuse_compiling(self, tokens: int) -> None:
        """Raise what stands in the way of a compiled step of so many tokens."""
        raise UnsupportedWriteError(
            f"torch.compile of a step of {tokens} tokens of {self.what}",
            got=f"{self.held} tokens held, and room for {self.max_cache_len}",
            allowed="compiled steps that fit; longer prompts need memory of their own for a while",
            do="call the model itself for the prompt, as generate() does, and the compiled one for single tokens",
        )

    def _hand_out(self, keys: QuantizedKV, values: QuantizedKV) -> tuple[Tensor, Tensor]:
        """What attention reads; if ``keys`` and ``values`` are not those of the layer, they are still to be moved there."""
        raise NotImplementedError

    def _keep(self, kept: Tensor, key_source: QuantizedKV, value_source: QuantizedKV) -> None:
        keep_tokens_(self.keys, key_source, kept)
        keep_tokens_(self.values, value_source, kept)
        self.held = kept.shape[2]

    def reset(self) -> None:
        super().reset()
        self.cumulative_length_int = self.held = 0

    def __reduce__(self) -> Any:
        return copyreg.__newobj__, (type(self),), self.__dict__  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


@torch.compiler.disable(
    reason="call the model without torch.compile for a prompt longer than the cache allocates"
)  # type: ignore[untyped-decorator, unused-ignore]
def _refuse_compiling(layer: RunLayer, tokens: int) -> None:
    layer.refuse_compiling(tokens)


class EvictingLayer(RunLayer):
    """A full-attention layer within a budget, see :class:`kvq_ops.eviction.Eviction`.

    Attributes:
        mass: attention that each token received so far, fp32 ``[B, H, capacity]``.
        real: which slots of each row do not hold padding, ``[B, capacity]``.
    """

    what = "a QuantizedCache with eviction"
    is_croppable = False

    def __init__(self, limit: int, format: KVFormat, eviction: Eviction, unit: int) -> None:
        super().__init__(min(limit, eviction.capacity), format, unit)
        self.limit, self.eviction = limit, eviction
        self.watch = Watch(self._attended)
        # Where what attention reads lies until tokens are dropped: the layer's own memory, or that of a long prompt.
        self.sources: tuple[Any, Any] = (None, None)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        batch, heads = key_states.shape[:2]
        self.mass = torch.zeros(batch, heads, self.max_cache_len, device=key_states.device)
        self.real = torch.zeros(batch, self.max_cache_len, dtype=torch.bool, device=key_states.device)
        if not torch.compiler.is_compiling():
            for tensor in (self.mass, self.real):
                torch._dynamo.mark_static_address(tensor)

    def extra_tensors(self) -> Iterator[Tensor]:
        if self.is_initialized:
            yield from (self.mass, self.real)

    def get_max_length(self) -> int:
        return self.limit

    def _check_room(self, tokens: int, device: torch.device) -> None:
        if not self.watch.done and self.batch_size:
            raise UnsupportedWriteError(
                "a step of a QuantizedCache with eviction",
                got="attention of the step before in a spelling that was not understood",
                allowed="scaled_dot_product_attention, or softmax of scores that a matrix product makes of the keys",
                do="load the model with attn_implementation='sdpa' or 'eager', or leave eviction= out",
            )
        if self.cumulative_length_int + tokens > self.limit:
            raise CapacityError(
                f"appending {tokens} token(s) to a QuantizedCache",
                got=f"{self.cumulative_length_int} tokens were taken in already",
                allowed=f"{self.limit} in all, whatever is dropped",
                do="make the cache with a larger max_cache_len, which costs no memory with eviction=; nothing was written",
            )

    def _leaving(self, tokens: int) -> int:
        # In eager mode they have gone as soon as attention was done; a compiled step leaves them to the next.
        e = self.eviction
        return -(-(self.held - e.budget) // self.unit) * self.unit if self.held >= e.capacity else 0

    def _too_much_to_compile(self, tokens: int) -> bool:
        unseen = not self.watch.done
        return (
            unseen or self.cumulative_length_int + tokens > self.limit or super()._too_much_to_compile(tokens)
        )

    def refuse_compiling(self, tokens: int) -> None:
        self._check_room(tokens, self.device)
        super().refuse_compiling(tokens)

    def _drop(self, tokens: int) -> None:
        kept = self._choose(self.mass, self.real)
        mass, real = self.mass.gather(2, kept), self.real.gather(1, kept[:, 0])
        for handle in (self.keys, self.values):
            torch.ops.kvq.keep_tokens_(handle, kept)
        self.mass.copy_(F.pad(mass, (0, tokens)))
        self.real.copy_(F.pad(real, (0, tokens)))
        self.held -= tokens

    def _hand_out(self, keys: QuantizedKV, values: QuantizedKV) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return self.watch.begin(keys), values
        self.sources = keys, values
        # Copies, since tokens may move before the values are read.
        return self.watch.begin(keys.dequantize()), values.dequantize()

    def _attended(self, mass: Tensor, visible: Tensor) -> None:
        """Add what each token received in this step, and drop the lightest if there are too many."""
        if torch.compiler.is_compiling():
            self.mass.add_(mass)
            self.real.logical_or_(visible)
            return
        mass, real = mass[:, :, : self.held].clone(), visible[:, : self.held].clone()
        before = min(self.held, self.max_cache_len)
        mass[:, :, :before] += self.mass[:, :, :before]
        real[:, :before] |= self.real[:, :before]
        if self.held >= self.eviction.capacity:
            kept = self._choose(mass, real)
            # Padding stands first in all heads alike.
            mass, real = mass.gather(2, kept), real.gather(1, kept[:, 0])
            self._keep(kept, *self.sources)
        self.sources = (None, None)
        for plane, new in ((self.mass, mass), (self.real, real)):
            plane.zero_()
            plane[..., : self.held] = new

    def _choose(self, mass: Tensor, real: Tensor) -> Tensor:
        pads = (~real).sum(1)
        in_front = (real == (torch.arange(real.shape[1], device=real.device) >= pads.unsqueeze(1))).all()
        together = (pads == 0).all() if self.unit > 1 else in_front
        if torch.compiler.is_compiling():
            torch._assert_async(
                in_front & together, "eviction: padding after tokens, or where tokens are coded together"
            )
        else:
            self._check_padding(bool(in_front), bool(together))
        e = self.eviction
        return choose_tokens(mass, pads, e.budget, sinks=e.sinks, recent=e.recent, unit=self.unit)

    def _check_padding(self, in_front: bool, together: bool) -> None:
        if not in_front:
            raise UnsupportedWriteError(
                "eviction from a QuantizedCache",
                got="rows with padding after tokens, or tokens that were hidden from every query",
                allowed="padding on the left, which is dropped first",
                do="pad prompts on the left (tokenizer.padding_side = 'left'), or leave eviction= out",
            )
        if not together:
            raise UnsupportedWriteError(
                f"eviction from a QuantizedCache in format {self.kv_format}",
                got="padded rows",
                allowed=f"rows without padding: {self.unit} tokens are coded, and dropped, together",
                do="choose a format that codes each token by itself, such as 'int4_group32', or do not pad",
            )

    def check_crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UnsupportedWriteError(
                f"QuantizedCache.crop({tokens_to_remove}) with eviction",
                got="tokens that may have decided what was dropped",
                allowed="crop(0)",
                do="generate without drafting, or leave eviction= out",
            )

    def reset(self) -> None:
        super().reset()
        self.watch.done = True
        for tensor in self.extra_tensors():
            tensor.zero_()

    def _select_rows(self, rows: Tensor) -> None:
        super()._select_rows(rows)
        for name in ("mass", "real"):
            plane = getattr(self, name)
            moved = plane.index_select(0, rows.to(plane.device))
            if moved.shape == plane.shape:
                plane.copy_(moved)  # in place: compiled graphs know the addresses
            else:
                setattr(self, name, moved)

    def __reduce__(self) -> Any:
        state = {name: value for name, value in self.__dict__.items() if name not in ("watch", "sources")}
        return copyreg.__newobj__, (type(self),), {**state, "watched": self.watch.done}  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A watch belongs to its layer.
        done = state.pop("watched")
        super().__setstate__(state)
        self.watch, self.sources = Watch(self._attended), (None, None)
        self.watch.done = done


class WindowLayer(RunLayer):
    """A sliding layer in formats whose newest tokens wait to be coded.

    It holds its window and room for more; once that is full, what has left the window is dropped, in whole groups and never
    before it is coded. So codes are those of a cache that never drops anything.
    """

    is_sliding = True
    what = "a sliding layer in a format with a window of exact tokens or per-channel groups"

    def __init__(self, window: int, format: KVFormat, unit: int) -> None:
        rows = (format.key, format.value)
        # What is not yet coded must stay, and exact first tokens must not come to stand for those that are not.
        exact = [row.recent + (row.sinks and row.sinks + row.token_group - 1) for row in rows]
        self.reach = max(window - 1, *exact)
        super().__init__(self.reach + max(2 * unit, _ROOM), format, unit)
        self.window = window

    @property
    def is_croppable(self) -> bool:
        return self.dropped == 0

    def _check_room(self, tokens: int, device: torch.device) -> None:
        pass

    def _leaving(self, tokens: int) -> int:
        if self.held + tokens <= self.max_cache_len:
            return 0
        return max(0, self.held - self.reach) // self.unit * self.unit

    def _drop(self, tokens: int) -> None:
        kept = keep_newest(self.keys, self.held, tokens)
        for handle in (self.keys, self.values):
            torch.ops.kvq.keep_tokens_(handle, kept)
        self.held -= tokens

    def _hand_out(self, keys: QuantizedKV, values: QuantizedKV) -> tuple[Tensor, Tensor]:
        if keys is self.keys:
            return keys, values
        decoded = keys.dequantize(), values.dequantize()
        drop = (self.held - self.reach) // self.unit * self.unit
        self._keep(keep_newest(self.keys, self.held, drop), keys, values)
        return decoded

    def check_crop(self, tokens_to_remove: int) -> None:
        stored = self.cumulative_length_int
        if tokens_to_remove > 0 or -tokens_to_remove > stored:
            raise CapacityError(
                "QuantizedCache.crop",
                got=str(tokens_to_remove),
                allowed=f"{-stored}..0: minus the number of tokens to remove",
                do="give how many of the newest tokens to take back, as a negative number",
            )
        if tokens_to_remove and self.dropped:
            raise UnsupportedWriteError(
                f"QuantizedCache.crop({tokens_to_remove}) past a window of {self.window} tokens",
                got=f"{stored} tokens seen, of which the oldest are gone",
                allowed="cropping before a sliding layer has let go of any",
                do="generate without drafting, or rebuild the cache from the prompt",
            )

    def crop(self, tokens_to_remove: int) -> None:
        self.check_crop(tokens_to_remove)
        if self.is_initialized and tokens_to_remove:
            self.cumulative_length_int += tokens_to_remove
            self.held = self.cumulative_length_int
            for handle in (self.keys, self.values):
                crop_(handle, self.held)
