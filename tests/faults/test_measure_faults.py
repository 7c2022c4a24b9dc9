"""The tables of docs/faults.md: each row links a test that exists, and measured seconds come to the right row."""

import json
import re
from pathlib import Path

import measure_faults

HERE = "[test_ctrl_c_while_workers_start](../tests/faults/test_signals.py)"
PAGE = f"""# Faults

| fault | what the user sees | seconds | test |
| --- | --- | :-- | --- |
| A worker **is killed** | `WorkerError: a \\| b` | 9 | {HERE} |
| never measured | an error | – | {HERE} |
"""


def test_the_page_as_it_is():
    page = measure_faults.PAGE.read_text()
    assert len(measure_faults.rows_of(page)) > 60
    assert measure_faults.problems(page) == []


def test_faults_that_tests_name_have_rows():
    texts = [path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")]
    named = re.findall(r'^ +measured\("(.+?)", ', "\n".join(texts), re.MULTILINE)
    assert len(named) > 20
    found = measure_faults.longest(json.dumps({"fault": fault, "seconds": 1.0}) for fault in named)
    problems = measure_faults.problems(measure_faults.PAGE.read_text(), found)
    assert [each for each in problems if "no row has" in each] == []


def test_the_longest_time_comes_to_the_row_of_its_name():
    times = [("a worker is  `killed`", 1.26), ("A worker is killed.", 0.5)]
    found = measure_faults.longest(json.dumps({"fault": fault, "seconds": each}) for fault, each in times)
    page = measure_faults.written(PAGE, {name: measured["seconds"] for name, measured in found.items()})
    assert page == PAGE.replace("| 9 |", "| 1.3 |")
    assert measure_faults.problems(page, found) == []


def test_what_is_wrong_is_named():
    page = PAGE.replace("never measured", "a worker is killed").replace("test_ctrl_c", "test_gone", 1)
    told = "\n".join([*measure_faults.problems(page, ["a fault"]), *measure_faults.problems(PAGE, [])])
    for each in (
        "two rows have the fault 'a worker is killed'",
        "links a test that does not exist: test_gone_while",
        "no row has the measured fault 'a fault'",
        "no test measures the fault of the row 'A worker **is killed**'",
    ):
        assert each in told
