"""Kernels for one capability of the processor at a time, and formats of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvq_ops import registry
from kvq_ops.cpu import build, library


@pytest.fixture(params=build.CAPABILITIES)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels compiled for ``request.param``, in this process until the test is over."""
    monkeypatch.setenv("KVQ_CPU_CAPABILITY", request.param)
    library.reset()
    registry._choices.clear()
    if reason := library.why_not():
        pytest.skip(reason)
    assert f"kernels-{request.param}-" in str(library.loaded())
    yield request.param
    library.reset()
    registry._choices.clear()
