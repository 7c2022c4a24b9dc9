"""An iterator of process-local batches that worker processes read."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
from typing import Any

from feedline._src.errors import WorkerError
from feedline._src.loader.batch_reader import BatchReader
from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.host_batch import HostBatch
from feedline._src.loader.local_batches import LocalBatches
from feedline._src.loader.restarts import Restarts
from feedline._src.loader.shared_memory import SharedLeaves, remove_of_ended_programs, shared_memory_failed
from feedline._src.loader.workers import Worker, WorkerEndedError, end
from feedline._src.options import Settings
from feedline._src.order.schedule import Cursor
from feedline._src.record import Stopwatch


class _Made:
    """Batch k after `origin`, made in a worker process, its leaves in shared memory."""

    def __init__(self, reader: BatchReader, buffers: BatchBuffers, origin: Cursor, workers: int) -> None:
        self._given = reader, buffers, origin, workers
        self._batches = LocalBatches(reader, buffers, origin, every=workers)

    def __call__(self, number: int) -> HostBatch:
        batch = self._batches.read(number, 0)
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
        return _Made, self._given


class WorkerBatches:
    """An iterator over the process-local batches after `origin`, read ahead by worker processes.

    Each worker reads every `workers`-th batch. Called and closed by one thread at a time. Workers start with the
    first `next`. `close` ends them and drops the batches read ahead.

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
        self._workers: list[Worker] = []
        self._next = 0
        """The number of the next batch, among those since the workers started."""
        self._awaited: Worker | None = None
        """That for whose batch a thread waits."""
        self._stuck: WorkerError | None = None
        """Why a worker was killed."""
        self._wake, self._waker = multiprocessing.Pipe(duplex=False)

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of rows that the end of the pass leaves out.

        Raises:
          WorkerError: a worker ended, and no more may be replaced; or `stop_waiting` was called.
        """
        while True:
            left = self._reader.schedule.batches_from(self._after)
            if not left:
                raise LocalBatches(self._reader, self._buffers, self._after).end()
            if not self._workers:
                self._start(left)
            self._awaited = self._workers[self._next % len(self._workers)]
            try:
                batch: HostBatch | None = self._awaited.take(self._wake)
            except WorkerEndedError as ended:
                stuck, self._stuck = self._stuck, None
                if ended.code > 0 and not ended.started:
                    raise ended.told from None
                self._restarts.use(stuck or ended.told)
                self.close()  # the others, too: the next ones begin with the batch that is missing
                continue
            except OSError as error:
                if error.errno == errno.ENOSPC:
                    raise shared_memory_failed(error) from error
                raise
            finally:
                self._awaited = None
            if batch is None:
                raise WorkerError("nobody waits for this batch any more", stage="read")
            self._next += 1
            self._after = batch.after
            return batch

    def stop_waiting(self) -> None:
        """End the wait of a thread inside `next`, now or later: nobody wants its batch. From any thread."""
        with contextlib.suppress(OSError):
            self._waker.send_bytes(b"stop")

    def end_stuck_workers(self, limit_s: float) -> bool:
        """Kill the worker for which a thread waits in `next`, for `limit_s` by now.

        It is killed even if it will not be replaced: nothing else would end a process that is stopped.

        Returns:
          Whether it will be replaced.
        """
        worker = self._awaited
        if worker is None:
            return False
        replaced = self._restarts.left
        self._stuck = WorkerError(
            f"a worker process must deliver batches, and no batch came within Reading.stall_error_s = {limit_s:g} "
            "s, so the workers were killed; look for a read or a transform that hangs, or a process that was "
            "stopped, or raise that limit",
            stage="read",
        )
        worker.kill()
        return replaced

    def close(self) -> None:
        """End the workers. One that is stuck or stopped is killed after seconds."""
        workers, self._workers = self._workers, []
        end(workers)

    def _start(self, count: int) -> None:
        remove_of_ended_programs()
        workers, self._next = self._settings.workers, 0
        made = _Made(self._reader, self._buffers, self._after, workers)
        ahead = max(1, self._settings.buffer // workers) + 1
        for index in range(min(workers, count)):
            self._workers.append(Worker(made, range(index, count, workers), ahead, self._reader.settings))
