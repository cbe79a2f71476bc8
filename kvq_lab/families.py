"""Model families of transformers, small enough to try in seconds, through both front doors.

    python -m kvq_lab.families                  # a Markdown table of all families
    python -m kvq_lab.families --family llama --json llama.json

Each family is a configuration of two layers with random weights. A row of the table is one family with one kind of
attention through one door, run with the lossless format ``none`` beside the untouched model.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvq_ops.hf_shapes import cache_argument

__all__ = [
    "FAMILIES",
    "Family",
    "Record",
    "build",
    "get_family",
    "main",
    "markdown",
    "rows",
    "run_compile",
    "run_export",
    "run_rows",
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


# ---------------------------------------------------------------------------------------------------------- the doors


@dataclass
class Record:
    """What became of one row.

    Attributes:
        sites, rewritten: attention sites of all its graphs, and how many of them read the quantized cache.
        graphs: how many graphs were compiled or exported.
        left: for each site that was left, the node and the reason.
        error: largest difference of a logit from the untouched model's, with the lossless format.
        failure: the error that ended the run, if one did.
        notes: what is special about the family.
    """

    family: str
    attention: str
    door: str
    sites: int = 0
    rewritten: int = 0
    graphs: int = 0
    left: list[str] = field(default_factory=list)
    error: float | None = None
    failure: str = ""
    notes: str = ""

    def take(self, report: Any) -> None:
        """Count what a report of the passes says."""
        self.sites, self.rewritten, self.graphs = report.found, report.rewritten, len(report.graphs)
        self.left = [f"{site.anchor}: {site.node} {site.reason}" for site in report.left]


def run(
    family: Family, model: Any, call: Callable[..., Any], ids: Tensor, cache: Any, prompt: int
) -> list[Tensor]:
    """Logits of a prompt of ``prompt`` tokens, then of one token at a time to the end of ``ids``."""
    with torch.no_grad():
        logits = [step(family, model, call, ids[:, :prompt], cache)]
        for at in range(prompt, ids.shape[1]):
            logits.append(step(family, model, call, ids[:, at : at + 1], cache))
    return logits


def furthest(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference anywhere."""
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def compiled(
    family: Family,
    model: Any,
    format: str,
    ids: Tensor,
    prompt: int,
    *,
    lower: str = "inductor",
) -> tuple[list[Tensor], Any, Any]:
    """Logits through ``torch.compile``, the quantized cache after them, and the report of the passes."""
    import passes

    torch._dynamo.reset()
    before = len(passes.report().graphs)
    call = torch.compile(model, backend="kvq", fullgraph=True, options={"lower": lower})
    cache = quantized_cache(family, model, format, ids.shape[1], ids.shape[0])
    logits = run(family, model, call, ids, cache, prompt)
    return logits, cache, passes.Report(passes.report().graphs[before:])


def run_compile(
    family: Family, attention: str, *, prompt: int = 5, steps: int = 32, lower: str = "inductor"
) -> Record:
    """One row through ``torch.compile``: a prompt and ``steps`` tokens, past the window where there is one."""
    record = Record(family.name, attention, "compile", notes=family.notes)
    model, ids = build(family, attention), tokens(2, prompt + steps)
    wanted = run(family, model, model, ids, dense_cache(family, model, ids.shape[1]), prompt)
    found, _, report = compiled(family, model, "none", ids, prompt, lower=lower)
    record.take(report)
    record.error = furthest(found, wanted)
    return record


class DecodeStep(nn.Module):
    """One step of a model as a module that can be exported: the tensors of its cache are buffers.

    The cache holds a prompt already. Layers with a window have passed it: transformers decides by Python numbers how such a
    layer is written, so an exported step is one of the two kinds, and this is the one that goes on for ever.
    """

    def __init__(self, family: Family, model: nn.Module, cache: Any, batch: int, length: int) -> None:
        super().__init__()
        self.family, self.model, self.cache = family, model, cache
        asks = "position_ids" in inspect.signature(model.forward).parameters
        self.tells_positions = asks and (family.window is not None or family.slices_by_length)
        parts = {"": cache}
        if family.encodes:
            parts = {"": cache.self_attention_cache, "cross_": cache.cross_attention_cache}
            self.register_buffer("encoder_states", encoder_states(batch))
        for prefix, part in parts.items():
            for i, layer in enumerate(part.layers):
                self.register_buffer(f"{prefix}key_cache_{i}", layer.keys)
                self.register_buffer(f"{prefix}value_cache_{i}", layer.values)
                self.register_buffer(f"{prefix}cumulative_length_{i}", layer.cumulative_length)
        if family.slices_by_length:
            self.slots: Tensor
            self.register_buffer("slots", torch.arange(length))
            for layer in cache.layers:
                _count_on_host(layer)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits ``[batch, 1, VOCABULARY]`` for ``ids`` at ``positions``, both ``[batch, 1]``."""
        more: dict[str, Any] = {}
        if self.family.encodes:
            more["encoder_states"] = self.encoder_states
        if self.family.slices_by_length:
            # With positions and a mask given, the length makes no difference to such models.
            seen = self.slots <= positions[:, None, :, None]
            low = torch.finfo(torch.float32).min
            more["attention_mask"] = torch.zeros_like(seen, dtype=torch.float32).masked_fill(~seen, low)
        if self.tells_positions:
            more["position_ids"] = positions
        return step(self.family, self.model, self.model, ids, self.cache, **more)


def _count_on_host(layer: Any) -> None:
    """Let a layer answer with a number, which then is a constant of the exported step."""
    kind = type(layer)
    seen = int(layer.cumulative_length)
    layer.__class__ = type(
        f"Counted{kind.__name__}", (kind,), {"get_seq_length": lambda self: seen, "_layer_type": None}
    )


def exported(family: Family, model: nn.Module, cache: Any, ids: Tensor, prompt: int) -> Any:
    """The step after ``prompt`` tokens of ``ids``, with ``cache`` for all of them, as an exported program."""
    batch, length = ids.shape
    with torch.no_grad():
        step(family, model, model, ids[:, :prompt], cache)
        # The second token takes every layer to the branch that the exported step is made of.
        module = DecodeStep(family, model, cache, batch, length).eval()
        arguments = (ids[:, prompt : prompt + 1], torch.full((batch, 1), prompt))
        return torch.export.export(module, arguments, strict=True)


def run_program(program: Any, ids: Tensor, prompt: int) -> list[Tensor]:
    """Logits of an exported step for the tokens of ``ids`` from ``prompt`` on."""
    module = program.module()
    with torch.no_grad():
        return [
            module(ids[:, at : at + 1], torch.full((ids.shape[0], 1), at))
            for at in range(prompt, ids.shape[1])
        ]


def run_export(family: Family, attention: str, *, prompt: int = 11, steps: int = 8) -> Record:
    """One row through ``torch.export`` and ``quantize_exported``: ``steps`` tokens over a cache that holds a prompt."""
    import passes

    record = Record(family.name, attention, "export", notes=family.notes)
    model, ids = build(family, attention), tokens(2, prompt + steps)
    program = exported(family, model, dense_cache(family, model, ids.shape[1]), ids, prompt)
    before = len(passes.report().graphs)
    quantized = passes.quantize_exported(program, "none")
    record.take(passes.Report(passes.report().graphs[before:]))
    record.error = furthest(run_program(quantized, ids, prompt), run_program(program, ids, prompt))
    return record


def rows(family: Family) -> Iterator[tuple[str, Callable[..., Record]]]:
    """Attention and door of each row of a family."""
    for attention in family.attentions:
        yield attention, run_compile
        yield attention, run_export


# ---------------------------------------------------------------------------------------------------------- the table


def markdown(records: Sequence[Record]) -> str:
    """The table for the README: a line for each family and attention, with rewritten sites and the largest error by door."""
    doors = list(dict.fromkeys(record.door for record in records))
    lines = [
        f"| family | attention | {' | '.join(doors)} | left as they are |",
        f"|---|---|{'---|' * len(doors)}---|",
    ]
    grouped: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        name = f"{record.family} ({record.notes})" if record.notes else record.family
        grouped.setdefault((name, record.attention), {})[record.door] = record
    for (name, attention), by_door in grouped.items():
        cells = [_cell(by_door.get(door)) for door in doors]
        left = "; ".join(dict.fromkeys(reason for record in by_door.values() for reason in record.left))
        lines.append(f"| {name} | {attention} | {' | '.join(cells)} | {left} |")
    return "\n".join(lines)


def _cell(record: Record | None) -> str:
    if record is None:
        return ""
    if record.failure:
        return record.failure
    error = "" if record.error is None else f", {record.error:.0e}"
    return f"{record.rewritten} of {record.sites}{error}"


def run_rows(families: Sequence[Family], *, lower: str = "inductor") -> Iterator[Record]:
    """The record of every row; a row that fails says so in its record."""
    for family in families:
        for attention, door in rows(family):
            options = {"lower": lower} if door is run_compile else {}
            try:
                yield door(family, attention, **options)
            except Exception as error:
                name = "compile" if door is run_compile else "export"
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                yield Record(family.name, attention, name, failure=reason, notes=family.notes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the rows, tell of each as it ends, and print the table. The exit status is 1 if a row failed."""
    parser = argparse.ArgumentParser(prog="kvq models", description=main.__doc__)
    parser.add_argument("--family", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there, too")
    parser.add_argument(
        "--lower",
        choices=("inductor", "eager"),
        default="inductor",
        help="how compiled rows run (default: inductor)",
    )
    given = parser.parse_args(arguments)
    try:
        chosen = [get_family(name) for name in given.family] if given.family else list(FAMILIES)
    except KeyError as error:
        parser.error(str(error.args[0]))
    records: list[Record] = []
    for record in run_rows(chosen, lower=given.lower):
        records.append(record)
        outcome = record.failure or f"{record.rewritten} of {record.sites} sites, error {record.error:.0e}"
        print(f"{record.family} {record.attention} {record.door}: {outcome}", file=sys.stderr, flush=True)
    print(markdown(records))
    if given.json:
        given.json.write_text(json.dumps([asdict(record) for record in records], indent=2) + "\n")
    return int(any(record.failure for record in records))


if __name__ == "__main__":
    sys.exit(main())
