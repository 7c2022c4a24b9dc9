"""The source of rows of tables with columns of bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.files.lru_cache import LruCache
from feedline._src.files.opening import check_may_open
from feedline._src.formats.grouped_file import Rows, TableFile
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.opening import digest_of
from feedline._src.formats.versioned_files import VersionedFiles, Versions
from feedline._src.rows.encoded_source import EncodedRows, Record, read_by_shard
from feedline._src.rows.shards import Indices, Shards
from feedline._src.runtime.ending import check_may_read

OpenTable = Callable[[Any, OpenOptions], TableFile | None]


class TableSource(EncodedRows):
    """An `EncodedSource` over Parquet, Arrow or HDF5 files with columns of bytes or text.

    Groups of rows that can only be read whole stay in a cache of at most `cache_bytes`. Reads are thread-safe.

    Args:
      open_file: (path or object in a store, options) → the open file.
      paths: of the files, whose rows follow each other.
      options: columns and cache_bytes.
      versions: the expected versions of the files; by default, the present ones. Or the files themselves, open.

    Raises:
      ValueError: no rows, or files with different columns.
      FeedError: a file does not have the expected version.
    """

    instead = (
        ", or leave columns of bytes and text out with open_source(..., columns=[...]), or number their values: "
        "column.combine_chunks().dictionary_encode().indices (docs/tables.md)"
    )

    def __init__(
        self,
        open_file: OpenTable,
        paths: Sequence[str],
        options: OpenOptions,
        versions: Versions | VersionedFiles | None = None,
    ) -> None:
        self._open_file = open_file
        self._paths = paths
        self._options = options
        self._versioned = VersionedFiles.of(paths, options.store, versions)
        self._files = [self._opened(file) for file in range(len(paths))]
        self._kinds = self._files[0].kinds
        for path, file in zip(paths, self._files, strict=True):
            if file.kinds != self._kinds:
                raise ValueError(
                    f"files must agree in columns and their types; {path} has {file.kinds}, {paths[0]} "
                    f"{self._kinds}; choose columns=[...] that they share, or write them again"
                )
        self.fields = tuple(self._kinds) if len(self._kinds) > 1 else None
        self._groups = Shards([len(file.lengths) for file in self._files])
        self._rows = Shards([rows for file in self._files for rows in file.lengths] or [0])
        if len(self._rows) == 0:
            raise ValueError(f"a source must have at least one row, got {paths[0]} with none; check what wrote it")
        self._cache: LruCache[Rows] = LruCache(options.cache_bytes)

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file, and the columns: no path, so a moved data set stays the same."""
        digested = [digest_of(self._versioned[file]) for file in range(len(self._paths))]
        for file in range(len(self._paths)):
            self._versioned.check(file)
        return {"kind": self._files[0].form, "columns": list(self._kinds), "files": digested}

    def __len__(self) -> int:
        return len(self._rows)

    def records(self, rows: Indices) -> Sequence[Record]:
        """The rows: bytes, or of several columns dicts by name, numbers as NumPy scalars or arrays.

        Raises:
          IndexError: there is no such row.
          RowError: a value is null, or a group of rows cannot be read.
          FeedError: a file was changed.
        """
        return read_by_shard(self._rows, rows, self._read)

    @property
    def will_read(self) -> Callable[[Indices, int], bool] | None:
        """The `will_read` of a `ToldSource`, for objects in a store; None for files."""
        return self._fetch_ahead if self._versioned.in_store else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        extents = []
        for file, within, _ in self._groups.split(np.unique(self._rows.of(rows))):
            for group in within.tolist():
                extents += [(file, extent) for extent in self._files[file].extents(group)]
        return self._versioned.fetch_ahead(extents, ahead)

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._groups.of(self._rows.of(np.array([row])))[0])]

    def close(self) -> None:
        """Drop the cached groups."""
        self._cache.clear()
        self._versioned.close()

    def _read(self, group: int, local: Indices) -> Sequence[Record]:
        """Rows of one group."""
        file = int(self._groups.of(np.array([group]))[0])
        first, reads = int(self._rows.firsts[group]), self._files[file].reads
        check_may_read()
        try:
            if reads == "group":
                found = self._cache.get(group, functools.partial(self._group, file, group))
            else:
                check = self._versioned.check_open if reads == "mapped" else self._versioned.check
                check(file)
                found = self._files[file].read(group - int(self._groups.firsts[file]))
            null = found.nulls(local)
            records = found.take(local) if null is None else []
            if reads == "rows":
                self._versioned.check(file)
        except FeedError:
            raise
        except Exception as error:
            self._versioned.check(file)  # a change explains any other error, and is no bad row
            check_may_open(error, self._paths[file])
            if reads != "group" and len(local) > 1:  # which row it is
                return [self._read(group, local[i : i + 1])[0] for i in range(len(local))]
            raise RowError(
                f"{'a row' if reads == 'rows' else 'rows that are stored together'} could not be read: {error}",
                stage="read",
                row=first + int(local[0]),
                file=self._paths[file],
            ) from error
        if null is not None:
            name, at = null
            raise RowError(
                f"every column of a row must have a value, and {name!r} is null in this row; fill nulls "
                "(docs/tables.md) and write the file again, leave the column out with columns=[...], "
                "or take another row in its place with feedline.Reading(bad_rows='substitute')",
                stage="read",
                row=first + int(local[at]),
                file=self._paths[file],
            )
        return records if self.fields is not None else [next(iter(record.values())) for record in records]

    def _group(self, file: int, group: int) -> Rows:
        self._versioned.check(file)
        found = self._files[file].read(group - int(self._groups.firsts[file]))
        self._versioned.check(file)
        wanted = int(self._rows.ends[group] - self._rows.firsts[group])
        if found.row_count != wanted:
            raise ValueError(f"its metadata promises {wanted} rows, and it has {found.row_count}")
        return found

    def _opened(self, file: int) -> TableFile:
        path = self._paths[file]
        opened = self._versioned.opened(file, self._open_file, self._options)
        if opened is None:
            raise ValueError(
                f"files must agree in columns and their types; {path} has no column of bytes, {self._paths[0]} "
                "has; choose columns=[...] that they share, or write them again"
            )
        return opened

    def _described(self) -> list[tuple[str, str]]:
        return [("row" if self.fields is None else name, kind) for name, kind in self._kinds.items()]

    def __reduce__(self) -> Any:
        return TableSource, (self._open_file, self._paths, self._options, self._versioned.versions)
