"""Comparison of columns: a digest of all rows, and the first row that differs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.tools.convert.columns import Columns

Array = npt.NDArray[Any]


class Digest:
    """A SHA-256 of columns, which come in parts of any length.

    Example:
      >>> whole, parts = Digest(["x"]), Digest(["x"])
      >>> whole.update({"x": np.arange(4)})
      >>> parts.update({"x": np.arange(3)})
      >>> parts.update({"x": np.array([3])})
      >>> whole.hexdigest() == parts.hexdigest()
      True
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._values = {name: hashlib.sha256() for name in names}
        self._lengths = hashlib.sha256()
        """Of the values that are bytes, so that the same bytes cut otherwise differ."""

    def update(self, columns: Columns) -> None:
        """Add the next rows."""
        for name, hashed in self._values.items():
            column = columns[name]
            if isinstance(column, list):
                self._lengths.update(np.array([len(value) for value in column], np.int64).tobytes())
                for value in column:
                    hashed.update(value)
            else:
                hashed.update(as_bytes(column).reshape(-1).data)

    def hexdigest(self) -> str:
        """The digest of all rows so far."""
        parts = [self._lengths.digest(), *(hashed.digest() for hashed in self._values.values())]
        return hashlib.sha256(b"".join(parts)).hexdigest()


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """uint8[k, bytes of a row]: a view of a contiguous array."""
    row_bytes = array.dtype.itemsize * int(np.prod(array.shape[1:]))
    return array.reshape(-1).view(np.uint8).reshape(len(array), row_bytes)


def first_difference(one: Columns, other: Columns) -> tuple[int, str] | None:
    """The offset of the first row that differs, and the name of its column; None if the columns are equal."""
    found = []
    for name, column in one.items():
        again = other[name]
        if isinstance(column, list):
            offsets = [i for i, (a, b) in enumerate(zip(column, again, strict=True)) if a != b]
        else:
            assert isinstance(again, np.ndarray)
            offsets = np.flatnonzero((as_bytes(column) != as_bytes(again)).any(1)).tolist()
        found += [(offset, name) for offset in offsets[:1]]
    return min(found, default=None)
