"""The benchmark of decoding: a tiny model in place of the real one, a script in place of llama.cpp."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="the lab extra is not installed")

from kvq_lab import bench, bench_llama, bench_model
from kvq_lab.assets import AssetError
from kvq_lab.bench_llama import LlamaError
from kvq_lab.bench_rows import Row
from kvq_lab.progress import Stages
from kvq_ops import reference
from tests.lab.bench_cases import Ticking, implementation, only


class ByteTokenizer:
    def __call__(self, text: str, return_tensors: str) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([list(text[:200].encode())]))


def tiny_llama(dtype: torch.dtype) -> tuple[Any, ByteTokenizer]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).to(dtype).eval(), ByteTokenizer()


def missing(config: Any, dtype: torch.dtype, room: int) -> Any:
    raise ImportError("You need to install this peer")


PEERS = (bench_model.PEERS[0], bench_model.Cached("a peer", missing, None, implementation="a peer"))
SMALL = bench.Settings(
    contexts=(12, 20), rounds=2, model_formats=("int8_per_token_head",), model_dtypes=(torch.float32,)
)


def measure(settings: bench.Settings, notes: set[str] | None = None) -> dict[tuple[str, int], Row]:
    rows = bench_model.measure(
        settings,
        Stages(io.StringIO()),
        set() if notes is None else notes,
        Ticking(),
        load=tiny_llama,
        peers=PEERS,
    )
    return {(row.name, row.tokens): row for row in rows}


@pytest.mark.slow
@pytest.mark.no_poison
def test_every_cache_is_measured_at_every_context() -> None:
    from torch._dynamo.utils import counters

    graphs, notes = counters["stats"]["unique_graphs"], set()
    rows = measure(dataclasses.replace(SMALL, contexts=(12, 20, 28)), notes)
    names = [
        "unquantized compiled, float32",
        "kvq int8_per_token_head, float32",
        "transformers DynamicCache, float32",
        "a peer, float32",
        "unquantized compiled, bfloat16",
    ]
    assert list(rows) == [(name, context) for context in (12, 20, 28) for name in names]
    for (name, _), row in rows.items():
        if name.startswith("a peer"):
            assert row.status.startswith(
                "not run: ImportError: You need to install this peer; pip install 'kvq-ops[peers]'"
            )
            assert row.seconds is None
            continue
        assert row.ok, f"{name}: {row.status}"
        assert row.tokens_per_second == pytest.approx(1 / row.seconds)
        assert row.base == "unquantized compiled, bfloat16" and row.ratio > 0
        assert row.bytes > 2 * 64 * 256 * 2
        if "DynamicCache" not in name:
            assert row.max_error <= row.allowed_error
    # The coded cache is the smaller one, and its next token is nearly the same; the same model in fp32 gives the same.
    plain, coded = rows[names[0], 28], rows[names[1], 28]
    assert coded.bytes < plain.bytes
    assert abs(plain.kl) < 1e-9 < coded.kl < 1e-3
    assert plain.max_error < 1e-5
    # Twice for each of three: once for the first size of the cache, once for all others.
    assert counters["stats"]["unique_graphs"] - graphs <= 6
    assert any("cmake" in note for note in notes)
    assert not any("sites" in note for note in notes)


@pytest.mark.slow
@pytest.mark.no_poison
def test_a_model_with_a_wrong_kernel_has_no_speed() -> None:
    def forgets_the_newest(query: Any, key: Any, value: Any, *formats: Any, **options: Any) -> torch.Tensor:
        key = [*key[:-1], key[-1] - 1]
        return reference.attention(query, key, value, *formats, **options)

    with implementation("attention", forgets_the_newest, only("int8_per_token_head")):
        rows = measure(dataclasses.replace(SMALL, contexts=(12,)))
    row = rows["kvq int8_per_token_head, float32", 12]
    assert row.wrong and row.seconds is None is row.tokens_per_second
    assert rows["unquantized compiled, float32", 12].seconds > 0


def test_kernels_are_held_against_float64_on_the_models_own_cache() -> None:
    from kvq_ops.hf import QuantizedCache

    model, _ = tiny_llama(torch.float32)
    with torch.no_grad():
        written = bench_model.prefilled(model, torch.randint(0, 256, (1, 24)))
    assert [tuple(x.shape) for pair in written for x in pair] == [(1, 2, 24, 32)] * 4
    cache = QuantizedCache(model.config, "int8_per_token_head", max_cache_len=32)
    for layer, (key, value) in enumerate(written):
        cache.update(key, value, layer)
    wrong, found, allowed = bench_model.check_kernels(cache, 4, torch.float32)
    assert wrong == "" and 0 < found <= allowed

    def off(*args: Any, **options: Any) -> torch.Tensor:
        return reference.attention(*args, **options) + 1e-4

    with implementation("attention", off, only("int8_per_token_head")):
        assert bench_model.check_kernels(cache, 4, torch.float32)[0].startswith("wrong: max error 0.0001")


def test_logits_in_16_bits_may_be_as_far_from_fp32_as_the_eager_ones() -> None:
    exact = torch.randn(1, 50)
    noise = torch.randn(1, 50)
    eager = exact + 0.01 * noise
    for dtype in (torch.float16, torch.bfloat16):
        assert bench_model.check_logits(exact - 0.015 * noise, eager, exact, dtype)[0] == ""
        assert bench_model.check_logits(exact + 0.021 * noise, eager, exact, dtype)[0].startswith(
            "wrong: logits"
        )
    # fp32 is compared with the eager step itself.
    assert bench_model.check_logits(eager * (1 + 1e-3), eager, exact, torch.float32)[0] == ""
    assert bench_model.check_logits(eager * 1.01, eager, exact, torch.float32)[0].startswith("wrong: logits")
    assert bench_model.check_logits(eager * float("nan"), eager, exact, torch.float32)[0].startswith("wrong")


def test_divergence_is_kl() -> None:
    got, want = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.25, 0.75]]))
    assert bench_model.divergence(got, want) == pytest.approx(0.25 * -0.6931472 + 0.75 * 0.4054651, abs=1e-6)
    assert bench_model.divergence(want + 3, want) == pytest.approx(0, abs=1e-7)


# -- llama.cpp ----------------------------------------------------------------------------------------------------------


def _output(samples: list[int], generated: int = 16) -> str:
    test = {
        "build_number": 1234,
        "build_commit": "abc",
        "n_prompt": 0,
        "n_gen": generated,
        "samples_ns": samples,
    }
    return "a line before\n" + json.dumps([test], indent=2)


def _program(tmp_path: Path, body: str) -> Path:
    path = tmp_path / "llama-bench"
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_seconds_of_a_token_come_from_its_json() -> None:
    seconds, build = bench_llama.parse(_output([32_000_000, 16_000_000]))
    assert seconds == [0.002, 0.001]
    assert build == "1234 (abc)"
    for output in ("", "[]", "[{}]", _output([]), _output([0]), _output([5], generated=0)):
        with pytest.raises(LlamaError):
            bench_llama.parse(output)


def test_options_follow_what_the_program_knows() -> None:
    def words(known: str) -> str:
        return " ".join(bench_llama.command(Path("b"), Path("w.gguf"), "q8_0", 512, 2, known))

    old = words("-fa, --flash-attn <0|1>")
    assert old.startswith("b -m w.gguf -t 2 -p 0 -n 16 -d 512 ")
    assert "-fa 1 -ctk q8_0 -ctv q8_0 -o json" in old and "repack" not in old
    new = words("-fa <on|off|auto> ... --repack <0|1>")
    assert "-fa on" in new and new.endswith("--repack 0")


def test_runs_before_and_after_are_joined(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(bench_llama, "dense_gguf", lambda dtype: tmp_path / "weights.gguf")
    body = f"""
if '--help' in sys.argv: print('--repack'); sys.exit()
if 'q4_0' in sys.argv: sys.exit('cannot do that')
assert sys.argv[sys.argv.index('-d') + 1] == '77' and '--repack' in sys.argv
print({_output([16_000_000, 48_000_000])!r})
"""
    notes: set[str] = set()
    runs = bench_llama.Runs(_program(tmp_path, body), 77, (torch.float32,), notes)
    runs.run()
    runs.run()
    rows = {row.format: row for row in runs.rows(Row("model", "base", seconds=0.004))}
    assert list(rows) == ["f16", "q8_0", "q4_0"]
    assert (rows["q8_0"].seconds, rows["q8_0"].ratio, rows["q8_0"].rounds) == (0.002, 2.0, 4)
    assert (rows["q8_0"].base, rows["q8_0"].tokens, rows["q8_0"].dtype) == ("base", 77, "float32")
    assert rows["q4_0"].status == "not run: llama-bench ended with status 1: cannot do that"
    assert rows["q4_0"].seconds is None
    assert notes == {"llama.cpp build 1234 (abc)"}


def test_without_the_program_there_are_no_rows_and_a_note_how_to_build_it() -> None:
    notes: set[str] = set()
    runs = bench_llama.Runs(None, 77, (torch.float32,), notes)
    runs.run()
    assert runs.rows(Row("model", "base")) == []
    assert "cmake" in notes.pop()


def test_the_program_is_the_one_named_or_that_of_the_variable(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("LLAMA_BENCH", raising=False)
    assert bench_llama.find(None) is None
    program = _program(tmp_path, "")
    assert bench_llama.find(str(program)) == program
    monkeypatch.setenv("LLAMA_BENCH", str(program))
    assert bench_llama.find(None) == program
    with pytest.raises(AssetError, match="cmake"):
        bench_llama.find(str(tmp_path))


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_weights_are_written_dense(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf", reason="the lab extra is not installed")
    import numpy as np

    source = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    values = np.linspace(-1, 1, 4 * 32, dtype=np.float32).reshape(4, 32)
    coded = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("weight", coded, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("norm", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    bench_llama._convert(source, tmp_path, kind)
    reader = gguf.GGUFReader(tmp_path / f"{kind}.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert [int(n) for n in tensors["weight"].shape] == [32, 4]
    assert tensors["norm"].tensor_type.name == "F32" and np.array_equal(tensors["norm"].data, values[0])
    assert tensors["weight"].tensor_type.name == kind.upper()
    want = gguf.quants.dequantize(coded, gguf.GGMLQuantizationType.Q4_1)
    got = gguf.quants.dequantize(tensors["weight"].data, tensors["weight"].tensor_type)
    # bf16 keeps eight bits.
    assert np.allclose(got, want, rtol=0 if kind == "f32" else 2**-8, atol=0)
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["general.file_type"].contents() == int(
        gguf.LlamaFileType.ALL_F32 if kind == "f32" else gguf.LlamaFileType.MOSTLY_BF16
    )
