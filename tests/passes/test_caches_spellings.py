"""Every way of keeping a cache is found and quantized, and gives what fake quantization gives."""

from __future__ import annotations

import pytest
import torch

import passes
from kvq_ops.errors import NothingRewrittenError

from .cache_checks import (
    INT8,
    assert_same,
    check_compile,
    check_export,
    compiled,
    example,
    expected,
    exported,
    handles,
    quantized,
    run,
    scalars_in_graphs,
)
from .cache_decoder import Decoder, T
from .cache_spellings import SPELLINGS

REFUSED = {
    "kv_channels": "reads a part of the channels of the keys, which share codes or scales",
    "kv_channels_apart": "is written by index_put_ (aten.index_put_.default): a write through a view that mixes axes",
    "flat_heads": "k0 has axes batch+head/token/channel, which no store has",
    "merged_heads": "k0 has axes batch/token/head+channel, which no store has",
    "where_write": "is also read by where",
}
"""Spellings that are left alone, and how the report says why."""

RIGHT = [name for name in SPELLINGS if name not in REFUSED]
STACKED = {
    "kv_leading": {"c0_0", "c0_1"},
    "kv_middle": {"c0_0", "c0_1"},
    "kv_together": {"c0_0", "c0_1"},
    "all_layers": {"c_0_0", "c_0_1", "c_1_0", "c_1_1"},
    "all_layers_inside": {"kc_0", "kc_1", "vc_0", "vc_1"},
}
"""What the caches inside one tensor are called in an exported program."""


@pytest.fixture(autouse=True)
def _scalars():
    torch._dynamo.reset()
    with scalars_in_graphs():
        yield


@pytest.mark.parametrize("format", ["none", INT8])
@pytest.mark.parametrize("name", [name for name in RIGHT if name != "only_read"])
def test_compile(name: str, format: str) -> None:
    check_compile(SPELLINGS[name], format)


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "only_read"])
def test_export(name: str) -> None:
    check_export(SPELLINGS[name], "none", INT8, caches=STACKED.get(name))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_right(name: str) -> None:
    spelling = SPELLINGS[name]
    net = Decoder(spelling)
    report = passes.explain(net, *example(spelling), format=INT8)
    assert report.rewritten == 0 and report.found == 1
    assert REFUSED[name] in report.text()
    with pytest.raises(NothingRewrittenError) as error:
        quantized(net, INT8)
    assert REFUSED[name] in str(error.value) and "do:" in str(error.value)
    assert not handles(net)
    step = compiled(net, allow_unrewritten=True)
    want = expected(net, "none")
    assert_same(run(step, spelling), want)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_under_export(name: str) -> None:
    net = Decoder(SPELLINGS[name])
    program = exported(net)
    with pytest.raises(NothingRewrittenError) as error:
        passes.quantize_exported(program, INT8)
    assert REFUSED[name].removeprefix("k0 ") in str(error.value)
    left = passes.quantize_exported(program, INT8, allow_unrewritten=True)
    assert set(left.state_dict) == set(program.state_dict)
    tokens = SPELLINGS[name].steps[0][1]
    x, position = torch.randn(2, tokens, 24), torch.arange(tokens)
    with torch.no_grad():
        assert torch.equal(left.module()(x, position), program.module()(x, position))


def test_cross_cache_that_nobody_writes() -> None:
    """Found as attention reads it, quantized once, never written; the mask of the decoder does not apply (D10)."""
    spelling = SPELLINGS["only_read"]
    net = Decoder(spelling)
    rounded = Decoder(spelling)
    rounded.load_state_dict(net.state_dict())
    from .cache_decoder import fake_quantize

    for name in ("k0", "v0"):
        setattr(rounded, name, fake_quantize(getattr(net, name), INT8))
    want = run(rounded, spelling)
    ours, report = quantized(net, INT8)
    assert report.graphs[0].writes == 0 and report.rewritten == 1
    assert [one.shape[2] for one in handles(ours).values()] == [T, T]
    before = [plane.clone() for one in handles(ours).values() for plane in one.store]
    assert_same(run(compiled(ours), spelling), want)
    after = [plane for one in handles(ours).values() for plane in one.store]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    check = passes.quantize_exported(exported(net), INT8)
    assert not check.run_decompositions().graph_signature.buffers_to_mutate
    assert_same(run(check.module(), spelling), want)


def test_shared_cache_is_stored_and_counted_once() -> None:
    net = Decoder(SPELLINGS["shared"])
    ours, report = quantized(net, INT8)
    assert report.rewritten == 2 and len(report.graphs[0].caches) == 2
    assert set(handles(ours)) == {"k0", "v0"}
