"""The contract of a source that is read many rows at a time."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
import numpy.typing as npt

from feedline._src.rows.values import is_table


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
        of `out` has the shape `(len(rows), *shape of the leaf)` and may be strided. An error becomes a `RowError`
        that names the row; raise one yourself, with `row=`, to name it without further reads.
        """

    def close(self) -> None:
        """Close files. A feed calls it once, for a source that it opened, perhaps while a `read` still runs."""


def is_row_source(value: Any) -> TypeGuard[RowSource]:
    """Whether it has the members of a `RowSource`. On Python 3.11, `isinstance` would compute `identity`."""
    has = set(dir(value))
    return all(name in has or hasattr(value, name) for name in _MEMBERS)


def why_not_a_source(source: Any) -> str:
    """The error message for an object that is not a source of any kind."""
    kind, has = type(source).__name__, set(dir(source))
    if is_table(source):
        return (
            f"a table is no source, but its numeric columns are, got a {kind}; pass "
            "{name: table[name] for name in names}"
        )
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
