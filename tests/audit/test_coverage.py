"""Which rows of a feed on one device an audit counts and compares."""

import jax
import numpy as np
import pytest

from feedline import Feed, FeedOptions, Order, Reading
from feedline._src.tools.audit.coverage import measure_coverage
from feedline._src.tools.audit.processes import observe
from feedline._src.tools.audit.verdict import Difference
from feedline._src.tools.targets import one_size

ROWS = {"x": np.arange(100, dtype=np.int32)}


def coverage(batches=12, batch_size=8, **options):
    """What an audit reports after this many batches."""
    with Feed(ROWS, batch_size, jax.devices()[0], **options) as feed:
        return measure_coverage(feed, observe(feed, batches))


@pytest.mark.parametrize(
    ("options", "epochs", "left_out"),
    [
        ({"remainder": "drop"}, "1 epoch", 4),
        ({"remainder": "drop", "batches": 13}, "2 epochs", 8),
        ({"remainder": "pad"}, "1 epoch", 0),
        ({"remainder": "pad", "batch_size": 128, "batches": 2}, "2 epochs", 0),
        ({"remainder": "wrap", "epochs": 1}, "1 epoch", 4),
        ({"remainder": "wrap", "epochs": 3, "batch_size": 64, "batches": 4}, "3 epochs", 44),
        ({"remainder": "wrap", "batch_size": 4096, "batches": 2}, "82 epochs", 0),
    ],
)
def test_whole_epochs_of_a_feed_that_is_right_are_counted(options, epochs, left_out):
    found = coverage(**options)
    without = f"; remainder {options['remainder']!r} leaves out {left_out} in all" if left_out else ""
    assert found.covered[-1] == f"{epochs} of 100 rows: each row index comes once per epoch{without}."
    assert not found.not_covered


def test_epochs_of_many_rows_are_not_counted(monkeypatch):
    monkeypatch.setattr("feedline._src.tools.audit.coverage._MAX_ROWS", 199)
    assert len(coverage().covered) == 2
    found = coverage(batches=13)
    assert len(found.covered) == 1
    assert "at most 199 row indices are counted" in found.not_covered[-1]


def test_an_order_that_repeats_a_row_is_found(monkeypatch):
    twice = Feed.rows_of
    monkeypatch.setattr(
        Feed, "rows_of", lambda feed, state: np.where(twice(feed, state) == 7, 8, twice(feed, state))
    )
    with pytest.raises(Difference, match="row 8 of the source comes 2 times in epoch 0"):
        coverage(reading=Reading(bad_rows="mask"), order=Order(1))


def test_rows_that_may_be_replaced_are_not_compared_with_the_source():
    found = coverage(reading=Reading(bad_rows="substitute"))
    assert not [line for line in found.covered if "equal the rows of the source" in line]
    assert "Reading(bad_rows=...) may replace them" in found.not_covered[-1]


def test_the_leaf_of_with_place_is_not_audited():
    options = FeedOptions(ROWS, [(0, 8), (10, 16)], jax.devices()[0], with_place=True)
    with Feed.from_options(one_size(options)) as feed:
        assert (list(feed.spec), feed.batch_size) == (["x"], 8)


def test_a_feed_that_make_feed_restored_is_refused():
    with Feed(ROWS, 8, jax.devices()[0]) as feed:
        next(feed)
        with pytest.raises(ValueError, match=r"at its beginning, and this one is at \[1, 0, 8\] \(step, epoch"):
            observe(feed, 4)
