"""Grain's threads and workers behind one iterator of host batches, and how they end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import grain
from absl import flags

from feedline.errors import WorkerError
from feedline.loader.batches import LocalBatches
from feedline.loader.buffers import BatchBuffers
from feedline.loader.loaded import HostBatch
from feedline.loader.recipe import Recipe
from feedline.options import Reading
from feedline.schedule import Cursor


class HostBatches:
    """An iterator over the process-local batches after `origin`, read ahead by Grain.

    Called and closed by one thread at a time. Nothing starts before the first `next`: Grain's
    threads then inherit the caller's daemon flag, so those of a placement thread never hold up the
    interpreter's exit. `close` ends workers and gives up what was read ahead.

    Args:
      recipe: what a batch holds.
      buffers: where it is built.
      origin: where the first one starts.
      reading: threads (not None here), workers, buffer.
      advanced: called in this process whenever a part of a batch has been read.
    """

    def __init__(
        self, recipe: Recipe, buffers: BatchBuffers, origin: Cursor, reading: Reading, advanced: Callable[[], None]
    ) -> None:
        threads = 0 if reading.workers else reading.threads or 0
        # a batch in flight for each place in the buffer; more threads than that share a batch between them
        parts = max(1, -(-threads // reading.buffer))
        self._elements = LocalBatches(recipe, buffers, origin, parts, None if reading.workers else advanced)
        buffer = reading.buffer * self._elements.parts if threads else 0
        dataset = self._elements.to_iter_dataset(grain.ReadOptions(min(threads, buffer), buffer))
        if reading.workers:
            per_worker = max(1, reading.buffer // reading.workers)
            options = grain.MultiprocessingOptions(reading.workers, per_worker)
            dataset = dataset.mp_prefetch(options, worker_init_fn=_keep_off_the_accelerator)
        self._schedule = recipe.schedule
        self._dataset = dataset
        self._workers = reading.workers
        self._iterator: Any = None
        self._origin = origin
        self._next = 0
        self._after = origin

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of rows that the end of the pass leaves out."""
        if self._iterator is None:
            self._iterator = self._start()
        try:
            elements = [next(self._iterator) for _ in range(self._elements.parts)]
        except StopIteration:
            raise StopIteration(self._schedule.dropped_rows(self._after, None)) from None
        except RuntimeError as error:
            if self._workers and "terminated unexpectedly" in str(error):
                raise self._worker_died(error) from error
            raise
        start = self._schedule.batch_at(self._origin, self._next)
        dropped = self._schedule.dropped_rows(self._after, start)
        self._after = self._schedule.after(start)
        self._next += 1
        whole = next(element for element in elements if element.leaves)
        return HostBatch(
            leaves=whole.leaves,
            after=self._after,
            lanes=None,
            rows=self._schedule.real_rows(start),
            dropped_rows=dropped,
            read_s=sum(element.read_s for element in elements),
            transform_s=sum(element.transform_s for element in elements),
            bad=whole.bad,
        )

    def close(self) -> None:
        """End workers and threads. A thread that is stuck in a read stays until that read returns."""
        iterator, self._iterator = self._iterator, None  # let go now: at exit Grain's finalizers print tracebacks
        if iterator is not None:
            iterator.close()

    def _start(self) -> Any:
        if self._workers and not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain hands absl's flags to its workers; we are no absl app
        return iter(self._dataset)

    def _worker_died(self, error: Exception) -> WorkerError:
        hint = (
            ". It ended before its first batch: a script that uses workers must build and run its feed under "
            '`if __name__ == "__main__":`, since every worker imports the script again'
        )
        told = (
            f"a worker process must live as long as its feed: {str(error).rstrip('.')}{'' if self._next else hint}"
        )
        return WorkerError(told, stage="read")


def check_workers(recipe: Recipe) -> None:
    """Refuse workers where they cannot work.

    Raises:
      ValueError: the source lies in memory.
      RuntimeError: this is a worker that is importing a script without a `__main__` guard.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a feed with Reading(workers=...) was built while a worker process imports your script; put the "
            'code that builds and runs it under `if __name__ == "__main__":`'
        )
    if not getattr(recipe.source, "picklable", True):
        raise ValueError(
            "sources travel to worker processes as paths, and this one holds arrays in memory; "
            "use Reading(threads=...), or write a .npy and pass its path"
        )


def _keep_off_the_accelerator(index: int, count: int) -> None:
    """In a worker, before anything else: JAX must not take the memory of the trainer's accelerator."""
    import jax

    jax.config.update("jax_platforms", "cpu")
