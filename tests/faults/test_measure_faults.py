"""The tables of docs/faults.md: each row links a test that exists, and measured seconds come to the right row."""

import json

import measure_faults
import pytest

TEST = "[test_the_page_as_it_is](../tests/faults/test_measure_faults.py)"
HERE = "[test_ctrl_c_while_workers_start](../tests/faults/test_signals.py)"
PAGE = f"""# Faults

| fault | what the user sees | seconds | test |
| --- | --- | :-- | --- |
| A worker **is killed** | `WorkerError: a \\| b` | 9 | {HERE} |
| never measured | an error | – | {HERE} |

## Files

| fault | what the user sees | seconds | test |
| --- | --- | --- | --- |
| elsewhere | an error | 3 | {TEST}, {HERE} |
"""


def lines(*measured):
    return [json.dumps({"fault": fault, "seconds": seconds, "test": "t"}) for fault, seconds in measured]


def test_the_page_as_it_is():
    assert measure_faults.problems(measure_faults.PAGE.read_text()) == []


def test_the_longest_time_comes_to_the_row_of_its_name():
    measured = lines(("a worker is  `killed`", 0.5), ("A worker is killed.", 1.26), ("elsewhere", 0.01))
    found = measure_faults.longest(measured)
    page = measure_faults.written(PAGE, {name: measured["seconds"] for name, measured in found.items()})
    assert page == PAGE.replace("| 9 |", "| 1.3 |").replace("| 3 |", "| < 0.1 |")
    assert measure_faults.problems(page, found) == []


@pytest.mark.parametrize(
    ("old", "new", "measured", "told"),
    [
        ("", "", [], "no test measures the fault of the row 'A worker **is killed**'"),
        ("", "", ["a fault"], "no row has the measured fault 'a fault'"),
        ("test_the_page_as", "test_no_page_as", None, "links a test that does not exist: test_no_page_as_it_is"),
        ("faults/test_measure", "faults/test_gone", None, "the row 'elsewhere' links a test that does not exist"),
        (HERE, "it is tested", None, "the row 'never measured' links no test"),
        ("never measured", "Elsewhere", None, "two rows have the fault 'elsewhere'"),
    ],
)
def test_what_is_wrong_is_named(old, new, measured, told):
    page = PAGE.replace(old, new) if old else PAGE
    assert any(told in problem for problem in measure_faults.problems(page, measured))


def test_a_row_without_four_cells_is_shown():
    with pytest.raises(SystemExit, match=r"4 cells .* got \| fault \| seconds \|"):
        measure_faults.rows_of("| fault | seconds |\n")
