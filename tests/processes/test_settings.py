"""A feed that was built under `jax.enable_x64` delivers 64 bits on any number of processes."""

import jax
import numpy as np
import pytest

import feedline

from .cases import case
from .launch import ALONE, TOPOLOGIES
from .layouts import sharding_of

pytestmark = pytest.mark.slow

WIDE = 2**40 + np.arange(32)


@case(["feed", "drop-in"])
def wide(here, way):
    """All batches of an epoch, made in the context and taken outside of it."""
    sharding = sharding_of("data", here.devices)
    with jax.enable_x64(True):
        if way == "feed":
            batches = feedline.Feed({"n": WIDE}, 16, sharding, order=feedline.Order(shuffle=False), epochs=1)
        else:
            rows = feedline.local_rows(sharding, 16)
            batches = feedline.prefetch_to_mesh(({"n": WIDE[start + rows]} for start in (0, 16)), sharding)
    with batches:
        return list(batches)


@pytest.mark.parametrize("topology", [ALONE, *TOPOLOGIES], ids=str)
@pytest.mark.parametrize("way", ["feed", "drop-in"])
def test_64_bit_values_are_delivered(outcome, way, topology):
    found = outcome(topology, wide, way)
    assert [batch["n"].dtype for batch in found] == [np.int64] * 2
    assert np.concatenate([batch["n"] for batch in found]).tolist() == WIDE.tolist()
