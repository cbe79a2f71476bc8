"""Every spelling of attention becomes one record, and the record alone rebuilds the computation.

Each case is rewritten to a reference attention built from nothing but the record; the graph must then still compute what the
model does.  Masks are random, per batch and per head, so a lost mask, scale or head order fails.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from . import attention_spellings_layouts, attention_spellings_scores  # noqa: F401  they add to CASES
from .attention_reference import CaptureBackend, exported, found, rewrite_to_reference
from .attention_spellings import CASES, Case


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(137)
    torch._dynamo.reset()


def dims() -> tuple[Any, Any]:
    return torch.export.Dim("tq", min=2, max=64), torch.export.Dim("tk", min=2, max=64)


def _run_all(case_: Case) -> list[Any]:
    return [pytest.param(case_, False, id=case_.name)] + (
        [pytest.param(case_, True, id=case_.name + "-dynamic")] if case_.dynamic is not None else []
    )


def _check(site, want: dict[str, Any]) -> None:
    for name, value in want.items():
        got = site.key.roles if name == "key_roles" else getattr(site, name)
        if isinstance(value, float):
            assert got == pytest.approx(value, rel=1e-6), name
        else:
            assert got == value, name


@pytest.mark.parametrize(("case_", "dynamic"), [p for c in CASES for p in _run_all(c)])
def test_a3_a5_spelling_is_found_and_rebuilt(case_: Case, dynamic: bool) -> None:
    args = case_.args()
    tq, tk = dims()
    shapes = None
    if dynamic:
        assert case_.dynamic is not None
        shapes = [
            {dim: tq if which == "q" else tk for dim, which in entry.items()} or None
            for entry in case_.dynamic
        ]
    graph_module = exported(case_.function, args, shapes)
    site = found(graph_module)
    _check(site, case_.want)
    rewrite_to_reference(graph_module, [site])
    assert not set(site.interior) & set(graph_module.graph.nodes), "the replaced computation is still there"
    expected = case_.function(*args)
    got = graph_module(*args)[0]
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=case_.tolerance, atol=case_.tolerance)


@pytest.mark.parametrize("case_", [c for c in CASES if c.dynamic is not None], ids=lambda c: c.name)
def test_a3_a5_spelling_under_compile(case_: Case) -> None:
    """The same through Dynamo and capture, with the token dims marked dynamic."""
    args = case_.args()
    assert case_.dynamic is not None
    for arg, entry in zip(args, case_.dynamic, strict=True):
        for dim in entry:
            torch._dynamo.mark_dynamic(arg, dim)
    seen: list[Any] = []

    def edit(graph_module):
        site = found(graph_module)
        seen.append(site)
        return rewrite_to_reference(graph_module, [site])

    expected = case_.function(*args)
    with torch.no_grad():
        got = torch.compile(case_.function, backend=CaptureBackend(edit), fullgraph=True)(*args)
    assert len(seen) == 1
    # Compile gives each input its own symbol, so query and key lengths are not provably the same there.
    _check(seen[0], {name: value for name, value in case_.want.items() if name != "is_square"})
    torch.testing.assert_close(got, expected, rtol=case_.tolerance, atol=case_.tolerance)
