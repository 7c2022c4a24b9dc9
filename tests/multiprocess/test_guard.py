"""A user who forbids transfers, to find those that slow down the loop, can still be fed."""

import jax
import numpy as np
import pytest

import feedline

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .layouts import sharding_of
from .sources import SOURCES, batches
from .values import assert_same

pytestmark = pytest.mark.slow

SIZE = 16
PREFETCH = {"synchronous": 0, "prefetched": 2}


@case(PREFETCH, ["data", "sequence"])
def guarded(here, prefetch, layout):
    """All batches of an epoch, while no thread may transfer anything that it does not ask for by name."""
    sharding = sharding_of(layout, here.devices)
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with pytest.raises(Exception, match="isallowed host-to-device transfer"):
            jax.numpy.ones(3) + np.ones(3)
        with feedline.Feed(
            **SOURCES["memory"].arguments(here.folder),
            batch_size=SIZE,
            sharding=sharding,
            epochs=1,
            prefetch=PREFETCH[prefetch],
        ) as feed:
            return list(feed)
    finally:
        jax.config.update("jax_transfer_guard", before)


@pytest.mark.parametrize("topology", [ALONE, *TOPOLOGIES], ids=str)
@pytest.mark.parametrize("layout", ["data", "sequence"])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_batches_arrive_where_transfers_are_forbidden(outcome, prefetch, layout, topology):
    found = outcome(topology, guarded, prefetch, layout)
    assert_same(found, batches(SOURCES["memory"], 1, SIZE, "drop"))
