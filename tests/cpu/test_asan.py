"""No kernel reads or writes beyond what it was given: a condensed run under AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvq_ops.cpu import build

ROOT = Path(__file__).resolve().parents[2]


def _run(capability: str, folder: Path, code: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        command = [*build._compiler(), "-print-file-name=libasan.so"]
    except build.BuildError as error:
        pytest.skip(str(error))
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(found) or not os.path.exists(found):
        pytest.skip("the compiler has no libasan")
    environment = {
        **os.environ,
        "KVQ_CACHE": str(folder),
        "KVQ_CPU_CAPABILITY": capability,
        "KVQ_CPU_FLAGS": "-fsanitize=address -fno-omit-frame-pointer -O1 -g",
        "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'golden'}",
    }
    command = [sys.executable, *code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("capability", [name for name in build.CAPABILITIES if name in ("native", "default")])
def test_nothing_is_read_or_written_out_of_bounds(tmp_path: Path, capability: str) -> None:
    done = _run(capability, tmp_path, ["-m", "tests.cpu.asan_driver"])
    assert done.returncode == 0 and done.stdout.startswith("ran "), done.stderr[-4000:]
    # The same run notices a store that is one byte short.
    short = """
import torch, kvq_ops
from kvq_ops.cpu import kernels
fmt = kvq_ops.get_format("int8_per_token_head")
store = fmt.empty_store(1, 1, 64, 64)
store[0] = torch.empty(64 * 64 - 1, dtype=torch.int8).as_strided((1, 1, 63, 64), (1, 1, 64, 1))
kernels.dequantize([store[0].expand(1, 1, 63, 64), store[1][..., :63], store[2]], fmt, torch.float32)
wrong = kernels.side_numbers(kernels._layout(fmt), fmt, store)
wrong[15] = 64
out = torch.empty(64, 64)
wrong += (out.data_ptr(), 1, 1)
kernels._call("kvq_dequantize", kernels._packer(len(wrong)).pack(*wrong))
"""
    done = _run(capability, tmp_path, ["-c", short])
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stderr[-2000:]
