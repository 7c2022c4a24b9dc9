"""Processes that supply the same rows but read different bytes raise during training."""

import grain
import jax
import numpy as np
import pytest

import feedline

from .cases import case
from .launch import TOPOLOGIES, TWO_OR_FOUR
from .layouts import sharding_of
from .values import PerProcess

pytestmark = pytest.mark.slow

ROWS, SIZE = 160, 16
BAD = 53
"""A row that one process reads differently: row 5 of batch 3."""
ODD = 1


def row(i):
    wrong = i == BAD and jax.process_index() == ODD
    return {"x": np.full(3, i, np.float32), "y": np.int32(-1 if wrong else i)}


def fed(here, every, layout=None, dataset_row=row, epochs=1, steps=1):
    """How many batches this process got, and the error that ended its feed: the process that it names, its text.

    Without a `layout`, two processes supply the same rows.
    """
    layout = layout or ("model" if jax.process_count() == 4 else "model_across")
    dataset = grain.MapDataset.range(ROWS).map(dataset_row)
    sharding = sharding_of(layout, here.devices)
    reading = feedline.Reading(threads=0, check_replicas_every=every)
    with feedline.Feed(dataset, SIZE, sharding, epochs=epochs, reading=reading, steps_per_call=steps) as feed:
        try:
            return PerProcess((sum(1 for _ in feed), None, None))
        except feedline.ProcessError as error:
            return PerProcess((feed.get_state()["step"], error.process, str(error)))


@case(["1", "5"])
def checked(here, steps):
    return fed(here, every=1, steps=int(steps))


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_error_names_the_other_replica_the_leaf_and_the_rows(outcome, topology):
    found = outcome(topology, checked, "1")
    pair, rest = found[:2], found[2:]
    assert all(one == (ROWS // SIZE, None, None) for one in rest)
    failed = [(process, one) for process, one in enumerate(pair) if one[2] is not None]
    assert failed  # one of them, or both
    for process, (batches, blamed, told) in failed:
        assert batches == 3
        assert blamed == 1 - process
        assert f"processes {process} and {1 - process} differ in batch['y'], first among rows 5 to 5 " in told
        assert "of the batch that ends at epoch 0, position 64. " in told


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_error_names_the_batch_among_those_of_a_call(outcome, topology):
    told = [told for _, _, told in outcome(topology, checked, "5") if told is not None]
    assert told
    for each in told:
        assert "first among batches 3 to 3 of the call that ends at epoch 0, position 80. " in each


UNCHECKED = {
    "between_checks": {"every": 3},
    "off": {"every": 0},
    "without_replicas": {"every": 1, "layout": "data"},
}


@case(UNCHECKED)
def not_checked(here, why):
    return fed(here, **UNCHECKED[why])


@pytest.mark.parametrize("topology", TWO_OR_FOUR, ids=str)
@pytest.mark.parametrize("why", UNCHECKED)
def test_batches_that_are_not_checked_are_delivered(outcome, topology, why):
    """Batch 3 is the fourth batch; the third and the sixth are checked."""
    assert outcome(topology, not_checked, why) == [(ROWS // SIZE, None, None)] * topology.processes


@case()
def agreeing(here):
    """More checks of equal rows than the service keeps. A process may be far ahead of the others."""
    same = lambda i: {"x": np.arange(3, dtype=np.float32) + i}  # noqa: E731
    return fed(here, every=1, dataset_row=same, epochs=4)


@pytest.mark.parametrize("topology", TWO_OR_FOUR, ids=str)
def test_equal_rows_pass(outcome, topology):
    assert outcome(topology, agreeing) == [(4 * ROWS // SIZE, None, None)] * topology.processes
