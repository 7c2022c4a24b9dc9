"""The audit computes the same epochs and positions as feedline's schedule."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline._src.order.schedule import Cursor, Schedule
from feedline._src.tools.audit.observed import Settings
from feedline._src.tools.audit.positions import batch_starts, row_positions


def batches(schedule, count):
    """The start of each of the first `count` batches over all passes, by the schedule."""
    found, cursor = [], Cursor(0, 0)
    while len(found) < count:
        if not schedule.batches_from(cursor):
            cursor = schedule.start_of_pass(schedule.pass_of(cursor) + 1)
        start = schedule.batch_at(cursor, 0)
        found.append(start)
        cursor = schedule.after(start)
    return found


@pytest.mark.parametrize("remainder", ["drop", "pad", "wrap"])
@given(rows=st.integers(1, 30), size=st.integers(1, 12), epochs=st.one_of(st.none(), st.integers(1, 3)))
def test_positions_equal_those_of_the_schedule(remainder, rows, size, epochs):
    if (rows if remainder == "drop" else rows * (epochs or size)) < size and remainder != "pad":
        return
    schedule = Schedule(rows, size, remainder, epochs)
    settings = Settings(rows, size, remainder, epochs, transformed=False)
    expected = batches(schedule, 12)
    epoch, position = row_positions(settings, (0, 0), 12)
    for k, start in enumerate(expected):
        meant = schedule.positions(start, np.arange(size))
        np.testing.assert_array_equal(epoch[k], meant.epoch)
        np.testing.assert_array_equal(position[k] % rows, meant.position)
        np.testing.assert_array_equal(position[k] < rows, meant.valid)


def test_starts_in_the_middle_of_an_epoch_and_of_a_stream():
    settings = Settings(10, 4, "drop", None, transformed=False)
    assert list(itertools.islice(batch_starts(settings, (2, 5)), 2)) == [(2, 5), (3, 0)]
    stream = Settings(None, 4, "drop", 1, transformed=False)
    assert list(itertools.islice(batch_starts(stream), 3)) == [(0, 0), (0, 4), (0, 8)]
