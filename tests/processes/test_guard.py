"""A feed works under `jax.transfer_guard`, with which a user finds implicit transfers in the loop."""

import jax
import numpy as np
import pytest
from background import PATIENCE_S, spawn

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .sources import SOURCES, batches
from .values import assert_same

pytestmark = pytest.mark.slow

SIZE = 16
PREFETCH = {"synchronous": 0, "prefetched": 2}


@case(PREFETCH, ["data", "sequence"])
def guarded(here, prefetch, layout):
    """All batches of an epoch, while implicit transfers are forbidden in every thread."""
    before = jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow")
    try:
        with pytest.raises(Exception, match="isallowed host-to-device transfer"):
            jax.numpy.ones(3) + np.ones(3)
        with SOURCES["memory"].feed(here, layout, SIZE, epochs=1, prefetch=PREFETCH[prefetch]) as feed:
            return list(feed)
    finally:
        jax.config.update("jax_transfer_guard", before)


@pytest.mark.parametrize("topology", [ALONE, *TOPOLOGIES], ids=str)
@pytest.mark.parametrize("layout", ["data", "sequence"])
@pytest.mark.parametrize("prefetch", PREFETCH)
def test_batches_are_delivered_where_transfers_are_forbidden(outcome, prefetch, layout, topology):
    found = outcome(topology, guarded, prefetch, layout)
    assert_same(found, batches(SOURCES["memory"], 1, SIZE, "drop"))


@case(PREFETCH, on=lambda prefetch: [TOPOLOGIES[0]])
def in_one_thread(here, prefetch):
    """All batches of an epoch, each summed by a jitted step, while only this thread may start computations."""
    total = jax.jit(lambda batch: jax.tree.map(jax.numpy.sum, batch))
    with (
        SOURCES["memory"].feed(here, "data", SIZE, epochs=1, prefetch=PREFETCH[prefetch]) as feed,
        jax.thread_guard(True),
    ):
        found = []
        for batch in feed:
            jax.block_until_ready(total(batch))
            found.append(batch)
        with pytest.raises(Exception, match="thread"):
            spawn(lambda: total(found[0])).result(PATIENCE_S)
        return found


@pytest.mark.parametrize("prefetch", PREFETCH)
def test_batches_are_delivered_where_one_thread_may_compute(outcome, prefetch):
    found = outcome(TOPOLOGIES[0], in_one_thread, prefetch)
    assert_same(found, batches(SOURCES["memory"], 1, SIZE, "drop"))
