"""The base class of feedline's sources: what a feed, a plan and a mixture ask of any source, with defaults.

A user's `RowSource` is wrapped once, when it is opened, so that nothing else asks what an object has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.options import Order
from feedline._src.order.epoch import Positions, RowOrder, SingleOrder, keys_at
from feedline._src.rows.row_source import Rows

Indices = npt.NDArray[np.int64]
Columns = tuple[slice | Indices, ...]
"""For each axis of a row the selected indices."""
Cut = tuple[int, Columns, npt.NDArray[Any]]
"""The number of a leaf, the columns to read of it, and where to write them."""
WillRead = Callable[[Indices, int], bool]
"""(rows, ahead): start to fetch these rows, which are read `ahead` batches later. False: too early; ask again."""
OwnOrder = Literal["", "mixture", "endless mixture", "repeated"]
"""The order that a source brings along: that of a mixture, or of a Grain dataset after `repeat()`, which is one
endless epoch. "": it takes any."""
_MOST_SHOWN = 8  # leaves of a row; a table may have thousands


class Indexed:
    """Rows by number, of arrays or of bytes: `source[i]`, a readable `repr`, and what both kinds offer.

    So it can be the source of a `grain.MapDataset`. To fill a batch, reading
    many rows at once is many times as fast.

    Attributes:
      picklable: whether worker processes can open it again.
    """

    picklable: bool = True
    _paths: Sequence[str] = ()  # the paths of the files, as the user gave them

    def __len__(self) -> int:
        """The number of rows."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The name of its class, for messages."""
        return type(self).__name__

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that identify the data; no absolute path."""
        raise NotImplementedError

    @property
    def files(self) -> Iterable[str] | None:
        """Paths of the files and folders that the rows are made of; None: they are made of other things, too."""
        return self._paths or None

    def file_of(self, row: int) -> str | None:
        """The file that holds a row; None: there is none."""
        return None

    @property
    def will_read(self) -> WillRead | None:
        """What fetches rows from far away in time. None: no row must be fetched, now and from now on."""
        return None

    def check_rows(self) -> None:
        """Refuse rows that are known to be bad although none was read, for a feed that raises bad rows.

        Raises:
          RowError: there are some.
        """

    def close(self) -> None:
        """Close files. Reads may still run in other threads: they may fail, but not with wrong values."""

    def __getitem__(self, index: SupportsIndex) -> Any:
        """One row, in memory of its own.

        Raises:
          IndexError: there is no such row. A negative index counts from the end.
          TypeError: a slice, or anything else that is not an integer.
        """
        try:
            row = operator.index(index)
        except TypeError as error:
            raise TypeError(
                f"source[i] is one row, got {index!r} for i; grain.MapDataset.source(source)[start:stop:step] has "
                "several, read one by one, and a feed batches of them"
            ) from error
        count = len(self)
        if not -count <= row < count:
            raise IndexError(f"rows are 0 to {count - 1}, got {row}")
        return self._single(row % count)

    def _single(self, row: int) -> Any:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(f'{name} {value}' for name, value in self._facts())}>"

    def _facts(self) -> list[tuple[str, str]]:
        """The number of rows, the leaves of a row, and the files."""
        leaves = self._described()
        facts = [("rows", f"{len(self):,}"), *leaves[:_MOST_SHOWN]]
        if len(leaves) > _MOST_SHOWN:
            facts.append(("…", f"{len(leaves) - _MOST_SHOWN} more leaves"))
        if self._paths:
            more = f" … {self._paths[-1]}, {len(self._paths)} files" if len(self._paths) > 1 else ""
            facts.append(("from", f"{self._paths[0]}{more}"))
        return facts

    def _described(self) -> list[tuple[str, str]]:
        """Name and type of each leaf of a row."""
        raise NotImplementedError


class Source(Indexed):
    """Rows of arrays with random access. A subclass has `spec`, `identity`, `__len__`, and `read` or `read_cuts`.

    Attributes:
      spec: a tree of `jax.ShapeDtypeStruct`, of one row.
      format: what a state says of how rows are read: "columns", "records" or "mixture".
      own_order: the order that it brings along.
      shuffled: whether the order is shuffled unless the user gives one.
      reads_columns: whether `read_leaf` is there.
      positioned: whether rows depend on where they stand, so that `read_positioned` must be called.
      ragged_leaves: the numbers of the leaves whose first axis is as long as each batch needs, up to its size in
        `spec`. The leaves of `out` in `read` have any length that holds the rows.
    """

    spec: Any
    format: str = "columns"
    own_order: OwnOrder = ""
    shuffled: bool = True
    reads_columns: bool = False
    positioned: bool = False
    ragged_leaves: tuple[int, ...] = ()

    @property
    def epoch_rows(self) -> int:
        """Positions of an epoch."""
        return len(self)

    @property
    def arrays(self) -> Any:
        """The `ArraySource` with these rows, if all lie in memory or in mapped files; else None."""
        return None

    def identity_allowing_bad_rows(self) -> dict[str, Any]:
        """The `identity` for feeds that go on after bad rows, of which unreadable rows are a part."""
        return self.identity

    def order_for(self, asked: Order | None) -> RowOrder:
        """The order in which a feed reads that was asked for this one."""
        return SingleOrder(asked or Order(shuffle=self.shuffled), self.epoch_rows)

    def tokens_of(self, rows: Indices) -> Indices | None:
        """int64[k]: the tokens without padding of each row; None: they are not known without reading it."""
        return None

    def with_weights(self, weights: Mapping[str, float], position: int) -> Source:
        """A mixture with other weights from a position on.

        Raises:
          TypeError, ValueError: it is none; or the weights, or the position, do not suit it.
        """
        raise TypeError(f"only a feedline.Mixture has weights, and this feed reads {self.kind}")

    def with_weights_of(self, order: Any, position: int) -> Source:
        """A mixture with the weights that a state's order has before a position, and this one has not."""
        return self

    def padded_length(self, rows: Indices) -> int:
        """The length of the ragged leaves in a batch of these rows, which is the same in each process."""
        raise NotImplementedError

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`; rows come in any order, and with repeats.

        Raises:
          RowError: a row cannot be read.
          FeedError: a file was written to or truncated, or its store cannot be read.
        """
        self.read_cuts(rows, whole_cuts(out))

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """Read rows that know where they stand."""
        self.read(rows.index, out)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: npt.NDArray[Any]) -> None:
        """Write the `columns` of row rows[i] of one leaf to out[i], which has the leaf's dtype."""
        self.read_cuts(rows, [(leaf, columns, out)])

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """Read the rows at some positions of an epoch. Returns int64[k], the row index at each position.

        Args:
          cuts: what to read of each leaf. Without `reads_columns`: all leaves, whole.
        """
        index = order.rows_at(epoch, positions)
        at: Rows | Indices = index
        if self.positioned:
            position = np.asarray(positions, np.int64)
            at = Rows(np.full(len(index), epoch), position, index, keys_at(order.seed, epoch, position))
        self.read_cuts(at, cuts)
        return index

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """Read rows of which the indices are known."""
        index = rows.index if isinstance(rows, Rows) else rows
        if self.reads_columns and not _is_whole(cuts, self.spec):
            for leaf, columns, out in cuts:
                self.read_leaf(leaf, index, columns, out)
            return
        out = jax.tree.unflatten(jax.tree.structure(self.spec), [leaf for _, _, leaf in cuts])
        if isinstance(rows, Rows):
            self.read_positioned(rows, out)
        else:
            self.read(index, out)

    def _single(self, row: int) -> Any:
        out = jax.tree.map(lambda leaf: np.empty((1, *leaf.shape), leaf.dtype), self.spec)
        self.read(np.array([row], np.int64), out)
        return jax.tree.map(lambda array: array[0], out)

    def _described(self) -> list[tuple[str, str]]:
        return [
            (jax.tree_util.keystr(path, simple=True, separator=".") or "row", f"{leaf.dtype}{list(leaf.shape)}")
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.spec)
        ]


def whole_cuts(out: Any) -> list[Cut]:
    """All leaves of a tree of arrays, with all columns."""
    return [(leaf, (slice(None),) * (each.ndim - 1), each) for leaf, each in enumerate(jax.tree.leaves(out))]


def _is_whole(cuts: Sequence[Cut], spec: Any) -> bool:
    """Whether all leaves are read with all columns."""
    return len(cuts) == len(jax.tree.leaves(spec)) and all(
        isinstance(column, slice) and column == slice(None) for _, columns, _ in cuts for column in columns
    )


class Given(Indexed):
    """What an object of the user says of its rows, with defaults for members that it may lack."""

    def __init__(self, given: Any) -> None:
        self._given = given
        self.picklable = bool(getattr(given, "picklable", True))

    @property
    def kind(self) -> str:
        """The name of the user's class."""
        return type(self._given).__name__

    @property
    def identity(self) -> dict[str, Any]:
        found: dict[str, Any] = self._given.identity
        return found

    @property
    def will_read(self) -> WillRead | None:
        found: WillRead | None = getattr(self._given, "will_read", None)
        return found

    def __len__(self) -> int:
        return len(self._given)

    def file_of(self, row: int) -> str | None:
        known: Callable[[int], str | None] | None = getattr(self._given, "file_of", None)
        return None if known is None else known(row)


class UserSource(Given, Source):
    """A `RowSource` of the user. It is not closed: it belongs to the user."""

    def __init__(self, given: Any) -> None:
        super().__init__(given)
        self.spec = given.spec
        self.positioned = hasattr(given, "read_positioned")
        self.reads_columns = hasattr(given, "read_leaf") and not self.positioned
        if hasattr(given, "padded_length"):
            self.ragged_leaves = tuple(given.ragged_leaves)

    def padded_length(self, rows: Indices) -> int:
        return int(self._given.padded_length(rows))

    def read(self, rows: Indices, out: Any) -> None:
        _check_returned(self._given.read(rows, out))

    def read_positioned(self, rows: Rows, out: Any) -> None:
        if self.positioned:
            _check_returned(self._given.read_positioned(rows, out))
        else:
            self.read(rows.index, out)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: npt.NDArray[Any]) -> None:
        _check_returned(self._given.read_leaf(leaf, rows, columns, out))


def _check_returned(value: Any) -> None:
    if value is not None:
        raise TypeError(f"read writes its rows into out, and must not return a {type(value).__name__}")
