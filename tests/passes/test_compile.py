"""The backend from the outside: options, errors, compilations, generated code, compile caches."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import passes
from kvq_ops.errors import FormatError, GradientError, NothingRewrittenError, UnknownFormatError
from kvq_ops.handle import QuantizedKV

from . import toys

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "int8_per_token_head"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    passes.clear_report()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def decoder(format: str | None = FORMAT, layers: int = 1, **kwargs) -> nn.Module:
    model = toys.Decoder(layers, **kwargs).eval()
    return model if format is None else toys.quantized(model, format)


def one_call(tokens: int = 3):
    (inputs,) = toys.chunks(toys.B, [tokens])
    return inputs


# -------------------------------------------------------------------------------------------------------- compilations


def test_c6_twelve_layers_prefill_fifty_decodes_and_another_length() -> None:
    """C6: at most 3 compilations, no graph break; neither the position nor the layer is a constant of the graph."""
    model = decoder(layers=12)
    step = torch.compile(model, backend="kvq", options={"lower": "eager"})
    for inputs in toys.chunks(toys.B, [7] + [1] * 50):
        step(*inputs)
    for handle in toys.handles(model):
        assert handle.length.tolist() == [57] * toys.B
    step(*one_call(11))
    assert counters["stats"]["unique_graphs"] == len(passes.report().graphs) <= 3
    assert not counters["graph_break"], dict(counters["graph_break"])
    assert all(graph.rewritten == 12 for graph in passes.report().graphs)


def test_c6_layers_compiled_one_by_one_share_code() -> None:
    """Regional compilation: twelve layers, each compiled by itself, cost no more graphs than one."""
    model = decoder(layers=12)
    for layer in model.layers:
        layer.compile(backend="kvq", fullgraph=True, options={"lower": "eager"})
    for inputs in toys.chunks(toys.B, [7] + [1] * 3):
        model(*inputs)
    assert counters["stats"]["unique_graphs"] == len(passes.report().graphs) <= 3


def test_inductor_decodes_as_eager_does() -> None:
    """The whole way down: eager with handles and the compiled model, call by call; ``none`` also as the dense model."""
    dense = decoder(None, layers=2)
    stored = {name: toys.quantized(dense, name) for name in ("none", FORMAT, "key=nvfp4,value=int4_group32")}
    for name, model in stored.items():
        torch._dynamo.reset()
        reference = toys.quantized(dense, name)
        plain = copy.deepcopy(dense) if name == "none" else None
        step = torch.compile(model, backend="kvq", fullgraph=True)
        for inputs in toys.chunks(toys.B, [5, 1, 1]):
            out = step(*inputs)
            torch.testing.assert_close(out, reference(*inputs), rtol=0, atol=1e-4)
            if plain is not None:
                torch.testing.assert_close(out, plain(*inputs), rtol=0, atol=1e-4)
        for a, b in zip(toys.handles(model), toys.handles(reference), strict=True):
            assert torch.equal(a.length, b.length)


# ------------------------------------------------------------------------------------------------------------- options


def test_unknown_option_names_the_near_one() -> None:
    step = torch.compile(decoder(), backend="kvq", options={"alow_unrewritten": True})
    with pytest.raises(FormatError, match="allow_unrewritten"):
        step(*one_call())


@pytest.mark.parametrize(
    "options, text",
    [
        ({"inductor": {"max_autotun": True}}, "max_autotune"),
        ({"lower": "aot"}, "inductor"),
        ({"format": "int8_per_tokn"}, "int8_per_token_head"),
        ({"max_autotune": True}, "inductor"),
    ],
)
def test_wrong_options(options: dict, text: str) -> None:
    step = torch.compile(decoder(), backend="kvq", options=options)
    for _ in range(2):
        with pytest.raises(FormatError, match=text):
            step(*one_call())
    assert all(int(handle.length.max()) == 0 for handle in toys.handles(step))


def test_unknown_mode() -> None:
    # torch.compile checks modes for Inductor alone.
    step = torch.compile(decoder(), backend="kvq", mode="max-autotun")
    with pytest.raises(FormatError, match="max-autotune"):
        step(*one_call())


@pytest.mark.parametrize(
    "given, name, value",
    [
        ({"mode": "max-autotune-no-cudagraphs"}, "coordinate_descent_tuning", True),
        ({"options": {"inductor": {"cpp.threads": 3}}}, "cpp.threads", 3),
        ({"options": {"inductor": {"epilogue-fusion": False}}}, "epilogue_fusion", False),
    ],
)
def test_mode_and_inductor_options_reach_inductor(monkeypatch, given: dict, name: str, value: object) -> None:
    from torch._inductor import compile_fx, config

    seen = []

    def spy(graph_module, inputs):
        seen.append(config.get_config_copy()[name])
        return graph_module

    monkeypatch.setattr(compile_fx, "compile_fx", spy)
    before = config.get_config_copy()[name]
    torch.compile(decoder(), backend="kvq", **given)(*one_call())
    assert seen == [value] and before != value
    assert config.get_config_copy()[name] == before


def test_format_option() -> None:
    options = {"format": FORMAT, "lower": "eager"}
    torch.compile(decoder(), backend="kvq", options=options)(*one_call())
    torch._dynamo.reset()
    with pytest.raises(FormatError, match="layers.0.k_cache in int4_group32"):
        torch.compile(decoder("int4_group32"), backend="kvq", options=options)(*one_call())
    torch._dynamo.reset()
    with pytest.raises(NothingRewrittenError, match=r"quantize_kv_cache_\(model, 'int8_per_token_head'"):
        torch.compile(decoder(None), backend="kvq", options=options)(*one_call())
    with pytest.raises(UnknownFormatError):
        torch._dynamo.reset()
        torch.compile(decoder(), backend="kvq", options={"format": "int8"})(*one_call())


# ---------------------------------------------------------------------------------------------------------- strictness


def test_a4_zero_rewritten_sites_raise_at_every_call() -> None:
    """A4: attention over dense caches is not what the backend was asked for."""
    step = torch.compile(decoder(None), backend="kvq")
    for _ in range(2):
        with pytest.raises(NothingRewrittenError, match="1 attention sites") as caught:
            step(*one_call())
        assert "quantize_kv_cache_" in str(caught.value) and "allow_unrewritten" in str(caught.value)


def test_a4_allow_unrewritten() -> None:
    model = decoder(None)
    step = torch.compile(model, backend="kvq", options={"allow_unrewritten": True, "lower": "eager"})
    inputs = one_call()
    out = step(*inputs)
    torch.testing.assert_close(out, model(*inputs))
    assert passes.report().found == 1 and passes.report().rewritten == 0
    assert "left:" in passes.report().text()


def test_graph_without_attention() -> None:
    layer = nn.Linear(4, 4).eval()
    with pytest.raises(NothingRewrittenError, match="0 attention sites"):
        torch.compile(layer, backend="kvq")(torch.randn(2, 4))


def test_a4_softcap_is_carried() -> None:
    """A4: logits near +-40, cap 5: the cap is carried; with 1e6 it is as none."""

    class Capped(toys.Layer):
        cap = 5.0

        def forward(self, x, position, mask):
            query, key, value = self.project(x)
            keys = self.k_cache.index_copy_(2, position, key * 40)
            values = self.v_cache.index_copy_(2, position, value)
            keys, values = (t.repeat_interleave(2, 1) for t in (keys, values))
            scores = query @ keys.transpose(2, 3) * toys.D**-0.5
            if self.cap:
                scores = torch.tanh(scores / self.cap) * self.cap
            return (scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ values

    layer = Capped().eval()
    inputs = (
        torch.randn(toys.B, 5, toys.WIDTH),
        torch.arange(5),
        toys.causal_mask(torch.arange(5), toys.CAPACITY),
    )
    outputs = {}
    for cap in (5.0, 1e6, 0.0):
        torch._dynamo.reset()
        passes.clear_report()
        model = toys.quantized(layer, FORMAT)
        model.cap = cap
        outputs[cap] = torch.compile(model, backend="kvq", options={"lower": "eager"})(*inputs)
        eager = toys.quantized(layer, FORMAT)
        eager.cap = cap
        torch.testing.assert_close(outputs[cap], eager(*inputs), rtol=0, atol=1e-5)
        assert passes.report().rewritten == 1
    torch.testing.assert_close(outputs[1e6], outputs[0.0], rtol=0, atol=1e-4)
    assert (outputs[5.0] - outputs[0.0]).abs().max() > 0.01


# ----------------------------------------------------------------------------------------------------------- gradients


def test_b5_training_is_one_clear_error() -> None:
    """B5: neither a silent zero gradient nor a warning."""
    model = decoder().train()
    with torch.enable_grad(), pytest.raises(Exception, match="inference only"):
        torch.compile(model, backend="kvq")(*one_call())


def test_b5_gradient_of_the_query_alone() -> None:
    """The caches are only read here, so that nothing fails before the backend sees the graph."""
    keys, values = (QuantizedKV.from_dense(torch.randn(2, 2, 8, 16), FORMAT) for _ in range(2))

    def read(query, keys, values):
        return F.scaled_dot_product_attention(query, keys, values)

    query = torch.randn(2, 2, 3, 16, requires_grad=True)
    step = torch.compile(read, backend="kvq", options={"lower": "eager"})
    with torch.enable_grad():
        for _ in range(2):
            with pytest.raises(GradientError, match="no_grad"):
                step(query, keys, values)
    assert not step(query, keys, values).requires_grad


# ------------------------------------------------------------------------------------------------------ generated code


class Big(nn.Module):
    """Two 16 MB caches and one new token."""

    tokens = 16_384

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, 2, self.tokens, 128))

    def forward(self, query, key, value, position):
        self.k_cache.index_copy_(2, position, key)
        self.v_cache.index_copy_(2, position, value)
        mask = toys.causal_mask(position, self.tokens)
        return F.scaled_dot_product_attention(query, self.k_cache, self.v_cache, attn_mask=mask)


def token_inputs(position: int = 7):
    return (*(torch.randn(1, 2, 1, 128) for _ in range(3)), torch.tensor([position]))


def big_buffers(code: str, elements: int) -> list[str]:
    """Lines of generated code that allocate, clone or copy as much as a plane of ``elements``."""
    found = []
    for line in code.splitlines():
        sizes = [int(n) for n in re.findall(r"\d+", line)]
        allocates = re.search(
            r"empty_strided|torch\.empty|aten\.clone|clone\(|at::empty|aoti_torch_empty", line
        )
        if allocates and any(n >= Big.tokens for n in sizes):
            shape = re.search(r"\(\s*\(([\d, ]+)\)", line)
            total = 1
            for n in re.findall(r"\d+", shape.group(1)) if shape else map(str, sizes):
                total *= int(n)
            if total >= elements:
                found.append(line.strip())
        if re.search(r"(\.copy_|aten\.copy|copy__?\()", line) and "cache" in line:
            found.append(line.strip())
    return found


@pytest.mark.no_poison
def test_b4_compiled_update_copies_no_cache() -> None:
    """B4: the generated code allocates nothing of a plane's size, and planes stay where they are."""
    from torch._inductor.utils import run_and_get_code

    model = toys.quantized(Big().eval(), FORMAT)
    step = torch.compile(model, backend="kvq", fullgraph=True)
    pointers = [plane.data_ptr() for handle in toys.handles(model) for plane in handle.store]
    assert sum(p.nbytes for h in toys.handles(model) for p in h.store) > 8 << 20
    _, code = run_and_get_code(step, *token_inputs())
    step(*token_inputs(8))
    assert code and "kvq.append_" in "\n".join(code)
    elements = 2 * Big.tokens  # the smallest plane beside the length: one scale for each token and head
    assert not big_buffers("\n".join(code), elements)
    assert [plane.data_ptr() for handle in toys.handles(model) for plane in handle.store] == pointers
    assert all(handle.length.tolist() == [9] for handle in toys.handles(model))


def test_b4_the_scan_can_fail() -> None:
    """A scaled copy of a cache in the model does show up in the generated code."""
    from torch._inductor.utils import run_and_get_code

    class Copies(Big):
        def forward(self, query, key, value, position):
            return super().forward(query, key, value, position), self.k_cache * 2

    step = torch.compile(Copies().eval(), fullgraph=True)
    _, code = run_and_get_code(step, *token_inputs())
    assert big_buffers("\n".join(code), 2 * Big.tokens)


# ------------------------------------------------------------------------------------------------------ compile caches


PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
sys.path.insert(0, {root!r})
from kvq_ops.handle import QuantizedKV
import passes

key, value, dtype = sys.argv[1:]
dtype = getattr(torch, dtype)

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k = QuantizedKV.empty((1, 2, 16, 32), key, dtype=dtype)
        self.v = QuantizedKV.empty((1, 2, 16, 32), value, dtype=dtype)

    def forward(self, q, new, position):
        self.k.index_copy_(2, position, new)
        self.v.index_copy_(2, position, new)
        mask = torch.arange(16) <= position[:, None]
        return torch.nn.functional.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask) + 1

torch.manual_seed(0)
args = [torch.randn(1, 2, 1, 32, dtype=dtype), torch.randn(1, 2, 1, 32, dtype=dtype), torch.tensor([0])]
step, eager = Step(), Step()
with torch.no_grad():
    out, code = run_and_get_code(torch.compile(step, backend="kvq", fullgraph=True), *args)
    expected = eager(*args)
names = sorted(set(w for text in code for w in text.replace("'", " ").split() if w in {names!r}))
print(json.dumps(dict(
    difference=(out - expected).abs().max().item(), names=names, dtype=str(out.dtype),
    hits=counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"],
    report=passes.report().data())))
"""


def in_process(cache: Path, *args: str) -> dict:
    names = ["int8_per_token_head", "int4_group32", "int4_group64", "none", "fp8_per_token_head"]
    code = PROGRAM.format(root=str(ROOT), names=names)
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a7_formats_share_a_compile_cache_folder(tmp_path: Path) -> None:
    """A7: fresh processes, one folder: each finds its own code, and one that starts warm still reports."""
    runs = [
        ("int8_per_token_head", "int8_per_token_head", "float32"),
        ("int4_group32", "int4_group32", "float32"),
        ("int8_per_token_head", "int4_group32", "float32"),
        ("int8_per_token_head", "int8_per_token_head", "bfloat16"),
        ("int8_per_token_head", "int8_per_token_head", "float32"),
    ]
    results = [in_process(tmp_path, *run) for run in runs]
    for (key, value, dtype), result in zip(runs, results, strict=True):
        assert result["difference"] <= (1e-5 if dtype == "float32" else 2e-2)
        assert result["dtype"] == f"torch.{dtype}"
        assert result["report"]["rewritten"] == result["report"]["found"] == 1
        assert result["report"]["graphs"][0]["sites"][0]["formats"] == [key, value]
        if result["names"]:
            assert result["names"] == sorted({key, value})
    assert results[0]["hits"] == 0 and results[1]["hits"] == 0 and results[2]["hits"] == 0
    assert results[4]["hits"] >= 1


# -------------------------------------------------------------------------------------------------------- entry point


def _is_installed() -> bool:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="kvq")
    return any(entry.value == "passes.compile:kvq_backend" for entry in found)


@pytest.mark.skipif(
    not _is_installed(), reason="the distribution is not installed, so that it has no entry points"
)
def test_backend_needs_no_import() -> None:
    """``backend="kvq"`` in a process that imports torch alone: found by its entry point, and strict."""
    code = (
        "import sys, torch; assert not {'passes', 'kvq_ops'} & set(sys.modules)\n"
        "assert 'kvq' in torch.compiler.list_backends(exclude_tags=())\n"
        "try: torch.compile(torch.nn.Linear(2, 2), backend='kvq')(torch.ones(2))\n"
        "except RuntimeError as error: print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "NothingRewrittenError", done.stderr[-3000:]


# ------------------------------------------------------------------------------------------------------- CUDA graphs


def static_inputs(monkeypatch: pytest.MonkeyPatch, call) -> set[int]:
    """The inputs that Inductor was told to stay in their places."""
    from torch._inductor import compile_fx

    seen: list[set[int]] = []
    original = compile_fx.compile_fx_inner

    def spy(graph_module, example_inputs, **kwargs):
        seen.append(set(kwargs["static_input_idxs"]))
        return original(graph_module, example_inputs, **kwargs)

    monkeypatch.setattr(compile_fx.compile_fx, "__defaults__", (spy, *compile_fx.compile_fx.__defaults__[1:]))
    # A graph that an earlier run left in AOTAutograd's cache would not come by here.
    with torch._functorch.config.patch(enable_autograd_cache=False):
        call()
    (found,) = seen
    return found


def test_planes_in_buffers_stay_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs only update inputs whose addresses do not change: all but ids, position and mask."""
    model = decoder()
    static = static_inputs(monkeypatch, lambda: torch.compile(model, backend="kvq")(*one_call()))
    planes = sum(len(handle.store) for handle in toys.handles(model))
    assert planes == 6
    assert len(static) == planes + len(list(model.parameters()))


def test_constants_of_the_graph_stay_in_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that the model makes of a number becomes a buffer of the captured graph; Dynamo knows of no source for it."""
    key, value = (QuantizedKV.empty((1, 2, 16, 32), FORMAT) for _ in range(2))

    def step(query, key, value):
        return F.scaled_dot_product_attention(query * torch.tensor(0.5), key, value)

    query = torch.randn(1, 2, 1, 32)
    compiled = torch.compile(step, backend="kvq", fullgraph=True)
    found: list[torch.Tensor] = []
    static = static_inputs(monkeypatch, lambda: found.append(compiled(query, key, value)))
    assert static == {0}
    torch.testing.assert_close(found[0], step(query, key, value))


@pytest.mark.parametrize("marked", [False, True])
def test_planes_of_a_handle_among_the_inputs(monkeypatch: pytest.MonkeyPatch, marked: bool) -> None:
    """Nothing says where an input will be next time, unless its owner does."""
    key, value = (QuantizedKV.empty((1, 2, 16, 32), FORMAT) for _ in range(2))
    if marked:
        torch._dynamo.mark_static_address(key)

    def step(query, key, value, new, position):
        key.index_copy_(2, position, new)
        value.index_copy_(2, position, new)
        return F.scaled_dot_product_attention(query, key, value)

    new, query = torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32)
    compiled = torch.compile(step, backend="kvq", fullgraph=True)
    static = static_inputs(monkeypatch, lambda: compiled(query, key, value, new, torch.tensor([0])))
    assert len(static) == (len(key.store) if marked else 0)
