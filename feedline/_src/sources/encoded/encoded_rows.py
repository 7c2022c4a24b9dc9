"""The base class of feedline's sources of encoded records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.rows.indexed import Indexed
from feedline._src.rows.shards import Indices, Shards
from feedline._src.sources.encoded.records import Record


class EncodedRows(Indexed):
    """An `EncodedSource` that supports `source[i]`, one record, and has a readable `repr`.

    Attributes:
      instead: another way to arrays than decoding, for the error of a feed that was given bytes.
    """

    fields: Sequence[str] | None
    instead = ""

    @property
    def identity(self) -> dict[str, Any]:
        """As of an `EncodedSource`."""
        raise NotImplementedError

    def records(self, rows: npt.NDArray[np.int64]) -> Sequence[Record]:
        """As of an `EncodedSource`."""
        raise NotImplementedError

    def file_of(self, row: int) -> str | None:
        """The file that holds the row."""
        raise NotImplementedError

    def close(self) -> None:
        """Close files. A later `records` opens them again."""

    def _single(self, row: int) -> Record:
        return self.records(np.array([row], np.int64))[0]

    def _described(self) -> list[tuple[str, str]]:
        return [("row", "bytes")] if self.fields is None else [(name, "bytes") for name in self.fields]


def read_by_shard(shards: Shards, rows: Indices, read: Callable[[int, Indices], Sequence[Record]]) -> list[Record]:
    """The records of `rows`, in their order, of which `read` gives those of one shard: (shard, rows within it)."""
    found: list[Record] = [b""] * len(rows)
    for shard, local, offsets in shards.split(rows):
        places = range(len(rows))[offsets] if isinstance(offsets, slice) else offsets.tolist()
        for place, record in zip(places, read(shard, local), strict=True):
            found[place] = record
    return found
