"""Gemma 3 270M, by opt-in: it runs where its packages are installed (see ``kvq_lab.gemma``)."""

from __future__ import annotations

import pytest
import torch

import passes
from kvq_ops.hf import QuantizedCache

try:
    from kvq_lab.assets import AssetError
    from kvq_lab.gemma import BOS, gemma3_parts, load_gemma3

    gemma3_parts()
except (ImportError, AssetError) as error:
    pytest.skip(f"[skip] opt-in: {error}".splitlines()[0], allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.no_poison]

LAYERS, WINDOW = 18, 512


def test_structure_past_the_window() -> None:
    """With ``none``, logits equal the untouched model's over a prompt, decodes, and decodes past the sliding window."""
    model, tokenizer = load_gemma3()
    text = "The quick brown fox jumps over the lazy dog. " * 60
    ids = torch.tensor([[BOS, *tokenizer(text, add_special_tokens=False).input_ids]])
    start = WINDOW - 8
    passes.clear_report()
    torch._dynamo.reset()
    step = torch.compile(model, backend="kvq", options={"lower": "eager"})
    cache = QuantizedCache(model.config, "none", max_cache_len=WINDOW + 64)
    with torch.no_grad():
        expected = model(ids[:, : start + 24]).logits
        got = [step(ids[:, :start], past_key_values=cache).logits]
        got += [step(ids[:, i : i + 1], past_key_values=cache).logits for i in range(start, start + 24)]
    report = passes.report()
    assert report.rewritten == report.found == LAYERS * len(report.graphs)
    difference = (torch.cat(got, 1) - expected).abs().max()
    assert difference < 1e-5 * expected.abs().max()
    sliding = [h for h in cache.handles() if h.shape[2] == WINDOW]
    assert len(sliding) == 2 * 15, "sliding layers hold their window and no more"


def test_int8_stays_close() -> None:
    model, tokenizer = load_gemma3()
    text = "It is a truth universally acknowledged, that a single man in possession of a good fortune, "
    ids = torch.tensor([[BOS, *tokenizer(text * 4, add_special_tokens=False).input_ids]])
    torch._dynamo.reset()
    step = torch.compile(model, backend="kvq", options={"lower": "eager"})
    with torch.no_grad():
        expected = torch.log_softmax(model(ids).logits[0].double(), -1)
        divergence = {}
        for name in ("none", "int8_per_token_head", "int4_group32"):
            cache = QuantizedCache(model.config, name, max_cache_len=WINDOW)
            got = torch.log_softmax(step(ids, past_key_values=cache).logits[0].double(), -1)
            divergence[name] = float((expected.exp() * (expected - got)).sum(-1).mean())
    assert abs(divergence["none"]) < 1e-6
    assert divergence["none"] < divergence["int8_per_token_head"] < divergence["int4_group32"]
