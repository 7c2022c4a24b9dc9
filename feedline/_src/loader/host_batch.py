"""A process-local batch in host memory, as the loader hands it to placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from feedline._src.order.schedule import Cursor
from feedline._src.record import PartTimes
from feedline._src.rows.bad_rows import BadRow
from feedline._src.rows.spec import Array


class HostBatch(NamedTuple):
    """A process-local batch: this process's part of a global batch, in host memory. Or of several, joined.

    Attributes:
      leaves: process-local arrays in placed dtypes, in the order in which JAX flattens the batch.
      after: the cursor after the batch, which the feed's state has once the batch has been delivered.
      lanes: the states of a stream's iterators after the batch; None with random access.
      rows: the number of rows of the global batch that are not padding.
      dropped_rows: the number of rows of the source that were left out since the previous batch.
      parts: how each of its parts was made.
      bad: the bad rows among those that this process supplies, ascending by their row of the global batch.
    """

    leaves: list[Array]
    after: Cursor
    lanes: dict[str, Any] | None
    rows: int
    dropped_rows: int
    parts: Sequence[PartTimes]
    bad: Sequence[BadRow]

    @classmethod
    def joined(cls, batches: Sequence[HostBatch], leaves: list[Array]) -> HostBatch:
        """Batches that are delivered at once, whose `leaves` have one more axis in front."""
        return cls(
            leaves,
            after=batches[-1].after,
            lanes=None,
            rows=sum(batch.rows for batch in batches),
            dropped_rows=sum(batch.dropped_rows for batch in batches),
            parts=[part for batch in batches for part in batch.parts],
            bad=[row for batch in batches for row in batch.bad],
        )
