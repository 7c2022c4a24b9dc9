"""The source of rows of HDF5 files with datasets of bytes or text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.rows.shards import Indices, Shards
from feedline._src.sources.encoded.encoded_rows import EncodedRows
from feedline._src.sources.encoded.open_files import OpenFile, OpenFiles, unreadable
from feedline._src.sources.encoded.records import Record
from feedline._src.sources.encoded.remote_shards import FetchedParts
from feedline._src.sources.formats.file_version import FileVersion
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.sources.formats.versioned_files import VersionedFiles, Versions
from feedline._src.sources.hdf5.files import Leaf, read_file
from feedline._src.sources.hdf5.heap import places_of, read_values


class Stored(Protocol):
    """All leaves as they are stored, with random access."""

    @property
    def spec(self) -> Any: ...
    @property
    def identity(self) -> dict[str, Any]: ...
    @property
    def will_read(self) -> Callable[[Indices, int], bool] | None: ...
    def are_here(self, rows: Indices) -> bool: ...
    def read(self, rows: Indices, out: Any) -> None: ...
    def close(self) -> None: ...


class Hdf5Records(EncodedRows):
    """An `EncodedSource` over HDF5 files: bytes and text of any length, and numbers beside them.

    A dataset of variable length holds references to its values. They are read as any column, and then the values
    by plain reads of the file. Reads are thread-safe.

    Args:
      open_stored: (paths, options) → the source of the stored leaves.
      paths: of the files, whose rows follow each other.
      options: columns and cache_bytes.
      versions: the expected versions of the files; by default, the present ones.

    Raises:
      ValueError: no rows, or files that do not fit together.
      FeedError: a file does not have the expected version.
    """

    instead = ", or leave datasets of bytes and text out with open_source(..., columns=[...])"

    def __init__(
        self,
        open_stored: Callable[[Sequence[str], OpenOptions], Stored],
        paths: Sequence[str],
        options: OpenOptions,
        versions: Versions | None = None,
    ) -> None:
        self._open_stored, self._paths, self._options = open_stored, paths, options
        self._versioned = VersionedFiles(paths, options.store, versions)
        try:
            files = [read_file(self._versioned[number], options) for number in range(len(paths))]
            self._stored = open_stored(paths, options)
        finally:  # also if it cannot be opened: a change explains that better
            for number in range(len(paths)):
                self._versioned.check(number)
        names = jax.tree_util.tree_leaves_with_path(files[0].leaves, is_leaf=lambda node: isinstance(node, Leaf))
        self._kinds = {
            jax.tree_util.keystr(at, simple=True, separator="/"): leaf.field.bytes for at, leaf in names
        }
        for path, file in zip(paths, files, strict=True):
            if [leaf.field.bytes for leaf in file.flat] != list(self._kinds.values()):
                raise ValueError(
                    f"files must agree in datasets and their types, and {path} stores bytes in another way than "
                    f"{paths[0]}; choose columns=[...] that they share, or write them again"
                )
        self.fields = tuple(self._kinds) if len(self._kinds) > 1 else None
        self._bases = [file.base for file in files]
        self._rows = Shards([file.rows for file in files])
        self._open = OpenFiles()

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file, and the columns: no path, so a moved data set stays the same."""
        return {**self._stored.identity, "kind": "hdf5", "columns": list(self._kinds)}

    def __len__(self) -> int:
        return len(self._rows)

    def records(self, rows: Indices) -> Sequence[Record]:
        """The rows: bytes, or of several leaves dicts by name, numbers as NumPy scalars or arrays.

        Raises:
          IndexError: there is no such row.
          RowError: a value cannot be read.
          FeedError: a file was changed.
        """
        out = self._empty(len(rows))
        self._rows.check(rows)
        self._stored.read(rows, out)
        columns: list[list[Any]] = []
        for kind, stored in zip(self._kinds.values(), jax.tree.leaves(out), strict=True):
            if kind is None:
                columns.append(list(stored))
            elif kind.stored == "heap":
                columns.append([kind.value(value) for value in self._values(rows, stored, kind.dtype.itemsize)])
            else:
                columns.append([kind.value(value.tobytes()) for value in stored])
        if self.fields is None:
            return columns[0]
        return [dict(zip(self.fields, row, strict=True)) for row in zip(*columns, strict=True)]

    @property
    def will_read(self) -> Callable[[Indices, int], bool] | None:
        """As of a `ToldSource`, for objects in a store; None for files."""
        return self._fetch_ahead if self._versioned.in_store else None

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        """References first; their values once the references are there."""
        assert self._stored.will_read is not None
        if not self._stored.will_read(rows, ahead):
            return False
        kinds = list(self._kinds.values())
        if not any(kind is not None and kind.stored == "heap" for kind in kinds):
            return True
        if not self._stored.are_here(rows):
            return False
        out = self._empty(len(rows))
        try:
            self._stored.read(rows, out)
        except RowError:
            return True  # whoever reads these rows gets the error
        places: list[tuple[int, tuple[int, int]]] = []
        for number, _, offsets in self._rows.split(rows):
            for kind, stored in zip(kinds, jax.tree.leaves(out), strict=True):
                if kind is not None and kind.stored == "heap":
                    found = places_of(self._bases[number], stored[offsets], kind.dtype.itemsize)
                    places += [(number, place) for place in found]
        return self._versioned.fetch_ahead(places, ahead)

    def _empty(self, count: int) -> Any:
        """Arrays for some rows as they are stored."""
        return jax.tree.map(lambda leaf: np.empty((count, *leaf.shape), leaf.dtype), self._stored.spec)

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._rows.of(np.array([row]))[0])]

    def close(self) -> None:
        """Close the files and drop the cached groups. A later `records` opens them again."""
        self._open.close()
        self._stored.close()
        self._versioned.close()

    def _values(self, rows: Indices, stored: Any, item_bytes: int) -> list[bytes]:
        """The values of variable length, of which `stored` has the references."""
        found = [b""] * len(rows)
        for number, local, offsets in self._rows.split(rows):
            places = np.arange(len(rows))[offsets].tolist()
            values = self._values_of(number, local, stored[offsets], item_bytes)
            for place, value in zip(places, values, strict=True):
                found[place] = value
        return found

    def _values_of(self, number: int, local: Indices, stored: Any, item_bytes: int) -> list[bytes]:
        """As `_values`, of one file."""
        path, version = self._paths[number], self._versioned.versions[number]
        assert version is not None
        first = int(self._rows.firsts[number] + local[0])
        try:
            file = self._opened(number)
            try:
                return read_values(file, version.size_bytes, self._bases[number], stored, item_bytes)
            finally:
                file.check()
        except FeedError:
            raise
        except (OSError, MemoryError) as error:
            raise unreadable(error, first, path) from error
        except ValueError as error:
            if len(local) > 1:  # which row it is
                return [
                    self._values_of(number, local[i : i + 1], stored[i : i + 1], item_bytes)[0]
                    for i in range(len(local))
                ]
            raise RowError(
                f"a value of variable length must lie in its file, and {error}; the file is damaged, write it "
                "again, or take another row in its place with feedline.Reading(bad_rows='substitute')",
                stage="read",
                row=first,
                file=path,
            ) from error

    def _opened(self, number: int) -> OpenFile | FetchedParts:
        file, version = self._versioned[number], self._versioned.versions[number]
        if isinstance(file, Path):
            assert isinstance(version, FileVersion)
            return self._open.get(self._paths[number], version)
        return FetchedParts(file)

    def _described(self) -> list[tuple[str, str]]:
        shown = dict.fromkeys(self._kinds, "bytes")
        for (name, kind), leaf in zip(self._kinds.items(), jax.tree.leaves(self._stored.spec), strict=True):
            if kind is None:
                shown[name] = f"{leaf.dtype}{list(leaf.shape)}"
            elif kind.dtype.itemsize > 1:
                shown[name] = f"bytes of {kind.dtype.newbyteorder('=')}"
        return [("row" if self.fields is None else name, kind) for name, kind in shown.items()]

    def __reduce__(self) -> Any:
        return Hdf5Records, (self._open_stored, self._paths, self._options, self._versioned.versions)
