"""Reads rows of a source into memory of the test, and checks that they are the rows that were written."""

import pickle

import jax
import numpy as np
import pytest
from background import at_once


def read_rows(source, rows=None, strided=False):
    """Records, or leaves read into arrays of ones (`strided`: with gaps in memory). By default, of all rows."""
    rows = np.arange(len(source)) if rows is None else np.asarray(rows, np.int64)
    if hasattr(source, "records"):
        return list(source.records(rows))
    out = jax.tree.map(
        lambda leaf: np.ones((len(rows), *leaf.shape, 1 + strided), leaf.dtype)[..., 0], source.spec
    )
    source.read(rows, out)
    return out


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def reads_as(source, expected):
    """Check reads in any order: first by eight threads at once, from a source that nobody has read before; then of
    repeated rows, no rows and single rows, into strided output, from a pickled copy, and of rows out of range.

    Args:
      expected: (row indices) → the rows, as a tree of arrays or a list of records.
    """
    count, random = len(source), np.random.default_rng(0)

    def read_some(seed):
        random = np.random.default_rng(seed)
        for _ in range(5):
            rows = random.integers(0, count, 50)
            same(read_rows(source, rows), expected(rows))

    at_once(read_some, range(8))
    orders = [np.arange(count), np.arange(count)[::-1], random.permutation(count)]
    orders += [random.integers(0, count, 2 * count), np.array([count - 1]), np.array([], np.int64)]
    for rows in orders:
        for strided in (False, True):
            same(read_rows(source, rows, strided), expected(rows))
    same(read_rows(pickle.loads(pickle.dumps(source)), orders[2]), expected(orders[2]))
    for row in (0, count - 1, -1, -count):
        found = expected(np.array([row]))
        same(source[row], found[0] if isinstance(found, list) else jax.tree.map(lambda leaf: leaf[0], found))
    for row in (count, -count - 1):
        with pytest.raises(IndexError, match=f"rows are 0 to {count - 1}, got {row}"):
            source[row]
    for row in (count, -1):
        with pytest.raises(IndexError, match=f"rows are 0 to {count - 1}, got"):
            read_rows(source, [row])
