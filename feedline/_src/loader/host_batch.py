"""What the loader hands over: process-local batches in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from feedline._src.order.schedule import Cursor
from feedline._src.record import PartTimes
from feedline._src.rows.bad_rows import BadRow
from feedline._src.rows.spec import Array


class Progress(Protocol):
    """Is told of the loader's progress, and says whether the pipeline was closed."""

    def advanced(self, stage: str) -> None: ...
    def stopped(self) -> bool: ...


class HostBatch(NamedTuple):
    """This process's part of a global batch, or of several that are delivered at once.

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
