"""Kernels run in Triton's interpreter here; what compiles does so in processes of its own (``tests/triton/offline.py``)."""

from __future__ import annotations

import importlib.util
import os

import pytest

if importlib.util.find_spec("triton") is None:
    reason = "triton is not installed: no test of its kernels"
elif os.environ["TRITON_INTERPRET"] != "1":
    reason = "TRITON_INTERPRET is not 1: the tests of kernels need the interpreter"
else:
    from tests.triton import interpreter

    reason = ""
    interpreter.install()

if reason:
    if os.environ.get("CI"):
        raise RuntimeError(reason)
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header(config: pytest.Config) -> str | None:
    return reason or None
