"""Caches of models with an encoder: what the decoder grows, and what it reads of the encoder."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from kvq_ops import errors  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf.models import config, encoder_inputs, model  # noqa: E402

# transformers 5.24 begins to call the argument ``cache``; older ones know this name only.
pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.mark.parametrize("encoder_len", [None, 12])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_decoder_models(name: str, beams: int, encoder_len: int | None) -> None:
    run: dict[str, Any] = {
        **encoder_inputs(name),
        "max_new_tokens": 9,
        "min_new_tokens": 9,
        "do_sample": False,
        "num_beams": beams,
    }
    cache = QuantizedCache.encoder_decoder(config(name), "none", 24, encoder_len)
    assert len(cache.self_attention_cache.layers) == len(cache.cross_attention_cache.layers) == 2
    # Without a cache at all: the one that generate() makes for T5 counts the encoder's layers.
    expected = model(name).generate(use_cache=False, **run)
    assert torch.equal(model(name).generate(past_key_values=cache, **run), expected)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_d10_cross_attention_keeps_all_encoder_states_and_codes_them_once(name: str) -> None:
    text = copy.deepcopy(config(name))
    text.sliding_window = 4
    cache = QuantizedCache.encoder_decoder(text, "none", 24, cross_format="int8_per_token_head")
    own, cross = cache.self_attention_cache, cache.cross_attention_cache
    assert own.is_sliding == [True, True] and cross.is_sliding == [False, False]
    inputs = encoder_inputs(name)
    with torch.no_grad():
        states = model(name).get_encoder()(**inputs)
        start = torch.zeros(2, 1, dtype=torch.long)
        model(name)(encoder_outputs=states, decoder_input_ids=start, past_key_values=cache)
        stored = [plane.clone() for h in cross.handles() for plane in h.store]
        versions = [plane._version for h in cross.handles() for plane in h.store]
        for _ in range(3):
            model(name)(encoder_outputs=states, decoder_input_ids=start + 5, past_key_values=cache)
    assert all(h.shape[2] == 12 and h.length.tolist() == [12, 12] for h in cross.handles())
    assert all(
        torch.equal(a, b) for a, b in zip(stored, (p for h in cross.handles() for p in h.store), strict=True)
    )
    assert versions == [plane._version for h in cross.handles() for plane in h.store], "no write at all"
    with pytest.raises(errors.UnsupportedWriteError, match="cross-attention"):
        cross.update(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8), 0)
    cache.reset()
    cross.update(torch.ones(2, 4, 5, 8), torch.ones(2, 4, 5, 8), 0)
    assert cross.layers[0].keys.shape[2] == 5
