"""Finding the process and the field that differ."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline._src.agreement.coordination import process_names
from feedline._src.agreement.differences import find_mismatch

SAME = {"version": {"jax": "0.10.2"}, "rows": 8, "order": {"seed": 0, "shuffle": True}, "epochs": None}


@given(st.integers(1, 9))
def test_equal_descriptions_have_no_mismatch(processes):
    assert find_mismatch({process: dict(reversed(SAME.items())) for process in range(processes)}) is None


@given(st.integers(3, 9), st.data())
def test_the_process_that_differs_is_named(processes, data):
    odd = data.draw(st.integers(0, processes - 1))
    field, value = data.draw(st.sampled_from([("rows", 9), ("order", {"seed": 5, "shuffle": True})]))
    said = {process: SAME | ({field: value} if process == odd else {}) for process in range(processes)}
    found = find_mismatch(said)
    assert found.process == odd
    assert found.message.startswith(f"process {odd} has {field}")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rows": 9}, "process 1 has rows 9, process 0 has 8; give every process the whole data"),
        ({"order": {"seed": 3, "shuffle": True}}, "process 1 has order.seed 3, process 0 has 0; "),
        ({"version": {"jax": "0.11"}}, 'process 1 has version.jax "0.11", process 0 has "0.10.2"; install'),
        ({"version": {}}, 'process 1 has version.jax absent, process 0 has "0.10.2"'),
        ({"epochs": 2, "batch": 1}, "process 1 has epochs 2, process 0 has null (and batch differs); "),
        (dict.fromkeys("abcde", 1), "(and b, c, d, … differ)"),
        ({"rows": "x" * 1000}, "xxx…, process 0"),
    ],
)
def test_the_message_names_the_field_and_both_values(changed, told):
    found = find_mismatch({0: SAME, 1: SAME | changed})
    assert found.process == 1
    assert told in found.message


def test_in_a_tie_the_value_of_the_lowest_process_is_taken_as_right():
    said = {process: {"rows": process in (1, 3)} for process in range(4)}
    assert find_mismatch(said).message.startswith("processes 1 and 3 have rows true, processes 0 and 2 have false")


@pytest.mark.parametrize(
    ("processes", "told"),
    [
        ([], ""),
        ([3], "process 3"),
        ([0, 1, 2, 3], "processes 0, 1, 2 and 3"),
        (list(range(9)), "processes 0, 1, 2 and 6 more"),
    ],
)
def test_process_names_are_abbreviated(processes, told):
    assert process_names(processes) == told
