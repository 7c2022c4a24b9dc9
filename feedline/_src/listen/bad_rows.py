"""Writes the bad rows of each delivered batch to a file, and raises if they exceed the budget."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
from collections.abc import Sequence
from fractions import Fraction

from feedline._src.errors import RowError
from feedline._src.options import Reading
from feedline._src.rows.bad_rows import BadRow


@dataclasses.dataclass
class Quarantine:
    """Counts bad rows, writes each to a file once, and raises if they exceed `Reading.bad_rows_budget`."""

    reading: Reading
    process: int
    source_rows: int | None  # None: a stream, whose items may differ between epochs
    # row indices of the bad rows so far; for a stream, (epoch, position). At most the budget + one batch
    seen: set[int | tuple[int, int]] = dataclasses.field(default_factory=set)

    def enter(self, bad: Sequence[BadRow], *, own_rows: int) -> None:
        """Count and write the bad rows of a batch that is about to be delivered, except rows counted before.

        `own_rows`: as in `BatchRecord`. RowError: the bad rows exceed the budget; they have been written to the
        file nevertheless. OSError: the file cannot be written.
        """
        for row in bad:
            key = row.row if self.source_rows is not None else (row.epoch, row.row)
            if key not in self.seen:
                if self.reading.quarantine is not None:
                    values = {"process": self.process, **row._asdict()}
                    del values["at"]
                    self._append(str(self.reading.quarantine), (json.dumps(values) + "\n").encode())
                self.seen.add(key)
        budget, rows = self.reading.bad_rows_budget, own_rows
        if self.source_rows is not None:
            rows = min(rows, self.source_rows)  # a bad row counts once over all epochs, so good rows do, too
        most = budget if isinstance(budget, int) else math.ceil(Fraction(str(budget)) * rows)
        if len(self.seen) > most:
            first = bad[0]
            error = RowError(
                f"Reading.bad_rows_budget = {budget} allows {most} bad rows in the {rows} rows that this process "
                f"supplied so far, but {len(self.seen)} are bad; mend the source, or allow more. "
                f"The first bad row of this batch: {first.error}",
                stage="read",
                file=first.file,
            )
            error.locate(first.row, first.epoch, first.position)
            raise error

    def _append(self, path: str, line: bytes) -> None:
        """Append a line to the file. Other processes may append to it at the same time."""
        try:
            with open(path, "ab+", buffering=0) as file:
                with contextlib.suppress(OSError):  # a file system may have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                size = file.seek(0, os.SEEK_END) if file.seekable() else 0
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a full disk or a kill cut off a line
                    line = b"\n" + line
                while line:  # a nearly full disk stores a part of the line; writing the rest then fails
                    line = line[file.write(line) :]
        except OSError as error:
            raise OSError(
                error.errno,
                "a bad row could not be written to the file of Reading.quarantine "
                f"({os.strerror(error.errno or 0)}); make room, and next(feed) reads this batch again",
                path,
            ) from error
