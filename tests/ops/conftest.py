"""The matrix of implementations includes Triton's kernels, in an interpreter that is right (``tests/triton/interpreter.py``)."""

from __future__ import annotations

import importlib.util
import os

import pytest

INTERPRETED = importlib.util.find_spec("triton") is not None and os.environ["TRITON_INTERPRET"] == "1"

if INTERPRETED:
    from tests.triton import interpreter

    interpreter.install()


@pytest.fixture(autouse=True)
def whole_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of the kernels that write stores takes a tile of rows, also of few: the interpreter's time goes by programs.

    By itself it would take one of up to 512 rows. Tests marked ``single_rows`` have that: each format, head size and dtype once.
    """
    if INTERPRETED and request.node.get_closest_marker("single_rows") is None:
        from kvq_ops.triton_kernels import shapes

        monkeypatch.setattr(shapes, "FEW_ROWS", 0)
