"""The gather of rows from arrays into a batch: by the C library if it was built, else by NumPy."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.native.gather import Bad, Copy, MemoryLostError, Segments
from feedline._src.native.library import library
from feedline._src.order.compiled import EpochOrder, Positions, PositionsPointer
from feedline._src.placement.plan import Columns
from feedline._src.rows.shards import Indices
from feedline._src.sources.numpy_gather import NumpyGather

Array = npt.NDArray[Any]


class RowGather:
    """The rows of arrays of one dtype and row shape, those of the first array first.

    Reads are thread-safe. Rows are checked against each array's length, and memory outside of the arrays is never
    addressed.

    Args:
      parts: the arrays, which are kept alive. They may lie anywhere in memory, with any strides.

    Example:
      >>> rows = RowGather([np.arange(6).reshape(3, 2), np.arange(6, 10).reshape(2, 2)])
      >>> out = np.empty((2, 1), int)
      >>> rows.read(np.array([3, 2]), (slice(1, 2),), out)
      >>> out.tolist()
      [[7], [5]]
    """

    def __init__(self, parts: Sequence[Array]) -> None:
        compiled, filled = library(), [part for part in parts if len(part)]
        self._by_c: tuple[ctypes.CDLL, Segments] | None = None
        self._by_numpy: NumpyGather | None = None
        if compiled is not None and filled and all(part[0, ...].flags.c_contiguous for part in filled):
            self._by_c = compiled, Segments(filled)
        else:
            self._by_numpy = NumpyGather(parts)

    @property
    def survives_lost_files(self) -> bool:
        """Whether a file that was truncated, or whose disk fails, is an error, and not the end of the process."""
        return self._by_c is not None

    def read(self, rows: Indices, columns: Columns, out: Array) -> None:
        """Write the `columns` of row rows[i] to out[i], which may be strided.

        Raises:
          IndexError: there is no such row.
          RowError: it is in a mapped file that was truncated, or whose disk failed.
        """
        if self._by_c is not None:
            compiled, segments = self._by_c
            with _naming_the_file():
                segments.gather(compiled, np.ascontiguousarray(rows, np.int64), columns, out)
        elif self._by_numpy is not None:
            self._by_numpy.read(rows, columns, out)

    def copy(self, count: int, columns: Columns, out: Array) -> Copy | None:
        """The C struct for a copy of the `columns` of `count` rows to `out`; None if C cannot make this copy."""
        return None if self._by_c is None else self._by_c[1].copy(count, columns, out)


def fill(library: ctypes.CDLL, epoch: EpochOrder, positions: Positions, copies: Sequence[Copy]) -> Indices:
    """Copy the rows at some positions of an epoch into all leaves of a batch.

    Args:
      copies: one for each leaf, for as many rows as there are positions (see `Segments.copy`).

    Returns:
      int64[k]: the row at each position.

    Raises:
      IndexError: there is no such position, or no such row.
      RowError: a row is in a mapped file that was truncated, or whose disk failed.
    """
    rows = np.empty(len(positions), np.int64)
    bad = Bad()
    pointer = PositionsPointer(positions)
    code = library.feedline_fill(
        ctypes.byref(epoch),
        pointer.address,
        pointer.first,
        len(positions),
        rows.ctypes.data,
        (Copy * len(copies))(*copies),
        len(copies),
        ctypes.byref(bad),
    )
    with _naming_the_file():
        bad.check_memory(code)
    if code:
        raise IndexError(f"positions and rows must be in [0, {epoch.n}), got {bad[0]} (code {code})")
    return rows


@contextlib.contextmanager
def _naming_the_file() -> Iterator[None]:
    """Raise lost memory as an error that names row and file."""
    try:
        yield
    except MemoryLostError as lost:
        from feedline._src.formats.npy import file_at

        file = file_at(lost.address)
        if lost.row is None:
            raise FeedError(
                "the memory of a batch could not be written to, or that of its rows not be read (SIGBUS): there "
                "is no room left in it, or a disk failed; look at the log of the kernel (dmesg)",
                stage="read",
                file=file,
            ) from lost
        raise RowError(
            "a row could not be read from its mapped file (SIGBUS): the file was truncated, or its disk failed; "
            "restore the file, or look at the log of the kernel (dmesg)",
            stage="read",
            row=lost.row,
            file=file,
        ) from lost
