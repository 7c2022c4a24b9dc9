"""The helpers of these tests: a failure, a difference or a missing part fails the test."""

import numpy as np
import pytest

from .values import CaseFailure, PerProcess, Shards, combined


def test_values_of_all_processes_are_combined():
    halves = [Shards((2,), np.dtype(int), [((slice(i, i + 1),), np.array([i]))]) for i in range(2)]
    found = combined([{"each": PerProcess(i), "all": "same", "array": half} for i, half in enumerate(halves)])
    assert found.pop("array").tolist() == [0, 1]
    assert found == {"each": [0, 1], "all": "same"}
    with pytest.raises(AssertionError, match="no process holds the values at"):
        combined(halves[:1])


def test_a_failure_and_a_difference_fail_the_test():
    with pytest.raises(AssertionError, match="process 1: Traceback of it"):
        combined([1, CaseFailure("Traceback of it")])
    with pytest.raises(AssertionError, match="the processes disagree"):
        combined([1, 2])
