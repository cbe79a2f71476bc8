"""A Python-free program loads an AOTInductor package whose operators come from the C++ library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kvq_ops
from kvq_ops import formats
from kvq_ops.cpu import package
from kvq_ops.errors import ImplementationError
from kvq_ops.formats import get_format

ROOT = Path(__file__).resolve().parents[2]
KEY, VALUE = "int4_group32+recent4", "int8_per_token_head"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")]


class Step(nn.Module):
    """One layer's cache: append keys and values, attend, and read the keys back."""

    def __init__(self) -> None:
        super().__init__()
        for side, name in (("key", KEY), ("value", VALUE)):
            for i, plane in enumerate(get_format(name).empty_store(1, 2, 40, 32)):
                self.register_buffer(f"{side}_{i}", plane)

    def store(self, side: str, name: str) -> list[Tensor]:
        return [getattr(self, f"{side}_{i}") for i in range(len(get_format(name).planes))]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.store("key", KEY), self.store("value", VALUE)
        torch.ops.kvq.append_(keys, position, key, KEY)
        torch.ops.kvq.append_(values, position, value, VALUE)
        out = torch.ops.kvq.attention(query, keys, values, KEY, VALUE, causal=True, softcap=20.0)
        return out, torch.ops.kvq.dequantize(keys, KEY, torch.float32)


class PagedStep(nn.Module):
    """The same over pages: two sequences in a pool."""

    def __init__(self) -> None:
        super().__init__()
        for i, plane in enumerate(get_format(VALUE).empty_store(7, 2, 16, 32)):
            self.register_buffer(f"pages_{i}", plane)

    def forward(self, query: Tensor, x: Tensor, table: Tensor, position: Tensor, length: Tensor) -> Tensor:
        pages = [getattr(self, f"pages_{i}") for i in range(len(get_format(VALUE).planes))]
        torch.ops.kvq.paged_append_(pages, table, position, x, VALUE)
        out: Tensor = torch.ops.kvq.paged_attention(
            query, pages, pages, table, length, VALUE, VALUE, causal=True
        )
        return out


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package.build_ops(tmp_path_factory.mktemp("ops"), [KEY, VALUE, "nvfp4"])


def one_sequence() -> tuple[nn.Module, list[Tensor]]:
    return Step(), [
        torch.randn(1, 4, 9, 32),
        torch.randn(1, 2, 9, 32),
        torch.randn(1, 2, 9, 32),
        torch.arange(9),
    ]


def paged_sequences() -> tuple[nn.Module, list[Tensor]]:
    table = torch.tensor([[5, 0, 3], [2, 6, -1]])
    position = torch.stack(
        [torch.arange(40), torch.arange(40) - 12]
    )  # the second is shorter, padded in front
    return PagedStep(), [
        torch.randn(2, 4, 3, 32),
        torch.randn(2, 2, 40, 32),
        table,
        position,
        torch.tensor([40, 28]),
    ]


@pytest.mark.parametrize("made", [one_sequence, paged_sequences])
def test_a_program_without_python_runs_a_package(
    library: Path, tmp_path: Path, made: Callable[[], tuple[nn.Module, list[Tensor]]]
) -> None:
    model, inputs = made()
    with torch.no_grad():
        exported = torch.export.export(model, tuple(inputs))
        path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        want = model(*inputs)
        want = want if isinstance(want, tuple) else (want,)
    torch.save(inputs, tmp_path / "inputs.pt")
    runner = package.build_runner(tmp_path, library)
    # No Python package is in reach of the program.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [runner, path, tmp_path / "inputs.pt", tmp_path / "outputs.pt", "2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    outputs = torch.load(tmp_path / "outputs.pt", weights_only=False)
    assert len(outputs) == len(want) and all(torch.equal(a, b) for a, b in zip(outputs, want, strict=True))
    assert (
        "libpython" not in subprocess.run(["ldd", runner], capture_output=True, text=True, check=True).stdout
    )


def test_the_library_equals_python_and_checks_its_arguments(library: Path) -> None:
    """Loaded into Python, without ``kvq_ops``: schemas, bytes, and errors in place of wild reads."""
    names = [KEY, VALUE, "nvfp4"]
    torch.manual_seed(0)
    x, query = torch.randn(2, 2, 21, 64), torch.randn(2, 6, 3, 64)
    stores = [kvq_ops.quantize(x, name) for name in names]
    outs = [
        kvq_ops.attention(query, s, s, n, n, mask=torch.ones(3, 21).tril(), window=7)
        for s, n in zip(stores, names, strict=True)
    ]
    saved = library.parent / "want.pt"
    torch.save((x, query, names, stores, outs), saved)
    code = f"""
import torch
torch.ops.load_library({str(library)!r})
ops = torch.ops.kvq
x, query, names, stores, outs = torch.load({str(saved)!r})
for name, store, out in zip(names, stores, outs):
    mine = ops.quantize(x, name)
    assert all(torch.equal(a, b) for a, b in zip(mine, store)), name
    assert torch.equal(ops.attention(query, mine, mine, name, name, mask=torch.ones(3, 21).tril(), window=7), out), name
    for wrong in (
        lambda: ops.append_(mine, torch.tensor([21]), x[:, :, :1], name),
        lambda: ops.append_(mine, torch.tensor([-1]), x[:, :, :1], name),
        lambda: ops.append_(mine, torch.tensor([0]), x[:, :, :1, :32], name),
        lambda: ops.append_(mine, torch.tensor([0]), x[:, :, :1].double(), name),
        lambda: ops.attention(query[..., :32], mine, mine, name, name),
        lambda: ops.attention(query, mine[:-1], mine, name, name),
        lambda: ops.attention(query, [mine[0][:, :, 1:], *mine[1:]], mine, name, name),
        lambda: ops.attention(query, mine, mine, name, name, mask=torch.ones(4, 21)),
        lambda: ops.quantize(x, "int2_group32"),
        lambda: ops.paged_append_(mine, torch.tensor([[0], [2]]), torch.zeros(2, 1).long(), x[:, :, :1], name),
        lambda: ops.paged_append_(mine, torch.tensor([[0], [1]]), torch.tensor([[0], [21]]), x[:, :, :1], name),
        lambda: ops.paged_append_(mine, torch.tensor([[0], [-1]]), torch.zeros(2, 1).long(), x[:, :, :1], name),
        lambda: ops.paged_attention(query, mine, mine, torch.tensor([[0], [1]]), torch.tensor([21, 22]), name, name),
        lambda: ops.paged_attention(query, mine, mine, torch.tensor([[0], [-1]]), torch.tensor([21, 1]), name, name),
        lambda: ops.paged_attention(query, mine, mine, torch.tensor([[0]]), torch.tensor([21]), name, name),
    ):
        try:
            wrong()
        except RuntimeError as error:
            assert "kvq" in str(error) or "expand" in str(error), error
        else:
            raise AssertionError("accepted")
print("equal")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=library.parent,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "equal\n", done.stderr[-3000:]


def test_a_format_without_kernels_is_named(tmp_path: Path) -> None:
    row = kvq_ops.Format("strange", "unheard_of", 5, get_format("int4_group32").planes[:-1], group=32)
    kvq_ops.register_format(row, listed=False)
    try:
        with pytest.raises(ImplementationError, match="strange"):
            package.build_ops(tmp_path, ["strange"])
    finally:
        del formats._TABLE["strange"]
