"""An iterator of process-local batches that Grain's worker processes read."""

from __future__ import annotations

import errno
import functools
import gc
import multiprocessing
import os
import re
from collections.abc import Callable
from typing import Any

import grain
from absl import flags

from feedline._src.errors import WorkerError
from feedline._src.loader.batch_reader import BatchReader
from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.grain_workers import GrainWorkers, follow, workers_of
from feedline._src.loader.host_batch import HostBatch
from feedline._src.loader.local_batches import LocalBatches
from feedline._src.loader.restarts import Restarts
from feedline._src.loader.shared_memory import (
    SharedLeaves,
    remove_of_ended_programs,
    remove_of_workers,
    shared_memory_failed,
)
from feedline._src.loader.workers import (
    a_worker_delivered,
    never_worked,
    portable,
    prepare_worker,
    worker_ended,
    worker_stuck,
    workers_start,
)
from feedline._src.observe.times import Stopwatch
from feedline._src.options import Settings
from feedline._src.order.schedule import ENDLESS, Cursor


class _BatchDataset(grain.MapDataset[HostBatch]):
    """Element k is process-local batch k after `origin`. Each worker of Grain reads every `workers`-th element."""

    def __init__(self, reader: BatchReader, buffers: BatchBuffers, origin: Cursor, workers: int) -> None:
        super().__init__()
        self._given = reader, buffers, origin, workers
        self._batches = LocalBatches(reader, buffers, origin, every=workers)

    def __len__(self) -> int:
        return min(self._batches.count, ENDLESS)

    def __getitem__(self, k: Any) -> HostBatch:  # type: ignore[override]  # never called with a slice
        try:
            batch = self._batches.read(int(k), 0)
        except Exception as error:
            if (other := portable(error)) is error:
                raise
            raise other from None
        assert batch is not None  # it has one part
        watch = Stopwatch()
        shared: Any = SharedLeaves(batch.leaves)  # unpickled as a list
        copy_s, copy_cpu_s = watch.lap()
        (part,) = batch.parts
        part = part._replace(
            thread=f"worker {os.getpid()}",
            stage_s=part.stage_s + copy_s,
            host_cpu_s=part.host_cpu_s + copy_cpu_s,
        )
        return batch._replace(leaves=shared, parts=[part])

    def __reduce__(self) -> Any:
        return _BatchDataset, self._given


class _WorkerEnded(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"a worker ended with exit code {code}")
        self.code = code


class WorkerBatches:
    """An iterator over the process-local batches after `origin`, read ahead by Grain's worker processes.

    Called and closed by one thread at a time. Workers start with the first `next`. `close` ends them and drops the
    batches read ahead.

    Attributes:
      unwanted: returns whether nobody wants batches any more. Then a thread that waits for one ends the workers.

    Args:
      reader: reads the batches.
      buffers: the memory in which workers build them.
      origin: where the first batch starts.
      settings: gives `workers` and `buffer`.
      restarts: how many workers may be replaced.
    """

    def __init__(
        self, reader: BatchReader, buffers: BatchBuffers, origin: Cursor, settings: Settings, restarts: Restarts
    ) -> None:
        self._reader = reader
        self._buffers = buffers
        self._after = origin
        self._settings = settings
        self._restarts = restarts
        self.unwanted: Callable[[], bool] = lambda: False
        self._workers = GrainWorkers()
        self._iterator: Any = None
        self._waits = False  # a thread is inside `next`
        self._stuck: WorkerError | None = None  # why workers were killed

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of rows that the end of the pass leaves out.

        Raises:
          WorkerError: a worker ended, and no more may be replaced.
        """
        self._waits = True
        try:
            while True:
                try:
                    batch = self._read()
                    break
                except _WorkerEnded as ended:
                    if never_worked(ended.code) or self.unwanted():
                        raise worker_ended(ended.code) from ended
                    stuck, self._stuck = self._stuck, None
                    self._restarts.use(stuck or worker_ended(ended.code))
                    self.close()  # the others, too: the next ones begin with the batch that is missing
        finally:
            self._waits = False
        self._after = batch.after
        a_worker_delivered.set()
        return batch

    def end_stuck_workers(self, limit_s: float) -> bool:
        """Kill the workers if a thread has waited for them in `next` for `limit_s`.

        They are killed even if they will not be replaced: nothing else would end a process that is stopped.

        Returns:
          Whether they will be replaced.
        """
        processes = list(self._workers.awaited) if self._waits else []
        if not processes:
            return False
        replaced = self._restarts.left
        self._stuck = worker_stuck(limit_s)
        for process in processes:
            process.kill()
        return replaced

    def _read(self) -> HostBatch:
        try:
            batch: HostBatch
            if self._iterator is None:
                _collect_semaphores()
                with workers_start():
                    self._iterator = self._start()
                    batch = next(self._iterator)
            else:
                batch = next(self._iterator)
        except StopIteration:
            rest = LocalBatches(self._reader, self._buffers, self._after)
            if rest.count:
                raise WorkerError(
                    f"the workers must deliver all batches, and stopped with {rest.count} left; read on with the "
                    "next call of next(), or use Reading(threads=...)",
                    stage="read",
                ) from None
            raise rest.end() from None
        except RuntimeError as error:
            code = re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))
            if code:
                raise _WorkerEnded(int(code[1])) from error
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise shared_memory_failed(error) from error
            raise
        return batch

    def close(self) -> None:
        """End the workers. One that is stuck or stopped is killed after seconds."""
        iterator, self._iterator = self._iterator, None  # not kept: Grain's finalizers print tracebacks at exit
        if iterator is not None:
            self._workers.end()
            iterator.close()
            remove_of_workers(self._workers.pids)
            del iterator
            _collect_semaphores()

    def _start(self) -> Any:
        remove_of_ended_programs()
        follow()
        if not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # Grain passes absl's flags to its workers, and feedline is no absl app
        per_worker = max(1, self._settings.buffer // self._settings.workers)
        dataset = _BatchDataset(self._reader, self._buffers, self._after, self._settings.workers)
        self._workers = workers_of(dataset)
        self._workers.unwanted = self.unwanted
        return iter(
            dataset.to_iter_dataset(grain.ReadOptions(0, 0)).mp_prefetch(
                grain.MultiprocessingOptions(self._settings.workers, per_worker),
                worker_init_fn=functools.partial(prepare_worker, self._reader.settings),
            )
        )


def _collect_semaphores() -> None:
    """Free the semaphores of ended workers now, at a moment when Python's resource tracker is not in use.

    They lie in reference cycles. If they were collected while the tracker registers another semaphore, their
    finalizers would call the tracker from within itself, which it warns of.
    """
    gc.collect()


def check_main_guard() -> None:
    """Refuse a feed with workers in a worker that is importing a script without a `__main__` guard.

    Raises:
      RuntimeError: this process is such a worker.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "a feed with Reading(workers=...) was built while a worker process imports your script; put the "
            'code that builds and runs it under `if __name__ == "__main__":`'
        )
