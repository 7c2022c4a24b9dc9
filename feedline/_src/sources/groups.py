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
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.files.file import File, LruCache, check_may_open
from feedline._src.files.files import Files, Place
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import (
    Column,
    FileArray,
    Grouped,
    Mask,
    check_column,
    check_fits,
    described,
)
from feedline._src.rows import digests
from feedline._src.rows.encoded_source import EncodedRows, Record
from feedline._src.rows.shards import Indices, Shards, count_of, joined, offsets_by_label, rows_in
from feedline._src.rows.source import Columns, Indexed, Source, WillRead
from feedline._src.runtime.ending import check_may_read
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.row_gather import RowGather

Array = npt.NDArray[Any]
T = TypeVar("T")
OpenFile = Callable[[Any, OpenOptions], Grouped]
_FIX_NULLS = (
    "fill nulls (docs/tables.md) and write the file again, leave the column out with columns=[...], or take "
    "another row in its place with feedline.Reading(bad_rows='substitute')"
)


class _GroupedRows(Indexed):
    """Rows of files that store them in groups, whatever a leaf is.

    The most recently used groups stay in a cache of at most `cache_bytes`, so an order should read neighbouring
    rows soon after each other, as a blocked order does. Reads are thread-safe; a group that two threads need is
    read once.

    A file must not change while it is open: its version is checked whenever a group is read, and sent to worker
    processes with the source.

    Arguments and errors are those of `open_groups`; `tables`: the descriptions of the files.
    """

    def __init__(self, open_file: OpenFile, files: Files, options: OpenOptions, tables: Sequence[Grouped]) -> None:
        self._open_file, self._files, self._options, self._tables = open_file, files, options, tables
        self._paths, first = files.paths, tables[0]
        for path, table in zip(self._paths, self._tables, strict=True):
            check_fits(table, path, first, self._paths[0])
        found = jax.tree_util.tree_leaves_with_path(first.spec)
        self._leaves = [leaf for _, leaf in found]
        self._names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]
        numbers = range(len(self._leaves))
        self._groups = [Shards([count_of(table.lengths[leaf]) for table in self._tables]) for leaf in numbers]
        """For each leaf, the file of each group."""
        self._shards = [joined([table.lengths[leaf] for table in self._tables]) for leaf in numbers]
        """For each leaf, the group of each row."""
        self._by_file = Shards([rows_in(table.lengths[0]) for table in self._tables])
        if len(self) == 0:
            raise ValueError(
                f"a source must have at least one row, got {self._paths[0]} with none; check what wrote it"
            )
        if (held := sum(table.held_bytes for table in self._tables)) > options.cache_bytes:
            raise ValueError(
                f"files that are read into memory must fit into cache_bytes={options.cache_bytes} together, and "
                f"the {len(files)} from {self._paths[0]} have {held} bytes; raise cache_bytes, or write them as "
                "Parquet"
            )
        self._cache: LruCache[Column] = LruCache(options.cache_bytes)

    def __len__(self) -> int:
        return len(self._by_file)

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._by_file.of(np.array([row]))[0])]

    def close(self) -> None:
        """Drop the cached groups, and give up what is being fetched."""
        self._cache.clear()
        self._files.close()
        for table in self._tables:
            table.close()

    def check_rows(self) -> None:
        """Refuse nulls that are known before rows are read, as from the footer of a Parquet file.

        Raises:
          RowError: there are some.
        """
        for leaf, name in enumerate(self._names):
            counts = [table.nulls.get(leaf, 0) for table in self._tables]
            if sum(counts):
                files = f" in {sum(map(bool, counts))} of the {len(counts)} files" if len(counts) > 1 else ""
                raise RowError(
                    f"every column of a row must have a value, and {name!r} has {sum(counts):,} "
                    f"null{'s' if sum(counts) > 1 else ''}{files}; "
                    f"{_FIX_NULLS}",
                    stage="read",
                    file=self._paths[int(np.argmax(np.array(counts) > 0))],
                )

    def _digests(self, allow_bad_rows: bool = False) -> list[Any]:
        """What identifies the contents of each file: no path, so a moved data set stays the same."""
        for file in self._files:
            file.check()
        found = [table.identity(allow_bad_rows) for table in self._tables if table.identity is not None]
        if not found:
            samples = self._files.samples([digests.samples_of_file(file.size) for file in self._files])
            found = [digests.of_samples(file.size, some) for file, some in zip(self._files, samples, strict=True)]
        for file in self._files:
            file.check()
        return found

    def _column(self, leaf: int, group: int, file: int) -> Column:
        """The rows of a group, from memory, the cache or the file."""
        if self._tables[file].in_place:
            return self._tables[file].read(leaf, group - int(self._groups[leaf].firsts[file]))
        return self._cache.get((leaf, group), functools.partial(self._read_group, leaf, group))

    @contextlib.contextmanager
    def _in_place(self, files: Iterable[int]) -> Iterator[None]:
        """Refuse files whose rows are used in place, if they were written to before or during a `with` block. That
        explains any error inside it."""
        used = [self._files[file] for file in files if self._tables[file].in_place]
        for file in used:
            file.check_open()
        try:
            yield
        finally:
            for file in used:
                file.check_open()

    def _read_group(self, leaf: int, group: int) -> Column:
        one = np.array([group])
        ((file, within, _),) = self._groups[leaf].split(one)

        def read() -> Column:
            column = self._tables[file].read(leaf, int(within[0]))
            check_column(column, int(self._shards[leaf].lengths_of(one)[0]), self._leaves[leaf])
            return column

        return self._checked(
            read, file, int(self._shards[leaf].firsts_of(one)[0]), "rows that are stored together"
        )

    def _checked(self, read: Callable[[], T], file: int, row: int, what: str) -> T:
        """What `read` returns, of a file that does not change meanwhile. Other errors are those of a row."""
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

    def _check_null(self, leaf: int, null: Mask, rows: Indices) -> None:
        """Refuse rows with a null; `null`: bool[k]. The error names the first one."""
        if null.any():
            row = int(rows[int(np.argmax(null))])
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
        return self._will_read if self._files.in_store or self._tables[0].will_read is not None else None

    def _will_read(self, rows: Indices, ahead: int) -> bool:
        if self._files.in_store:
            return self._files.will_read(self._places(rows), ahead)
        touched = ((self._tables[file].will_read, leaf, groups) for leaf, file, groups in self._touched(rows))
        return all(will_read is None or will_read(leaf, groups, ahead) for will_read, leaf, groups in touched)

    def _touched(self, rows: Indices) -> Iterator[tuple[int, int, list[int]]]:
        """Leaf, file, and numbers in it of the groups of some rows."""
        for leaf, shards in enumerate(self._shards):
            for file, within, _ in self._groups[leaf].split(np.unique(shards.of(rows))):
                yield leaf, file, within.tolist()

    def _places(self, rows: Indices) -> Iterator[Place]:
        for leaf, file, groups in self._touched(rows):
            extents = [part for group in groups for part in self._tables[file].extents(leaf, group)]
            yield file, *np.array(extents, np.int64).reshape(-1, 2).T

    def __reduce__(self) -> Any:
        return open_groups, (self._open_file, self._files, self._options)


class GroupSource(_GroupedRows, Source):
    """A `RowSource` over files that store rows of numbers in groups. Arguments are those of `_GroupedRows`."""

    reads_columns = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.spec = self._tables[0].spec

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file."""
        return {"kind": "groups", "files": self._digests()}

    def identity_allowing_bad_rows(self) -> dict[str, Any]:
        """The `identity` with each sampled row that cannot be read as a part of it, instead of an error."""
        return {"kind": "groups", "files": self._digests(allow_bad_rows=True)}

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`.

        Raises:
          RowError: a row has a null, or its group cannot be read.
          FeedError: a file has changed since it was opened.
        """
        for leaf, target in enumerate(jax.tree_util.tree_leaves(out)):
            self.read_leaf(leaf, rows, (slice(None),) * (target.ndim - 1), target)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype."""
        shards = self._shards[leaf]
        group = shards.of(rows)
        touched = np.unique(group)
        files, at_once = self._groups[leaf].of(touched), self._groups_at_once(leaf, touched)
        with self._in_place(np.unique(files)):
            for start in range(0, len(touched), at_once):
                some = slice(start, start + at_once)
                found = self._cached(leaf, touched[some].tolist(), files[some].tolist())
                all_at_once = len(found) == len(touched)
                here: Any = slice(None) if all_at_once else np.flatnonzero(np.isin(group, touched[some]))
                part = np.searchsorted(touched[some], group[here])
                local = rows[here] - shards.firsts_of(group[here])
                self._check_null(leaf, _nulls_at(found, part, local), rows[here])
                target = out[here]  # a copy, unless these are all groups
                firsts = np.cumsum([0, *(column.rows for column in found[:-1])])
                RowGather([column.values for column in found]).read(firsts.take(part) + local, columns, target)
                if not all_at_once:
                    out[here] = target

    def _groups_at_once(self, leaf: int, touched: Indices) -> int:
        """How many of these groups a read may hold at a time: those that fit into cache_bytes, at least one."""
        row = self._leaves[leaf]
        most = int(self._shards[leaf].lengths_of(touched).max(initial=1))
        row_bytes: int = math.prod(row.shape) * row.dtype.itemsize
        return max(1, self._options.cache_bytes // max(1, most * row_bytes))

    def _cached(self, leaf: int, groups: list[int], files: list[int]) -> list[Column]:
        # threads of one batch need the same groups: each starts at another one, to read them in parallel
        first = threading.get_native_id() % len(groups)
        rotated = zip(groups[first:] + groups[:first], files[first:] + files[:first], strict=True)
        read: dict[int, Any] = {group: self._column(leaf, group, file) for group, file in rotated}
        return [read[group] for group in groups]


def _nulls_at(columns: Sequence[Column], part: Indices, local: Indices) -> Mask:
    """bool[k]: whether row local[i] of columns[part[i]] has a null."""
    null = np.zeros(len(local), np.bool_)
    for i, column in enumerate(columns):
        if column.null is not None:
            asked = np.flatnonzero(part == i)
            null[asked] = column.null[local[asked]]
    return null


class TableSource(_GroupedRows, EncodedRows):
    """An `EncodedSource` over files in which a column is bytes or text. Arguments are those of `_GroupedRows`."""

    instead = (
        ", or leave columns of bytes and text out with open_source(..., columns=[...]), or number their values: "
        "column.combine_chunks().dictionary_encode().indices (docs/tables.md)"
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
        """The rows: bytes, or of several columns dicts by name, numbers as NumPy scalars or arrays.

        Raises:
          IndexError: there is no such row.
          RowError: a value is null, or a group of rows cannot be read.
          FeedError: a file was changed.
        """
        found: list[Record] = [b""] * len(rows)
        for file, local, offsets in self._by_file.split(rows):
            columns: Sequence[Sequence[Any]]
            if self._tables[file].read_rows is not None:
                columns = self._rows_of(file, local)
            else:
                with self._in_place([file]):
                    columns = [self._values(leaf, rows[offsets], file) for leaf in self._numbers]
            places = np.arange(len(rows))[offsets].tolist()
            for place, *values in zip(places, *columns, strict=True):
                found[place] = values[0] if self.fields is None else dict(zip(self.fields, values, strict=True))
        return found

    def _rows_of(self, file: int, rows: Indices) -> Sequence[Sequence[Any]]:
        """The values of some rows of a file, for each leaf."""
        read_rows, row = self._tables[file].read_rows, int(self._by_file.firsts[file] + rows[0])
        assert read_rows is not None
        try:
            values: Sequence[Sequence[Any]]
            values = self._checked(lambda: read_rows(self._numbers, rows), file, row, "a row")
        except RowError:
            if len(rows) == 1:
                raise
            one_by_one = [self._rows_of(file, rows[i : i + 1]) for i in range(len(rows))]  # which row it is
            return [[one[i][0] for one in one_by_one] for i in range(len(self._numbers))]
        return values

    def _values(self, leaf: int, rows: Indices, file: int) -> list[Any]:
        """The values of a leaf of some rows of a file."""
        shards, found = self._shards[leaf], [None] * len(rows)
        groups = shards.of(rows)
        within = rows - shards.firsts_of(groups)
        for group, offsets in offsets_by_label(groups, int(groups.max(initial=0)) + 1):
            column, local = self._column(leaf, group, file), within[offsets]
            if column.null is not None:
                self._check_null(leaf, column.null[local], rows[offsets])
            try:
                values = column.take(local)
            except ValueError as error:
                raise RowError(
                    f"rows that are stored together could not be read: {error}",
                    stage="read",
                    row=int(rows[offsets][0]),
                    file=self._paths[file],
                ) from error
            for place, value in zip(np.arange(len(rows))[offsets].tolist(), values, strict=True):
                found[place] = value
        return found

    def _described(self) -> list[tuple[str, str]]:
        kinds = [(self._names[leaf], described(self._leaves[leaf])) for leaf in self._numbers]
        return [("row", kinds[0][1])] if self.fields is None else kinds


def open_groups(open_file: OpenFile, files: Files, options: OpenOptions) -> Source | EncodedRows:
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
        known = {file.name: table for file, table in zip(files, tables, strict=True)}
        return ArraySource(files.paths, options, _Arrays(open_file, known, {}), files)
    has_bytes = any(isinstance(leaf, str) for leaf in jax.tree.leaves(tables[0].spec))
    return (TableSource if has_bytes else GroupSource)(open_file, files, options, tables)


class _Arrays:
    """(file, options) → its rows as trees of arrays. Other processes are sent their places, and do not look again.

    Args:
      open_file: (file, options) → the description of a file.
      tables: descriptions that are known, by the names of files; each is used once.
      places: by the names of files, trees of functions of a file that give its arrays.
    """

    def __init__(self, open_file: OpenFile, tables: dict[str, Grouped], places: dict[str, list[Any]]) -> None:
        self._open_file, self._tables, self._places = open_file, tables, places

    def __call__(self, file: File, options: OpenOptions) -> list[Any]:
        if file.name in self._places:
            found: list[Any] = jax.tree.map(lambda at: at(file), self._places[file.name])
            return found
        arrays = (self._tables.pop(file.name, None) or self._open_file(file, options)).arrays
        assert arrays is not None, file  # of a version that had arrays
        found = arrays()
        if all(isinstance(leaf, FileArray) for leaf in jax.tree.leaves(found)):
            self._places[file.name] = jax.tree.map(lambda leaf: leaf.at, found)
        return found

    def __reduce__(self) -> Any:
        return _Arrays, (self._open_file, {}, self._places)
