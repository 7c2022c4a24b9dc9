"""Grain's threads and workers behind one iterator of host batches, and how they end."""

from __future__ import annotations

import errno
import functools
import gc
import multiprocessing
import re
from collections.abc import Callable
from typing import Any

import grain
from absl import flags

from feedline.loader.batches import LocalBatches
from feedline.loader.buffers import BatchBuffers
from feedline.loader.loaded import HostBatch
from feedline.loader.reads import Reads
from feedline.loader.recipe import Recipe
from feedline.loader.segments import shared_memory_failed
from feedline.loader.workers import a_worker_delivered, prepare_worker, see_every_end, worker_ended
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
      offer: called in this process with k and batch k by the thread that completed it, in any order of k; not with
        workers. If it says that the batch was taken, `next` gives None in its place.
      reads: where each read of this process is entered. `close` does not wait for them, so that an error is
        delivered at once.
    """

    def __init__(
        self,
        recipe: Recipe,
        buffers: BatchBuffers,
        origin: Cursor,
        reading: Reading,
        advanced: Callable[[], None],
        offer: Callable[[int, HostBatch], bool],
        reads: Reads,
    ) -> None:
        threads = 0 if reading.workers else reading.threads or 0
        # a batch in flight for each place in the buffer; more threads than that share a batch between them
        parts = max(1, -(-threads // reading.buffer))
        self._elements = (
            LocalBatches(recipe, buffers, origin, parts)
            if reading.workers  # this process reads nothing then
            else LocalBatches(recipe, buffers, origin, parts, advanced, offer, reads)
        )
        buffer = reading.buffer * self._elements.parts if threads else 0
        dataset = self._elements.to_iter_dataset(grain.ReadOptions(min(threads, buffer), buffer))
        if reading.workers:
            per_worker = max(1, reading.buffer // reading.workers)
            options = grain.MultiprocessingOptions(reading.workers, per_worker)
            prepare = functools.partial(prepare_worker, recipe.settings)
            dataset = dataset.mp_prefetch(options, worker_init_fn=prepare)
        self._schedule = recipe.schedule
        self._dataset = dataset
        self._workers = reading.workers
        self._iterator: Any = None
        self._next = 0

    def __next__(self) -> HostBatch | None:
        """The next batch. StopIteration carries the number of rows that the end of the pass leaves out."""
        try:
            if self._iterator is None:
                self._iterator = self._start()
            parts = [next(self._iterator) for _ in range(self._elements.parts)]
        except StopIteration:
            before = self._elements.before(self._next)
            raise StopIteration(self._schedule.dropped_rows(before, None)) from None
        except RuntimeError as error:
            code = re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))
            if self._workers and code:
                raise worker_ended(int(code[1])) from error
            raise
        except OSError as error:
            if self._workers and error.errno == errno.ENOSPC:
                raise shared_memory_failed(error) from error
            raise
        if self._workers:
            a_worker_delivered.set()
        self._next += 1
        return next((part.whole() for part in parts if part.batch is not None), None)

    def close(self) -> None:
        """End workers and threads. A thread that is stuck in a read stays until that read returns."""
        iterator, self._iterator = self._iterator, None  # let go now: at exit Grain's finalizers print tracebacks
        if iterator is not None:
            iterator.close()
            del iterator
            if self._workers:
                _collect_semaphores()

    def _start(self) -> Any:
        if self._workers:
            _collect_semaphores()
            see_every_end()
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()  # Grain hands absl's flags to its workers; we are no absl app
        return iter(self._dataset)


def _collect_semaphores() -> None:
    """Free what ended workers left, outside of Python's resource tracker.

    Their semaphores lie in reference cycles. If those are collected while the tracker enters or removes another
    semaphore, their finalizers call it from within itself, and it warns that it cannot do that.
    """
    gc.collect()


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
