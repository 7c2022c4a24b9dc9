"""Readers of the rows of one leaf: a gather from memory, by the C library or by NumPy, and reads from files."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.formats.table import FileArray
from feedline._src.native.gather import Bad, Copy, MemoryLostError, Segments
from feedline._src.native.library import library
from feedline._src.native.spans import Spans, copy_parts, copy_values
from feedline._src.order.compiled import EpochOrder, Positions, PositionsPointer
from feedline._src.rows.shards import Indices, Shards, offsets_by_label
from feedline._src.rows.source import Columns

if TYPE_CHECKING:
    from feedline._src.files.file import File
    from feedline._src.files.files import Place

Array = npt.NDArray[Any]


class RowGather:
    """The rows of arrays of one dtype and row shape, those of the first array first.

    Reads are thread-safe. Rows are checked against each array's length, and memory outside of the arrays is never
    addressed. The C library gathers them in one call. Without it, and if the elements of a row have gaps between
    them, NumPy reads array by array.

    Args:
      parts: the arrays, which are kept alive. They may lie anywhere in memory, with any strides.

    Example:
      >>> rows = RowGather([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 1), int)
      >>> rows.read(np.array([3, 2]), (slice(1, 2),), out)
      >>> out.tolist()
      [[7], [5]]
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        compiled, filled = library(), [part for part in parts if len(part)]
        self._by_c: tuple[ctypes.CDLL, Segments] | None = None
        if compiled is not None and filled and all(part[0, ...].flags.c_contiguous for part in filled):
            self._by_c = compiled, Segments(filled)
            self._dtype = filled[0].dtype
            self._gaps = any(part.strides[0] != part.itemsize for part in filled)
        else:
            self._parts, self._shards = parts, Shards([len(part) for part in parts])

    @property
    def survives_lost_files(self) -> bool:
        """Whether a file that was truncated, or whose disk fails, is an error, and not the end of the process."""
        return self._by_c is not None

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] to out[i], which may be strided.

        Raises:
          IndexError: there is no such row.
          RowError: it is in a mapped file that was truncated, or whose disk failed.
        """
        if self._by_c is not None:
            compiled, segments = self._by_c
            with _naming_the_file():
                segments.gather(compiled, np.ascontiguousarray(rows, np.int64), columns, out)
            return
        for part, local, at in self._shards.split(rows):
            array = self._parts[part]
            if all(isinstance(column, slice) for column in columns):  # so that no other columns are copied
                out[at] = array[(slice(None), *columns)][local]
            else:
                out[at] = _cut(array[local], columns)

    def read_spans(self, spans: Spans, out: Array) -> None:
        """Write values side by side: see `ArraySource.read_spans`. Errors as of `read`."""
        if self._by_c is not None:
            compiled, segments = self._by_c
            with _naming_the_file():
                if not self._gaps:
                    segments.copy_spans(compiled, spans, out)
                    return
                rows = np.repeat(spans.first, spans.length) + spans.places
                values = np.empty(len(rows), self._dtype)
                segments.gather(compiled, rows, (), values)
                copy_values(spans, values, out)
            return
        parts = self._shards.of(spans.first)
        firsts = spans.first - self._shards.firsts_of(parts)
        places = zip(parts.tolist(), firsts.tolist(), spans.length.tolist(), strict=True)
        copy_parts(spans, [self._parts[part][first : first + count] for part, first, count in places], out)

    def copy(self, count: int, columns: Columns, out: Array) -> Copy | None:
        """The C struct for a copy of the `columns` of `count` rows to `out`; None if C cannot make this copy."""
        return None if self._by_c is None else self._by_c[1].copy(count, columns, out)


def _are_whole(columns: Columns) -> bool:
    return all(isinstance(column, slice) and column == slice(None) for column in columns)


def _cut(values: Array, columns: Columns) -> Array:
    for axis, column in enumerate(columns, start=1):
        values = values[(slice(None),) * axis + (column,)]
    return values


class FileRows:
    """The rows of arrays of which some lie in files that are not mapped: objects, until the cache has all of them.

    Args:
      parts: the arrays; rows of those in files have no gaps.
      files: that hold them.
    """

    survives_lost_files = True
    """Nothing is mapped."""

    def __init__(self, parts: Sequence[Array | FileArray], files: Sequence[File]) -> None:
        numbers = {id(file): number for number, file in enumerate(files)}
        self._parts, self._files = parts, files
        self._shards = Shards([len(part) for part in parts])
        in_files = [part if isinstance(part, FileArray) else None for part in parts]
        self._file_of = np.array([-1 if part is None else numbers[id(part.file)] for part in in_files])
        """The number of the file of each part; -1 for an array in memory."""
        self._first = np.array([0 if part is None else part.offset for part in in_files], np.int64)
        self._stride = np.array([0 if part is None else part.strides[0] for part in in_files], np.int64)
        self._shape, self._dtype = parts[0].shape[1:], parts[0].dtype
        self._some_in_memory = any(isinstance(part, np.ndarray) and len(part) for part in parts)
        self._row_bytes = max((part.row_bytes for part in in_files if part is not None), default=0)

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] to out[i], which may be strided.

        Raises:
          IndexError: there is no such row.
          FeedError: a file was changed, or its store cannot be read.
        """
        direct = _are_whole(columns) and out.dtype == self._dtype and out.flags.c_contiguous
        target = out if direct else np.empty((len(rows), *self._shape), self._dtype)
        data = target.reshape(len(rows), -1 if target.size else 0).view(np.uint8)
        for number, at, offsets in self._located(rows):
            if isinstance(at, slice):
                self._files[number].read_rows(offsets, data[at])
            else:
                scratch = np.empty((len(offsets), self._row_bytes), np.uint8)
                self._files[number].read_rows(offsets, scratch)
                data[at] = scratch
        if self._some_in_memory:
            for number, local, at in self._shards.split(rows):
                if isinstance(part := self._parts[number], np.ndarray):
                    target[at] = part[local]
        if not direct:
            out[...] = _cut(target, columns)

    def read_spans(self, spans: Spans, out: Array) -> None:
        """Write values side by side: see `ArraySource.read_spans`. Errors as of `read`."""
        found: list[Array] = [np.empty(0, self._dtype)] * len(spans.first)
        for number, at, offsets in self._located(spans.first):
            where = np.arange(len(found))[at].tolist()
            for i, data in zip(
                where, self._files[number].read(offsets, spans.length[at] * self._row_bytes), strict=True
            ):
                found[i] = np.frombuffer(data, self._dtype)
        if self._some_in_memory:
            for number, local, at in self._shards.split(spans.first):
                if isinstance(part := self._parts[number], np.ndarray):
                    for i, first in zip(np.arange(len(found))[at].tolist(), local.tolist(), strict=True):
                        found[i] = part[first : first + spans.length[i]]
        copy_parts(spans, found, out)

    def copy(self, count: int, columns: Columns, out: Array) -> None:
        """None: C cannot copy these rows."""

    def places(self, rows: Indices, counts: Indices | None = None) -> Iterator[Place]:
        """Where these rows lie in the files; or, with `counts`, so many from each on."""
        for number, at, offsets in self._located(rows):
            lengths = np.full(len(offsets), self._row_bytes)
            yield number, offsets, lengths if counts is None else lengths * counts[at]

    def _located(self, rows: Indices) -> Iterator[tuple[int, slice | Indices, Indices]]:
        """For each file that has some of the rows: its number, which of the rows, and their offsets in it."""
        part = self._shards.of(rows)
        offsets = self._first.take(part) + (rows - self._shards.firsts.take(part)) * self._stride.take(part)
        for label, at in offsets_by_label(self._file_of.take(part) + 1, len(self._files) + 1):
            if label > 0:
                yield label - 1, at, offsets[at]


def fill(library: ctypes.CDLL, epoch: EpochOrder, positions: Positions, copies: Sequence[Copy]) -> Indices:
    """Copy the rows at some positions of an epoch into all leaves of a batch.

    Args:
      copies: one for each leaf, for as many rows as there are positions (see `Segments.copy`).

    Returns:
      int64[k]: the row at each position.

    Raises:
      IndexError: there is no such position, or no such row.
      RowError: a row is in a mapped file that was truncated, or whose disk failed.
    """
    rows = np.empty(len(positions), np.int64)
    bad = Bad()
    pointer = PositionsPointer(positions)
    code = library.feedline_fill(
        ctypes.byref(epoch),
        pointer.address,
        pointer.first,
        len(positions),
        rows.ctypes.data,
        (Copy * len(copies))(*copies),
        len(copies),
        ctypes.byref(bad),
    )
    with _naming_the_file():
        bad.check_memory(code)
    if code:
        raise IndexError(f"positions and rows must be in [0, {epoch.n}), got {bad[0]} (code {code})")
    return rows


@contextlib.contextmanager
def _naming_the_file() -> Iterator[None]:
    """Raise lost memory as an error that names row and file."""
    try:
        yield
    except MemoryLostError as lost:
        file = file_at(lost.address)
        if lost.row is None:
            raise FeedError(
                "the memory of a batch could not be written to, or that of its rows not be read (SIGBUS): there "
                "is no room left in it, or a disk failed; look at the log of the kernel (dmesg)",
                stage="read",
                file=file,
            ) from lost
        raise RowError(
            "a row could not be read from its mapped file (SIGBUS): the file was truncated, or its disk failed; "
            "restore the file, or look at the log of the kernel (dmesg)",
            stage="read",
            row=lost.row,
            file=file,
        ) from lost


def file_at(address: int) -> str | None:
    """The file that is mapped at an address; None if there is none, or the system does not tell."""
    try:
        with open("/proc/self/maps", errors="surrogateescape") as maps:
            for line in maps:
                begin, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
                if begin <= address < end:
                    return line[line.index("/") :].rstrip("\n") if "/" in line else None
    except OSError:
        pass
    return None
