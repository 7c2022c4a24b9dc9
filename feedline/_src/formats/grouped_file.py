"""The interfaces of files that store rows in groups, as numbers or with bytes; and checks of their metadata."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.rows.shards import EvenLengths, Indices, Lengths, rows_in

Array = npt.NDArray[Any]
MOST_ROWS = 1 << 48
"""Of a file: sums over files stay below the largest int64."""


class Group(NamedTuple):
    """The rows of one group.

    Attributes:
      values: [k, *row shape], contiguous.
      null: bool[k], True for rows with a null, whose values are meaningless; None if there are none.
    """

    values: Array
    null: npt.NDArray[np.bool_] | None = None

    @property
    def nbytes(self) -> int:
        """The memory of both arrays."""
        return self.values.nbytes + (0 if self.null is None else self.null.nbytes)


class GroupedFile(NamedTuple):
    """An open file. Leaves are numbered in the order in which JAX flattens `spec`.

    Attributes:
      spec: tree of `jax.ShapeDtypeStruct`, of one row.
      lengths: for each leaf, the rows of each of its groups.
      read: (leaf, group) → its rows, which the caller checks against spec and lengths. Called from many threads.
        FeedError if the file has changed.
      identity: (allow_bad_rows) → JSON values that identify the data, without a path. A sampled row that cannot be
        read is a RowError, or with `allow_bad_rows` is part of the identity.
      extents: (leaf, group) → offset and length of each part of its bytes, for objects in stores.
      fetch_ahead: (leaf, groups, ahead) → False if it is too early to fetch groups that are read `ahead` batches
        later; for files that fetch for themselves.
      close: gives up what is being fetched.
    """

    spec: Any
    lengths: Sequence[Lengths]
    read: Callable[[int, int], Group]
    identity: Callable[[bool], Any]
    extents: Callable[[int, int], Sequence[tuple[int, int]]] = lambda leaf, group: ()
    fetch_ahead: Callable[[int, Sequence[int], int], bool] | None = None
    close: Callable[[], None] = lambda: None


def check_group(group: Group, length: int, row: Any) -> None:
    """Refuse a group whose rows are not those that the metadata of its file promise.

    Raises:
      ValueError: another number, shape or dtype, or not contiguous.
    """
    found = (group.values.dtype, group.values.shape)
    promised = (row.dtype, (length, *row.shape))
    if found != promised or not group.values.flags.c_contiguous:
        raise ValueError(
            f"a group must hold the rows that the file's metadata promises, {promised[0]}{list(promised[1])}, and "
            f"it holds {found[0]}{list(found[1])}; the file is damaged, write it again"
        )


def check_fits(file: GroupedFile, path: str, first: GroupedFile, first_path: str) -> None:
    """Refuse a file whose rows have another form than those of the first file, or whose lengths are impossible.

    Raises:
      ValueError: the file does not fit, or is damaged.
    """
    forms = [
        {
            jax.tree_util.keystr(at): (str(leaf.dtype), leaf.shape)
            for at, leaf in jax.tree_util.tree_leaves_with_path(each.spec)
        }
        for each in (file, first)
    ]
    if forms[0] != forms[1]:
        raise ValueError(
            f"files must agree in columns, dtypes and row shapes; {path} has {forms[0]}, {first_path} {forms[1]}; "
            "choose columns=[...] that they share, or write them again"
        )
    if any(not isinstance(groups, EvenLengths) and min(groups, default=0) < 0 for groups in file.lengths):
        raise ValueError(
            f"a group must have 0 rows or more, and the metadata of {path} promises fewer; write it again"
        )
    totals = {rows_in(groups) for groups in file.lengths}
    if max(totals, default=0) > MOST_ROWS:
        raise ValueError(f"a file must have at most 2^48 rows, and the metadata of {path} promises {max(totals)}")
    if len(totals) > 1:
        raise ValueError(f"all leaves must have the same number of rows, {path} has {sorted(totals)}")


def memory_bytes() -> int:
    """The memory that an array can have: the machine's, or what is left of a limit (ulimit -v)."""
    page = os.sysconf("SC_PAGE_SIZE")
    machine = page * os.sysconf("SC_PHYS_PAGES")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return machine
    with open("/proc/self/statm") as sizes:
        used = page * int(sizes.read().split()[0])
    return min(machine, max(0, limit - used))


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
