"""Which tensors get the Triton kernels, what is said to the others, and when triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline

import kvq_ops
from kvq_ops import registry
from kvq_ops.errors import ImplementationError
from kvq_ops.formats import get_format
from kvq_ops.registry import Request
from kvq_ops.triton_kernels import availability

ROOT = Path(__file__).resolve().parents[2]
FORMAT = get_format("int8_per_token_head")


def run(code: str, **environment: str) -> str:
    """Print of ``code`` in a process without ``TRITON_INTERPRET``, unless it is given."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def request(op: str = "attention", device: str = "cuda", **changes: Any) -> Request:
    return Request(
        op,
        device,
        changes.get("formats", (FORMAT, FORMAT)),
        changes.get("head_dims", (128, 128)),
        changes.get("dtype", torch.float16),
    )


@pytest.fixture
def as_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process whose Triton compiles, whatever the tests' own process does."""
    monkeypatch.setattr(availability, "INTERPRETED", False)


def test_every_operator_has_a_row() -> None:
    for op in registry.OPS:
        assert "triton" in [row.name for row in registry.implementations(op)], op


def test_triton_is_imported_when_a_gpu_tensor_needs_it() -> None:
    code = """
import sys, torch, kvq_ops, passes
before = "triton" in sys.modules
store = kvq_ops.quantize(torch.randn(1, 1, 2, 32), "int8_per_token_head")
kvq_ops.dequantize(store, "int8_per_token_head")
cpu = any(name == "triton" or name.startswith("kvq_ops.triton_kernels.spec") for name in sys.modules)
kvq_ops.explain("attention", "int8_per_token_head", device="cuda")
print(before, cpu, "triton" in sys.modules)
"""
    assert run(code) == "False False True"


def test_explain_names_every_implementation() -> None:
    """On a machine without a GPU too: what would be chosen."""
    code = """
import kvq_ops
print(kvq_ops.explain("attention", "int8_per_token_head", device="cuda:0", head_dim=64))
print(kvq_ops.explain("quantize", "nvfp4", device="xpu"))
"""
    assert_expected_inline(
        run(code),
        """\
kvq::attention on cuda:0, int8_per_token_head, head_dim 64, torch.float32
  cutlass: rejected: format int8_per_token_head: nvfp4, mxfp4, mxfp8 and the fp8 formats of e4m3 codes are served
  triton: chosen
  cpu: rejected: tensors on cuda
  torch: lower priority
kvq::quantize on xpu, nvfp4, head_dim 128, torch.float32
  cutlass: rejected: tensors on xpu: Blackwell GPUs are served
  triton: rejected: tensors on xpu
  cpu: rejected: tensors on xpu
  torch: chosen""",
    )


def test_explain_refuses_an_operator_that_is_none() -> None:
    with pytest.raises(ImplementationError, match="attention"):
        registry.explain("atention", FORMAT)


def test_in_the_interpreter_only_by_name() -> None:
    code = """
import torch, kvq_ops
print([row.name for row in kvq_ops.registry.implementations("quantize")][-1])
print(kvq_ops.explain("quantize", "int8_per_token_head").splitlines()[-1])
"""
    assert run(code, TRITON_INTERPRET="1") == "triton\n  triton: lower priority"


def test_by_name_there_is_no_fallback(as_compiler: None) -> None:
    with (
        kvq_ops.use_implementation("triton"),
        pytest.raises(ImplementationError, match="triton: tensors on cpu"),
    ):
        kvq_ops.quantize(torch.randn(1, 1, 2, 32), FORMAT.name)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "cpu"}, "tensors on cpu"),
        ({"device": "mps"}, "tensors on mps"),
        ({"head_dims": (2048, 64)}, "head_dim 2048 above"),
        ({}, None),
    ],
)
def test_reasons(as_compiler: None, changes: dict[str, Any], reason: str | None) -> None:
    said = availability.refuses(request(**changes))
    assert said is None if reason is None else said is not None and said.startswith(reason), said


@pytest.mark.parametrize(
    ("version", "refused"), [("3.5.1", True), ("3.6.0", False), ("3.10.0+git1", False), ("2.9", True)]
)
def test_versions_of_triton(version: str, refused: bool) -> None:
    assert (availability.version_refusal(version) is not None) == refused


def test_without_triton_the_reason_says_so(as_compiler: None) -> None:
    code = """
import sys; sys.modules["triton"] = None
import kvq_ops
print(kvq_ops.explain("attention", "int8_per_token_head", device="cuda"))
"""
    assert "triton: rejected: triton is not installed (pip install 'triton>=3.6')" in run(code)


@pytest.mark.parametrize(
    ("device", "hip", "reason"),
    [
        ({"major": 7, "minor": 5}, None, "T4 is sm_75; the kernels are for sm_80 and later"),
        ({"major": 8, "minor": 0}, None, None),
        ({"major": 12, "minor": 0}, None, None),
        ({"gcnArchName": "gfx90a:sramecc+"}, "6.4", "T4 is gfx90a; the kernels are for gfx94x"),
        ({"gcnArchName": "gfx942:sramecc+:xnack-"}, "6.4", None),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, device: dict[str, Any], hip: str | None, reason: str | None
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    assert availability.device_refusal(SimpleNamespace(name="T4", **device)) == reason


def test_a_symbolic_head_dim_is_a_request_too() -> None:
    """Under ``dynamic=True`` sizes have no hash; the choice is made for the one size that kernels are made for."""

    class Symbol(int):
        def __hash__(self) -> int:
            raise TypeError("unhashable")

    row = registry.select(request("dequantize", "cpu", formats=(FORMAT,), head_dims=(Symbol(64),)))
    assert row.name in ("cpu", "torch")
