"""Runs that change everything at each resume deliver the rows of an uninterrupted run: none lost, none twice.

A journey is such a run. Each of its legs has its own mesh, batch size, prefetch and processes. A plan and
threads stand in for a process. The rows that all processes supply are put together, and compared with the epochs'
orders in succession, or with the lanes' items taken in turn.
"""

import functools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from local_forms import planned

from feedline._src.loader.random_access import RandomAccess
from feedline._src.loader.staging import BatchBuffers
from feedline._src.loader.streams import Stream
from feedline._src.options import Blocks, Order, Reading, Settings
from feedline._src.order.epoch import SingleOrder, rows_at
from feedline._src.order.schedule import Cursor, Schedule
from feedline._src.prefetch.watch import Watch
from feedline._src.run import run_over
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.as_source import as_source
from feedline._src.sources.lanes import FirstItem, Lanes
from feedline._src.sources.records import RecordSource

WIDE, STRIDE, PATIENCE_S = 8, 1000, 30
CUTS = {"row": P("model"), "wide": P("data", "model")}  # the two leaves are sharded along different axes


class Leg(NamedTuple):
    """The settings of a run until its next interruption."""

    mesh: Mesh
    processes: list[list[jax.Device]]
    size: int
    threads: int
    prefetch: int
    batches: int

    def planned(self, spec, remainder, lanes):
        """The plan, and the form of each process's part."""
        shardings = {name: NamedSharding(self.mesh, CUTS[name]) for name in spec}
        return planned(
            spec, self.size, shardings, self.processes, lanes=lanes, remainder=remainder, prefetch=self.prefetch
        )


@st.composite
def legs(draw):
    data = draw(st.sampled_from([1, 2, 4, 8]))
    order = draw(st.permutations(range(8)))
    mesh = Mesh(np.array(jax.devices())[order].reshape(data, 8 // data), ("data", "model"))
    borders = sorted(draw(st.sets(st.integers(1, 7), max_size=4)))
    owners = np.array(draw(st.permutations(range(8))))
    processes = [[jax.devices()[i] for i in part] for part in np.split(owners, borders)]
    size, threads, prefetch = 8 * draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return Leg(mesh, processes, size, threads, prefetch, draw(st.integers(1, 4)))


JOURNEYS = st.lists(legs(), min_size=2, max_size=4)


class Together:
    """Exchanges what processes of a leg say at a place. They are threads here, and each waits for the others."""

    def __init__(self, processes):
        self._said = [None] * processes
        self._all = threading.Barrier(processes, timeout=PATIENCE_S)
        self.end = self._all.abort

    def gather(self, process, place, said, failed, stopped):
        self._said[process] = place, json.dumps(said)
        self._all.wait()
        found = list(self._said)
        self._all.wait()  # before any process says something at the next place
        assert {where for where, _ in found} == {place}
        return [json.loads(said) for _, said in found]


def travel(journey, spec, remainder, open_sources, lane_count=0):
    """Take a journey. Returns the delivered batches, their sizes, and the cursor after the last batch.

    `open_sources(leg, plan, forms, cursor, lanes, together)` gives each process's host batches from `cursor` on.
    """
    cursor, lanes, delivered, sizes = Cursor(0, 0), {}, [], []
    for leg in journey:
        plan, forms = leg.planned(spec, remainder, lane_count)
        together = Together(len(forms))
        sources = open_sources(leg, plan, forms, cursor, lanes, together)
        numbers, watch = Settings(leg.threads, 0, 2, leg.prefetch), Watch(Reading())
        keep = lambda host: host  # noqa: E731  batches stay on the host
        runs = [run_over(batches, keep, numbers, watch) for batches in sources]
        for run in runs:
            run.start()
        with ThreadPoolExecutor(len(runs)) as pool:
            for _ in range(leg.batches):
                found = list(pool.map(lambda run: run.take(), runs))
                (after,) = {one.after for one in found}  # all processes have the same cursor
                held = [item for one in found for item in (one.lanes or {}).items()]
                assert all(dict(held)[lane] == state for lane, state in held)
                cursor, lanes = Cursor(*json.loads(json.dumps(after))), json.loads(json.dumps(dict(held)))
                delivered.append(put_together(leg.size, forms, [one.leaves for one in found], remainder))
                sizes.append(leg.size)
        together.end()
        for run in runs:
            run.close()
        assert not any(run.join(PATIENCE_S) for run in runs)
    return delivered, sizes, cursor


def put_together(size, forms, found, remainder):
    """The valid rows of a global batch, put together from what each process supplies. Replicas must agree."""
    row, wide = np.full(size, -1), np.full((size, WIDE), -1)
    valid = np.ones(size, bool)
    for form, leaves in zip(forms, found, strict=True):
        narrow_plan, wide_plan = form.part.of_rows
        narrow, *mask, columns = leaves
        assert len(mask) == (remainder == "pad")
        for whole, here, values in [
            (row, narrow_plan.rows, narrow),
            (wide, np.ix_(wide_plan.rows, np.arange(WIDE)[wide_plan.columns[0]]), columns),
            *((valid, narrow_plan.rows, told) for told in mask),
        ]:
            known = whole[here]
            assert ((known == values) | (known == -1) | (whole is valid)).all()
            whole[here] = values
    np.testing.assert_array_equal(wide, np.repeat(row[:, None], WIDE, axis=1))
    return row[valid].tolist()


def assert_uninterrupted(delivered, sizes, run, remainder):
    """Check that batches are the rows of `run`, [(epoch, row)], without gaps; "drop" skips the end of an epoch."""
    at = 0
    for batch, size in zip(delivered, sizes, strict=True):
        left = sum(epoch == run[at][0] for epoch, _ in run[at:])
        if remainder == "drop" and left < size:
            at += left
        assert batch == [row for _, row in run[at : at + len(batch)]]
        at += len(batch)


def values_of(n):
    return {
        "row": np.arange(n, dtype=np.int32),
        "wide": np.repeat(np.arange(n, dtype=np.int32)[:, None], WIDE, axis=1),
    }


def _record(i):
    return {"row": np.int32(i), "wide": np.full(WIDE, i, np.int32)}


SOURCES = {
    "columns": lambda n: ArraySource([values_of(n)]),
    "records": lambda n: RecordSource(grain.MapDataset.range(n).map(_record)),
}


@pytest.mark.slow
@settings(max_examples=150)
@given(
    n=st.integers(24, 90),
    source=st.sampled_from(sorted(SOURCES)),
    remainder=st.sampled_from(["drop", "pad", "wrap"]),
    shuffle=st.sampled_from([True, False, Blocks(rows=5, window=3)]),
    journey=JOURNEYS,
)
def test_rows_with_random_access(n, source, remainder, shuffle, journey):
    rows, order = as_source(SOURCES[source](n)), SingleOrder(Order(3, shuffle), n)

    def open_sources(leg, plan, forms, cursor, lanes, together):
        schedule, numbers, watch = (
            Schedule(n, leg.size, remainder, None),
            Settings(leg.threads, 0, 2, leg.prefetch),
            Watch(Reading()),
        )
        ways = [RandomAccess(rows, order, form, BatchBuffers(form, 3), schedule) for form in forms]
        return [way.open(cursor, None, numbers, watch) for way in ways]

    delivered, sizes, cursor = travel(journey, rows.spec, remainder, open_sources)
    epochs = range(cursor.epoch + 2)  # one epoch beyond the last batch
    places = [(epoch, row) for epoch in epochs for row in rows_at(Order(3, shuffle), n, epoch, np.arange(n))]
    assert_uninterrupted(delivered, sizes, places, remainder)


def lanes_of(lengths):
    """Lanes with these numbers of records, of which every fourth is left out."""

    def make_lane(lane, count):
        records = grain.MapDataset.range(lane * STRIDE, lane * STRIDE + lengths[lane]).map(_record)
        return records.to_iter_dataset(grain.ReadOptions(0, 0)).filter(lambda record: record["row"] % 4 < 3)

    return Lanes(make_lane, len(lengths))


@st.composite
def streams(draw):
    """Lengths of lanes, whose number divides every batch size, and a remainder that this number allows."""
    count = draw(st.sampled_from([1, 2, 4, 8]))
    remainder = draw(st.sampled_from(["drop", "pad", "wrap"][: 3 if count == 1 else 2]))
    least = 32 // count if remainder == "drop" else 0  # enough for the largest batch in every epoch
    lengths = st.lists(st.integers(least, least + 12), min_size=count, max_size=count)
    return draw(lengths.filter(any)), remainder


def assert_in_turn(delivered, sizes, lanes, remainder):
    """Check that a batch of B rows holds the next B places of the lanes taken in turn, sorted by lane.

    An epoch ends with the longest lane; with "drop", when the first lane lacks its share of a batch.
    """
    count = len(lanes)
    places = {i * count + lane: row for lane, rows in enumerate(lanes) for i, row in enumerate(rows)}
    at = 0
    for batch, size in zip(delivered, sizes, strict=True):
        left = [len(rows) - at // count for rows in lanes]
        if min(left) < size // count if remainder == "drop" else max(left) <= 0:
            at = 0
        in_turn = [range(at + lane, at + size, count) for lane in range(count)]
        assert batch == [places[place] for lane in in_turn for place in lane if place in places]
        at += size


@pytest.mark.slow
@settings(max_examples=150)
@given(stream=streams(), journey=JOURNEYS)
def test_streams_and_lanes(stream, journey):
    lengths, remainder = stream
    lanes = lanes_of(lengths)
    item = FirstItem(lanes).item

    def open_sources(leg, plan, forms, cursor, states, together):
        definitions = [
            Stream(
                source, source.order_for(None), form, BatchBuffers(form, 3), plan, None,
                functools.partial(together.gather, process) if plan.agrees_on_ends else None,
            )
            for process, form in enumerate(forms)
            for source in [FirstItem(lanes)]
        ]  # fmt: skip
        numbers, watch = Settings(0, 0, 1, leg.prefetch), Watch(Reading())
        return [one.open(cursor, states, numbers, watch) for one in definitions]

    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), item)
    delivered, sizes, cursor = travel(journey, spec, remainder, open_sources, lanes.count)
    alone = [[int(item["row"]) for item in lanes.make_lane(lane, lanes.count)] for lane in range(lanes.count)]
    if lanes.count == 1:
        places = [(epoch, row) for epoch in range(cursor.epoch + 2) for row in alone[0]]
        assert_uninterrupted(delivered, sizes, places, remainder)
    if remainder != "wrap":
        assert_in_turn(delivered, sizes, alone, remainder)
