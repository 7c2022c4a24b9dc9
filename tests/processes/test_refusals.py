"""Invalid arguments are an error in every process at once; no process waits for another."""

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
from .values import PerProcess, Shards, assert_same, global_array

pytestmark = pytest.mark.slow

SIZE = 16


def refusal(*arguments):
    """The message of the error that a feed with these arguments raises."""
    with pytest.raises(ValueError, match="batch") as raised:
        feedline.Feed(*arguments)
    return str(raised.value)


@case()
def indivisible(here):
    return refusal(ROWS, SIZE + 1, sharding_of("data", here.devices))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_every_process_refuses_a_batch_that_the_mesh_cannot_divide(outcome, topology):
    shards = topology.processes * topology.devices
    told = outcome(topology, indivisible)
    assert f"the batch size must be a multiple of the {shards} shards" in told
    assert f"got {SIZE + 1}; {SIZE} or {SIZE + shards} would work" in told


@case()
def left_out(here):
    """The batches on a mesh of the first half of the devices, or the error in a process without such a device."""
    sharding = NamedSharding(Mesh(np.array(here.devices[: len(here.devices) // 2]), ("data",)), P("data"))
    if not sharding.addressable_devices:
        return PerProcess(refusal(ROWS, SIZE, sharding))
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
        assert "this process owns no device of the sharding's mesh" in told
