"""Examples run as a reader would run them, and print what their text says."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import expecttest
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(name: str) -> str:
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples" / name)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_example_has_a_main(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "an example says what it shows"
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)


def test_kv_quantization_reference() -> None:
    expecttest.assert_expected_inline(
        run("kv_quantization_reference.py"),
        """\
fp16 keys and values    16384 bytes
int8 codes and scales   8192 + 1024 bytes
ratio                   1.778
row lengths             32 bytes, whatever the number of tokens
keys by the formula     equal, bit for bit
values by the formula   equal, bit for bit
attention error         0.68% of the largest output
""",
    )


def test_kv_quantization_reference_sees_a_different_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """Truncation in place of rounding must make the example fail, or its check means nothing."""
    namespace: dict[str, object] = {"__name__": "example"}
    exec(
        compile((ROOT / "examples" / "kv_quantization_reference.py").read_text(), "example", "exec"),
        namespace,
    )
    plain = namespace["plain_formula"]

    def truncating(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = plain(x)[1]  # type: ignore[operator]
        return (x.float() / scale.unsqueeze(-1)).trunc().to(torch.int8), scale

    namespace["plain_formula"] = truncating
    with pytest.raises(SystemExit):
        namespace["main"]()  # type: ignore[operator]
    assert "DIFFERENT" in capsys.readouterr().out


def test_quantize_a_model() -> None:
    said = run("quantize_a_model.py")
    assert said.count("2 of 2 attention sites read the quantized cache") == 3
    assert "4 (4 int8_per_token_head), 10,272 bytes instead of 32,768; 4 writes" in said


@pytest.mark.slow
def test_export_a_model() -> None:
    said = run("export_a_model.py")
    assert said.count("package equals eager: True") == 3
    sizes = re.search(r"file: (\d+) KiB dense, (\d+) KiB quantized", said)
    assert sizes is not None and int(sizes[2]) * 2 < int(sizes[1])


def test_author_a_format() -> None:
    said = run("author_a_format.py")
    assert "example: chosen" in said and "example: rejected: torch.float16: float32 only" in said
    assert "4 (4 example_int8_group16)" in said and "the implementation ran 2 times" in said


def test_author_a_kernel() -> None:
    pytest.importorskip("tvm_ffi", reason="the cutlass extra is not installed")
    said = run("author_a_kernel.py")
    for target in ("sm_100a", "sm_103a", "sm_120a", "sm_121a"):
        assert re.search(rf"{target}: \d+ registers, 0 bytes spilled", said)
    assert "4 cases equal plain torch, and opcheck is content" in said
    assert "example: chosen" in said
    assert "through torch.compile: equal True, 2 calls of the kernel" in said


def test_author_a_kernel_says_what_to_install() -> None:
    code = "import sys; sys.modules['cutlass'] = None; import runpy; runpy.run_path('examples/author_a_kernel.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (
        done.returncode
        and "nvidia-cutlass-dsl is not installed: pip install 'kvq-ops[cutlass]'" in done.stderr
    )
