"""Shared set-up: one thread per worker, no hub access, poisoned uninitialised memory."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# xdist workers already use the cores; a compile pool for each would only fight over them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Triton decides at import whether kernels are interpreted. Whatever compiles them runs in a process without this.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One worker runs every test of the real model, so that its weights are loaded once.
    for item in items:
        if item.get_closest_marker("model") and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("model"))
    # Groups are long and stay on one worker: they come first, so that none is left to the end.
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests without a group by the dozen: xdist spends milliseconds on each scope, and there are thousands of tests."""
    from xdist.scheduler import LoadGroupScheduling

    class Dozens(LoadGroupScheduling):
        def schedule(self) -> None:
            if self.collection is None and self.collection_is_completed:
                collected = next(iter(self.registered_collections.values()))
                self.dozen = {nodeid: at // 12 for at, nodeid in enumerate(collected)}
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            return super()._split_scope(nodeid) if "@" in nodeid else f"dozen {self.dozen[nodeid]}"

    return Dozens(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(autouse=True)
def poison_uninitialised_memory(request: pytest.FixtureRequest):
    """Fill ``torch.empty`` with NaN (or the largest integer), so that an unwritten read shows.

    PyTorch does this in deterministic mode only. ``warn_only`` keeps that mode from refusing
    operators that have no deterministic form.
    """
    if request.node.get_closest_marker("no_poison"):
        yield
        return
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(137)


@pytest.fixture(autouse=True)
def grad_mode():
    """Every test starts in grad mode: a traced model that raises may leave the process without."""
    torch.set_grad_enabled(True)
    yield
    torch.set_grad_enabled(True)


@pytest.fixture(scope="session")
def smollm2():
    """(model, tokenizer) of the real SmolLM2 in fp32. Shared: a test must leave it as it was."""
    pytest.importorskip("transformers", reason="the lab extra is not installed")
    from kvq_lab.assets import AssetError, load_smollm2

    try:
        return load_smollm2()
    except AssetError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
