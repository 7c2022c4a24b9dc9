"""`move` and `set_weights` on several processes: the rows are right, and processes that disagree get errors."""

import itertools

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline
from feedline._src.agreement.coordination import coordination

from .cases import case
from .launch import TOPOLOGIES
from .layouts import sharding_of
from .sources import ORDER, ROWS, SOURCES, batches
from .values import PerProcess, assert_same

pytestmark = pytest.mark.slow

SIZE = 16


@case()
def moves(here):
    """One batch on all devices, one in another layout, one on one device of each process, one on all again."""
    of_processes = [next(group) for _, group in itertools.groupby(here.devices, lambda d: d.process_index)]
    one_each = NamedSharding(Mesh(np.array(of_processes), ("data",)), P("data"))
    with feedline.Feed(ROWS, SIZE, sharding_of("data", here.devices), order=ORDER, epochs=3) as feed:
        found = [next(feed)]
        for sharding in (sharding_of("model_across", here.devices), one_each, sharding_of("data", here.devices)):
            feed.move(sharding)
            in_step = feed._stages.in_step
            assert in_step is None or in_step.batches == len(found)  # errors name this count
            found.append(next(feed))
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_rows_of_a_feed_that_moves_are_those_of_one_that_does_not(outcome, topology):
    found = outcome(topology, moves)
    assert_same(found, batches(SOURCES["memory"], 3, SIZE, "drop")[: len(found)])
    assert len(found) == 4


@case(on=lambda: TOPOLOGIES[:1])
def moves_at_other_places(here):
    """The error in each process if the two move in different epochs. The feeds stay where they were."""
    with feedline.Feed(ROWS, SIZE, sharding_of("data", here.devices), order=ORDER) as feed:
        before = feed.options.sharding
        feed.seek(jax.process_index())
        with pytest.raises(feedline.ProcessError) as raised:
            feed.move(sharding_of("model_across", here.devices))
        assert feed.options.sharding == before
        return PerProcess(str(raised.value))


def test_processes_that_move_at_other_places_are_told_on_each(outcome):
    for told in outcome(TOPOLOGIES[0], moves_at_other_places):
        assert "the processes of a feed must call feed.move after the same batch" in told
        assert "place" in told
        assert "process 1" in told


@case()
def weighs(here):
    """Batches before and after new weights, and the error in each process if all give different weights."""
    sources = {name: {"x": np.arange(100 * i, 100 * i + 100)} for i, name in enumerate("ab")}
    told = ""
    with feedline.Feed(feedline.Mixture(sources, {"a": 1, "b": 1}), 16, sharding_of("data", here.devices)) as feed:
        found = [next(feed)]
        feed.set_weights({"a": 1, "b": 3})
        found.append(next(feed))
        with pytest.raises(feedline.ProcessError) as raised:
            feed.set_weights({"a": 1, "b": 1 + jax.process_index()})
        told = str(raised.value)
        if (in_step := feed._stages.in_step) is not None:  # the second call has deleted the keys of the first
            path, _, number = in_step.key.rpartition("/")
            assert coordination().dir(f"{path}/{int(number) + 1}") == {}
        found.append(next(feed))
    return found, PerProcess(told)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_weights_change_on_all_processes_or_on_none(outcome, topology):
    found, told = outcome(topology, weighs)
    phases = [(0, {"a": 1, "b": 1}), (16, {"a": 1, "b": 3})]
    sources = {name: {"x": np.arange(100 * i, 100 * i + 100)} for i, name in enumerate("ab")}
    with feedline.Feed(feedline.Mixture(sources, phases), 16, jax.devices()[0]) as feed:
        assert_same(found, [jax.tree.map(np.asarray, next(feed)) for _ in found])
    assert all("must call feed.set_weights after the same batch" in each and "order" in each for each in told)


def items(lane, count):
    return grain.MapDataset.range(1000)[lane::count].map(lambda i: {"row": np.int32(i)}).to_iter_dataset()


@case(on=lambda: TOPOLOGIES[:1])
def moves_lanes(here):
    """The error of a move that would exchange the lanes of two processes, and the batch after it."""
    with feedline.Feed(feedline.Lanes(items, 2), 8, sharding_of("data", here.devices)) as feed:
        next(feed)
        swapped = NamedSharding(Mesh(np.array(here.devices[::-1]), ("data",)), P("data"))
        with pytest.raises(ValueError, match="iterators stay in their processes") as raised:
            feed.move(swapped)
        return str(raised.value), next(feed)["row"]


def test_a_stream_whose_lanes_would_change_their_process_stays(outcome):
    told, rows = outcome(TOPOLOGIES[0], moves_lanes)
    assert "would be read by ((1,), (0,)), not ((0,), (1,))" in told
    assert sorted(rows.tolist()) == list(range(8, 16))
