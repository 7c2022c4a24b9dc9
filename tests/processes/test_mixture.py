"""A mixture with phases, in batches whose size changes: the same on any topology, and after a resume."""

import itertools
import json

import jax
import mixture_oracle as oracle
import numpy as np
import pytest

import feedline

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .layouts import sharding_of
from .sources import ROWS
from .values import assert_same

pytestmark = pytest.mark.slow

CUTS = {"a": slice(20), "b": slice(20, 37), "c": slice(37, 42)}
WEIGHTS = [(0, {"a": 7, "b": 2, "c": 1}), (50, {"a": 1, "b": 1, "c": 1})]
PHASES = [(0, (7, 2, 1)), (50, (1, 1, 1))]
SIZES = [(0, 16), (3, 32), (5, 8)]
LAYOUTS = ["permuted", "sequence", "columns"]


def mixture():
    return feedline.Mixture(
        {name: {key: leaf[cut] for key, leaf in ROWS.items()} for name, cut in CUTS.items()}, WEIGHTS
    )


def whole(count):
    """The first `count` rows of the run, as columns."""
    order = mixture().order
    run = oracle.run(order.lengths, order.orders, PHASES, "endless", count)
    rows = [order.firsts[source] + row for _, source, _, row in run]
    return {
        **{key: leaf[rows] for key, leaf in ROWS.items()},
        "source": np.array([each[1] for each in run], np.int32),
    }


def sharding(layout, here):
    found = sharding_of(layout, here.devices)
    return {**found, "source": found["y"]} if isinstance(found, dict) else found


@case(LAYOUTS)
def seven_batches(here, layout):
    """Batches of three sizes over two phases, and the state after each."""
    with feedline.Feed(mixture(), SIZES, sharding(layout, here)) as feed:
        states, delivered = [feed.get_state()], []
        for _, batch in zip(range(7), feed, strict=False):
            delivered.append(batch)
            states.append(feed.get_state())
        return {"batches": delivered, "states": states, "rows": [feed.rows_of(state) for state in states]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_of_a_mixture_do_not_depend_on_processes(outcome, layout):
    ends = np.cumsum([0, 16, 16, 16, 32, 32, 8, 8])
    rows = whole(ends[-1])
    expected = [{key: leaf[a:b] for key, leaf in rows.items()} for a, b in itertools.pairwise(ends)]
    alone = outcome(ALONE, seven_batches, layout)
    for topology in (ALONE, *TOPOLOGIES):
        found = outcome(topology, seven_batches, layout)
        assert_same(found["batches"], expected)
        assert_same(found["states"], alone["states"])
        assert_same(found["rows"][:-1], [batch["y"].astype(np.int64) for batch in expected])


@case()
def a_leg_of_a_mixture(here):
    """Some batches from where the topology before this one stopped."""
    before = here.before()
    with feedline.Feed(mixture(), 8 * jax.process_count(), sharding("permuted", here)) as feed:
        if before is not None:
            feed.set_state(json.loads(before["state"]))
        delivered = [batch for _, batch in zip(range(3), feed, strict=False)]
        return {"batches": delivered, "state": json.dumps(feed.get_state())}


def test_a_mixture_is_resumed_on_other_topologies(outcome):
    legs = [outcome(topology, a_leg_of_a_mixture) for topology in (*TOPOLOGIES, ALONE)]
    rows = jax.tree.map(
        lambda *leaves: np.concatenate(leaves), *[batch for leg in legs for batch in leg["batches"]]
    )
    assert_same([rows], [whole(3 * 8 * (2 + 4 + 2 + 1))])
