"""What ``gpu_check`` times and tunes, on a GPU that is the CPU with torch's own kernels, at tiny sizes."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import kvq_ops
from kvq_lab import gpu_cases, gpu_peers, gpu_timing, gpu_tune
from kvq_lab.gpu_rows import Row, table
from kvq_lab.gpu_timing import Bench, Shape
from kvq_ops.formats import parse_kv_format
from tests.lab import gpu_standin

pytestmark = pytest.mark.no_poison  # sizes of a flush buffer are for GPUs


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gpu_standin.install(monkeypatch)
    for module in (gpu_timing, gpu_tune, gpu_cases):
        monkeypatch.setattr(module, "KERNELS", "torch")
    for module in (gpu_timing, gpu_tune):
        monkeypatch.setattr(module, "QUERY_HEADS", 4)
        monkeypatch.setattr(module, "KV_HEADS", 2)
        monkeypatch.setattr(module, "flush_buffer", lambda: torch.empty(8, dtype=torch.uint8))
    for name, value in {"DIM": 32, "BATCHES": (2, 1), "CONTEXTS": (64, 32), "PREFILLS": ((1, 32),)}.items():
        monkeypatch.setattr(gpu_timing, name, value)
    monkeypatch.setattr(gpu_timing, "copy_bandwidth", lambda flush: 1e9)
    # The CPU has no flash attention for grouped heads of a query that is shorter than its keys.
    monkeypatch.setattr(SDPBackend, "FLASH_ATTENTION", SDPBackend.MATH)
    with gpu_standin.OnCPU():
        yield


def run(section: str) -> list[Row]:
    return [row for case in gpu_timing.cases() if case.section == section for row in case.rows()]


def test_every_shape_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_timing, "HEADLINE", ("int8_per_token_head", "kivi4"))
    rows = run("decode")
    by_name = {row.name: row for row in rows}
    wrong = [row for row in rows if row.verdict in ("wrong", "failed")]
    assert not wrong, wrong
    ours = by_name["int8_per_token_head B=2 T=64"]
    # Codes, an fp32 scale for each vector, a length for each row.
    assert ours.bytes == 2 * (2 * 2 * 64 * (32 + 4) + 2 * 8)
    assert (
        ours.seconds is not None
        and ours.host is not None
        and ours.fraction == ours.bytes / ours.seconds / 1e9
    )
    assert set(ours.against) == {gpu_timing.BASE, gpu_timing.DENSE}
    assert by_name[f"kivi4 {gpu_timing.DENSE} B=1 T=32"].fraction is None
    assert by_name["SDPA bf16 B=2 T=64"].against == {gpu_timing.BASE: 1.0}
    assert by_name["FlashInfer bf16 B=2 T=64"].why.startswith("not installed")
    assert len(rows) == 4 * (1 + 2 * 2 + 2)
    assert "x dequantize+SDPA" in table(rows)


def test_prefill_and_append(monkeypatch: pytest.MonkeyPatch) -> None:
    for section, count in (("prefill", 1 + 2 * 3), ("append", 5), ("compile", 5)):
        rows = run(section)
        assert len(rows) == count and all(row.ok for row in rows), table(rows)


def test_a_wrong_kernel_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    original = kvq_ops.attention
    monkeypatch.setattr(kvq_ops, "attention", lambda *a, **k: original(*a, **k) * 1.02)
    bench = Bench.measured()
    shape = Shape(2, 64)
    (row,) = bench.format_rows(shape, "int8_per_token_head", *bench.dense(shape))
    assert row.verdict == "wrong" and row.seconds is None and not row.against
    calls = iter([kvq_ops.append_])
    monkeypatch.setattr(kvq_ops, "append_", lambda *a, **k: next(calls, lambda *a, **k: None)(*a, **k))
    (row,) = bench.append_rows("int8_per_token_head")
    assert row.verdict == "wrong" and "codes" in row.why


def test_what_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention that is not there takes no kernel's time away."""

    def broken(*args: Any) -> Tensor:
        raise RuntimeError("no available kernel")

    monkeypatch.setattr(gpu_timing, "sdpa", broken)
    rows = list(Bench.measured().shape_rows(Shape(1, 32), ["int8_per_token_head"]))
    verdicts = [row.verdict for row in rows]
    assert verdicts == ["failed", "timed", "failed", "not run", "not run"]
    assert rows[1].against == {} and "no available kernel" in rows[0].detail


def test_what_does_not_fit_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**14, 2**14))
    (row,) = Bench.measured().shape_rows(Shape(2, 64), ["int8_per_token_head"])
    assert row.verdict == "not run" and "GiB" in row.why


def test_flash_attention_aligns_to_the_first_key() -> None:
    query, key, value = Bench.measured().dense(Shape(1, 32, 2))
    with pytest.raises(ValueError, match="first key"):
        gpu_timing.sdpa(query, key, value, True)


def test_the_copy_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gpu_standin.install(monkeypatch)
    original = torch.empty
    sizes = []

    def small(size: int, **kwargs: Any) -> Tensor:
        sizes.append(size)
        return original(64, **kwargs)

    with gpu_standin.OnCPU():
        monkeypatch.setattr(torch, "empty", small)
        assert gpu_timing.copy_bandwidth(gpu_timing.flush_buffer()) > 0
    assert sizes == [2**28, 2**30]


# ---------------------------------------------------------------------------------------------------------------- peers


def attend(query: Tensor, pages: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """``[B, Hq, D]`` over pages ``[pages, 16, Hkv, D]``, each row's in the order of ``table``."""
    key, value = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (pages, values))
    return torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(2), key, value, enable_gqa=True
    ).squeeze(2)


class Wrapper:
    """As FlashInfer's, to the order of its arguments."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", *, use_tensor_cores: bool
    ) -> None:
        assert float_workspace_buffer.dtype is torch.uint8 and kv_layout == "NHD"

    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 32, 16)
        assert q_data_type is kv_data_type is torch.bfloat16 and last_page_len.tolist() == [16, 16]
        self.table = indices.view(len(indptr) - 1, -1)
        assert indptr.tolist() == [0, 4, 8]

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        return attend(q, paged_kv_cache[:, 0], paged_kv_cache[:, 1], self.table)


def unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: Any, block_table: Tensor, softcap: float,
    q_descale: Any, k_descale: Any, v_descale: Any, seq_threshold_3D: Any = None,
) -> None:  # fmt: skip
    assert causal and window_size == (-1, -1) and seqused_k.tolist() == [max_seqlen_k] * len(q)
    out.copy_(attend(q, k, v, block_table))


def modules(monkeypatch: pytest.MonkeyPatch, where: str, **content: Any) -> None:
    for at, _ in enumerate(where.split(".")):
        name = ".".join(where.split(".")[: at + 1])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, value in content.items():
        monkeypatch.setattr(sys.modules[where], name, value, raising=False)


@pytest.mark.parametrize("where", ["vllm.v1.attention.ops", "vllm.attention.ops"])
def test_peers_get_what_they_ask_for(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    modules(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    modules(monkeypatch, f"{where}.triton_unified_attention", unified_attention=unified_attention)
    rows = list(Bench.measured().shape_rows(Shape(2, 64), []))
    assert [row.verdict for row in rows] == ["timed"] * 3, rows


def test_peers_of_other_versions_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(q: Tensor, table_of_pages: Tensor) -> None: ...

    modules(monkeypatch, "vllm.attention.ops.triton_unified_attention", unified_attention=other)
    modules(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=lambda *a, **k: object())
    rows = list(Bench.measured().shape_rows(Shape(2, 64), []))
    assert [row.verdict for row in rows] == ["timed", "not run", "not run"]
    assert "plan" in rows[1].why and "also asks for table_of_pages" in rows[2].why
    with pytest.raises(TypeError, match="table_of_pages"):
        gpu_peers.asked_for(other, {"q": 1})


# --------------------------------------------------------------------------------------------------------------- tuning


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The table in a place of its own, and shapes that a CPU can serve."""
    from kvq_ops.triton_kernels import configs

    path = tmp_path / "configs.json"
    path.write_text(json.dumps({"about": "x", "entries": []}))
    monkeypatch.setattr(configs, "TABLE_FILE", path)
    monkeypatch.setattr(configs, "target", lambda: ("cuda", 90))
    monkeypatch.setattr(gpu_tune, "SHAPES", (Shape(2, 64), Shape(1, 32)))
    configs.measured.cache_clear()
    yield path
    configs.measured.cache_clear()
    configs._chosen.cache_clear()


def test_what_is_faster_is_written(monkeypatch: pytest.MonkeyPatch, parameters: Path) -> None:
    """Launch parameters change nothing on the CPU: the clock does what a GPU would."""
    from kvq_ops.triton_kernels import configs

    pair = parse_kv_format("int8_per_token_head")
    best = {"block_n": 128, "num_warps": 4, "num_stages": 3, "slots": 4}

    def pretended(self: gpu_tune.Trial, config: dict[str, int]) -> float:
        if config["num_warps"] == 8:
            raise RuntimeError("out of resource: shared memory")
        given = {"slots": 2} | config
        return 1.0 + 0.1 * sum(given[name] != value for name, value in best.items())

    monkeypatch.setattr(gpu_tune.Trial, "seconds", pretended)
    (row,) = gpu_tune.tune("int8_per_token_head")
    assert row.verdict == "timed" and row.seconds == 1.0 and "shared memory" in row.detail, row
    (entry,) = json.loads(parameters.read_text())["entries"]
    assert entry["config"] == best and entry["gain"] > 1 and entry["gpu"] == "Stand-in"
    spec = gpu_tune.Trial(pair, torch.empty(1)).identity["codes"]
    assert configs.nearest(configs.measured(), "decode", tuple(spec), 32, 4, False, ("cuda", 90)) == best
    # A second time there is nothing to be found, and the entry is neither lost nor doubled.
    list(gpu_tune.tune("int8_per_token_head"))
    assert json.loads(parameters.read_text())["entries"] == [entry]


def test_luck_is_not_written(monkeypatch: pytest.MonkeyPatch, parameters: Path) -> None:
    times = iter([1.0, 0.5])
    monkeypatch.setattr(gpu_tune.Trial, "seconds", lambda self, config: next(times, 1.0))
    (row,) = gpu_tune.tune("int8_per_token_head")
    assert row.verdict == "timed" and row.why.endswith("as known")
    assert json.loads(parameters.read_text())["entries"] == []


def test_wrong_results_are_refused(monkeypatch: pytest.MonkeyPatch, parameters: Path) -> None:
    trial = gpu_tune.Trial(parse_kv_format("int4_group32"), torch.empty(8, dtype=torch.uint8))
    assert trial.seconds(trial.known) > 0
    trial.calls[1] = lambda: torch.zeros(1, 4, 1, 32)
    with pytest.raises(ValueError, match="allowed"):
        trial.seconds(trial.known)


def test_candidates_are_compiled_beforehand(monkeypatch: pytest.MonkeyPatch, parameters: Path) -> None:
    """Each once, and one that is refused keeps none from being tried."""
    seen: list[dict[str, int]] = []

    def run(self: gpu_tune.Trial, config: dict[str, int]) -> None:
        seen.append(config)
        raise RuntimeError("out of registers")

    monkeypatch.setattr(gpu_tune.Trial, "run", run)
    made = [case for case in gpu_tune.cases() if case.name.startswith("tune fp8_per_token_head")]
    assert all(row.ok for case in made for row in case.rows())
    trial = gpu_tune.Trial(parse_kv_format("fp8_per_token_head"), torch.empty(1))
    assert seen == gpu_tune.candidates(trial.known) and len(seen) > 15
