"""Rows of a source as columns: for each leaf an array, of numbers or of `bytes`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.rows.encoded_source import is_encoded_source

Leaf = tuple[str, ...]
"""Where a leaf lies in a row: () if the row is one array, ("train", "image") in a dict in a dict."""
Columns = dict[Leaf, npt.NDArray[Any]]
"""Some adjacent rows; leaves of `bytes` have the dtype object."""
_SAMPLED_RECORDS = 64


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a `RowSource` or an `EncodedSource`. They pickle if the source does.

    Attributes:
      source: what they are read from.
      dtype: of a row, in the byte order of this machine: structured if its leaves have names; object for `bytes`.
      row_bytes: the size of a row; for `bytes`, the mean of some rows.
    """

    source: Any
    dtype: np.dtype[Any]
    row_bytes: int

    @classmethod
    def of(cls, source: Any) -> Rows:
        """The rows of a source that is not empty. TypeError: they cannot be converted."""
        if getattr(source, "parts", ()) or getattr(source, "ragged_leaves", ()):
            raise TypeError(
                f"rows that are converted are stored and have one shape, got a {type(source).__name__}; convert "
                "each source of a Mixture, and mix the results; keep the .npy files of a Ragged as they are"
            )
        if not is_encoded_source(source):
            dtype = _row_dtype(source.spec)
            return cls(source, dtype, dtype.itemsize)
        sampled = np.unique(np.linspace(0, len(source) - 1, _SAMPLED_RECORDS).astype(np.int64))
        with _naming_rows(0, len(source)):
            records: Any = source.records(sampled)
        first = records[0]
        names = () if source.fields is None else sorted(source.fields)
        dtype = np.dtype([(name, _dtype_of(first[name])) for name in names]) if names else _dtype_of(first)
        values = [record[name] for record in records for name in names] if names else records
        sizes = [len(value) if isinstance(value, bytes) else np.asarray(value).nbytes for value in values]
        return cls(source, dtype, sum(sizes) // len(records))

    def in_bytes(self, size: int) -> int:
        """How many rows have about this size, at least one."""
        return max(1, size // max(1, self.row_bytes))

    @property
    def leaves(self) -> list[tuple[Leaf, np.dtype[Any]]]:
        """Path and dtype of each leaf; the dtype includes the leaf's shape."""
        return list(_leaves(self.dtype))

    def read(self, start: int, stop: int) -> Columns:
        """Rows start to stop − 1. Raises FeedError if one cannot be read."""
        rows = np.arange(start, stop, dtype=np.int64)
        if is_encoded_source(self.source):
            with _naming_rows(start, stop):
                records = self.source.records(rows)
            return {leaf: _column(records, leaf, dtype, start) for leaf, dtype in self.leaves}
        out = jax.tree.map(lambda leaf: np.empty((len(rows), *leaf.shape), leaf.dtype), self.source.spec)
        with _naming_rows(start, stop):
            self.source.read(rows, out)
        return {
            leaf: np.ascontiguousarray(functools.reduce(operator.getitem, leaf, out), dtype.base)
            for leaf, dtype in self.leaves
        }

    def chunks(self, rows: range, chunk_rows: int, hashed: Any) -> Iterator[Columns]:
        """Adjacent rows, some at a time, which are added to a hash of `hashlib`: it depends on `chunk_rows`."""
        for start in range(rows.start, rows.stop, chunk_rows):
            columns = self.read(start, min(rows.stop, start + chunk_rows))
            for column in columns.values():
                if column.dtype.hasobject:
                    hashed.update(np.array([len(value) for value in column], np.int64))
                    for value in column:
                        hashed.update(value)
                else:
                    hashed.update(column.reshape(-1).view(np.uint8))
            yield columns


def _row_dtype(spec: Any, place: str = "row") -> np.dtype[Any]:
    if isinstance(spec, dict) and spec and all(isinstance(name, str) and name for name in spec):
        return np.dtype([(name, _row_dtype(spec[name], f"{place}[{name!r}]")) for name in sorted(spec)])
    if not jax.tree_util.all_leaves([spec]):
        raise TypeError(
            f"rows that are converted are one array or a dict of arrays by name, and {place} is a "
            f"{type(spec).__name__}; give each leaf a name of its own, as in {{'x': ..., 'y': ...}}"
        )
    return np.dtype((np.dtype(spec.dtype).newbyteorder("="), tuple(spec.shape)))


def _dtype_of(value: Any) -> np.dtype[Any]:
    if isinstance(value, bytes):
        return np.dtype(object)
    array = np.asarray(value)
    return np.dtype((array.dtype.newbyteorder("="), array.shape))


def _leaves(row: np.dtype[Any], leaf: Leaf = ()) -> Iterator[tuple[Leaf, np.dtype[Any]]]:
    if row.names is None:
        yield leaf, row
    for name in row.names or ():
        yield from _leaves(row[name], (*leaf, name))


def _column(records: Sequence[Any], leaf: Leaf, dtype: np.dtype[Any], start: int) -> npt.NDArray[Any]:
    """A field of some records. RowError if one has another dtype or shape than the first record."""
    values = [record[leaf[0]] if leaf else record for record in records]
    for row, value in enumerate(values, start):
        if (found := _dtype_of(value)) != dtype:
            raise RowError(
                f"all records must have the same fields, and {leaf[0] if leaf else 'record'!r} is {_shown(found)} "
                f"in this one, {_shown(dtype)} in the first; write it again, or leave the field out",
                stage="read",
                row=row,
            )
    return np.fromiter(values, dtype, len(values))


def _shown(dtype: np.dtype[Any]) -> str:
    return "bytes" if dtype.hasobject else f"{dtype.base}{list(dtype.shape)}"


@contextlib.contextmanager
def _naming_rows(start: int, stop: int) -> Iterator[None]:
    """Turn any other error of a source into a `FeedError` that names the rows that were read."""
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
