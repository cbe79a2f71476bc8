"""The kernels compiled by clang: the bytes and sums they have to give, no undefined behaviour, and macOS."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvq_ops import registry
from kvq_ops.cpu import build, library
from tests.cpu import clang, test_attention, test_codes
from tests.cpu.emulator import Emulated, installed
from tests.cpu.stores import NAMES

needs_clang = pytest.mark.skipif(clang.missing("ziglang") is not None, reason=str(clang.missing("ziglang")))


def cases() -> None:
    """Bytes of one format of each kind, and attention over a few."""
    for name in NAMES[::4]:
        test_codes.test_odd_head_dims(name, 24)
        test_codes.both_read(test_attention.filled(name, 1, 2, 21, 64), name, torch.float16)
    for name in ("none", "int8_per_token_head", "fp8_e4m3", "int4_group32", "turbo2"):
        key, value = (test_attention.filled(name, 2, 2, 90, 64, [90, 33]) for _ in range(2))
        for queries in (1, 2, 11):
            query = torch.randn(2, 6, queries, 64)
            test_attention.check(query, key, value, (name, name), causal=True, softcap=4.0)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels as clang compiles them for this processor."""
    if build._flags_of_capabilities() is not build._X86 or not shutil.which("c++"):
        pytest.skip("needs an x86-64 Linux with a C++ library and a linker")
    monkeypatch.setenv("CXX", shlex.join([sys.executable, str(Path(clang.__file__))]))
    monkeypatch.delenv("KVQ_CPU_CAPABILITY", raising=False)
    library.reset()
    registry._choices.clear()
    assert library.why_not() is None
    yield str(library.loaded())
    library.reset()
    registry._choices.clear()


@needs_clang
def test_this_processor(native: str) -> None:
    assert b"clang version" in Path(native).read_bytes()
    cases()


@needs_clang
@pytest.mark.slow
def test_nothing_is_undefined_on_arm() -> None:
    """Whatever the standard does not define ends the call."""
    if reason := clang.missing("unicorn"):
        pytest.skip(reason)
    with installed(Emulated(clang.aarch64(*clang.CHECKED))):
        cases()


@needs_clang
@pytest.mark.parametrize("unit", build._UNITS)
def test_macos_compiles(unit: str, tmp_path: Path) -> None:
    made = tmp_path / "unit.o"
    flags = (*build._FLAGS, *clang.PLAIN, *clang.STRICT, "-O0", "-target", "aarch64-macos")
    clang.run([*flags, "-c", str(build.SOURCES / unit), "-o", str(made)])
    assert made.read_bytes()[:8] == bytes.fromhex("cffaedfe0c000001")  # 64 bits, ARM


@pytest.mark.parametrize("knows", [True, False])
def test_native_is_asked_for_where_the_compiler_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows: bool
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-mcpu=native*) exit {0 if knows else 1};; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("KVQ_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(build, "_flags_of_capabilities", lambda: build._ARM)
    assert ("-mcpu=native" in build._flags()) == knows
