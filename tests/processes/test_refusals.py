"""A process without a device of the mesh gets an error, and does not wait for the others."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import feedline

from .cases import case
from .launch import TOPOLOGIES
from .sources import ORDER, ROWS, SOURCES, batches
from .values import PerProcess, Shards, assert_same, global_array

pytestmark = pytest.mark.slow

SIZE = 16


@case()
def left_out(here):
    """The batches on a mesh of the first half of the devices, or the error in a process without such a device."""
    sharding = NamedSharding(Mesh(np.array(here.devices[: len(here.devices) // 2]), ("data",)), P("data"))
    if not sharding.addressable_devices:
        with pytest.raises(ValueError, match="owns no device") as raised:
            feedline.Feed(ROWS, SIZE, sharding)
        return PerProcess(str(raised.value))
    with feedline.Feed(ROWS, SIZE, sharding, order=ORDER, epochs=1) as feed:
        return PerProcess([jax.tree.map(Shards.of, batch) for batch in feed])


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_a_process_without_a_device_of_the_mesh_gets_an_error_and_the_others_batches(outcome, topology):
    found = outcome(topology, left_out)
    half = topology.processes // 2
    fed = [jax.tree.map(lambda *parts: global_array(parts), *batch) for batch in zip(*found[:half], strict=True)]
    assert_same(fed, batches(SOURCES["memory"], 1, SIZE, "drop"))
    assert len(found[half:]) == half
    for told in found[half:]:
        assert "owns no device of the sharding's mesh" in told
