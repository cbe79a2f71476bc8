"""Faults planted in the sources of Triton kernels, which then run in the interpreter."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvq_ops.triton_kernels import attention as launcher
from kvq_ops.triton_kernels import attention_kernel, merge, rotary, rotate, rows, scaled, stored, tiles

# Where the functions of a module are looked up when kernels run.
USERS: dict[ModuleType, ModuleType] = {
    attention_kernel: launcher,
    merge: launcher,
    rotate: launcher,
    rows: attention_kernel,
    tiles: attention_kernel,
    scaled: tiles,
    rotary: tiles,
    stored: scaled,
}


def plant(monkeypatch: pytest.MonkeyPatch, folder: Path, module: ModuleType, right: str, wrong: str) -> None:
    """Put ``wrong`` in the one place where the source of ``module`` says ``right``, for as long as ``monkeypatch`` lasts.

    Args:
        folder: takes the broken source, which Triton reads again.
    """
    source = inspect.getsource(module)
    assert source.count(right) == 1, f"{source.count(right)} times {right!r}"
    path = folder / "broken.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("kvq_ops.triton_kernels.broken", path)
    assert spec is not None and spec.loader is not None
    broken = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, broken)
    spec.loader.exec_module(broken)
    user = USERS[module]
    for name in vars(user).keys() & vars(broken).keys():
        own = getattr(module, name, None)
        if getattr(getattr(own, "fn", own), "__module__", "") == module.__name__:
            monkeypatch.setattr(user, name, getattr(broken, name))
