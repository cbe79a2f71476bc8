"""The real model, loaded once for all tests that use it."""

from __future__ import annotations

from typing import Any

import pytest

from kvq_lab import assets


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct in fp32, and its tokenizer."""
    try:
        model, tokenizer = assets.load_smollm2()
    except (assets.AssetError, ImportError) as error:
        pytest.skip(f"SmolLM2 cannot be had here: {error}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, tokenizer


@pytest.fixture(scope="session")
def prose(smollm2: Any) -> Any:
    """Token ids ``[1, N]`` of real prose."""
    _, text = assets.passage()
    return smollm2[1](text, return_tensors="pt").input_ids
