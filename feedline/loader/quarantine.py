"""What becomes of bad rows once their batch is delivered: they are written down, and held against the budget."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from fractions import Fraction
from typing import BinaryIO

from feedline.errors import RowError
from feedline.loader.bad_rows import BadRow
from feedline.options import Reading


@dataclasses.dataclass
class Quarantine:
    """The budget and the file of `Reading`.

    Attributes:
      reading: says both.
      rows: that this process supplies of each batch.
      process: its index, for the file.

    Raises:
      OSError: the file cannot be written.
    """

    reading: Reading
    rows: int
    process: int

    def __post_init__(self) -> None:
        # whether the last line was cut off by a full disk, so that the next one must not go on with it
        self._cut = False
        if self.reading.quarantine is not None:
            with open(self.reading.quarantine, "ab+") as file:  # now, not after hours, a missing folder is seen
                self._cut = file.seekable() and _is_cut_off(file)

    def enter(self, bad: Sequence[BadRow], *, before: int, batches: int) -> None:
        """Take down the bad rows of a batch that is about to be delivered.

        Args:
          bad: of this process.
          before: how many were bad in the batches delivered before.
          batches: how many are delivered with this one.

        Raises:
          RowError: they are more than the budget. They are in the file all the same.
          OSError: the file cannot be written.
        """
        for row in bad:
            told = {"process": self.process, **row._asdict()}
            del told["at"]
            self._append((json.dumps(told) + "\n").encode())
        budget, rows = self.reading.bad_rows_budget, batches * self.rows
        most = budget if isinstance(budget, int) else math.ceil(Fraction(str(budget)) * rows)
        if before + len(bad) > most:
            first = bad[0]
            error = RowError(
                f"Reading.bad_rows_budget = {budget} allows {most} bad rows in the {rows} rows that this process "
                f"supplied so far, and {before + len(bad)} are; mend the source, or allow more. "
                f"The first of this batch: {first.error}",
                stage="read",
                file=first.file,
            )
            error.locate(first.row, first.epoch, first.position)
            raise error

    def _append(self, line: bytes) -> None:
        """In one write at the end of the file, so that lines of several processes do not mix."""
        if self.reading.quarantine is None:
            return
        with open(self.reading.quarantine, "ab", buffering=0) as file:
            left = b"\n" + line if self._cut else line
            while left:  # a disk that becomes full takes a part of the line, and fails at the rest
                left = left[file.write(left) :]
                self._cut = bool(left)


def _is_cut_off(file: BinaryIO) -> bool:
    """Whether the last line of a file has no end."""
    size = file.seek(0, os.SEEK_END)
    return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
