"""What becomes of bad rows once their batch is delivered: they are written down, and held against the budget."""

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
    """Holds bad rows against the budget of `Reading`, and writes each to its file once."""

    reading: Reading
    rows: int  # that this process supplies of each batch
    process: int
    source_rows: int | None  # None: a stream, whose items may be others in each epoch
    # the bad rows so far, each once, or the items of a stream by epoch. No more than the budget and a batch
    seen: set[int | tuple[int, int]] = dataclasses.field(default_factory=set)

    def enter(self, bad: Sequence[BadRow], *, batches: int) -> None:
        """Count and write the bad rows of a batch that is about to be delivered: each row once, in any epoch.

        `batches`: how many are delivered with this one. RowError: there are more than the budget; they are in the
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

    def _append(self, path: str, line: bytes) -> None:
        """Append a line to the file, to which other processes may append."""
        try:
            with open(path, "ab+", buffering=0) as file:
                with contextlib.suppress(OSError):  # a file system may have no locks
                    fcntl.flock(file, fcntl.LOCK_EX)
                size = file.seek(0, os.SEEK_END) if file.seekable() else 0
                if size and os.pread(file.fileno(), 1, size - 1) != b"\n":  # a full disk or a kill cut it off
                    line = b"\n" + line
                while line:  # a disk that becomes full takes a part of the line, and fails at the rest
                    line = line[file.write(line) :]
        except OSError as error:
            raise OSError(
                error.errno,
                f"the file of Reading.quarantine must take a line for a bad row ({os.strerror(error.errno or 0)})"
                "; make room, and next(feed) reads this batch again",
                path,
            ) from error
