"""Computes the positions of each batch, as pure arithmetic over batch size, remainder and epochs.

A *cursor* is (epoch, position): how many rows of the epoch came before, at most n, the number of rows. A
cursor in a checkpoint is not normalised: after the last row of an epoch its position is n, not 0 of the next
epoch. The next batch decides, with its own batch size, whether that epoch is over. Padding has no positions of its
own, so no batch size and no remainder leads to a position beyond n.

A *pass* is `epochs` epochs; pass i covers the epochs [i·epochs, (i+1)·epochs). An endless feed is a single pass
without an end.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Remainder = Literal["drop", "pad", "wrap"]
BatchSizes = Sequence[tuple[int, int]]
"""(first step, batch size) for each size: from that step on, batches have that size. Steps ascend from 0."""
REMAINDERS: tuple[Remainder, ...] = ("drop", "pad", "wrap")
ENDLESS = (1 << 63) - 1
"""The number of batches of a pass without an end, as in Grain's `repeat`."""


class Cursor(NamedTuple):
    """Where the next row of a feed comes from: after `position` rows of the epoch."""

    epoch: int
    position: int


@dataclasses.dataclass(frozen=True)
class BatchPositions:
    """Epoch and position of some rows of a batch, and which of them are valid: int64[k], int64[k] and bool[k].

    Epochs ascend.
    """

    epoch: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]
    valid: npt.NDArray[np.bool_]

    def part(self, here: slice) -> BatchPositions:
        """The epochs and positions of some adjacent rows."""
        return BatchPositions(self.epoch[here], self.position[here], self.valid[here])

    def stretches(self) -> Iterator[tuple[int, slice]]:
        """Yields (epoch, rows) for each stretch of rows in one epoch with ascending positions."""
        count = len(self.epoch)
        changes = np.flatnonzero((np.diff(self.epoch) != 0) | (np.diff(self.position) < 0)) + 1
        for start, stop in itertools.pairwise([0, *changes, count] if count else ()):
            yield int(self.epoch[start]), slice(start, stop)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The batches of a feed with random access. `plan/asked.py` refuses an empty pass.

    Attributes:
      rows: n, rows in the source.
      batch_size: B, rows in the global batch.
      remainder: "drop": n // B batches per epoch. "pad": n / B, rounded up; rows of the same epoch, from
        position 0 on, fill the last batch and are not valid. "wrap": batches continue across the ends of epochs.
      epochs: the epochs of one pass; None if the feed is endless.

    Example:
      >>> schedule = Schedule(rows=10, batch_size=4, remainder="pad", epochs=1)
      >>> schedule.positions(Cursor(0, 8), np.arange(4)).position.tolist()
      [8, 9, 0, 1]
    """

    rows: int
    batch_size: int
    remainder: Remainder
    epochs: int | None

    @property
    def steps_per_epoch(self) -> int:
        """The batches of a whole epoch. TypeError for "wrap"."""
        if self.remainder == "drop":
            return self.rows // self.batch_size
        if self.remainder == "pad":
            return -(-self.rows // self.batch_size)
        raise TypeError(
            'remainder "wrap" has no whole number of steps an epoch: its batches cross the ends of '
            'epochs; use len(feed), or remainder "drop" or "pad"'
        )

    def batches_from(self, cursor: Cursor) -> int:
        """How many batches there are from `cursor` to the end of its pass; `ENDLESS` if it has no end."""
        if self.epochs is None:
            return ENDLESS if self.remainder == "wrap" or self.steps_per_epoch else 0
        last_epoch = (self.pass_of(cursor) + 1) * self.epochs
        if self.remainder == "wrap":
            left = (last_epoch - cursor.epoch) * self.rows - cursor.position
            return left // self.batch_size
        return self._left_in_epoch(cursor) + (last_epoch - 1 - cursor.epoch) * self.steps_per_epoch

    def pass_of(self, cursor: Cursor) -> int:
        """The pass of the cursor's epoch. A cursor at the end of a pass still belongs to this pass."""
        return 0 if self.epochs is None else cursor.epoch // self.epochs

    def start_of_pass(self, index: int) -> Cursor:
        """The cursor where the first batch of a pass starts."""
        return Cursor(index * (self.epochs or 0), 0)

    def batch_at(self, origin: Cursor, k: int) -> Cursor:
        """The cursor where batch k after `origin` starts, normalised: its position is below n."""
        if self.remainder == "wrap":
            beyond, position = divmod(origin.position + k * self.batch_size, self.rows)
            return Cursor(origin.epoch + beyond, position)
        here = self._left_in_epoch(origin)
        if k < here:
            return Cursor(origin.epoch, origin.position + k * self.batch_size)
        epochs, steps = divmod(k - here, self.steps_per_epoch)
        return Cursor(origin.epoch + 1 + epochs, steps * self.batch_size)

    def after(self, start: Cursor) -> Cursor:
        """The cursor after the delivery of the batch that starts at `start`: what a state stores."""
        end = start.position + self.batch_size
        if self.remainder != "wrap":
            return Cursor(start.epoch, min(end, self.rows))  # "pad" repeats rows beyond the end
        beyond = (end - 1) // self.rows  # up to the last row, so that an epoch's end has position n, not 0
        return Cursor(start.epoch + beyond, end - beyond * self.rows)

    def positions(self, start: Cursor, offsets: npt.NDArray[np.int64]) -> BatchPositions:
        """Epochs and positions of the rows at these ascending offsets in the batch that starts at `start`."""
        # avoids sums of two positions, which would overflow if n is near 2^63
        beyond = (offsets - (self.rows - start.position)) // self.rows + 1
        position = offsets + (start.position - beyond * self.rows)
        wraps = self.remainder == "wrap"
        epoch = start.epoch + beyond if wraps else np.full_like(position, start.epoch)
        valid = np.ones_like(position, bool) if wraps else beyond == 0
        return BatchPositions(epoch, position, valid)

    def positions_by_epoch(
        self, start: Cursor, offsets: npt.NDArray[np.int64]
    ) -> list[tuple[int, slice, npt.NDArray[np.int64] | range]]:
        """The positions of some rows of a batch, grouped by epoch.

        Returns:
          (epoch, rows, positions) for each stretch of ascending positions. Adjacent ones may be a range.
        """
        count = len(offsets)
        if count and offsets[-1] < self.rows - start.position:  # usually, all rows are in this epoch
            first, last = start.position + int(offsets[0]), start.position + int(offsets[-1])
            adjacent = last - first == count - 1
            return [
                (start.epoch, slice(0, count), range(first, last + 1) if adjacent else offsets + start.position)
            ]
        batch = self.positions(start, offsets)
        return [(epoch, rows, batch.position[rows]) for epoch, rows in batch.stretches()]

    def real_rows(self, start: Cursor) -> int:
        """How many rows of the batch at `start` are not padding."""
        left = self.rows - start.position
        return min(self.batch_size, left) if self.remainder == "pad" else self.batch_size

    def dropped_rows(self, before: Cursor, start: Cursor | None) -> int:
        """How many rows are dropped from `before` to the next batch, at `start`. None: there is no next batch."""
        if self.remainder == "pad":
            return 0
        left = self.rows - before.position
        if start is not None:
            return left if self.remainder == "drop" and start.epoch > before.epoch else 0
        last_epoch = (self.pass_of(before) + 1) * (self.epochs or 1)
        return left + (last_epoch - 1 - before.epoch) * self.rows

    def refused_steps(self, after: Cursor, steps: int) -> Iterator[str]:
        """Why the batches from a cursor to the end of its pass cannot be delivered `steps` at a time."""
        left = self.batches_from(after)
        if left != ENDLESS and left % steps:
            divisors = [n for n in range(1, steps + 1) if left % n == 0]
            yield (
                f"steps_per_call={steps} delivers {steps} batches at once, and must divide the number of batches "
                f"to the end of the pass: {left} are left from epoch {after.epoch}, position {after.position}; "
                f"use steps_per_call={divisors[-1]}, or an endless feed, epochs=None"
            )

    def _left_in_epoch(self, cursor: Cursor) -> int:
        left = self.rows - cursor.position
        return left // self.batch_size if self.remainder == "drop" else -(-left // self.batch_size)
