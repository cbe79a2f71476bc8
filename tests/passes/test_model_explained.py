"""explain, which changes nothing, and models whose graph breaks, over which layers are counted on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import passes

from .cache_checks import INT8, assert_same, expected, formats, handles, inputs, run, unchanged
from .cache_decoder import Decoder, Spelling
from .cache_spellings import FOUR, ONE, SPELLINGS, TWO


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    passes.clear_report()


def call(spelling: Spelling = ONE) -> tuple[Tensor, Tensor]:
    return inputs(spelling)[1]


class Broken(Decoder):
    """Leaves the graph between its layers, and counts its calls."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        self.calls = 0
        self.log: list[int] = []

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        for layer in range(self.spelling.layers):
            x = self.attend(layer, x, position)
            self.calls += 1
            self.log.append(self.calls)
            torch._dynamo.graph_break()
        return x


@pytest.mark.parametrize("kind", [Decoder, Broken])
def test_explain_changes_nothing(kind: type[Decoder]) -> None:
    net = kind(TWO)
    x, position = call(TWO)
    with torch.no_grad():
        net(*inputs(TWO)[0])
    check, given = unchanged(net), (x.clone(), position.clone())
    seed = torch.random.get_rng_state()
    report = passes.explain(net, x, position, format=INT8)
    assert report.found == report.rewritten == 2
    assert sum(len(graph.caches) for graph in report.graphs) == 4
    check()
    assert torch.equal(x, given[0]) and torch.equal(position, given[1])
    assert torch.equal(seed, torch.random.get_rng_state())
    assert not passes.report().graphs


def test_explain_twice_and_then_for_another_model() -> None:
    for net in (Broken(TWO), Broken(TWO), Decoder(TWO)):
        for _ in range(2):
            assert passes.explain(net, *call(TWO)).rewritten == 2


def test_graph_breaks_count_layers_on() -> None:
    net = Broken(FOUR)
    want = expected(net, "none")
    report = passes.quantize_kv_cache_(net, "none", call(FOUR), layers={-1: INT8}, skip=0)
    assert formats(net)["k0"] == "dense" and formats(net)["k1"] == "none" and formats(net)["k3"] == INT8
    assert report.rewritten == 3 and report.found == 4
    net = Broken(TWO)
    want = expected(net, INT8)
    passes.quantize_kv_cache_(net, INT8, call(TWO))
    torch._dynamo.reset()
    step = torch.compile(net, backend="kvq", dynamic=True, options={"lower": "eager"})
    assert_same(run(step, TWO), want)


def test_a_cache_that_another_graph_reads_stays_dense() -> None:
    class Peeks(Decoder):
        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            x = super().forward(x, position)
            torch._dynamo.graph_break()
            return x + self.k0.mean()

    net = Peeks(TWO)
    report = passes.quantize_kv_cache_(net, INT8, call(TWO))
    assert formats(net) == {"k0": "dense", "v0": "dense", "k1": INT8, "v1": INT8}
    assert "k0 stays dense: it is also used by mean" in report.text()


def test_item_in_the_model_breaks_the_graph_and_is_followed() -> None:
    spelling = SPELLINGS["slice_copy"]
    net = Decoder(spelling)
    want = expected(net, INT8)
    report = passes.quantize_kv_cache_(net, INT8, call(spelling))
    assert report.rewritten == 1 and set(handles(net)) == {"k0", "v0"}
    assert_same(run(net, spelling), want)
