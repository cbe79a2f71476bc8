"""Kernels for one capability of the processor at a time, and formats of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvq_ops import registry
from kvq_ops.cpu import build, library
from tests.cpu import clang, emulator

EMULATED = "aarch64"


@pytest.fixture(scope="session")
def processor() -> emulator.Emulated:
    """The kernels for aarch64 on an emulated processor."""
    if reason := clang.missing("ziglang", "unicorn"):
        pytest.skip(reason)
    return emulator.Emulated(clang.aarch64())


@pytest.fixture
def aarch64(processor: emulator.Emulated) -> Iterator[emulator.Emulated]:
    """Operators run there until the test is over."""
    before = dict(processor.calls)
    with emulator.installed(processor):
        yield processor
    assert processor.calls != before, "no kernel ran"


@pytest.fixture(params=[*build.CAPABILITIES, EMULATED])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels compiled for ``request.param``, in this process until the test is over."""
    if request.param == EMULATED:
        request.getfixturevalue("aarch64")
        yield EMULATED
        return
    monkeypatch.setenv("KVQ_CPU_CAPABILITY", request.param)
    library.reset()
    registry._choices.clear()
    if reason := library.why_not():
        pytest.skip(reason)
    assert f"kernels-{request.param}-" in str(library.loaded())
    yield request.param
    library.reset()
    registry._choices.clear()
