"""Attention as it is compiled, run instruction by instruction in the PTX machine of ``tests/ptx``, against the oracle.

The interpreter of Triton computes what a kernel says; this computes what the compiler made of it: layouts and the traffic
through shared memory that they need, barriers, copies that run ahead (``cp.async``), ``ldmatrix`` and ``mma.sync``, shuffles,
wide loads that rest on what a launch knows of its arguments, and the inline assembly, which no interpreter runs. Every access is
checked: bounds, alignment, bytes that nobody wrote, two threads at one place without a barrier between, copies that were not
waited for.

What the machine cannot vouch for:

* **the step from PTX to machine code** (ptxas: its scheduling, registers and spills), and the GPU itself. The machine follows the
  text of the PTX ISA as its authors read it;
* **the order of sums in tensor cores**: products are exact and added without loss, then rounded once. Hardware truncates
  somewhere; the bound of ``attention_bound`` leaves room for fp32 sums in any order, not for less;
* **approximate instructions** (``ex2.approx``, ``div.full``) are as far off as the ISA lets them be, but where is made up;
* **subnormal halves and flushing** are as the ISA says; nothing of it was compared with a chip;
* **weak memory**: a race is what has no barrier between; what caches and fences do beyond that is not there. Global memory is
  seen by all at once, and blocks that run together are not raced against each other. Threads that store the same number to the
  same place of shared memory, as Triton's layouts do, count as harmless;
* **copies** take their numbers when they start and arrive when they are waited for: kernels here never write what they copy;
* **wgmma, TMA, mbarrier, tcgen05**: not there. No kernel at these sizes has them; a prefill of 64 rows and more for sm_90 does:
  only what the same source becomes for sm_80 is run;
* **gfx942**, speed, and limits of shared memory and registers (``test_attention_compiled`` has those).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvq_ops import reference
from kvq_ops.formats import get_format
from kvq_ops.triton_kernels import attention as launcher
from tests.cpu.test_attention import filled
from tests.ops.attention_cases import OPTIONS
from tests.ops.checks import allowed_pairs
from tests.triton import ptx_compiler, ptx_launches
from tests.triton.attention_bound import half_bound
from tests.triton.offline import VERSIONS
from tests.triton.ptx_launches import Fault, Simulation, simulated
from tests.triton.test_attention import check, in_pages

pytestmark = pytest.mark.xdist_group("ptx")

SMALL = {"block_m": 16, "block_n": 32, "num_warps": 2, "num_stages": 2}
"""Tiles so small that a hundred tokens make a loop, in two warps that take part of each."""


@dataclasses.dataclass(frozen=True)
class Run:
    """Attention over sequences of some lengths, in two parts unless said otherwise. Plain stores hold the dtype of the query."""

    key: str
    value: str = ""
    dtype: torch.dtype = torch.float16
    page: int = 0
    dim: int = 32
    queries: int = 1
    heads: int = 8
    kv_heads: int = 2
    tokens: int = 100
    lengths: tuple[int, ...] = (97,)
    splits: int = 2
    config: Mapping[str, int] | None = dataclasses.field(default_factory=lambda: SMALL)

    def __str__(self) -> str:
        name = f"{self.key},{self.value}" if self.value else self.key
        return f"{name}-{str(self.dtype)[6:]}" + (f"-page{self.page}" if self.page else "")


def only_what_is_there(
    stores: list[list[Tensor]], names: tuple[str, str], lengths: list[int]
) -> dict[int, np.ndarray]:
    """Readable bytes by storage: slots from the length on are closed, in every plane that has one row for each token."""
    found = {}
    for store, name in zip(stores, names, strict=True):
        tokens = store[0].shape[2]
        for plane, tensor in zip(get_format(name).planes, store, strict=True):
            if plane.per_token and tensor.dim() > 2 and tensor.shape[2] == tokens:
                open_ = torch.zeros(
                    tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.bool
                )
                view = open_.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                for row, length in enumerate(lengths):
                    view[row, :, :length] = True
                found[tensor.untyped_storage().data_ptr()] = open_.numpy().repeat(tensor.element_size())
    return found


def attend(run: Run, target: str, **how: Any) -> Simulation:
    """Run and check; options that are not the simulator's go to attention."""
    names = (run.key, run.value or run.key)
    batch = len(run.lengths)
    stores = [filled(n, batch, run.kv_heads, run.tokens, run.dim, list(run.lengths)) for n in names]
    stores = [
        [store[0].to(run.dtype), *store[1:]] if get_format(n).lossless else store
        for store, n in zip(stores, names, strict=True)
    ]
    query = torch.randn(batch, run.heads, run.queries, run.dim).to(run.dtype)
    pages = in_pages(stores, names, run.page) if run.page else None
    if pages is not None:
        for pool, name in zip(pages[0], names, strict=True):
            if get_format(name).lossless:
                pool[0] = pool[0].to(run.dtype)
    options = how.pop("options", {"causal": True})
    how.setdefault("config", run.config)
    if not run.page:
        how["readable"] = only_what_is_there(stores, names, list(run.lengths))
    given = [tensor.clone() for tensor in (query, *stores[0], *stores[1])]
    with simulated(target, splits=run.splits, **how) as simulation:
        check(query, stores, names, pages, **options)
    after = [query, *stores[0], *stores[1]]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(given, after, strict=True)
    )
    assert simulation.launches["attend_kernel"] == 1
    return simulation


HALF, BFLOAT, FULL = torch.float16, torch.bfloat16, torch.float32
RUNS = [
    Run("none"),
    Run("none", dtype=BFLOAT, page=16),
    Run("int8_per_token_head"),
    Run("int8_per_head_asym", "int8_per_token_head_asym_fp32", dtype=BFLOAT, lengths=(97, 40)),
    Run("fp8_per_token_head"),
    Run("fp8_e5m2", "fp8_e4m3", dtype=BFLOAT, page=64),
    Run("int4_group32"),
    Run("int4_group32", dtype=BFLOAT, page=16),
    Run("int4_group32", dtype=FULL),
    Run("int4_per_token_head", "int4_per_head_asym", dim=48),
    Run("int3_group32", "int2_group32"),
    Run("nvfp4"),
    Run("mxfp4", "mxfp8", dtype=BFLOAT),
    Run("kivi2_keys", "kivi2_values"),
    Run("int4_channel16", "int8_per_token_head+recent5+sink3", lengths=(97, 33)),
    Run("turbo4", "int4_group32+hadamard"),
    Run("nuq4_keys", "nuq4_values", dtype=BFLOAT),
    Run("int4_group32+outlier5%", page=16),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_decoding(run: Run) -> None:
    """On sm_80, which has no float8: all conversions are ours. Warps run in an order of their own."""
    simulation = attend(run, "sm_80", schedule=len(str(run)))
    assert simulation.launches["merge_kernel"] == 1
    assert any(name.startswith("mma.sync") for name in simulation.opcodes) == (run.dtype is not FULL)
    if run in (Run("none"), Run("int8_per_token_head"), Run("int4_group32")):
        assert simulation.opcodes["cp.async.wait_group"], "nothing was loaded ahead"


@pytest.mark.parametrize(
    ("target", "run", "opcode"),
    [
        ("sm_89", Run("fp8_per_token_head"), "cvt.rn.f16x2.e4m3x2"),
        ("sm_90", Run("fp8_per_head", "nvfp4", page=16), "cvt.rn.f16x2.e4m3x2"),
        ("sm_90", Run("none", "int3_group32", dtype=BFLOAT), "stmatrix.sync.aligned.m8n8.x4.shared.b16"),
        ("sm_100", Run("int8_per_token_head"), "fma.rn.f32x2"),
    ],
    ids=str,
)
def test_other_targets(target: str, run: Run, opcode: str) -> None:
    """Where there are instructions for float8, and for matrices on their way to shared memory."""
    assert attend(run, target, schedule=3).opcodes[opcode]


@pytest.mark.parametrize(
    "run",
    [Run("int8_per_token_head", "int4_group32"), Run("fp8_e5m2", "kivi2_values", dtype=BFLOAT)],
    ids=str,
)
def test_the_oldest_triton(run: Run) -> None:
    attend(run, "sm_80", schedule=1, version=VERSIONS[1])


@pytest.mark.parametrize(
    "run",
    [
        Run("int4_group32", dim=64, heads=4, kv_heads=1, tokens=200, lengths=(197,), config=None),
        Run("int8_per_token_head", dim=128, heads=4, kv_heads=1, tokens=200, lengths=(200,), config=None, page=16),
        Run("fp8_per_token_head", dim=64, heads=4, kv_heads=1, tokens=200, lengths=(190,), config=None, dtype=BFLOAT),
    ],
    ids=str,
)  # fmt: skip
def test_configurations_as_they_are_shipped(run: Run) -> None:
    """The tiles and warps that the launcher chooses itself, for heads of real sizes."""
    simulation = attend(run, "sm_80", schedule=2)
    assert simulation.compiled[0].warps == 4 and simulation.opcodes["cp.async.wait_group"]


@pytest.mark.parametrize("option", ["everything", "bias", "sinks_causal_window"])
def test_options(option: str) -> None:
    """Over three tiles and two parts; masks are those of the cases, repeated."""
    names = ("int8_per_token_head", "int4_group32")
    stores = [filled(n, 2, 2, 81, 32, [81, 50]) for n in names]
    options = OPTIONS[option]()
    mask = options.get("mask")
    if mask is not None:
        options["mask"] = mask.repeat(*[1] * (mask.dim() - 1), 9)
    with simulated("sm_80", config=SMALL, splits=1 if option == "everything" else 2, schedule=1):
        check(torch.randn(2, 4, 3, 32).half(), stores, names, **options)


def test_views_and_what_a_launch_knows_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planes whose rows start anywhere. Compiled as if everything were aligned, the kernel must not get away with it."""
    name = "int8_per_token_head"
    apart = [shifted(filled(name, 1, 2, 100, 32, [97])) for _ in range(2)]
    query = torch.randn(1, 8, 1, 33).half()[..., 1:]
    with simulated("sm_80", config=SMALL, splits=2, schedule=1):
        check(query, apart, (name, name), causal=True)
    monkeypatch.setattr(
        ptx_launches, "Pointer", lambda dtype, address: ptx_compiler.Pointer(dtype, address & ~15)
    )
    with simulated("sm_80", config=SMALL, splits=2), pytest.raises(Fault, match="misaligned"):
        check(query, apart, (name, name), causal=True)


def shifted(store: list[Tensor]) -> list[Tensor]:
    """The same planes, each one number behind the start of its memory."""
    moved = []
    for plane in store:
        memory = torch.zeros(plane.numel() + 1, dtype=plane.dtype)
        memory[1:] = plane.flatten()
        moved.append(memory[1:].view(plane.shape))
    return moved


def test_prefill() -> None:
    """Rows in two blocks with what the launcher chooses for them, and an odd group: rows that are not there."""
    run = Run(
        "int8_per_token_head",
        "int4_group32",
        heads=6,
        queries=25,
        tokens=70,
        lengths=(66,),
        splits=0,
        config=None,
    )
    simulation = attend(run, "sm_80", schedule=1)
    assert simulation.compiled[0].warps == 8 and not simulation.launches["merge_kernel"]


def test_long_prefill_decodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From pages, whose tokens are decoded by a kernel of its own, into the dtype of the query."""
    monkeypatch.setattr(launcher, "_DENSE_ROWS", 60)
    names = ("nvfp4", "int4_group32+hadamard")
    stores = [filled(n, 1, 1, 64, 32, [51]) for n in names]
    query = torch.randn(1, 2, 33, 32).half()
    fmts = [get_format(name) for name in names]
    pools, table, length = in_pages(stores, names, 16)
    with simulated("sm_80", schedule=4) as simulation:
        out = launcher.paged_attention(query, *pools, table, length, *fmts, causal=True)
    assert simulation.launches == {"dequantize_kernel": 2, "attend_kernel": 1}
    plain = [[reference.decode_store(s, f).half(), s[-1]] for s, f in zip(stores, fmts, strict=True)]
    none = get_format("none")
    want = reference.attention(query, *plain, none, none, compute=torch.float64, causal=True).numpy()
    open_ = allowed_pairs(query.shape, 64, causal=True, lengths=[51])
    limit = half_bound(query, plain, [none, none], want, open_, 32**-0.5) + 2.0**-11 * np.abs(want) + 2.0**-24
    error = np.abs(out.numpy().astype(np.float64) - want)
    assert (error <= limit).all(), (error / limit).max()


def test_what_is_not_seen_is_not_read() -> None:
    """The simulator says so, not only the result: one token more of a closed page, and it stops."""
    names = ("int8_per_token_head",) * 2
    stores = [filled(n, 1, 2, 100, 32, [97]) for n in names]
    query = torch.randn(1, 8, 1, 32).half()
    for length, seen in ((97, True), (96, False)):
        how = {"readable": only_what_is_there(stores, names, [length]), "config": SMALL, "splits": 2}
        with contextlib.ExitStack() as stack:
            if not seen:
                stack.enter_context(pytest.raises(Fault, match="forbidden"))
            stack.enter_context(simulated("sm_80", **how))
            check(query, stores, names, causal=True)
