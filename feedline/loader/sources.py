"""What rows can be read from: the `RowSource` contract, and which source a user's object becomes."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import grain
import jax
import numpy as np
import numpy.typing as npt

from feedline.loader.arrays import ArraySource
from feedline.loader.records import RecordSource


@runtime_checkable
class RowSource(Protocol):
    """Rows with random access, read many at a time. Write one to read a format of your own.

    `spec` is known before the first read. `read` is called from many threads at once. A source that
    can be pickled (cheaply: it travels as a path) may be read by worker processes.
    """

    spec: Any
    """Tree of `jax.ShapeDtypeStruct`, of one row."""

    @property
    def identity(self) -> dict[str, Any]:
        """What the fingerprint is made of, as JSON values: names, sizes, sampled bytes; no absolute path."""

    def __len__(self) -> int: ...

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        """Write row rows[i] to out[leaf][i], in the dtypes of `spec`.

        Rows come in any order and with repeats; `out` may be strided.
        """

    def close(self) -> None:
        """Let go of files. Called once by the owner of the feed, never while `read` runs."""


def open_source(path_or_glob: str | os.PathLike[str]) -> RowSource:
    """The rows of a file, or of all files that a glob matches, in the sorted order of their names.

    Args:
      path_or_glob: of a `.npy` file (the batch is one array) or a `.npz` file (the batch is a dict), or a glob
        of such files, whose rows follow each other.

    Raises:
      FileNotFoundError: no such file, or no match.
      ValueError: truncated, another format, or files that do not fit together.

    Example:
      >>> import tempfile
      >>> folder = Path(tempfile.mkdtemp())
      >>> for shard in range(2):
      ...     np.save(folder / f"rows-{shard}.npy", np.zeros((5, 3), np.uint8))
      >>> len(open_source(folder / "rows-*.npy"))
      10
    """
    name = os.fspath(path_or_glob)
    if not glob.has_magic(name) or Path(name).exists():
        return ArraySource([name])
    matches = sorted(glob.glob(name, recursive=True))
    if not matches:
        raise FileNotFoundError(f"no file matches {name}; check the folder and the pattern")
    return ArraySource(matches)


def as_source(source: Any) -> RowSource | grain.IterDataset[Any]:
    """The `RowSource` that reads what the user gave; a stream, which has no random access, stays as it is.

    Raises:
      TypeError: nothing that rows can be read from.
    """
    if isinstance(source, grain.IterDataset):
        return source
    if isinstance(source, grain.MapDataset):
        return RecordSource(source)
    if isinstance(source, str | os.PathLike):
        return open_source(source)
    if isinstance(source, np.ndarray | jax.Array | dict | list | tuple):
        return ArraySource([source])
    if isinstance(source, RowSource):
        return source
    if callable(getattr(source, "__len__", None)) and callable(getattr(source, "__getitem__", None)):
        return RecordSource(grain.MapDataset.source(source))
    if jax.tree_util.all_leaves([source]):
        raise TypeError(
            "a source is a tree of arrays and .npy paths, a path or glob, a grain dataset, a RowSource, or "
            f"an object with __len__ and __getitem__, got {type(source).__name__}; feed an iterator of "
            "batches with feedline.prefetch_to_mesh"
        )
    return ArraySource([source])
