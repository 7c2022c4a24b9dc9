"""`FeedError` and its subclasses; warnings that show the user's line.

A wrong argument raises a `ValueError` or `TypeError`, a missing file or package an `OSError` or `ImportError`.
Every other error is a `FeedError`. Each message states the rule, what was found, and a change that works.
"""

from __future__ import annotations

import numbers
import sys
import warnings
from typing import Any

_LOCATION = ("stage", "process", "row", "epoch", "position", "file")


class FeedError(RuntimeError):
    """Something outside the caller's control failed: a row, a worker, a process, a disk.

    An attribute is None where it does not apply.

    Attributes:
      stage: "read", "transform", "place", "agree", "abort", "launch", "train" or "checkpoint".
      process: index of the JAX process that failed.
      row: row index in the source; for a stream, the number of the item.
      epoch, position: where that row stands in the order.
      file: the file that was read, or the folder of the checkpoints.

    Example:
      >>> error = RowError("the image is truncated", row=7, file="0.tar")
      >>> error.row, str(error)
      (7, 'the image is truncated [row 7, file 0.tar]')
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        process: int | None = None,
        row: int | None = None,
        epoch: int | None = None,
        position: int | None = None,
        file: str | None = None,
    ) -> None:
        self.message = message
        self.stage = stage
        self.process = process
        self.row = row
        self.epoch = epoch
        self.position = position
        self.file = file
        super().__init__(self._full_message())

    @property
    def where(self) -> dict[str, Any]:
        """The attributes that are not None, by name."""
        return {name: value for name in _LOCATION if (value := getattr(self, name)) is not None}

    def locate(self, row: int, epoch: int, position: int) -> None:
        """Set the row, its epoch and its position, and add them to the message."""
        self.row, self.epoch, self.position = row, epoch, position
        self.args = (self._full_message(),)

    def _full_message(self) -> str:
        location = ", ".join(f"{name} {value}" for name, value in self.where.items())
        return f"{self.message} [{location}]" if location else self.message


class RowError(FeedError):
    """A row could not be read, decoded or cast."""


class WorkerError(FeedError):
    """A reading worker process died or did not start."""


class StallError(FeedError):
    """No stage has advanced for longer than `Reading.stall_error_s`."""


class ProcessError(FeedError):
    """Another process failed, was lost, or differs from this process in its settings, position or data."""


class OtherDataError(ValueError):
    """A feed was given a state that was saved with other data.

    Attributes:
      difference: the field of the fingerprint that differs, and both values.
      remedy: a change that lets this run continue; None: only the same source and order do.
      field: the name of the field that differs.
    """

    def __init__(self, difference: str, remedy: str | None, field: str) -> None:
        super().__init__(difference, remedy, field)
        self.difference, self.remedy, self.field = difference, remedy, field

    def __str__(self) -> str:
        remedy = self.remedy or "Give the feed the same source and order"
        return (
            f"the state was saved over other data: {self.difference}. {remedy}, or, if the difference is "
            f'intended, call set_state(state, allow=("{self.field}",))'
        )


for _error in (FeedError, RowError, WorkerError, StallError, ProcessError):
    _error.__module__ = "feedline"  # a traceback then shows the name that a program imports


def warn(message: str) -> None:
    """Issue a warning that shows the user's line: the innermost line outside of feedline."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "feedline":
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


def as_arguments(error: BaseException) -> dict[str, Any]:
    """Convert an error to JSON values: the arguments of the `FeedError` that reports it in another process.

    Example:
      >>> print(ProcessError(**{"process": 1, **as_arguments(RowError("unreadable", stage="read", row=7))}))
      RowError: unreadable [stage read, process 1, row 7]
    """
    message, where = (error.message, error.where) if isinstance(error, FeedError) else (str(error), {})
    kind = type(error).__name__
    plain = {name: int(x) if isinstance(x, numbers.Integral) else str(x) for name, x in where.items()}
    return {"message": f"{kind}: {message}" if message else kind, **plain}
