"""The report: counts, reasons, bytes, as text and as data."""

from __future__ import annotations

import json

import pytest
import torch

import passes
from kvq_ops.handle import storage_bytes
from passes.fuse import SiteResult
from passes.report import CacheResult, GraphReport, Report, record

from . import toys

FORMAT = "key=int8_per_token_head,value=int4_group32"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    passes.clear_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def test_empty() -> None:
    assert passes.report().found == passes.report().rewritten == 0
    assert "no graph" in passes.report().text()


def test_bytes_are_those_of_the_live_tensors() -> None:
    """G6: what the report says equals the summed storages."""
    model = toys.quantized(toys.Decoder(2).eval(), FORMAT)
    step = torch.compile(model, backend="kvq", options={"lower": "eager"})
    for inputs in toys.chunks(toys.B, [3, 1]):
        step(*inputs)
    report = passes.report()
    assert len(report.graphs) == 2
    for graph in report.graphs:
        by_name = {cache.name: cache for cache in graph.caches}
        assert len(by_name) == 4
        for name, handle in model.named_buffers():
            cache = by_name[name]
            assert cache.bytes == storage_bytes([handle]) == handle.nbytes
            assert cache.dense_bytes == toys.B * toys.HKV * toys.CAPACITY * toys.D * 4
            assert cache.shape == tuple(handle.shape) and cache.format == handle.format.name
    assert report.found == report.rewritten == 4 and report.left == []


def test_data_is_json_and_says_the_same_as_the_text() -> None:
    model = toys.quantized(toys.Decoder(2).eval(), FORMAT)
    torch.compile(model, backend="kvq", options={"lower": "eager"})(*toys.chunks(toys.B, [2])[0])
    data = json.loads(json.dumps(passes.report().data()))
    (graph,) = data["graphs"]
    assert (data["found"], data["rewritten"], graph["found"], graph["rewritten"]) == (2, 2, 2, 2)
    assert graph["writes"] == 4 and len(graph["caches"]) == 4
    text = passes.report().text()
    assert "2 of 2" in text and "2 int8_per_token_head" in text and "2 int4_group32" in text
    assert f"{sum(c['bytes'] for c in graph['caches']):,}" in text


def test_reasons_are_grouped_and_name_the_node() -> None:
    sites = [
        SiteResult(f"softmax_{i}", f"layers.{i}", False, f"mul_{i}", "scales by a tensor") for i in range(3)
    ]
    sites.append(SiteResult("sdpa", "", False, "exp", "is not understood"))
    record(
        GraphReport("compile", sites=[*sites, SiteResult("sdpa_1", "", True)], notes=["something to know"])
    )
    lines = passes.report().text().splitlines()
    assert lines[0] == "compile: 1 of 5 attention sites read the quantized cache"
    assert lines[1] == "  left: softmax_0 in layers.0 and 2 more: mul_0 scales by a tensor"
    assert lines[2] == "  left: sdpa: exp is not understood"
    assert lines[3] == "  note: something to know"
    assert len(passes.report().left) == 4


def test_left_site_of_a_real_graph() -> None:
    """An attention over something that is no cache is reported with the node that stands for it."""

    class Both(toys.Decoder):
        def forward(self, ids, position):
            x = self.embedding(ids)
            plain = torch.nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])
            return super().forward(ids, position) + plain.sum()

    model = toys.quantized(Both(1).eval(), "none")
    torch.compile(model, backend="kvq", options={"lower": "eager"})(*toys.chunks(toys.B, [2])[0])
    report = passes.report()
    assert (report.found, report.rewritten) == (2, 1)
    (left,) = report.left
    assert left.node in report.text() and "no quantized cache" in left.reason


def test_clear_and_snapshots() -> None:
    record(GraphReport("compile"))
    before = passes.report()
    record(GraphReport("export"))
    assert len(before.graphs) == 1 and len(passes.report().graphs) == 2
    passes.clear_report()
    assert isinstance(before, Report) and len(before.graphs) == 1 and passes.report().graphs == []


def test_planned_bytes_equal_real_bytes() -> None:
    """What ``explain`` promises is what the quantized model takes."""
    model = toys.Decoder(2).eval()
    inputs = toys.chunks(toys.B, [1])[0]
    planned = passes.explain(model, *inputs, format=FORMAT)
    assert not any(isinstance(b, toys.QuantizedKV) for b in model.buffers())
    passes.quantize_kv_cache_(model, FORMAT, inputs)
    want = {c.name: (c.format, c.bytes, c.dense_bytes) for c in planned.graphs[0].caches}
    got = {
        name: (h.format.name, h.nbytes, CacheResult.of(name, h).dense_bytes)
        for name, h in model.named_buffers()
        if isinstance(h, toys.QuantizedKV)
    }
    assert got == want and len(got) == 4
