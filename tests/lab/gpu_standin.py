"""A GPU for scripts that ask torch for one: its tensors are the CPU's, its events a clock, its kernels torch's own.

Only what ``kvq_lab.gpu_*`` uses. Wrong numbers stay wrong here and right ones right; times mean nothing.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode


def _here(value: Any) -> Any:
    """``value`` with the CPU in place of a GPU."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


class OnCPU(TorchFunctionMode):
    """Every call that asks for a GPU gets the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*map(_here, args), **{name: _here(value) for name, value in (kwargs or {}).items()})


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


def install(monkeypatch: pytest.MonkeyPatch, memory: int = 2**40) -> None:
    """Put it in place of ``torch.cuda`` until the test ends."""
    original = torch.Generator
    properties = SimpleNamespace(
        name="Stand-in", major=9, minor=0, multi_processor_count=4, total_memory=memory, gcnArchName=""
    )
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda *_: (memory, memory),
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: properties.name,
        "get_device_capability": lambda *_: (9, 0),
        "Event": Event,
        "_sleep": lambda cycles: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": original(_here(device)))
