"""The part of each batch that a process supplies, in a feed and with `prefetch_to_mesh`."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import feedline

from .cases import case
from .launch import ALONE, TOPOLOGIES, Topology
from .layouts import LAYOUTS, sharding_of
from .sources import SOURCES, batches
from .values import PerProcess, assert_same

pytestmark = pytest.mark.slow

SIZE = 16


@case(["data", "permuted", "model", "model_across", "flattened"])
def supplied(here, layout):
    """The rows of `local_rows`, and the rows that a feed places on this process's devices."""
    sharding = sharding_of(layout, here.devices)
    numbered = np.arange(SIZE)
    with feedline.Feed(numbered, SIZE, sharding, order=feedline.Order(shuffle=False), prefetch=0) as feed:
        placed = [np.asarray(shard.data) for shard in next(feed).addressable_shards]
    return PerProcess((feedline.local_rows(sharding, SIZE).tolist(), np.unique(placed).tolist()))


BY_HAND = {
    (Topology(2, 2), "data"): ["0-7", "8-15"],
    (Topology(4, 1), "data"): ["0-3", "4-7", "8-11", "12-15"],
    (Topology(2, 4), "data"): ["0-7", "8-15"],
    # order of devices in the mesh: 3 1 2 0 (of 4), 7 3 6 2 5 1 4 0 (of 8)
    (Topology(2, 2), "permuted"): ["4-7 12-15", "0-3 8-11"],
    (Topology(4, 1), "permuted"): ["12-15", "4-7", "8-11", "0-3"],
    (Topology(2, 4), "permuted"): ["2-3 6-7 10-11 14-15", "0-1 4-5 8-9 12-13"],
    (Topology(2, 2), "model"): ["0-7", "8-15"],
    (Topology(4, 1), "model"): ["0-7", "0-7", "8-15", "8-15"],
    (Topology(2, 4), "model"): ["0-7", "8-15"],
    (Topology(2, 2), "model_across"): ["0-15", "0-15"],
    (Topology(4, 1), "model_across"): ["0-7", "8-15", "0-7", "8-15"],
    (Topology(2, 4), "model_across"): ["0-15", "0-15"],
    # the blocks of rows lie on devices 0 2 1 3 (of 4), 0 4 1 5 2 6 3 7 (of 8)
    (Topology(2, 2), "flattened"): ["0-3 8-11", "4-7 12-15"],
    (Topology(4, 1), "flattened"): ["0-3", "8-11", "4-7", "12-15"],
    (Topology(2, 4), "flattened"): ["0-1 4-5 8-9 12-13", "2-3 6-7 10-11 14-15"],
}


@pytest.mark.parametrize(("topology", "layout"), BY_HAND)
def test_local_rows_are_the_rows_that_a_process_supplies(outcome, topology, layout):
    expected = [_ranges(text) for text in BY_HAND[topology, layout]]
    assert outcome(topology, supplied, layout) == [(rows, rows) for rows in expected]


def _ranges(text):
    """The numbers in "0-3 8-11"."""
    bounds = [map(int, part.split("-")) for part in text.split()]
    return [row for first, last in bounds for row in range(first, last + 1)]


@case(LAYOUTS)
def by_hand(here, layout):
    """Each process passes its own rows and columns to `prefetch_to_mesh`, some on one device or several."""
    sharding = sharding_of(layout, here.devices)
    expected = batches(SOURCES["memory"], 1, SIZE, "drop")
    shardings = jax.tree.broadcast(sharding, expected[0])
    local = [jax.tree.map(_part, batch, shardings) for batch in expected]
    by_row = NamedSharding(Mesh(np.array(jax.local_devices()), "x"), PartitionSpec("x"))
    local[1::3], local[2::3] = jax.device_put((local[1::3], local[2::3]), (jax.local_devices()[-1], by_row))
    with jax.set_mesh(Mesh(here.devices, "y")), feedline.prefetch_to_mesh(local, sharding, 0) as placed:
        return list(placed)


def _part(leaf, sharding):
    """The smallest rectangle that covers the shards on this process's devices."""
    mine = np.zeros(leaf.shape, bool)
    for index in sharding.addressable_devices_indices_map(leaf.shape).values():
        mine[index] = True
    axes = range(leaf.ndim)
    owned = [mine.any(axis=tuple(other for other in axes if other != axis)) for axis in axes]
    assert np.array_equal(np.flatnonzero(owned[0]), feedline.local_rows(sharding, len(leaf)))
    return leaf[np.ix_(*owned)]


@pytest.mark.parametrize("topology", [ALONE, *TOPOLOGIES], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefetch_to_mesh_combines_the_parts_of_all_processes(outcome, layout, topology):
    assert_same(outcome(topology, by_hand, layout), batches(SOURCES["memory"], 1, SIZE, "drop"))
