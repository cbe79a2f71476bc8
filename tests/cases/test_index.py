"""Which reported case is tested where: every id is in the name of a test somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
CASES = (
    "A2", "A3", "A4", "A5", "A6", "A7",
    "B1", "B2", "B4", "B5",
    "C1", "C2", "C3", "C4", "C6",
    "D1", "D2", "D3", "D4", "D5", "D8", "D9", "D10", "D12",
    "E2", "E3", "E4", "E5",
    "F1", "F2", "F3", "F4", "F6",
    "G1", "G2", "G5", "G6",
)  # fmt: skip


def cases_by_id() -> dict[str, list[str]]:
    """Tests by the id in their name."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and (
                match := re.match(r"test((_[a-zA-Z]\d+)+)_", node.name)
            ):
                for case in match[1].upper().split("_")[1:]:
                    found.setdefault(case, []).append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_every_case_has_a_test() -> None:
    found = cases_by_id()
    missing = [case for case in CASES if case not in found]
    assert not missing, f"no test is named after {', '.join(missing)}"
