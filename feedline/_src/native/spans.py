"""Values of documents side by side in the rows of a batch, copied by one C call."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.native.library import library

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


class Spans(NamedTuple):
    """Tokens that stand side by side in rows: those of each row one after the other, from its begin on.

    Attributes:
      row: int64[s], ascending: which of the rows, counted from 0.
      first: int64[s]: the first token, counted over all tokens of the source.
      length: int64[s], 1 or more: how many.
    """

    row: Indices
    first: Indices
    length: Indices

    @property
    def to(self) -> Indices:
        """int64[s]: where each begins in its row."""
        before = np.cumsum(self.length) - self.length
        return before - before[np.searchsorted(self.row, self.row)]

    @property
    def places(self) -> Indices:
        """int64[v]: the place of each value in its span."""
        before = np.cumsum(self.length) - self.length
        return np.arange(int(self.length.sum())) - np.repeat(before, self.length)

    def struct(self) -> SpansStruct:
        """For C, valid while these arrays are alive, which must be contiguous."""
        return SpansStruct(self.row.ctypes.data, self.first.ctypes.data, self.length.ctypes.data, len(self.row))


class SpansStruct(ctypes.Structure):
    """`Spans` of columns.c."""

    _fields_ = (
        ("row", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("spans", ctypes.c_int64),
    )


def mark(spans: Spans, numbers: Array, places: Array) -> None:
    """Write which span each value of a row is of, from 1 on, and its place in the span; 0 after the last span.

    Args:
      numbers, places: int32[rows, length], each row contiguous.
    """
    compiled, length = library(), numbers.shape[1]
    if compiled is not None:
        compiled.feedline_mark(
            ctypes.byref(spans.struct()), length, numbers.ctypes.data, numbers.strides[0], places.ctypes.data,
            places.strides[0],
        )  # fmt: skip
        return
    numbers[...] = places[...] = 0
    row, to, place = np.repeat(spans.row, spans.length), np.repeat(spans.to, spans.length), spans.places
    number = np.arange(len(spans.row)) - np.searchsorted(spans.row, spans.row) + 1
    numbers[row, to + place] = np.repeat(number, spans.length)
    places[row, to + place] = place


def copy_values(spans: Spans, values: Array, out: Array) -> None:
    """Write the values of all spans, one after the other, and zeros after the last of each row of `out`."""
    out[...] = 0
    out[np.repeat(spans.row, spans.length), np.repeat(spans.to, spans.length) + spans.places] = values


def copy_parts(spans: Spans, parts: Sequence[Array], out: Array) -> None:
    """Write the values of spans, and zeros after the last of each row.

    Args:
      parts: the values of each span.
      out: [rows, length].
    """
    out[...] = 0
    for row, to, part in zip(spans.row.tolist(), spans.to.tolist(), parts, strict=True):
        out[row, to : to + len(part)] = part
