"""The same operations while a graph is traced: nothing looks at values, sizes may be symbolic, every write is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from kvq_ops import QuantizedKV
from kvq_ops.handle_ops import dispatch
from tests.handle.shadow import planes_of, same_planes

FORMATS = ("none", "int8_per_token_head", "nvfp4")


def step_index_copy(cache: Any, k: Any, pos: Any) -> Any:
    cache.index_copy_(2, pos, k)
    return cache @ k.transpose(-1, -2)


def step_index_put(cache: Any, k: Any, pos: Any) -> Any:
    cache[:, :, pos] = k
    return cache.transpose(2, 3).sum(-1)


def step_slice(cache: Any, k: Any, pos: Any) -> Any:
    cache[:, :, 2 : 2 + k.shape[2]] = k
    return cache[:, :, : k.shape[2] + 2].sum(2)


def step_slice_from_the_end(cache: Any, k: Any, pos: Any) -> Any:
    cache[:, :, -k.shape[2] :].copy_(k)
    return cache.sum(2)


def step_steps(cache: Any, k: Any, pos: Any) -> Any:
    cache[:, :, 1:7][:, :, ::2][:, :, : k.shape[2]].index_copy_(2, torch.arange(k.shape[2]), k)
    return cache.sum(2)


def step_rows(cache: Any, k: Any, pos: Any) -> Any:
    rows = torch.arange(k.shape[0]).unsqueeze(1)
    cache[rows, :, pos.unsqueeze(0)] = k.transpose(1, 2)
    return cache.sum(2)


def step_roll(cache: Any, k: Any, pos: Any) -> Any:
    new = cache.roll(-1, dims=2)
    new[:, :, torch.tensor([-1])] = k[:, :, :1]
    cache.copy_(new)
    return cache + 0


def step_cat(cache: Any, k: Any, pos: Any) -> Any:
    full = torch.cat((cache[:, :, k.shape[2] :, :], k), dim=-2)
    cache.copy_(full[:, :, -cache.shape[2] :])
    return full.sum(2)


def step_chunks(cache: Any, k: Any, pos: Any) -> Any:
    first, second = cache.view(cache.shape).narrow(2, 0, 8).chunk(2, 2)
    first.select(2, 1).copy_(k[:, :, 0])
    return second.reshape(second.shape) + first.unsqueeze(1).squeeze(1).contiguous()


def step_functional(cache: Any, k: Any, pos: Any) -> Any:
    return cache.index_copy(2, pos, k).sum(2), cache.slice_scatter(k, 2, 0, k.shape[2]).sum(2)


STEPS = {name: step for name, step in globals().items() if name.startswith("step_")}


class Lift(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if any(isinstance(t, QuantizedKV) for t in pytree.tree_leaves((args, kwargs))):
            return dispatch(target, args, kwargs, guard_views=False)
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize(("mode", "pre_dispatch"), [("fake", False), ("symbolic", True)])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", FORMATS)
def test_traced_equals_eager(name: str, step: str, mode: str, pre_dispatch: bool) -> None:
    first = torch.randn(2, 3, 8, 4)
    k, pos = torch.randn(2, 3, 2, 4), torch.tensor([3, 5])
    captured = make_fx(STEPS[step], pre_dispatch=pre_dispatch, tracing_mode=mode)(first.clone(), k, pos)
    handle = QuantizedKV.from_dense(first, name)

    def run(*flat: Any) -> Any:
        planes = flat[:-2]
        cache = QuantizedKV(planes, name, "bhtd", torch.float32)
        out = Lift(captured).run(cache, *flat[-2:], enable_io_processing=False)
        return pytree.tree_map_only(QuantizedKV, QuantizedKV.dequantize, out)

    lifted = make_fx(run, pre_dispatch=pre_dispatch, tracing_mode=mode)(*handle.store, k, pos)
    eager = QuantizedKV.from_dense(first, name)
    expected = STEPS[step](eager, k, pos)
    traced = QuantizedKV.from_dense(first, name)
    got = lifted(*traced.store, k, pos)
    assert same_planes(planes_of(eager), planes_of(traced))
    for g, e in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        e = e.dequantize() if isinstance(e, QuantizedKV) else e
        torch.testing.assert_close(g, e + 0, rtol=1e-6, atol=1e-6)


def test_writes_stay_one_append() -> None:
    """What the graph passes look for: a write into a slice is one append_ on the planes of the whole cache."""

    def step(cache: Any, k: Any) -> Any:
        cache[:, :, 2:4].copy_(k)
        return cache @ k.transpose(-1, -2)

    first, k = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 2, 4)
    captured = make_fx(step, pre_dispatch=True)(first, k)

    def run(codes: Any, scale: Any, length: Any, k: Any) -> Any:
        return Lift(captured).run(
            QuantizedKV([codes, scale, length], "int8_per_token_head", "bhtd", torch.float32), k
        )

    graph = make_fx(run, pre_dispatch=True, tracing_mode="fake")(
        *QuantizedKV.from_dense(first, "int8_per_token_head").store, k
    )
    graph.graph.eliminate_dead_code()
    appends = [n for n in graph.graph.nodes if n.target is torch.ops.kvq.append_.default]
    assert len(appends) == 1
    assert [n.op for n in appends[0].args[0]] == ["placeholder"] * 3


def test_positions_outside_of_a_slice_cannot_land_elsewhere() -> None:
    """Where values are unknown while tracing, such a write raises when the graph runs."""

    def run(codes: Any, scale: Any, length: Any, k: Any, pos: Any) -> None:
        cache = QuantizedKV([codes, scale, length], "int8_per_token_head", "bhtd", torch.float32)
        dispatch(torch.ops.aten.index_copy_.default, (cache[:, :, 2:5], 2, pos, k), {})

    x = QuantizedKV.from_dense(torch.randn(1, 1, 8, 4), "int8_per_token_head")
    k = torch.randn(1, 1, 1, 4)
    graph = make_fx(run, tracing_mode="fake")(*x.store, k, torch.tensor([1]))
    before = planes_of(x)
    with pytest.raises(IndexError):
        graph(*x.store, k, torch.tensor([3]))
    assert same_planes(before, planes_of(x))
    graph(*x.store, k, torch.tensor([2]))
    expected = QuantizedKV.from_dense(k, "int8_per_token_head").dequantize()
    assert torch.equal(x.dequantize()[:, :, 4:5], expected)
