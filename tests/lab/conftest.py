"""The benchmark runs Triton's kernels too, in an interpreter that is right (``tests/triton/interpreter.py``)."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("triton") is not None and os.environ["TRITON_INTERPRET"] == "1":
    from tests.triton import interpreter

    interpreter.install()
