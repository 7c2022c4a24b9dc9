"""Encoded records: the contract of their sources, and the base class of feedline's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from feedline._src.rows.source import Given, Indexed

Record = bytes | Mapping[str, Any]
"""The bytes of a row; or of a row with several fields their values by name, of which at least one is bytes."""


@runtime_checkable
class EncodedSource(Protocol):
    """Rows of bytes, of any length, with random access. `feedline.decoded` makes arrays of them.

    Attributes:
      fields: the names of the fields of a record; None: a record is one `bytes`.
    """

    fields: Sequence[str] | None

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that identify the data; no absolute path."""

    def __len__(self) -> int:
        """The number of rows."""

    def records(self, rows: npt.NDArray[np.int64]) -> Sequence[Record]:
        """The records of these rows, in their order; rows may repeat. Several threads read at once.

        Raises:
          RowError: a record cannot be read; it names the row and its file.
          FeedError: a file was changed while it was in use.
        """

    def file_of(self, row: int) -> str | None:
        """The file that holds the row, for errors; None: there is none."""

    def close(self) -> None:
        """Close files. A `records` may still run in another thread: it may fail, but not with wrong bytes."""


def is_encoded_source(value: Any) -> TypeGuard[EncodedSource]:
    """Whether it has the members of an `EncodedSource`. On Python 3.11, `isinstance` would compute `identity`."""
    has = set(dir(value))
    return all(name in has for name in ("__len__", "fields", "identity", "records", "file_of", "close"))


class EncodedRows(Indexed):
    """An `EncodedSource` that supports `source[i]`, one record, and has a readable `repr`.

    Attributes:
      instead: another way to arrays than decoding, for the error of a feed that was given bytes.
    """

    fields: Sequence[str] | None
    instead = ""

    def records(self, rows: npt.NDArray[np.int64]) -> Sequence[Record]:
        raise NotImplementedError

    def _single(self, row: int) -> Record:
        return self.records(np.array([row], np.int64))[0]

    def _described(self) -> list[tuple[str, str]]:
        return [("row", "bytes")] if self.fields is None else [(name, "bytes") for name in self.fields]


class UserRecords(Given, EncodedRows):
    """An `EncodedSource` of the user."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.fields = given.fields

    def records(self, rows: npt.NDArray[np.int64]) -> Sequence[Record]:
        found: Sequence[Record] = self._given.records(rows)
        return found

    def close(self) -> None:
        self._given.close()


def as_encoded(source: Any) -> EncodedRows | None:
    """An `EncodedSource` with what feedline's own have in addition; None: it is no such source."""
    if isinstance(source, EncodedRows):
        return source
    return UserRecords(source) if is_encoded_source(source) else None
