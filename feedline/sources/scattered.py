"""Rows that lie in many arrays, gathered segment by segment: a segment is memory of one allocation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.placement.plan import Columns
from feedline.rows.shards import Indices, places_by

Array = npt.NDArray[Any]
_LEAST_UNIT_BYTES = 256  # below it, indices of many units cost more than the copy that they spare
_CHUNK_BYTES = 1 << 19  # of the copy between a gather and `out`: it stays in the cache of a core


class Scattered:
    """The rows of arrays of one form, wherever they lie in memory.

    Arrays that are views of one allocation, as the record batches of a mapped file are, make one segment: NumPy
    gathers all rows of a segment at once, by their distances from its start. Memory between allocations is never
    part of a view. Rows of one array may have gaps or overlap, as the fields of records and windows do.

    Args:
      parts: arrays of one dtype, row shape and distance between rows, each row contiguous (see `fits`). They
        are kept alive.

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
        filled = [part for part in parts if len(part)]
        self._row = filled[0][:1]
        (self._distance,) = _distances(filled)
        self._lengths = np.array([len(part) for part in parts], np.int64)
        self._segments, self._segment_of, self._starts = _segments(parts, self._distance, self._row.nbytes)
        flags = parts[0].flags
        self._only = parts[0] if len(parts) == 1 and flags.c_contiguous and flags.aligned else None
        # NumPy takes rows straight into `out` where all start on a grid, as those of one file usually do
        self._unit = int(np.gcd.reduce(self._starts, initial=self._distance))

    def read(self, part: Indices | None, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] of part[i] to out[i], which has the dtype of the parts.

        `part` is None if there is only one.

        Raises:
          IndexError: a part has no such row.
        """
        self._check(part, rows)
        whole_rows = all(isinstance(column, slice) and column == slice(None) for column in columns)
        if self._only is not None and whole_rows and out.flags.c_contiguous and out.dtype == self._only.dtype:
            np.take(self._only, rows, axis=0, out=out, mode="clip")  # the usual case, with nothing in between
            return
        cut = self._row[(slice(None), *(c if isinstance(c, slice) else slice(None) for c in columns))]
        if cut.flags.c_contiguous:  # what is cut away is never touched
            columns = tuple(slice(None) if isinstance(c, slice) else c for c in columns)
        else:
            cut = self._row
        if cut.nbytes == 0 or len(rows) == 0:
            return
        straight = out.flags.c_contiguous and out.shape[1:] == cut.shape[1:] and out.dtype == cut.dtype
        target = out.reshape(-1).view(np.uint8).view(f"V{cut.nbytes}") if straight else None
        unit = math.gcd(self._unit, cut.nbytes)
        if target is not None and len(self._segments) == 1 and (unit == cut.nbytes or unit >= _LEAST_UNIT_BYTES):
            self._take(part, rows, cut, unit, target)
            return
        step, at = max(1, _CHUNK_BYTES // cut.nbytes), self._offsets(part, rows)
        for segment, places in self._by_segment(part, len(rows)):
            anywhere, here = self._view(segment, cut, cut.nbytes, 1), at[places]
            for start in range(0, len(here), step):
                values, there = anywhere[here[start : start + step]], _some(places, start, start + step)
                if target is not None:
                    target[there] = values
                else:
                    out[there] = _cut(values.view(np.uint8).view(cut.dtype).reshape(-1, *cut.shape[1:]), columns)

    def _check(self, part: Indices | None, rows: Indices) -> None:
        """Every row lies in its part; so what is addressed lies in an array that was given."""
        lengths = self._lengths[:1] if part is None else self._lengths.take(part)
        wrong = rows.astype(np.int64, copy=False).view(np.uint64) >= lengths.view(
            np.uint64
        )  # as unsigned words negative ones are the greatest
        if wrong.any():
            i = int(wrong.argmax())
            raise IndexError(f"rows of this array are 0 to {lengths[i % len(lengths)] - 1}, got {rows[i]}")

    def _take(self, part: Indices | None, rows: Indices, cut: Array, unit: int, target: Array) -> None:
        """Rows of the only segment, each of which is some units of a grid, straight to their places."""
        at = self._offsets(part, rows, unit)
        if unit < cut.nbytes:
            at = (at[:, None] + np.arange(cut.nbytes // unit)).reshape(-1)
        grid = self._view(0, cut, unit, unit)
        # mode="clip" spares the temporary that "raise" makes with out=; the rows have been checked
        np.take(grid, at, out=target.view(np.uint8).view(grid.dtype), mode="clip")

    def _by_segment(self, part: Indices | None, count: int) -> Iterator[tuple[int, slice | Indices]]:
        if part is None or len(self._segments) == 1:
            return iter([(0, slice(0, count))])
        return places_by(self._segment_of.take(part), len(self._segments))

    def _offsets(self, part: Indices | None, rows: Indices, unit: int = 1) -> Indices:
        """How many units of that many bytes lie between the start of the segment and each row."""
        distance = self._distance // unit
        at = rows if distance == 1 else rows * distance
        return at if part is None else (self._starts // unit).take(part) + at

    def _view(self, segment: int, cut: Array, size: int, distance: int) -> Array:
        """A segment as elements of `size` bytes, `distance` bytes apart.

        It starts where `cut` starts in the segment's first row, and ends where `cut` ends in its last row. NumPy
        checks that it stays inside the segment.
        """
        memory, skipped = self._segments[segment], _address(cut) - _address(self._row)
        count = (len(memory) - self._row.nbytes + cut.nbytes - size) // distance + 1
        return np.ndarray((count,), f"V{size}", memory, skipped, (distance,))


def _segments(parts: Sequence[Array], distance: int, row_bytes: int) -> tuple[list[Array], Indices, Indices]:
    """Parts that are views of one allocation, together.

    Returns:
      The memory of each segment as bytes, from the first byte of its rows to the last; for each part its segment,
      and how many bytes of that lie before its first row.
    """
    members: dict[int, list[int]] = {}
    for i, part in enumerate(parts):
        if len(part):
            members.setdefault(id(_allocation(part)), []).append(i)
    segment_of, starts = np.zeros((2, len(parts)), np.int64)
    segments = []
    for segment, inside in enumerate(members.values()):
        lowest = parts[inside[0]]
        if len(inside) == 1 and lowest.flags.c_contiguous:
            segments.append(lowest.reshape(-1).view(np.uint8))
        else:
            addresses = np.array([_address(parts[i]) for i in inside])
            lowest = parts[inside[int(addresses.argmin())]]
            starts[inside] = addresses - addresses.min()
            size = max(int(starts[i]) + (len(parts[i]) - 1) * distance + row_bytes for i in inside)
            first = lowest[:1].reshape(-1).view(np.uint8)
            segments.append(np.lib.stride_tricks.as_strided(first, (size,), (1,), writeable=False))
        segment_of[inside] = segment
    return segments, segment_of, starts


def _allocation(part: Array) -> Array:
    """The array whose memory a part is a view of; the part itself if that is not known to hold all of it."""
    owner = part
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner is part:
        return part
    (first, end), (low, high) = _extent(part), _extent(owner)
    return owner if low <= first <= end <= high else part


def _extent(array: Array) -> tuple[int, int]:
    """The addresses of its first byte, and after its last."""
    if array.flags.c_contiguous:
        return _address(array), _address(array) + array.nbytes
    return np.lib.array_utils.byte_bounds(array)


def _distances(filled: Sequence[Array]) -> set[int]:
    """How far rows stand apart; an array of one row does not say (its stride may be anything)."""
    return {part.strides[0] for part in filled if len(part) > 1} or {filled[0][:1].nbytes}


def _address(array: Array) -> int:
    return int(array.ctypes.data)


def _some(places: slice | Indices, start: int, stop: int) -> slice | Indices:
    """Those from `start` to `stop` of these places."""
    if isinstance(places, slice):
        return slice(places.start + start, min(places.start + stop, places.stop))
    return places[start:stop]


def _cut(values: Array, columns: Columns) -> Array:
    for axis, column in enumerate(columns, start=1):
        values = values[(slice(None),) * axis + (column,)]
    return values
