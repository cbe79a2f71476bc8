"""Comparing and dividing sizes that may be symbolic: a result counts only if it holds for every input of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import statically_known_true

Size: TypeAlias = int | SymInt


class LayoutError(ValueError):
    """Something cannot be described as a pure view; the message says why."""


def known_equal(left: Size, right: Size) -> bool:
    """True only if the two sizes are equal for every input the graph accepts."""
    return bool(statically_known_true(left == right))


def same_shape(left: Sequence[Size], right: Sequence[Size]) -> bool:
    return len(left) == len(right) and all(known_equal(a, b) for a, b in zip(left, right, strict=True))


def must_agree(left: Size, right: Size) -> bool:
    """True if two sizes that an operation needs to be equal (or one of them 1) are equal.

    Where both are symbolic and neither is 1 the operation itself fails unless they agree, so the equality is recorded with the
    shape environment and is provable from then on.
    """
    if known_equal(left, right):
        return True
    if isinstance(left, int) and isinstance(right, int):
        return False
    if not (statically_known_true(left != 1) and statically_known_true(right != 1)):
        return False
    try:
        torch._check(left == right)
    except RuntimeError:
        return False
    return known_equal(left, right)


def divide(number: Size, divisor: Size) -> Size | None:
    """``number / divisor`` if the division is provably exact, else None."""
    if isinstance(number, int) and isinstance(divisor, int):
        return number // divisor if divisor and number % divisor == 0 else None
    if known_equal(number, divisor):
        return 1
    if known_equal(divisor, 1):
        return number
    if not statically_known_true(divisor > 0):
        return None
    quotient = number // divisor
    return quotient if known_equal(quotient * divisor, number) else None


def product(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = total * size
    return total
