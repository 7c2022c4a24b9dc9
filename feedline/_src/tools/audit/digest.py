"""A digest for each row of an array; the digests of parts of a row add up to that of the row. Pure."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

Digests = npt.NDArray[np.uint64]
Ranges = tuple[tuple[int, int], ...]
"""(start, stop) along each axis after the first."""

_WORDS_AT_ONCE = 1 << 20  # the multiplication needs 8 MiB for so many


def row_digests(values: npt.NDArray[Any], leaf: int, shape: tuple[int, ...], columns: Ranges) -> Digests:
    """Σ word·key mod 2^64 over the words of each row, the multilinear hash of Carter and Wegman (1979).

    A word is the bits of an element, or 32 of them. Its key is 64 pseudo-random bits that depend on its leaf and
    column. A wrong value changes a word. A shift or a swap within a row multiplies words by other keys. A swap of
    two rows is found because digests are compared position by position. Two words differ by less than
    2^32, so at most 2^31 of the 2^64 keys hide a difference: two given rows that differ have the same digest with
    a probability of at most 2^-33. The keys are fixed, so this finds mistakes but does not protect against malice.

    Args:
      values: [k, …], the columns `columns` of k rows.
      leaf: number of the leaf.
      shape: shape of a whole row.
      columns: the range of `values` along each axis of a row.

    Returns:
      uint64[k].

    Example:
      >>> rows = np.arange(6, dtype=np.int16).reshape(2, 3)
      >>> left, right = (row_digests(rows[:, a:b], 0, (3,), ((a, b),)) for a, b in ((0, 1), (1, 3)))
      >>> (left + right == row_digests(rows, 0, (3,), ((0, 3),))).all()
      np.True_
    """
    word = np.dtype(f"u{min(values.dtype.itemsize, 4)}")
    keys = _keys(leaf, shape, columns, values.dtype.itemsize // word.itemsize)
    words = np.ascontiguousarray(values).reshape(-1).view(word).reshape(len(values), len(keys))
    digests = np.empty(len(values), np.uint64)
    step = max(1, _WORDS_AT_ONCE // max(1, len(keys)))
    for first in range(0, len(values), step):
        part = slice(first, first + step)
        digests[part] = words[part].astype(np.uint64) @ keys
    return digests


@functools.lru_cache(maxsize=256)
def _keys(leaf: int, shape: tuple[int, ...], columns: Ranges, words: int) -> Digests:
    """The key of each word in these columns: splitmix64 (Steele, Lea and Flood 2014) of the word's number."""
    numbers: Digests = np.arange(math.prod(shape) * words, dtype=np.uint64).reshape(*shape, words)
    chosen = numbers[tuple(slice(*column) for column in columns)]
    return _mixed(chosen.reshape(-1) + np.uint64((leaf + 1) << 40))


def _mixed(numbers: Digests) -> Digests:
    numbers = np.multiply(numbers, 0x9E3779B97F4A7C15, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = np.multiply(numbers ^ np.right_shift(numbers, shift), factor, dtype=np.uint64)
    return numbers ^ np.right_shift(numbers, 31)
