"""Readers of the rows of one leaf where the C library does not: by NumPy, and from files in a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from feedline._src.formats.table import FileArray
from feedline._src.native.gather import Reader, RowGather
from feedline._src.native.spans import Spans, copy_values
from feedline._src.rows.shards import Indices, Shards, offsets_by_label
from feedline._src.rows.source import Columns

if TYPE_CHECKING:
    from feedline._src.files.file import File
    from feedline._src.files.files import Place

Array = npt.NDArray[Any]


def reader_of(parts: Sequence[Array]) -> Reader:
    """The fastest reader for arrays in memory, of one dtype and row shape."""
    return RowGather(parts) if RowGather.can_gather(parts) else NumpyRows(parts)


class NumpyRows(Reader):
    """The rows of arrays in memory, one array after the other, read by NumPy.

    Example:
      >>> rows = NumpyRows([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 1), int)
      >>> rows.read(np.array([3, 2]), (slice(1, 2),), out)
      >>> out.tolist()
      [[7], [5]]
    """

    survives_lost_files = False

    def __init__(self, parts: Sequence[Array]) -> None:
        super().__init__(parts[0].dtype, parts[0].shape[1:])
        self._parts, self._shards = parts, Shards([len(part) for part in parts])

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """See `Reader`."""
        for number, local, at in self._shards.split(rows):
            out[at] = _cut(self._parts[number][local], columns)


def _cut(values: Array, columns: Columns) -> Array:
    for axis, column in enumerate(columns, start=1):
        values = values[(slice(None),) * axis + (column,)]
    return values


class FileRows(Reader):
    """The rows of arrays in files that are not mapped: objects, until the cache has all of them.

    Args:
      parts: the arrays, whose rows have no gaps.
      files: that hold them.
    """

    def __init__(self, parts: Sequence[FileArray], files: Sequence[File]) -> None:
        super().__init__(parts[0].dtype, parts[0].shape[1:])
        numbers = {id(file): number for number, file in enumerate(files)}
        self._files, self._shards = files, Shards([len(part) for part in parts])
        self._file_of = np.array([numbers[id(part.file)] for part in parts])  # of each part
        self._first = np.array([part.offset for part in parts], np.int64)
        self._stride = np.array([part.strides[0] for part in parts], np.int64)
        self._row_bytes = parts[0].row_bytes

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """See `Reader`; FeedError: a file was changed, or its store cannot be read."""
        is_whole = all(isinstance(column, slice) and column == slice(None) for column in columns)
        direct = is_whole and out.dtype == self._dtype and out.flags.c_contiguous
        target = out if direct else np.empty((len(rows), *self._shape), self._dtype)
        data = target.reshape(len(rows), -1 if target.size else 0).view(np.uint8)
        for number, at, offsets in self._located(rows):
            if isinstance(at, slice):
                self._files[number].read_rows(offsets, data[at])
            else:
                scratch = np.empty((len(offsets), self._row_bytes), np.uint8)
                self._files[number].read_rows(offsets, scratch)
                data[at] = scratch
        if not direct:
            out[...] = _cut(target, columns)

    def read_spans(self, spans: Spans, out: Array) -> None:
        """See `Reader`; errors as of `read`."""
        parts = [b""] * len(spans.first)
        for number, at, offsets in self._located(spans.first):
            found = self._files[number].read(offsets, spans.length[at] * self._row_bytes)
            for i, data in zip(np.arange(len(parts))[at].tolist(), found, strict=True):
                parts[i] = data
        values = np.frombuffer(b"".join(parts), self._dtype).reshape(-1, *self._shape)
        copy_values(spans, values, out)

    def places(self, rows: Indices, counts: Indices | None = None) -> Iterator[Place]:
        """Where these rows lie in the files; or, with `counts`, where that many rows from each on lie."""
        for number, at, offsets in self._located(rows):
            lengths = np.full(len(offsets), self._row_bytes)
            yield number, offsets, lengths if counts is None else lengths * counts[at]

    def _located(self, rows: Indices) -> Iterator[tuple[int, slice | Indices, Indices]]:
        """For each file that has some of the rows: its number, which of the rows, and their offsets in it."""
        part = self._shards.of(rows)
        offsets = self._first.take(part) + (rows - self._shards.firsts.take(part)) * self._stride.take(part)
        for number, at in offsets_by_label(self._file_of.take(part), len(self._files)):
            yield number, at, offsets[at]
