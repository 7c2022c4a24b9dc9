"""The loader's two ways in: rows with random access, and streams. One contract for whoever composes.

A way opens process-local batches from any cursor, and does the arithmetic on cursors.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from feedline.loader.batch_reader import BatchReader
from feedline.loader.buffers import BatchBuffers
from feedline.loader.local_batches import LocalBatches
from feedline.loader.reads import Reads
from feedline.loader.worker_batches import WorkerBatches
from feedline.options import Order, Reading
from feedline.order.schedule import ENDLESS, Cursor
from feedline.streams.batches import StreamBatches
from feedline.streams.partial_batches import StreamDefinition


class Progress(Protocol):
    """Whom the loader tells of its progress, and who tells it that nobody waits for it any more."""

    def advanced(self, stage: str) -> None: ...
    def stopped(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class RandomAccess:
    """Rows that can be had in any order: every place in the run is arithmetic.

    Attributes:
      reads: those of all its runs.
    """

    reader: BatchReader
    buffers: BatchBuffers
    reads: Reads = dataclasses.field(default_factory=Reads)
    lanes: ClassVar[list[str]] = []
    writers: ClassVar[list[int]] = []
    streams = False
    agrees = False

    @property
    def order(self) -> Order:
        """Of the rows."""
        return self.reader.order

    def open(
        self, after: Cursor, lanes: dict[str, Any] | None, reading: Reading, watch: Progress
    ) -> LocalBatches | WorkerBatches:
        """The process-local batches after the cursor `after`: read by threads of this process, or by workers."""
        if reading.workers:
            return WorkerBatches(self.reader, self.buffers, after, reading)
        # more threads than batches ahead share each batch
        parts = max(1, -(-(reading.threads or 0) // reading.buffer))
        return LocalBatches(self.reader, self.buffers, after, parts, self.reads)

    def end_reads(self, timeout_s: float) -> str | None:
        """Let no further read begin, and wait for those under way. The name of a thread that is still inside."""
        return self.reads.end(timeout_s)

    def next_cursor(self, after: Cursor) -> Cursor:
        """Where the next batch starts; `after` itself if the pass is over."""
        schedule = self.reader.schedule
        return schedule.batch_at(after, 0) if schedule.batches_from(after) else after

    def next_pass(self, after: Cursor) -> Cursor:
        """Where the pass after that of `after` starts."""
        return self.reader.schedule.start_of_pass(self.reader.schedule.pass_of(after) + 1)

    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.reader.schedule.steps_per_epoch

    def batches(self) -> int:
        """Batches of a pass."""
        count = self.reader.schedule.batches_of_pass(0)
        if count == ENDLESS:
            raise TypeError("an endless feed has no length; give it epochs, or use feed.steps_per_epoch")
        return count

    def rows_of(self, after: Cursor) -> npt.NDArray[np.int64]:
        """int64[batch_size]: the row indices of the next batch after `after`, -1 where it is padded."""
        schedule = self.reader.schedule
        if not schedule.batches_from(after):  # of a "wrap" pass a few rows may be left, which no batch holds
            after = self.next_pass(after)
        start, offsets = schedule.batch_at(after, 0), np.arange(schedule.batch_size)
        return np.where(schedule.row_positions(start, offsets).valid, self.reader.locate(start, offsets), -1)


@dataclasses.dataclass(frozen=True)
class Sequential:
    """A stream, which ends when it ends: what a cursor leads to is known only by going there.

    Attributes:
      lanes: that this process reads.
      writers: of all lanes, which process saves each.
    """

    recipe: StreamDefinition
    buffers: BatchBuffers
    lanes: list[str]
    writers: list[int]
    order: ClassVar[None] = None  # its own
    streams = True

    @property
    def agrees(self) -> bool:
        """Whether the processes agree on the ends of lanes, in windows."""
        return self.recipe.gather is not None

    def open(
        self, after: Cursor, lanes: dict[str, Any] | None, reading: Reading, watch: Progress
    ) -> StreamBatches:
        """The process-local batches that come after the cursor `after`, where the iterators were at `lanes`."""
        return StreamBatches(self.recipe, self.buffers, after, lanes, watch.advanced, watch.stopped)

    def end_reads(self, timeout_s: float) -> str | None:
        """Nothing to wait for: the thread that takes the items has ended with its run."""
        return None

    def next_cursor(self, after: Cursor) -> Cursor:
        """Where the next batch starts, as far as is known before it is read."""
        return after

    def next_pass(self, after: Cursor) -> Cursor:
        """Where the pass after that of `after` starts."""
        return Cursor(self.recipe.end_of_pass(after) or after.epoch + 1, 0)

    def steps_per_epoch(self) -> int:
        """Unknown."""
        raise TypeError("a stream does not know its length before its end")

    def batches(self) -> int:
        """Unknown."""
        raise TypeError("a stream does not know its length before its end; bound the loop by zip(range(n), feed)")

    def rows_of(self, after: Cursor) -> npt.NDArray[np.int64]:
        """Unknown: a stream has no row indices."""
        raise TypeError("a stream has no row indices: its rows are known only by reading it")
