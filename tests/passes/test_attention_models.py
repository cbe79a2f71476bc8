"""Tiny random-weight Hugging Face models: every layer is found, and the records rebuild prefill and decode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from passes.attention import NearMiss, scan

from .attention_reference import CaptureBackend, is_plain, rewrite_to_reference

transformers = pytest.importorskip("transformers")

BASE = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
WIDE = BASE | {"head_dim": 8}
WINDOW = WIDE | {"sliding_window": 4}
MIXED = WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}
MULTI = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
FALCON = {key: MULTI[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")} | {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = BASE | dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=16, first_k_dense_replace=2,
)  # fmt: skip
GPT2 = dict(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
BLOOM = dict(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
# (configuration class, arguments, implementations, expected facts of every site)
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "llama": ("LlamaConfig", WIDE, ("sdpa", "eager"), {"kv_heads": 2, "group": 2}),
    "mistral": ("MistralConfig", WINDOW, ("sdpa", "eager"), {"kv_heads": 2, "group": 2}),
    "mixtral": (
        "MixtralConfig",
        BASE | {"num_local_experts": 2},
        ("sdpa", "eager"),
        {"kv_heads": 2, "group": 2},
    ),
    "qwen2": ("Qwen2Config", BASE, ("sdpa", "eager"), {"kv_heads": 2, "group": 2}),
    "qwen3": ("Qwen3Config", WIDE, ("sdpa", "eager"), {"kv_heads": 2, "group": 2}),
    "gemma2": (
        "Gemma2Config",
        MIXED | {"query_pre_attn_scalar": 8},
        ("eager",),
        {"kv_heads": 2, "softcap": 50.0},
    ),
    "gemma3": ("Gemma3TextConfig", MIXED | {"query_pre_attn_scalar": 8}, ("sdpa", "eager"), {"kv_heads": 2}),
    "phi3": ("Phi3Config", BASE, ("sdpa", "eager"), {"kv_heads": 2, "group": 2}),
    "gpt2": ("GPT2Config", GPT2, ("sdpa", "eager"), {"kv_heads": 4, "group": 1}),
    "gpt_neox": ("GPTNeoXConfig", MULTI, ("sdpa", "eager"), {"kv_heads": 4, "group": 1}),
    "falcon": (
        "FalconConfig",
        FALCON | {"multi_query": True},
        ("sdpa", "eager"),
        {"kv_heads": 1, "group": 4},
    ),
    "bloom": ("BloomConfig", BLOOM, ("eager",), {"kv_heads": 4, "group": 1}),
    "olmo": ("OlmoConfig", BASE, ("sdpa", "eager"), {"kv_heads": 2, "group": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        MLA,
        ("sdpa", "eager"),
        {"kv_heads": 4, "head_dim": 12, "value_dim": 8},
    ),
    "gpt_oss": ("GptOssConfig", MIXED | EXPERTS, ("eager",), {"kv_heads": 2, "group": 2}),
}


class Recorder(CaptureBackend):
    """Rewrites every site of every graph and keeps what was found."""

    def __init__(self) -> None:
        super().__init__(self._edit)
        self.sites: list[list[Any]] = []
        self.misses: list[NearMiss] = []

    def _edit(self, graph_module: GraphModule) -> GraphModule:
        sites, misses = scan(graph_module)
        self.sites.append(sites)
        self.misses += misses
        return rewrite_to_reference(graph_module, sites)


def run(call: Callable[..., Any], config: Any) -> list[torch.Tensor]:
    """Logits of a prefill of 6 tokens, longer than the window, and of 3 decode steps."""
    cache = transformers.StaticCache(config=config, max_cache_len=16)
    tokens = torch.arange(5, 17).view(2, 6)
    outputs = []
    with torch.no_grad():
        for step in range(4):
            outputs.append(call(tokens, past_key_values=cache, use_cache=True).logits)
            tokens = torch.full((2, 1), 20 + step)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_exported_model(family: str, implementation: str) -> None:
    """The export wrapper of transformers: caches are buffers of the program."""
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    torch.manual_seed(137)
    kind, arguments, _, want = FAMILIES[family]
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    model.generation_config = transformers.GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=16,
        cache_config={"batch_size": 1, "max_cache_len": 16},
    )
    wrapper = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=16)
    program = wrapper.export(torch.tensor([[3, 4, 5]]))
    plain, rewritten = copy.deepcopy(program).module(), copy.deepcopy(program).module()
    sites, misses = scan(rewritten)
    assert len(sites) == 2 and not misses
    for site in sites:
        assert {name: getattr(site, name) for name in want} == want
        assert is_plain(site.key) and is_plain(site.value)
    rewrite_to_reference(rewritten, sites)
    for step in range(3):
        given = {"input_ids": torch.tensor([[5, 6, 7]]) + step, "cache_position": torch.arange(3) + 3 * step}
        torch.testing.assert_close(rewritten(**given), plain(**given), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "implementation"), [(name, how) for name, entry in FAMILIES.items() for how in entry[2]]
)
def test_every_layer_is_found_and_rebuilt(family: str, implementation: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(137)
    kind, arguments, _, want = FAMILIES[family]
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    recorder = Recorder()
    expected = run(model, config)
    got = run(torch.compile(model, backend=recorder), config)
    # Dynamo makes a graph for the prefill and one for all decode steps.
    assert [len(sites) for sites in recorder.sites] == [2, 2]
    assert not [str(miss) for miss in recorder.misses if miss.likely]
    for sites in recorder.sites:
        for site in sites:
            assert {name: getattr(site, name) for name in want} == want
            assert (site.sinks is not None) == (family == "gpt_oss")
    # In decode the keys come from the cache (a prefill past the window reads the fresh keys, an MLA model expands its latent).
    if family != "deepseek_v3":
        for site in recorder.sites[1]:
            assert is_plain(site.key) and is_plain(site.value)
            assert site.key.roles == site.value.roles == ("batch", "head", "token", "channel")
    for new, old in zip(got, expected, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)
