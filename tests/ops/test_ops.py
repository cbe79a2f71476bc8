"""The operators as torch sees them: schemas, fake kernels, aliasing, compile and export, for each format and implementation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import kvq_ops
from kvq_ops import registry
from kvq_ops.formats import get_format
from tests.ops import checks
from tests.ops.checks import CALIBRATED, EACH_KIND

B, HQ, HKV, TQ, T, D = 2, 4, 2, 3, 9, 64
# Paged forms take pools and tables instead of stores, and have tests of their own.
OPS = tuple(op for op in registry.OPS if not op.startswith("paged_"))

# Beside the format itself: attention with every argument given, and over two formats.
FULL: dict[str, Any] = {
    "causal": True,
    "scale": 0.3,
    "window": 5,
    "softcap": 4.0,
    "use_length": True,
}


def full_options() -> dict[str, Any]:
    return {**FULL, "mask": torch.randn(B, 1, TQ, T), "sinks": torch.randn(HQ)}


def arguments(op: str, name: str, *, value_name: str | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if op == "quantize":
        return (torch.randn(B, HKV, T, D), name), {}
    store = checks.stored(torch.randn(B, HKV, T, D), name)
    if op == "dequantize":
        return (store, name, torch.float16), {}
    if op == "append_":
        return (checks.empty(name, B, HKV, T, D), torch.arange(2, 5), torch.randn(B, HKV, 3, D), name), {}
    values = checks.stored(torch.randn(B, HKV, T, 2 * D), value_name or name)
    return (torch.randn(B, HQ, TQ, D), store, values, name, value_name or name), full_options()


def served(op: str, implementation: str, *names: str) -> None:
    if op == "quantize" and any(get_format(n).calibrated for n in names):
        pytest.skip("nothing to quantize with but what a store holds")
    fmts = [get_format(n) for n in names] * (2 if op == "attention" and len(names) == 1 else 1)
    dims = [D, 2 * D] if op == "attention" else [D]
    dtype = torch.float16 if op == "dequantize" else torch.float32
    if reason := checks.refusal(implementation, op, fmts, dims, dtype):
        pytest.skip(f"{implementation}: {reason}")


def every_implementation(test: Callable[..., None]) -> Callable[..., None]:
    pairs = [(op, name) for op in OPS for name in checks.implementations(op)]
    return pytest.mark.parametrize(("op", "implementation"), pairs)(test)


def call(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return getattr(torch.ops.kvq, op)(*args, **kwargs)


def clone(args: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, args)


# --------------------------------------------------------------------------------------------------- the op contract


@pytest.mark.parametrize("name", EACH_KIND)
@every_implementation
def test_opcheck(op: str, implementation: str, name: str) -> None:
    served(op, implementation, name)
    args, kwargs = arguments(op, name)
    with registry.use_implementation(implementation):
        results = torch.library.opcheck(getattr(torch.ops.kvq, op).default, args, kwargs)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("key_name", "value_name"), [("none", "int4_group32"), ("nvfp4", "fp8_per_head")])
def test_opcheck_of_attention_over_two_formats(key_name: str, value_name: str) -> None:
    args, kwargs = arguments("attention", key_name, value_name=value_name)
    for given in (kwargs, {}, {"mask": torch.rand(TQ, T) > 0.5, "use_length": False}):
        results = torch.library.opcheck(torch.ops.kvq.attention.default, args, given)
        assert set(results.values()) == {"SUCCESS"}


def _outputs(op: str, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    out = call(op, args, kwargs)
    return [] if out is None else [out] if isinstance(out, Tensor) else list(out)


def _variants(op: str, name: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Arguments of odd shape and layout."""
    made: dict[str, tuple[Any, dict[str, Any]]] = {"plain": arguments(op, name)}
    views = {
        "heads last": torch.randn(B, T, HKV, D).transpose(1, 2),
        "strided": torch.randn(B, HKV, T, 2 * D)[..., ::2],
        "half": torch.randn(B, HKV, T, D).half(),
        "bfloat16": torch.randn(B, HKV, T, D).bfloat16(),
        "one token": torch.randn(1, 1, 1, D),
        "no token": torch.randn(B, HKV, 0, D),
        "no row": torch.randn(0, HKV, T, D),
    }
    for what, x in views.items():
        if op == "quantize":
            made[what] = ((x, name), {})
            continue
        store = checks.stored(x, name)
        if op == "dequantize":
            for dtype in checks.DTYPES:
                made[f"{what} {dtype}"] = ((store, name, dtype), {})
        elif op == "append_":
            cache = checks.empty(name, x.shape[0], x.shape[1], x.shape[2] + 1, D, dtype=x.dtype)
            made[what] = ((cache, torch.arange(x.shape[2]), x, name), {})
        else:
            query = x.repeat_interleave(2, 1)[:, :, :1] if x.shape[2] else x.repeat_interleave(2, 1)
            made[what] = ((query, store, store, name, name), {})
            made[what + " softcap"] = ((query, store, store, name, name), {"softcap": 2.0})
            if x.shape[0]:
                made[what + " query view"] = (
                    (
                        torch.randn(x.shape[0], 5, x.shape[1], D, dtype=x.dtype).transpose(1, 2),
                        store,
                        store,
                        name,
                        name,
                    ),
                    {"causal": True},
                )
    return made


@pytest.mark.parametrize("name", EACH_KIND)
@every_implementation
def test_B1_fake_equals_real_and_outputs_own_their_memory(op: str, implementation: str, name: str) -> None:
    served(op, implementation, name)
    for what, (args, kwargs) in _variants(op, name).items():
        with FakeTensorMode() as mode:
            fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            fake = _outputs(op, *fakes)
        dtype = next(t.dtype for t in pytree.tree_leaves(args) if isinstance(t, Tensor))
        fmts = [get_format(name)] * (2 if op == "attention" else 1)
        if checks.refusal(
            implementation, op, fmts, [D] * len(fmts), args[2] if op == "dequantize" else dtype
        ):
            continue
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        written = {id(t) for t in args[0]} if op == "append_" else set()
        before = [(t, t._version, t.clone()) for t in tensors]
        with registry.use_implementation(implementation):
            real = _outputs(op, args, kwargs)
        _same_metadata(fake, real, what)
        owned = {t.untyped_storage().data_ptr() for t in tensors if t.numel()}
        for i, out in enumerate(real):
            if out.numel():
                pointer = out.untyped_storage().data_ptr()
                assert pointer not in owned, f"{what}: output {i} shares the memory of an input or output"
                owned.add(pointer)
        for tensor, version, copy in before:
            if id(tensor) in written:
                changed = not torch.equal(tensor, copy)
                assert not changed or tensor._version > version, f"{what}: a hidden mutation"
            else:
                assert tensor._version == version and torch.equal(tensor, copy), (
                    f"{what}: an input was written"
                )


def _same_metadata(fake: list[Tensor], real: list[Tensor], what: str) -> None:
    assert len(fake) == len(real), what
    for f, r in zip(fake, real, strict=True):
        assert (f.shape, f.dtype, f.device) == (r.shape, r.dtype, r.device), what
        strides = [(a, b) for a, b, size in zip(f.stride(), r.stride(), r.shape, strict=True) if size > 1]
        assert not r.numel() or all(a == b for a, b in strides), f"{what}: {f.stride()} for {r.stride()}"


def test_schemas_declare_every_mutation() -> None:
    for op in OPS:
        schema = getattr(torch.ops.kvq, op).default._schema
        mutable = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        assert mutable == (["store"] if op == "append_" else [])
        assert all(r.alias_info is None for r in schema.returns)


# ------------------------------------------------------------------------------------------------- compile and export


def step(
    keys: list[Tensor],
    values: list[Tensor],
    query: Tensor,
    k: Tensor,
    v: Tensor,
    position: Tensor,
    mask: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """All four operators, as a decoding step uses them."""
    kvq_ops.append_(keys, position, k, name)
    kvq_ops.append_(values, position, v, name)
    out = kvq_ops.attention(query * 2, keys, values, name, name, mask=mask, causal=True)
    # A calibrated format has nothing to quantize with but what its stores hold.
    quantized = [] if name in CALIBRATED else kvq_ops.quantize(v.relu(), name)
    return out + 1, kvq_ops.dequantize(keys, name, torch.float32), quantized


def step_arguments(name: str) -> tuple[Any, ...]:
    keys, values = (checks.empty(name, B, HKV, T, D) for _ in range(2))
    return (
        keys,
        values,
        torch.randn(B, HQ, TQ, D),
        torch.randn(B, HKV, TQ, D),
        torch.randn(B, HKV, TQ, D),
        torch.arange(2, 2 + TQ),
        torch.rand(B, 1, TQ, T) > 0.3,
        name,
    )


def assert_equal_trees(got: Any, want: Any) -> None:
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        assert not isinstance(a, Tensor) or torch.equal(a, b)


def _compiled_equals_eager(name: str, backend: str, **options: Any) -> None:
    torch._dynamo.reset()
    args = step_arguments(name)
    compiled = torch.compile(step, backend=backend, fullgraph=True, **options)
    eager_args, compiled_args = clone(args), clone(args)
    for _ in range(2):
        want = step(*eager_args)
        assert_equal_trees(compiled(*compiled_args), want)
        assert_equal_trees(compiled_args, eager_args)
        for given in (eager_args, compiled_args):
            given[5].add_(TQ)


@pytest.mark.parametrize("name", EACH_KIND)
def test_compiled_by_aot_eager(name: str) -> None:
    _compiled_equals_eager(name, "aot_eager")


@pytest.mark.parametrize("name", ["int8_per_token_head", "int4_group32", "fp8_e4m3"])
def test_compiled_by_inductor(name: str) -> None:
    _compiled_equals_eager(name, "inductor")


def test_compiled_with_dynamic_shapes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, tokens in ((2, 9), (3, 17), (4, 8)):
        fmt = get_format("int4_group32")
        stores = [fmt.empty_store(batch, HKV, tokens, D) for _ in range(2)]
        rest = (
            torch.randn(batch, HQ, TQ, D),
            torch.randn(batch, HKV, TQ, D),
            torch.randn(batch, HKV, TQ, D),
            torch.arange(TQ),
            torch.rand(batch, 1, TQ, tokens) > 0.3,
            "int4_group32",
        )
        eager, other = [clone(s) for s in stores], [clone(s) for s in stores]
        assert_equal_trees(compiled(*other, *rest), step(*eager, *rest))
        assert_equal_trees(other, eager)


@pytest.mark.parametrize("implementation", checks.implementations("attention"))
def test_a_forced_implementation_is_used_inside_compiled_code(implementation: str) -> None:
    """The graph holds the operator, not what it ran when it was traced."""
    name = "int8_per_token_head"
    served("attention", implementation, name)
    torch._dynamo.reset()
    store = checks.stored(torch.randn(B, HKV, T, D), name)
    query = torch.randn(B, HQ, TQ, D)
    compiled = torch.compile(
        lambda q: kvq_ops.attention(q, store, store, name, name), backend="aot_eager", fullgraph=True
    )
    compiled(query)
    seen = []
    row = next(r for r in registry.implementations("attention") if r.name == implementation)
    spy = registry.Implementation(
        "spy", "attention", lambda *a, **k: seen.append(1) or row.run(*a, **k), row.refuses, -1
    )
    registry.register(spy)
    try:
        with registry.use_implementation("spy"):
            compiled(query)
    finally:
        registry._implementations["attention"].remove(spy)
        registry._choices.clear()
    assert seen == [1]


class Layer(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.planes = len(get_format(name).planes)
        for side in ("key", "value"):
            for i, plane in enumerate(checks.empty(name, B, HKV, T, D)):
                self.register_buffer(f"{side}{i}", plane)

    def store(self, side: str) -> list[Tensor]:
        return [getattr(self, f"{side}{i}") for i in range(self.planes)]

    def forward(self, query: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
        keys, values = self.store("key"), self.store("value")
        kvq_ops.append_(keys, position, k, self.name)
        kvq_ops.append_(values, position, v, self.name)
        return kvq_ops.attention(query, keys, values, self.name, self.name, causal=True)


@pytest.mark.parametrize("name", EACH_KIND)
def test_exported_program_runs_and_keeps_its_state(name: str) -> None:
    layer, eager = Layer(name), Layer(name)
    inputs = [
        (torch.randn(B, HQ, 1, D), torch.randn(B, HKV, 1, D), torch.randn(B, HKV, 1, D), torch.tensor([i]))
        for i in range(3)
    ]
    with torch.no_grad():
        program = torch.export.export(layer, inputs[0])
        assert sum("kvq.append_" in str(n.target) for n in program.graph.nodes) == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            decomposed = program.run_decompositions()
        exported, lowered = program.module(), decomposed.module()
        for given in inputs:
            want = eager(*given)
            assert torch.equal(exported(*given), want)
            assert torch.equal(lowered(*given), want)
        for key, plane in eager.state_dict().items():
            assert torch.equal(exported.state_dict()[key], plane), key
            assert torch.equal(lowered.state_dict()[key], plane), key
    written = set(decomposed.graph_signature.buffers_to_mutate.values())
    assert written == set(layer.state_dict()), "every plane may be written, and nothing else is"


def test_B2_slices_of_one_base_compile_to_the_same() -> None:
    """Keys and values of two layers lie in one tensor; three steps change their slices and nothing beside them."""
    name = "int8_per_token_head"
    fmt = get_format(name)
    torch._dynamo.reset()

    def run(codes: Tensor, scale: Tensor, length: Tensor, x: Tensor, position: Tensor) -> list[Tensor]:
        outs = []
        for layer in range(2):
            for side in range(2):
                store = [codes[layer, side], scale[layer, side], length[layer, side]]
                kvq_ops.append_(store, position, x * (layer + 1) + side, name)
            keys, values = ([codes[layer, s], scale[layer, s], length[layer, s]] for s in range(2))
            outs.append(kvq_ops.attention(x, keys, values, name, name))
        return outs

    def buffers() -> list[Tensor]:
        # A third layer that nobody writes.
        planes = fmt.empty_store(B, HKV, T, D)
        return [torch.stack([torch.stack([p, p])] * 3).clone() for p in planes]

    eager, compiled = buffers(), buffers()
    pointers = [b.data_ptr() for b in compiled]
    f = torch.compile(run, backend="inductor", fullgraph=True)
    for i in range(3):
        x, position = torch.randn(B, HKV, 1, D), torch.tensor([i])
        assert_equal_trees(f(*compiled, x, position), run(*eager, x, position))
        for a, b in zip(compiled, eager, strict=True):
            assert torch.equal(a, b)
    assert [b.data_ptr() for b in compiled] == pointers
    assert not compiled[0][2].any() and compiled[0][1].any() and compiled[2][:2].eq(3).all()


# ---------------------------------------------------------------------------------------------------------- choices


def test_priority_refusal_and_explanation() -> None:
    ran = []
    rows = [
        registry.Implementation(
            "fast", "quantize", lambda *a: ran.append("fast"), lambda r: "only on Mars", 99
        ),
        registry.Implementation(
            "good",
            "quantize",
            lambda x, fmt: ran.append("good") or kvq_ops.reference.quantize(x, fmt),
            lambda r: None if r.head_dims == (32,) else f"head_dim {r.head_dims[0]}",
            98,
        ),
    ]
    try:
        for row in rows:
            registry.register(row)
        kvq_ops.quantize(torch.zeros(1, 1, 1, 32), "none")
        kvq_ops.quantize(torch.zeros(1, 1, 1, 16), "none")
        assert ran == ["good"]
        text = kvq_ops.explain("quantize", get_format("none"), head_dim=32)
        assert (
            "fast: rejected: only on Mars" in text
            and "good: chosen" in text
            and "torch: lower priority" in text
        )
        text = kvq_ops.explain("quantize", get_format("none"), head_dim=16)
        assert "good: rejected: head_dim 16" in text
        assert (
            registry.select(
                registry.Request("quantize", "cpu", (get_format("none"),), (16,), torch.float32)
            ).name
            != "good"
        )
        with registry.use_implementation("torch"):
            kvq_ops.quantize(torch.zeros(1, 1, 1, 32), "none")
            assert "'torch' was asked for" in kvq_ops.explain("quantize", get_format("none"), head_dim=32)
        assert ran == ["good"]
        kvq_ops.quantize(torch.zeros(1, 1, 1, 32), "none")
        assert ran == ["good", "good"], "a forced choice outlived its block"
    finally:
        for row in rows:
            registry._implementations["quantize"].remove(row)
        registry._choices.clear()


def test_an_implementation_may_return_any_layout() -> None:
    """The operator promises a contiguous result, as its fake kernel says."""

    def heads_last(query: Tensor, *rest: Any, **options: Any) -> Tensor:
        return (
            kvq_ops.reference.attention(query, *rest, **options).transpose(1, 2).contiguous().transpose(1, 2)
        )

    row = registry.Implementation("heads_last", "attention", heads_last, lambda request: None, -1)
    registry.register(row)
    try:
        store = kvq_ops.quantize(torch.randn(B, HKV, T, D), "none")
        with registry.use_implementation("heads_last"):
            out = kvq_ops.attention(torch.randn(B, HQ, TQ, D), store, store, "none", "none")
        assert out.is_contiguous()
    finally:
        registry._implementations["attention"].remove(row)
        registry._choices.clear()


def test_a_new_row_needs_no_code() -> None:
    """A registered row works in every operator, and the tests' own tables would pick it up."""
    name = "int4_group40"
    row = get_format(name)
    assert name not in kvq_ops.formats.names() and row.group == 40
    x = torch.randn(1, 2, 3, 64)
    checks.assert_planes(kvq_ops.quantize(x, name), row, checks.expected(row, x), name)
    with pytest.raises(kvq_ops.errors.FormatError):
        kvq_ops.register_format(kvq_ops.Format("none", "integer", 8, row.planes))
    assert kvq_ops.register_format(get_format("none")) is get_format("none")
