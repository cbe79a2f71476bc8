"""Process-wide switches."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_checked = os.environ.get("KVQ_CHECKED", "0") not in ("", "0")


def is_checked() -> bool:
    """Whether operators look for NaN and infinity in what they are given."""
    return _checked


@contextlib.contextmanager
def checked(on: bool = True) -> Iterator[None]:
    """Raise ``NonFiniteError`` when NaN or infinity is about to be stored.

    Off by default, since padded rows of a batch may legally hold NaN; then NaN is stored as zero and an infinity as the
    largest code, in its own token only. ``KVQ_CHECKED=1`` turns the check on for a process.
    """
    global _checked
    before, _checked = _checked, on
    try:
        yield
    finally:
        _checked = before
