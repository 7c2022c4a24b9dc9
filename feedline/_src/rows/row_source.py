"""The contract of a source that is read many rows at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where rows of a batch stand: four arrays with a value for each row. Read-only.

    A transform gets one as its second argument.

    Attributes:
      epoch: int64[k], the epoch of each row.
      position: int64[k], its position in the epoch's order.
      index: int64[k], the row index in the source.
      key: uint64[k], random bits: a function of (seed, epoch, position), so that augmentation drawn
        from it is the same on any topology.
    """

    epoch: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    index: npt.NDArray[np.int64]
    key: npt.NDArray[np.uint64]


_MEMBERS = ("__len__", "spec", "identity", "read", "close")
"""The members of a `RowSource`."""


@runtime_checkable
class RowSource(Protocol):
    """Rows with random access, read many at a time. Write one to read a format of your own.

    A class needs these five members, and no base class. A feed never closes a source that it was given. To be read
    by worker processes, `Reading(workers=...)`, a source must pickle: let `__reduce__` give the path, and each
    worker opens the file for itself.

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
    """Tree of `jax.ShapeDtypeStruct`, of one row. It is fixed before the first read, and the same for all rows."""

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that identify the data: names, sizes, sampled bytes; no absolute path.

        It is read when a feed is built, and becomes the field "data" of the fingerprint. So a state that was saved
        over other data is refused, and so are processes of one run that do not read the same data.
        """

    def __len__(self) -> int:
        """The number of rows. It must not change while a feed uses the source."""

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        """Write row rows[i] to out[leaf][i] for each leaf, in the dtypes of `spec`.

        Rows come in any order and with repeats, and several threads read at once. `rows` is read-only; each leaf
        of `out` has the shape (len(rows), *shape of the leaf) and may be strided. An error becomes a `RowError`
        that names the row; raise one yourself, with `row=`, to name it without further reads.
        """

    def close(self) -> None:
        """Close files. A feed calls it once, for a source that it opened, perhaps while a `read` still runs."""


class ColumnarSource(RowSource, Protocol):
    """A `RowSource` that can also read some columns of a single leaf, as a mesh that shards columns needs them."""

    def read_leaf(
        self, leaf: int, rows: npt.NDArray[np.int64], columns: tuple[Any, ...], out: npt.NDArray[Any]
    ) -> None:
        """Write the `columns` of row rows[i] of one leaf to out[i], which has the leaf's dtype.

        Args:
          leaf: in the order in which JAX flattens `spec`.
          columns: for each axis of a row, a slice or int64[k].
        """


class PositionedSource(RowSource, Protocol):
    """A `RowSource` whose rows depend on where they stand: other random values in each epoch, for example."""

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """Read the rows `rows.index`. A feed calls it in place of `read`."""


class RaggedSource(RowSource, Protocol):
    """A `RowSource` with leaves whose first axis is as long as each batch needs.

    `spec` has the maximum, and the leaves of `out` in `read` have any length that holds the rows.
    """

    ragged_leaves: tuple[int, ...]
    """The numbers of these leaves, in the order in which JAX flattens `spec`."""

    def padded_length(self, rows: npt.NDArray[np.int64]) -> int:
        """The length of the ragged leaves in a batch of these rows.

        Each process calls it with the row indices of the whole global batch, so it must depend on nothing else.
        """


def is_ragged(source: RowSource) -> TypeGuard[RaggedSource]:
    """Whether a source is a `RaggedSource`."""
    return hasattr(source, "padded_length")


class ToldSource(RowSource, Protocol):
    """A `RowSource` that is told which rows come next, so that it can fetch them from far away in time.

    `will_read = None` says that this object need not be told.
    """

    def will_read(self, rows: npt.NDArray[np.int64], ahead: int) -> bool:
        """Start to fetch these rows, which are read `ahead` batches later. It must return at once.

        Returns:
          False: it is too early; tell again later. The batches after that one are not told before.
        """


def will_read_of(source: RowSource) -> Callable[[npt.NDArray[np.int64], int], bool] | None:
    """The `will_read` of a `ToldSource`; None if a source need not be told. It may become None at any time."""
    found: Callable[[npt.NDArray[np.int64], int], bool] | None = getattr(source, "will_read", None)
    return found


def file_of(source: RowSource, row: int) -> str | None:
    """The file that holds a row, by the source's own `file_of`; None if the source has none."""
    known: Callable[[int], str | None] | None = getattr(source, "file_of", None)
    return None if known is None else known(row)


def is_positioned(source: RowSource) -> TypeGuard[PositionedSource]:
    """Whether a source is a `PositionedSource`."""
    return hasattr(source, "read_positioned")


def is_columnar(source: RowSource) -> TypeGuard[ColumnarSource]:
    """Whether a source is a `ColumnarSource`."""
    return hasattr(source, "read_leaf")


def is_row_source(value: Any) -> TypeGuard[RowSource]:
    """Whether it has the members of a `RowSource`. On Python 3.11, `isinstance` would compute `identity`."""
    has = set(dir(value))
    return all(name in has or hasattr(value, name) for name in _MEMBERS)


def why_not_a_source(source: Any) -> str:
    """The error message for an object that is not a source of any kind."""
    kind, has = type(source).__name__, set(dir(source))
    if "spec" in has or ("read" in has and "__iter__" not in has):  # a file has read, too
        lacks = ", ".join(name for name in _MEMBERS if name not in has)
        return (
            f"a RowSource needs {', '.join(_MEMBERS)}, and {kind} lacks {lacks}; help(feedline.RowSource) says "
            "what each is, and docs/sources.md has an example"
        )
    change = "feed an iterator of batches with prefetch_to_mesh"
    if "__getitem__" in has:
        change = f"give it __len__, or, if it is a stream, {change}"
    return (
        "a source is a tree of arrays and .npy paths, a path or glob, a grain dataset, a RowSource, or "
        f"an object with __len__ and __getitem__, got {kind}; {change}"
    )
