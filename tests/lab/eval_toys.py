"""A small random model with a tokenizer of bytes, for tests of the evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from kvq_lab import assets
from kvq_lab.eval_models import Subject

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 3, 4, 2, 32


class ByteTokenizer:
    """A token for each byte, with just what the evaluation asks of a tokenizer."""

    bos_token_id = None
    eos_token_id = 0

    def __call__(self, text: str, return_tensors: str = "", **_: Any) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([list(text.encode())]))


def tiny_llama(**changes: Any) -> Any:
    """A Llama with attention sharp enough for keys to matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    options = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "initializer_range": 0.25,
        "max_position_embeddings": 2048,
        "attn_implementation": "sdpa",
    }
    return LlamaForCausalLM(LlamaConfig(**options | changes)).eval()


def subject(model: Any = None) -> Subject:
    return Subject("toy", "Toy", tiny_llama() if model is None else model, ByteTokenizer())


def texts() -> dict[str, str]:
    """Three different stretches of real prose."""
    text = assets.SAMPLE.read_text(encoding="utf-8").encode("ascii", "ignore").decode()
    return {"emma": text[:9000], "afaq": text[9000:18000], "persuasion": text[18000:27000]}
