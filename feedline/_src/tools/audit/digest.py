"""A digest for each row of an array. The digests of the parts of a row add up to the digest of the row. Pure.

The digest is Σ (word + 1)·key mod 2^64 over the words of a row, the multilinear hash of Carter and Wegman (1979).
A word is an element, or 32 bits of a wider one. Its key is 64 pseudo-random bits that depend on leaf and column.
A wrong value changes a word; a shift or a swap within a row multiplies words by other keys; because of the + 1, a
missing part changes the digest even if its words are 0. Words differ by less than 2^32, so two different rows have
the same digest with a probability of at most 2^-33. The keys are fixed, so this finds mistakes but not malice.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint64]
Ranges = tuple[tuple[int, int], ...]
"""(start, stop) along each axis after the first."""


def row_digests(values: npt.NDArray[Any], leaf: int, shape: tuple[int, ...], columns: Ranges) -> Digests:
    """uint64[k]: the digests of these columns of k rows. `shape` is the shape of a whole row."""
    word = np.dtype(f"u{min(values.dtype.itemsize, 4)}")
    keys = _keys(leaf, shape, columns, values.dtype.itemsize // word.itemsize)
    words = np.ascontiguousarray(values).reshape(-1).view(word).reshape(len(values), len(keys))
    products = [row.astype(np.uint64) @ keys for row in words]  # one row at a time, to bound the memory
    digests: Digests = np.array(products, np.uint64) + keys.sum(dtype=np.uint64)
    return digests


def whole_row_digests(rows: npt.NDArray[Any], leaf: int) -> Digests:
    return row_digests(rows, leaf, rows.shape[1:], tuple((0, size) for size in rows.shape[1:]))


def shard_digests(array: Any, leaf: int) -> Digests:
    """uint64[replicas, rows]: the digests of the parts of an array's rows that this process holds; 0 elsewhere.

    For each replica and row, the sum over all processes is the digest of the row.
    """
    found = np.zeros((1 + max(shard.replica_id for shard in array.global_shards), array.shape[0]), np.uint64)
    for shard in array.addressable_shards:
        (first, stop), *columns = (
            part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)
        )
        digests = row_digests(np.asarray(shard.data), leaf, array.shape[1:], tuple(columns))
        found[shard.replica_id, first:stop] += digests
    return found


@functools.lru_cache(maxsize=256)
def _keys(leaf: int, shape: tuple[int, ...], columns: Ranges, words: int) -> Digests:
    """The keys of the words in these columns. Philox (Salmon et al. 2011) generates the keys of the whole row."""
    keys = np.asarray(np.random.Philox(key=leaf).random_raw(math.prod(shape) * words), np.uint64)
    chosen: Digests = keys.reshape(*shape, words)[tuple(slice(*column) for column in columns)]
    return chosen.reshape(-1)
