"""What eviction refuses, and what it says then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")


from kvq_ops import errors  # noqa: E402
from kvq_ops.eviction import Eviction  # noqa: E402
from kvq_ops.formats import get_format  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from tests.hf.evicting import EVICTION, llama, make, steps  # noqa: E402
from tests.hf.models import config, prompt  # noqa: E402
from tests.ops import windows  # noqa: E402, F401  registers formats of small groups

pytestmark = pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def test_settings_that_cannot_be_meant() -> None:
    for wrong in (
        {"budget": 0},
        {"budget": 8, "sinks": -1},
        {"budget": 8, "slack": 0},
        {"budget": True},
        {"budget": 8.5},
    ):
        with pytest.raises(errors.FormatError, match="number of tokens"):
            Eviction(**{"sinks": 0, "recent": 0, **wrong})
    with pytest.raises(errors.FormatError, match="within budget=8"):
        Eviction(8, sinks=3, recent=6)
    with pytest.raises(errors.FormatError, match="Eviction\\(budget"):
        make(eviction=512)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["kivi4", "int8_per_channel", "int4_group32+recent8", "test_keys_g8r8"])
def test_a_format_that_does_not_fit_the_budget_names_what_would(spec: str) -> None:
    with pytest.raises(errors.FormatError, match="int4_group32") as raised:
        make(spec)
    words = str(raised.value).split()
    recent = int(words[words.index("recent") + 2])
    budget = int(words[words.index("budget") + 2])
    make(spec, Eviction(budget, 2, recent))
    with pytest.raises(errors.FormatError):
        make(spec, Eviction(budget - 1, 2, recent))


def test_a_format_whose_heads_share_a_plane_is_refused() -> None:
    with pytest.raises(errors.FormatError, match="position, shared by heads"):
        Eviction(12, 2, 4).check_formats([get_format("nuq4_keys")], 1)


def test_models_whose_scores_count_positions_are_refused() -> None:
    with pytest.raises(errors.FormatError, match="bias of the scores"):
        make(name="bloom")
    with pytest.raises(errors.FormatError, match="without an encoder"):
        QuantizedCache.encoder_decoder(config("t5"), "none", 24, eviction=EVICTION)
    with pytest.raises(errors.FormatError, match="no layer with full attention"):
        make(name="mistral")


def test_padding_between_tokens_is_refused() -> None:
    ids = prompt(2, 20)
    mask = torch.ones_like(ids)
    mask[0, 8:11] = 0
    with pytest.raises(errors.UnsupportedWriteError, match="padding_side"):
        steps(llama("sdpa"), make(), ids, [20], mask)


def test_padding_in_formats_that_code_tokens_together_is_refused() -> None:
    ids = prompt(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with pytest.raises(errors.UnsupportedWriteError, match="int4_group32"):
        steps(llama("sdpa"), make("test_keys_g8r8", Eviction(48, 3, 16)), ids, [60], mask)


def test_attention_that_is_not_understood_is_an_error() -> None:
    cache = make()
    layer = cache.layers[0]
    new = torch.zeros(1, 2, 1, 8)
    keys, _ = layer.update(new, new)
    torch.sigmoid(new @ keys.transpose(2, 3))
    with pytest.raises(errors.UnsupportedWriteError, match="attn_implementation"):
        layer.update(new, new)
    cache.reset()
    layer.update(new, new)


def test_limits_and_drafts() -> None:
    cache = make(limit=30)
    steps(llama("sdpa"), cache, prompt(1, 30), [10, *[1] * 20])
    with pytest.raises(errors.CapacityError, match="max_cache_len"):
        steps(llama("sdpa"), cache, prompt(1, 1), [1])
    with pytest.raises(errors.UnsupportedWriteError, match="drafting"):
        cache.crop(-1)
    cache.crop(0)
    assert not cache.is_croppable


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_compiled_prompt_that_needs_more_memory_is_refused(fullgraph: bool) -> None:
    cache = make()
    step = torch.compile(llama("sdpa"), backend="eager", fullgraph=fullgraph)
    step(input_ids=prompt(1, 9), past_key_values=cache)
    with pytest.raises(Exception, match="prompt longer|room for 13"):
        step(input_ids=prompt(1, 9), past_key_values=cache)
