"""The interface of a file with columns of bytes or text, and such columns in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from feedline._src.rows.shards import Indices
from feedline._src.sources.formats.grouped_file import Group

Array = npt.NDArray[Any]


class ByteColumn(NamedTuple):
    """Values of any length, in one piece of memory.

    Attributes:
      ends: [k + 1]; value i is data[ends[i] : ends[i + 1]].
      data: uint8[n].
      null: bool[k], as of a `Group`.
    """

    ends: Array
    data: Array
    null: npt.NDArray[np.bool_] | None

    @property
    def nbytes(self) -> int:
        """The memory of all arrays."""
        return self.ends.nbytes + self.data.nbytes + (0 if self.null is None else self.null.nbytes)

    def take(self, rows: Indices) -> list[bytes]:
        """Copies of these values.

        Raises:
          ValueError: the file has positions outside of the data.
        """
        starts, stops = self.ends[rows], self.ends[rows + 1]
        if len(rows) and not ((starts >= 0) & (starts <= stops) & (stops <= len(self.data))).all():
            raise ValueError("positions of values must lie within the column, and do not; the file is damaged")
        view = self.data.data
        return [bytes(view[start:stop]) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


class Rows(Protocol):
    """A group of rows."""

    @property
    def nbytes(self) -> int:
        """Of memory."""

    @property
    def row_count(self) -> int:
        """The number of rows; -1 if columns differ."""

    def nulls(self, rows: Indices) -> tuple[str, int] | None:
        """The first column with a null in one of these rows, and the place of the first such row in `rows`."""

    def take(self, rows: Indices) -> list[dict[str, Any]]:
        """These rows: values of bytes, and numbers as NumPy scalars or arrays, by name."""


class TableFile(NamedTuple):
    """An open file.

    Attributes:
      kinds: the type of each chosen column, by name.
      lengths: the rows of each group.
      read: group → its rows. Called from many threads.
      reads: what `read` does: read a "group" whole, which may be cached; give views of a "mapped" file; or nothing
        yet, where "rows" are read from the file as they are taken.
      extents: group → offset and length of the bytes that `read` needs, for objects in stores.
      form: what the identity says that the file is.
    """

    kinds: dict[str, str]
    lengths: Sequence[int]
    read: Callable[[int], Rows]
    reads: Literal["group", "mapped", "rows"] = "group"
    extents: Callable[[int], list[tuple[int, int]]] = lambda group: []
    form: str = "table"


class Columns(NamedTuple):
    """The chosen columns of a group of rows, as `Rows`."""

    by_name: Mapping[str, Group | ByteColumn]

    @property
    def nbytes(self) -> int:
        """The memory of all columns."""
        return sum(column.nbytes for column in self.by_name.values())

    @property
    def row_count(self) -> int:
        """The number of rows; -1 if the columns differ."""
        counts = {
            len(c.values) if isinstance(c, Group) else max(0, len(c.ends) - 1) for c in self.by_name.values()
        }
        return counts.pop() if len(counts) == 1 else -1

    def nulls(self, rows: Indices) -> tuple[str, int] | None:
        """The first column with a null in one of these rows, and the place of the first such row in `rows`."""
        for name, column in self.by_name.items():
            if column.null is not None and (found := np.flatnonzero(column.null[rows])).size:
                return name, int(found[0])
        return None

    def take(self, rows: Indices) -> list[dict[str, Any]]:
        """These rows: values of bytes, and numbers as NumPy scalars or arrays, by name."""
        taken = {
            name: list(column.values[rows]) if isinstance(column, Group) else column.take(rows)
            for name, column in self.by_name.items()
        }
        return [dict(zip(taken, row, strict=True)) for row in zip(*taken.values(), strict=True)]
