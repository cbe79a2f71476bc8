"""The rewritten graphs themselves, as text and as counts. ``EXPECTTEST_ACCEPT=1`` writes the texts anew."""

from __future__ import annotations

import collections
import copy
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import expecttest
import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from passes.compile import rewrite
from passes.lift import Lifted, flatten_handles
from passes.report import GraphReport

from . import toys

FORMATS = ("none", "int8_per_token_head", "key=int8_per_token_head,value=int4_group32")


def rewritten(
    model: Callable[..., Any], *args: Any, dynamic: bool = False
) -> tuple[GraphModule, Lifted, GraphReport]:
    """The one graph of a call, as captured and as rewritten, and the report."""
    found: list[tuple[GraphModule, Lifted, GraphReport]] = []

    def backend(graph_module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        found.append(rewrite(graph_module, example_inputs))
        return lambda *values: found[0][1].rebuild_outputs(found[0][1].graph_module(*flatten_handles(values)))

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    (one,) = found
    return one


def op(node: Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def listing(graph_module: GraphModule, only: Callable[[Node], bool] = lambda node: True) -> str:
    """One line for each operation: ``name = op(arguments)``; inputs are listed where they are part of a cache."""

    def text(value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(text, value))}]"
        return str(value)

    lines = []
    for node in graph_module.graph.nodes:
        if not only(node):
            continue
        given = [text(a) for a in node.args]
        given += [f"{k}={text(v)}" for k, v in node.kwargs.items() if k not in ("device", "pin_memory")]
        if node.op == "call_function":
            line = f"{node.name} = {op(node)}({', '.join(given)})"
            lines += textwrap.wrap(line, 100, subsequent_indent="    ", break_long_words=False)
        elif node.op == "placeholder" and "cache" in node.name:
            value = node.meta["val"]
            lines.append(f"{node.name}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        elif node.op == "output":
            lines.append(f"return {', '.join(given)}")
    return "\n".join(lines) + "\n"


def counts(graph_module: GraphModule) -> dict[str, int]:
    return collections.Counter(op(node) for node in graph_module.graph.nodes if node.op == "call_function")


class Attention(toys.Layer):
    """A layer of nothing but attention, for short graphs."""

    def finish(self, x, attended):
        return x + self.out(attended.transpose(1, 2).flatten(2))


def decoder(format: str, layer: type[nn.Module] = Attention) -> nn.Module:
    return toys.quantized(toys.Decoder(2, layer).eval(), format)


class TestListings(expecttest.TestCase):
    maxDiff = None

    def test_none(self):
        (inputs,) = toys.chunks(toys.B, [1], 3)
        _, lifted, _ = rewritten(decoder("none"), *inputs)
        self.assertExpectedInline(
            listing(lifted.graph_module),
            """\
layers_0_k_cache_codes: float32[2, 2, 64, 32]
layers_0_k_cache_length: int64[2]
layers_0_v_cache_codes: float32[2, 2, 64, 32]
layers_0_v_cache_length: int64[2]
layers_1_k_cache_codes: float32[2, 2, 64, 32]
layers_1_k_cache_length: int64[2]
layers_1_v_cache_codes: float32[2, 2, 64, 32]
layers_1_v_cache_length: int64[2]
embedding = embedding(embedding_weight, ids)
arange = arange(64)
unsqueeze = unsqueeze(position, -1)
le = le.Tensor(arange, unsqueeze)
unsqueeze_1 = unsqueeze(le, 0)
unsqueeze_2 = unsqueeze(unsqueeze_1, 1)
linear = linear(embedding, layers_0_q_weight)
linear_1 = linear(embedding, layers_0_kv_weight)
view_1 = view(linear_1, [2, 1, 2, 2, 32])
unbind = unbind.int(view_1, 2)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
transpose_1 = transpose.int(getitem, 1, 2)
transpose_2 = transpose.int(getitem_1, 1, 2)
append_ = kvq.append_([layers_0_k_cache_codes, layers_0_k_cache_length], position, transpose_1,
    none)
append__1 = kvq.append_([layers_0_v_cache_codes, layers_0_v_cache_length], position, transpose_2,
    none)
reshape_default = reshape(linear, [2, 1, 2, 2, 32])
permute_default = permute(reshape_default, [0, 2, 3, 1, 4])
reshape_default_1 = reshape(permute_default, [2, 4, 1, 32])
reshape_default_2 = reshape(unsqueeze_2, [64])
reshape_default_3 = reshape(reshape_default_2, [1, 1, 1, 64])
attention_default = kvq.attention(reshape_default_1, [layers_0_k_cache_codes,
    layers_0_k_cache_length], [layers_0_v_cache_codes, layers_0_v_cache_length], none, none,
    mask=reshape_default_3, causal=False, scale=0.17677669529663687, softcap=0.0, sinks=None,
    use_length=False)
reshape_default_4 = reshape(attention_default, [2, 2, 2, 1, 32])
reshape_default_5 = reshape(reshape_default_4, [2, 4, 1, 32])
transpose_3 = transpose.int(reshape_default_5, 1, 2)
flatten = flatten.using_ints(transpose_3, 2)
linear_2 = linear(flatten, layers_0_out_weight)
add = add.Tensor(embedding, linear_2)
linear_3 = linear(add, layers_1_q_weight)
linear_4 = linear(add, layers_1_kv_weight)
view_3 = view(linear_4, [2, 1, 2, 2, 32])
unbind_1 = unbind.int(view_3, 2)
getitem_2 = getitem(unbind_1, 0)
getitem_3 = getitem(unbind_1, 1)
transpose_5 = transpose.int(getitem_2, 1, 2)
transpose_6 = transpose.int(getitem_3, 1, 2)
append__2 = kvq.append_([layers_1_k_cache_codes, layers_1_k_cache_length], position, transpose_5,
    none)
append__3 = kvq.append_([layers_1_v_cache_codes, layers_1_v_cache_length], position, transpose_6,
    none)
reshape_default_6 = reshape(linear_3, [2, 1, 2, 2, 32])
permute_default_1 = permute(reshape_default_6, [0, 2, 3, 1, 4])
reshape_default_7 = reshape(permute_default_1, [2, 4, 1, 32])
reshape_default_8 = reshape(unsqueeze_2, [64])
reshape_default_9 = reshape(reshape_default_8, [1, 1, 1, 64])
attention_default_1 = kvq.attention(reshape_default_7, [layers_1_k_cache_codes,
    layers_1_k_cache_length], [layers_1_v_cache_codes, layers_1_v_cache_length], none, none,
    mask=reshape_default_9, causal=False, scale=0.17677669529663687, softcap=0.0, sinks=None,
    use_length=False)
reshape_default_10 = reshape(attention_default_1, [2, 2, 2, 1, 32])
reshape_default_11 = reshape(reshape_default_10, [2, 4, 1, 32])
transpose_7 = transpose.int(reshape_default_11, 1, 2)
flatten_1 = flatten.using_ints(transpose_7, 2)
linear_5 = linear(flatten_1, layers_1_out_weight)
add_1 = add.Tensor(add, linear_5)
linear_6 = linear(add_1, embedding_weight)
return [linear_6]
""",
        )

    def test_int8(self):
        (inputs,) = toys.chunks(toys.B, [1], 3)
        _, lifted, _ = rewritten(decoder("int8_per_token_head"), *inputs)
        caches = listing(lifted.graph_module, lambda node: "cache" in str((node.name, node.args)))
        self.assertExpectedInline(
            caches,
            """\
layers_0_k_cache_codes: int8[2, 2, 64, 32]
layers_0_k_cache_scale: float32[2, 2, 64]
layers_0_k_cache_length: int64[2]
layers_0_v_cache_codes: int8[2, 2, 64, 32]
layers_0_v_cache_scale: float32[2, 2, 64]
layers_0_v_cache_length: int64[2]
layers_1_k_cache_codes: int8[2, 2, 64, 32]
layers_1_k_cache_scale: float32[2, 2, 64]
layers_1_k_cache_length: int64[2]
layers_1_v_cache_codes: int8[2, 2, 64, 32]
layers_1_v_cache_scale: float32[2, 2, 64]
layers_1_v_cache_length: int64[2]
append_ = kvq.append_([layers_0_k_cache_codes, layers_0_k_cache_scale, layers_0_k_cache_length],
    position, transpose_1, int8_per_token_head)
append__1 = kvq.append_([layers_0_v_cache_codes, layers_0_v_cache_scale, layers_0_v_cache_length],
    position, transpose_2, int8_per_token_head)
attention_default = kvq.attention(reshape_default_1, [layers_0_k_cache_codes,
    layers_0_k_cache_scale, layers_0_k_cache_length], [layers_0_v_cache_codes,
    layers_0_v_cache_scale, layers_0_v_cache_length], int8_per_token_head, int8_per_token_head,
    mask=reshape_default_3, causal=False, scale=0.17677669529663687, softcap=0.0, sinks=None,
    use_length=False)
append__2 = kvq.append_([layers_1_k_cache_codes, layers_1_k_cache_scale, layers_1_k_cache_length],
    position, transpose_5, int8_per_token_head)
append__3 = kvq.append_([layers_1_v_cache_codes, layers_1_v_cache_scale, layers_1_v_cache_length],
    position, transpose_6, int8_per_token_head)
attention_default_1 = kvq.attention(reshape_default_7, [layers_1_k_cache_codes,
    layers_1_k_cache_scale, layers_1_k_cache_length], [layers_1_v_cache_codes,
    layers_1_v_cache_scale, layers_1_v_cache_length], int8_per_token_head, int8_per_token_head,
    mask=reshape_default_9, causal=False, scale=0.17677669529663687, softcap=0.0, sinks=None,
    use_length=False)
""",
        )

    def test_keys_and_values_differ(self):
        (inputs,) = toys.chunks(toys.B, [1], 3)
        _, lifted, _ = rewritten(decoder("key=int8_per_token_head,value=int4_group32"), *inputs)
        caches = listing(
            lifted.graph_module, lambda node: "layers_0" in node.name or op(node).startswith("kvq")
        )
        self.assertExpectedInline(
            caches,
            """\
layers_0_k_cache_codes: int8[2, 2, 64, 32]
layers_0_k_cache_scale: float32[2, 2, 64]
layers_0_k_cache_length: int64[2]
layers_0_v_cache_codes: uint8[2, 2, 64, 16]
layers_0_v_cache_scale: float16[2, 2, 64, 1]
layers_0_v_cache_minimum: float16[2, 2, 64, 1]
layers_0_v_cache_length: int64[2]
append_ = kvq.append_([layers_0_k_cache_codes, layers_0_k_cache_scale, layers_0_k_cache_length],
    position, transpose_1, int8_per_token_head)
append__1 = kvq.append_([layers_0_v_cache_codes, layers_0_v_cache_scale, layers_0_v_cache_minimum,
    layers_0_v_cache_length], position, transpose_2, int4_group32)
attention_default = kvq.attention(reshape_default_1, [layers_0_k_cache_codes,
    layers_0_k_cache_scale, layers_0_k_cache_length], [layers_0_v_cache_codes,
    layers_0_v_cache_scale, layers_0_v_cache_minimum, layers_0_v_cache_length], int8_per_token_head,
    int4_group32, mask=reshape_default_3, causal=False, scale=0.17677669529663687, softcap=0.0,
    sinks=None, use_length=False)
append__2 = kvq.append_([layers_1_k_cache_codes, layers_1_k_cache_scale, layers_1_k_cache_length],
    position, transpose_5, int8_per_token_head)
append__3 = kvq.append_([layers_1_v_cache_codes, layers_1_v_cache_scale, layers_1_v_cache_minimum,
    layers_1_v_cache_length], position, transpose_6, int4_group32)
attention_default_1 = kvq.attention(reshape_default_7, [layers_1_k_cache_codes,
    layers_1_k_cache_scale, layers_1_k_cache_length], [layers_1_v_cache_codes,
    layers_1_v_cache_scale, layers_1_v_cache_minimum, layers_1_v_cache_length], int8_per_token_head,
    int4_group32, mask=reshape_default_9, causal=False, scale=0.17677669529663687, softcap=0.0,
    sinks=None, use_length=False)
""",
        )

    def test_report(self):
        (inputs,) = toys.chunks(toys.B, [1], 3)
        _, _, report = rewritten(decoder("key=int8_per_token_head,value=int4_group32"), *inputs)
        self.assertExpectedInline(
            "\n".join(report.lines()) + "\n",
            """\
compile: 2 of 2 attention sites read the quantized cache
  caches: 4 (2 int8_per_token_head, 2 int4_group32), 28,736 bytes instead of 131,072; 4 writes
""",
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_counts(format: str, tokens: int) -> None:
    """As many attentions on stores as there were SDPA, as many writes as before, and nothing decodes."""
    (inputs,) = toys.chunks(toys.B, [tokens], 3)
    captured, lifted, report = rewritten(decoder(format, toys.Layer), *inputs)
    before, after = counts(captured), counts(lifted.graph_module)
    assert before["scaled_dot_product_attention"] == 2 and before["index_copy_"] == 4
    assert after["kvq.attention"] == 2 and after["kvq.append_"] == 4
    assert (
        not after["scaled_dot_product_attention"] and not after["index_copy_"] and not after["kvq.dequantize"]
    )
    assert report.rewritten == 2 and report.writes == 4
    # The rest of the model is as it was.
    for name in ("linear", "silu", "embedding"):
        assert before[name] == after[name] > 0


@pytest.mark.parametrize("format", FORMATS)
def test_a6_dead_code_removal_keeps_writes(format: str) -> None:
    """A6: nothing reads what a write returns, and plain DCE runs after the pass."""
    model = decoder(format)
    plain = copy.deepcopy(model)
    (prefill, decode) = toys.chunks(toys.B, [4, 1])
    _, lifted, _ = rewritten(model, *prefill)
    graph_module = lifted.graph_module
    before = counts(graph_module)["kvq.append_"]
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    assert counts(graph_module)["kvq.append_"] == before == 4

    # The graph after DCE writes what the second step of the model needs.
    with torch.no_grad():
        plain(*prefill)
        fresh = decoder_like(plain)
        graph_module(*flatten_handles(inputs_of(graph_module, lifted, fresh, prefill)))
        torch.testing.assert_close(fresh(*decode), plain(*decode), rtol=0, atol=1e-5)


def decoder_like(model: nn.Module) -> nn.Module:
    """A copy with empty caches."""
    model = copy.deepcopy(model)
    for handle in toys.handles(model):
        for plane in handle.store:
            plane.zero_()
    return model


def inputs_of(graph_module: GraphModule, lifted: Lifted, model: nn.Module, args: Sequence[Any]) -> list[Any]:
    """Values for the placeholders, found by their names."""
    named: dict[str, Any] = {"ids": args[0], "position": args[1]}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        flat = name.replace(".", "_")
        if isinstance(tensor, toys.QuantizedKV):
            for plane, one in zip(tensor.plane_names(), tensor.store, strict=True):
                named[f"{flat}_{plane}"] = one
        else:
            named[flat] = tensor
    return [named[node.name] for node in graph_module.graph.nodes if node.op == "placeholder"]


def test_dynamic_shapes_stay_symbolic() -> None:
    """Batch and length marked dynamic: one graph whose stores and mask have symbolic sizes."""
    (inputs,) = toys.chunks(toys.B, [5], 3)
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, tensor.dim() - 1)
    _, lifted, report = rewritten(decoder("int8_per_token_head"), *inputs, dynamic=True)
    assert report.rewritten == 2
    (first, *_) = (
        node for node in lifted.graph_module.graph.nodes if node.target is torch.ops.kvq.attention.default
    )
    assert isinstance(first.meta["val"].shape[2], torch.SymInt)


def test_modules_are_named_in_the_report() -> None:
    (inputs,) = toys.chunks(toys.B, [1], 3)
    _, _, report = rewritten(decoder("int8_per_token_head"), *inputs)
    assert [cache.name for cache in report.caches] == [
        "layers.0.k_cache",
        "layers.0.v_cache",
        "layers.1.k_cache",
        "layers.1.v_cache",
    ]
    assert [site.module for site in report.sites] == ["layers.0", "layers.1"]
