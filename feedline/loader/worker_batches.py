"""Process-local batches that Grain's worker processes read, as an iterator, and how the workers end."""

from __future__ import annotations

import errno
import functools
import gc
import multiprocessing
import re
from typing import Any, NamedTuple

import grain
from absl import flags

from feedline.loader.batch_reader import BatchReader
from feedline.loader.buffers import BatchBuffers
from feedline.loader.loaded import HostBatch
from feedline.loader.local_batches import LocalBatches
from feedline.loader.segments import ReceivedSegment, Segment, shared_memory_failed
from feedline.loader.workers import a_worker_delivered, prepare_worker, see_every_end, worker_ended
from feedline.options import Reading
from feedline.order.schedule import ENDLESS, Cursor


class _Element(NamedTuple):
    """A batch on its way from a worker.

    Attributes:
      batch: without its leaves.
      segment: the leaves. A `ReceivedSegment` once it has arrived.
    """

    batch: HostBatch
    segment: Segment | ReceivedSegment


class _Elements(grain.MapDataset[_Element]):
    """Element k is process-local batch k after `origin`. Worker processes read them."""

    def __init__(self, reader: BatchReader, buffers: BatchBuffers, origin: Cursor) -> None:
        super().__init__()
        self._given = reader, buffers, origin
        self._batches = LocalBatches(reader, buffers, origin)

    def __len__(self) -> int:
        return min(self._batches.count, ENDLESS)

    def __getitem__(self, k: Any) -> _Element:  # type: ignore[override]  # Grain also slices; nobody does here
        batch = self._batches.read(int(k), 0)
        assert batch is not None  # it has one part
        return _Element(batch._replace(leaves=[]), Segment(batch.leaves))

    def __reduce__(self) -> Any:
        return _Elements, self._given


class WorkerBatches:
    """An iterator over the process-local batches after `origin`, read ahead by Grain's worker processes.

    Called and closed by one thread at a time. Nothing starts before the first `next`. `close` ends the workers and
    gives up what was read ahead.

    Args:
      reader: what a batch holds.
      buffers: where workers build it.
      origin: where the first one starts.
      reading: workers and buffer.
    """

    def __init__(self, reader: BatchReader, buffers: BatchBuffers, origin: Cursor, reading: Reading) -> None:
        per_worker = max(1, reading.buffer // reading.workers)
        self._dataset = (
            _Elements(reader, buffers, origin)
            .to_iter_dataset(grain.ReadOptions(0, 0))
            .mp_prefetch(
                grain.MultiprocessingOptions(reading.workers, per_worker),
                worker_init_fn=functools.partial(prepare_worker, reader.settings),
            )
        )
        self._end = LocalBatches(reader, buffers, origin).end
        self._iterator: Any = None

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of rows that the end of the pass leaves out."""
        try:
            if self._iterator is None:
                self._iterator = self._start()
            element: _Element = next(self._iterator)
        except StopIteration:
            raise self._end() from None
        except RuntimeError as error:
            code = re.search(r"terminated unexpectedly with exit code (-?\d+)", str(error))
            if code:
                raise worker_ended(int(code[1])) from error
            raise
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise shared_memory_failed(error) from error
            raise
        a_worker_delivered.set()
        assert isinstance(element.segment, ReceivedSegment)
        return element.batch._replace(leaves=element.segment.leaves)

    def close(self) -> None:
        """End workers and threads. A thread that is stuck in a read stays until that read returns."""
        iterator, self._iterator = self._iterator, None  # let go now: at exit Grain's finalizers print tracebacks
        if iterator is not None:
            iterator.close()
            del iterator
            _collect_semaphores()

    def _start(self) -> Any:
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


def check_workers(reader: BatchReader) -> None:
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
    if not getattr(reader.source, "picklable", True):  # which a source may leave out
        raise ValueError(
            "sources travel to worker processes as paths, and this one holds arrays in memory; "
            "use Reading(threads=...), or write a .npy and pass its path"
        )
