"""Model families of transformers, small enough to try in seconds: two layers each, with random weights.

``kvq_lab.family_runs`` runs them through both front doors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvq_ops.hf_shapes import cache_argument

__all__ = [
    "FAMILIES",
    "Family",
    "build",
    "dense_cache",
    "encoder_states",
    "get_family",
    "quantized_cache",
    "step",
    "tokens",
]

VOCABULARY, HIDDEN, LAYERS, WINDOW = 64, 32, 2, 8
ENCODED = 7
"""Length of the encoder's output."""


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes:
        name: as the command line spells it.
        config, model: class names in transformers.
        settings: of the configuration, beyond what every family gets.
        attentions: implementations that the family has.
        window: of its sliding layers.
        encodes: it has an encoder, and caches for cross attention.
        slices_by_length: its code slices by the cache's length, so the cache is asked for a number.
        notes: what is special about it.
    """

    name: str
    config: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    attentions: tuple[str, ...] = ("sdpa", "eager")
    window: int | None = None
    encodes: bool = False
    slices_by_length: bool = False
    notes: str = ""


_GQA = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_MHA = {**_GQA, "num_key_value_heads": 4}
_ENCODER_DECODER = {
    "d_model": HIDDEN,
    "encoder_layers": 1,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_MIXED = ["sliding_attention", "full_attention"]

FAMILIES: tuple[Family, ...] = (
    Family("llama", "LlamaConfig", "LlamaForCausalLM", _GQA),
    Family(
        "mistral",
        "MistralConfig",
        "MistralForCausalLM",
        {**_GQA, "sliding_window": WINDOW},
        window=WINDOW,
        notes="every layer slides",
    ),
    Family(
        "mixtral",
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2},
        notes="mixture of experts",
    ),
    Family("qwen2", "Qwen2Config", "Qwen2ForCausalLM", _GQA),
    Family("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {**_GQA, "head_dim": 8}, notes="keys are normalized"),
    Family(
        "gemma2",
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            **_GQA,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "attn_logit_softcapping": 5.0,
        },
        attentions=("eager",),
        window=WINDOW,
        notes="softcap; one layer slides",
    ),
    Family(
        "gemma3",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_GQA, "head_dim": 8, "sliding_window": WINDOW, "layer_types": _MIXED},
        window=WINDOW,
        notes="one layer slides",
    ),
    Family("phi3", "Phi3Config", "Phi3ForCausalLM", _GQA),
    Family(
        "gpt2",
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 128},
    ),
    Family("gpt-neox", "GPTNeoXConfig", "GPTNeoXForCausalLM", _MHA),
    Family(
        "falcon",
        "FalconConfig",
        "FalconForCausalLM",
        {**_GQA, "multi_query": True, "new_decoder_architecture": False, "alibi": False},
        notes="one kv head",
    ),
    Family(
        "opt",
        "OPTConfig",
        "OPTForCausalLM",
        {**_MHA, "ffn_dim": 48, "word_embed_proj_dim": HIDDEN},
        slices_by_length=True,
        notes="slices positions by the length",
    ),
    Family(
        "bloom",
        "BloomConfig",
        "BloomForCausalLM",
        {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4},
        attentions=("eager",),
        notes="ALiBi through baddbmm",
    ),
    Family(
        "mpt",
        "MptConfig",
        "MptForCausalLM",
        {
            "d_model": HIDDEN,
            "n_layers": LAYERS,
            "n_heads": 4,
            "max_seq_len": 128,
            "expansion_ratio": 2,
            "use_cache": True,
        },
        attentions=("eager",),
        slices_by_length=True,
        notes="ALiBi; slices its bias by the length",
    ),
    Family("olmo", "OlmoConfig", "OlmoForCausalLM", _GQA),
    Family(
        "deepseek-v3",
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_MHA,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
        notes="multi-head latent attention: the cache holds latents",
    ),
    Family(
        "gpt-oss",
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            **_GQA,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        attentions=("eager",),
        window=WINDOW,
        notes="sinks; one layer slides",
    ),
    Family(
        "whisper",
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": ENCODED, "max_target_positions": 128},
        encodes=True,
        notes="encoder-decoder",
    ),
    Family(
        "t5",
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": HIDDEN,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": LAYERS,
            "num_decoder_layers": LAYERS,
            "num_heads": 4,
        },
        encodes=True,
        notes="encoder-decoder; learned bias by distance",
    ),
    Family(
        "bart",
        "BartConfig",
        "BartForConditionalGeneration",
        {**_ENCODER_DECODER, "max_position_embeddings": 128},
        encodes=True,
        notes="encoder-decoder",
    ),
)


def get_family(name: str) -> Family:
    """The family called ``name``. Raises ``KeyError`` naming all families."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise KeyError(f"no family {name!r}; there are {', '.join(f.name for f in FAMILIES)}")


def build(family: Family, attention: str, *, seed: int = 0) -> nn.Module:
    """The tiny model, in eval mode.

    Weights are drawn so that scores and logits are of order one: with the usual small initialization attention is all but
    uniform, and a wrong mask or scale would change nothing.
    """
    import transformers

    if attention not in family.attentions:
        raise ValueError(f"{family.name} has {', '.join(family.attentions)} attention, not {attention!r}")
    config = getattr(transformers, family.config)(
        vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, **family.settings
    )
    if family.encodes:
        config.decoder_start_token_id = 1
    config._attn_implementation = attention
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = getattr(transformers, family.model)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
            parameter.requires_grad_(False)
    return model


def dense_cache(family: Family, model: Any, tokens: int) -> Any:
    """The cache of transformers itself, for up to ``tokens`` tokens."""
    from transformers import EncoderDecoderCache, StaticCache

    def make(length: int) -> Any:
        return StaticCache(model.config, max_cache_len=length)

    return EncoderDecoderCache(make(tokens), make(ENCODED)) if family.encodes else make(tokens)


def quantized_cache(family: Family, model: Any, format: str, tokens: int, batch: int) -> Any:
    """The quantized cache in its place."""
    from kvq_ops.hf import QuantizedCache

    if family.encodes:
        return QuantizedCache.encoder_decoder(model.config, format, tokens, ENCODED, batch_size=batch)
    return QuantizedCache(model.config, format, tokens, batch_size=batch, host_length=family.slices_by_length)


def encoder_states(batch: int) -> Tensor:
    """What an encoder might give, ``[batch, ENCODED, HIDDEN]``."""
    return torch.randn(batch, ENCODED, HIDDEN, generator=torch.Generator().manual_seed(5))


def step(
    family: Family, model: Any, call: Callable[..., Any], ids: Tensor, cache: Any, **more: Any
) -> Tensor:
    """Logits of ``call``, which is ``model`` or made from it, for the next tokens ``ids``, ``[batch, length]``."""
    arguments = {cache_argument(model): cache, "use_cache": True, **more}
    if not family.encodes:
        logits: Tensor = call(input_ids=ids, **arguments).logits
        return logits
    from transformers.modeling_outputs import BaseModelOutput

    states = arguments.pop("encoder_states", None)
    states = encoder_states(ids.shape[0]) if states is None else states
    logits = call(
        decoder_input_ids=ids, encoder_outputs=BaseModelOutput(last_hidden_state=states), **arguments
    ).logits
    return logits


def tokens(batch: int, length: int, *, seed: int = 1) -> Tensor:
    """Random token ids, none of them special, ``[batch, length]``."""
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
