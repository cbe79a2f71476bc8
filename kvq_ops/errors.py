"""Every error a user can meet, in one place.

Each message has the same four parts: what was asked, what was got, what is allowed, and what to do about it. The classes
also derive from the builtin a caller would expect (``ValueError``, ``TypeError``, ...), so ordinary handlers keep working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CalibrationError",
    "CapacityError",
    "CorruptStoreError",
    "DeviceError",
    "DtypeError",
    "FormatError",
    "GradientError",
    "HeadDimError",
    "ImplementationError",
    "KVQError",
    "NonFiniteError",
    "NothingRewrittenError",
    "ShapeError",
    "UnsupportedWriteError",
    "UnknownFormatError",
    "near_names",
]


class KVQError(Exception):
    """Base of all errors raised by this toolkit.

    Args:
        asked: the operation and the argument at fault.
        got: the offending value.
        allowed: what would have been accepted.
        do: the next step for the user.
    """

    def __init__(self, asked: str, *, got: str = "", allowed: str = "", do: str = "") -> None:
        self.asked, self.got, self.allowed, self.do = asked, got, allowed, do
        parts = [asked]
        parts += [f"  got:     {got}"] if got else []
        parts += [f"  allowed: {allowed}"] if allowed else []
        parts += [f"  do:      {do}"] if do else []
        super().__init__("\n".join(parts))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.asked, self.got, self.allowed, self.do)


def _rebuild(cls: type[KVQError], asked: str, got: str, allowed: str, do: str) -> KVQError:
    return cls(asked, got=got, allowed=allowed, do=do)


class FormatError(KVQError, ValueError):
    """A format string or row that cannot be used as asked."""


class UnknownFormatError(FormatError):
    """A format name that is not in the table; the message lists the nearest names."""


class HeadDimError(KVQError, ValueError):
    """A head dimension that a format cannot pack."""


class ShapeError(KVQError, ValueError):
    """Tensors whose shapes do not go together."""


class DtypeError(KVQError, TypeError):
    """A tensor of a dtype that is not accepted here."""


class DeviceError(KVQError, ValueError):
    """Tensors that lie on different devices."""


class CapacityError(KVQError, IndexError):
    """A write outside of the cache."""


class NonFiniteError(KVQError, ValueError):
    """NaN or infinity in the input, found in checked mode."""


class GradientError(KVQError, RuntimeError):
    """A gradient was asked through an operation that has none."""


class UnsupportedWriteError(KVQError, NotImplementedError):
    """An in-place write into a quantized cache that cannot be carried out on codes.

    Attributes:
        caches: in a graph, the nodes that hold the memory written to.
    """

    caches: frozenset[object] = frozenset()


class CalibrationError(KVQError, ValueError):
    """Scales or codebooks that had to be fitted beforehand are missing, left over, or do not fit."""


class ImplementationError(KVQError, RuntimeError):
    """An implementation that was asked for by name cannot run here."""


class CorruptStoreError(KVQError, ValueError):
    """Stored planes that do not belong to the format they claim."""


class NothingRewrittenError(KVQError, RuntimeError):
    """The graph pass rewrote no attention site and was not told that this is fine."""


def near_names(name: str, names: Iterable[str], limit: int = 3) -> str:
    """The closest of ``names`` to ``name``, for an error message; all of them when none is close."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=limit, cutoff=0.55)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ", ".join(names)
