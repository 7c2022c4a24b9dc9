"""The contract of a source of encoded records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

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
        """As of a `RowSource`: JSON values that identify the data; no absolute path."""

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
