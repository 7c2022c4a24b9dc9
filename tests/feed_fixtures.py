"""A mesh of the eight CPU devices, what a feed delivers as NumPy, threads, and what every source must do."""

import pickle
import threading

import jax
import numpy as np
import pytest
from background import at_once, left_behind
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rows_read import read_rows


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
    """Whether a source reads as the tree of whole arrays that it was written from."""

    def same(got, expected):
        jax.tree.map(np.testing.assert_array_equal, got, expected)

    def check(source, whole):
        count = len(jax.tree.leaves(whole)[0])
        assert len(source) == count
        assert jax.tree.map(lambda s: (s.shape, s.dtype), source.spec) == jax.tree.map(
            lambda a: (a.shape[1:], a.dtype), whole
        )
        random = np.random.default_rng(0)
        orders = [np.arange(count), np.arange(count)[::-1], random.permutation(count)]
        orders += [random.integers(0, count, 2 * count), np.array([count - 1]), np.array([], np.int64)]
        for rows in orders:
            for strided in (False, True):
                same(read_rows(source, rows, strided), jax.tree.map(lambda a, rows=rows: a[rows], whole))
        same(read_rows(pickle.loads(pickle.dumps(source)), orders[2]), jax.tree.map(lambda a: a[orders[2]], whole))
        for row in (0, count - 1, -1, -count):
            same(source[row], jax.tree.map(lambda a, row=row: a[row], whole))
        for row in (count, -count - 1):
            with pytest.raises(IndexError, match=f"rows are 0 to {count - 1}, got {row}"):
                source[row]
        for rows in ([count], [-1]):
            with pytest.raises(IndexError, match=f"rows are 0 to {count - 1}, got"):
                read_rows(source, rows)
        _hammer(source, whole, same)

    return check


def _hammer(source, whole, same):
    """Eight threads read at once; each must get its own rows."""

    def run(seed):
        random = np.random.default_rng(seed)
        for _ in range(5):
            rows = random.integers(0, len(source), 50)
            same(read_rows(source, rows), jax.tree.map(lambda a, rows=rows: a[rows], whole))

    at_once(run, range(8))
