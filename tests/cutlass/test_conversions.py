"""The leaf conversions, run on this machine's processor: against torch, CUDA's headers and CUTLASS's headers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cutlass_kernels import build
from kvq_ops.codecs.block_scaled import e2m1_codes, e2m1_values
from kvq_ops.codecs.packing import pack

if reason := build.why_not():
    pytest.skip(reason, allow_module_level=True)

from tests.cutlass.leaves import CONVERT

HEADERS = Path(__file__).parent / "headers"


def numbers() -> Tensor:
    """fp32: every bf16 number and its neighbours (ties and what is beside them), and random bits; a multiple of 8 of them."""
    every = torch.arange(1 << 16, dtype=torch.int64)[:, None] << 16
    around = (every + torch.tensor([-1, 0, 1, 0x7FFF, 0x8000])).reshape(-1)
    random = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=torch.Generator().manual_seed(3))
    bits = torch.cat([around, random]) & 0xFFFFFFFF
    return (bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32)


def convert(what: str, x: Tensor) -> Tensor:
    to, four = what.startswith("to_"), "e2m1" in what
    count = x.numel() if to else x.numel() * (2 if four else 1)
    size = count // (2 if four else 1) if to else count
    out = torch.full((size,), 85, dtype=torch.uint8 if to else torch.float32)
    CONVERT.compiled(build.HOST, what=what, form="HostCvt")(x, out, count // 8)
    return out


def by_torch(what: str, x: Tensor) -> Tensor:
    if what.startswith("to_e4m3"):
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if what == "to_e2m1":
        return pack(e2m1_codes(x), 4)
    if what == "from_e4m3":
        return x.view(torch.float8_e4m3fn).float()
    return e2m1_values(torch.stack([x & 15, x >> 4], -1).reshape(-1))


def same_bits(got: Tensor, want: Tensor) -> None:
    nan = got.isnan() & want.isnan() if got.is_floating_point() else torch.zeros_like(got, dtype=torch.bool)
    different = (got.view(torch.uint8).view(len(got), -1) != want.view(torch.uint8).view(len(want), -1)).any(
        1
    ) & ~nan
    assert not different.any(), (
        f"{int(different.sum())} of {len(got)} differ, first at {int(different.nonzero()[0])}"
    )


EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
WHAT = ("to_e4m3", "to_e4m3_singly", "to_e2m1", "from_e4m3", "from_e2m1")


def inputs(what: str) -> Tensor:
    return numbers() if what.startswith("to_") else EVERY_BYTE


@pytest.mark.parametrize("what", WHAT)
def test_against_torch(what: str) -> None:
    x = inputs(what)
    x = x[~x.isnan()] if x.is_floating_point() else x
    x = x[: len(x) // 8 * 8].contiguous()
    same_bits(convert(what, x), by_torch(what, x))


def test_what_becomes_of_nan() -> None:
    """Codecs keep NaN away; the instructions, and so their stand-in, have an answer all the same."""
    x = torch.tensor([torch.nan, -torch.nan] * 4)
    assert convert("to_e4m3", x).tolist() == [0x7F] * 8
    assert convert("to_e2m1", x).tolist() == [0x77] * 4


# ------------------------------------------------------------------------------------------------------------ headers


def include_folders() -> Iterator[Path]:
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    yield from (Path(root) / "include" for root in roots if root)
    yield from sorted(Path("/usr/local").glob("cuda-*/include"), reverse=True)
    if (found := importlib.util.find_spec("triton")) and found.origin:
        yield Path(found.origin).parent / "backends" / "nvidia" / "include"


def cutlass_headers() -> Path | None:
    found = importlib.util.find_spec("cutlass_library")
    folder = Path(found.origin).parent / "source" / "include" if found and found.origin else None
    return folder if folder is not None and (folder / "cutlass" / "float_subbyte.h").exists() else None


@pytest.fixture(scope="module", params=["cuda_numbers", "cutlass_numbers"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    cuda = next((folder for folder in include_folders() if (folder / "cuda_fp4.h").exists()), None)
    if compiler is None or cuda is None:
        pytest.skip(
            "no C++ compiler" if compiler is None else "no cuda_fp4.h: neither a CUDA toolkit nor triton"
        )
    folders = [str(cuda), str(HEADERS)]
    if request.param == "cutlass_numbers":
        own = cutlass_headers()
        if own is None:
            pytest.skip("no C++ headers of CUTLASS: pip install --no-deps nvidia-cutlass")
        folders.insert(0, str(own))
    made = tmp_path_factory.mktemp("headers") / f"{request.param}.so"
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *(f"-I{folder}" for folder in folders)]
    done = subprocess.run(
        [compiler, *flags, str(HEADERS / f"{request.param}.cpp"), "-o", str(made)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))


@pytest.mark.parametrize("what", ["to_e4m3", "to_e2m1", "from_e4m3", "from_e2m1"])
def test_against_headers(library: ctypes.CDLL, what: str) -> None:
    x = inputs(what)
    if "cutlass" in library._name and what == "to_e2m1":
        # There is no NaN to make of it: CUTLASS's type keeps its sign, the instruction does not.
        x = x[~x.isnan()]
    x = x[: len(x) // 8 * 8].contiguous()
    got = convert(what, x)
    want = torch.zeros_like(got)
    getattr(library, what)(
        ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(want.data_ptr()), ctypes.c_long(x.numel())
    )
    same_bits(got, want)
