"""Compiled kernels on disk: made once by whoever comes first, made again when damaged or when anything they come from changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cutlass_kernels import build, sources
from cutlass_kernels.build import HOST, BuildError, Kernel
from kvq_ops.errors import ImplementationError

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"what": "to_e2m1", "form": "HostCvt"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path))
    return tmp_path / "cutlass"


@pytest.fixture
def kernel(cache: Path) -> Kernel:
    """One that nothing was compiled of in this process."""
    if reason := build.why_not():
        pytest.skip(reason)
    from tests.cutlass import leaves

    return Kernel("convert", leaves.make)


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def ones(kernel: Kernel) -> list[int]:
    out = torch.zeros(4, dtype=torch.uint8)
    kernel.compiled(HOST, **SHAPE)(torch.ones(8), out, 1)
    return out.tolist()


def test_compiled_once_for_a_process_and_for_the_machine(
    kernel: Kernel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ones(kernel) == [0x22] * 4
    (entry,) = entries(cache)
    assert sorted(path.name for path in entry.iterdir()) == ["digests.json", "kernel.o"]
    assert entry == kernel.entry(HOST, **SHAPE)
    made = entry.stat().st_mtime_ns
    assert kernel.compiled(HOST, **SHAPE) is kernel.compiled(HOST, **SHAPE)
    kernel.forget()
    monkeypatch.setattr(kernel, "make", None)  # nothing is traced again
    assert ones(kernel) == [0x22] * 4
    assert entry.stat().st_mtime_ns == made


def test_gpu_kernels_keep_ptx_and_cubin(kernel: Kernel) -> None:
    compiled = kernel.compiled("sm_100a", **SHAPE)
    assert ".target sm_100a" in compiled.ptx and compiled.cubin.read_bytes()[:4] == b"\x7fELF"
    with pytest.raises(ValueError, match="device_type=cuda"):
        compiled(torch.ones(8), torch.zeros(4, dtype=torch.uint8), 1)


def test_launched_on_the_device_of_its_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever device is the current one; which tensors on a GPU that is not there can tell."""
    seen: list[object] = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            seen.append(self.device)

        def __exit__(self, *error: object) -> None:
            seen.append("left")

    monkeypatch.setattr(torch.cuda, "device", Device)
    compiled = build.Compiled("none", "sm_100a", {}, tmp_path, lambda *arguments: seen.append(len(arguments)))
    with FakeTensorMode():
        tensors = [torch.empty(2, device=f"cuda:{i}") for i in (1, 0)]
    compiled(None, *tensors, 3)
    assert seen == [torch.device("cuda", 1), 4, "left"]
    seen.clear()
    compiled(torch.empty(2), tensors[0])
    compiled(1)
    assert seen == [2, 1]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "gone", "digests"])
def test_a_damaged_entry_is_made_again(kernel: Kernel, cache: Path, damage: str) -> None:
    ones(kernel)
    (entry,) = entries(cache)
    file = entry / ("digests.json" if damage == "digests" else "kernel.o")
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(
            b"" if damage == "emptied" else b"{" if damage == "digests" else whole[: len(whole) // 2]
        )
    kernel.forget()
    assert ones(kernel) == [0x22] * 4
    assert entries(cache) == [entry] and len(file.read_bytes()) == len(whole)


def test_an_object_that_does_not_load_is_made_again(kernel: Kernel, cache: Path) -> None:
    """Its digest is right, so that it was written like that; by another version of the loader, say."""
    ones(kernel)
    (entry,) = entries(cache)
    (entry / "kernel.o").write_bytes(b"no object file")
    (entry / "digests.json").write_text(f'{{"kernel.o": "{build._digest(entry / "kernel.o")}"}}')
    kernel.forget()
    assert ones(kernel) == [0x22] * 4


def test_the_key_holds_all_that_matters(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = kernel.entry(HOST, **SHAPE)
    source = tmp_path / "helper.py"
    source.write_text("1")
    others = [
        kernel.entry("sm_100a", **SHAPE),
        kernel.entry(HOST, what="to_e4m3", form="HostCvt"),
        Kernel("other", kernel.make).entry(HOST, **SHAPE),
        Kernel("convert", kernel.make, options="--opt-level 1").entry(HOST, **SHAPE),
        Kernel("convert", kernel.make, sources=[str(source)]).entry(HOST, **SHAPE),
    ]
    source.write_text("2")
    sources.digest_of.cache_clear()
    others.append(Kernel("convert", kernel.make, sources=[str(source)]).entry(HOST, **SHAPE))
    monkeypatch.setattr(build, "_versions", lambda: ("nvidia-cutlass-dsl 99",))
    others.append(kernel.entry(HOST, **SHAPE))
    assert len({usual, *others}) == 1 + len(others)
    assert kernel.entry(HOST, form="HostCvt", what="to_e2m1") == kernel.entry(HOST, **SHAPE)


@pytest.mark.slow
def test_two_processes_at_once(kernel: Kernel, cache: Path) -> None:
    code = (
        "import torch; from tests.cutlass import leaves; made = []; make = leaves.make\n"
        "kernel = leaves.CONVERT; kernel.make = lambda *a, **k: (made.append(a), make(*a, **k))[1]\n"
        "out = torch.zeros(4, dtype=torch.uint8)\n"
        f"kernel.compiled('host', **{SHAPE!r})(torch.ones(8), out, 1)\n"
        "print(len(made), out.tolist())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in running]
    assert sorted(out.strip() for out, _ in said) == ["0 [34, 34, 34, 34]", "1 [34, 34, 34, 34]"], said
    assert len(entries(cache)) == 1 and not list(cache.glob("building-*"))


def test_what_cannot_be_compiled_says_so(kernel: Kernel, cache: Path) -> None:
    with pytest.raises(BuildError) as caught:
        kernel.compiled("sm_90a", what="to_e2m1", form="DeviceCvt")
    assert "convert for sm_90a, {'what': 'to_e2m1', 'form': 'DeviceCvt'}" in str(caught.value)
    assert isinstance(caught.value, ImplementationError)
    assert not entries(cache) and not list(cache.glob("building-*"))


def test_a_folder_that_cannot_be_written(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KVQ_CACHE", str(blocked))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    assert ones(kernel) == [0x22] * 4
    assert list((tmp_path / "temporary").glob("kvq-*/cutlass/convert-host-*/kernel.o"))


def test_devices() -> None:
    assert build.target_of(torch.device("cpu")) == HOST
    with pytest.raises(BuildError, match="CUDA devices of capability 8.0"):
        build.target_of(torch.device("meta"))


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), "sm_80"),
        ((8, 9), "sm_80"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_targets_of_gpus(capability: tuple[int, int], target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    build.target_of.cache_clear()
    try:
        assert build.target_of(torch.device("cuda", 0)) == target
    finally:
        build.target_of.cache_clear()


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl is not installed"),
        ("apache-tvm-ffi", "apache-tvm-ffi is not installed"),
    ],
)
def test_without_the_packages(missing: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15", missing: None}
    monkeypatch.setattr(build, "_version", versions.get)
    build.why_not.cache_clear()
    try:
        assert said in str(build.why_not()) and "pip install 'kvq-ops[cutlass]'" in str(build.why_not())
        with pytest.raises(BuildError, match="neither a GPU nor a CUDA toolkit is needed"):
            Kernel("never", lambda target: (print, [])).compiled("sm_100a")
        monkeypatch.setattr(build, "_version", {"nvidia-cutlass-dsl": "4.5.2"}.get)
        build.why_not.cache_clear()
        assert "4.5.2, older than 4.6.3" in str(build.why_not())
    finally:
        build.why_not.cache_clear()
