"""The importers need torch alone: other systems hand over plain tensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BLOCKED = ("transformers", "numpy", "gguf", "optimum", "hqq", "vllm", "flashinfer", "triton")


def test_importing_needs_torch_alone() -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        f"for name in {BLOCKED!r}: sys.modules[name] = None\n"
        "from kvq_ops.interop import hf, llama_cpp, vllm\n"
        "print(*sorted(vllm.__all__ + llama_cpp.__all__ + hf.__all__))"
    )
    root = Path(__file__).resolve().parent.parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=300)
    assert "read_hqq" in done.stdout and "write_nvfp4" in done.stdout, done.stderr
