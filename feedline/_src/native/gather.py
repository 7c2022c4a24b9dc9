"""Copies rows into a batch by one C call, from segments anywhere in memory."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.native.library import Bad, library
from feedline._src.native.spans import Spans, copy_values, has_contiguous_rows

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]
Columns = tuple[slice | Indices, ...]
_BUCKETS_A_SEGMENT = 8
_STREAMED_RUN_BYTES, _STREAMED_BYTES = 1 << 11, 1 << 23
"""Minimum bytes of each run of adjacent bytes, and of the output, for stores that bypass the processor's cache.

A store into the cache first reads the line that it overwrites; a store that bypasses the cache does not. But a
batch that fits into the cache is written faster there. Speed relative to stores into the cache, on two cores of
two machines: for calls of 16 MB, 1.05 to 1.5 with rows of 3 KB and more, and 0.7 to 1.1 with rows of 256 B; for
calls of 4 MB, 0.7 to 0.8 with 260 MiB of last-level cache, and about 1 on the machine with less cache.
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
    """Owns the memory that `offsets` points to."""
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


class Reader:
    """Reads the rows of one leaf. Thread-safe.

    Args:
      dtype: the dtype of the leaf.
      shape: the shape of one row.

    Attributes:
      survives_lost_files: whether a read raises an error, rather than ending the process, if a mapped file was
        truncated or its disk fails.
    """

    survives_lost_files = True

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] to out[i]. `out` may have any strides, and another dtype.

        Raises:
          IndexError: a row does not exist; nothing has been written.
          RowError: a row is in a mapped file that was truncated, or whose disk failed.
        """
        raise NotImplementedError

    def copy(self, count: int, columns: Columns, out: Array) -> Copy | None:
        """The C struct for a copy of the `columns` of `count` rows to `out`; None if C cannot make this copy.

        The struct is valid while `out` and the reader are alive.
        """
        return None

    def read_spans(self, spans: Spans, out: Array) -> None:
        """Fill each row of `out` with its spans, then with zeros. Raises what `read` raises.

        Args:
          spans: spans of the reader's rows. No span crosses the end of one of the reader's arrays.
          out: [rows, length, *shape of a row]. A row without a span may keep its values or become zeros.
        """
        numbers = np.repeat(spans.first, spans.length) + spans.values()[2]
        values = np.empty((len(numbers), *self._shape), self._dtype)
        self.read(numbers, (slice(None),) * len(self._shape), values)
        copy_values(spans, values, out)


class RowGather(Reader):
    """Gathers rows of arrays of one dtype and row shape, in C. Rows are numbered over all arrays, in their order.

    Reads are thread-safe, and never address memory outside of the arrays.

    Args:
      parts: the arrays, which are kept alive. They may lie anywhere in memory. Each row is contiguous (see
        `can_gather`); distances between rows are arbitrary, and rows may overlap.

    Example:
      >>> rows = [np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)]
      >>> out = np.empty((2, 1), int)
      >>> if RowGather.can_gather(rows):
      ...     RowGather(rows).read(np.array([3, 2]), (slice(1, 2),), out)
      ...     assert out.tolist() == [[7], [5]]
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        compiled = library()
        assert compiled is not None
        self._library = compiled
        self._parts = [part for part in parts if len(part)]
        # the dtype of the array, since a row of a 1-D array is a scalar, which has lost the byte order
        super().__init__(self._parts[0].dtype, self._parts[0].shape[1:])
        self._bases = np.array([part.ctypes.data for part in self._parts], np.uint64)
        self._strides = np.array([part.strides[0] for part in self._parts], np.int64)
        self._ends = np.cumsum([len(part) for part in self._parts], dtype=np.int64)
        self._shift, self._buckets = _buckets(self._ends)
        self._leaves: dict[Any, _LeafStruct] = {}  # by columns; a feed always selects the same ones

    @staticmethod
    def can_gather(parts: Sequence[Array]) -> bool:
        """Whether there is a C library, rows to gather, and no gap between the elements of a row."""
        filled = [part for part in parts if len(part)]
        return library() is not None and bool(filled) and all(part[0, ...].flags.c_contiguous for part in filled)

    def read(self, rows: Indices, columns: Columns, out: Array, stream: bool | None = None) -> None:
        """See `Reader`. If `out` has another dtype, or gaps inside its rows, values are copied twice.

        Args:
          stream: whether to bypass the processor's cache, if alignment allows. None: for large rows and outputs.

        Raises:
          ValueError: `out` has another shape, or is not writeable.
        """
        rows = np.ascontiguousarray(rows, np.int64)
        copy = self.copy(len(rows), columns, out, stream)
        if copy is None:
            whole = np.empty(out.shape, self._dtype)
            self.read(rows, columns, whole)
            out[:] = whole
            return
        bad = Bad()
        code = self._library.feedline_gather(ctypes.byref(copy), rows.ctypes.data, len(rows), ctypes.byref(bad))
        if code:
            bad.check_memory(code)
            raise IndexError(f"rows are 0 to {self._ends[-1] - 1}, got {bad[0]}")

    def copy(self, count: int, columns: Columns, out: Array, stream: bool | None = None) -> Copy | None:
        """See `Reader`; None if `out` has another dtype, or gaps inside its rows."""
        leaf = self._leaf(columns)
        if out.shape != (count, *leaf.row_shape) or not out.flags.writeable:
            raise ValueError(f"out must be writeable and have the shape {[count, *leaf.row_shape]}")
        if out.dtype != self._dtype or not out[:1].flags.c_contiguous:
            return None
        if stream is None:
            stream = leaf.run_bytes >= _STREAMED_RUN_BYTES and out.nbytes >= _STREAMED_BYTES
        return Copy(ctypes.addressof(leaf), out.ctypes.data, out.strides[0], stream)

    def read_spans(self, spans: Spans, out: Array) -> None:
        """See `Reader`. C widens uint16 to int32."""
        leaf = self._leaf((slice(None),) * len(self._shape))
        is_widened = self._dtype == np.uint16 and not self._shape and out.dtype == np.int32
        if (self._strides != leaf.run_bytes).any():
            super().read_spans(spans, out)
            return
        if not has_contiguous_rows(out) or (out.dtype != self._dtype and not is_widened):
            values = np.zeros(out.shape, self._dtype)
            self.read_spans(spans, values)
            out[...] = values
            return
        bad, value_bytes = Bad(), out.itemsize * math.prod(self._shape)
        arguments = (out.ctypes.data, out.strides[0], out.shape[1], value_bytes, ctypes.byref(bad))
        code = self._library.feedline_spans(ctypes.byref(leaf), ctypes.byref(spans.struct()), *arguments)
        if code:
            bad.check_memory(code)
            raise IndexError(
                f"a span must lie within one array, and all spans of a row have at most {out.shape[1]} values; "
                f"got a span of {spans.length[bad[0]]} values that begins at value {spans.first[bad[0]]}"
            )

    def _leaf(self, columns: Columns) -> _LeafStruct:
        key = tuple((c.start, c.stop, c.step) if isinstance(c, slice) else c.tobytes() for c in columns)
        leaf = self._leaves.get(key)
        if leaf is None:
            offsets, run_bytes = _runs(self._shape, self._dtype.itemsize, columns)
            arrays = (self._bases, self._strides, self._ends, self._buckets)
            pointers = [array.ctypes.data for array in arrays]
            leaf = _LeafStruct(
                *pointers, len(self._ends), self._shift, offsets.ctypes.data, len(offsets), run_bytes
            )
            leaf.offsets_array = offsets
            leaf.row_shape = tuple(len(indices) for indices in _wanted(self._shape, columns))
            leaf = self._leaves.setdefault(key, leaf)  # keeps a faster thread's struct, which may be in use
        return leaf


def rows_at_positions(order: ctypes.Structure, positions: Array | range, copies: Sequence[Copy] = ()) -> Indices:
    """Compute the row at each position of an epoch, and copy these rows of each leaf. Returns the rows, int64[k].

    Args:
      order: an `EpochOrder`.
      positions: 64-bit integers[k] with any strides, or a range of step 1.
      copies: the copy of each leaf, for k rows (see `RowGather.copy`).

    Raises:
      IndexError: there is no such position, or no such row.
      RowError: a row is in a mapped file that was truncated, or whose disk failed.
    """
    compiled, rows, bad = library(), np.empty(len(positions), np.int64), Bad()
    assert compiled is not None
    first, address = 0, None
    if isinstance(positions, range):
        first = positions.start
    else:
        positions = np.ascontiguousarray(positions)  # the C function expects no strides
        address = positions.ctypes.data
    code = compiled.feedline_fill(
        ctypes.byref(order),
        address,
        first,
        len(positions),
        rows.ctypes.data,
        (Copy * len(copies))(*copies),
        len(copies),
        ctypes.byref(bad),
    )
    if code:
        bad.check_memory(code)
        raise IndexError(f"positions and rows must be in [0, {order.n}), got {bad[0]} (code {code})")
    return rows


def _buckets(ends: Indices) -> tuple[int, npt.NDArray[np.int32]]:
    """(shift, the segment of row i·2^shift for each i). The search for the segment of a row starts there."""
    rows = int(ends[-1])
    shift = max(0, (rows // (_BUCKETS_A_SEGMENT * len(ends))).bit_length())
    starts = np.arange(0, rows, 1 << shift, dtype=np.int64)
    return shift, np.searchsorted(ends, starts, side="right").astype(np.int32)


def _wanted(shape: tuple[int, ...], columns: Columns) -> list[range | Indices]:
    """The wanted indices along each axis of a row."""
    return [range(size)[c] if isinstance(c, slice) else c for size, c in zip(shape, columns, strict=True)]


def _runs(shape: tuple[int, ...], itemsize: int, columns: Columns) -> tuple[Indices, int]:
    """The wanted columns of a row as runs of adjacent bytes: (offset of each run, bytes per run)."""
    wanted = _wanted(shape, columns)
    strides = [itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    whole = itertools.takewhile(
        lambda axis: isinstance(columns[axis], slice) and len(wanted[axis]) == shape[axis],
        reversed(range(len(shape))),
    )
    cut = len(shape) - len(list(whole)) - 1  # the last axis that is not wanted completely
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
