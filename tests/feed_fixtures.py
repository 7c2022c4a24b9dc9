"""Fixtures: a sharding over the eight CPU devices, batches as NumPy arrays, checks of threads and of sources."""

import threading

import jax
import numpy as np
import pytest
from background import left_behind
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rows_read import reads_as


@pytest.fixture
def no_thread_is_left():
    """No thread that the test starts outlives it."""
    before = threading.enumerate()
    yield
    assert left_behind(before) == []


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


@pytest.fixture(scope="session")
def is_source_of():
    """Check that a source has the length, spec and rows of the tree of arrays that it was written from."""

    def check(source, whole):
        assert len(source) == len(jax.tree.leaves(whole)[0])
        assert jax.tree.map(lambda s: (s.shape, s.dtype), source.spec) == jax.tree.map(
            lambda a: (a.shape[1:], a.dtype), whole
        )
        reads_as(source, lambda rows: jax.tree.map(lambda leaf: leaf[rows], whole))

    return check
