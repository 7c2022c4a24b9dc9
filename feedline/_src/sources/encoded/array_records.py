"""Records of ArrayRecord files as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from feedline._src.rows.shards import Indices
from feedline._src.sources.encoded.encoded_rows import EncodedRows
from feedline._src.sources.formats.array_record_files import ArrayRecordFiles
from feedline._src.sources.formats.versioned_files import Versions
from feedline._src.stores.options import Store


class ArrayRecordBytes(EncodedRows):
    """An `EncodedSource` over ArrayRecord files, which all stay open. Its arguments are theirs."""

    fields = None
    instead = ", or if they have one size, give open_source their dtype"

    def __init__(self, paths: Sequence[str], store: Store | None = None, versions: Versions | None = None) -> None:
        self._store = store
        self._files = ArrayRecordFiles(paths, store, versions)
        self._paths = self._files.paths

    @property
    def identity(self) -> dict[str, Any]:
        """Sizes and sampled bytes of every file: no path, so a moved data set stays the same."""
        return self._files.identity

    def __len__(self) -> int:
        return len(self._files.shards)

    def records(self, rows: Indices) -> Sequence[bytes]:
        """The records of these rows. Raises RowError, FeedError or IndexError as an `EncodedSource` does."""
        found = [b""] * len(rows)
        for shard, records, offsets in self._files.split(rows):
            for offset, record in zip(offsets.tolist(), self._files.read(shard, records), strict=True):
                found[offset] = record
        return found

    def file_of(self, row: int) -> str:
        """The file that holds the row."""
        return self._paths[int(self._files.shards.of(np.array([row]))[0])]

    def close(self) -> None:
        """Close the files. They are not opened again."""
        self._files.close()

    def __reduce__(self) -> Any:
        return ArrayRecordBytes, (self._paths, self._store, self._files.versions)
