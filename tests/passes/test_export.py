"""Exported programs with quantized caches: signature, state, files, decomposition, AOTInductor."""

from __future__ import annotations

import copy
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

import passes
from kvq_ops.errors import NothingRewrittenError
from kvq_ops.formats import parse_kv_format
from kvq_ops.handle import QuantizedKV, storage_bytes

from . import toys

ROOT = Path(__file__).resolve().parents[2]
FORMAT = "int8_per_token_head"


@pytest.fixture(autouse=True)
def quiet():
    passes.clear_report()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning)
        yield


def preloaded(layers: int = 2, tokens: int = 3, **kwargs) -> nn.Module:
    """A decoder whose caches hold a prompt of ``tokens`` tokens."""
    model = toys.Decoder(layers, **kwargs).eval()
    (prompt,) = toys.chunks(toys.B, [tokens])
    model(*prompt)
    return model


def steps(count: int = 4, start: int = 3, tokens: int = 1):
    return toys.chunks(toys.B, [tokens] * count, start)


def export(model: nn.Module, inputs, **kwargs) -> ExportedProgram:
    return torch.export.export(copy.deepcopy(model), inputs, **kwargs)


def eager_twin(model: nn.Module, format: str = FORMAT) -> nn.Module:
    """The same model over handles that hold what its caches held."""
    model = copy.deepcopy(model)
    formats = parse_kv_format(format)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if name.endswith("_cache"):
                row = formats.key if name.startswith("k") else formats.value
                filled = int((buffer != 0).any(-1).any(1).any(0).nonzero().max()) + 1 if buffer.any() else 0
                module._buffers[name] = QuantizedKV.from_dense(buffer, row, length=filled)
    return model


def plane_targets(model: nn.Module, format: str = FORMAT) -> set[str]:
    formats = parse_kv_format(format)
    found = set()
    for name, _ in model.named_buffers():
        if name.endswith("_cache"):
            row = formats.key if name.split(".")[-1].startswith("k") else formats.value
            found |= {f"{name}_{plane.name}" for plane in row.planes}
    return found


@pytest.mark.parametrize("format", ["none", FORMAT, "key=int8_per_token_head,value=int4_group32", "nvfp4"])
def test_steps_follow_eager_from_a_preloaded_cache(format: str) -> None:
    """C2: the first step reads what the dense buffers held; state persists from call to call."""
    model = preloaded()
    calls = steps()
    program = passes.quantize_exported(export(model, calls[0]), format)
    eager, module = eager_twin(model, format), program.module()
    dense = copy.deepcopy(model)
    for inputs in calls:
        out = module(*inputs)
        torch.testing.assert_close(out, eager(*inputs), rtol=0, atol=1e-5)
        if format == "none":
            torch.testing.assert_close(out, dense(*inputs), rtol=0, atol=1e-5)
    assert dict(module.named_buffers())["layers.1.k_cache_length"].tolist() == [7] * toys.B


def test_c2_signature() -> None:
    """C2: buffers are exactly the planes; after decomposition exactly they are mutated; the graph holds no dense cache."""
    model, calls = preloaded(), steps(1)
    program = passes.quantize_exported(export(model, calls[0]), FORMAT)
    buffers = [s for s in program.graph_signature.input_specs if s.kind == InputKind.BUFFER]
    assert (
        {spec.target for spec in buffers}
        == plane_targets(model)
        == {name for name in program.state_dict if "cache" in name}
    )
    for node in program.graph.nodes:
        if node.op == "placeholder":
            assert node.target == node.name
    decomposed = program.run_decompositions()
    assert set(decomposed.graph_signature.buffers_to_mutate.values()) == plane_targets(model)
    assert len(decomposed.graph_signature.user_outputs) == 1
    module, eager = decomposed.module(), eager_twin(model)
    for inputs in steps():
        torch.testing.assert_close(module(*inputs), eager(*inputs), rtol=1e-6, atol=1e-5)


def test_original_program_is_unchanged() -> None:
    class Counted(toys.Decoder):
        def __init__(self):
            super().__init__(1)
            self.register_buffer("calls", torch.zeros(1, dtype=torch.int64))

        def forward(self, ids, position):
            self.calls.add_(1)
            return super().forward(ids, position) + self.calls

    model, (inputs,) = Counted().eval(), steps(1)
    program = export(model, inputs)
    before = str(program.graph_signature), program.graph_module.code
    state = {name: value.clone() for name, value in program.state_dict.items()}
    quantized = passes.quantize_exported(program, FORMAT)
    module = quantized.module()
    first, second = module(*inputs), module(*inputs)
    torch.testing.assert_close(second - first, torch.ones_like(first), rtol=0, atol=1e-5)
    assert (str(program.graph_signature), program.graph_module.code) == before
    assert program.state_dict.keys() == state.keys()
    for name, value in program.state_dict.items():
        assert torch.equal(value, state[name]), name


# --------------------------------------------------------------------------------------------------------------- files


def test_file_holds_codes_instead_of_dense_caches(tmp_path: Path) -> None:
    model, (inputs,) = preloaded(capacity=1024), steps(1)
    program = export(model, inputs)
    quantized = passes.quantize_exported(program, FORMAT)
    for name, one in (("dense", program), ("codes", quantized)):
        torch.export.save(one, tmp_path / f"{name}.pt2")
    dense_bytes = storage_bytes(b for n, b in model.named_buffers() if "cache" in n)
    code_bytes = storage_bytes(v for n, v in quantized.state_dict.items() if "cache" in n)
    (report,) = passes.report().graphs
    assert sum(c.bytes for c in report.caches) == code_bytes < dense_bytes / 3
    sizes = {one.stem: one.stat().st_size for one in tmp_path.iterdir()}
    saved = sizes["dense"] - sizes["codes"]
    assert abs(saved - (dense_bytes - code_bytes)) < 64 << 10
    loaded = torch.export.load(tmp_path / "codes.pt2")
    shapes = [tuple(v.shape) for v in loaded.state_dict.values() if v.dtype == torch.float32]
    assert (toys.B, toys.HKV, 1024, toys.D) not in shapes


LOADER = """
import json, sys, torch
{imports}
module = {load}
ids = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    outs = [module(ids[:, i : i + 1], torch.tensor([3 + i])).tolist() for i in range(ids.shape[1])]
print(json.dumps(outs))
"""


def load_elsewhere(path: Path, ids: Tensor, *, imports: str, load: str) -> subprocess.CompletedProcess:
    code = LOADER.format(imports=imports, load=load)
    return subprocess.run(
        [sys.executable, "-c", code, str(path), json.dumps(ids.tolist())],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_c3_saved_program_in_another_process(tmp_path: Path) -> None:
    """C3: without our import loading fails and the message names it; with it the outputs are the same."""
    model, calls = preloaded(), steps()
    program = passes.quantize_exported(export(model, calls[0]), FORMAT)
    torch.export.save(program, tmp_path / "step.pt2")
    ids = torch.cat([call[0] for call in calls], 1)
    load = "torch.export.load(sys.argv[1]).module()"
    failed = load_elsewhere(tmp_path / "step.pt2", ids, imports="", load=load)
    assert failed.returncode != 0 and "import kvq_ops" in failed.stderr
    done = load_elsewhere(tmp_path / "step.pt2", ids, imports="import kvq_ops", load=load)
    assert done.returncode == 0, done.stderr[-3000:]
    module = program.module()
    for inputs, out in zip(calls, json.loads(done.stdout.splitlines()[-1]), strict=True):
        torch.testing.assert_close(torch.tensor(out), module(*inputs), rtol=0, atol=1e-6)


# --------------------------------------------------------------------------------------------------------- AOTInductor


def plane_sized_buffers(code: str, elements: int) -> list[str]:
    """Allocations of at least ``elements`` elements in generated C++: sizes are named arrays."""
    pattern = r"int64_t (\w+)\[\] = \{([^}]*)\}|aoti_torch_(?:empty_strided|clone|new_tensor)\w*\(([^;]*)\);"
    arrays: dict[str, int] = {}
    found = []
    for match in re.finditer(pattern, code):
        name, values, arguments = match.groups()
        if name:  # a name may be given again further down
            arrays[name] = math.prod(int(n) for n in re.findall(r"\d+", values))
            continue
        sizes = next((arrays[word] for word in re.findall(r"\w+", arguments) if word in arrays), 0)
        if sizes >= elements:
            found.append(match.group())
    return found


class Position(nn.Module):
    """A step that keeps its own position in a buffer of one element, a scale beside it, and starts at zero."""

    def __init__(self, tokens: int = 16) -> None:
        super().__init__()
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("gain", torch.full((1,), 0.37))
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(1, 2, tokens, 32))

    def forward(self, q: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
        self.k_cache.index_copy_(2, self.position, new * self.gain)
        self.v_cache.index_copy_(2, self.position, new)
        mask = toys.causal_mask(self.position, self.k_cache.shape[2])
        out = F.scaled_dot_product_attention(q, self.k_cache, self.v_cache, attn_mask=mask)
        self.position.add_(1)
        self.gain.mul_(0.5)
        return out, self.position + 0


@pytest.mark.slow
@pytest.mark.no_poison
def test_c1_aotinductor_follows_eager(tmp_path: Path) -> None:
    """C1, B4: small mutated buffers and zero-filled caches are state, not constants; nothing of a plane's size is allocated."""
    from torch._inductor.utils import run_and_get_cpp_code

    tokens = 4096
    inputs = [(torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 32)) for _ in range(4)]
    model = Position(tokens).eval()
    program = passes.quantize_exported(torch.export.export(copy.deepcopy(model), inputs[0]), FORMAT)
    _, code = run_and_get_cpp_code(
        torch._inductor.aoti_compile_and_package,
        program,
        package_path=str(tmp_path / "step.pt2"),
        # Without it AOTInductor of torch 2.13 takes the model's own position for a constant, quantized or not.
        inductor_configs={"joint_graph_constant_folding": False},
    )
    runner = torch._inductor.aoti_load_package(str(tmp_path / "step.pt2"))
    eager = eager_twin(model)
    for call, (q, new) in enumerate(inputs):
        out, position = runner(q, new)
        expected, expected_position = eager(q, new)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        assert position.tolist() == expected_position.tolist() == [call + 1]
    assert "aoti_torch" in code and plane_sized_buffers(code, 64)
    assert plane_sized_buffers(code, 2 * 2 * tokens) == []

    # Another process: the operators are Python, so it needs our import.
    script = (
        "import sys, torch\n{}\nrunner = torch._inductor.aoti_load_package(sys.argv[1])\n"
        "print(runner(torch.ones(1, 2, 1, 32), torch.ones(1, 2, 1, 32))[1].tolist())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for imports, works in (("", False), ("import kvq_ops", True)):
        done = subprocess.run(
            [sys.executable, "-c", script.format(imports), str(tmp_path / "step.pt2")],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode == 0) == works, done.stderr[-2000:]
        assert "kvq" in done.stderr if not works else done.stdout.strip() == "[1]"


@pytest.mark.slow
@pytest.mark.no_poison
def test_aotinductor_from_a_preloaded_cache(tmp_path: Path) -> None:
    """Non-zero start, four calls."""
    model, calls = preloaded(1), steps()
    program = passes.quantize_exported(export(model, calls[0]), "key=int8_per_token_head,value=int4_group32")
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "step.pt2"))
    runner, eager = (
        torch._inductor.aoti_load_package(path),
        eager_twin(model, "key=int8_per_token_head,value=int4_group32"),
    )
    for inputs in calls:
        torch.testing.assert_close(runner(*inputs), eager(*inputs), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ kinds of state


def test_dynamic_batch_and_length() -> None:
    class Bare(toys.Layer):
        def __init__(self):
            super().__init__(cached=False)

        def forward(self, x, position, keys, values):
            query, key, value = self.project(x)
            keys.index_copy_(2, position, key)
            values.index_copy_(2, position, value)
            mask = toys.causal_mask(position, keys.shape[2])
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    def inputs(batch, tokens, start):
        x = torch.randn(batch, tokens, toys.WIDTH)
        return x, torch.arange(start, start + tokens)

    batch, tokens = Dim("batch", max=16), Dim("tokens", max=32)
    caches = tuple(torch.zeros(2, toys.HKV, toys.CAPACITY, toys.D) for _ in range(2))
    shapes = ({0: batch, 1: tokens}, {0: tokens}, {0: batch}, {0: batch})
    model = Bare().eval()
    program = export(model, (*inputs(2, 5, 0), *caches), dynamic_shapes=shapes)
    quantized = passes.quantize_exported(program, FORMAT)
    # Example inputs are carried over with stores in place of dense caches.
    quantized.module()(*quantized.example_inputs[0])
    for size in (3, 1, 7):
        stores = [QuantizedKV.empty((size, toys.HKV, toys.CAPACITY, toys.D), FORMAT) for _ in range(2)]
        twins = [copy.deepcopy(one) for one in stores]
        start = 0
        for count in (4, 2, 1, 9):
            args = inputs(size, count, start)
            out = quantized.module()(*args, *[list(one.store) for one in stores])
            torch.testing.assert_close(out, model(*args, *twins), rtol=0, atol=1e-5)
            start += count
        for a, b in zip(stores, twins, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a.store, b.store, strict=True))


def test_caches_passed_in_and_returned() -> None:
    class Functional(toys.Layer):
        def __init__(self):
            super().__init__(cached=False)

        def forward(self, x, position, caches):
            query, key, value = self.project(x)
            keys = caches["k"].index_copy(2, position, key)
            values = caches["v"].index_copy(2, position, value)
            mask = toys.causal_mask(position, keys.shape[2])
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            return out, {"k": keys, "v": values}

    model = Functional().eval()
    dense = {name: torch.zeros(toys.B, toys.HKV, toys.CAPACITY, toys.D) for name in "kv"}
    args = (torch.randn(toys.B, 1, toys.WIDTH), torch.tensor([0]))
    program = passes.quantize_exported(export(model, (*args, dense)), FORMAT)
    stores = {n: list(QuantizedKV.empty(t.shape, FORMAT).store) for n, t in dense.items()}
    handles = {n: QuantizedKV.empty(t.shape, FORMAT) for n, t in dense.items()}
    for at in range(3):
        args = (torch.randn(toys.B, 1, toys.WIDTH), torch.tensor([at]))
        before = [plane.clone() for store in stores.values() for plane in store]
        out, new = program.module()(*args, stores)
        # What came in is as it was: the model's own writes are functional.
        for a, b in zip(before, [p for s in stores.values() for p in s], strict=True):
            assert torch.equal(a, b)
        expected, handles = model(*args, handles)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        stores = {name: list(store) for name, store in new.items()}
    assert stores["k"][-1].tolist() == [3] * toys.B


def test_non_persistent_caches(tmp_path: Path) -> None:
    model, calls = preloaded(persistent=False), steps()
    program = passes.quantize_exported(export(model, calls[0]), FORMAT)
    assert not any("cache" in name for name in program.state_dict)
    specs = [s for s in program.graph_signature.input_specs if s.kind == InputKind.BUFFER]
    assert {s.target for s in specs} == plane_targets(model) and not any(s.persistent for s in specs)
    torch.export.save(program, tmp_path / "step.pt2")
    for one in (program, torch.export.load(tmp_path / "step.pt2")):
        module, eager = one.module(), eager_twin(model)
        for inputs in calls:
            torch.testing.assert_close(module(*inputs), eager(*inputs), rtol=0, atol=1e-5)


def test_shared_buffers_leave_no_dense_copy() -> None:
    """Two layers that read and write one cache under two names: stored once, and no name keeps the dense tensor."""
    model = toys.Decoder(2).eval()
    for name in ("k_cache", "v_cache"):
        model.layers[1]._buffers[name] = model.layers[0]._buffers[name]
    calls = steps(3, 0)
    program = passes.quantize_exported(export(model, calls[0]), FORMAT)
    dense = (toys.B, toys.HKV, toys.CAPACITY, toys.D)
    floats = [
        n for n, v in program.state_dict.items() if tuple(v.shape) == dense and v.dtype == torch.float32
    ]
    assert floats == []
    eager = copy.deepcopy(model)
    for name in ("k_cache", "v_cache"):
        eager.layers[0]._buffers[name] = eager.layers[1]._buffers[name] = QuantizedKV.empty(dense, FORMAT)
    module = program.module()
    for inputs in calls:
        torch.testing.assert_close(module(*inputs), eager(*inputs), rtol=0, atol=1e-5)


def test_constants_survive() -> None:
    class Constant(toys.Decoder):
        def forward(self, ids, position):
            return super().forward(ids, position) * torch.tensor(0.5) + self.bias

    model = Constant(1).eval()
    model.bias = torch.full((1,), 3.0)
    calls = steps(2, 0)
    module = passes.quantize_exported(export(model, calls[0]), FORMAT).module()
    eager = eager_twin(model)
    for inputs in calls:
        torch.testing.assert_close(module(*inputs), eager(*inputs), rtol=0, atol=1e-5)


def test_numbers_among_the_inputs() -> None:
    class Numbered(toys.Decoder):
        def forward(self, ids, position, unused: int = 0, scale: float = 2.0):
            return super().forward(ids, position) * scale

    model = Numbered(1).eval()
    calls = steps(2, 0)
    module = passes.quantize_exported(export(model, (*calls[0], 7, 0.5)), FORMAT).module()
    eager = eager_twin(model)
    for inputs in calls:
        torch.testing.assert_close(module(*inputs, 7, 0.5), eager(*inputs, 7, 0.5), rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_cache_that_something_else_reads_stays_dense() -> None:
    class Summed(toys.Decoder):
        def forward(self, ids, position):
            return super().forward(ids, position) + self.layers[0].k_cache.sum()

    model, calls = Summed(2).eval(), steps(2, 0)
    program = passes.quantize_exported(export(model, calls[0]), "none")
    (report,) = passes.report().graphs
    # The other three are quantized only where both sides of an attention are.
    assert any("k_cache stays dense" in note and "read by" in note for note in report.notes), report.notes
    module, dense = program.module(), copy.deepcopy(model)
    for inputs in calls:
        torch.testing.assert_close(module(*inputs), dense(*inputs), rtol=0, atol=1e-5)


def test_nothing_to_rewrite() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(NothingRewrittenError, match="0 of 0"):
        passes.quantize_exported(program, FORMAT)
    same = passes.quantize_exported(program, FORMAT, allow_unrewritten=True)
    x = torch.randn(2, 4)
    assert torch.equal(same.module()(x), program.module()(x))


def test_decomposed_program() -> None:
    """A program in the functional dialect is quantized as well, or refused by name; it is never silently wrong."""
    model, calls = preloaded(), steps()
    program = export(model, calls[0]).run_decompositions()
    try:
        quantized = passes.quantize_exported(program, FORMAT)
    except NothingRewrittenError as error:
        assert "run_decompositions" in str(error)
        return
    assert set(quantized.graph_signature.buffers_to_mutate.values()) == plane_targets(model)
    module, eager = quantized.module(), eager_twin(model)
    for inputs in calls:
        torch.testing.assert_close(module(*inputs), eager(*inputs), rtol=0, atol=1e-5)
