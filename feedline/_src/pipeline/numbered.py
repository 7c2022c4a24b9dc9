"""Host batches whose reading threads know for which step they read, for the annotations of a profile."""

from __future__ import annotations

from feedline._src.loader.host_batch import HostBatch
from feedline._src.loader.local_batches import LocalBatches
from feedline._src.prefetch.prefetcher import HostIterator
from feedline._src.runtime.annotations import begin_step


class NumberedParts:
    """As `batches`, which any threads read in parts. The thread that completes a batch also places it.

    Args:
      done: the steps before the first batch.
    """

    def __init__(self, batches: LocalBatches, done: int) -> None:
        self.parts, self.count = batches.parts, batches.count
        self.rows_of, self.end = batches.rows_of, batches.end
        self._batches = batches
        self._done = done

    def read(self, number: int, part: int) -> HostBatch | None:
        """As `LocalBatches.read`."""
        begin_step(self._done + (number + 1) * self._batches.steps)
        return self._batches.read(number, part)


class NumberedItems:
    """As `batches`, which one thread reads and places.

    Args:
      done: the steps before the first batch.
      steps: of each batch.
    """

    def __init__(self, batches: HostIterator[HostBatch], done: int, steps: int) -> None:
        self.close = batches.close
        self._batches = batches
        self._step = done
        self._steps = steps

    def __next__(self) -> HostBatch:
        """As that of `batches`."""
        begin_step(self._step + self._steps)
        batch = next(self._batches)
        self._step += self._steps
        return batch
