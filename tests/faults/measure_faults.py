"""After how many seconds does a user learn of each fault?

This runs the tests that the tables of docs/faults.md link and that have the argument `measured`, and writes their
seconds into the tables. A test gives `measured` the name of a fault: the first cell of its row, where case, spaces
and the marks of Markdown do not count. Of several measurements the longest is written. A row that no test measures
stays as it is.

Refuted by a row that links no test; by a row with seconds whose fault its tests did not measure this time; by a
measured fault without a row; by a test that fails.

    python tests/faults/measure_faults.py --out benchmarks/results/faults.json
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
TIMES = "FEEDLINE_FAULT_TIMES"
"""The variable that names the file to which the fixture `measured` writes."""


class Row(NamedTuple):
    """A row of a table: its line in the page, and its cells: fault, what the user sees, seconds, test."""

    line: int
    cells: list[str]

    @property
    def name(self) -> str:
        return name_of(self.cells[0])

    def links(self) -> list[tuple[str, Path]]:
        """Name and file of each linked test."""
        found = re.findall(r"\[([^]]*)\]\(([^)#]*)[^)]*\)", self.cells[3])
        return [(text.strip("`").partition("[")[0], (PAGE.parent / path).resolve()) for text, path in found]

    def measuring(self) -> list[str]:
        """Its tests that measure, as pytest names them."""
        return [f"{file}::{test}" for test, file in self.links() if tests_in(file).get(test)]


def name_of(fault: str) -> str:
    """A fault's name without case, the marks of Markdown and repeated spaces."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", fault)
    return " ".join(re.sub(r"[`*_\\]", "", text).split()).rstrip(".").lower()


def rows_of(page: str) -> list[Row]:
    """The rows of all tables, without the two lines of each head."""
    lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in page.splitlines()]
    body = (number for number in range(2, len(lines)) if lines[number] and lines[number - 1])
    found = [Row(number, lines[number]) for number in body if not lines[number][0].startswith(("--", ":-"))]
    wrong = [row.cells for row in found if len(row.cells) != 4]
    if wrong:
        raise SystemExit(f"a row of {PAGE.name} has 4 cells (write | as \\|), got {wrong[0]}")
    return found


def longest(lines: Iterable[str]) -> dict[str, dict[str, Any]]:
    """{name of a fault: its longest measurement}, from lines that `measured` wrote."""
    measured = sorted(map(json.loads, lines), key=lambda each: each["seconds"])
    return {name_of(each["fault"]): each for each in measured}


def written(page: str, seconds: Mapping[str, float]) -> str:
    """The page with new seconds: {name of a fault: seconds}."""
    lines = page.splitlines(keepends=True)
    for row in rows_of(page):
        if row.name in seconds:
            shown = f"{seconds[row.name]:.1f}" if seconds[row.name] >= 0.05 else "< 0.1"
            lines[row.line] = f"| {row.cells[0]} | {row.cells[1]} | {shown} | {row.cells[3]} |\n"
    return "".join(lines)


def problems(page: str, measured: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the tables. `measured`: the faults that a whole run measured, None without a run."""
    rows = rows_of(page)
    names = [row.name for row in rows]
    found = [f"two rows have the fault {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    found += [f"the row {row.cells[0]!r} links no test" for row in rows if not row.links()]
    found += [
        f"the row {row.cells[0]!r} links a test that does not exist: {test} in {file}"
        for row in rows
        for test, file in row.links()
        if not file.is_file() or (test.startswith("test_") and test.isidentifier() and test not in tests_in(file))
    ]
    if measured is None:
        return found
    run = set(measured)
    has_seconds = [row for row in rows if re.fullmatch(r"(< )?[\d.]+", row.cells[2]) and row.measuring()]
    found += [
        f"no test measures the fault of the row {each.cells[0]!r}" for each in has_seconds if each.name not in run
    ]
    return found + [f"no row has the measured fault {name!r}" for name in sorted(run - set(names))]


def tests_in(file: Path) -> dict[str, bool]:
    """{name: whether it measures}, of the functions of a file and of what it assigns, such as test classes."""
    body = ast.parse(file.read_text()).body if file.suffix == ".py" and file.is_file() else []
    found = {target.id: False for node in body if isinstance(node, ast.Assign) for target in node.targets
             if isinstance(target, ast.Name)}  # fmt: skip
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = "measured" in (argument.arg for argument in node.args.args)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    page = PAGE.read_text()
    tests = dict.fromkeys(test for row in rows_of(page) for test in row.measuring())
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times.jsonl")
        times.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not cluster", *tests]
        failed = subprocess.run(command, cwd=ROOT, env=os.environ | {TIMES: str(times)}).returncode
        found = longest(times.read_text().splitlines())
    page = written(page, {name: measured["seconds"] for name, measured in found.items()})
    PAGE.write_text(page)
    if options.out:
        from feedline._src.tools.bench.machine import describe

        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        faults = sorted(found.values(), key=lambda measured: (measured["test"], measured["fault"]))
        result = {"benchmark": "faults", "date": date, "machine": describe(), "faults": faults}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = problems(page, found) + ["refuted: a test failed, see above"] * bool(failed)
    print(f"{len(found)} faults measured, {len(rows_of(page))} rows in {PAGE.name}, {len(wrong)} problems")
    raise SystemExit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
