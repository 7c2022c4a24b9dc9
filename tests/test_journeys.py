"""Runs that change everything at each resume deliver what an uninterrupted run delivers: none lost, none twice.

A leg of a journey has a mesh, a batch size and processes of its own. Each process is stood for by its plan:
what all of them supply is put together, and compared with the epochs' orders one after the other.
"""

import json
from typing import NamedTuple

import grain
import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from feedline.loader.arrays import ArraySource
from feedline.loader.buffers import BatchBuffers
from feedline.loader.form import LocalForm
from feedline.loader.reading import HostBatches
from feedline.loader.recipe import Recipe
from feedline.loader.records import RecordSource
from feedline.loader.spec import RowSpec
from feedline.options import Blocks, Order, Reading
from feedline.order import rows_at
from feedline.placement.plan import plan_leaf, union_of_rows
from feedline.schedule import Cursor, Schedule

WIDE = 8
CUTS = {"row": P("model"), "wide": P("data", "model")}  # the leaves of a row are cut along other axes


class Leg(NamedTuple):
    """What holds until the next interruption."""

    mesh: Mesh
    processes: list[list[jax.Device]]
    size: int
    threads: int
    batches: int

    def plans(self, spec):
        """For each process, what it supplies of each leaf."""
        shapes = {name: (self.size, *leaf.shape) for name, leaf in spec.items()}
        shardings = {name: NamedSharding(self.mesh, CUTS[name]) for name in spec}
        return [
            [plan_leaf(shardings[name], shapes[name], owned, name) for name in spec] for owned in self.processes
        ]


@st.composite
def legs(draw):
    data = draw(st.sampled_from([1, 2, 4, 8]))
    order = draw(st.permutations(range(8)))
    mesh = Mesh(np.array(jax.devices())[order].reshape(data, 8 // data), ("data", "model"))
    borders = sorted(draw(st.sets(st.integers(1, 7), max_size=4)))
    owners = np.array(draw(st.permutations(range(8))))
    processes = [[jax.devices()[i] for i in part] for part in np.split(owners, borders)]
    return Leg(mesh, processes, 8 * draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 4)))


JOURNEYS = st.lists(legs(), min_size=2, max_size=4)


def form_of(spec, plans, remainder):
    rows = RowSpec.of(spec)
    mask = plans[0].rows if remainder == "pad" else None
    return LocalForm(rows, None, 0, rows, plans, union_of_rows(plans), False, mask, 1)


def put_together(size, plans, found, remainder):
    """The rows of a global batch, and which are valid, from what each process supplies; its replicas agree."""
    row, wide = np.full(size, -1), np.full((size, WIDE), -1)
    valid = np.ones(size, bool)
    for (narrow_plan, wide_plan), leaves in zip(plans, found, strict=True):
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
    """Delivered rows are the run's (epoch, row), without a gap; "drop" skips what does not fill a batch."""
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


@settings(max_examples=150)
@given(
    n=st.integers(24, 90),
    source=st.sampled_from(sorted(SOURCES)),
    remainder=st.sampled_from(["drop", "pad", "wrap"]),
    shuffle=st.sampled_from([True, False, Blocks(rows=5, window=3)]),
    journey=JOURNEYS,
)
def test_rows_with_random_access(n, source, remainder, shuffle, journey):
    rows, order = SOURCES[source](n), Order(3, shuffle)
    cursor, delivered, sizes = Cursor(0, 0), [], []
    for leg in journey:
        plans = leg.plans(rows.spec)
        schedule = Schedule(n, leg.size, remainder, None)
        recipes = [Recipe(rows, order, schedule, form_of(rows.spec, own, remainder)) for own in plans]
        reading = Reading(threads=leg.threads)
        runs = [
            HostBatches(recipe, BatchBuffers(recipe.form, 3), cursor, reading, lambda: None) for recipe in recipes
        ]
        for _ in range(leg.batches):
            found = [next(run) for run in runs]
            assert len({one.after for one in found}) == 1  # a process's state is that of all
            cursor = Cursor(*json.loads(json.dumps(found[0].after)))
            delivered.append(put_together(leg.size, plans, [one.leaves for one in found], remainder))
            sizes.append(leg.size)
        for run in runs:
            run.close()
    epochs = range(cursor.epoch + 2)  # one more: the run goes on where the last batch ended
    places = [(epoch, row) for epoch in epochs for row in rows_at(order, n, epoch, np.arange(n)).tolist()]
    assert_uninterrupted(delivered, sizes, places, remainder)
