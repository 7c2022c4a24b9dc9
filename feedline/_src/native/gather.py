"""The gather of rows into a batch by one C call, from segments anywhere in memory."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.native.spans import Spans

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
Columns = tuple[slice | Indices, ...]
_BUCKETS_A_SEGMENT = 8
_MEMORY_LOST = 4
"""A code of columns.c."""
_STREAMED_RUN_BYTES, _STREAMED_BYTES = 1 << 11, 1 << 23
"""Minimum sizes, of a run and of all output of a call, for stores that bypass the processor's cache.

A store into the cache first reads the line that it overwrites; a store that bypasses it does not. But a batch that
fits into the cache is faster to write there. Measured on two cores of two machines, against stores into the cache:
with calls of 16 MB 1.05 to 1.5 times as fast for rows of 3 KB and more, 0.7 to 1.1 for 256 B; with calls of 4 MB
0.7 to 0.8 on a machine with 260 MiB of last-level cache, and about the same on one with less.
"""


class _LeafStruct(ctypes.Structure):
    """`Leaf` of columns.c: the segments of a leaf, and which columns to copy."""

    _fields_ = (
        ("bases", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("buckets", ctypes.c_void_p),
        ("segments", ctypes.c_int64),
        ("shift", ctypes.c_int64),
        ("offsets", ctypes.c_void_p),
        ("runs", ctypes.c_int64),
        ("run_bytes", ctypes.c_int64),
    )
    offsets_array: Indices | None = None
    """Keeps alive what `offsets` points to."""
    row_shape: tuple[int, ...] = ()
    """The shape of a row with only the wanted columns."""


class Copy(ctypes.Structure):
    """`Copy` of columns.c: source and destination of the rows of one leaf."""

    _fields_ = (
        ("leaf", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("stream", ctypes.c_int64),
    )


class MemoryLostError(Exception):
    """A row could not be copied: a mapped file was truncated, its disk failed, or there is no memory left.

    Attributes:
      row: the first such row; None if the memory that it was copied to was lost.
      address: in the memory that was lost; 0 if it is not known.
    """

    def __init__(self, row: int | None, address: int) -> None:
        super().__init__(row, address)
        self.row = row
        self.address = address


class Bad(ctypes.Array[ctypes.c_int64]):
    """What the C functions say of an error."""

    _type_, _length_ = ctypes.c_int64, 2

    def check_memory(self, code: int) -> None:
        """Raise a `MemoryLostError` if that is the code that a C function returned."""
        if code == _MEMORY_LOST:
            raise MemoryLostError(None if self[0] < 0 else self[0], ctypes.c_uint64(self[1]).value)


class Segments:
    """The rows of arrays of one dtype and row shape, one after the other, anywhere in memory.

    Args:
      parts: the arrays, which are kept alive. Each row is contiguous; rows may lie at any distance, and overlap.

    Example:
      >>> from feedline._src.native.library import library
      >>> rows = Segments([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 2), int)
      >>> if library() is not None:
      ...     rows.gather(library(), np.array([3, 2]), (slice(None),), out)
      ...     assert out.tolist() == [[6, 7], [4, 5]]
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        self._parts = [part for part in parts if len(part)]
        # not taken from a row: of a 1-D array that is a scalar, which has lost the byte order
        self._shape, self._dtype = self._parts[0].shape[1:], self._parts[0].dtype
        self._bases = np.array([part.ctypes.data for part in self._parts], np.uint64)
        self._strides = np.array([part.strides[0] for part in self._parts], np.int64)
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        self._shift, self._buckets = _buckets(self._ends)
        self._leaves: dict[tuple[_Column, ...], _LeafStruct] = {}  # by columns: a feed uses one selection

    def gather(
        self, library: ctypes.CDLL, rows: Indices, columns: Columns, out: Array, stream: bool | None = None
    ) -> None:
        """Write the `columns` of row rows[i] to out[i].

        Args:
          rows: int64[k], contiguous.
          out: with any strides. Another dtype than that of the parts costs one more copy.
          stream: bypass the processor's cache, if the rows allow it. None: if that is faster.

        Raises:
          IndexError: there is no such row; nothing has been written.
          MemoryLostError: a row is in a mapped file that was truncated, or whose disk failed.
          ValueError: `out` has another shape, or may not be written.
        """
        copy = self.copy(len(rows), columns, out, stream)
        if copy is None:
            out[:] = self._gathered(library, rows, columns, out.shape)
            return
        bad = Bad()
        code = library.feedline_gather(ctypes.byref(copy), rows.ctypes.data, len(rows), ctypes.byref(bad))
        bad.check_memory(code)
        if code:
            raise IndexError(f"rows are 0 to {self._ends[-1] - 1}, got {bad[0]}")

    def copy(self, count: int, columns: Columns, out: Array, stream: bool | None = None) -> Copy | None:
        """The C struct for a copy of the `columns` of `count` rows to `out`, valid while both are alive.

        None if C cannot make this copy, because `out` has another dtype, or gaps inside its rows.
        """
        cut = tuple(map(_Column, columns))
        leaf = self._leaves.get(cut) or self._leaves.setdefault(cut, self._leaf(cut))
        if out.shape != (count, *leaf.row_shape) or not out.flags.writeable:
            raise ValueError(f"out must be writeable and have the shape {[count, *leaf.row_shape]}")
        if out.dtype != self._dtype or not out[:1].flags.c_contiguous:
            return None
        if stream is None:
            stream = leaf.run_bytes >= _STREAMED_RUN_BYTES and out.nbytes >= _STREAMED_BYTES
        return Copy(ctypes.addressof(leaf), out.ctypes.data, out.strides[0], stream)

    def copy_spans(self, library: ctypes.CDLL, spans: Spans, out: Array) -> None:
        """Write the values of spans side by side, of segments of one axis, and zeros after the last of each row.

        Args:
          out: [rows, length], each row contiguous; of the dtype of the values, or int32 where that is uint16.

        Raises:
          IndexError: a span is not within one segment, or does not fit its row; nothing has been written.
          MemoryLostError: a span is in a mapped file that was truncated, or whose disk failed.
        """
        leaf = self._leaves.get(()) or self._leaves.setdefault((), self._leaf(()))
        bad, struct = Bad(), spans.struct()
        arguments = (out.ctypes.data, out.strides[0], out.shape[1], out.itemsize, ctypes.byref(bad))
        code = library.feedline_spans(ctypes.byref(leaf), ctypes.byref(struct), *arguments)
        bad.check_memory(code)
        if code:
            i = bad[0]
            raise IndexError(
                f"a span must lie in one segment and fit a row of {out.shape[1]} values, got {spans.length[i]} "
                f"values from {spans.first[i]} on"
            )

    def _gathered(self, library: ctypes.CDLL, rows: Indices, columns: Columns, shape: tuple[int, ...]) -> Array:
        whole = np.empty(shape, self._dtype)
        self.gather(library, rows, columns, whole)
        return whole

    def _leaf(self, columns: tuple[_Column, ...]) -> _LeafStruct:
        offsets, run_bytes = _runs(self._shape, self._dtype.itemsize, [column.of for column in columns])
        leaf = _LeafStruct(
            *(array.ctypes.data for array in (self._bases, self._strides, self._ends, self._buckets)),
            len(self._ends),
            self._shift,
            offsets.ctypes.data,
            len(offsets),
            run_bytes,
        )
        leaf.offsets_array = offsets
        leaf.row_shape = tuple(len(indices) for indices in _wanted(self._shape, [column.of for column in columns]))
        return leaf


class _Column:
    """The selection along one axis as a dictionary key: slices and arrays are not hashable."""

    __slots__ = ("_key", "of")

    def __init__(self, of: slice | Indices) -> None:
        self.of = of
        self._key = (of.start, of.stop, of.step) if isinstance(of, slice) else of.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Column) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _buckets(ends: Indices) -> tuple[int, npt.NDArray[np.int32]]:
    """(shift, the segment of row i·2^shift for each i): where the search for the segment of a row starts."""
    rows = int(ends[-1])
    shift = max(0, (rows // (_BUCKETS_A_SEGMENT * len(ends))).bit_length())
    starts = np.arange(0, rows, 1 << shift, dtype=np.int64)
    return shift, np.searchsorted(ends, starts, side="right").astype(np.int32)


def _wanted(shape: tuple[int, ...], columns: Sequence[slice | Indices]) -> list[range | Indices]:
    """The wanted indices along each axis of a row."""
    return [range(size)[c] if isinstance(c, slice) else c for size, c in zip(shape, columns, strict=True)]


def _runs(shape: tuple[int, ...], itemsize: int, columns: Sequence[slice | Indices]) -> tuple[Indices, int]:
    """(offset of each run, bytes in each run), where the wanted columns of a row are runs of adjacent bytes."""
    wanted = _wanted(shape, columns)
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    whole = itertools.takewhile(
        lambda axis: isinstance(columns[axis], slice) and len(wanted[axis]) == shape[axis],
        reversed(range(len(shape))),
    )
    cut = len(shape) - len(list(whole)) - 1  # the last axis of which only a part is wanted
    if cut < 0:
        return np.zeros(1, np.int64), itemsize * math.prod(shape)
    last = wanted[cut]
    adjacent = isinstance(last, range) and last.step == 1
    run_bytes = strides[cut] * (len(last) if adjacent else 1)
    firsts: list[Any] = [*wanted[:cut], last[:1] if adjacent else last]
    offsets = np.zeros(1, np.int64)
    for stride, indices in zip(strides, firsts, strict=False):
        offsets = (offsets[:, None] + np.asarray(indices, np.int64) * stride).reshape(-1)
    return offsets, run_bytes
