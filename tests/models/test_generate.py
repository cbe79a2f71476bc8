"""``generate()`` that makes quantized caches by itself, on every family, and what it leaves as it is."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CompileConfig, DynamicCache, EncoderDecoderCache  # noqa: E402
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402

import passes  # noqa: E402
from kvq_lab.families import FAMILIES, LAYERS, build, encoder_states, get_family, tokens  # noqa: E402
from kvq_ops.errors import FormatError  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402
from kvq_ops.hf_generate import restore_cache_, use_quantized_cache_  # noqa: E402
from kvq_ops.policy import Policy  # noqa: E402

INT8 = "int8_per_token_head"
RUN = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}


def generate(name: str, model: Any, **more: Any) -> Any:
    inputs: dict[str, Any] = {"input_ids": tokens(2, 5)}
    if get_family(name).encodes:
        # Whisper's own generate() wants audio; the common one takes what the encoder gave.
        inputs = {
            "decoder_input_ids": tokens(2, 5),
            "encoder_outputs": BaseModelOutput(last_hidden_state=encoder_states(2)),
        }
    with torch.no_grad():
        if name == "whisper":
            from transformers import GenerationMixin

            return GenerationMixin.generate(model, **inputs, **{**RUN, **more})
        return model.generate(**inputs, **{**RUN, **more})


def own(cache: Any) -> Any:
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


@pytest.mark.parametrize("name", [f.name for f in FAMILIES])
def test_every_family(name: str) -> None:
    family = get_family(name)
    model = build(family, family.attentions[0])
    wanted = generate(name, model)
    undo = use_quantized_cache_(model, "none")
    got = generate(name, model)
    assert type(own(got.past_key_values)) is QuantizedCache
    assert torch.equal(got.sequences, wanted.sequences)
    if family.encodes:
        assert type(got.past_key_values.cross_attention_cache) is QuantizedCache
    undo()
    assert type(own(generate(name, model).past_key_values)) is DynamicCache


@pytest.mark.parametrize("more", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
@pytest.mark.parametrize("name", ["llama", "bart"])
def test_rows_for_beams_and_sequences(name: str, more: dict[str, Any]) -> None:
    model = build(get_family(name), "sdpa")
    torch.manual_seed(0)
    wanted = generate(name, model, **more).sequences
    use_quantized_cache_(model, "none")
    torch.manual_seed(0)
    got = generate(name, model, **more)
    assert torch.equal(got.sequences, wanted)
    assert {handle.shape[0] for handle in own(got.past_key_values).handles()} == {6}


def test_length_of_the_cache() -> None:
    model = build(get_family("llama"), "sdpa")
    use_quantized_cache_(model, INT8)
    assert generate("llama", model).past_key_values.get_max_length() == 16
    assert generate("llama", model, max_cache_len=40).past_key_values.get_max_length() == 40


def test_policy_reaches_the_layers() -> None:
    model = build(get_family("gemma3"), "sdpa")
    use_quantized_cache_(model, INT8, skip="sliding_attention")
    cache = generate("gemma3", model).past_key_values
    assert [layer.keys.format.name for layer in cache.layers] == ["none", INT8]
    use_quantized_cache_(model, Policy.of("none", layers={-1: INT8, 0: "int4_group8"}))
    cache = generate("gemma3", model).past_key_values
    assert [layer.keys.format.name for layer in cache.layers] == ["int4_group8", INT8]


def test_what_the_caller_asks_for_goes_first() -> None:
    model = build(get_family("llama"), "sdpa")
    use_quantized_cache_(model, INT8)
    given = DynamicCache(config=model.config)
    assert generate("llama", model, past_key_values=given).past_key_values is given
    assert not isinstance(
        generate("llama", model, cache_implementation="static").past_key_values, QuantizedCache
    )
    assert generate("llama", model, use_cache=False).past_key_values is None


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_it_and_go_their_own_way(way: Any) -> None:
    model = build(get_family("llama"), "sdpa")
    use_quantized_cache_(model, INT8)
    twin = way(model)
    with torch.no_grad():
        twin.lm_head.weight.mul_(-1)
    got, theirs = generate("llama", model), generate("llama", twin)
    assert type(got.past_key_values) is type(theirs.past_key_values) is QuantizedCache
    assert not torch.equal(got.sequences, theirs.sequences), "the copy uses its own weights"
    restore_cache_(twin)
    assert type(generate("llama", twin).past_key_values) is DynamicCache
    assert type(generate("llama", model).past_key_values) is QuantizedCache


def test_undo_gives_back_what_was_there() -> None:
    model = build(get_family("llama"), "sdpa")
    calls: list[str] = []
    plain = type(model)._prepare_cache_for_generation

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append("theirs")
        return plain(model, *args, **kwargs)

    model._prepare_cache_for_generation = theirs
    use_quantized_cache_(model, INT8)
    undo = use_quantized_cache_(model, "none")
    assert type(generate("llama", model).past_key_values) is QuantizedCache and calls == ["theirs"]
    undo()
    assert model._prepare_cache_for_generation is theirs
    undo()
    restore_cache_(torch.nn.Linear(1, 1))
    assert vars(model)["_prepare_cache_for_generation"] is theirs


def test_name_of_the_cache_in_older_releases() -> None:
    """Releases before 5.20 call it ``past_key_values``."""
    real = build(get_family("llama"), "sdpa")

    class Older:
        config, dtype, device = real.config, torch.float32, torch.device("cpu")

        def _prepare_cache_for_generation(
            self, generation_config: Any, model_kwargs: Any, mode: Any, batch_size: int, length: int
        ) -> bool:
            model_kwargs["past_key_values"] = DynamicCache(config=self.config)
            return True

    model = Older()
    use_quantized_cache_(model, INT8)
    options = SimpleNamespace(cache_implementation=None, num_beams=2, num_return_sequences=1)
    made: dict[str, Any] = {}
    assert model._prepare_cache_for_generation(options, made, None, 3, 9)
    assert list(made) == ["past_key_values"]
    assert made["past_key_values"].layers[0].keys.shape[:3] == (6, 2, 9)


def test_generate_that_compiles_uses_the_backend() -> None:
    model = build(get_family("llama"), "sdpa")
    wanted = generate("llama", model).sequences
    use_quantized_cache_(model, "none")
    mine = CompileConfig(mode=None, options={"lower": "eager"})
    mine._compile_all_devices = True
    passes.clear_report()
    got = generate("llama", model, compile_config=mine)
    assert passes.report().rewritten == passes.report().found >= LAYERS
    assert torch.equal(got.sequences, wanted)
    assert mine.backend == "inductor", "the caller's object is left alone"


def test_models_without_generate_are_refused() -> None:
    with pytest.raises(FormatError, match="quantize_kv_cache_"):
        use_quantized_cache_(torch.nn.Linear(2, 2), INT8)


def test_policy_that_does_not_fit_is_refused_at_once() -> None:
    model = build(get_family("llama"), "sdpa")
    with pytest.raises(FormatError):
        use_quantized_cache_(model, INT8, skip=9)
    assert "_prepare_cache_for_generation" not in vars(model)
