"""A run that changes topology and batch size again and again delivers each row of the run once, in order."""

import json

import jax
import numpy as np
import pytest

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .sources import SOURCES, batches
from .values import assert_same

pytestmark = pytest.mark.slow

LEGS = [*TOPOLOGIES, ALONE]
STEPS = 3


@case(SOURCES)
def a_leg(here, source):
    """A few batches from where the topology before this one stopped, with another batch size."""
    before = here.before()
    with SOURCES[source].feed(here, "permuted", 8 * jax.process_count(), remainder="wrap") as feed:
        if before is not None:
            feed.set_state(json.loads(before["state"]))
        delivered = [batch for _, batch in zip(range(STEPS), feed, strict=False)]
        return {"batches": delivered, "state": json.dumps(feed.get_state())}


@pytest.mark.parametrize("source", SOURCES)
def test_a_state_is_resumed_on_other_topologies_and_batch_sizes(outcome, source):
    legs = [outcome(topology, a_leg, source) for topology in LEGS]
    delivered = [batch for leg in legs for batch in leg["batches"]]
    rows = jax.tree.map(lambda *leaves: np.concatenate(leaves), *delivered)
    count = len(rows["y"])
    assert count == STEPS * 8 * (2 + 4 + 2 + 1)
    epochs = -(-count // len(SOURCES[source].epoch(0)["y"]))
    assert_same([rows], batches(SOURCES[source], epochs, count, "wrap")[:1])
    assert [json.loads(leg["state"])["step"] for leg in legs] == [STEPS, 2 * STEPS, 3 * STEPS, 4 * STEPS]
