"""Tiny models with random weights, in eager attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers as hf
from torch import Tensor

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
COMMON: dict[str, Any] = {"vocab_size": 64, "attn_implementation": "eager", **TOKENS}
WIDE = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CODER = {**COMMON, "decoder_start_token_id": 0, "eos_token_id": 2}
MIXED = ["sliding_attention", "full_attention"]


def _configs() -> dict[str, tuple[Any, Any]]:
    """Class and configuration by name."""
    return {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**WIDE)),
        "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**WIDE, sliding_window=8)),
        "gemma3": (
            hf.Gemma3ForCausalLM,
            hf.Gemma3TextConfig(**WIDE, head_dim=8, sliding_window=8, layer_types=MIXED),
        ),
        "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**WIDE, head_dim=16)),
        "gpt_oss": (
            hf.GptOssForCausalLM,
            hf.GptOssConfig(**WIDE, head_dim=8, sliding_window=8, num_local_experts=2, num_experts_per_tok=1),
        ),
        "gpt2": (
            hf.GPT2LMHeadModel,
            hf.GPT2Config(**COMMON, n_embd=32, n_head=4, n_layer=2, n_positions=256),
        ),
        "gpt_bigcode": (
            hf.GPTBigCodeForCausalLM,
            hf.GPTBigCodeConfig(**COMMON, n_embd=32, n_head=4, n_layer=2, n_positions=256, multi_query=True),
        ),
        "opt": (
            hf.OPTForCausalLM,
            hf.OPTConfig(
                **COMMON,
                hidden_size=32,
                ffn_dim=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                word_embed_proj_dim=32,
                max_position_embeddings=256,
            ),
        ),
        "bloom": (hf.BloomForCausalLM, hf.BloomConfig(**COMMON, hidden_size=32, n_layer=2, n_head=4)),
        "falcon_multi_query": (
            hf.FalconForCausalLM,
            hf.FalconConfig(
                **COMMON, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=True
            ),
        ),
        "falcon_new": (
            hf.FalconForCausalLM,
            hf.FalconConfig(
                **COMMON,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_kv_heads=2,
                new_decoder_architecture=True,
            ),
        ),
        "deepseek_v3": (
            hf.DeepseekV3ForCausalLM,
            hf.DeepseekV3Config(
                **{**WIDE, "num_key_value_heads": 4},
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=16,
                first_k_dense_replace=1,
                kv_lora_rank=16,
                q_lora_rank=None,
                qk_nope_head_dim=8,
                qk_rope_head_dim=4,
                v_head_dim=8,
            ),
        ),
        "t5": (
            hf.T5ForConditionalGeneration,
            hf.T5Config(
                **CODER, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_decoder_layers=2, num_heads=4
            ),
        ),
        "bart": (hf.BartForConditionalGeneration, hf.BartConfig(**_coder(), max_position_embeddings=64)),
        "whisper": (
            hf.WhisperForConditionalGeneration,
            hf.WhisperConfig(
                **_coder(),
                max_source_positions=12,
                max_target_positions=64,
                num_mel_bins=8,
                suppress_tokens=None,
                begin_suppress_tokens=None,
            ),
        ),
    }


def _coder() -> dict[str, Any]:
    sizes = {"d_model": 32}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    return {**CODER, **sizes}


@functools.cache
def config(name: str) -> Any:
    return _configs()[name][1]


@functools.cache
def model(name: str) -> Any:
    """The model in fp32, always with the same weights."""
    cls, _ = _configs()[name]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        made = cls(config(name)).eval()
        for parameter in made.parameters():
            # The usual initialisation is so small that attention would be close to uniform.
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.25)
    return made


def prompt(rows: int = 2, tokens: int = 11) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, 64, (rows, tokens), generator=generator)


def encoder_inputs(name: str) -> dict[str, Tensor]:
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(3))}
    return {"input_ids": prompt(2, 12)}
