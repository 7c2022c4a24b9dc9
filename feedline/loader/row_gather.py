"""Rows of arrays that follow each other, copied into a batch: by the C library if it was built, else by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.loader.scattered import Scattered
from feedline.loader.shards import Indices, Shards
from feedline.native.gather import Segments
from feedline.native.library import library
from feedline.placement.plan import Columns

Array = npt.NDArray[Any]


class RowGather:
    """The rows of arrays of one dtype and row shape, those of the first array first.

    Reads are thread-safe. Rows are checked against each array's length, and memory outside of the arrays is never
    addressed.

    Args:
      parts: the arrays, which are kept alive; anywhere in memory, with any strides.

    Example:
      >>> rows = RowGather([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 1), int)
      >>> rows.read(np.array([3, 2]), (slice(1, 2),), out)
      >>> out.tolist()
      [[7], [5]]
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = parts
        self._shards = Shards([len(part) for part in parts])
        compiled, whole = library(), all(part[0].flags.c_contiguous for part in parts if len(part))
        self._library = compiled if whole and len(self._shards) else None
        self._segments = Segments(parts) if self._library is not None else None
        by_numpy = self._library is None and len(self._shards) and Scattered.fits(parts)
        self._scattered = Scattered(parts) if by_numpy else None

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] to out[i], which has the dtype of the parts and may be strided.

        Raises:
          IndexError: there is no such row.
        """
        if self._library is not None and self._segments is not None:
            self._segments.gather(self._library, np.ascontiguousarray(rows, np.int64), columns, out)
        elif self._scattered is not None:
            self._read_scattered(self._scattered, rows, columns, out)
        else:
            for shard, local, places in self._shards.split(rows):
                out[places] = _picked(self._parts[shard], local, columns)

    def _read_scattered(self, scattered: Scattered, rows: Indices, columns: Columns, out: Array) -> None:
        if len(self._parts) == 1:
            scattered.read(None, rows, columns, out)
        else:
            part = self._shards.of(rows)
            scattered.read(part, rows - self._shards.firsts.take(part), columns, out)


def _picked(array: Array, rows: Indices, columns: Columns) -> Array:
    """array[rows] cut to columns, where rows are not contiguous (np.take would copy the whole array first)."""
    if all(isinstance(column, slice) for column in columns):
        return array[(slice(None), *columns)][rows]
    part = array[rows]
    for axis, column in enumerate(columns, start=1):
        part = part[(slice(None),) * axis + (column,)]
    return part
