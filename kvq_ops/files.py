"""Files of ours: written whole or not at all, read without running code, and refused with a reason."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import CorruptStoreError

__all__ = ["read_file", "unreadable", "write_file"]


def write_file(path: str | os.PathLike[str], kind: str, version: int, content: Mapping[str, Any]) -> None:
    """Write ``content``, tensors and plain values, for :func:`read_file`.

    The file appears under its name only when it is complete; until then an older one stays.
    """
    target = Path(path)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save({"kind": kind, "version": version, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read_file(
    path: str | os.PathLike[str], kind: str, version: int, what: str, *, map_location: Any = None
) -> dict[str, Any]:
    """What :func:`write_file` wrote.

    Args:
        what: names the contents in errors, such as ``"caches"``.

    Raises:
        CorruptStoreError: the file is damaged, cut off, or of another kind or version.
        FileNotFoundError: there is no such file.
    """
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location=map_location, weights_only=True)
        except (
            RuntimeError,
            pickle.UnpicklingError,
            EOFError,
            zipfile.BadZipFile,
            ValueError,
            KeyError,
            OSError,
        ) as error:
            raise unreadable(
                path, what, "no file that torch.save wrote, or one that is damaged or cut off"
            ) from error
    if not isinstance(content, dict) or content.get("kind") != kind:
        raise unreadable(path, what, "a file of another kind")
    if content.get("version") != version:
        raise unreadable(path, what, f"version {content.get('version')!r}, while this is version {version}")
    return content


def unreadable(path: str | os.PathLike[str], what: str, reason: str) -> CorruptStoreError:
    return CorruptStoreError(
        f"load of {what} from {os.fspath(path)!r}",
        got=reason,
        allowed=f"a whole file of {what} that this package saved, with formats that are known here",
        do="save again, or register the format before loading",
    )
