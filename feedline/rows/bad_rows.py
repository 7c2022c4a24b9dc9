"""Bad rows: which rows of a read they are, and what is known of each that was replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from feedline.errors import RowError
from feedline.order.schedule import BatchPositions

Indices = npt.NDArray[np.int64]


class BadRow(NamedTuple):
    """A row that could not be read or cast, and the one in its place.

    Attributes:
      at: its row of the global batch.
      epoch, position: its place in the run.
      row: its row index in the source; of a stream, its place in it.
      substitute: of the row whose values the batch has instead.
      error: what was wrong with it.
      file: where it was read, if that is known.
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
        """The row that a located error is about."""
        assert error.row is not None
        assert error.epoch is not None
        assert error.position is not None
        file = None if error.file is None else str(error.file)  # a transform may have raised it with a Path
        return cls(at, error.epoch, error.position, error.row, substitute, str(error.message), file)


def failing(attempt: Callable[[slice], None], rows: Indices, error: RowError) -> Iterator[tuple[int, RowError]]:
    """Which rows of a read are bad, and why, ascending. All others have been read once this is exhausted.

    One bad row among k costs two reads more where its error names it, and 2 log₂ k where it does not.

    Args:
      attempt: reads these rows again, or raises a `RowError`.
      rows: int64[k], the row index of each.
      error: with which the read of all of them failed.

    Raises:
      RowError: an iterator ended inside the source, which says nothing about a row.

    Example:
      >>> def attempt(here):
      ...     if here.start <= 5 < here.stop:
      ...         raise RowError("unreadable")
      >>> [i for i, _ in failing(attempt, np.arange(100), RowError("unreadable"))]
      [5]
    """
    check_is_of_a_row(error)
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
        check_is_of_a_row(error)
        return error
    return None


def _pieces(here: slice, rows: Indices, error: RowError) -> list[slice]:
    """Smaller parts of a read that failed, the last of them first: cut around the row that the error names."""
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
    """Raise an error that says which row of a read is the first bad one, and where that stands in the run.

    It is `error` itself if each row can be read alone.
    """
    for i, failure in failing(attempt, rows, error):
        failure.locate(int(rows[i]), int(positions.epoch[i]), int(positions.position[i]))
        raise failure from failure.__cause__
    raise error


def check_is_of_a_row(error: RowError) -> None:
    """Raise one that is not: an iterator ended inside the source, where nobody expected it."""
    if isinstance(error.__cause__, StopIteration):
        raise error
