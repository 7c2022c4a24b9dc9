"""Each process changes its settings at its own moments. That changes no batch and no state of any process."""

import random

import jax
import pytest

import feedline
from feedline._src.options import Settings

from .cases import case
from .launch import TOPOLOGIES
from .sources import SOURCES, batches
from .values import PerProcess, assert_same

pytestmark = pytest.mark.slow

SIZE, EPOCHS = 16, 12
LAYOUTS = ["data", "model_across"]


@case(LAYOUTS)
def changed(here, layout):
    """Batches and states of a pass; and after which steps this process changed its settings."""
    draw, changes, delivered, states = random.Random(jax.process_index()), [], [], []
    reading = feedline.Reading(threads="auto", buffer="auto", check_replicas_every=jax.process_count() - 1)
    options = {"epochs": EPOCHS, "remainder": "wrap", "reading": reading, "prefetch": "auto"}
    with SOURCES["memory"].feed(here, layout, SIZE, **options) as feed:
        for batch in feed:
            delivered.append(batch)
            states.append(feed.get_state())
            if draw.random() < 0.4:
                changes.append(len(delivered))
                numbers = draw.randint(1, 4), 0, draw.randint(1, 4), draw.randint(1, 4)
                feed._listener.tuner.proposal = Settings(*numbers)
    return {"batches": delivered, "states": states, "changes": PerProcess(changes)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_processes_that_tune_on_their_own_deliver_the_same_batches(outcome, topology, layout):
    found = outcome(topology, changed, layout)
    assert_same(found["batches"], batches(SOURCES["memory"], EPOCHS, SIZE, "wrap"))
    assert len(set(map(str, found["states"]))) == len(found["batches"])
    assert min(map(len, found["changes"])) > 5
    assert len(set(map(tuple, found["changes"]))) == topology.processes
