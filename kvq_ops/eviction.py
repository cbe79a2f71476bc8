"""Dropping tokens from a cache: which ones, and how what is left moves together.

Codes are moved, never coded twice. Each kv head may keep other tokens, as long as all heads and rows keep equally many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import FormatError, UnsupportedWriteError
from .formats import Format
from .handle import QuantizedKV

__all__ = ["Eviction", "choose_tokens", "keep_newest", "keep_tokens_", "token_unit"]


@dataclass(frozen=True)
class Eviction:
    """Keep the first tokens, the newest, and of those between the heaviest; drop the rest.

    A token's weight is the attention it has received so far: the sum, over all queries since it came and over the query heads
    that share its kv head, of its probabilities in the softmax (H2O: Zhang et al. 2023, "Heavy-Hitter Oracle for Efficient
    Generative Inference of Large Language Models", section 4). Each kv head of each layer keeps its own tokens.

    **What is lost.** A dropped token is gone, from this head for good: whatever is asked later, what only it knew cannot be
    answered. What was heavy for the queries so far need not be what a later question asks for, and text that nobody attended to
    goes first. Keys keep the rotation of the position they came from, and positions go on being counted from all tokens seen.

    Attributes:
        budget: tokens that are left, at most, whenever some are dropped.
        sinks: the first tokens, which are never dropped; those of a row that is padded on the left begin after the padding.
        recent: the newest tokens, which are never dropped.
        slack: tokens that gather beyond the budget before any is dropped. 1 drops at every step; more moves codes less often,
            and costs as many tokens of memory.
    """

    budget: int
    sinks: int = 4
    recent: int = 64
    slack: int = 1

    def __post_init__(self) -> None:
        for name, least in (("budget", 1), ("sinks", 0), ("recent", 0), ("slack", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise FormatError(
                    f"Eviction {name}",
                    got=repr(value),
                    allowed=f"a number of tokens, {least} or more",
                    do="give a whole number",
                )
        if self.sinks + self.recent > self.budget:
            raise FormatError(
                "Eviction",
                got=f"sinks={self.sinks} and recent={self.recent}, which are always kept",
                allowed=f"both together within budget={self.budget}",
                do="raise the budget, or keep fewer tokens whatever they weigh",
            )

    @property
    def capacity(self) -> int:
        """Tokens that a layer allocates."""
        return self.budget + self.slack

    def check_formats(self, formats: Sequence[Format], unit: int) -> None:
        """Raise ``FormatError`` unless tokens of caches in these formats can be dropped a ``unit`` at a time."""
        for row in formats:
            check_movable(row)
            window = row.window if row.windowed else 0
            always = -(-max(self.sinks, row.sinks) // unit) * unit + max(self.recent, window) + unit - 1
            left = self.budget - unit + 1
            if self.recent < window or always > left:
                raise FormatError(
                    f"Eviction from a cache in format {row.name!r}",
                    got=f"budget={self.budget}, sinks={self.sinks}, recent={self.recent}",
                    allowed=f"recent of {window} or more, as many tokens as the format holds exact at most, and a budget of "
                    f"{always + unit - 1} or more: tokens are dropped {unit} at a time",
                    do="raise budget= and recent=, or choose a format that codes each token by itself, such as 'int4_group32'",
                )


def check_movable(row: Format) -> None:
    """Raise ``FormatError`` unless each head of a cache in this format can keep tokens of its own."""
    wrong = [plane.name for plane in row.planes if plane.per_token and plane.axes[:3] != "BHT"]
    if wrong:
        raise FormatError(
            f"dropping tokens of a cache in format {row.name!r}",
            got=f"{', '.join(wrong)}, shared by heads or rows",
            allowed="planes that begin with [B, H, T]",
            do="choose a format such as 'int4_group32'",
        )


def token_unit(formats: Sequence[Format]) -> int:
    """The fewest tokens that caches in these formats can drop: what is coded in one group goes together."""
    return math.lcm(*(row.token_group for row in formats))


def choose_tokens(
    mass: Tensor, pads: Tensor, budget: int, *, sinks: int = 0, recent: int = 0, unit: int = 1
) -> Tensor:
    """The tokens to keep, as slots ``[B, H, K]`` in ascending order, ``K`` the most that ``budget`` and ``unit`` allow.

    Of tokens that weigh the same the earlier stay.

    Args:
        mass: accumulated attention ``[B, H, T]``.
        pads: ``[B]``, how many of the first slots of each row hold padding; those go first.
        sinks, recent: tokens that stay whatever they weigh.
        unit: slots are kept in whole groups of so many; an unfinished group at the end stays.
    """
    tokens = mass.shape[2]
    slot = torch.arange(tokens, device=mass.device)
    padding = slot < pads.unsqueeze(1)
    first = ~padding & (slot < pads.unsqueeze(1) + sinks)
    weight = mass.masked_fill((first | (slot >= tokens - recent)).unsqueeze(1), torch.inf)
    weight = weight.masked_fill(padding.unsqueeze(1), -1.0)
    groups = tokens // unit
    drop = -(-max(0, tokens - budget) // unit)
    weight = weight[:, :, : groups * unit].unflatten(2, (groups, unit)).sum(3)
    kept = weight.argsort(dim=2, descending=True, stable=True)[:, :, : groups - drop].sort(dim=2).values
    kept = (kept.unsqueeze(3) * unit + torch.arange(unit, device=mass.device)).flatten(2)
    rest = slot[groups * unit :].expand(*mass.shape[:2], -1)
    return torch.cat([kept, rest], 2)


def keep_newest(handle: QuantizedKV, tokens: int, drop: int) -> Tensor:
    """The slots ``[B, H, K]`` of ``tokens`` tokens without the first ``drop``."""
    slots = torch.arange(drop, tokens, device=handle.device)
    return slots.expand(*handle.shape[:2], -1)


def keep_tokens_(target: QuantizedKV, source: QuantizedKV, kept: Tensor) -> None:
    """Make ``target`` hold the tokens ``kept`` of ``source``, in that order, and nothing else.

    Args:
        target: a whole cache of the format of ``source`` with room for the tokens; ``source`` itself, or one of other memory.
        source: a whole cache, all of whose rows hold equally many tokens.
        kept: slots ``[B, H, K]``, ascending; alike in all heads where these share a plane. Where several tokens are coded
            together, whole groups. Where the newest tokens are exact, all of them and as many before them as the ring holds.
    """
    fmt = source.format
    if target._owner is not None or "h" in target._cut:
        raise UnsupportedWriteError(
            f"dropping tokens of {target!r}",
            got="a slice",
            allowed="a whole cache",
            do="drop them from the cache that it was cut from",
        )
    count = kept.shape[2]
    dropped = source.length - count
    if fmt.sinks:
        # What the first slots read as from now on: exact tokens, or codes that have come to stand there.
        decoded = source.dequantize_canonical()
        first = decoded.gather(2, _along(kept[:, :, : fmt.sinks], decoded))
        into = target.planes()[fmt.index("sinks")]
        into.zero_()
        into[:, :, : first.shape[2]] = first
    for plane, new, old in zip(fmt.planes[:-1], target.planes(), source.planes(), strict=False):
        if plane.per_token:
            at = kept[:, : old.shape[1], :: plane.tokens] // plane.tokens
            moved = old.gather(2, _along(at, old))
            new.zero_()
            new[:, :, : at.shape[2]] = moved
        elif plane.name == "recent":
            slot = torch.arange(fmt.window, device=old.device)
            rows = torch.arange(old.shape[0], device=old.device).unsqueeze(1)
            at = (slot + dropped.unsqueeze(1)) % fmt.window
            new.copy_(old.transpose(1, 2)[rows, at].transpose(1, 2))
        elif plane.name == "coded":
            new.copy_(old - dropped)
        elif plane.name != "sinks":
            new.copy_(old)
    target.length.fill_(count)


def _along(at: Tensor, plane: Tensor) -> Tensor:
    """Slots ``[B, H, K]`` as an index for ``gather`` on ``plane [B, H, T, ...]``."""
    return at.reshape(*at.shape, *[1] * (plane.dim() - 3)).expand(*at.shape, *plane.shape[3:])
