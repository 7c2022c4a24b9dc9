"""A mesh of the eight CPU devices, what a feed delivers as NumPy, and what every source must do."""

import pickle
import sys
import threading

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


def asked(source, rows, strided=False):
    """Rows of a source, in `out` that is filled with ones before."""

    def room(leaf):
        wide = np.ones((len(rows), *leaf.shape, 2), leaf.dtype)
        return wide[..., 0] if strided else np.ones((len(rows), *leaf.shape), leaf.dtype)

    out = jax.tree.map(room, source.spec)
    source.read(np.asarray(rows, np.int64), out)
    return out


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
                same(asked(source, rows, strided), jax.tree.map(lambda a, rows=rows: a[rows], whole))
        same(asked(pickle.loads(pickle.dumps(source)), orders[2]), jax.tree.map(lambda a: a[orders[2]], whole))
        for row in (0, count - 1, -1, -count):
            same(source[row], jax.tree.map(lambda a, row=row: a[row], whole))
        for row in (count, -count - 1):
            with pytest.raises(IndexError, match=f"rows are 0 to {count - 1}, got {row}"):
                source[row]
        for rows in ([count], [-1]):
            with pytest.raises(IndexError, match=f"rows are 0 to {count - 1}, got"):
                asked(source, rows)
        _hammer(source, whole, same)

    return check


def _hammer(source, whole, same):
    """Eight threads read at once; each must get its own rows."""
    failures, together = [], threading.Barrier(8)

    def run(seed):
        random = np.random.default_rng(seed)
        together.wait(timeout=60)
        try:
            for _ in range(5):
                rows = random.integers(0, len(source), 50)
                same(asked(source, rows), jax.tree.map(lambda a, rows=rows: a[rows], whole))
        except BaseException:  # noqa: BLE001  # of any type: the test tells it
            failures.append(sys.exception())

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
