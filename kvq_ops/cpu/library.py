"""The compiled kernels in this process: built and loaded at first use."""

from __future__ import annotations

import ctypes
import threading
import warnings
from collections.abc import Callable

from . import build
from .build import BuildError

__all__ = ["function", "loaded", "reset", "why_not"]

_NAMES = ("kvq_attention", "kvq_append", "kvq_dequantize", "kvq_read")
_lock = threading.Lock()
_functions: dict[str, Callable[[bytes], int]] | None = None
_reason: str | None = None
_path: str | None = None


def _load() -> dict[str, Callable[[bytes], int]]:
    global _path
    for attempt in range(2):
        path = build.build()
        try:
            library = ctypes.CDLL(str(path))
            found: dict[str, Callable[[bytes], int]] = {}
            for name in _NAMES:
                function = getattr(library, name)
                function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
                found[name] = function
            _path = str(path)
            return found
        except (OSError, AttributeError) as error:
            if attempt:
                raise BuildError(
                    "loading the C++ kernels", got=str(error), do="see kvq_ops.explain(...)"
                ) from error
            build.discard(path)
    raise AssertionError


def why_not() -> str | None:
    """Why there are no kernels, or ``None``; builds and loads them when asked for the first time. Warns once."""
    global _functions, _reason
    if _functions is not None or _reason is not None:
        return _reason
    with _lock:
        if _functions is None and _reason is None:
            try:
                _functions = _load()
            except BuildError as error:
                _reason = "; ".join(
                    part for part in (error.asked, error.got.splitlines()[0] if error.got else "") if part
                )
                warnings.warn(f"kvq runs without its C++ kernels: {error}", RuntimeWarning, stacklevel=2)
    return _reason


def function(name: str) -> Callable[[bytes], int]:
    """A kernel: takes packed arguments, returns 0 when it ran."""
    if _functions is None and (reason := why_not()):
        raise BuildError("the C++ kernels", got=reason, do="see kvq_ops.explain(...)")
    assert _functions is not None
    return _functions[name]


def reset() -> None:
    """Forget what was loaded, or why nothing was: the next operator looks at the environment again."""
    global _functions, _reason, _path
    with _lock:
        _functions = _reason = _path = None


def loaded() -> str | None:
    """Path of the library in use."""
    return _path
