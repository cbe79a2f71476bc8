"""Caches that a model gets as arguments and gives back, growing ones, and caches inside containers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import passes
from kvq_ops.errors import NothingRewrittenError
from kvq_ops.handle import QuantizedKV
from kvq_ops.policy import Policy

from .cache_checks import INT8, assert_quantized, assert_same, compiled
from .cache_decoder import HK, WIDTH, B, D, Decoder, T
from .cache_spellings import SPELLINGS

STEPS = ((0, 3), (3, 1), (4, 1), (5, 2))
Caches = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    passes.clear_report()


def index_copy(cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
    return cache.index_copy(2, position, new)


def index_put(cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
    return torch.ops.aten.index_put(cache, [None, None, position], new)


def in_place(cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
    cache[:, :, position] = new
    return cache


def shifted(cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
    return torch.cat([cache[:, :, new.shape[2] :], new], 2)


def grown(cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
    return torch.cat([cache, new], 2)


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "index_copy": index_copy,
    "index_put": index_put,
    "in_place": in_place,
    "shifted": shifted,
    "grown": grown,
}


class Functional(nn.Module):
    """One layer whose caches come as arguments and go as results."""

    def __init__(self, write: str) -> None:
        super().__init__()
        self.net = Decoder(SPELLINGS["index_copy_"])
        self.write = write

    def forward(self, x: Tensor, position: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, new_k, new_v = self.net.project(0, x)
        k = WRITES[self.write](k, new_k, position)
        v = WRITES[self.write](v, new_v, position)
        held = torch.arange(k.shape[2])
        if self.write == "shifted":
            held = held + position[-1] - (k.shape[2] - 1)
        mask = (held >= 0) & (held <= position[:, None])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.net.o[0](out.transpose(1, 2).flatten(2)), k, v


def calls() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(B, n, WIDTH, generator=generator), torch.arange(i, i + n)) for i, n in STEPS]


def run(step, k, v) -> tuple[list[Tensor], object, object]:
    results = []
    with torch.no_grad():
        for x, position in calls():
            out, k, v = step(x, position, k, v)
            results.append(out)
    return results, k, v


def start(write: str) -> Tensor:
    return torch.zeros(B, HK, 0 if write == "grown" else 8, D)


@pytest.mark.parametrize("format", ["none", INT8])
@pytest.mark.parametrize("write", WRITES)
def test_compile_functional(write: str, format: str) -> None:
    model = Functional(write)
    rounded = copy.deepcopy(model)
    rounded.net.fake = "" if format == "none" else format
    want, dense_k, _ = run(rounded, start(write), start(write))
    make = lambda: QuantizedKV.from_dense(start(write), format)  # noqa: E731
    eager, k, v = run(model, make(), make())
    assert isinstance(k, QuantizedKV) and isinstance(v, QuantizedKV)
    assert_same(eager, want)
    got, k, v = run(compiled(model), make(), make())
    assert isinstance(k, QuantizedKV) and k.format.name == format and k.shape == dense_k.shape
    assert_same(got, want)
    torch.testing.assert_close(k.dequantize(), dense_k, atol=1e-6, rtol=1e-6)
    report = passes.report()
    assert report.rewritten == report.found > 0
    assert len(report.graphs) <= 3
    if format != "none":
        assert_quantized(got, run(model, start(write), start(write))[0])


@pytest.mark.parametrize("write", ["index_copy", "index_put", "in_place", "shifted"])
def test_export_functional(write: str) -> None:
    """The caches are lists of planes in the exported program, and come back as such."""
    model = Functional(write)
    tokens = Dim("tokens", min=1, max=6)
    shapes = ({1: tokens}, {0: tokens}, None, None)
    call = (torch.randn(B, 3, WIDTH), torch.arange(3), start(write), start(write))
    with torch.no_grad():
        program = torch.export.export(model, call, dynamic_shapes=shapes)
    for format in ("none", INT8):
        rounded = copy.deepcopy(model)
        rounded.net.fake = "" if format == "none" else format
        want, _, _ = run(rounded, start(write), start(write))
        ours = passes.quantize_exported(program, format)
        stores = [QuantizedKV.from_dense(start(write), format).store for _ in range(2)]
        got, k, _ = run(ours.module(), *stores)
        assert isinstance(k, (list, tuple)) and [p.dtype for p in k] == [p.dtype for p in stores[0]]
        assert_same(got, want)


def test_export_leaves_inputs_that_are_only_read() -> None:
    """Keys and values that are plain inputs only look like caches: the program keeps its signature."""

    class Attention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    args = tuple(torch.randn(3, B, HK, 5, D).unbind(0))
    program = torch.export.export(Attention(), args)
    with pytest.raises(NothingRewrittenError, match="neither written nor returned"):
        passes.quantize_exported(program, INT8)
    left = passes.quantize_exported(program, INT8, allow_unrewritten=True)
    assert torch.equal(left.module()(*args), Attention()(*args))


def test_argument_is_left_to_the_caller() -> None:
    model = Functional("index_copy")
    call = (torch.randn(B, 1, WIDTH), torch.tensor([0]), start("index_copy"), start("index_copy"))
    with pytest.raises(NothingRewrittenError, match="pass QuantizedKV.from_dense"):
        passes.quantize_kv_cache_(model, INT8, call)


# ------------------------------------------------------------------------------------------------------- containers


@dataclass
class Layer:
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class Frozen:
    keys: Tensor
    values: Tensor


class Pair(NamedTuple):
    keys: Tensor
    values: Tensor


class Plain:
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


@dataclass
class State:
    layers: list[object] = field(default_factory=list)


CONTAINERS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "list": lambda k, v: [k, v],
    "dict": lambda k, v: {"keys": k, "values": v},
    "dataclass": Layer,
    "frozen": Frozen,
    "object": Plain,
    "list_of_tuples": lambda k, v: [(k, v)],
    "named_tuple": lambda k, v: State([Pair(k, v)]),
    "nested": lambda k, v: State([{"layer": Layer(k, v)}]),
}


def open_container(container: object) -> Caches:
    while isinstance(container, State) or (isinstance(container, list) and len(container) == 1):
        container = container.layers if isinstance(container, State) else container[0]
    if isinstance(container, dict):
        container = container.get("layer", container)
    if isinstance(container, dict):
        return container["keys"], container["values"]
    if isinstance(container, (list, tuple)):
        return container[0], container[1]
    return container.keys, container.values


class Holding(Decoder):
    """A decoder that gets its caches in a container, or holds the container itself."""

    def __init__(self, container: object = None) -> None:
        super().__init__(SPELLINGS["index_copy_"])
        self.held = container

    def forward(self, x: Tensor, position: Tensor, container: object = None) -> Tensor:
        k, v = open_container(self.held if container is None else container)
        q, new_k, new_v = self.project(0, x)
        k.index_copy_(2, position, new_k)
        v.index_copy_(2, position, new_v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.causal[position], enable_gqa=True)
        return self.o[0](out.transpose(1, 2).flatten(2))


def steps(step, *rest: object) -> list[Tensor]:
    with torch.no_grad():
        return [step(x, position, *rest) for x, position in calls()]


def zeros() -> Tensor:
    return torch.zeros(B, HK, T, D)


@pytest.mark.parametrize("held", [False, True], ids=["argument", "attribute"])
@pytest.mark.parametrize("name", CONTAINERS)
def test_containers(name: str, held: bool) -> None:
    make = lambda: CONTAINERS[name](zeros(), zeros())  # noqa: E731
    plain = Holding()
    plain.fake = INT8
    want = steps(plain, make())
    container = make()
    model = Holding(container if held else None)
    model.load_state_dict(plain.state_dict())
    rest = () if held else (container,)
    report = passes.quantize_kv_cache_(model, INT8, (*calls()[1], *rest))
    assert report.rewritten == 1 and len(report.graphs[0].caches) == 2, report.text()
    assert not report.graphs[0].notes, report.text()
    ours = open_container(model.held if held else container)
    assert all(isinstance(one, QuantizedKV) for one in ours)
    assert type(container) is type(make())
    assert_same(steps(compiled(model), *rest), want)


def test_keyword_arguments() -> None:
    model, container = Holding(), [zeros(), zeros()]
    x, position = calls()[1]
    passes.quantize_kv_cache_(model, INT8, (), {"x": x, "position": position, "container": container})
    assert all(isinstance(one, QuantizedKV) for one in container)


def test_layers_in_a_list_count_in_order() -> None:
    """A policy counts attentions as they run, wherever their caches are held."""

    class Two(Decoder):
        def __init__(self) -> None:
            super().__init__(SPELLINGS["index_copy_"])
            self.held = [[zeros(), zeros()], [zeros(), zeros()]]

        def forward(self, x: Tensor, position: Tensor) -> Tensor:
            for layer in (1, 0):
                q, new_k, new_v = self.project(layer, x)
                k, v = self.held[layer]
                k.index_copy_(2, position, new_k)
                v.index_copy_(2, position, new_v)
                out = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=self.causal[position], enable_gqa=True
                )
                x = x + self.o[layer](out.transpose(1, 2).flatten(2))
            return x

    model = Two()
    policy = Policy.of("none", layers={-1: INT8})
    passes.quantize_kv_cache_(model, policy, calls()[1])
    assert [one.format.name for one in model.held[0]] == [INT8, INT8]
    assert [one.format.name for one in model.held[1]] == ["none", "none"]
