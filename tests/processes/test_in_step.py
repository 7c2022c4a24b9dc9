"""What each process tells the others of the batches that it has taken."""

import numpy as np
import pytest

import feedline
from feedline._src.agreement.in_step import counts

from .cases import case
from .launch import TOPOLOGIES
from .layouts import sharding_of

pytestmark = pytest.mark.slow

ROWS = {"x": np.zeros((64, 2), np.float32)}
SIZE = 16


def new_feed(here, **options):
    """A feed, and a function that returns its count."""
    before = counts()
    feed = feedline.Feed(ROWS, SIZE, sharding_of("data", here.devices), **options)
    (key,) = counts().keys() - before.keys()
    return feed, lambda: counts()[key].batches


@case(on=lambda: TOPOLOGIES[:1])
def several_steps_per_call(here):
    """The count after each of three deliveries, of two batches each."""
    feed, count = new_feed(here, steps_per_call=2)
    with feed:
        return [count() for _, _ in zip(range(3), feed, strict=False)]


def test_a_delivery_counts_once_however_many_steps_it_has(outcome):
    """One delivery more may have been taken only to look whether there is one."""
    assert outcome(TOPOLOGIES[0], several_steps_per_call) == [1, 2, 3]


@case(on=lambda: TOPOLOGIES[:1])
def diagnosed(here):
    """The count before, in and after a diagnosis, and after the next batch: its batches do not count."""
    feed, count = new_feed(here)
    with feed:
        next(feed)
        found = [count()]
        with feed.diagnose(steps=40):
            found.append(max(count() for _ in feed))
        found.append(count())
        next(feed)
        return [*found, count()]


def test_the_batches_of_a_diagnosis_are_not_counted(outcome):
    assert outcome(TOPOLOGIES[0], diagnosed) == [1, 1, 1, 2]
