"""quantize_kv_cache_: what it changes, what it leaves, what it says."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import passes
from kvq_ops.errors import FormatError, NothingRewrittenError, UnknownFormatError
from kvq_ops.handle import QuantizedKV, storage_bytes
from kvq_ops.policy import Policy

from .cache_checks import INT8, assert_same, compiled, expected, formats, handles, inputs, run, unchanged
from .cache_decoder import HK, B, D, Decoder, Spelling, T
from .cache_spellings import FOUR, ONE, SPELLINGS, TWO


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    passes.clear_report()


def call(spelling: Spelling = ONE) -> tuple[Tensor, Tensor]:
    return inputs(spelling)[1]


# ------------------------------------------------------------------------------------------------------ what it does


def test_contents_are_kept() -> None:
    """A cache that holds a prefix goes on from there."""
    net = Decoder(ONE)
    first, *rest = inputs(ONE)
    rounded = copy.deepcopy(net)
    rounded.fake = INT8
    want = run(rounded, ONE)
    with torch.no_grad():
        net(*first)
        dense = net.k0.clone()
        passes.quantize_kv_cache_(net, INT8, call())
        assert net.k0.length.tolist() == [first[1].numel()] * B
        scale = dense.abs().amax(-1, keepdim=True) / 127
        assert ((net.k0.dequantize() - dense).abs() <= scale / 2 + 1e-6).all()
        step = compiled(net)
        assert_same([step(*one) for one in rest], want[1:])


def test_bytes_of_the_report_are_those_of_storage() -> None:
    net = Decoder(TWO)
    dense = sum(one.nbytes for name, one in net.named_buffers() if name != "causal")
    report = passes.quantize_kv_cache_(net, INT8, call(TWO))
    (graph,) = report.graphs
    assert [cache.name for cache in graph.caches] == ["k0", "v0", "k1", "v1"]
    assert [cache.bytes for cache in graph.caches] == [one.nbytes for one in handles(net).values()]
    assert sum(cache.bytes for cache in graph.caches) == storage_bytes(handles(net).values())
    assert sum(cache.dense_bytes for cache in graph.caches) == dense
    planned = passes.explain(Decoder(TWO), *call(TWO), format=INT8).graphs[0]
    assert [cache.bytes for cache in planned.caches] == [cache.bytes for cache in graph.caches]


def test_buffers_stay_buffers() -> None:
    """Persistent ones are in the state dict, which loads into a twin; others are not, as before."""
    net = Decoder(ONE)
    net.register_buffer("v0", net.v0, persistent=False)
    twin = copy.deepcopy(net)
    keys = list(net.state_dict())
    for one in (net, twin):
        passes.quantize_kv_cache_(one, INT8, call())
    assert list(net.state_dict()) == keys and "k0" in keys and "v0" not in keys
    assert isinstance(dict(net.named_buffers())["v0"], QuantizedKV)
    want = run(net, ONE)
    assert int(net.k0.length[0]) == 11
    twin.load_state_dict(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.k0.store, twin.k0.store, strict=True))
    net.k0.zero_(), net.v0.zero_()
    assert_same(run(net, ONE), want)
    net.half()
    assert net.k0.dtype == torch.float16 and isinstance(net.k0, QuantizedKV)


def test_every_holder_of_a_cache_gets_the_same_handle() -> None:
    class Reset(nn.Module):
        def __init__(self, cache: Tensor) -> None:
            super().__init__()
            self.register_buffer("cache", cache)

    net = Decoder(ONE)
    net.alias, net.pairs, net.by_name = net.k0, [(net.k0, "k"), [net.v0]], {"v": net.v0}
    net.reset = Reset(net.k0)
    passes.quantize_kv_cache_(net, INT8, call())
    assert isinstance(net.k0, QuantizedKV)
    assert net.alias is net.k0 and net.pairs[0][0] is net.k0 and net.reset.cache is net.k0
    assert net.pairs[1][0] is net.v0 and net.by_name["v"] is net.v0
    assert net.pairs[0][1] == "k"
    want = run(copy.deepcopy(net), ONE)
    run(net, ONE)
    net.reset.cache.zero_(), net.by_name["v"].zero_()
    assert_same(run(net, ONE), want)


def test_layers_that_share_a_module_share_its_cache() -> None:
    class Twice(Decoder):
        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return self.attend(0, self.attend(0, x, position), position)

    net = Twice(ONE)
    want = expected(net, INT8)
    report = passes.quantize_kv_cache_(net, INT8, call())
    assert report.rewritten == 2 and len(report.graphs[0].caches) == 2
    assert_same(run(compiled(net), ONE), want)


def test_second_call_changes_nothing() -> None:
    net = Decoder(ONE)
    passes.quantize_kv_cache_(net, INT8, call())
    run(net, ONE)
    check = unchanged(net)
    report = passes.quantize_kv_cache_(net, INT8, call())
    assert "cache k0 is quantized already (int8_per_token_head)" in report.text()
    check()
    with pytest.raises(FormatError, match="quantized already as int8_per_token_head"):
        passes.quantize_kv_cache_(net, "fp8_e4m3", call())
    check()


def test_second_call_takes_what_the_first_left() -> None:
    net = Decoder(TWO)
    passes.quantize_kv_cache_(net, INT8, call(TWO), skip=1)
    passes.quantize_kv_cache_(net, "fp8_e4m3", call(TWO), skip=0)
    assert formats(net) == {"k0": INT8, "v0": INT8, "k1": "fp8_e4m3", "v1": "fp8_e4m3"}


# ---------------------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"skip": 0}, ["dense", INT8, INT8, INT8]),
        ({"skip": -1}, [INT8, INT8, INT8, "dense"]),
        ({"skip": (0, -2)}, ["dense", INT8, "dense", INT8]),
        ({"layers": {1: "fp8_e4m3", -1: "none"}}, [INT8, "fp8_e4m3", INT8, "none"]),
        ({"layers": {"?2": "fp8_e4m3"}}, [INT8, INT8, "fp8_e4m3", INT8]),
        ({"layers": {-1: "none", 3: "fp8_e4m3"}}, [INT8, INT8, INT8, "none"]),
        ({"layers": {2: "none"}, "skip": 2}, [INT8, INT8, "dense", INT8]),
    ],
)
def test_policies(options: dict, want: list[str]) -> None:
    net = Decoder(FOUR)
    passes.quantize_kv_cache_(net, INT8, call(FOUR), **options)
    assert formats(net) == {f"{side}{i}": name for i, name in enumerate(want) for side in "kv"}


def test_policy_object_and_formats_for_keys_and_values() -> None:
    net = Decoder(TWO)
    policy = Policy.of(f"key={INT8},value=fp8_e4m3", layers={0: "none"})
    passes.quantize_kv_cache_(net, policy, call(TWO))
    assert formats(net) == {"k0": "none", "v0": "none", "k1": INT8, "v1": "fp8_e4m3"}
    net = Decoder(TWO)
    passes.quantize_kv_cache_(net, policy, call(TWO), skip="v1")
    assert formats(net) == {"k0": "none", "v0": "none", "k1": "dense", "v1": "dense"}


def test_policy_counts_in_one_tensor_as_elsewhere() -> None:
    spelling = replace(SPELLINGS["all_layers"], layers=3)
    net = Decoder(spelling)
    passes.quantize_kv_cache_(net, INT8, call(spelling), layers={-1: "fp8_e4m3"}, skip=0)
    names = [part.format.name for part in net.c.parts]
    assert names == ["none", "none", INT8, INT8, "fp8_e4m3", "fp8_e4m3"]


def test_policy_by_type_and_module() -> None:
    class Layer(Decoder):
        def __init__(self, layer_type: str) -> None:
            super().__init__(ONE)
            self.layer_type = layer_type

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = ["sliding_attention", "full_attention", "sliding_attention"]
            self.layers = nn.ModuleList(Layer(kind) for kind in kinds)

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, position)
            return x

    def found(**options: object) -> list[str]:
        net = Model()
        passes.quantize_kv_cache_(net, INT8, call(), **options)
        return [formats(layer)["k0"] for layer in net.layers]

    assert found(layers={"sliding_attention": "fp8_e4m3"}) == ["fp8_e4m3", INT8, "fp8_e4m3"]
    assert found(skip="layers.1") == [INT8, "dense", INT8]
    assert found(skip="*.2.k0") == [INT8, INT8, "dense"]
    assert passes.explain(Model(), *call()).graphs[0].sites[1].module == "layers.1"


@pytest.mark.parametrize("options", [{"skip": 4}, {"layers": {-5: "none"}}, {"skip": "sliding_attention"}])
def test_policy_for_layers_that_are_not_there(options: dict) -> None:
    net = Decoder(FOUR)
    check = unchanged(net)
    with pytest.raises(FormatError, match="which no layer is") as error:
        passes.quantize_kv_cache_(net, INT8, call(FOUR), **options)
    assert "-4..3" in str(error.value)
    check()


def test_all_layers_skipped() -> None:
    net = Decoder(TWO)
    with pytest.raises(NothingRewrittenError, match="left alone as asked"):
        passes.quantize_kv_cache_(net, INT8, call(TWO), skip="k*")


# ------------------------------------------------------------------------------------------------------------ errors


def test_unknown_format() -> None:
    net = Decoder(ONE)
    check = unchanged(net)
    with pytest.raises(UnknownFormatError):
        passes.quantize_kv_cache_(net, "int7", call())
    check()


def test_format_that_does_not_fit_the_head() -> None:
    """Said by name of the cache, before anything is replaced."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 1, 4, 15))
            self.register_buffer("values", torch.zeros(1, 1, 4, 15))

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            self.keys[:, :, position], self.values[:, :, position] = x, x
            return F.scaled_dot_product_attention(x, self.keys, self.values)

    net = Odd()
    check = unchanged(net)
    with pytest.raises(NothingRewrittenError) as error:
        passes.quantize_kv_cache_(net, "int4_group32", (torch.randn(1, 1, 1, 15), torch.tensor([0])))
    assert "keys stays dense: it has no int4_group32 store" in str(error.value)
    assert "head_dim 15" in str(error.value)
    check()


def test_model_without_attention_over_a_cache() -> None:
    with pytest.raises(NothingRewrittenError) as error:
        passes.quantize_kv_cache_(nn.Linear(4, 4), INT8, (torch.randn(1, 4),))
    assert "do:" in str(error.value) and "decode step" in str(error.value)


def test_a_failing_call_of_the_model_is_its_own_error() -> None:
    net = Decoder(ONE)
    check = unchanged(net)
    with pytest.raises(Exception, match="mat1|size|shape"):
        passes.quantize_kv_cache_(net, INT8, (torch.randn(B, 1, 5), torch.tensor([0])))
    check()


def test_nothing_is_replaced_when_one_replacement_fails() -> None:
    class Stubborn:
        """Holds the values, and takes nothing else in their place."""

        def __init__(self, values: Tensor) -> None:
            object.__setattr__(self, "values", values)

        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, QuantizedKV):
                raise RuntimeError("no")
            object.__setattr__(self, name, value)

    net = Decoder(TWO)
    net.stubborn = Stubborn(net.v1)
    check = unchanged(net)
    with pytest.raises(RuntimeError, match="no"):
        passes.quantize_kv_cache_(net, INT8, call(TWO))
    check()
    assert net.stubborn.values is net.v1


def test_backend_on_dense_caches_says_what_to_call() -> None:
    net = Decoder(FOUR)
    with pytest.raises(NothingRewrittenError) as error, torch.no_grad():
        torch.compile(net, backend="kvq")(*call(FOUR))
    text = str(error.value)
    assert "dense caches k0, v0, k1, v1 and 4 more" in text
    assert "passes.quantize_kv_cache_(model, 'int8_per_token_head', example_inputs)" in text
    torch._dynamo.reset()
    with pytest.raises(NothingRewrittenError, match="quantize_kv_cache_.model, 'fp8_e4m3'"), torch.no_grad():
        torch.compile(net, backend="kvq", options={"format": "fp8_e4m3"})(*call(FOUR))


# ------------------------------------------------------------------------------------------------------ whole models


def test_cross_cache_written_once_under_a_flag() -> None:
    """An encoder's keys are copied in at the first step and only read after; the window of the decoder is not theirs (D10)."""

    class Cross(Decoder):
        def __init__(self, spelling: Spelling) -> None:
            super().__init__(spelling)
            self.register_buffer("ck", torch.zeros(B, HK, 12, D))
            self.register_buffer("cv", torch.zeros(B, HK, 12, D))

        def forward(self, x: Tensor, position: Tensor, states: Tensor | None = None) -> Tensor:
            x = super().forward(x, position)
            batch, tokens, _ = x.shape
            if states is not None:
                _, k, v = self.project(1, states)
                self.ck.copy_(k)
                self.cv.copy_(v)
            q, _, _ = self.project(0, x)
            out = F.scaled_dot_product_attention(q, self.ck, self.cv, enable_gqa=True)
            return x + self.o[1](out.transpose(1, 2).reshape(batch, tokens, -1))

    window = 4
    spelling = replace(SPELLINGS["ring"], layers=2)
    states = torch.randn(B, 12, 24)
    net = Cross(spelling)
    rounded = copy.deepcopy(net)
    rounded.fake = INT8
    steps = inputs(spelling)
    assert net.k0.shape[2] < 12 and window < 12

    def results(step) -> list[Tensor]:
        with torch.no_grad():
            return [step(*one, states if i == 0 else None) for i, one in enumerate(steps)]

    want = results(rounded)
    # A decode step shows that the cross caches are only read, a first step that they are written as a whole.
    for example in ((*steps[0], states), steps[1]):
        ours = copy.deepcopy(net)
        report = passes.quantize_kv_cache_(ours, INT8, example)
        assert report.rewritten == 3 and set(handles(ours)) == {"k0", "v0", "k1", "v1", "ck", "cv"}
        assert ours.ck.shape == (B, HK, 12, D)
        assert_same(results(compiled(ours)), want)


def test_c4_window_storage_stays_bounded() -> None:
    """A ring of W slots beside a full layer: 30 steps, the ring never holds more than W (C4, D8)."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sliding, self.full = Decoder(replace(SPELLINGS["ring"], layers=1)), Decoder(ONE)

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            return self.full(self.sliding(x, position), position % T)

    net = Mixed()
    rounded, fresh = copy.deepcopy(net), copy.deepcopy(net)
    rounded.sliding.fake = rounded.full.fake = INT8
    calls = [(torch.randn(B, 1, 24), torch.tensor([i])) for i in range(30)]
    passes.quantize_kv_cache_(net, INT8, calls[0])
    step = compiled(net)
    with torch.no_grad():
        outs = [rounded(*one) for one in calls]
        assert_same([step(*one) for one in calls], outs)
    assert net.sliding.k0.shape[2] == 6 and max(net.sliding.k0.length.tolist()) == 6
    planes = [plane.shape[2] for plane in net.sliding.k0.store[:-1]]
    assert planes == [6] * len(planes)

    # Exported, with the caches in buffers.
    with torch.no_grad():
        program = passes.quantize_exported(torch.export.export(fresh, calls[0]), INT8)
        module = program.module()
        assert_same([module(*one) for one in calls], outs)
    held = {name: one.shape for name, one in module.named_buffers() if name.startswith("sliding.")}
    coded = [shape[2] for name, shape in held.items() if name.endswith(("_codes", "_scale"))]
    assert coded == [6] * 4 * len(net.sliding.k) and module.state_dict()["sliding.k0_length"].max() == 6


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_scale_kept_as_a_number_of_the_module(dynamic: bool | None) -> None:
    """Under ``dynamic=True`` Dynamo makes inputs of such numbers; the scale of attention must be known."""

    class Scaled(Decoder):
        def __init__(self, spelling: Spelling) -> None:
            super().__init__(spelling)
            self.scaling = 0.3

        def attend(self, layer: int, x: Tensor, position: Tensor) -> Tensor:
            batch, tokens, _ = x.shape
            q, k, v = self.project(layer, x)
            self.k0[:, :, position], self.v0[:, :, position] = k, v
            mask = self.causal[position]
            out = F.scaled_dot_product_attention(
                q, self.k0, self.v0, attn_mask=mask, scale=self.scaling, enable_gqa=True
            )
            return x + self.o[layer](out.transpose(1, 2).reshape(batch, tokens, -1))

    net = Scaled(ONE)
    want = expected(net, INT8)
    passes.quantize_kv_cache_(net, INT8, call())
    step = torch.compile(net, backend="kvq", fullgraph=True, dynamic=dynamic, options={"lower": "eager"})
    assert_same(run(step, ONE), want)
    assert passes.report().rewritten == passes.report().found > 0
