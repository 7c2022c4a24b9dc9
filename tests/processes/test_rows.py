"""Same rows, anywhere: what a feed delivers does not depend on processes, devices or mesh."""

import jax
import numpy as np
import pytest

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .layouts import LAYOUTS
from .sources import SOURCES, batches
from .values import assert_same

pytestmark = pytest.mark.slow

SIZE, EPOCHS = 16, 2
REMAINDERS = ["drop", "pad", "wrap"]


def form_of(batch):
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), batch)


def one_of_three(layout, source, remainder):
    """One topology for each combination, so that each pair of layout, source and remainder runs on all of them."""
    turn = list(LAYOUTS).index(layout) + list(SOURCES).index(source) + REMAINDERS.index(remainder)
    return [TOPOLOGIES[turn % len(TOPOLOGIES)]]


@case(LAYOUTS, SOURCES, REMAINDERS, on=one_of_three)
def a_pass(here, layout, source, remainder):
    """All batches of a pass, the states before and after each, and the rows that `rows_of` returns for each."""
    with SOURCES[source].feed(here, layout, SIZE, epochs=EPOCHS, remainder=remainder) as feed:
        delivered, states = [], [feed.get_state()]
        for batch in feed:
            assert form_of(batch) == form_of(feed.spec)
            delivered.append(batch)
            states.append(feed.get_state())
        expected_rows = [] if SOURCES[source].streams else [feed.rows_of(state) for state in states[:-1]]
    return {"batches": delivered, "states": states, "expected_rows": expected_rows}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_global_batches_are_slices_of_epochs(outcome, layout, source, remainder):
    expected = batches(SOURCES[source], EPOCHS, SIZE, remainder)
    for topology in (ALONE, *one_of_three(layout, source, remainder)):
        assert_same(outcome(topology, a_pass, layout, source, remainder)["batches"], expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_steps_and_states_equal_those_of_one_process(outcome, layout, source, remainder):
    alone = outcome(ALONE, a_pass, layout, source, remainder)["states"]
    steps = len(batches(SOURCES[source], EPOCHS, SIZE, remainder))
    assert [state["step"] for state in alone] == list(range(steps + 1))
    for topology in one_of_three(layout, source, remainder):
        assert_same(outcome(topology, a_pass, layout, source, remainder)["states"], alone)


@pytest.mark.parametrize("source", ["memory", "npy", "transform", "encoded", "records"])
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_rows_of_a_state_are_the_rows_of_the_next_batch(outcome, source, remainder):
    for topology in (ALONE, *one_of_three("permuted", source, remainder)):
        found = outcome(topology, a_pass, "permuted", source, remainder)
        # in every source, y is the row's index
        held = [np.where(batch.get("valid", True), batch["y"], -1) for batch in found["batches"]]
        np.testing.assert_array_equal(found["expected_rows"], held)


@case(LAYOUTS, REMAINDERS, on=lambda layout, remainder: one_of_three(layout, "npy", remainder))
def three_steps_a_call(here, layout, remainder):
    """Batches that are delivered three at once, and the state after them."""
    with SOURCES["npy"].feed(here, layout, SIZE, remainder=remainder, steps_per_call=3) as feed:
        delivered = [next(feed) for _ in range(2)]
        assert form_of(delivered[0]) == form_of(feed.spec)
        return {"batches": delivered, "state": feed.get_state()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("remainder", REMAINDERS)
def test_batches_delivered_at_once_are_those_delivered_one_by_one(outcome, layout, remainder):
    expected = batches(SOURCES["npy"], 2 * EPOCHS, SIZE, remainder)[:6]
    stacked = [jax.tree.map(lambda *leaves: np.stack(leaves), *expected[i : i + 3]) for i in (0, 3)]
    alone = outcome(ALONE, three_steps_a_call, layout, remainder)
    for topology in (ALONE, *one_of_three(layout, "npy", remainder)):
        found = outcome(topology, three_steps_a_call, layout, remainder)
        assert_same(found["batches"], stacked)
        assert found["state"] == alone["state"]
