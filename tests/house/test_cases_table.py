"""tests/cases.md names a test for each row of the case book: those it names are there, and those named after a row are named in it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"^\| (C\d\d) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
ROWS = dict(ROW.findall((TESTS / "cases.md").read_text(encoding="utf-8")))


def functions_of(path: Path) -> set[str]:
    """Functions at a module's top level that are tests."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name.startswith("test_")}


def named_in(cell: str) -> set[tuple[str, str]]:
    found = set()
    for part in cell.split(";"):
        path, *names = re.findall(r"`([^`]+)`", part) or [""]
        found |= {(path, name) for name in names}
    return found


def test_every_row_of_the_table_is_read():
    lines = [line for line in (TESTS / "cases.md").read_text(encoding="utf-8").splitlines() if line.startswith("| C")]
    assert len(lines) == len(ROWS) == 41
    assert list(ROWS) == sorted(ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_named_tests_exist(row: str):
    named = named_in(ROWS[row])
    assert named or ROWS[row].startswith("none yet")
    missing = [f"{path}: {name}" for path, name in sorted(named) if name not in functions_of(TESTS / path)]
    assert missing == []


def test_tests_named_after_a_row_stand_in_it():
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in functions_of(path):
            for row in re.findall(r"(?<=_)c\d\d(?=_)", name):
                assert (str(path.relative_to(TESTS)), name) in named_in(ROWS[row.upper()]), f"{name} is missing from row {row}"
