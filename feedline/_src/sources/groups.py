"""The grouped way to read: files that store rows in groups, decoded when they are needed, in a bounded cache.

`GroupSource` gives rows of numbers, `TableSource` those in which a leaf is bytes or text. All else is shared.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.files.file import File, LruCache, check_may_open
from feedline._src.files.files import Files, Place
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import Column, Grouped, check_column, check_fits, described
from feedline._src.rows.shards import Indices, Shards, count_of, joined, rows_in
from feedline._src.rows.source import Cut, EncodedSource, Indexed, Record, Rows, Source, WillRead, indices_of
from feedline._src.runtime.exit import check_may_read
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.row_gather import reader_of

T = TypeVar("T")
OpenFile = Callable[[Any, OpenOptions], Grouped]
_FIX_NULLS = (
    "fill nulls (docs/formats.md) and write the file again, leave the column out with columns=[...], or take "
    "another row in its place with feedline.Reading(bad_rows='substitute')"
)


def open_groups(open_file: OpenFile, files: Files, options: OpenOptions) -> Source | EncodedSource:
    """The source of files that store rows in groups, or as arrays.

    Args:
      open_file: (file, options) → its description.
      files: in the order of their rows.
      options: columns and cache_bytes.

    Raises:
      ValueError: no rows, or files that do not fit together.
      FeedError: a file does not have the expected version.
    """
    tables = [files.opened(number, lambda file: open_file(file, options)) for number in range(len(files))]
    if all(table.arrays is not None for table in tables):
        return ArraySource(files.paths, options, functools.partial(_arrays_in, open_file), files)
    has_bytes = any(isinstance(leaf, str) for leaf in jax.tree.leaves(tables[0].spec))
    return (TableSource if has_bytes else GroupSource)(open_file, files, options, tables)


def _arrays_in(open_file: OpenFile, file: File, options: OpenOptions) -> list[Any]:
    """The rows of a file as trees of arrays."""
    arrays = open_file(file, options).arrays
    assert arrays is not None, file  # it had arrays when this version was opened
    return arrays()


class _GroupedRows(Indexed):
    """Rows of files that store them in groups, whatever a leaf is. Reads are thread-safe.

    The most recently used groups stay in a cache of at most `cache_bytes`, so an order should read neighbouring
    rows soon after each other, as a blocked order does. A group that two threads need is read once.

    A file must not change while it is open: its version is checked whenever a group is read, and sent to worker
    processes with the source. Arguments and errors are those of `open_groups`.
    """

    def __init__(self, open_file: OpenFile, files: Files, options: OpenOptions, tables: Sequence[Grouped]) -> None:
        self._open_file, self._files, self._options, self._tables = open_file, files, options, tables
        self._paths, first = files.paths, tables[0]
        for path, table in zip(self._paths, tables, strict=True):
            check_fits(table, path, first, self._paths[0])
        found = jax.tree_util.tree_leaves_with_path(first.spec)
        self._leaves = [leaf for _, leaf in found]
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
        numbers = range(len(self._leaves))
        self._file_of_group = [Shards([count_of(table.lengths[leaf]) for table in tables]) for leaf in numbers]
        self._group_of_row = [joined([table.lengths[leaf] for table in tables]) for leaf in numbers]
        self._file_of_row = Shards([rows_in(table.lengths[0]) for table in tables])
        if len(self) == 0:
            raise ValueError(
                f"a source must have at least one row, got {self._paths[0]} with none; check what wrote it"
            )
        if (held := sum(table.held_bytes for table in tables)) > options.cache_bytes:
            raise ValueError(
                f"files that are read into memory must fit into cache_bytes={options.cache_bytes} together, and "
                f"the {len(files)} from {self._paths[0]} have {held} bytes; raise cache_bytes, or write them as "
                "Parquet"
            )
        self._cache: LruCache[Column] = LruCache(options.cache_bytes)

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
        """Refuse sampled rows that cannot be read, and nulls that the footer of a Parquet file counts."""
        for table in self._tables:
            if table.identity is not None:
                table.identity(False)
        for leaf, name in enumerate(self._names):
            counts = [table.nulls.get(leaf, 0) for table in self._tables]
            if sum(counts):
                files = f" in {sum(map(bool, counts))} of the {len(counts)} files" if len(counts) > 1 else ""
                raise RowError(
                    f"every column of a row must have a value, and {name!r} has {sum(counts):,} "
                    f"null{'s' if sum(counts) > 1 else ''}{files}; {_FIX_NULLS}",
                    stage="read",
                    file=self._paths[int(np.argmax(np.array(counts) > 0))],
                )

    def _digests(self) -> list[Any]:
        """What identifies the contents of each file: no path, so a moved data set stays the same."""
        for file in self._files:
            file.check()
        found = [table.identity(True) for table in self._tables if table.identity is not None]
        found = found or self._files.digests
        for file in self._files:
            file.check()
        return found

    def _pieces(self, leaf: int, rows: Indices) -> Iterator[tuple[list[Column], Indices, Indices, Any]]:
        """The groups of some rows of a leaf: as many at a time as fit into the cache, at least one.

        Yields:
          (groups, part, local, here): `here` are the places in `rows` of those that these groups hold; for each of
          them, `part` is the index of its group, and `local` its row in that group.
        """
        shards, spec = self._group_of_row[leaf], self._leaves[leaf]
        group_of_row = shards.of(rows)
        needed = np.unique(group_of_row)
        files, at_once = self._file_of_group[leaf].of(needed), 1
        if not isinstance(spec, str):
            largest = int(shards.lengths_of(needed).max(initial=1)) * math.prod(spec.shape) * spec.dtype.itemsize
            at_once = max(1, self._options.cache_bytes // max(1, largest))
        with self._unchanged_in_place(np.unique(files)):
            for start in range(0, len(needed), at_once):
                some = slice(start, start + at_once)
                columns = self._read_groups(leaf, needed[some].tolist(), files[some].tolist())
                here: Any = slice(None)
                if len(columns) < len(needed):
                    here = np.flatnonzero(np.isin(group_of_row, needed[some]))
                part = np.searchsorted(needed[some], group_of_row[here])
                local = rows[here] - shards.firsts_of(group_of_row[here])
                self._check_nulls(leaf, columns, part, local, rows[here])
                yield columns, part, local, here

    def _read_groups(self, leaf: int, groups: list[int], files: list[int]) -> list[Column]:
        """Groups, from mapped memory, the cache or their files."""
        # threads of one batch need the same groups: each starts at another one, to read them in parallel
        first = threading.get_native_id() % len(groups)
        found: dict[int, Column] = {}
        for group, file in zip(groups[first:] + groups[:first], files[first:] + files[:first], strict=True):
            if self._tables[file].in_place:
                found[group] = self._tables[file].read(leaf, group - int(self._file_of_group[leaf].firsts[file]))
            else:
                read = functools.partial(self._read_group, leaf, group, file)
                found[group] = self._cache.get((leaf, group), read)
        return [found[group] for group in groups]

    def _read_group(self, leaf: int, group: int, file: int) -> Column:
        shards, one = self._group_of_row[leaf], np.array([group])

        def read() -> Column:
            column = self._tables[file].read(leaf, group - int(self._file_of_group[leaf].firsts[file]))
            check_column(column, int(shards.lengths_of(one)[0]), self._leaves[leaf])
            return column

        return self._checked(read, file, int(shards.firsts_of(one)[0]), "rows that are stored together")

    @contextlib.contextmanager
    def _unchanged_in_place(self, files: Iterable[int]) -> Iterator[None]:
        """Refuse files whose rows are used in place, if they were written to before or during a `with` block. That
        explains any error inside it."""
        in_place = [self._files[file] for file in files if self._tables[file].in_place]
        for file in in_place:
            file.check_open()
        try:
            yield
        finally:
            for file in in_place:
                file.check_open()

    def _checked(self, read: Callable[[], T], file: int, row: int, what: str) -> T:
        """Call `read`. A change of the file is a FeedError, any other error a RowError."""
        check_may_read()
        try:
            self._files[file].check()
            found = read()
        except FeedError:
            raise
        except Exception as error:
            self._files[file].check()  # a change of the file explains any other error, and is not a bad row
            check_may_open(error, self._paths[file])
            raise RowError(
                f"{what} could not be read: {error}", stage="read", row=row, file=self._paths[file]
            ) from error
        self._files[file].check()
        return found

    def _check_nulls(self, leaf: int, columns: list[Column], part: Indices, local: Indices, rows: Indices) -> None:
        """Refuse rows with a null. The error names the first one."""
        bad = [
            at[column.null[local[at]]]
            for i, column in enumerate(columns)
            if column.null is not None
            for at in [np.flatnonzero(part == i)]
        ]
        if sum(map(len, bad)):
            row = int(rows[np.concatenate(bad).min()])
            raise RowError(
                f"every column of a row must have a value, and {self._names[leaf]!r} is null in this row; "
                f"{_FIX_NULLS}",
                stage="read",
                row=row,
                file=self.file_of(row),
            )

    @property
    def will_read(self) -> WillRead | None:
        """For objects in a store; None for files."""
        return self._fetch_ahead if self._files.in_store or self._tables[0].will_read is not None else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        if self._files.in_store:
            return self._files.will_read(self._places(rows), ahead)
        needed = ((self._tables[file].will_read, leaf, groups) for leaf, file, groups in self._groups_of(rows))
        return all(will_read is None or will_read(leaf, groups, ahead) for will_read, leaf, groups in needed)

    def _places(self, rows: Indices) -> Iterator[Place]:
        for leaf, file, groups in self._groups_of(rows):
            extents = [part for group in groups for part in self._tables[file].extents(leaf, group)]
            yield file, *np.array(extents, np.int64).reshape(-1, 2).T

    def _groups_of(self, rows: Indices) -> Iterator[tuple[int, int, list[int]]]:
        """Leaf, file, and numbers in it of the groups of some rows."""
        for leaf, shards in enumerate(self._group_of_row):
            for file, groups, _ in self._file_of_group[leaf].split(np.unique(shards.of(rows))):
                yield leaf, file, groups.tolist()

    def __reduce__(self) -> Any:
        return open_groups, (self._open_file, self._files, self._options)


class GroupSource(_GroupedRows, Source):
    """A `Source` over files that store rows of numbers in groups. Arguments are those of `_GroupedRows`."""

    reads_columns = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spec = self._tables[0].spec

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file."""
        return {"kind": "groups", "files": self._digests()}

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """See `Source`."""
        for leaf, columns, out in cuts:
            for groups, part, local, here in self._pieces(leaf, indices_of(rows)):
                firsts = np.cumsum([0, *(group.rows for group in groups[:-1])])
                target = out[here]  # a copy, unless `here` is a slice of all rows
                reader_of([group.values for group in groups]).read(firsts.take(part) + local, columns, target)
                if not isinstance(here, slice):
                    out[here] = target


class TableSource(_GroupedRows, EncodedSource):
    """An `EncodedSource` over files in which a column is bytes or text. Arguments are those of `_GroupedRows`."""

    instead = (
        ", or leave columns of bytes and text out with open_source(..., columns=[...]), or number their values: "
        "column.combine_chunks().dictionary_encode().indices (docs/formats.md)"
    )

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        spec = self._tables[0].spec  # in the order of the file's columns, unless they are nested
        names = list(spec) if set(spec) == set(self._names) else self._names
        self._numbers = [self._names.index(name) for name in names]
        self.fields = tuple(names) if len(names) > 1 else None

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file, and the columns."""
        columns = [self._names[leaf] for leaf in self._numbers]
        return {"kind": "table", "columns": columns, "files": self._digests()}

    def records(self, rows: Indices) -> Sequence[Record]:
        """See `EncodedSource`: bytes, or of several columns dicts by name, numbers as NumPy scalars or arrays.

        Raises:
          IndexError: there is no such row.
          RowError: also a null, or a group of rows that cannot be read.
        """
        columns: list[list[Any]] = [[None] * len(rows) for _ in self._numbers]
        for column, places, values in self._by_rows(rows) if self._tables[0].read_rows else self._by_groups(rows):
            for place, value in zip(places.tolist(), values, strict=True):
                columns[column][place] = value
        if self.fields is None:
            return columns[0]
        return [dict(zip(self.fields, values, strict=True)) for values in zip(*columns, strict=True)]

    def _by_rows(self, rows: Indices) -> Iterator[tuple[int, Indices, Sequence[Any]]]:
        """Column, places in `rows`, and values, of files whose rows are read one by one."""
        for file, local, offsets in self._file_of_row.split(rows):
            places = np.arange(len(rows))[offsets]
            for column, values in enumerate(self._rows_of(file, local)):
                yield column, places, values

    def _rows_of(self, file: int, rows: Indices) -> Sequence[Sequence[Any]]:
        """The values of some rows of a file, for each column. The error names the first that cannot be read."""
        read_rows, first = self._tables[file].read_rows, int(self._file_of_row.firsts[file])
        assert read_rows is not None
        try:
            return self._checked(lambda: read_rows(self._numbers, rows), file, first + int(rows[0]), "a row")
        except RowError:
            for row in rows[:, None] if len(rows) > 1 else ():
                self._rows_of(file, row)
            raise

    def _by_groups(self, rows: Indices) -> Iterator[tuple[int, Indices, Sequence[Any]]]:
        """Column, places in `rows`, and values, of files whose groups are decoded whole."""
        for column, leaf in enumerate(self._numbers):
            for groups, part, local, here in self._pieces(leaf, rows):
                for i, group in enumerate(groups):
                    at = np.flatnonzero(part == i)
                    places = np.arange(len(rows))[here][at]
                    try:
                        yield column, places, group.take(local[at])
                    except ValueError as error:
                        row = int(rows[places[0]])
                        raise RowError(
                            f"rows that are stored together could not be read: {error}",
                            stage="read",
                            row=row,
                            file=self.file_of(row),
                        ) from error

    def _described(self) -> list[tuple[str, str]]:
        kinds = [(self._names[leaf], described(self._leaves[leaf])) for leaf in self._numbers]
        return [("row", kinds[0][1])] if self.fields is None else kinds
