"""docs/guarantees.md promises nothing without a test: each cell names one that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
FIRST, _, _ = PAGE.partition("## What combines")
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in FIRST.splitlines() if line.startswith("|")
]
HEAD, _, *ROWS = TABLE
CELLS = {(row[0], column): cell for row in ROWS for column, cell in zip(HEAD[1:], row[1:], strict=True)}
LINKS = dict(re.findall(r"^\[(\w+)\]: (.*)$", PAGE, re.MULTILINE))


def names_in(path):
    """The names of a file's tests, and of the test classes that it makes."""
    body = ast.parse(path.read_text()).body
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    assigned = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    made = {target.id for target in assigned if isinstance(target, ast.Name)}
    return {name for name in functions | made if name.lower().startswith("test")}


def test_the_table_is_whole():
    assert len(ROWS) == 16
    assert {len(row) for row in ROWS} == {len(HEAD)} == {6}


@pytest.mark.parametrize("cell", CELLS, ids=" / ".join)
def test_each_cell_names_tests(cell):
    named = re.findall(r"\[(\w+)\]", CELLS[cell])
    assert named
    assert set(named) <= set(LINKS)


@pytest.mark.parametrize("name", LINKS)
def test_each_test_that_is_named_exists(name):
    path, _, test = LINKS[name].partition("#")
    assert test in names_in((ROOT / "docs" / path).resolve())


def test_no_name_is_left_over():
    assert set(LINKS) == {name for cell in CELLS.values() for name in re.findall(r"\[(\w+)\]", cell)}
