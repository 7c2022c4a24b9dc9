"""After how many seconds does a user learn of each fault?

This runs the tests that the tables of docs/faults.md link and that measure, and writes their seconds into the
tables:

    | fault | what the user sees | seconds | test |
    | --- | --- | --- | --- |
    | a worker is killed | `WorkerError: …` | 0.8 | [test_killed](../tests/faults/test_workers.py) |

A row belongs to the fault of the same name that a test gives to `measured`. Case, spaces and the marks of Markdown
do not count. If a fault is measured several times, the longest time is written. A row that no test measures stays
as it is. The last cell links one test or several.

Refuted by a row without a test; by seconds beside a test that measures, but not these; by a measured fault
without a row; by a test that fails.

    python tests/faults/measure_faults.py --out benchmarks/results/faults.json
    python tests/faults/measure_faults.py --check      # the tables alone: each row links a test that exists
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
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
TIMES = "FEEDLINE_FAULT_TIMES"
"""The variable that names the file to which the fixture `measured` writes."""
COLUMNS = 4


class Row(NamedTuple):
    """A row of a table.

    Attributes:
      line: its number in the page, from 0.
      cells: fault, what the user sees, seconds, test.
    """

    line: int
    cells: list[str]

    @property
    def name(self) -> str:
        return name_of(self.cells[0])

    def links(self) -> list[tuple[str, str]]:
        """Text and path of each link to a test."""
        return re.findall(r"\[([^]]*)\]\(([^)#]*)[^)]*\)", self.cells[3])

    def measuring(self) -> list[str]:
        """Its tests that measure, as pytest names them."""
        files = [(test, (PAGE.parent / path).resolve()) for test, path in self.links()]
        return [f"{file}::{test}" for test, file in files if test in tests_in(file, that_measure=True)]

    def is_measured(self) -> bool:
        """Whether one of its tests measures, and its seconds are a number."""
        return re.fullmatch(r"(< )?[\d.]+", self.cells[2]) is not None and bool(self.measuring())


def name_of(fault: str) -> str:
    """A fault's name without case, the marks of Markdown and repeated spaces."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", fault)
    return " ".join(re.sub(r"[`*_\\]", "", text).split()).rstrip(".").lower()


def rows_of(page: str) -> list[Row]:
    """The rows of all tables.

    Raises:
      SystemExit: a row has not four cells.
    """
    found = []
    lines = page.splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if len(cells) != COLUMNS:
            raise SystemExit(f"a row of {PAGE.name} has {COLUMNS} cells (write | as \\|), got {line}")
        is_head = number + 1 < len(lines) and is_rule(lines[number + 1])
        if not is_head and not is_rule(line):
            found.append(Row(number, cells))
    return found


def is_rule(line: str) -> bool:
    """Whether it is the line below a table's head."""
    return line.startswith("|") and not set(line) - set("|-: ")


def longest(lines: Iterable[str]) -> dict[str, dict[str, object]]:
    """The longest measurement of each fault, by its name; from what `measured` wrote."""
    found: dict[str, dict[str, object]] = {}
    for line in lines:
        measured = json.loads(line)
        name = name_of(measured["fault"])
        if name not in found or measured["seconds"] > found[name]["seconds"]:
            found[name] = measured
    return found


def written(page: str, seconds: Mapping[str, float]) -> str:
    """The page with these seconds, by the faults' names."""
    lines = page.splitlines(keepends=True)
    for line, cells in rows_of(page):
        name = name_of(cells[0])
        if name in seconds:
            lines[line] = f"| {cells[0]} | {cells[1]} | {shown(seconds[name])} | {cells[3]} |\n"
    return "".join(lines)


def shown(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 0.05 else "< 0.1"


def problems(page: str, measured: Iterable[str] | None = None) -> list[str]:
    """What is wrong with the tables. `measured`: names of the faults of a whole run, None if there was none."""
    rows = rows_of(page)
    names = [row.name for row in rows]
    found = [f"two rows have the fault {name!r}" for name in sorted({n for n in names if names.count(n) > 1})]
    for row in rows:
        if not row.links():
            found.append(f"the row {row.cells[0]!r} links no test")
        for text, path in row.links():
            file = (PAGE.parent / path).resolve()
            test = text.strip("`").partition("[")[0]
            is_name = test.startswith("test_") and test.isidentifier()
            if not file.is_file() or (is_name and test not in tests_in(file, that_measure=False)):
                found.append(f"the row {row.cells[0]!r} links a test that does not exist: {text} in {path}")
    if measured is None:
        return found
    run = set(measured)
    found += [f"no test measures the fault of the row {row.cells[0]!r}" for row in rows
              if row.is_measured() and row.name not in run]  # fmt: skip
    return found + [f"no row has the measured fault {name!r}" for name in sorted(run - set(names))]


def tests_in(file: Path, *, that_measure: bool) -> set[str]:
    """The names of a file's functions, and of what it assigns, such as test classes.

    Args:
      that_measure: only those of functions with the argument `measured`.
    """
    if file.suffix != ".py" or not file.is_file():
        return set()
    body = ast.parse(file.read_text()).body
    if that_measure:
        functions = (node for node in body if isinstance(node, ast.FunctionDef))
        return {each.name for each in functions if "measured" in (arg.arg for arg in each.args.args)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assigned = {target.id for target in targets if isinstance(target, ast.Name)}
    return assigned | {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="of the tests; the longest time of each fault counts")
    parser.add_argument("--times", type=Path, help="what `measured` wrote in an earlier run, instead of a new run")
    parser.add_argument("--check", action="store_true", help="run nothing and write nothing")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    page, failed = PAGE.read_text(), 0
    if options.check:
        raise SystemExit("\n".join(problems(page)) or 0)
    with tempfile.TemporaryDirectory() as folder:
        times = options.times or Path(folder, "times.jsonl")
        if not options.times:
            tests = dict.fromkeys(test for row in rows_of(page) for test in row.measuring())
            command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "not cluster", *tests]
            for _ in range(options.runs):
                failed |= subprocess.run(command, cwd=ROOT, env=os.environ | {TIMES: str(times)}).returncode
        found = longest(times.read_text().splitlines() if times.exists() else [])
    page = written(page, {name: float(str(measured["seconds"])) for name, measured in found.items()})
    PAGE.write_text(page)
    if options.out:
        from feedline._src.tools.bench.machine import describe

        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        faults = sorted(found.values(), key=lambda measured: (str(measured["test"]), str(measured["fault"])))
        result = {"benchmark": "faults", "date": date, "machine": describe(), "faults": faults}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = problems(page, found)
    print(f"{len(found)} faults measured, {len(rows_of(page))} rows in {PAGE.name}, {len(wrong)} problems")
    if failed:
        wrong.append("refuted: a test failed, see above")
    raise SystemExit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
