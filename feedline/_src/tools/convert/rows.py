"""Reads rows of a source into one NumPy array with a field of numbers or `bytes` for each leaf."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.formats.table import fields
from feedline._src.rows.source import EncodedSource

_SAMPLED_RECORDS = 64


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a `RowSource` or an `EncodedSource`. Picklable if the source is.

    Attributes:
      dtype: dtype of a row, in this machine's byte order: structured if its leaves have names; object for `bytes`.
      row_bytes: the size of a row; with leaves of `bytes`, the mean size of some rows.
    """

    source: Any
    dtype: np.dtype[Any]
    row_bytes: int

    @classmethod
    def of(cls, source: Any) -> Rows:
        """The rows of a source that is not empty. TypeError: they cannot be converted."""
        if not isinstance(source, EncodedSource):
            if source.own_order or source.ragged_leaves:
                raise TypeError(
                    f"a conversion needs stored rows of one shape, got a {type(source).__name__}; convert "
                    "each source of a Mixture, and mix the results; keep the .npy files of a Ragged as they are"
                )
            dtype = _native(_row_dtype(source.spec))
            return cls(source, dtype, dtype.itemsize)
        sampled = np.unique(np.linspace(0, len(source) - 1, _SAMPLED_RECORDS).astype(np.int64))
        records: Any = source.records(sampled)
        names = () if source.fields is None else sorted(source.fields)
        if not all(names):
            raise TypeError("each column needs a name, and one has none; leave it out: columns=[...]")
        values = [record[name] for record in records for name in names] if names else records
        sizes = [len(value) if isinstance(value, bytes) else np.asarray(value).nbytes for value in values]
        first = np.dtype([(name, _dtype_of(records[0][name])) for name in names]) if names else np.dtype(object)
        return cls(source, first, sum(sizes) // len(records))

    def in_bytes(self, size: int) -> int:
        """How many rows have about `size` bytes in all; at least 1."""
        return max(1, size // max(1, self.row_bytes))

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read rows start to stop − 1. FeedError: a row cannot be read."""
        rows = np.arange(start, stop, dtype=np.int64)
        if isinstance(self.source, EncodedSource):
            records: Any = self.source.records(rows)
            out = np.empty(len(rows), self.dtype)
            for name in self.dtype.names or ():
                out[name] = [record[name] for record in records]
            if self.dtype.names is None:
                out[...] = records
            return out
        out = np.empty(len(rows), _row_dtype(self.source.spec))
        try:
            self.source.read(rows, fields(out))
        except FeedError:
            raise
        except Exception as error:  # of any type, from the user's source
            raise RowError(
                f"rows {start} to {stop - 1} could not be read: {type(error).__name__}: {error}; repair the "
                "source, and run the conversion again",
                stage="read",
            ) from error
        return out.astype(self.dtype.base, copy=False)

    def chunks(self, rows: range, chunk_rows: int, hashed: Any) -> Iterator[npt.NDArray[Any]]:
        """Yield `rows` in chunks, and update `hashed`, a hash of `hashlib`. The hash depends on `chunk_rows`."""
        for start in range(rows.start, rows.stop, chunk_rows):
            chunk = self.read(start, min(rows.stop, start + chunk_rows))
            for name in self.dtype.names or (...,):
                if (column := chunk[name]).dtype == object:
                    hashed.update(np.array([len(value) for value in column], np.int64))
                    for value in column:
                        hashed.update(value)
                else:
                    hashed.update(column.tobytes())
            yield chunk


def _row_dtype(spec: Any, place: str = "row") -> np.dtype[Any]:
    if isinstance(spec, dict) and spec and all(isinstance(name, str) and name for name in spec):
        return np.dtype([(name, _row_dtype(spec[name], f"{place}[{name!r}]")) for name in sorted(spec)])
    if not jax.tree_util.all_leaves([spec]):
        raise TypeError(
            f"a row can be converted if it is one array or a dict of named arrays, and {place} is a "
            f"{type(spec).__name__}; give each leaf a name of its own, as in {{'x': ..., 'y': ...}}"
        )
    return np.dtype((np.dtype(spec.dtype), tuple(spec.shape)))


def _dtype_of(value: Any) -> np.dtype[Any]:
    if isinstance(value, bytes):
        return np.dtype(object)
    array = np.asarray(value)
    return _native(np.dtype((array.dtype, array.shape)))


def _native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return dtype.newbyteorder("=")
