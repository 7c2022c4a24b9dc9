"""Writes values of documents side by side into the rows of a batch, for packing."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.native.library import library

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


class SpansStruct(ctypes.Structure):
    """`Spans` of columns.c."""

    _fields_ = (
        ("row", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("spans", ctypes.c_int64),
    )


class Spans(NamedTuple):
    """Spans of consecutive values of a source. The spans of a row are written from its start, without gaps.

    Attributes:
      row: int64[s], ascending: the row of each span, counted from 0.
      first: int64[s]: the number of each span's first value, counted over all values of the source.
      length: int64[s], 1 or more: how many values each span has.
    """

    row: Indices
    first: Indices
    length: Indices

    def struct(self) -> SpansStruct:
        """The struct for C. It is valid while these arrays are alive; they must be contiguous."""
        return SpansStruct(self.row.ctypes.data, self.first.ctypes.data, self.length.ctypes.data, len(self.row))

    def values(self) -> tuple[Indices, Indices, Indices]:
        """For each value of all spans: its row, its offset in the row, and its offset in the span."""
        before = np.cumsum(self.length) - self.length
        first_of_row = before[np.searchsorted(self.row, self.row)]
        in_span = np.arange(int(self.length.sum())) - np.repeat(before, self.length)
        return np.repeat(self.row, self.length), np.repeat(before - first_of_row, self.length) + in_span, in_span


def mark(spans: Spans, numbers: Array, places: Array) -> None:
    """For each value, write the number of its span in the row, from 1, and its offset in the span.

    Args:
      numbers, places: int32[rows, length]. Zeros follow the last value of a row.
    """
    compiled = library()
    if compiled is not None and has_contiguous_rows(numbers) and has_contiguous_rows(places):
        compiled.feedline_mark(
            ctypes.byref(spans.struct()), numbers.shape[1], numbers.ctypes.data, numbers.strides[0],
            places.ctypes.data, places.strides[0],
        )  # fmt: skip
        return
    number = np.arange(len(spans.row)) - np.searchsorted(spans.row, spans.row) + 1
    row, in_row, in_span = spans.values()
    numbers[...] = places[...] = 0
    numbers[row, in_row] = np.repeat(number, spans.length)
    places[row, in_row] = in_span


def copy_values(spans: Spans, values: Array, out: Array) -> None:
    """Write the `values` of all spans, in order, into the rows of `out`, and zeros after them in each row."""
    row, in_row, _ = spans.values()
    out[...] = 0
    out[row, in_row] = values


def has_contiguous_rows(array: Array) -> bool:
    """Whether each row is contiguous, so that C can write it. Distances between rows do not matter."""
    return bool(array[:1].flags.c_contiguous)
