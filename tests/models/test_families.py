"""Every family of the table through both front doors, beside the model that nobody touched."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import passes  # noqa: E402
from kvq_lab import families as lab  # noqa: E402
from kvq_lab import family_runs as runs  # noqa: E402
from kvq_lab.families import FAMILIES, LAYERS, WINDOW, build, get_family, tokens  # noqa: E402
from kvq_ops.hf import QuantizedCache  # noqa: E402

from .fake_cache import make_fake_  # noqa: E402

INT8 = "int8_per_token_head"
ROWS = [pytest.param(f.name, a, id=f"{f.name}-{a}") for f in FAMILIES for a in f.attentions]
NAMES = [f.name for f in FAMILIES]
WINDOWED = [f.name for f in FAMILIES if f.window]
ENCODING = [f.name for f in FAMILIES if f.encodes]


@pytest.fixture(autouse=True)
def _one_at_a_time() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def sites_of(family: lab.Family) -> int:
    """Attentions of the decoder in one step."""
    return LAYERS * (2 if family.encodes else 1)


def check_int8(found: list[Tensor], fake: list[Tensor], dense: list[Tensor]) -> None:
    """Within a fifth of what quantization itself changes."""
    change = runs.furthest(fake, dense)
    assert change > 1e-3, "quantization changes nothing, so the comparison would tell nothing"
    assert runs.furthest(found, fake) <= change / 5


# ------------------------------------------------------------------------------------------------------------ compile


@pytest.mark.parametrize(("name", "attention"), ROWS)
def test_compiled_model_equals_the_untouched_one(name: str, attention: str) -> None:
    family = get_family(name)
    record = runs.run_compile(family, attention, lower="eager")
    assert not record.left
    assert record.graphs <= 3
    assert record.sites == record.rewritten == record.graphs * sites_of(family)
    assert record.error is not None and record.error <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_compiled_int8_equals_fake_quantization(name: str) -> None:
    family = get_family(name)
    model, ids = build(family, family.attentions[0]), tokens(2, 5 + 12)
    dense = runs.run(family, model, model, ids, lab.dense_cache(family, model, 17), 5)
    fake = runs.run(family, model, model, ids, make_fake_(lab.dense_cache(family, model, 17)), 5)
    found, _, report = runs.compiled(family, model, INT8, ids, 5, lower="eager")
    assert report.rewritten == report.found > 0
    check_int8(found, fake, dense)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_with_inductor(name: str) -> None:
    family = get_family(name)
    model, ids = build(family, family.attentions[-1]), tokens(2, 5 + 7)
    wanted = runs.run(family, model, model, ids, lab.dense_cache(family, model, 12), 5)
    found, _, report = runs.compiled(family, model, "none", ids, 5)
    assert report.rewritten == report.found > 0
    assert runs.furthest(found, wanted) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "bloom"])
def test_sizes_that_stay_open(name: str) -> None:
    """``dynamic=True`` opens sizes and Python floats: scales are still known, and prompts may be of any length."""
    family = get_family(name)
    model = build(family, family.attentions[-1])
    torch._dynamo.reset()
    passes.clear_report()
    call = torch.compile(model, backend="kvq", fullgraph=True, dynamic=True, options={"lower": "eager"})
    for batch, prompt in ((2, 5), (2, 4)):
        ids = tokens(batch, 8)
        wanted = runs.run(family, model, model, ids, lab.dense_cache(family, model, 12), prompt)
        cache = lab.quantized_cache(family, model, "none", 12, batch)
        assert runs.furthest(runs.run(family, model, call, ids, cache, prompt), wanted) <= 1e-5
    report = passes.report()
    assert report.rewritten == report.found == LAYERS * len(report.graphs)
    assert len(report.graphs) == 2


@pytest.mark.parametrize("name", WINDOWED)
def test_prompt_longer_than_the_window(name: str) -> None:
    family = get_family(name)
    model, ids = build(family, family.attentions[0]), tokens(2, WINDOW + 3 + 4)
    prompt = WINDOW + 3
    dense = runs.run(family, model, model, ids, lab.dense_cache(family, model, ids.shape[1]), prompt)
    found, _, report = runs.compiled(family, model, "none", ids, prompt, lower="eager")
    assert runs.furthest(found, dense) <= 1e-5
    # The sliding layers attend to this prompt before they store it: there are no codes to read.
    sliding = sum(isinstance(kind, str) and kind == "sliding_attention" for kind in _layer_types(model))
    assert len(report.left) == sliding
    assert all(site.node and site.reason for site in report.left)
    fake = runs.run(
        family, model, model, ids, make_fake_(lab.dense_cache(family, model, ids.shape[1])), prompt
    )
    coded, _, _ = runs.compiled(family, model, INT8, ids, prompt, lower="eager")
    check_int8(coded, fake, dense)


def _layer_types(model: Any) -> list[str]:
    return getattr(model.config, "layer_types", None) or ["sliding_attention"] * LAYERS


@pytest.mark.parametrize("name", WINDOWED)
def test_history_that_moves_is_never_coded_again(name: str) -> None:
    family = get_family(name)
    model, ids = build(family, family.attentions[0]), tokens(2, WINDOW + 6)
    call = torch.compile(model, backend="kvq", options={"lower": "eager"})
    cache = lab.quantized_cache(family, model, INT8, ids.shape[1], 2)
    sliding = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    assert sliding
    moved = 0
    with torch.no_grad():
        lab.step(family, model, call, ids[:, : WINDOW - 2], cache)
        for at in range(WINDOW - 2, ids.shape[1]):
            before = [
                [plane.clone() for plane in h.store[:-1]] for one in sliding for h in (one.keys, one.values)
            ]
            full = sliding[0].cumulative_length_int >= WINDOW
            lab.step(family, model, call, ids[:, at : at + 1], cache)
            after = [h.store[:-1] for one in sliding for h in (one.keys, one.values)]
            shift = int(full)
            kept = WINDOW - 1 if full else at
            for old, new in zip(before, after, strict=True):
                for one, two in zip(old, new, strict=True):
                    assert torch.equal(one[:, :, shift : shift + kept], two[:, :, :kept])
            moved += shift
    assert moved >= 3


@pytest.mark.parametrize("name", ENCODING)
def test_d10_encoder_states_are_coded_once(name: str) -> None:
    family = get_family(name)
    model, ids = build(family, "sdpa"), tokens(2, 8)
    call = torch.compile(model, backend="kvq", options={"lower": "eager"})
    cache = lab.quantized_cache(family, model, INT8, 8, 2)
    with torch.no_grad():
        lab.step(family, model, call, ids[:, :3], cache)
        first = [
            [plane.clone() for plane in handle.store] for handle in cache.cross_attention_cache.handles()
        ]
        for at in range(3, 8):
            lab.step(family, model, call, ids[:, at : at + 1], cache)
    now = [handle.store for handle in cache.cross_attention_cache.handles()]
    assert len(now) == 2 * LAYERS
    for old, new in zip(first, now, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(old, new, strict=True))
        assert new[-1].tolist() == [lab.ENCODED] * 2
    writes = {graph.writes for graph in passes.report().graphs[-1:]}
    assert writes == {2 * LAYERS}, "a decode step writes its own keys and values and nothing else"


@pytest.mark.parametrize(("name", "sites"), [("opt", LAYERS), ("mpt", 0)])
def test_graph_breaks_inside_the_model(name: str, sites: int) -> None:
    """Without ``host_length`` these models break the graph; MPT does so between the scores and the softmax."""
    family = get_family(name)
    model, ids = build(family, "eager"), tokens(2, 8)
    wanted = runs.run(family, model, model, ids, lab.dense_cache(family, model, 8), 5)
    passes.clear_report()
    torch._dynamo.reset()
    call = torch.compile(model, backend="kvq", options={"lower": "eager"})
    found = runs.run(family, model, call, ids, QuantizedCache(model.config, "none", 8, batch_size=2), 5)
    assert runs.furthest(found, wanted) <= 1e-5
    report = passes.report()
    assert report.found == report.rewritten
    assert len(report.graphs) > 3
    assert bool(report.rewritten) == bool(sites)


# ------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize(("name", "attention"), ROWS)
def test_exported_step_equals_the_dense_program(name: str, attention: str) -> None:
    family = get_family(name)
    record = runs.run_export(family, attention)
    assert not record.left
    assert record.sites == record.rewritten == sites_of(family)
    assert record.error is not None and record.error <= 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_exported_int8_equals_fake_quantization(name: str) -> None:
    family = get_family(name)
    prompt, length = WINDOW + 3, WINDOW + 8
    model, ids = build(family, family.attentions[0]), tokens(2, length)
    cache = lab.dense_cache(family, model, length)
    program = runs.exported(family, model, copy.deepcopy(cache), ids, prompt)
    quantized = passes.quantize_exported(program, INT8)
    with torch.no_grad():
        lab.step(family, model, model, ids[:, :prompt], cache)
        # The rotary part of latent attention stays exact.
        make_fake_(cache, exact_values=name == "deepseek-v3")
        fake = [lab.step(family, model, model, ids[:, at : at + 1], cache) for at in range(prompt, length)]
    found = runs.run_program(quantized, ids, prompt)
    check_int8(found, fake, runs.run_program(program, ids, prompt))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "deepseek-v3", "whisper"])
def test_exported_program_changes_its_stores_and_lengths_alone(name: str) -> None:
    family = get_family(name)
    model, ids = build(family, family.attentions[0]), tokens(2, WINDOW + 5)
    program = runs.exported(family, model, lab.dense_cache(family, model, ids.shape[1]), ids, WINDOW + 3)
    quantized = passes.quantize_exported(program, INT8)
    changed = set(quantized.run_decompositions({}).graph_signature.buffers_to_mutate.values())
    dense = set(program.run_decompositions({}).graph_signature.buffers_to_mutate.values())
    planes = ("codes", "scale", "length")
    expected: set[str] = set()
    for buffer in dense:
        coded = f"{buffer}_codes" in quantized.state_dict
        expected |= {f"{buffer}_{plane}" for plane in planes} if coded else {buffer}
    assert changed == expected
    assert any(buffer.endswith("_codes") for buffer in changed)
    assert not any("cross_" in buffer for buffer in changed)
    coded_names = {
        buffer.removesuffix("_codes") for buffer in quantized.state_dict if buffer.endswith("_codes")
    }
    assert len(coded_names) == 2 * sites_of(family) // (2 if name == "deepseek-v3" else 1)
    assert not coded_names & set(quantized.state_dict), "the dense buffers are gone"


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_exporter_of_transformers(name: str) -> None:
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    family = get_family(name)
    model, ids = build(family, "sdpa"), tokens(1, 6)
    model.generation_config.cache_implementation = "static"
    exporter = TorchExportableModuleForDecoderOnlyLM(model, batch_size=1, max_cache_len=16)
    with torch.no_grad():
        program = exporter.export(input_ids=ids[:, :1], cache_position=torch.tensor([0]))
    quantized = passes.quantize_exported(program, "none")
    assert passes.report().graphs[-1].rewritten == LAYERS
    coded = passes.quantize_exported(program, INT8)
    found = []
    for one in (quantized, coded, program):
        module = one.module()
        with torch.no_grad():
            found.append(
                [module(input_ids=ids[:, at : at + 1], cache_position=torch.tensor([at])) for at in range(6)]
            )
    assert runs.furthest(found[0], found[2]) <= 1e-5
    assert 1e-4 < runs.furthest(found[1], found[2]) < 0.1 * float(found[2][-1].std())


# -------------------------------------------------------------------------------------------------------- the command


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    target = tmp_path / "rows.json"
    assert runs.main(["--family", "bloom", "--lower", "eager", "--json", str(target)]) == 0
    out = capsys.readouterr()
    lines = out.out.strip().splitlines()
    assert lines[0] == "| family | attention | compile | export | left as they are |"
    assert (
        len(lines) == 3
        and lines[2].startswith("| bloom")
        and "| 4 of 4, " in lines[2]
        and "| 2 of 2, " in lines[2]
    )
    assert len(out.err.strip().splitlines()) >= 2, "progress is told per row"
    records = json.loads(target.read_text())
    assert [(r["door"], r["failure"]) for r in records] == [("compile", ""), ("export", "")]
    assert all(r["sites"] == r["rewritten"] > 0 for r in records)


def test_command_names_the_families(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runs.main(["--family", "lama"])
    assert "llama" in capsys.readouterr().err
