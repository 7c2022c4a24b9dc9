"""Rows that lie in many arrays, gathered by their addresses: many shards cost what one array costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.loader.shards import Indices
from feedline.placement.plan import Columns

Array = npt.NDArray[Any]
_LEAST_UNIT_BYTES = 256  # below it, indices of many units cost more than the copy that they spare
_CHUNK_BYTES = 1 << 19  # of the copy between a gather and `out`: it stays in the cache of a core


class Scattered:
    """The rows of arrays of one form, wherever they lie in memory.

    A loop over shards costs microseconds for each that a read touches, and sorts the rows. Here the rows of all
    shards are one set of addresses, which NumPy gathers at once. Distances between rows are free: the
    fields of a record, or windows that overlap, are gathered in the same way.

    Args:
      parts: arrays of one dtype, row shape and distance between rows, each row contiguous (see `fits`). They
        are kept alive. What is read is only ever inside one of them: the caller's rows are in range.

    Example:
      >>> rows = Scattered([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 2), int)
      >>> rows.read(np.array([1, 0]), np.array([0, 2]), (slice(None),), out)  # row 0 of part 1, row 2 of part 0
      >>> out.tolist()
      [[6, 7], [4, 5]]
    """

    @staticmethod
    def fits(parts: Sequence[Array]) -> bool:
        """Whether these arrays can be read so: whole rows, equally far apart in each of them, none backwards."""
        filled = [part for part in parts if len(part)]
        distances = _distances(filled)
        return all(part[0].flags.c_contiguous for part in filled) and len(distances) == 1 and min(distances) >= 0

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = parts
        filled = [part for part in parts if len(part)]
        self._row = filled[0][:1]
        (self._distance,) = _distances(filled)
        self._lowest = min(filled, key=_address)
        base = _address(self._lowest)
        self._starts = np.array([_address(part) - base if len(part) else 0 for part in parts], np.int64)
        ends = [_address(part) - base + (len(part) - 1) * self._distance + self._row.nbytes for part in filled]
        self._span = max(ends)
        self._only = parts[0] if len(parts) == 1 and parts[0].flags.c_contiguous else None
        # NumPy takes rows straight into `out` where all start on a grid, as those of files mapped page by page do
        self._unit = int(np.gcd.reduce(self._starts, initial=self._distance))

    def read(self, part: Indices | None, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] of part[i] to out[i], which has the dtype of the parts.

        `part` is None if there is only one.
        """
        whole_rows = all(isinstance(column, slice) and column == slice(None) for column in columns)
        if self._only is not None and whole_rows and out.flags.c_contiguous and out.dtype == self._only.dtype:
            np.take(self._only, rows, axis=0, out=out, mode="clip")  # the usual case, with nothing in between
            return
        cut = self._row[(slice(None), *(c if isinstance(c, slice) else slice(None) for c in columns))]
        if cut.flags.c_contiguous:  # what is cut away is never touched
            columns = tuple(slice(None) if isinstance(c, slice) else c for c in columns)
        else:
            cut = self._row
        whole = out.flags.c_contiguous and out.shape[1:] == cut.shape[1:] and out.dtype == cut.dtype
        if cut.nbytes == 0 or len(rows) == 0:
            return
        skipped = _address(cut) - _address(self._row)
        unit = math.gcd(self._unit, cut.nbytes)
        if whole and (unit == cut.nbytes or unit >= _LEAST_UNIT_BYTES):  # a row is some units of a grid
            at = self._places(part, rows, unit)
            if unit < cut.nbytes:
                at = (at[:, None] + np.arange(cut.nbytes // unit)).reshape(-1)
            grid = self._view(unit, unit, skipped, cut.nbytes)
            # mode="clip" spares the temporary that "raise" makes with out=; the rows are in range by construction
            np.take(grid, at, out=out.reshape(-1).view(np.uint8).view(grid.dtype), mode="clip")
            return
        at = self._places(part, rows, 1)
        anywhere = self._view(cut.nbytes, 1, skipped, cut.nbytes)
        step = max(1, _CHUNK_BYTES // cut.nbytes)
        for start in range(0, len(rows), step):
            values = anywhere[at[start : start + step]].view(np.uint8).view(cut.dtype).reshape(-1, *cut.shape[1:])
            for axis, column in enumerate(columns, start=1):
                values = values[(slice(None),) * axis + (column,)]
            out[start : start + step] = values

    def _places(self, part: Indices | None, rows: Indices, unit: int) -> Indices:
        """How many units of that many bytes lie before each row."""
        distance = self._distance // unit
        at = rows if distance == 1 else rows * distance
        return at if part is None else (self._starts // unit).take(part) + at

    def _view(self, size: int, distance: int, skipped: int, last: int) -> Array:
        """The memory from the first row of all on, as elements of `size` bytes, `distance` bytes apart.

        It starts `skipped` bytes into that row, and ends with the `last` bytes from there in the last row.
        """
        first = self._lowest[:1].reshape(-1).view(np.uint8)[skipped : skipped + size].view(f"V{size}")
        count = (self._span - self._row.nbytes + last - size) // distance + 1
        return np.lib.stride_tricks.as_strided(first, (count,), (distance,), writeable=False)


def _distances(filled: Sequence[Array]) -> set[int]:
    """How far rows stand apart; an array of one row does not say (its stride may be anything)."""
    return {part.strides[0] for part in filled if len(part) > 1} or {filled[0][:1].nbytes}


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
