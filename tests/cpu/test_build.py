"""Compiling and loading the kernels: once, by one process, and with plain torch where that cannot be done."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvq_ops.cpu import build, kernels
from kvq_ops.errors import ImplementationError

ROOT = Path(__file__).resolve().parents[2]
USE = """
import kvq_ops, torch
store = kvq_ops.quantize(torch.ones(1, 1, 3, 16), "int8_per_token_head")
print(kvq_ops.dequantize(store, "int8_per_token_head").sum().item(), kvq_ops.cpu.library.loaded())
"""

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler")


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that does not optimise and notes each call in ``calls``; an empty cache."""
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec c++ "$@" -O0\n')
    script.chmod(script.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("KVQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KVQ_CPU_CAPABILITY", raising=False)
    return tmp_path


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out, err


def linked(folder: Path) -> int:
    return sum("-shared" in line for line in (folder / "calls").read_text().splitlines())


def test_processes_that_start_at_once_compile_once(quick: Path) -> None:
    results = [finish(process) for process in [start(USE) for _ in range(3)]]
    libraries = list((quick / "cache" / "cpu").glob("*.so"))
    assert len(libraries) == 1 and linked(quick) == 1
    assert {out for out, _ in results} == {f"48.0 {libraries[0]}\n"}
    assert not list((quick / "cache" / "cpu").glob("building-*"))


@pytest.mark.parametrize("damage", ["truncated", "empty", "other bytes", "no digest"])
def test_a_damaged_library_is_compiled_again(quick: Path, damage: str) -> None:
    library = build.build()
    assert linked(quick) == 1 and build.build() == library and linked(quick) == 1
    whole = library.read_bytes()
    if damage == "no digest":
        library.with_suffix(".sha256").unlink()
    else:
        library.write_bytes(
            {"truncated": whole[:5000], "empty": b"", "other bytes": b"\0" * len(whole)}[damage]
        )
    out, _ = finish(start(USE))
    assert out == f"48.0 {library}\n" and linked(quick) == 2


def test_flags_and_sources_have_libraries_of_their_own(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for flags in ("", "-DKVQ_SOMETHING", "-g0"):
        monkeypatch.setenv("KVQ_CPU_FLAGS", flags)
        names.add(build._key(build._compiler(), build._flags()))
    sources = quick / "csrc"
    shutil.copytree(build.SOURCES, sources)
    (sources / "vec.h").write_text((sources / "vec.h").read_text() + "\n// changed\n")
    monkeypatch.setattr(build, "SOURCES", sources)
    names.add(build._key(build._compiler(), build._flags()))
    assert len(names) == 4


def test_without_a_compiler_torch_runs_and_one_warning_says_so(quick: Path) -> None:
    code = """
import warnings, kvq_ops, torch
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for name in ("int8_per_token_head", "nvfp4"):
        store = kvq_ops.quantize(torch.randn(1, 1, 3, 16), name)
        kvq_ops.attention(torch.randn(1, 1, 1, 16), store, store, name, name)
print([str(w.message) for w in seen if w.category is RuntimeWarning])
try:
    with kvq_ops.use_implementation("cpu"):
        kvq_ops.quantize(torch.randn(1, 1, 3, 16), "nvfp4")
except kvq_ops.errors.ImplementationError as error:
    print("asked for by name:", error)
print(kvq_ops.explain("quantize", kvq_ops.get_format("nvfp4")))
"""
    out, _ = finish(start(code, CXX=str(quick / "missing")))
    warned, rest = out.split("\n", 1)
    assert warned.count("kvq runs without its C++ kernels") == 1 and "missing" in warned and "CXX" in warned
    assert "asked for by name" in rest and "not to be found" in rest and "torch: chosen" in rest
    assert not (quick / "calls").exists()


def test_what_a_failing_compiler_says_is_passed_on(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_FLAGS", "-fno-such-flag")
    with pytest.raises(ImplementationError, match="no-such-flag"):
        build.build()
    assert not list((quick / "cache" / "cpu").glob("*.so"))


def test_an_unknown_capability_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVQ_CPU_CAPABILITY", "avx1024")
    with pytest.raises(ImplementationError, match=r"avx1024[\s\S]*default"):
        build.build()


def test_importing_compiles_nothing(quick: Path) -> None:
    finish(start("import kvq_ops"))
    assert not (quick / "calls").exists() and not (quick / "cache").exists()


def test_a_folder_that_cannot_be_written_is_replaced(quick: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (quick / "file").write_text("")
    monkeypatch.setenv("KVQ_CACHE", str(quick / "file"))
    monkeypatch.setenv("TMPDIR", str(quick))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert build._usable_cache_dir().is_relative_to(quick)


def test_threads_are_those_that_torch_is_told_to_use() -> None:
    code = """
import os, kvq_ops, torch
name = "int8_per_token_head"
store = kvq_ops.quantize(torch.randn(1, 4, 4096, 64), name)
query, counts = torch.randn(1, 8, 1, 64), []
for threads in (1, 3, 2):
    torch.set_num_threads(threads)
    kvq_ops.attention(query, store, store, name, name)
    counts.append(len(os.listdir("/proc/self/task")))
print(*(c - counts[0] for c in counts))
"""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("no /proc to count threads in")
    out, _ = finish(start(code))
    first, three, two = map(int, out.split())
    assert first == 0 and three == 2 and two <= 2


def test_reading_memory_reads_all_of_it() -> None:
    data = torch.randint(-(2**62), 2**62, (70_001,))
    assert kernels.read_memory(data) == int(data.sum())
    data[-1] += 1
    assert kernels.read_memory(data) == int(data.sum())
