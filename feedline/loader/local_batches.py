"""Process-local batches 0, 1, … from a cursor on, each read in parts by any threads."""

from __future__ import annotations

import functools
import threading

from feedline.loader.batch_reader import BatchReader, PartResult
from feedline.loader.buffers import BatchBuffers, Buffers
from feedline.loader.host_batch import HostBatch
from feedline.loader.reads import Reads
from feedline.order.schedule import Cursor


class LocalBatches:
    """The process-local batches of a run. Each part of a batch is read once, by any thread.

    Args:
      reader: of parts.
      buffers: where batches are built.
      origin: where batch 0 starts.
      parts: of a batch; fewer if it has too few rows.
      reads: where each read is entered.
    """

    def __init__(
        self,
        reader: BatchReader,
        buffers: BatchBuffers,
        origin: Cursor,
        parts: int = 1,
        reads: Reads | None = None,
    ) -> None:
        self.parts = min(parts, *(len(plan.rows) for plan in reader.form.plans))
        self.count = reader.schedule.batches_from(origin)
        self._reader = reader
        self._buffers = buffers
        self._origin = origin
        self._reads = reads or Reads()
        self._lock = threading.Lock()
        # of each batch of which parts are missing, by number: its memory, and the parts read so far; held by _lock
        self._partial: dict[int, tuple[Buffers, list[PartResult]]] = {}

    def read(self, number: int, part: int) -> HostBatch | None:
        """Read a part of batch `number`. The call that completes the batch returns it."""
        start = self._reader.schedule.batch_at(self._origin, number)
        with self._lock:
            if number not in self._partial:
                self._partial[number] = self._buffers.lease(), []
            buffers, results = self._partial[number]
        result = self._reads.run(functools.partial(self._reader.fill, start, part, self.parts, buffers))
        with self._lock:
            results.append(result)
            if len(results) < self.parts:
                return None
            del self._partial[number]
        return self._reader.batch(start, self._before(number), buffers, results)

    def end(self) -> StopIteration:
        """After the last batch. Its value: how many rows are left out between that and the end of the pass."""
        return StopIteration(self._reader.schedule.dropped_rows(self._before(self.count), None))

    def _before(self, number: int) -> Cursor:
        """The cursor that is true when this batch is the next."""
        schedule = self._reader.schedule
        return schedule.after(schedule.batch_at(self._origin, number - 1)) if number else self._origin


class InOrder:
    """The same as an iterator, for one thread."""

    def __init__(self, batches: LocalBatches) -> None:
        self._batches = batches
        self._next = 0

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of rows that the end of the pass leaves out."""
        if self._next == self._batches.count:
            raise self._batches.end()
        read = [self._batches.read(self._next, part) for part in range(self._batches.parts)]
        self._next += 1
        (batch,) = [batch for batch in read if batch is not None]
        return batch

    def close(self) -> None:
        """Nothing to close."""
