"""Tables: files whose rows are read by row number, or in groups that are decoded on demand into a bounded cache.

In `GroupSource`, all leaves are numbers; in `TableSource`, at least one is bytes or text.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.files.file import File, LruCache, check_may_open
from feedline._src.files.files import Place
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import Column, Grouped, Leaf, described
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.source import Cut, EncodedSource, Indexed, Record, Rows, Source, WillRead, indices_of
from feedline._src.runtime.exit import check_may_read
from feedline._src.sources.arrays import ArraySource, cut, reader_of

T = TypeVar("T")
OpenFile = Callable[[Any, OpenOptions], Grouped]
_ROWS_AT_ONCE = 1 << 11  # of files that are read by row number; fewer take longer, more do not fit the CPU cache
_MAX_ROWS = 1 << 48  # of a file, so that sums over files stay below the largest int64


def open_groups(
    open_file: OpenFile, files: Any, options: OpenOptions, sampled: list[Any] | None = None
) -> Source | EncodedSource:
    """Make the source for files that store rows in groups or as arrays.

    Args:
      open_file: (file, options) → a description of the file.
      files: `Files`, `ZarrFolders` or `DatasetFiles`, in the order of their rows.
      options: columns and cache_bytes.
      sampled: what `sampled_rows` returned in the process that pickled the source; None: nothing to compare.

    Raises:
      ValueError: there are no rows, or files do not fit together.
      FeedError: a file does not have the expected version, or sampled rows have changed.
    """
    tables = [files.opened(number, lambda file: open_file(file, options)) for number in range(len(files.paths))]
    if all(table.arrays is not None for table in tables):
        return ArraySource(files.paths, options, functools.partial(_arrays_in, open_file), files)
    if any(isinstance(leaf, str) for leaf in jax.tree.leaves(tables[0].spec)):
        return TableSource(open_file, files, options, tables)
    source = GroupSource(open_file, files, options, tables)
    if sampled is not None and source.sampled_rows() != sampled:
        raise FeedError(
            "the chunks of an array must not change while a feed reads it, and rows sampled when the feed was "
            "built differ now. Write new data to a new path, and build a new feed",
            stage="read",
            file=files.paths[0],
        )
    return source


def _arrays_in(open_file: OpenFile, file: File, options: OpenOptions) -> list[Any]:
    """The rows of a file as trees of arrays."""
    arrays = open_file(file, options).arrays
    assert arrays is not None, file  # this version of the file had arrays when it was opened
    return arrays()


class _GroupedRows(Indexed):
    """Base class of `GroupSource` and `TableSource`: reads tables with leaves of any kind. Reads are thread-safe.

    The most recently used groups stay in a cache of at most `cache_bytes`, so an order should read neighbouring
    rows soon after each other, as a blocked order does. If two threads need a group at once, one of them reads it.

    A file must not change while it is open. Its version is checked whenever a group is read; worker processes get
    this version with the source. Arguments and errors: see `open_groups`; `tables` describe the files.
    """

    _sampled: list[Any] | None = None  # set by `identity`; workers compare theirs with it

    def __init__(self, open_file: OpenFile, files: Any, options: OpenOptions, tables: Sequence[Grouped]) -> None:
        self._open_file, self._files, self._options, self._tables = open_file, files, options, tables
        self._paths = files.paths
        lengths = [_lengths_of(table, path) for path, table in zip(self._paths, tables, strict=True)]
        _check_same_leaves(self._paths, tables)
        found = jax.tree_util.tree_leaves_with_path(tables[0].spec)
        self._leaves: list[Leaf] = [leaf for _, leaf in found]
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
        self._file_of_group = [Shards(list(map(len, leaf))) for leaf in zip(*lengths, strict=True)]
        self._group_of_row = [Shards(np.concatenate(leaf)) for leaf in zip(*lengths, strict=True)]
        self._file_of_row = Shards([int(of_leaf[0].sum()) for of_leaf in lengths])
        if len(self) == 0:
            raise ValueError(
                f"a source must have at least one row, got {self._paths[0]} with none; check the program that "
                "wrote it"
            )
        if (held := sum(table.held_bytes for table in tables)) > options.cache_bytes:
            raise ValueError(
                f"files that are read into memory must fit into cache_bytes={options.cache_bytes} together, and "
                f"the {len(files)} files from {self._paths[0]} on have {held} bytes; raise cache_bytes, or write "
                "them as Parquet"
            )
        self._in_place = {file for file, table in enumerate(tables) if table.in_place}
        self._cache: LruCache[Column] = LruCache(options.cache_bytes)
        self._is_by_rows = tables[0].read_rows is not None

    def __len__(self) -> int:
        return len(self._file_of_row)

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._file_of_row.of(np.array([row]))[0])]

    def close(self) -> None:
        """Drop the cached groups, and give up what is being fetched."""
        self._cache.clear()
        self._files.close()
        for table in self._tables:
            table.close()

    def check_rows(self) -> None:
        """See `Indexed.check_rows`. Uses the counts of nulls in metadata, such as a Parquet footer."""
        for leaf, name in enumerate(self._names):
            counts = np.array([table.nulls.get(leaf, 0) for table in self._tables])
            if counts.any():
                files = f" in {np.count_nonzero(counts)} of the {len(counts)} files" if len(counts) > 1 else ""
                plural = "s" if counts.sum() > 1 else ""
                found = f"{name!r} has {counts.sum():,} null{plural}{files}"
                raise _null_error(found, None, self._paths[int(np.argmax(counts > 0))])

    def _file_digests(self) -> list[Any] | None:
        """Sizes and sampled bytes of the files. No path, so a dataset may be moved. None for Zarr folders."""
        found: list[Any] | None = self._files.digests
        for file in self._files:
            file.check()
        return found

    def _parts(
        self, leaf: int, rows: Indices, at_once_bytes: int
    ) -> Iterator[tuple[list[Column], Indices, Indices, Any]]:
        """Yield the groups of a leaf that hold these rows: as many at once as fit `at_once_bytes`, at least one.

        Yields:
          (groups, group, local, places). `places` are the offsets in `rows` of all rows that these groups hold.
          For each offset, `group` is an index into `groups`, and `local` the number of the row in that group.
        """
        if not len(rows):
            return
        shards, spec = self._group_of_row[leaf], self._leaves[leaf]
        group_of_row = shards.of(rows)
        local = rows - shards.firsts[group_of_row]
        needed, group = np.unique(group_of_row, return_inverse=True)
        at_once = 1
        if not isinstance(spec, str):
            largest = int(shards.lengths[needed].max()) * math.prod(spec.shape) * spec.dtype.itemsize
            at_once = max(1, at_once_bytes // max(1, largest))
        # the threads that read a batch need the same groups, so each begins at another, to decode in parallel
        first = threading.get_native_id() % len(needed)
        needed, group = np.roll(needed, -first), (group - first) % len(needed)
        files = self._file_of_group[leaf].of(needed)
        for start in range(0, len(needed), at_once):
            some = slice(start, start + at_once)
            numbers = zip(needed[some].tolist(), files[some].tolist(), strict=True)
            groups = [self._group(leaf, number, file) for number, file in numbers]
            places: Any = slice(None)  # all rows, which are then read without a copy
            if len(groups) < len(needed):
                places = np.flatnonzero((start <= group) & (group < start + at_once))
            self._check_nulls(leaf, groups, group[places] - start, local[places], rows[places])
            yield groups, group[places] - start, local[places], places

    def _check_nulls(self, leaf: int, groups: list[Column], group: Indices, local: Indices, rows: Indices) -> None:
        """Raise RowError if a row has a null. The error names the row."""
        for number, column in enumerate(groups):
            if column.null is not None:
                here = np.flatnonzero(group == number)
                null = here[column.null[local[here]]]
                if len(null):
                    row = int(rows[null[0]])
                    raise _null_error(f"{self._names[leaf]!r} is null in this row", row, self.file_of(row))

    def _by_rows(self, leaves: Sequence[int], rows: Indices) -> Iterator[tuple[Indices, Sequence[Any]]]:
        """Yield (offsets in `rows`, the values of each leaf there), for files whose rows are read by number."""
        if self._files.in_store:
            self._fetch_ahead(rows, 0)  # from all files at once
        for file, local, offsets in self._file_of_row.split(rows):
            order = np.argsort(local, kind="stable")
            places, ordered = np.arange(len(rows))[offsets][order], local[order]
            for start in range(0, len(order), _ROWS_AT_ONCE):
                some = slice(start, start + _ROWS_AT_ONCE)
                yield places[some], self._rows_of(file, leaves, ordered[some])

    def _rows_of(self, file: int, leaves: Sequence[int], local: Indices) -> Sequence[Any]:
        """Return the values of each leaf in rows of a file. RowError: a row cannot be read; the error names it."""
        read_rows, first = self._tables[file].read_rows, int(self._file_of_row.firsts[file])
        assert read_rows is not None
        try:
            return self._checked(lambda: read_rows(leaves, local), file, first + int(local[0]), "a row")
        except RowError as error:
            failure = error
        for half in np.array_split(local, 2) if len(local) > 1 else ():
            self._rows_of(file, leaves, half)
        raise failure

    def _group(self, leaf: int, group: int, file: int) -> Column:
        """The rows of a group, from memory, the cache or its file."""
        table, number = self._tables[file], group - int(self._file_of_group[leaf].firsts[file])
        if table.in_place:
            return table.read(leaf, number)
        shards = self._group_of_row[leaf]

        def read() -> Column:
            column = table.read(leaf, number)
            _check_column(column, int(shards.lengths[group]), self._leaves[leaf])
            return column

        row, what = int(shards.firsts[group]), "rows that are stored together"
        return self._cache.get((leaf, group), lambda: self._checked(read, file, row, what))

    def _checked(self, read: Callable[[], T], file: int, row: int | None, what: str) -> T:
        """Call `read`. Raises FeedError if the file was changed; any other error becomes a RowError."""
        check_may_read()
        self._files[file].check()  # first, since libraries may crash on a file that was written to
        try:
            found = read()
        except FeedError:
            raise
        except Exception as error:
            self._files[file].check()  # a change of the file explains any other error, and is not a bad row
            check_may_open(error, self._paths[file])
            raise _unreadable(what, error, row, self._paths[file]) from error
        self._files[file].check()
        return found

    @contextlib.contextmanager
    def _unchanged(self, rows: Indices) -> Iterator[None]:
        """A context that raises FeedError, on entry or on exit, if a file that is read in place has changed.

        Without the check on entry, reading a truncated mapped file would end the process. On exit, the FeedError
        replaces any other error.
        """
        numbers = self._in_place and self._in_place.intersection(self._file_of_row.of(rows).tolist())
        in_place = [self._files[file] for file in sorted(numbers)]
        for file in in_place:
            file.check_open()
        try:
            yield
        finally:
            for file in in_place:
                file.check_open()

    @property
    def will_read(self) -> WillRead | None:
        """Fetches rows from a store ahead of their reads; None for local files."""
        return self._fetch_ahead if self._files.in_store or self._tables[0].will_read is not None else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        places: list[Place] = []
        if self._is_by_rows:
            for file, local, _ in self._file_of_row.split(rows):
                row_extents = self._tables[file].row_extents
                if row_extents is not None:
                    places.append((file, *row_extents(local)))
            return bool(self._files.will_read(places, ahead))
        for leaf, shards in enumerate(self._group_of_row):
            for file, groups, _ in self._file_of_group[leaf].split(np.unique(shards.of(rows))):
                table = self._tables[file]
                if table.will_read is None:
                    extents = [part for group in groups.tolist() for part in table.extents(leaf, group)]
                    places.append((file, *np.array(extents, np.int64).reshape(-1, 2).T))
                elif not table.will_read(leaf, groups.tolist(), ahead):
                    return False
        return not self._files.in_store or bool(self._files.will_read(places, ahead))

    def __reduce__(self) -> Any:
        return open_groups, (self._open_file, self._files, self._options, self._sampled)


class GroupSource(_GroupedRows, Source):
    """A `Source` over files that store rows of numbers in groups. Arguments: see `_GroupedRows`."""

    reads_columns = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spec = self._tables[0].spec

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file; for Zarr folders, sampled rows."""
        if (digests_of_files := self._file_digests()) is not None:
            return {"kind": "groups", "files": digests_of_files}
        self._sampled = self.sampled_rows()
        return {"kind": "groups", "rows": self._sampled}

    def sampled_rows(self) -> list[Any]:
        """For each Zarr folder, its number of rows and a digest of some of these rows."""
        found = []
        for first, end in zip(self._file_of_row.firsts.tolist(), self._file_of_row.ends.tolist(), strict=True):
            rows, hashed = [first + row for row in digests.sampled(end - first)], hashlib.sha256()
            self._fetch_ahead(np.array(rows, np.int64), 0)
            for row in rows:
                try:
                    values = jax.tree.leaves(self._single(row))
                except RowError:
                    values = []  # no error text, which differs by machine; the feed decides about bad rows
                for value in values:
                    hashed.update(np.asarray(value).tobytes()[: digests.SAMPLED_BYTES])
            found.append([end - first, hashed.hexdigest()[:32]])
        return found

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """See `Source`."""
        index = indices_of(rows)
        if self._is_by_rows:
            for places, leaves in self._by_rows([leaf for leaf, _, _ in cuts], index):
                for (_, columns, out), values in zip(cuts, leaves, strict=True):
                    out[places] = cut(values, columns)
            return
        with self._unchanged(index):
            for leaf, columns, out in cuts:
                for groups, group, local, places in self._parts(leaf, index, self._options.cache_bytes):
                    firsts = np.cumsum([0, *(each.rows for each in groups[:-1])])
                    target = out[places]  # a copy, unless `places` is a slice
                    reader = reader_of([each.values for each in groups])
                    reader.read(firsts.take(group) + local, columns, target)
                    if not isinstance(places, slice):
                        out[places] = target


class TableSource(_GroupedRows, EncodedSource):
    """An `EncodedSource` over files in which a column is bytes or text. Arguments: see `_GroupedRows`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        spec = self._tables[0].spec  # in the order of the file's columns, unless they are nested
        names = list(spec) if set(spec) == set(self._names) else self._names
        self._numbers = [self._names.index(name) for name in names]
        self.fields = tuple(names) if len(names) > 1 or self._tables[0].are_dicts else None
        self.instead = self._tables[0].instead

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file, and the columns."""
        columns = [self._names[leaf] for leaf in self._numbers]
        return {"kind": "table", "columns": columns, "files": self._file_digests()}

    def records(self, rows: Indices) -> Sequence[Record]:
        """See `EncodedSource`. Records are bytes or, with `fields`, dicts; numbers are NumPy scalars or arrays.

        Raises:
          IndexError: one of these rows does not exist.
          RowError: a record has a null or cannot be read, or a group of rows cannot be read.
        """
        columns: list[list[Any]] = [[None] * len(rows) for _ in self._numbers]
        if self._is_by_rows:
            for places, found in self._by_rows(self._numbers, rows):
                for column, values in zip(columns, found, strict=True):
                    _put(column, places, values)
        else:
            with self._unchanged(rows):
                for column, leaf in zip(columns, self._numbers, strict=True):
                    for (group,), _, local, here in self._parts(leaf, rows, at_once_bytes=0):
                        places = np.arange(len(rows))[here]
                        try:
                            _put(column, places, group.take(local))
                        except ValueError as error:
                            row = int(rows[places[0]])
                            what = "rows that are stored together"
                            raise _unreadable(what, error, row, self.file_of(row)) from error
        if self.fields is None:
            return columns[0]
        return [dict(zip(self.fields, values, strict=True)) for values in zip(*columns, strict=True)]

    def _described(self) -> list[tuple[str, str]]:
        kinds = [(self._names[leaf], described(self._leaves[leaf])) for leaf in self._numbers]
        return [("row", kinds[0][1])] if self.fields is None else kinds


def _put(column: list[Any], places: Indices, values: Sequence[Any]) -> None:
    for place, value in zip(places.tolist(), values, strict=True):
        column[place] = value


def _unreadable(what: str, error: Exception, row: int | None, file: str) -> RowError:
    return RowError(f"{what} could not be read: {error}", stage="read", row=row, file=file)


def _null_error(found: str, row: int | None, file: str) -> RowError:
    return RowError(
        f"every column of a row must have a value, and {found}; fill nulls (docs/formats.md), leave the column "
        "out with columns=[...], or replace such rows with feedline.Reading(bad_rows='substitute')",
        stage="read",
        row=row,
        file=file,
    )


# --- what the metadata of files promises ---


def _check_same_leaves(paths: Sequence[str], tables: Sequence[Grouped]) -> None:
    """Raise ValueError if the leaves of a file differ from the first file's."""
    first: dict[str, str] = {}
    for path, table in zip(paths, tables, strict=True):
        leaves = jax.tree_util.tree_leaves_with_path(table.spec)
        found = {jax.tree_util.keystr(at): described(leaf) for at, leaf in leaves}
        first = first or found
        if found != first:
            raise ValueError(
                f"files must agree in columns, dtypes and row shapes; {path} has {found}, {paths[0]} has {first}; "
                "choose columns=[...] that all files share, or write the files again"
            )


def _lengths_of(table: Grouped, path: str) -> list[Indices]:
    """For each leaf, the number of rows in each group. ValueError: these numbers are invalid."""
    lengths = [np.asarray(groups, np.int64) for groups in table.lengths]
    totals = {groups.sum(dtype=np.float64) for groups in lengths}  # float64: no overflow
    shortest = min(groups.min(initial=0) for groups in lengths)
    if shortest < 0 or len(totals) > 1 or max(totals) > _MAX_ROWS:
        raise ValueError(
            "a file must have at most 2^48 rows, the same number for all leaves, in groups of 0 rows or more, and "
            f"the metadata of {path} promises {sorted(map(int, totals))} rows, and a group with {shortest}; the "
            "file is damaged, write it again"
        )
    return lengths


def _check_column(column: Column, rows: int, leaf: Leaf) -> None:
    """Raise ValueError if a group does not hold the rows that the metadata of its file promises."""
    values = column.values
    found = f"{values.dtype}{list(values.shape)}" if column.ends is None else f"{column.rows} rows of bytes"
    promised = f"{rows} rows of bytes" if isinstance(leaf, str) else f"{leaf.dtype}{[rows, *leaf.shape]}"
    if found != promised or not values.flags.c_contiguous:
        raise ValueError(
            f"a group must hold the rows that the file's metadata promises, {promised}, and it holds {found}; "
            "the file is damaged, write it again"
        )
