"""Process-local batches after a cursor, each of which threads read in parts.

What is delivered at once is numbered from 0: a batch, or with several steps per call as many batches.
"""

from __future__ import annotations

import threading

import numpy as np

from feedline._src.loader.batch_reader import BatchReader, PartResult
from feedline._src.loader.buffers import BatchBuffers, Buffers
from feedline._src.loader.host_batch import HostBatch
from feedline._src.order.schedule import Cursor
from feedline._src.record import Stopwatch, after_lease
from feedline._src.runtime.annotations import annotation

_MOST_AHEAD = 1 << 8
"""Deliveries of which a source is told. To tell of one costs as much as the order of its rows."""


class LocalBatches:
    """The process-local batches from `origin` to the end of the pass. Any thread may read any part, each once.

    Attributes:
      parts: of one delivery.
      count: of deliveries.
      steps: of one delivery.

    Args:
      reader: reads the parts.
      buffers: the memory in which batches are built.
      origin: where the first batch starts.
      parts: the number of parts of a batch; fewer if a leaf has fewer rows.
      steps: batches of one delivery. They divide those that are left.
      every: of so many deliveries only one is read here, as by each of several worker processes.
    """

    def __init__(
        self,
        reader: BatchReader,
        buffers: BatchBuffers,
        origin: Cursor,
        parts: int = 1,
        steps: int = 1,
        every: int = 1,
    ) -> None:
        self._parts_of_batch = min(parts, *(len(plan.rows) for plan in reader.form.plans))
        self.steps = steps
        self.parts = steps * self._parts_of_batch
        self.count = reader.schedule.batches_from(origin) // steps
        self._reader = reader
        self._buffers = buffers
        self._origin = origin
        self._every = every
        self._lock = threading.Lock()
        self._telling = threading.Lock()
        self._told = 0  # the first delivery of which the source was not told; held by _telling
        # of each delivery of which parts are missing: its memory, and the parts read so far; held by _lock
        self._partial: dict[int, tuple[Buffers, dict[int, PartResult | Exception]]] = {}

    def read(self, number: int, part: int) -> HostBatch | None:
        """Read a part of delivery `number`. The call that completes it returns it, or raises its error."""
        self._tell_source(number)
        step, part_of_batch = divmod(part, self._parts_of_batch)
        start = self._start(number, step)
        watch = Stopwatch()
        with annotation("stage"), self._lock:
            if number not in self._partial:
                self._partial[number] = self._buffers.lease(self._reader.padded_length(start)), {}
            buffers, results = self._partial[number]
        lease_s, lease_cpu_s = watch.lap()
        result: PartResult | Exception
        try:
            of_step = buffers if self.steps == 1 else buffers.of_step(step)
            result = self._reader.fill(start, part_of_batch, self._parts_of_batch, of_step)
            result = result._replace(times=after_lease(result.times, watch.began, lease_s, lease_cpu_s))
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
        if self.steps == 1:
            return self._reader.batch(start, self._before(number, 0), buffers, filled)
        return self._joined(number, buffers, filled)

    def rows_of(self, number: int, part: int) -> tuple[int, int, str | None]:
        """Of a part: the number of its rows, the row index of the first, and the file of that row, if known."""
        step, part_of_batch = divmod(part, self._parts_of_batch)
        return self._reader.rows_of(self._start(number, step), part_of_batch, self._parts_of_batch)

    def _tell_source(self, number: int) -> None:
        """Tell a source that fetches rows which ones come next, from delivery `number` on, until it has enough."""
        if not self._reader.tells_source or not self._telling.acquire(blocking=False):
            return
        try:
            self._told = max(self._told, number)
            while self._told < min(self.count, number + _MOST_AHEAD):
                starts = [self._start(self._told, step) for step in range(self.steps)]
                if not all(self._reader.tell_source(start, self._told - number) for start in starts):
                    return
                self._told += self._every
        finally:
            self._telling.release()

    def _joined(self, number: int, buffers: Buffers, filled: list[PartResult]) -> HostBatch:
        """The batches of delivery `number` as one."""
        of_steps = zip(*[iter(filled)] * self._parts_of_batch, strict=True)
        batches = [
            self._reader.batch(
                self._start(number, step), self._before(number, step), buffers.of_step(step), results
            )
            for step, results in enumerate(of_steps)
        ]
        leaves, form = list(buffers.leaves), self._reader.form
        if form.mask is not None:
            leaves.insert(form.mask_at, np.stack([batch.leaves[form.mask_at] for batch in batches]))
        return HostBatch.joined(batches, leaves)

    def end(self) -> StopIteration:
        """The end of the pass. Its value is the number of rows left out after the last batch."""
        return StopIteration(self._reader.schedule.dropped_rows(self._before(self.count, 0), None))

    def _start(self, number: int, step: int) -> Cursor:
        """Where a batch of delivery `number` starts."""
        return self._reader.schedule.batch_at(self._origin, number * self.steps + step)

    def _before(self, number: int, step: int) -> Cursor:
        """The cursor after the batch before that one."""
        return self._reader.schedule.after(self._start(number, step - 1)) if number or step else self._origin


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
