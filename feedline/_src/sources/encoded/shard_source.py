"""The source of records in files of many, of which an index says where each record lies."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.files.open_files import OpenFile, OpenFiles, unreadable
from feedline._src.files.version import FileVersion, changed
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.shard_index import ENTRY, Form, Shard, open_remote_shard, open_shard
from feedline._src.rows.encoded_source import EncodedRows, Record, read_by_shard
from feedline._src.rows.shards import Indices, Shards
from feedline._src.stores.client import Version
from feedline._src.stores.opening import RemoteObjects
from feedline._src.stores.options import Store
from feedline._src.stores.remote_object import RemoteObject
from feedline._src.stores.residency import BLOCK_BYTES
from feedline._src.stores.urls import is_url


class RemoteParts:
    """An object as `OpenFile`, for parts whose blocks are present.

    Args:
      item: the object.
    """

    def __init__(self, item: RemoteObject) -> None:
        self._item = item

    def check(self) -> None:
        """Do nothing: the version is compared whenever a block is fetched."""

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """The bytes at each offset, fewer where the object ends. They are fetched already."""
        memory = self._item.memory
        return [
            bytes(memory[at : at + length]) for at, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
        ]


class RemoteShards:
    """The objects of a source of records.

    Attributes:
      objects: open.
    """

    def __init__(self, paths: Sequence[str], options: OpenOptions) -> None:
        self.objects = RemoteObjects(paths, options.store or Store())

    @classmethod
    def of(cls, paths: Sequence[str], options: OpenOptions) -> RemoteShards | None:
        """The objects, if the paths are addresses in a store."""
        return cls(paths, options) if is_url(paths[0]) else None

    def parts(self, path: str) -> RemoteParts:
        """An object whose parts are read."""
        return RemoteParts(self.objects.by_url[path])

    @contextlib.contextmanager
    def present(self, places: Iterable[tuple[str, Indices]]) -> Iterator[None]:
        """Within the `with` block, these parts can be read.

        Args:
          places: addresses, and int64[k, 2], the offset and length of parts of each.

        Raises:
          FeedError: they cannot be fetched.
        """
        with self.objects.residency.reading():
            self.objects.residency.wait_for(self._blocks(places))
            yield

    def fetch_ahead(self, places: Iterable[tuple[str, Indices]], ahead: int) -> bool:
        """Start to fetch parts that are read `ahead` batches later. Returns False if that is too early."""
        return self.objects.residency.fetch_ahead(self._blocks(places), ahead)

    def _blocks(self, places: Iterable[tuple[str, Indices]]) -> Indices:
        found = [np.zeros(0, np.int64)]
        for path, parts in places:
            item = self.objects.by_url[path]
            offset, length = parts[parts[:, 1] > 0].T
            first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
            longest = int((last - first).max(initial=0))
            spread = np.minimum(first[:, None] + np.arange(longest + 1), last[:, None])
            found.append(item.first_block + np.unique(spread))
        return np.concatenate(found)


_TRIES = 10
_ENTRY_BYTES = 8 * ENTRY


class ShardSource(EncodedRows):
    """An `EncodedSource` over files of records, such as TFRecord files and tar archives.

    Neither the files nor their indices are held in memory, and at most 64 of them are open. Reads are thread-safe.

    Args:
      form: the format.
      paths: of the files, whose records follow each other.
      options: `columns`, the fields to read.
      shards: the files as another process opened them; by default, they are opened, and their indices made.

    Raises:
      ValueError: no records, not of this format, or files with different fields.
    """

    def __init__(
        self, form: Form, paths: Sequence[str], options: OpenOptions, shards: Sequence[Shard] | None = None
    ) -> None:
        self._form = form
        self._paths = paths
        self._options = options
        self._remote = RemoteShards.of(paths, options)
        self._shards = self._opened() if shards is None else shards
        for shard in self._shards:  # a file is compared when it is read
            if self._remote is not None and isinstance(shard.version, Version):
                shard.version.check(self._remote.objects.by_url[shard.path].version, shard.path)
        self._rows = Shards([shard.count for shard in self._shards])
        if len(self._rows) == 0:
            raise ValueError(
                f"a source must have at least one row, got {paths[0]} with no records; check what wrote it"
            )
        fields = _fields([shard for shard in self._shards if shard.count])
        self.fields = None if fields is None else tuple(options.chosen(fields, paths[0]))
        self._files = OpenFiles()

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        for shard in self._shards:
            if isinstance(shard.version, FileVersion):
                shard.version.check(shard.path)
        fields = None if self.fields is None else list(self.fields)
        return {"kind": self._form.name, "fields": fields, "files": [list(shard.digest) for shard in self._shards]}

    def __len__(self) -> int:
        return len(self._rows)

    def records(self, rows: Indices) -> Sequence[Record]:
        """The records of these rows: bytes, or a dict of bytes.

        Raises:
          IndexError: there is no such row.
          RowError: a record cannot be read, or is damaged.
          FeedError: a file or its index was changed or deleted.
        """
        if self._remote is None:
            return read_by_shard(self._rows, rows, self._read)
        with self._remote.present(self._places(rows)):
            return read_by_shard(self._rows, rows, self._read)

    @property
    def will_read(self) -> Callable[[Indices, int], bool] | None:
        """The `will_read` of a `ToldSource`, for objects in a store; None for files."""
        return None if self._remote is None else self._fetch_ahead

    def _fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        assert self._remote is not None
        return self._remote.fetch_ahead(self._places(rows), ahead)

    def _opened(self) -> list[Shard]:
        if self._remote is None:
            return [open_shard(path, self._form) for path in self._paths]
        return [self._opened_remote(path, self._remote) for path in self._paths]

    def _opened_remote(self, path: str, remote: RemoteShards) -> Shard:
        return open_remote_shard(remote.objects.by_url[path], self._form, self._options.store or Store())

    def _index(self, shard: Shard) -> OpenFile:
        """The index of a file. Errors as of an `OpenFile`."""
        remote = self._remote
        for _ in range(_TRIES if remote is not None else 0):
            with contextlib.suppress(FileNotFoundError):
                return self._files.get(shard.index, None, shard.index_line)
            assert remote is not None
            self._opened_remote(shard.path, remote)  # somebody deleted the cache, where the index was
        return self._files.get(shard.index, None, shard.index_line)

    def _places(self, rows: Indices) -> Iterator[tuple[str, Indices]]:
        """The files of some rows, and where in them their parts lie."""
        for number, local, _ in self._rows.split(rows):
            shard = self._shards[number]
            index = self._index(shard)
            offset, header, length, _ = self._located(shard, index, local).reshape(-1, ENTRY).T
            yield shard.path, np.stack([offset, header + length], axis=1)

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._shards[int(self._rows.of(np.array([row]))[0])].path

    def close(self) -> None:
        """Close the files. A later `records` opens them again."""
        self._files.close()
        if self._remote is not None:
            self._remote.objects.close()

    def _read(self, number: int, local: Indices) -> list[Record]:
        """Records of one file, by their numbers in it."""
        shard = self._shards[number]
        first = int(self._rows.firsts[number] + local[0])
        path = shard.index
        try:
            index = self._index(shard)
            parts = self._located(shard, index, local)
            path = shard.path
            file = self._data_file(shard)
            offset, header, length, _ = parts.reshape(-1, ENTRY).T
            # apart, since cutting the header off a large part would copy it; small ones are merged all the same
            offsets, lengths = np.stack([offset, offset + header], 1), np.stack([header, length], 1)
            stored = file.read(offsets.ravel(), lengths.ravel())
            file.check()
        except (OSError, MemoryError) as error:
            raise unreadable(error, first, path) from error
        data = []
        for i, entry in enumerate(parts.reshape(-1, ENTRY).tolist()):
            self._check_header(stored[2 * i], entry, number, int(local[i // parts.shape[1]]))
            data.append(self._data(stored[2 * i + 1], entry, number, int(local[i // parts.shape[1]])))
            stored[2 * i + 1] = b""  # the copy of the next part gets its memory: new pages cost more than the copy
        if self.fields is None:
            return list(data)
        width = len(self.fields)
        return [dict(zip(self.fields, data[i : i + width], strict=True)) for i in range(0, len(data), width)]

    def _data_file(self, shard: Shard) -> OpenFile | RemoteParts:
        if isinstance(shard.version, FileVersion):
            return self._files.get(shard.path, shard.version)
        assert self._remote is not None
        return self._remote.parts(shard.path)

    def _located(self, shard: Shard, index: OpenFile, local: Indices) -> Indices:
        """int64[k, parts, 4]: the entries of these records, of which all lie within the file."""
        names = shard.fields or ("",)
        width = len(names) * _ENTRY_BYTES
        entries = b"".join(index.read(len(shard.index_line) + local * width, np.full(len(local), width)))
        index.check()
        if len(entries) != len(local) * width:
            raise changed(shard.index, "it is shorter than it was")
        parts = np.frombuffer(entries, "<i8").reshape(len(local), len(names), ENTRY)
        if self.fields is not None:
            parts = parts[:, [names.index(field) for field in self.fields]]
        places, size = parts[:, :, :3], shard.version.size_bytes
        if not ((places >= 0) & (places <= size)).all() or (places.sum(axis=2) > size).any():
            raise FeedError(
                f"an index must name parts of its file, and {shard.index} names bytes beyond the {size} of "
                f"{shard.path}; delete the index, which is then made again",
                stage="read",
                file=shard.path,
            )
        return parts.astype(np.int64, copy=False)

    def _check_header(self, found: bytes, entry: Sequence[int], number: int, local: int) -> None:
        """Refuse a file that was built again with its old version: its records lie elsewhere."""
        if zlib.crc32(found) == entry[3]:
            return
        path, index = self._shards[number].path, self._shards[number].index
        raise FeedError(  # no bad row: substitutes would hide that all rows have changed
            f"an index must be that of its file, and record {local} has another header than when {index} was "
            "made: the file was built again with the same size and time, or is damaged. Delete that index, which "
            "is then made again, and build a new feed",
            stage="read",
            file=path,
        )

    def _data(self, part: bytes, entry: Sequence[int], number: int, local: int) -> bytes:
        path = self._shards[number].path
        try:
            if len(part) != entry[2]:
                raise ValueError(f"{entry[2] - len(part)} bytes of it are missing")
            return self._form.data_of(part)
        except ValueError as error:
            raise RowError(
                f"a record must be read as it was written, and of record {local} {error}; the file is damaged, "
                "copy or write it again, or take another row with feedline.Reading(bad_rows='substitute')",
                stage="read",
                row=int(self._rows.firsts[number] + local),
                file=path,
            ) from error

    def __reduce__(self) -> Any:
        return ShardSource, (self._form, self._paths, self._options, self._shards)


def _fields(shards: Sequence[Shard]) -> tuple[str, ...] | None:
    """The fields of all files, in the order of the first.

    Raises:
      ValueError: a file has others than the first.
    """
    first = shards[0]
    for shard in shards:
        if sorted(shard.fields or ()) != sorted(first.fields or ()):
            raise ValueError(
                f"all files must have the same fields, and {shard.path} has {', '.join(shard.fields or ())}, "
                f"{first.path} {', '.join(first.fields or ())}; open them apart, or write them again"
            )
    return first.fields
