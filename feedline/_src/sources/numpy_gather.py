"""The gather of rows in NumPy: without the C library, and for arrays whose rows are not contiguous."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.placement.plan import Columns
from feedline._src.rows.shards import Indices, Shards, offsets_by_label

Array = npt.NDArray[Any]
_LEAST_UNIT_BYTES = 256  # for smaller units, the index array costs more than the copy that it avoids
_CHUNK_BYTES = 1 << 19  # of the copy between a gather and `out`: it stays in the cache of a core


class NumpyGather:
    """The rows of arrays of one dtype and row shape, those of the first array first.

    Rows are gathered segment by segment. Arrays that are views of one allocation, such as the record batches of a
    mapped file, form one segment: NumPy gathers all of its rows in one call, by their distances from its start. No
    view ever covers the memory between two allocations. Rows of one array may have gaps between them or overlap,
    as record fields and windows do.

    Arrays whose rows are not contiguous, or that differ in the distance between rows, are indexed one by one.

    Args:
      parts: the arrays, which are kept alive.

    Example:
      >>> rows = NumpyGather([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 2), int)
      >>> rows.read(np.array([4, 2]), (slice(None),), out)
      >>> out.tolist()
      [[8, 9], [4, 5]]
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = parts
        self._shards = Shards([len(part) for part in parts])
        self._segments: list[Array] = []
        """The memory of each segment as bytes; none if the arrays are indexed one by one."""
        filled = [part for part in parts if len(part)]
        if not filled or not _evenly_spaced(filled):
            return
        self._row = filled[0][:1]
        (self._distance,) = _distances(filled)
        self._segments, self._segment_of, self._starts = _segments(parts, self._distance, self._row.nbytes)
        flags = parts[0].flags
        self._only = parts[0] if len(parts) == 1 and flags.c_contiguous and flags.aligned else None
        # NumPy takes rows directly into `out` if all start on a grid, as those of one file usually do
        self._unit = int(np.gcd.reduce(self._starts, initial=self._distance))

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] to out[i], which may be strided.

        Raises:
          IndexError: there is no such row.
        """
        if not self._segments:
            for shard, local, offsets in self._shards.split(rows):
                out[offsets] = _picked(self._parts[shard], local, columns)
        elif len(self._parts) == 1:
            self._shards.check(rows)
            self._read_segments(None, rows, columns, out)
        else:
            part = self._shards.of(rows)
            self._read_segments(part, rows - self._shards.firsts.take(part), columns, out)

    def _read_segments(self, part: Indices | None, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] of part[i] to out[i]. `part` is None for one array."""
        whole_rows = all(isinstance(column, slice) and column == slice(None) for column in columns)
        if self._only is not None and whole_rows and out.flags.c_contiguous and out.dtype == self._only.dtype:
            np.take(self._only, rows, axis=0, out=out, mode="clip")  # the usual case: a single copy
            return
        cut = self._row[(slice(None), *(c if isinstance(c, slice) else slice(None) for c in columns))]
        if cut.flags.c_contiguous:  # columns that are not wanted are never touched
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
        step, at = max(1, _CHUNK_BYTES // cut.nbytes), self._unit_offsets(part, rows)
        for segment, offsets in self._by_segment(part, len(rows)):
            elements, here = self._view(segment, cut, cut.nbytes, 1), at[offsets]
            for start in range(0, len(here), step):
                values, there = elements[here[start : start + step]], _some(offsets, start, start + step)
                if target is not None:
                    target[there] = values
                else:
                    out[there] = _cut(values.view(np.uint8).view(cut.dtype).reshape(-1, *cut.shape[1:]), columns)

    def _take(self, part: Indices | None, rows: Indices, cut: Array, unit: int, target: Array) -> None:
        """Copy rows of the only segment, each of which is a number of units of a grid, directly to `target`."""
        at = self._unit_offsets(part, rows, unit)
        if unit < cut.nbytes:
            at = (at[:, None] + np.arange(cut.nbytes // unit)).reshape(-1)
        grid = self._view(0, cut, unit, unit)
        # mode="clip" avoids the temporary that "raise" makes with out=; the rows have been checked
        np.take(grid, at, out=target.view(np.uint8).view(grid.dtype), mode="clip")

    def _by_segment(self, part: Indices | None, count: int) -> Iterator[tuple[int, slice | Indices]]:
        if part is None or len(self._segments) == 1:
            return iter([(0, slice(0, count))])
        return offsets_by_label(self._segment_of.take(part), len(self._segments))

    def _unit_offsets(self, part: Indices | None, rows: Indices, unit: int = 1) -> Indices:
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


def _evenly_spaced(filled: Sequence[Array]) -> bool:
    """Whether all rows are contiguous, and equally far apart in memory, in ascending order."""
    distances = _distances(filled)
    return all(part[0, ...].flags.c_contiguous for part in filled) and len(distances) == 1 and min(distances) >= 0


def _segments(parts: Sequence[Array], distance: int, row_bytes: int) -> tuple[list[Array], Indices, Indices]:
    """Group the parts that are views of one allocation.

    Returns:
      The memory of each segment as bytes, from the first byte of its rows to the last; for each part its segment,
      and the offset of its first row in that segment, in bytes.
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
    """The array that owns the memory of a part; the part itself if no owner is known to contain it."""
    owner = part
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner is part:
        return part
    (first, end), (low, high) = _extent(part), _extent(owner)
    return owner if low <= first <= end <= high else part


def _extent(array: Array) -> tuple[int, int]:
    """The address of the first byte of an array, and the one after its last byte."""
    if array.flags.c_contiguous:
        return _address(array), _address(array) + array.nbytes
    return np.lib.array_utils.byte_bounds(array)


def _distances(filled: Sequence[Array]) -> set[int]:
    """The distances between rows, in bytes. An array of one row has none: its stride may be anything."""
    return {part.strides[0] for part in filled if len(part) > 1} or {filled[0][:1].nbytes}


def _address(array: Array) -> int:
    return int(array.ctypes.data)


def _some(offsets: slice | Indices, start: int, stop: int) -> slice | Indices:
    """The offsets number `start` to `stop` of these."""
    if isinstance(offsets, slice):
        return slice(offsets.start + start, min(offsets.start + stop, offsets.stop))
    return offsets[start:stop]


def _cut(values: Array, columns: Columns) -> Array:
    for axis, column in enumerate(columns, start=1):
        values = values[(slice(None),) * axis + (column,)]
    return values


def _picked(array: Array, rows: Indices, columns: Columns) -> Array:
    """array[rows] cut to columns, where rows are not contiguous (np.take would copy the whole array first)."""
    if all(isinstance(column, slice) for column in columns):
        return array[(slice(None), *columns)][rows]
    part = array[rows]
    for axis, column in enumerate(columns, start=1):
        part = part[(slice(None),) * axis + (column,)]
    return part
