"""Re-tracing keeps the calling convention, the order of writes and SDPA whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from passes.attention import find_attention
from passes.capture import capture, remove_dead_code
from passes.layout_nodes import op_name


class Cached(nn.Module):
    """Writes a cache in place, reads it, writes again after the read."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 8, 4))
        self.register_buffer("values", torch.zeros(1, 2, 8, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[:, :, position] = k
        self.values.index_copy_(2, position, v)
        self.count.add_(position.shape[0])
        keep = torch.arange(8) < self.count
        out = F.scaled_dot_product_attention(q, self.keys, self.values, keep[None, None, None])
        self.values[:, :, 7].zero_()
        return out, self.count + 1


def inputs(t: int = 2) -> tuple[Tensor, ...]:
    return (*(torch.randn(1, 2, t, 4) for _ in range(3)), torch.arange(t))


def writes(graph_module: GraphModule) -> list[str]:
    return [op_name(node) for node in graph_module.graph.nodes if op_name(node).endswith("_")]


def test_exported_program_comes_out_as_it_went_in() -> None:
    torch.manual_seed(137)
    t = torch.export.Dim("t", min=2, max=6)
    program = torch.export.export(Cached(), inputs(), dynamic_shapes=({2: t}, {2: t}, {2: t}, {0: t}))
    graph_module = program.graph_module
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    captured = capture(graph_module, [n.meta["val"] for n in placeholders])
    again = [n for n in captured.graph.nodes if n.op == "placeholder"]
    assert len(again) == len(placeholders)
    for new, old in zip(again, placeholders, strict=True):
        assert tuple(new.meta["val"].shape) == tuple(old.meta["val"].shape)
    outputs: list[Any] = [
        next(n for n in g.graph.nodes if n.op == "output").args[0] for g in (graph_module, captured)
    ]
    assert len(outputs[0]) == len(outputs[1])
    assert writes(captured) == writes(graph_module) == ["index_put_", "index_copy_", "add_", "zero_"]
    assert len(find_attention(captured)) == 1
    for length in (2, 5):
        given = inputs(length)
        state = [
            [torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4), torch.zeros((), dtype=torch.int64)]
            for _ in range(2)
        ]
        results = [g(*s, *given) for g, s in zip((graph_module, captured), state, strict=True)]
        for one, other in zip((*results[0], *state[0]), (*results[1], *state[1]), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert state[0][2] == length


def test_dynamo_graph_under_compile() -> None:
    torch._dynamo.reset()
    torch.manual_seed(137)
    model, plain = Cached(), Cached()
    seen: list[GraphModule] = []

    def backend(graph_module: GraphModule, example_inputs: list[Any]) -> Any:
        captured = capture(
            graph_module, [n.meta["example_value"] for n in graph_module.graph.nodes if n.op == "placeholder"]
        )
        before = writes(captured)
        remove_dead_code(captured.graph)
        captured.recompile()
        assert writes(captured) == before == ["index_put_", "index_copy_", "add_", "zero_"]
        seen.append(captured)
        return torch._dynamo.disable(captured.forward)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for length in (2, 3, 4):
            given = inputs(length)
            for one, other in zip(compiled(*given), plain(*given), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert len(seen) == 2  # static, then dynamic length
    assert all(len(find_attention(g)) == 1 for g in seen)


def test_wrong_number_of_inputs_is_said() -> None:
    program = torch.export.export(Cached(), inputs())
    with pytest.raises(ValueError, match=r"7 placeholders, got 1 inputs"):
        capture(program.graph_module, [torch.zeros(1)])
