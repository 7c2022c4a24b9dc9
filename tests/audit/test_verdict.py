"""Comparing a layout with the layout on one device: equal rows pass, and the first difference is named."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline._src.order.schedule import Cursor, Schedule
from feedline._src.tools.audit.layouts import Layout
from feedline._src.tools.audit.verdict import (
    PLACES_PER_EPOCH,
    Difference,
    NotRun,
    Observed,
    Settings,
    judge,
    row_places,
)

ROWS, SIZE, BATCHES = 20, 4, 8  # five batches an epoch
CONTENT = np.random.default_rng(0).integers(1 << 63, size=(2, ROWS, 2), dtype=np.uint64)
"""[epoch, position, leaf]: a digest for each row."""
LAYOUT = Layout("data", 1, np.arange(4)[:, None])
LEAVES = {"batch['x']": "int32[]", "batch['y']": "int32[]"}


def run(size=SIZE, batches=BATCHES, first=0, content=CONTENT, transformed=False):
    """What one process observes, from row `first` * SIZE of the order on."""
    starts = [divmod(first * SIZE + k * size, ROWS) for k in range(batches)]
    parts = [content[epoch, position : position + size] for epoch, position in starts]
    return Observed(
        settings=Settings(ROWS, size, "drop", None, transformed, LEAVES),
        digests=[[part[None, :, leaf] for leaf in range(2)] for part in parts],
        shapes=[[(), ()]] * batches,
        states=[
            {"step": first + k + 1, "epoch": epoch, "position": position + size}
            for k, (epoch, position) in enumerate(starts)
        ],
        first_batch=first,
    )


def judged(*processes, layout=LAYOUT, reference=None):
    return judge(layout, processes, reference or run())


def changed(*place, by=1):
    content = CONTENT.copy()
    content[place] += np.int64(by).astype(np.uint64)
    return content


def test_equal_rows_pass():
    found = judged(run())
    assert (found["same"], found["rows"], found["batches"]) == (True, 32, 8)


def test_parts_on_several_processes_are_added():
    half = changed(slice(None), by=-7)
    rest = np.full_like(CONTENT, 7)
    assert judged(run(content=half), run(content=rest))["same"] is True
    found = judged(run(content=half))["difference"]  # a part is missing
    assert (found["batch"], found["row"], found["leaf"]) == (0, 0, "batch['x']")


def test_replicas_that_differ_are_found():
    one, other = run(), run(content=changed(0, 9, 1))
    for mine, theirs in zip(one.digests, other.digests, strict=True):  # `one` has replica 0, `other` replica 1
        mine[:] = [np.concatenate([leaf, 0 * leaf]) for leaf in mine]
        theirs[:] = [np.concatenate([0 * leaf, leaf]) for leaf in theirs]
    found = judged(one, other)["difference"]
    assert (found["batch"], found["row"], found["leaf"]) == (2, 1, "batch['y']")
    assert "two devices hold different values" in found["found"]


LATE = [{"step": 2, "epoch": 0, "position": 8}] * BATCHES


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"settings": Settings(ROWS, 8, "drop", None, False, LEAVES)}, "batch_size=8"),
        ({"settings": Settings(ROWS, SIZE, "drop", None, False, {"batch['z']": "int32[]"})}, "leaves={"),
        ({"states": LATE}, "its state is {'step': 2"),
        ({"difference": Difference("not of the source")}, "not of the source"),
    ],
)
def test_other_options_leaves_or_states_are_differences(fields, text):
    found = judged(dataclasses.replace(run(), **fields))
    assert found["same"] is False
    assert text in found["difference"]["found"]


def test_a_layout_without_compared_rows_is_not_reported_as_the_same():
    assert judged(NotRun("no"))["not_run"] == "no"
    late = judged(dataclasses.replace(run(batches=1), first_batch=9))
    assert (late["same"], late["not_run"][:28]) == (None, "it delivered no row that one")


def scheduled(schedule, count):
    """The start of each of the first `count` batches over all passes, by feedline's schedule."""
    found, cursor = [], Cursor(0, 0)
    while len(found) < count:
        if not schedule.batches_from(cursor):
            cursor = schedule.start_of_pass(schedule.pass_of(cursor) + 1)
        found.append(schedule.batch_at(cursor, 0))
        cursor = schedule.after(found[-1])
    return found


@pytest.mark.parametrize("remainder", ["drop", "pad", "wrap"])
@given(rows=st.integers(1, 30), size=st.integers(1, 12), epochs=st.one_of(st.none(), st.integers(1, 3)))
def test_positions_equal_those_of_the_schedule(remainder, rows, size, epochs):
    if (rows if remainder == "drop" else rows * (epochs or size)) < size and remainder != "pad":
        return
    schedule = Schedule(rows, size, remainder, epochs)
    places = row_places(Settings(rows, size, remainder, epochs, False, {}), (0, 0), 12)
    epoch, position = np.divmod(places, PLACES_PER_EPOCH)
    for k, start in enumerate(scheduled(schedule, 12)):
        meant = schedule.positions(start, np.arange(size))
        np.testing.assert_array_equal(epoch[k], meant.epoch)
        np.testing.assert_array_equal(position[k] % rows, meant.position)
        np.testing.assert_array_equal(position[k] < rows, meant.valid)
