"""The error family: what goes wrong in the world, not in the caller's arguments.

A wrong argument is a `ValueError` or a `TypeError`. Everything else that feedline raises is a
`FeedError`. Each message says the rule, what was found, and a change that works.
"""

from __future__ import annotations


class FeedError(RuntimeError):
    """Something outside the caller's control failed: a row, a worker, a process, a disk.

    Attributes, each None where it does not apply:
      stage: "read", "transform", "place", "launch" or "checkpoint".
      process: index of the JAX process that failed.
      row: row index in the source.
      file: the file that was read, or the folder of the checkpoints.
    """

    def __init__(
        self,
        message: str,
        *,
        stage: str | None = None,
        process: int | None = None,
        row: int | None = None,
        file: str | None = None,
    ) -> None:
        where = {"stage": stage, "process": process, "row": row, "file": file}
        told = ", ".join(f"{name} {value}" for name, value in where.items() if value is not None)
        super().__init__(f"{message} [{told}]" if told else message)
        self.stage = stage
        self.process = process
        self.row = row
        self.file = file


class RowError(FeedError):
    """A row could not be read, decoded or cast."""


class WorkerError(FeedError):
    """A reading worker process died or did not start."""


class StallError(FeedError):
    """No stage has advanced for longer than `Reading.stall_error_s`."""
