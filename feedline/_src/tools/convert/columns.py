"""Rows of a source as columns: arrays of numbers, or lists of bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.rows.row_source import RowSource, is_ragged
from feedline._src.sources.encoded.records import EncodedSource, is_encoded_source
from feedline._src.sources.mixture import Mixture

Array = npt.NDArray[Any]
NAMELESS = ""
"""The name of the only column of rows that are one array, or one `bytes`."""
_SAMPLED_RECORDS = 64


class Kind(NamedTuple):
    """What a column holds: numbers of a dtype in a shape, or bytes of any length if `dtype` is None.

    `nested`: it lies in dicts in the row, and its name is the path: "train/image".
    """

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] = ()
    nested: bool = False

    @property
    def as_json(self) -> list[Any]:
        """The kind as JSON values."""
        return ["bytes" if self.dtype is None else self.dtype.name, list(self.shape)]


Kinds = Mapping[str, Kind]
Columns = Mapping[str, "Array | list[bytes]"]


class RowReader(Protocol):
    """Reads adjacent rows of a source as columns."""

    @property
    def kinds(self) -> Kinds:
        """What the columns hold."""

    @property
    def row_bytes(self) -> int:
        """The size of a row; for bytes, the mean of some rows."""

    def read(self, start: int, stop: int) -> Columns:
        """Rows start to stop − 1. Raises FeedError if one cannot be read."""


def reader_of(source: RowSource | EncodedSource) -> RowReader:
    """The reader of a source.

    Raises:
      TypeError, ValueError: its rows cannot be converted.
      FeedError: its first rows cannot be read.
    """
    if is_encoded_source(source):
        return _RecordReader(source)
    return _ArrayReader(source)  # type: ignore[arg-type]


class _ArrayReader:
    """The rows of a `RowSource`. Numbers get the byte order of this machine."""

    def __init__(self, source: RowSource) -> None:
        if isinstance(source, Mixture):
            raise TypeError(
                "the order of a mixture is computed from its weights and is not stored, so a Mixture cannot be "
                "converted; convert each of its sources, and mix the results"
            )
        if is_ragged(source):
            raise TypeError(
                "all rows of a converted leaf have one shape, got a source with rows of different lengths; keep "
                "its .npy files of values and offsets, which feedline.Ragged maps into memory"
            )
        self._source = source
        leaves, self._tree = jax.tree_util.tree_flatten_with_path(source.spec)
        names = [NAMELESS if not path else _key_of(path) for path, _ in leaves]
        if len(set(names)) < len(names):
            raise TypeError(
                f"names that are converted must differ when dicts in a row are written with slashes, got {names}; "
                "rename one of those that occur twice"
            )
        self.kinds = {
            name: Kind(_native(np.dtype(leaf.dtype)), tuple(leaf.shape), len(path) > 1)
            for name, (path, leaf) in zip(names, leaves, strict=True)
        }
        self.row_bytes = sum(
            kind.dtype.itemsize * int(np.prod(kind.shape)) for kind in self.kinds.values() if kind.dtype
        )

    def read(self, start: int, stop: int) -> Columns:
        out = jax.tree.map(lambda leaf: np.empty((stop - start, *leaf.shape), leaf.dtype), self._source.spec)
        with _naming_rows(start, stop):
            self._source.read(np.arange(start, stop, dtype=np.int64), out)
        arrays = jax.tree.leaves(out)
        return {
            name: np.ascontiguousarray(array, kind.dtype)
            for (name, kind), array in zip(self.kinds.items(), arrays, strict=True)
        }

    def __reduce__(self) -> Any:
        return reader_of, (self._source,)


class _RecordReader:
    """The rows of an `EncodedSource`. Numbers in a record keep the dtype and shape of the first one."""

    def __init__(self, source: EncodedSource) -> None:
        self._source = source
        names = [NAMELESS] if source.fields is None else sorted(source.fields)
        first = self._records(0, 1)[0]
        self.kinds = {name: _kind_of(_field(first, name)) for name in names}
        sampled = np.unique(np.linspace(0, len(source) - 1, _SAMPLED_RECORDS).astype(np.int64))
        sizes = [_bytes_of(record, names) for row in sampled.tolist() for record in self._records(row, row + 1)]
        self.row_bytes = sum(sizes) // len(sizes)

    def read(self, start: int, stop: int) -> Columns:
        records = self._records(start, stop)
        return {
            name: _column([_field(record, name) for record in records], name, kind, start)
            for name, kind in self.kinds.items()
        }

    def _records(self, start: int, stop: int) -> Sequence[Any]:
        with _naming_rows(start, stop):
            return self._source.records(np.arange(start, stop, dtype=np.int64))

    def __reduce__(self) -> Any:
        return reader_of, (self._source,)


def _key_of(path: Any) -> str:
    """The name of a leaf: its path, if it lies in dicts in the row.

    Raises:
      TypeError: the rows are neither one array nor dicts of arrays.
    """
    keys = [getattr(part, "key", None) for part in path]
    if not all(isinstance(key, str) and key and (len(keys) == 1 or "/" not in key) for key in keys):
        raise TypeError(
            "rows that are converted are one array or a dict of arrays by name, and names in dicts in it have no "
            f"slash, got the leaf row{jax.tree_util.keystr(path)}; give each leaf a name of its own, as in "
            "{'x': ..., 'y': ...}"
        )
    return "/".join(map(str, keys))


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=") if dtype.kind in "iufc" else dtype


def _field(record: Any, name: str) -> Any:
    return record if name == NAMELESS else record[name]


def _kind_of(value: Any) -> Kind:
    if isinstance(value, bytes):
        return Kind(None)
    array = np.asarray(value)
    return Kind(_native(array.dtype), array.shape)


def _bytes_of(record: Any, names: Sequence[str]) -> int:
    values = [_field(record, name) for name in names]
    return sum(len(value) if isinstance(value, bytes) else np.asarray(value).nbytes for value in values)


def _column(values: list[Any], name: str, kind: Kind, start: int) -> Array | list[bytes]:
    """The values of a field. RowError if one is of another kind."""
    for i, value in enumerate(values):
        if (found := _kind_of(value)) != kind:
            raise RowError(
                f"all records must have the same fields, and {name!r} is {found.as_json} in this one, "
                f"{kind.as_json} in the first; write it again, or leave the field out",
                stage="read",
                row=start + i,
            )
    return values if kind.dtype is None else np.ascontiguousarray(values, kind.dtype)


@contextlib.contextmanager
def _naming_rows(start: int, stop: int) -> Iterator[None]:
    """Turn errors of a source that are no `FeedError` into one that says which rows were read."""
    try:
        yield
    except FeedError:
        raise
    except Exception as error:
        raise RowError(
            f"rows {start} to {stop - 1} could not be read: {type(error).__name__}: {error}; mend the source, and "
            "run the conversion again",
            stage="read",
        ) from error
