"""What becomes of bad rows once their batch is delivered: they are written down, and held against the budget."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from io import FileIO

from feedline._src.errors import RowError
from feedline._src.options import Reading
from feedline._src.rows.bad_rows import BadRow

_PATIENCE_S = 1.0
_POLL_S = 1e-3


@dataclasses.dataclass
class Quarantine:
    """Holds bad rows against the budget of `Reading`, and writes them to its file.

    Attributes:
      reading: has both.
      rows: that this process supplies of each batch.
      process: its index, for the file.
      source_rows: all rows of the source; None: a stream, whose items may be others in each epoch.
      seen: the bad rows so far, each once, or the items of a stream by epoch. No more than the budget and a batch.
    """

    reading: Reading
    rows: int
    process: int
    source_rows: int | None
    seen: set[int | tuple[int, int]] = dataclasses.field(default_factory=set)

    def enter(self, bad: Sequence[BadRow], *, batches: int) -> None:
        """Take down the bad rows of a batch that is about to be delivered, but those of an earlier epoch.

        Args:
          bad: of this process.
          batches: how many are delivered with this one.

        Raises:
          RowError: they are more than the budget. They are in the file all the same.
          OSError: the file cannot be written.
        """
        for row in bad:
            key = row.row if self.source_rows is not None else (row.epoch, row.row)
            if key in self.seen:
                continue
            told = {"process": self.process, **row._asdict()}
            del told["at"]
            self._append((json.dumps(told) + "\n").encode())
            self.seen.add(key)
        budget, rows = self.reading.bad_rows_budget, batches * self.rows
        if self.source_rows is not None:
            rows = min(rows, self.source_rows)  # a row counts once, so a share is one of different rows, too
        most = budget if isinstance(budget, int) else math.ceil(Fraction(str(budget)) * rows)
        if len(self.seen) > most:
            first = bad[0]
            error = RowError(
                f"Reading.bad_rows_budget = {budget} allows {most} bad rows in the {rows} rows that this process "
                f"supplied so far, and {len(self.seen)} are; mend the source, or allow more. "
                f"The first of this batch: {first.error}",
                stage="read",
                file=first.file,
            )
            error.locate(first.row, first.epoch, first.position)
            raise error

    def _append(self, line: bytes) -> None:
        """Write a line at the end of the file, in which other processes write too.

        Whoever holds the lock finds whole lines, but for the last one if a full disk or a kill cut it off.
        """
        if self.reading.quarantine is None:
            return
        try:
            with self._opened() as file, _locked(file):
                if file.seekable() and _is_cut_off(file):
                    line = b"\n" + line
                while line:  # a disk that becomes full takes a part of the line, and fails at the rest
                    line = line[file.write(line) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"the file of Reading.quarantine must take a line for a bad row ({os.strerror(error.errno or 0)})"
                "; make room, and next(feed) reads this batch again",
                str(self.reading.quarantine),
            ) from error

    def _opened(self) -> FileIO:
        assert self.reading.quarantine is not None
        return open(self.reading.quarantine, "ab+", buffering=0)


@contextlib.contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    """With the lock, if it can be had soon: training must not wait for a process that stopped with it.

    Without it, or on a file system that has none, a line is in one piece because one write is.
    """
    deadline = time.monotonic() + _PATIENCE_S
    locked = False
    while not locked and time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            time.sleep(_POLL_S)
        except OSError:
            break
    try:
        yield
    finally:
        if locked:  # a child that was forked meanwhile would keep it
            fcntl.flock(file, fcntl.LOCK_UN)


def _is_cut_off(file: FileIO) -> bool:
    """Whether the last line of a file has no end."""
    size = file.seek(0, os.SEEK_END)
    return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
