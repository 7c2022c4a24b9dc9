"""Sources of rows: the protocol for users' sources, and the base classes of feedline's sources, with defaults.

Opening a user's `RowSource` wraps it. Only the wrapper checks which optional members the user's class has.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, SupportsIndex, TypeGuard, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.options import Order
from feedline._src.order.epoch import Positions, RowOrder, SingleOrder, as_indices, keys_at
from feedline._src.rows.values import is_table

Indices = npt.NDArray[np.int64]
Columns = tuple[slice | Indices, ...]
"""For each axis of a row, the indices to read."""
Cut = tuple[int, Columns, npt.NDArray[Any]]
"""(number of a leaf, which of its columns to read, the array to write them to)."""
WillRead = Callable[[Indices, int], bool]
"""(rows, ahead): starts to fetch rows that are read `ahead` batches later. Returns False if it is too early; the
caller tries again later."""
OwnOrder = Literal["", "mixture", "repeated"]
"""The order that a source imposes. "": none; the source accepts any order. "mixture": that of a `Mixture`.
"repeated": the single endless epoch of a Grain dataset after `repeat()`."""
Record = bytes | Mapping[str, Any]
"""A row as bytes, or as a mapping from the names of its fields to their values, of which at least one is bytes."""
_MAX_LEAVES_SHOWN = 8
_ROW_SOURCE_MEMBERS = ("__len__", "spec", "identity", "read", "close")


# --- the contract of users' classes ---


@dataclasses.dataclass(frozen=True)
class Rows:
    """Epoch, position, row index and key of rows in a batch: four read-only arrays, with one value per row.

    Attributes:
      epoch: int64[k], the epoch of each row.
      position: int64[k], the row's position in the epoch's order.
      index: int64[k], the row index in the source.
      key: uint64[k], random bits, computed from (seed, epoch, position). Augmentation whose random numbers come
        from the key alone is the same on any topology.

    Example:
      >>> def flip(batch, rows):  # a transform: mirrors about half of the rows
      ...     return np.where(rows.key[:, None] % 2 == 0, batch[:, ::-1], batch)
      >>> flip(np.array([[1, 2], [1, 2]]), Rows(*np.arange(8).reshape(4, 2))).tolist()
      [[2, 1], [1, 2]]
    """

    epoch: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _read_only(getattr(self, field.name)))


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


@runtime_checkable
class RowSource(Protocol):
    """A source of rows with random access, which reads many rows at once. Write one to read a format of your own.

    A class needs these five members, but no base class. A feed never closes a source that it was given. Worker
    processes (`Reading(workers=...)`) can read a source only if it pickles: let `__reduce__` return the path, so
    that each worker opens the file itself.

    Example:
      >>> import jax, numpy as np
      >>> class Squares:
      ...     spec = {"square": jax.ShapeDtypeStruct((), np.int32)}
      ...     identity = {"kind": "squares", "count": 100}
      ...     def __len__(self):
      ...         return 100
      ...     def read(self, rows, out):
      ...         out["square"][:] = rows**2
      ...     def close(self):
      ...         pass
      >>> isinstance(Squares(), RowSource)
      True
    """

    spec: Any
    """A tree of `jax.ShapeDtypeStruct` for one row, fixed before the first read and the same for all rows."""

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that identify the data: names, sizes, sampled bytes; no absolute path.

        A feed reads this when it is built, and stores it as the field "data" of its fingerprint. So the feed
        refuses a state that was saved with other data, and a run whose processes read different data.
        """

    def __len__(self) -> int:
        """The number of rows. It must not change while a feed uses the source."""

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        """Write row rows[i] to out[leaf][i] for each leaf, in the dtypes of `spec`.

        Rows come in any order and may repeat, and several threads call this at once. `rows` is read-only. Each
        leaf of `out` has the shape `(len(rows), *shape of the leaf)` and may be strided. Any error becomes a
        `RowError` that names the row. To find the row, feedline calls this again with parts of `rows`; if you
        raise a `RowError` with `row=`, fewer calls are needed.
        """

    def close(self) -> None:
        """Close files. You call it: a feed does not close a source that it was given."""


def is_row_source(value: Any) -> TypeGuard[RowSource]:
    """Whether a value has the members of a `RowSource`. On Python 3.11, `isinstance` would compute `identity`."""
    has = set(dir(value))
    return all(name in has or hasattr(value, name) for name in _ROW_SOURCE_MEMBERS)


def why_not_a_source(source: Any) -> str:
    """The error message for an object that is not a source of any kind."""
    kind, has = type(source).__name__, set(dir(source))
    if is_table(source):
        return (
            f"a table is not a source, but its numeric columns are, got a {kind}; pass "
            "{name: table[name] for name in names}"
        )
    if "spec" in has or ("read" in has and "__iter__" not in has):  # a file has `read`, too
        lacks = ", ".join(name for name in _ROW_SOURCE_MEMBERS if name not in has)
        return (
            f"a RowSource needs {', '.join(_ROW_SOURCE_MEMBERS)}, and {kind} lacks {lacks}; "
            "help(feedline.RowSource) describes each, and docs/sources.md has an example"
        )
    change = "pass an iterator of batches to prefetch_to_mesh"
    if "__getitem__" in has:
        change = f"give it __len__, or, if it is a stream, {change}"
    return (
        "a source is a tree of arrays and .npy paths, a path or glob, a grain dataset, a RowSource, or "
        f"an object with __len__ and __getitem__, got {kind}; {change}"
    )


# --- the base classes of feedline's sources ---


class Indexed:
    """Base class of all sources, of arrays or of bytes. It adds `source[i]`, a readable `repr`, and defaults.

    `grain.MapDataset.source` accepts such a source, because it has `source[i]` and `len(source)`. But filling a
    batch row by row is many times slower than reading many rows at once.

    Attributes:
      picklable: whether worker processes can open the source again.
    """

    picklable: bool = True
    _paths: Sequence[str] = ()  # of the files, as the user gave them

    def __len__(self) -> int:
        """The number of rows."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that identify the data; no absolute path. Sampling a bad row raises no error."""
        raise NotImplementedError

    @property
    def files(self) -> Iterable[str] | None:
        """Paths of the files and folders that hold all the data; None: some of the data may lie elsewhere."""
        return self._paths or None

    def file_of(self, row: int) -> str | None:
        """The file that holds a row; None if no file does."""
        return None

    @property
    def will_read(self) -> WillRead | None:
        """Fetches rows from a store ahead of their reads. None: no row has to be fetched."""
        return None

    def check_rows(self) -> None:
        """Check metadata or samples for bad rows. A feed calls this when it is built with `bad_rows="raise"`.

        Raises:
          RowError: there are bad rows.
        """

    def check_range(self, rows: Indices) -> None:
        """Raise IndexError if one of these rows does not exist."""
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(self):
            raise IndexError(f"rows are 0 to {len(self) - 1}, got {rows.min()} to {rows.max()}")

    def close(self) -> None:
        """Close files. Reads that still run in other threads may raise an error, but never return wrong values."""

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return one row, in memory of its own. A negative index counts from the end.

        Raises:
          IndexError: there is no such row.
          TypeError: `index` is a slice, or anything else that is not an integer.
        """
        try:
            row = operator.index(index)
        except TypeError as error:
            raise TypeError(
                f"source[i] is one row, got {index!r} for i; to read several rows one by one, use "
                "grain.MapDataset.source(source)[start:stop:step]; for batches, use a feed"
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
        """(name, value) pairs for `repr`: the number of rows, the leaves of a row, and the files."""
        leaves = self._described()
        facts = [("rows", f"{len(self):,}"), *leaves[:_MAX_LEAVES_SHOWN]]
        if len(leaves) > _MAX_LEAVES_SHOWN:
            facts.append(("…", f"{len(leaves) - _MAX_LEAVES_SHOWN} more leaves"))
        if self._paths:
            more = f" … {self._paths[-1]}, {len(self._paths)} files" if len(self._paths) > 1 else ""
            facts.append(("from", f"{self._paths[0]}{more}"))
        return facts

    def _described(self) -> list[tuple[str, str]]:
        """(name, type) of each leaf of a row."""
        raise NotImplementedError


class Source(Indexed):
    """Rows of arrays with random access. A subclass has `spec`, `identity`, `__len__`, and `read` or `read_cuts`.

    Attributes:
      spec: a tree of `jax.ShapeDtypeStruct` for one row.
      lanes: for a stream, the number of lanes; else 0. `FirstItem` makes a stream's first item its only row.
      format: how rows are read: "columns", "records", "mixture", "stream" or, say, "3 lanes". A state records it.
      own_order: the order that the source imposes.
      shuffled: whether the default order is shuffled.
      reads_columns: whether `read_cuts` can read some leaves or columns alone. If False, pass it `whole_cuts`.
      positioned: whether rows depend on their epoch and position. If True, pass `Rows` to `read_cuts`.
      ragged_leaves: the numbers of the ragged leaves, whose rows are padded along their first axis. `spec` has
        the largest length of this axis. In the `out` of `read`, the axis may be shorter if all rows fit.
    """

    spec: Any
    lanes: int = 0
    format: str = "columns"
    own_order: OwnOrder = ""
    shuffled: bool = True
    reads_columns: bool = False
    positioned: bool = False
    ragged_leaves: tuple[int, ...] = ()

    @property
    def epoch_rows(self) -> int:
        """The number of positions in an epoch."""
        return len(self)

    @property
    def arrays(self) -> Any:
        """The `ArraySource` with these rows, if all lie in memory or in mapped files; else None."""
        return None

    def order_for(self, asked: Order | None) -> RowOrder:
        """The order of a feed over this source. `asked`: the order that the user gave; None: the default."""
        return SingleOrder(asked or Order(shuffle=self.shuffled), self.epoch_rows)

    def tokens_of(self, rows: Indices) -> Indices | None:
        """int64[k]: how many tokens each row has, without padding; None if only reading them shows it."""
        return None

    def with_weights(self, weights: Mapping[str, float], position: int) -> Source:
        """Return this mixture with other weights from a position on.

        Raises:
          TypeError, ValueError: the source is not a mixture, or the weights or the position are not allowed.
        """
        raise TypeError(f"only a feedline.Mixture has weights, and this feed reads {self.kind}")

    def with_weights_of(self, order: Any, position: int) -> Source:
        """Return this source; of a mixture, a copy whose weights up to `position` come from a state's `order`."""
        return self

    def padded_length(self, rows: Indices) -> int:
        """The length to which the ragged leaves are padded in a batch. `rows`: all rows of the global batch."""
        raise NotImplementedError

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`. Rows come in any order and may repeat.

        Raises:
          RowError: a row cannot be read.
          FeedError: a file was written to or truncated, or its store cannot be read.
        """
        self.read_cuts(rows, whole_cuts(out))

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """Like `read`, for a source that is `positioned`: each row comes with its epoch, position and key."""
        self.read(rows.index, out)

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """Write each cut's columns of row rows[i] to index i of the cut's array. Raises what `read` raises."""
        out = jax.tree.unflatten(jax.tree.structure(self.spec), [leaf for _, _, leaf in cuts])
        if isinstance(rows, Rows):
            self.read_positioned(rows, out)
        else:
            self.read(rows, out)

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """Read the rows at some positions of an epoch. Returns int64[k], the row index at each position."""
        index = order.rows_at(epoch, positions)
        if not self.positioned:
            self.read_cuts(index, cuts)
            return index
        position = as_indices(positions)
        keys = keys_at(order.seed, epoch, position)
        self.read_cuts(Rows(np.full(len(index), epoch), position, index, keys), cuts)
        return index

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
    """Cuts that read all columns of all leaves into the arrays of `out`."""
    return [(leaf, (slice(None),) * (each.ndim - 1), each) for leaf, each in enumerate(jax.tree.leaves(out))]


def indices_of(rows: Rows | Indices) -> Indices:
    """int64[k]: the row indices in `rows`."""
    return rows.index if isinstance(rows, Rows) else rows


class EncodedSource(Indexed):
    """Rows of bytes of any length, with random access. `feedline.decoded` turns them into arrays.

    Attributes:
      fields: the names of the fields of a record; None: a record is one `bytes`.
      instead: how to get arrays without decoding. A feed that gets this source ends its error message with this.
    """

    fields: Sequence[str] | None
    instead = ""

    def records(self, rows: Indices) -> Sequence[Record]:
        """The records of these rows, in the order of `rows`. Rows may repeat. Several threads call this at once.

        Raises:
          RowError: a record cannot be read; the error names the row and its file.
          FeedError: a file was changed while it was in use.
        """
        raise NotImplementedError

    def _single(self, row: int) -> Record:
        return self.records(np.array([row], np.int64))[0]

    def _described(self) -> list[tuple[str, str]]:
        return [("row", "bytes")] if self.fields is None else [(name, "bytes") for name in self.fields]


class UserSource(Source):
    """Wraps a user's `RowSource`, which may also have `will_read` and `picklable`. Only the user closes it."""

    def __init__(self, given: RowSource) -> None:
        self._given, self.spec = given, given.spec
        self.picklable = bool(getattr(given, "picklable", True))

    @property
    def kind(self) -> str:
        """The name of the user's class."""
        return type(self._given).__name__

    @property
    def identity(self) -> dict[str, Any]:
        return self._given.identity

    @property
    def will_read(self) -> WillRead | None:
        given = getattr(self._given, "will_read", None)
        # a `will_read` that returns None accepts all rows; `bool` converts NumPy's False
        return None if given is None else lambda rows, ahead: (began := given(rows, ahead)) is None or bool(began)

    def __len__(self) -> int:
        return len(self._given)

    def read(self, rows: Indices, out: Any) -> None:
        returned: Any = self._given.read(_read_only(rows), out)  # type: ignore[func-returns-value]
        if returned is not None:
            kind = type(returned).__name__
            raise TypeError(f"read writes its rows into out, and must not return a {kind}")
