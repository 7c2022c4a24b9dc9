"""ArrayRecord files: their records as bytes, read many at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feedline._src.errors import RowError, warn
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices, Shards
from feedline._src.sources.formats import extras
from feedline._src.sources.formats.file_version import FileVersion
from feedline._src.sources.formats.opening import opening
from feedline._src.sources.formats.versioned_files import Versions
from feedline._src.stores.client import Version
from feedline._src.stores.options import Store
from feedline._src.stores.urls import is_url
from feedline._src.stores.whole_files import WholeFiles

_OPTIONS = "readahead_buffer_size:0,index_storage_option:in_memory"
_RECORDS_A_READ = 1 << 11  # fewer are slower to read, more leave the cache
_BUFFER_BYTES = 1 << 15


class ArrayRecordFiles:
    """Open ArrayRecord files, whose records follow each other. Thread-safe.

    Args:
      paths: of the files, or addresses of objects in a store, which are fetched whole into its cache.
      store: how objects are fetched.
      versions: the expected versions of the files; by default, the present ones.

    Attributes:
      paths: as given.
      versions: of the files or objects.
      shards: which file each record lies in.

    Raises:
      ValueError: no records, or not an ArrayRecord file.
      FeedError: a file does not have the expected version.
    """

    def __init__(self, paths: Sequence[str], store: Store | None = None, versions: Versions | None = None) -> None:
        self.paths = [str(path) for path in paths]
        self._whole = WholeFiles(self.paths, store or Store()) if is_url(self.paths[0]) else None
        self._local = self.paths if self._whole is None else self._whole.paths
        try:
            opened = [_opened(local, path) for local, path in zip(self._local, self.paths, strict=True)]
        finally:  # also if one cannot be opened: a change explains that better
            for number, version in enumerate(versions or ()):
                self._check(number, version)
        self._readers = [reader for reader, _ in opened]
        self._local_versions = [version for _, version in opened]
        self.versions: Versions = self._local_versions if self._whole is None else self._whole.versions
        self.shards = Shards([reader.num_records() for reader in self._readers])
        if len(self.shards) == 0:
            raise ValueError(
                f"a source must have at least one row, got {self.paths[0]} with no records; check what wrote it"
            )

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        digested = [digests.of_file(path) for path in self._local]
        for path, version in zip(self._local, self._local_versions, strict=True):
            version.check(path)
        return {"kind": "array_record", "files": digested}

    def split(self, rows: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """The rows in pieces that are fast to read: (file, its records, ascending, their offsets in `rows`)."""
        for shard, local, offsets in self.shards.split(rows):
            order = np.argsort(local, kind="stable")
            here = np.arange(offsets.start, offsets.stop)[order] if isinstance(offsets, slice) else offsets[order]
            ordered = local[order]
            for start in range(0, len(order), _RECORDS_A_READ):
                some = slice(start, start + _RECORDS_A_READ)
                yield shard, ordered[some], here[some]

    def read(self, shard: int, records: Indices) -> list[bytes]:
        """These records of a file.

        Raises:
          RowError: one of them cannot be read.
          FeedError: the file was written to or truncated.
        """
        try:
            found: list[bytes] = self._readers[shard].read(records.tolist())
        except Exception as error:
            self._check_open(shard)  # a change explains the error better
            raise self.error(shard, records[0], f"{len(records)} records could not be read: {error}") from error
        # the library reads empty records from a truncated file
        self._check_open(shard)
        return found

    def error(self, shard: int, record: int, message: str) -> RowError:
        """The error for a record of a file."""
        row = int(self.shards.firsts[shard] + record)
        return RowError(message, stage="read", row=row, file=self.paths[shard])

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers:
            reader.close()
        if self._whole is not None:
            self._whole.close()

    def _check_open(self, shard: int) -> None:
        self._local_versions[shard].check_open(self._local[shard])

    def _check(self, number: int, version: FileVersion | Version | None) -> None:
        """Refuse a file or an object that another process opened with another version."""
        if isinstance(version, FileVersion):
            version.check(self.paths[number])
        elif version is not None and self._whole is not None:
            version.check(self._whole.versions[number], self.paths[number])


def _opened(local: str, path: str) -> tuple[Any, FileVersion]:
    """A reader of a file, and the version of the file just before it was opened.

    Args:
      local: where the file lies.
      path: for errors.

    Raises:
      FileNotFoundError, OSError: there is no such file, or too many files are open.
      ValueError: it is not an ArrayRecord file.
    """
    module = extras.require("array_record.python.array_record_module", "array-record")
    with opening(Path(local)) as file:
        version = FileVersion.of_open(file.fileno())
    try:
        reader = module.ArrayRecordReader(local, options=_OPTIONS, file_reader_buffer_size=_BUFFER_BYTES)
        if not reader.ok():
            reader.read([0])  # raises an error that says what is wrong
    except Exception as error:  # the library does not document the type
        raise ValueError(
            f"{path} cannot be read as an ArrayRecord file: {error}. It may be truncated or another format; "
            "write it again with ArrayRecordWriter(path, 'group_size:1')"
        ) from error
    grouped = re.search(
        r"group_size:(\d+)", reader.writer_options_string() or ""
    )  # missing in files of old versions
    if grouped and int(grouped[1]) > 1:
        warn(
            f"{path} was written in groups of {grouped[1]} records, which are decompressed whole whichever of "
            "them a read asks for; write it with ArrayRecordWriter(path, 'group_size:1')"
        )
    return reader, version
