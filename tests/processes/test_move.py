"""`feed.move` on several processes: the rows of a feed that did not move, and errors where processes disagree."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline

from .cases import case
from .launch import TOPOLOGIES
from .layouts import sharding_of
from .sources import ORDER, ROWS, SOURCES, batches
from .values import PerProcess, assert_same

pytestmark = pytest.mark.slow

SIZE = 16


@case()
def moves(here):
    """A batch each on all devices, on others in another layout, on one device of each process, and on all."""
    of_processes = [next(group) for _, group in itertools.groupby(here.devices, lambda d: d.process_index)]
    one_each = NamedSharding(Mesh(np.array(of_processes), ("data",)), P("data"))
    with feedline.Feed(ROWS, SIZE, sharding_of("data", here.devices), order=ORDER, epochs=3) as feed:
        found = [next(feed)]
        for sharding in (sharding_of("model_across", here.devices), one_each, sharding_of("data", here.devices)):
            feed.move(sharding)
            found.append(next(feed))
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_rows_of_a_feed_that_moves_are_those_of_one_that_does_not(outcome, topology):
    found = outcome(topology, moves)
    assert_same(found, batches(SOURCES["memory"], 3, SIZE, "drop")[: len(found)])
    assert len(found) == 4


@case(on=lambda: TOPOLOGIES[:1])
def moves_at_other_places(here):
    """What a process is told that moves in another epoch than the other one. Its feed is where it was."""
    with feedline.Feed(ROWS, SIZE, sharding_of("data", here.devices), order=ORDER) as feed:
        before = feed.options.sharding
        feed.seek(jax.process_index())
        with pytest.raises(feedline.ProcessError) as raised:
            feed.move(sharding_of("model_across", here.devices))
        assert feed.options.sharding == before
        return PerProcess(str(raised.value))


def test_processes_that_move_at_other_places_are_told_on_each(outcome):
    for told in outcome(TOPOLOGIES[0], moves_at_other_places):
        assert "place" in told
        assert "process 1" in told
