"""The arithmetic of batches against a sequence of batches that is built row by row."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from feedline._src.order.schedule import ENDLESS, REMAINDERS, Cursor, Schedule

FEW = 12
"""The number of batches of an endless pass that are compared."""


class Batch(NamedTuple):
    """One batch: for each row its epoch, its position and whether it is real, that is, not padding."""

    rows: list[tuple[int, int, bool]]
    dropped: int  # rows left out since the batch before

    @property
    def last_real(self):
        return max((epoch, position) for epoch, position, real in self.rows if real)


def batches_row_by_row(schedule, cursor):
    """Yield the batches from a cursor to the end of its pass; return the number of rows dropped after the last."""
    n, size, remainder, epochs = schedule.rows, schedule.batch_size, schedule.remainder, schedule.epochs
    epoch, position = cursor
    end = None if epochs is None else epoch - epoch % epochs + epochs
    rows, dropped = [], 0
    while epoch != end:
        if position < n or (rows and remainder == "pad"):
            rows.append((epoch, position % n, position < n))
            position += 1
        else:
            if remainder == "drop":
                dropped += len(rows)
                rows = []
            epoch, position = epoch + 1, 0
        if len(rows) == size:
            yield Batch(rows, dropped)
            rows, dropped = [], 0
    return dropped + len(rows)


def few_batches(schedule, cursor):
    """(batches, rows dropped at the end); of an endless pass, (the first few batches, None)."""
    rest, batches = batches_row_by_row(schedule, cursor), []
    while schedule.epochs is not None or len(batches) < FEW:
        try:
            batches.append(next(rest))
        except StopIteration as end:
            return batches, end.value
    return batches, None


def batch_rows(schedule, start, offsets=None):
    places = schedule.positions(
        start, np.arange(schedule.batch_size) if offsets is None else np.array(offsets, np.int64)
    )
    assert (places.epoch.dtype, places.position.dtype, places.valid.dtype) == (np.int64, np.int64, bool)
    return list(zip(places.epoch.tolist(), places.position.tolist(), places.valid.tolist(), strict=True))


@st.composite
def schedules(draw, rows=None):
    n = draw(st.integers(1, 12)) if rows is None else rows
    remainder, epochs = draw(st.sampled_from(REMAINDERS)), draw(st.none() | st.integers(1, 4))
    most = {"drop": n, "pad": 3 * n, "wrap": 3 * n if epochs is None else n * epochs}[remainder]
    return Schedule(n, draw(st.integers(1, most)), remainder, epochs)


@st.composite
def with_cursors(draw, schedules=schedules(), last_epoch=7):  # noqa: B008  a strategy is a value
    """A schedule and a valid cursor of it. The largest position of a cursor is the end of an epoch."""
    schedule = draw(schedules)
    return schedule, Cursor(draw(st.integers(0, last_epoch)), draw(st.integers(0, schedule.rows)))


@given(place=with_cursors(), offsets=st.lists(st.integers(0, 99)))
@settings(max_examples=600, deadline=None)
@example((Schedule(10, 4, "pad", 2), Cursor(1, 8)), [])
@example((Schedule(10, 4, "wrap", 2), Cursor(0, 10)), [])
@example((Schedule(2, 7, "wrap", 4), Cursor(3, 2)), [])
@example((Schedule(1, 20, "wrap", None), Cursor(0, 1)), [])
@example((Schedule(2, 20, "pad", None), Cursor(5, 1)), [])
def test_batches_are_those_built_row_by_row(place, offsets):
    schedule, cursor = place
    batches, dropped_at_the_end = few_batches(schedule, cursor)
    if schedule.epochs is None:
        assert schedule.batches_from(cursor) == ENDLESS
    else:
        assert schedule.batches_from(cursor) == len(batches)
    before = cursor
    for k, batch in enumerate(batches):
        start = schedule.batch_at(cursor, k)
        assert start == batch.rows[0][:2]
        assert batch_rows(schedule, start) == batch.rows
        assert schedule.real_rows(start) == sum(real for _, _, real in batch.rows)
        assert schedule.dropped_rows(before, start) == batch.dropped
        assert schedule.batch_at(before, 0) == start
        before = schedule.after(start)
        epoch, position = batch.last_real
        assert before == (epoch, position + 1)  # never a position beyond n, with any batch size and remainder
    if dropped_at_the_end is not None:
        assert schedule.dropped_rows(before, None) == dropped_at_the_end
    if batches:
        some = sorted(offset % schedule.batch_size for offset in offsets)
        assert batch_rows(schedule, start, some) == [batch.rows[offset] for offset in some]


@given(schedule=schedules(), index=st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_passes_follow_each_other(schedule, index):
    if schedule.epochs is None:
        assert schedule.batches_from(schedule.start_of_pass(index)) == ENDLESS
        assert schedule.pass_of(Cursor(index, 3)) == 0
        return
    start = schedule.start_of_pass(index)
    assert start == (index * schedule.epochs, 0)
    batches, dropped = few_batches(schedule, start)
    assert schedule.batches_from(start) == len(batches)
    if schedule.epochs == 1 and schedule.remainder != "wrap":
        assert schedule.steps_per_epoch == len(batches)
    real = sum(real for batch in batches for _, _, real in batch.rows)
    assert real + sum(batch.dropped for batch in batches) + dropped == schedule.epochs * schedule.rows
    first = batches[0].rows[0][0]
    for k, batch in enumerate(batches):
        assert first <= batch.last_real[0] < first + schedule.epochs
        assert schedule.pass_of(schedule.after(schedule.batch_at(start, k))) == index
    last = schedule.after(schedule.batch_at(start, len(batches) - 1))
    assert schedule.batches_from(last) == 0
    assert schedule.start_of_pass(schedule.pass_of(last) + 1) == ((index + 1) * schedule.epochs, 0)


def test_batches_that_run_over_the_ends_of_epochs_have_no_steps_per_epoch():
    with pytest.raises(TypeError, match=r'^remainder "wrap" has no whole number of steps .*; use len\(feed\), or'):
        _ = Schedule(10, 4, "wrap", 1).steps_per_epoch


huge_rows = st.integers(2**61, 2**62) | st.sampled_from([2**62, 2**63 - 1])
huge_schedules = st.builds(
    Schedule, huge_rows, st.integers(1, 2**20), st.sampled_from(REMAINDERS), st.none() | st.integers(1, 2**40)
)


@given(
    schedule=huge_schedules, epoch=st.integers(0, 2**62), short=st.integers(1, 2**20), offset=st.integers(0, 2**20)
)
@settings(max_examples=300, deadline=None)
@example(Schedule(2**63 - 1, 4096, "wrap", None), 2**62, 1, 4095)
@example(Schedule(2**63 - 1, 4096, "pad", None), 2**62, 1, 4095)
def test_positions_at_the_end_of_a_huge_epoch(schedule, epoch, short, offset):
    position = schedule.rows - short
    if offset < short:
        expected = (epoch, position + offset, True)
    elif schedule.remainder == "wrap":
        expected = (epoch + 1, offset - short, True)
    else:
        expected = (epoch, offset - short, False)
    assert batch_rows(schedule, Cursor(epoch, position), [offset]) == [expected]
