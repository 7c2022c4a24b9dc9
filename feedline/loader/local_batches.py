"""Process-local batches after a cursor, numbered from 0, each of which threads read in parts."""

from __future__ import annotations

import threading

from feedline.loader.batch_reader import BatchReader, PartResult
from feedline.loader.buffers import BatchBuffers, Buffers
from feedline.loader.host_batch import HostBatch
from feedline.order.schedule import Cursor


class LocalBatches:
    """The process-local batches from `origin` to the end of the pass. Any thread may read any part, each once.

    Args:
      reader: reads the parts.
      buffers: the memory in which batches are built.
      origin: where batch 0 starts.
      parts: the number of parts of a batch; fewer if a leaf has fewer rows.
    """

    def __init__(self, reader: BatchReader, buffers: BatchBuffers, origin: Cursor, parts: int = 1) -> None:
        self.parts = min(parts, *(len(plan.rows) for plan in reader.form.plans))
        self.count = reader.schedule.batches_from(origin)
        self._reader = reader
        self._buffers = buffers
        self._origin = origin
        self._lock = threading.Lock()
        # of each batch of which parts are missing, by number: its memory, and the parts read so far; held by _lock
        self._partial: dict[int, tuple[Buffers, dict[int, PartResult | Exception]]] = {}

    def read(self, number: int, part: int) -> HostBatch | None:
        """Read a part of batch `number`. The call that completes the batch returns it, or raises its error."""
        start = self._reader.schedule.batch_at(self._origin, number)
        with self._lock:
            if number not in self._partial:
                self._partial[number] = self._buffers.lease(), {}
            buffers, results = self._partial[number]
        result: PartResult | Exception
        try:
            result = self._reader.fill(start, part, self.parts, buffers)
        except Exception as error:  # noqa: BLE001  raised below, once all parts are done
            result = error
        with self._lock:
            results[part] = result
            if len(results) < self.parts:
                return None
            del self._partial[number]
        ordered = [results[i] for i in range(self.parts)]
        errors = [each for each in ordered if isinstance(each, Exception)]
        if errors:
            raise errors[0]  # that of the first part, whichever came first
        filled = [each for each in ordered if isinstance(each, PartResult)]
        return self._reader.batch(start, self._before(number), buffers, filled)

    def end(self) -> StopIteration:
        """The end of the pass. Its value is the number of rows left out after the last batch."""
        return StopIteration(self._reader.schedule.dropped_rows(self._before(self.count), None))

    def _before(self, number: int) -> Cursor:
        """The cursor after the batch before this one."""
        schedule = self._reader.schedule
        return schedule.after(schedule.batch_at(self._origin, number - 1)) if number else self._origin


class InOrder:
    """An iterator of `LocalBatches`, for one thread."""

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
