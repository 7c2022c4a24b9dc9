"""Rows of a source, read into memory of the test, and whether they are those that were written."""

import pickle

import jax
import numpy as np
import pytest
from background import at_once


def read_rows(source, rows=None, strided=False):
    """Records, or leaves that held ones before; of all rows if none are given; `strided`: with gaps in between."""
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
    """Whether any rows are read in any order: by eight threads at once, which find a source that nobody has read;
    repeats, none at all, strided output; from the pickled source; single rows; and no row that is not there.

    Args:
      expected: given row indices, the rows: a tree of arrays, or a list of records.
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
