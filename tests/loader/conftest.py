"""A mesh of the eight CPU devices, and what a feed delivers as NumPy."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@pytest.fixture(scope="session")
def sharding():
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))


@pytest.fixture(scope="session")
def delivered():
    """Every batch of one pass, as trees of NumPy arrays."""

    def run(feed):
        with feed:
            return [jax.tree.map(np.asarray, batch) for batch in feed]

    return run
