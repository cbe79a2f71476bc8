"""Orders of the axes of a dense cache.

The axes are a string of letters, one for each axis: ``b`` batch, ``h`` kv head, ``t`` token, ``d`` channel, ``1`` an axis of one
element. ``bhtd`` is canonical; ``bthd``, ``bhdt``, ``btd`` (no heads) and so on describe what models use. An axis that is
missing counts as one element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .errors import FormatError

CANONICAL = "bhtd"


def check_axes(axes: str, dims: int) -> str:
    """``axes`` itself, or ``FormatError`` when it does not describe a cache of ``dims`` axes."""
    letters = axes.replace("1", "")
    if (
        len(axes) != dims
        or len(set(letters)) != len(letters)
        or not set(letters) <= set(CANONICAL)
        or "d" not in letters
    ):
        raise FormatError(
            f"the axes of a cache of {dims} axes",
            got=repr(axes),
            allowed="each of b, h, t, d at most once, d always, 1 for other axes of one element",
            do="use 'bhtd' for [batch, heads, tokens, head_dim]",
        )
    return axes


def canonical_shape(shape: Sequence[int], axes: str) -> tuple[int, int, int, int]:
    """``(B, H, T, D)`` of a dense cache of ``shape``."""
    sizes = dict(zip(axes, shape, strict=True))
    b, h, t, d = (sizes.get(letter, 1) for letter in CANONICAL)
    return b, h, t, d


def dense_shape(shape: Sequence[int], axes: str) -> tuple[int, ...]:
    """The dense shape in ``axes`` of a cache that is ``(B, H, T, D)`` canonically."""
    sizes = dict(zip(CANONICAL, shape, strict=True))
    return tuple(sizes.get(letter, 1) for letter in axes)


def to_canonical(x: Tensor, axes: str) -> Tensor:
    """``x`` in ``axes`` viewed as ``[B, H, T, D]``."""
    if axes == CANONICAL:
        return x
    units = [i for i, letter in enumerate(axes) if letter == "1"]
    x = x.squeeze(units) if units else x
    letters = axes.replace("1", "")
    x = x.permute([letters.index(letter) for letter in CANONICAL if letter in letters])
    for axis, letter in enumerate(CANONICAL):
        if letter not in letters:
            x = x.unsqueeze(axis)
    return x


def from_canonical(x: Tensor, axes: str) -> Tensor:
    """Inverse of :func:`to_canonical`."""
    if axes == CANONICAL:
        return x
    letters = axes.replace("1", "")
    missing = [axis for axis, letter in enumerate(CANONICAL) if letter not in letters]
    x = x.squeeze(missing) if missing else x
    present = [letter for letter in CANONICAL if letter in letters]
    x = x.permute([present.index(letter) for letter in letters])
    for axis, letter in enumerate(axes):
        if letter == "1":
            x = x.unsqueeze(axis)
    return x


def compact_strides(shape: Sequence[Any], axes: str, order: str) -> tuple[Any, ...]:
    """Strides of a tensor in ``axes`` whose memory, without gaps, runs in ``order`` (letters, the slowest first)."""
    strides: list[Any] = [1] * len(axes)
    step: Any = 1
    # An axis of one element has no place in memory; give it the stride it has in a contiguous tensor.
    position = {letter: i for i, letter in enumerate(order)}
    ranks: list[int] = []
    for letter in axes:
        ranks.append(position[letter] if letter in position else (ranks[-1] if ranks else -1))
    for _, axis in sorted(((rank, axis) for axis, rank in enumerate(ranks)), reverse=True):
        strides[axis] = step
        step = step * shape[axis]
    return tuple(strides)


def arrange(x: Tensor, axes: str, order: str) -> Tensor:
    """Canonical ``x`` in ``axes``, its memory running in ``order`` as the dense cache's does; a copy only where that differs."""
    if order != "".join(letter for letter in CANONICAL if letter in order):
        x = to_canonical(from_canonical(x, order).contiguous(), order)
    return from_canonical(x, axes)
