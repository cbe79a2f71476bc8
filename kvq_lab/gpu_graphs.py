"""Kernels under ``torch.compile``, CUDA graphs and AOTInductor, on a GPU: the same codes and right attention as in eager."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvq_lab import gpu_oracle as oracle
from kvq_lab.gpu_cases import Machine, empty, held, moved, random, unequal
from kvq_lab.gpu_rows import Case, Row, attempt
from kvq_ops import reference
from kvq_ops.formats import get_format

STEPS, CAPACITY, DIM = 5, 64, 64


class Step(nn.Module):
    """One decode step of one layer over planes in buffers."""

    def __init__(self, name: str, machine: Machine) -> None:
        super().__init__()
        self.name, self.count = name, len(get_format(name).planes)
        like = random((2, machine.kv_heads, 1, DIM), torch.float16)
        for side in ("key", "value"):
            for at, plane in enumerate(moved(empty(get_format(name), like, CAPACITY), machine.device)):
                self.register_buffer(f"{side}_{at}", plane)

    def store(self, side: str) -> list[Tensor]:
        return [getattr(self, f"{side}_{at}") for at in range(self.count)]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, position: Tensor) -> Tensor:
        keys, values = self.store("key"), self.store("value")
        torch.ops.kvq.append_(keys, position, key, self.name)
        torch.ops.kvq.append_(values, position, value, self.name)
        return torch.ops.kvq.attention(query, keys, values, self.name, self.name)


def inputs(machine: Machine, step: int) -> list[Tensor]:
    kv = (2, machine.kv_heads, 1, DIM)
    return [
        random((2, machine.heads, 1, DIM), torch.float16, 3 * step).to(machine.device),
        random(kv, torch.float16, 3 * step + 1).to(machine.device),
        random(kv, torch.float16, 3 * step + 2).to(machine.device),
        torch.tensor([step], device=machine.device),
    ]


def follow(row: Row, machine: Machine, name: str, run: Any, module: Step | None) -> Row:
    """Hold ``run``, step by step, against eager kernels (planes, bit by bit) and the oracle (outputs)."""
    eager, fmt = Step(name, machine), get_format(name)
    for step in range(STEPS):
        given = inputs(machine, step)
        got = run(*given).clone()
        with torch.no_grad():
            eager(*given)
        stores = [eager.store(side) for side in ("key", "value")]
        exact = [reference.decode_store([p.cpu() for p in store], fmt).float() for store in stores]
        length = torch.full((2,), step + 1)
        expected = oracle.attention(
            given[0].cpu(),
            exact[0],
            exact[1],
            length,
            oracle.Options(),
            u=oracle.unit(torch.float16),
            dtype=torch.float16,
        )
        if not held(row, expected, got).ok:
            return row
    for side in ("key", "value") if module is not None else ():
        assert module is not None
        want = [plane.cpu() for plane in eager.store(side)]
        if wrong := unequal(fmt, module.store(side), want, f"{side} planes"):
            return row.refuse("wrong", wrong)
    return row


@torch.no_grad()
def _compiled(machine: Machine, name: str, mode: str | None, row: Row) -> Row:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    module = Step(name, machine)
    run = torch.compile(module, fullgraph=True, mode=mode)
    follow(row, machine, name, run, module)
    skips = counters["inductor"]["cudagraph_skips"]
    if row.ok and mode == "reduce-overhead" and skips:
        row.refuse("wrong", f"CUDA graphs were given up {skips} times")
    return row


def compiled(machine: Machine, name: str, mode: str | None) -> Iterator[Row]:
    row = Row("graphs", f"torch.compile {mode or 'default'} {name}", format=name)
    yield attempt(row, functools.partial(_compiled, machine, name, mode))


@torch.no_grad()
def _packaged(machine: Machine, name: str, row: Row) -> Row:
    if machine.device == "cuda":
        os.environ |= paths_of_cuda()
    program = torch.export.export(Step(name, machine), tuple(inputs(machine, 0)))
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_compile_and_package(
            program, package_path=str(Path(folder, "step.pt2"))
        )
        follow(row, machine, name, torch._inductor.aoti_load_package(package), None)
        if not row.ok:
            return row
        torch.save([inputs(machine, step) for step in range(2)], Path(folder, "inputs.pt"))
        code = (
            "import sys, torch\n"
            f"run = torch._inductor.aoti_load_package({package!r})\n"
            f"for given in torch.load({str(Path(folder, 'inputs.pt'))!r}): out = run(*given)\n"
            "assert not any('kvq' in name for name in sys.modules)\n"
            "assert bool(out.cpu().isfinite().all())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
        if done.returncode:
            row.refuse("wrong", "without this package's operators: " + done.stderr.strip()[-250:])
            row.detail = done.stderr[-4000:]
    return row


def packaged(machine: Machine, name: str) -> Iterator[Row]:
    """An AOTInductor package, run here and in a process that has never heard of these operators."""
    row = Row("graphs", f"AOTInductor {name}", format=name)
    yield attempt(row, functools.partial(_packaged, machine, name))


def paths_of_cuda() -> dict[str, str]:
    """Variables that tell a C++ compiler where CUDA's headers and libraries are; torch looks where it finds ``nvcc`` alone."""
    from torch.utils import cpp_extension

    packages = Path(torch.__file__).parents[1]
    homes = [Path(home) for home in (cpp_extension.CUDA_HOME, "/usr/local/cuda") if home]
    homes += sorted(packages.glob("nvidia/cu1*"))
    home = next((home for home in homes if (home / "include" / "cuda.h").exists()), None)
    if home is None:
        return {}
    libraries = [home / "lib64", home / "lib64" / "stubs", home / "lib", Path("/usr/local/nvidia/lib64")]
    found = {
        "CPATH": [str(home / "include")],
        "LIBRARY_PATH": [str(folder) for folder in libraries if folder.is_dir()],
    }
    return {
        name: os.pathsep.join([*filter(None, [os.environ.get(name)]), *folders])
        for name, folders in found.items()
    }


@torch.no_grad()
def _model(machine: Machine, name: str, row: Row) -> Row:
    import passes
    from passes.compile import kvq_backend

    outputs: list[Tensor] = []
    for mode in (None, "reduce-overhead"):
        torch._dynamo.reset()
        passes.clear_report()
        torch.manual_seed(0)
        layer = Layer(machine).to(machine.device).half().eval()
        passes.quantize_kv_cache_(layer, name, layer.inputs(0))
        # The function itself: where the package is not installed torch does not know its name.
        run = torch.compile(layer, backend=kvq_backend, fullgraph=True, mode=mode)
        for step in range(STEPS):
            outputs.append(run(*layer.inputs(step)).clone())
        if not all(graph.rewritten for graph in passes.report().graphs):
            return row.refuse("wrong", "attention was not rewritten")
    plain, graphs = outputs[:STEPS], outputs[STEPS:]
    if not all(torch.equal(a, b) for a, b in zip(plain, graphs, strict=True)):
        row.refuse("wrong", "CUDA graphs give other numbers")
    return row


def model(machine: Machine, name: str) -> Iterator[Row]:
    """A module with dense caches through ``backend="kvq"``: the same with and without CUDA graphs, and kernels in both."""
    row = Row("graphs", f"backend kvq reduce-overhead {name}", format=name)
    yield attempt(row, functools.partial(_model, machine, name))


class Layer(nn.Module):
    """Attention over two cache buffers, as models write it."""

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.device = machine.heads, machine.kv_heads, machine.device
        self.query, self.both = nn.Linear(64, machine.heads * DIM), nn.Linear(64, 2 * machine.kv_heads * DIM)
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(2, machine.kv_heads, CAPACITY, DIM))

    def inputs(self, step: int) -> tuple[Tensor, Tensor]:
        x = random((2, 1, 64), torch.float16, step).to(self.device)
        return x, torch.tensor([step], device=self.device)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        query = self.query(x).view(2, 1, self.heads, DIM).transpose(1, 2)
        key, value = self.both(x).view(2, 1, 2, self.kv_heads, DIM).unbind(2)
        self.k_cache.index_copy_(2, position, key.transpose(1, 2))
        self.v_cache.index_copy_(2, position, value.transpose(1, 2))
        mask = torch.arange(CAPACITY, device=x.device) <= position
        return nn.functional.scaled_dot_product_attention(
            query, self.k_cache, self.v_cache, attn_mask=mask[None, None, None], enable_gqa=True
        )


def cases(machine: Machine) -> list[Case]:
    """All of them need a GPU."""
    made: list[Case] = []
    for at, name in enumerate(("int8_per_token_head", "int4_group32", "nvfp4")):
        for mode, said in ((None, "torch.compile"), ("reduce-overhead", "CUDA graphs")):
            run = functools.partial(compiled, machine, name, mode)
            made.append(Case("graphs", f"{said} {name}", run, 30, 99.3 - at))
    made.append(
        Case("graphs", "AOTInductor", functools.partial(packaged, machine, "int8_per_token_head"), 60, 101.5)
    )
    made.append(
        Case("graphs", "backend kvq", functools.partial(model, machine, "int8_per_token_head"), 40, 101.2)
    )
    return made
