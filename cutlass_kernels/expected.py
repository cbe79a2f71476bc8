"""What the attention kernels should cost on a GPU, worked out from their machine code; nothing here was measured.

    python -m cutlass_kernels.expected            # print the tables
    python -m cutlass_kernels.expected --write    # put them into EXPECTED.md

Compiled for each target without a GPU, disassembled, and counted: the loop over tiles is the innermost loop with the products in
it; a turn of it takes 16 tokens for 16 query rows in one warp.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import checks
from .attention import ATTENTION
from .build import Compiled

__all__ = ["CASES", "GPUS", "Cost", "cost", "loop_of", "table"]

TILE, WARPS, THREADS = 16, 4, 128


@dataclass(frozen=True)
class GPU:
    """Numbers of a GPU; where they are from is said in ``_sources``.

    ``clock``: the largest of a processor. ``shared``: bytes of shared memory of a processor; every CTA takes 1 KiB more than it
    asks for. ``bandwidth``: bytes a second.
    """

    name: str
    target: str
    processors: int
    clock: float
    bandwidth: float
    shared: int
    warps: int

    @property
    def bytes_per_clock(self) -> float:
        """What memory gives one processor in a clock."""
        return self.bandwidth / self.processors / self.clock

    def in_pipe(self, latency: float) -> float:
        """KiB on their way to one processor when the pipe to memory is full."""
        return self.bandwidth * latency / self.processors / 1024


GPUS = (
    GPU("B200", "sm_100a", 148, 1.965e9, 7.672e12, 228 * 1024, 64),
    GPU("RTX PRO 6000 Blackwell", "sm_120a", 188, 2.6e9, 1.792e12, 100 * 1024, 48),
)
# For sm_103a the PTX is the same, which a test compares.
GB300 = GPU("GB300", "sm_103a", 152, 2.07e9, 7.928e12, 228 * 1024, 64)

_PLAIN = {"mask": "", "causal": False, "window": False, "softcap": False, "sinks": False}


def _shape(keys: str, dim: int, page: int) -> dict[str, Any]:
    table = "int32" if page else None
    return {
        "dtype": "bfloat16", "keys": keys, "values": keys, "head_dim": dim, "value_dim": dim, "page": page, "table": table,
        "length": "int64", **_PLAIN,
    }  # fmt: skip


CASES = (
    *(("nvfp4", dim, page) for dim in (64, 128, 256) for page in (0, 16)),
    *(("fp8_token", dim, 16) for dim in (64, 128, 256)),
    ("fp8_head", 128, 0),
)
"""Coding of keys and values, head size, tokens of a page."""


@dataclass(frozen=True)
class Cost:
    """One kernel on one GPU.

    Attributes:
        bytes_per_token: of keys and values with their scales, for one kv head.
        loop: instructions of one turn of the loop, by opcode.
        ctas: that a processor holds at once, by registers and shared memory.
        ahead: the next tile is loaded while one is worked on, see ``attention_kernel``.
    """

    gpu: GPU
    bytes_per_token: int
    registers: int
    stack: int
    shared: int
    ctas: int
    ahead: bool
    loop: Counter[str]

    @property
    def instructions(self) -> int:
        return sum(self.loop.values())

    @property
    def memory_clocks(self) -> float:
        """Clocks of one processor for the bytes of a token, at the bandwidth of the clock of the memory."""
        return self.bytes_per_token / self.gpu.bytes_per_clock

    @property
    def issue_clocks(self) -> float:
        """Clocks of one processor to issue the instructions of a token: four schedulers, one instruction a clock each."""
        return self.instructions / TILE / 4

    @property
    def in_flight(self) -> int:
        """Bytes that the warps of a processor have asked for at once, at most: a tile of keys and one of values each."""
        together = 1 if self.ahead else 2
        return self.ctas * WARPS * TILE * self.bytes_per_token // together


def bytes_per_token(kind: str, dim: int) -> int:
    codes = {"nvfp4": dim // 2 + dim // 16, "fp8_token": dim + 4, "fp8_head": dim}[kind]
    return 2 * codes


_LINE = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)(.*)$")
_LABEL = re.compile(r"^(\.L_x_\d+):")


def loop_of(text: str, kernel: str) -> Counter[str]:
    """Opcodes of the innermost loop of a kernel that has tensor-core products in it."""
    start = next(m.end() for m in re.finditer(r"\.section\s+\.text\.(\S+?),", text) if kernel in m.group(1))
    end = text.find(".section", start)
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text[start : end if end > 0 else None].splitlines():
        if (label := _LABEL.match(line)) is not None:
            labels[label.group(1)] = len(code)
        elif (found := _LINE.match(line)) is not None:
            code.append((found.group(2), found.group(3)))
    loops = []
    for i, (opcode, rest) in enumerate(code):
        target = re.search(r"\.L_x_\d+", rest)
        if opcode.startswith("BRA") and target and labels.get(target.group(0), i + 1) <= i:
            body = code[labels[target.group(0)] : i + 1]
            if any(name.startswith("HMMA") for name, _ in body):
                loops.append(body)
    body = min(loops, key=len)
    return Counter(name for name, _ in body)


def _ctas(gpu: GPU, registers: int, shared: int) -> int:
    # Registers come in units of 256 for a warp; a processor has 65536.
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * WARPS)
    return min(by_registers, gpu.shared // (shared + 1024), gpu.warps // WARPS)


@functools.cache
def cost(gpu: GPU, kind: str, dim: int, page: int) -> Cost:
    from .attention_kernel import shared_bytes

    compiled: Compiled = ATTENTION.compiled(gpu.target, **_shape(kind, dim, page))
    used = next(value for name, value in checks.resources(compiled).items() if "stretch_kernel" in name)
    shared = shared_bytes(dim)
    loop = loop_of(checks.disassembly(compiled), "stretch_kernel")
    ctas = _ctas(gpu, used.registers, shared)
    return Cost(gpu, bytes_per_token(kind, dim), used.registers, used.stack, shared, ctas, dim <= 128, loop)


def _group(loop: Counter[str], *starts: str) -> int:
    return sum(count for name, count in loop.items() if name.startswith(starts))


def table(gpu: GPU) -> str:
    """One GPU's table in Markdown."""
    heads = (
        "format", "D", "page", "bytes", "registers", "CTAs", "warps", "in flight", "instructions", "products", "conversions",
        "loads", "per element", "memory clocks", "issue clocks",
    )  # fmt: skip
    lines = [" | ".join(("", *heads, "")).strip(), "|---" * len(heads) + "|"]
    for kind, dim, page in CASES:
        c = cost(gpu, kind, dim, page)
        if c.stack:
            raise AssertionError(f"{kind} {dim} {page} spills on {gpu.target}")
        cells = (
            kind, dim, page or "-", c.bytes_per_token, c.registers, c.ctas, f"{c.ctas * WARPS} of {gpu.warps}",
            f"{c.in_flight / 1024:.0f} KiB", c.instructions, _group(c.loop, "HMMA"), _group(c.loop, "F2F"), _group(c.loop, "LDG"),
            f"{c.instructions * 32 / (TILE * 2 * dim):.2f}", f"{c.memory_clocks:.1f}", f"{c.issue_clocks:.1f}",
        )  # fmt: skip
        lines.append(" | ".join(("", *map(str, cells), "")).strip())
    return "\n".join(lines)


def document() -> str:
    """All of EXPECTED.md."""
    parts = [_text()]
    for gpu in GPUS:
        parts.append(
            f"## {gpu.name}, {gpu.target}\n\n{gpu.processors} processors at {gpu.clock / 1e9:g} GHz, "
            f"{gpu.bandwidth / 1e12:g} TB/s: {gpu.bytes_per_clock:.1f} bytes a clock for each processor.\n\n{table(gpu)}"
        )
    parts.append(_sources())
    return "\n\n".join(parts) + "\n"


def _text() -> str:
    b200, rtx = GPUS
    small = [cost(b200, *case) for case in CASES if case[0] == "nvfp4"]
    ratios = [c.issue_clocks / c.memory_clocks for c in small]
    wide = [cost(b200, *case) for case in CASES if case[0] != "nvfp4" and case[1] > 64]
    if min(ratios) < 1 or any(c.issue_clocks > c.memory_clocks for c in wide):
        raise AssertionError("what binds on a B200 is no longer what the text says")
    if any(cost(rtx, *case).issue_clocks > cost(rtx, *case).memory_clocks for case in CASES):
        raise AssertionError("memory is not what binds on sm_120a")
    return f"""# What attention should cost

Computed from machine code and published numbers of GPUs, **not measured**: no kernel here has run on a Blackwell GPU. Made by
`python -m cutlass_kernels.expected --write`; a test makes it again and compares, for nvidia-cutlass-dsl 4.8.1, whose `ptxas`
decides registers and instructions. bf16 queries, no mask, lengths read from the cache.

A CTA of four warps serves 16 query rows (query heads of a kv head times query tokens). A turn of its loop is 16 tokens in one
warp. Columns:

* **bytes** of codes and scales that one token of one kv head has, keys and values: what has to come from memory, once for each 16
  rows. Queries, partial results and block tables are left out: for n tokens and s splits partial results are
  `8 s (D + 2) / n` bytes a token and row, written and read;
* **registers**, **CTAs** and **warps** that a processor holds at once. Nothing is spilled, in any shape class that is tested;
* **in flight**: bytes that these warps can have asked for at once: a tile of keys and one of values each, or one of the two where
  D is 256. To fill the pipe to memory takes its bandwidth times its latency, which NVIDIA does not publish: were it 700 ns,
  {b200.in_pipe(7e-7):.0f} KiB for each processor of a B200, and {rtx.in_pipe(7e-7):.0f} KiB for one of sm_120a;
* **instructions** of a turn, and of them tensor-core **products**, **conversions** (`F2FP`) and **loads** from global memory;
* **per element**: instructions, times 32 lanes, for each cached number of a turn;
* **memory clocks**, **issue clocks** a token takes on a processor: its bytes at the bandwidth below, its instructions at four a
  clock. The larger of the two bounds the speed from below. Conversions and `MUFU` may issue at less than full rate, which is not
  counted, since it is documented nowhere for these GPUs.

What follows from it, if nothing else is in the way: on a GPU with as much bandwidth as a B200 NVFP4 is bound by issue rather than
by memory, by a factor of {min(ratios):.1f} to {max(ratios):.1f}, most with small vectors and small pages; float8 with vectors of
128 and 256 by memory. What is in flight is less than a B200's pipe holds, so that latency may well be what bounds all of them
there; loads that go through shared memory (`cp.async`, TMA) and more warps are what to try first with such a GPU at hand. On
sm_120a memory is the bound everywhere. Rows beyond 16 cost a pass over the cache for each 16, from L2 where
it still holds the tokens."""


def _sources() -> str:
    b200, gb300 = GPUS[0].bandwidth / 1e12, GB300
    return f"""## Where the numbers of GPUs are from

* Registers (65536), shared memory, warps of a processor, and the KiB that the driver keeps of each CTA: NVIDIA's CCCL,
  `libcudacxx/include/cuda/__device/arch_traits.h`, for sm_100, sm_103 and sm_120.
* B200: processors, largest clock and bandwidth as its driver reports them, in OpenXLA's
  `xla/backends/gpu/target_config/specs/b200.txtpb`. NVIDIA's data sheets say up to 8 TB/s, and give neither clock nor
  processors; a bus of 7680 bits at twice 3996 MHz makes {b200:g} TB/s (pytorch/ao#4002 has it from a B200 too).
* RTX PRO 6000 Blackwell, Workstation Edition: NVIDIA's data sheet has the bandwidth, 24064 CUDA cores, which are 188
  processors of 128, and 125 TFLOPS of fp32, which take 2.6 GHz; the clock itself is not on it. OpenXLA's
  `rtx6000pro.txtpb` agrees.
* sm_103a gets the PTX of sm_100a, as many CTAs, and within a few of them as many instructions and registers. A GB300 has
  {gb300.processors} processors at {gb300.clock / 1e9:g} GHz and {gb300.bandwidth / 1e12:g} TB/s (OpenXLA's `gb300.txtpb`),
  {gb300.bytes_per_clock:.1f} bytes a clock for each. For a B300 on its own nothing read from a chip was found; NVIDIA names
  160 processors for the whole chip, and 8 TB/s."""


if __name__ == "__main__":
    text = document()
    if "--write" in sys.argv:
        (Path(__file__).parent / "EXPECTED.md").write_text(text)
    else:
        print(text, end="")
