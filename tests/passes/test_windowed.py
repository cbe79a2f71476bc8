"""Compiled writes and reads of caches with exact tokens: as eager, and refused with a reason where a window cannot follow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes
from kvq_ops import errors
from kvq_ops.handle import QuantizedKV
from tests.ops import windows  # noqa: F401  registers formats of small groups

from .fake_quantized import compiled
from .test_compile_writes import WRITES, Step
from .toys import CAPACITY, WIDTH, B, Layer, causal_mask, handles, quantized

SPEC = "key=test_keys_g8r5s3,value=int4_group32+recent4"
SIZES = [14, 1, 1, 9, 1]


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    passes.clear_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def assert_same_stores(a: nn.Module, b: nn.Module) -> None:
    for one, other in zip(handles(a), handles(b), strict=True):
        for plane, x, y in zip(one.format.planes, one.store, other.store, strict=True):
            assert torch.equal(x, y), plane.name


@pytest.mark.parametrize("name", [n for n, w in WRITES.items() if w.capacity == CAPACITY])
def test_writes_append(name: str) -> None:
    """Eager with handles, compiled, and a plain append: the same stores, and attention reads them."""
    write = WRITES[name]
    eager = quantized(Step(write).eval(), SPEC)
    stored, plain = copy.deepcopy(eager), copy.deepcopy(eager)
    step = compiled(stored)
    start = 0
    for size in SIZES:
        x = torch.randn(B, size, WIDTH)
        position = torch.arange(start, start + size)
        if write.rows:
            position = position.expand(B, -1)
        expected = eager(x, position, start)
        torch.testing.assert_close(step(x, position, start), expected, rtol=0, atol=1e-5)
        _, key, value = plain.project(x)
        for handle, new in zip(handles(plain), (key, value), strict=True):
            handle[:, :, start : start + size] = new
        start += size
    assert_same_stores(stored, eager)
    assert_same_stores(plain, eager)
    assert handles(stored)[0].plane_coded.tolist() == [(26 - 5) // 8 * 8] * B
    report = passes.report()
    assert report.rewritten == report.found == len(report.graphs) >= 1, report.text()


def test_a_ring_of_slots_is_an_error() -> None:
    """It begins anew at its first slot: eager and compiled raise before a token is lost."""
    for run in (lambda m: m, compiled):
        stored = quantized(Step(WRITES["ring"]).eval(), SPEC)
        step = run(stored)
        for t in range(8):
            step(torch.randn(B, 1, WIDTH), torch.tensor([t]), t)
        before = [handle.dequantize() for handle in handles(stored)]
        with pytest.raises(RuntimeError, match="crop_"):
            step(torch.randn(B, 1, WIDTH), torch.tensor([8]), 8)
        assert all(torch.equal(h.dequantize(), old) for h, old in zip(handles(stored), before, strict=True))


def test_a_cache_that_is_written_whole_is_coded_whole() -> None:
    eager = quantized(Step(WRITES["ring_by_roll"]).eval(), SPEC)
    stored = copy.deepcopy(eager)
    step = compiled(stored)
    for t in range(11):
        x, position = torch.randn(B, 1, WIDTH), torch.tensor([t])
        torch.testing.assert_close(step(x, position, t), eager(x, position, t), rtol=0, atol=1e-5)
    assert_same_stores(stored, eager)


def test_inductor_decodes_as_eager_does() -> None:
    eager = quantized(Step(WRITES["slice_assign"]).eval(), SPEC)
    stored = copy.deepcopy(eager)
    step = torch.compile(stored, backend="kvq", fullgraph=True, dynamic=True)
    for start, size in ((0, 14), (14, 2), (16, 3)):
        x, position = torch.randn(B, size, WIDTH), torch.arange(start, start + size)
        torch.testing.assert_close(step(x, position, start), eager(x, position, start), rtol=0, atol=1e-4)
    for one, other in zip(handles(stored), handles(eager), strict=True):
        assert one.length.tolist() == other.length.tolist() == [19] * B
        assert torch.equal(one.plane_coded, other.plane_coded)


class Part(Layer):
    """Attends to a slice of the tokens."""

    def __init__(self, cut: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor, position: Tensor, stop: int) -> Tensor:
        query, key, value = self.project(x)
        self.k_cache.index_copy_(2, position, key)
        self.v_cache.index_copy_(2, position, value)
        mask = self.cut(causal_mask(position, CAPACITY).transpose(2, 3), stop).transpose(2, 3)
        keys, values = self.cut(self.k_cache, stop), self.cut(self.v_cache, stop)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("spec", [SPEC, "int8_per_channel", "key=int8_per_token_head,value=kivi2+recent0"])
@pytest.mark.parametrize("dynamic", [False, None])
def test_reads_of_the_first_tokens_are_cut(spec: str, dynamic: bool | None) -> None:
    """Where the cut goes through a group of tokens, the group keeps its scale."""
    eager = quantized(Part(lambda cache, stop: cache[:, :, :stop]).eval(), spec)
    stored = copy.deepcopy(eager)
    step = torch.compile(stored, backend="kvq", fullgraph=True, dynamic=dynamic, options={"lower": "eager"})
    x = torch.randn(B, 45, WIDTH)
    for module in (eager, step):
        module(x, torch.arange(45), CAPACITY)
    for t, stop in enumerate((46, 48, 51, 57), 45):
        x, position = torch.randn(B, 1, WIDTH), torch.tensor([t])
        torch.testing.assert_close(step(x, position, stop), eager(x, position, stop), rtol=0, atol=1e-5)
    assert_same_stores(stored, eager)
    report = passes.report()
    assert report.rewritten == report.found == len(report.graphs), report.text()


def test_reads_from_a_later_token_stay_decoded_and_say_why() -> None:
    eager = quantized(Part(lambda cache, stop: cache[:, :, 4:]).eval(), SPEC)
    stored = copy.deepcopy(eager)
    options = {"lower": "eager", "allow_unrewritten": True}
    step = torch.compile(stored, backend="kvq", fullgraph=True, options=options)
    x = torch.randn(B, 20, WIDTH)
    expected = eager(x, torch.arange(20), 0)
    torch.testing.assert_close(step(x, torch.arange(20), 0)[:, :, 4:], expected[:, :, 4:], rtol=0, atol=1e-5)
    assert_same_stores(stored, eager)
    text = passes.report().text()
    assert "from 4 on" in text and "keeps a window" in text
    torch._dynamo.reset()
    with pytest.raises(errors.NothingRewrittenError, match="keeps a window"):
        torch.compile(quantized(Part(lambda c, s: c[:, :, 4:]).eval(), SPEC), backend="kvq")(
            x, torch.arange(20), 0
        )


class Positions(nn.Module):
    """A step that is told nothing but the positions."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        out: Tensor = self.step(x, position, 0)
        return out


def test_an_exported_program_carries_the_window() -> None:
    model = quantized(Step(WRITES["index_copy"]).eval(), SPEC)
    eager = copy.deepcopy(model)
    assert all(isinstance(handle, QuantizedKV) for handle in handles(model))
    dense = Step(WRITES["index_copy"]).eval()
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if "cache" not in k}, strict=False)
    program = torch.export.export(Positions(dense), (torch.randn(B, 1, WIDTH), torch.tensor([0])))
    run = passes.quantize_exported(program, SPEC).module()
    for t in range(24):
        x, position = torch.randn(B, 1, WIDTH), torch.tensor([t])
        torch.testing.assert_close(run(x, position), eager(x, position, t), rtol=0, atol=1e-5)
    planes = dict(run.named_buffers())
    names = [name for name in planes if name.endswith(("coded", "k_cache_recent"))]
    assert len(names) == 3, sorted(planes)
    keys = handles(eager)[0]
    assert any(torch.equal(planes[name], keys.plane_recent) for name in names)


def test_a_model_that_nobody_prepared() -> None:
    model = Step(WRITES["index_copy"]).eval()
    model.k_cache[:, :, :13] = torch.randn(B, 2, 13, 32)
    model.v_cache[:, :, :13] = torch.randn(B, 2, 13, 32)
    want = quantized(model, SPEC)
    for handle, dense in zip(handles(want), (model.k_cache, model.v_cache), strict=True):
        handle[:, :, :13] = dense[:, :, :13]
    passes.quantize_kv_cache_(model, SPEC, (torch.randn(B, 1, WIDTH), torch.tensor([13]), 13))
    assert [handle.length.tolist() for handle in handles(model)] == [[13] * B] * 2
    assert_same_stores(model, want)
