"""Finds the bad rows of a failed read, and describes each bad row that was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from feedline._src.errors import RowError
from feedline._src.order.schedule import BatchPositions

Indices = npt.NDArray[np.int64]


class BadRow(NamedTuple):
    """A row that could not be read or cast, and its substitute.

    Attributes:
      at: its offset in the global batch.
      epoch, position: the epoch, and the row's position in the epoch's order.
      row: its row index in the source; for a stream, its position in the stream.
      substitute: the row index of its substitute. The batch contains the values of the substitute.
      error: the message of the error that the bad row caused.
      file: the file of the row, if known.
    """

    at: int
    epoch: int
    position: int
    row: int
    substitute: int
    error: str
    file: str | None

    @classmethod
    def of(cls, error: RowError, at: int, substitute: int) -> BadRow:
        """Make a `BadRow` from an error. Call `error.locate` first: it sets the row, epoch and position."""
        assert error.row is not None
        assert error.epoch is not None
        assert error.position is not None
        file = None if error.file is None else str(error.file)  # a transform may pass a Path
        return cls(at, error.epoch, error.position, error.row, substitute, str(error.message), file)


def find_bad_rows(
    attempt: Callable[[slice], None], rows: Indices, error: RowError
) -> Iterator[tuple[int, RowError]]:
    """Yield (offset, error) of each bad row of a failed read, ascending. Afterwards, all good rows have been read.

    For one bad row among k, this makes at most three more reads if the error names the row, else 2 log₂ k.

    Args:
      attempt: reads a slice of the rows again, or raises a `RowError`.
      rows: int64[k], the row index of each row.
      error: the error that the read of all rows raised.

    Raises:
      RowError: a StopIteration inside the source caused an error, so no row is bad.

    Example:
      >>> def attempt(here):
      ...     if here.start <= 5 < here.stop:
      ...         raise RowError("unreadable")
      >>> [i for i, _ in find_bad_rows(attempt, np.arange(100), RowError("unreadable"))]
      [5]
    """
    check_concerns_a_row(error)
    waiting = _pieces(slice(0, len(rows)), rows, error)
    while waiting:
        here = waiting.pop()
        if here.start < here.stop and (failure := _failure(attempt, here)) is not None:
            if here.stop - here.start == 1:
                yield here.start, failure
            else:
                waiting += _pieces(here, rows, failure)


def _failure(attempt: Callable[[slice], None], here: slice) -> RowError | None:
    try:
        attempt(here)
    except RowError as error:
        check_concerns_a_row(error)
        return error
    return None


def _pieces(here: slice, rows: Indices, error: RowError) -> list[slice]:
    """Split a failed read at the row that its error names, or in halves if it names none. Last piece first."""
    if here.stop - here.start == 1:
        return [here]
    named = np.flatnonzero(rows[here] == error.row)
    if error.row is None or not len(named):
        middle = (here.start + here.stop) // 2
        return [slice(middle, here.stop), slice(here.start, middle)]
    bad = here.start + int(named[0])
    return [slice(bad + 1, here.stop), slice(bad, bad + 1), slice(here.start, bad)]


def raise_located(
    attempt: Callable[[slice], None], positions: BatchPositions, rows: Indices, error: RowError
) -> NoReturn:
    """Raise the error of the first bad row of a read, with its row index, epoch and position.

    If no single row fails again, raise `error`.
    """
    for i, failure in find_bad_rows(attempt, rows, error):
        failure.locate(int(rows[i]), int(positions.epoch[i]), int(positions.position[i]))
        raise failure from failure.__cause__
    raise error


def check_concerns_a_row(error: RowError) -> None:
    """Raise the error if a StopIteration inside the source caused it, because then no row is bad."""
    if isinstance(error.__cause__, StopIteration):
        raise error
