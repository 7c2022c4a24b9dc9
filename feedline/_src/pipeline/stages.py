"""The stages of a feed composed: a pipeline of placed batches, from any cursor on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from feedline._src.loader.host_batch import HostBatch
from feedline._src.loader.local_batches import InOrder, LocalBatches
from feedline._src.options import Reading, Settings
from feedline._src.order.schedule import Cursor
from feedline._src.pipeline.access import Access, RandomAccess
from feedline._src.placement.place import Placement
from feedline._src.prefetch.pipelines import HostIterator, Prefetcher, Readers, Synchronous
from feedline._src.prefetch.watch import Watch
from feedline._src.record import Listener, PlaceTimes, Stopwatch, this_thread
from feedline._src.rows.row_source import RowSource
from feedline._src.runtime.annotations import annotation, begin_step

if TYPE_CHECKING:
    from feedline._src.agreement.in_step import InStep
    from feedline._src.agreement.latest_values import LatestValues
    from feedline._src.agreement.replicas import ReplicaCheck
    from feedline._src.loader.worker_batches import WorkerBatches
    from feedline._src.pipeline.bounds import Bounds


class Placed(NamedTuple):
    """A global batch on the mesh.

    Attributes:
      batch: its tree of arrays.
      metadata: the host batch without its leaves.
      times: how it was placed.
    """

    batch: Any
    metadata: HostBatch
    times: PlaceTimes


_ODD = 2_654_435_761
"""Far from 0 modulo 2^31, so that places of neighbouring epochs are far apart."""
T = TypeVar("T")
AnyPipeline = Readers[HostBatch, T] | Prefetcher[HostBatch, T] | Synchronous[HostBatch, T]
Pipeline = AnyPipeline[Placed]


@dataclasses.dataclass(frozen=True)
class Stages:
    """Everything about a feed that does not change while it runs, and the settings, which may be tuned.

    Attributes:
      access: how rows are reached.
      placement: where batches go.
      fingerprint: of the data, for states.
      reading: as the user gave it.
      settings: the numbers in use. `prefetch` 0: synchronous.
      owned: the source, if the feed opened it and so must close it.
      check: of batches against those of other processes.
      latest_values: what the processes tell each other while they train; None if there is one process.
      in_step: compares what the processes take of the feed; None if there is one process.
      bounds: which settings may be found while the feed runs, and their limits; None: none.
      change: the step from which on the batch size is another one, and the stages for that; None: it stays.
      place_at: the number of the leaf `place` of a batch; None: it has none.
    """

    access: Access
    placement: Placement
    fingerprint: dict[str, Any]
    reading: Reading
    settings: Settings
    owned: RowSource | None
    check: ReplicaCheck | None = None
    latest_values: LatestValues | None = None
    in_step: InStep | None = None
    bounds: Bounds | None = None
    change: tuple[int, Stages] | None = None
    place_at: int | None = None

    def at(self, step: int) -> Stages:
        """The stages for the batch after `step` batches."""
        stages = self
        while stages.change is not None and step >= stages.change[0]:
            stages = stages.change[1]
        return stages

    def start(self, after: Cursor, lanes: dict[str, Any] | None, listener: Listener, done: int) -> Pipeline:
        """A pipeline of the batches after the cursor `after`. The caller starts and closes it.

        Args:
          done: the steps before the first of them.
        """
        watch = Watch(self.reading, listener.waits)
        batches = self.access.open(after, lanes, self.settings, watch)
        return pipeline_of(batches, self.placer(listener), self.settings, watch, done)

    def tuned(self, settings: Settings) -> Stages:
        """These stages with other settings, for the next pipeline, with the idle host buffers that it needs."""
        ahead = settings if isinstance(self.access, RandomAccess) else settings._replace(buffer=1)
        self.access.buffers.staging.keep(ahead.host_batches_on_cpu_devices)  # as many as build keeps
        return dataclasses.replace(self, settings=settings)

    def placer(self, listener: Listener) -> Callable[[HostBatch], Placed]:
        """Places host batches; any thread may call it."""
        return _Place(self.placement, self.check, listener, self.place_at)

    @property
    def ahead(self) -> int:
        """Deliveries that may have been made before the first one is taken."""
        _, workers, buffer, prefetch = self.settings
        if not prefetch:
            return 0
        return prefetch + 1 + (buffer if not workers else workers * (max(1, buffer // workers) + 1))

    def close(self) -> None:
        """Close the source, if it is ours, and let go of idle memory. All pipelines have ended."""
        self.access.buffers.staging.close()
        if self.change is not None:
            self.change[1].close()
        if self.owned is not None:
            self.owned.close()


def pipeline_of(
    batches: LocalBatches | HostIterator[HostBatch],
    place: Callable[[HostBatch], T],
    settings: Settings,
    watch: Watch,
    done: int = 0,
) -> AnyPipeline[T]:
    """A pipeline that is to read and place batches ahead of the consumer, or with `prefetch=0` on its thread.

    Args:
      done: the steps before the first batch.
    """
    steps, prefetch = 1, settings.prefetch
    if isinstance(batches, LocalBatches):
        steps = batches.steps
        if prefetch:
            threads, ahead = max(1, settings.threads), settings.buffer + 1
            return Readers(_NumberedParts(batches, done), place, prefetch, watch, threads=threads, ahead=ahead)
        batches = InOrder(batches)
    elif settings.workers and hasattr(batches, "end_stuck_workers"):
        workers = cast("WorkerBatches", batches)
        watch.on_stall, watch.on_stop = workers.end_stuck_workers, workers.stop_waiting
    items = _NumberedItems(batches, done, steps)
    return Prefetcher(items, place, prefetch, watch) if prefetch else Synchronous(items, place, watch)


class _NumberedParts:
    """Batches that any threads read in parts, each with its step announced to the annotations of a profile.

    Args:
      done: the steps before the first batch.
    """

    def __init__(self, batches: LocalBatches, done: int) -> None:
        self.parts, self.count = batches.parts, batches.count
        self.rows_of, self.end = batches.rows_of, batches.end
        self._batches = batches
        self._done = done

    def read(self, number: int, part: int) -> HostBatch | None:
        """Read a part; the call that completes a batch returns it, on the thread that also places it."""
        begin_step(self._done + (number + 1) * self._batches.steps)
        return self._batches.read(number, part)


class _NumberedItems:
    """Batches that one thread reads and places, with their steps announced to the annotations of a profile.

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
        """The next batch."""
        begin_step(self._step + self._steps)
        batch = next(self._batches)
        self._step += self._steps
        return batch


def number_of_place(after: Cursor) -> int:
    """A number below 2^31 made of a place in the data. Different places share one with a chance of 2^-31.

    Example:
      >>> number_of_place(Cursor(0, 64)), number_of_place(Cursor(1, 64))
      (64, 506952177)
    """
    return (after.epoch * _ODD + after.position) % (1 << 31)


class _Place:
    """Checks and places a host batch, and notes how long that took. Any thread may call it."""

    def __init__(
        self, placement: Placement, check: ReplicaCheck | None, listener: Listener, place_at: int | None
    ) -> None:
        self._placement = placement
        self._place_at = place_at
        self._check = check
        self._listener = listener

    def __call__(self, host: HostBatch) -> Placed:
        if self._place_at is not None:
            shape = self._placement.plans[self._place_at].local_shape
            place = np.full(shape, number_of_place(host.after), np.int32)
            host = host._replace(leaves=[*host.leaves[: self._place_at], place, *host.leaves[self._place_at :]])
        if self._check is not None:
            self._check(host.leaves, host.after)
        watch = Stopwatch()
        with annotation("place"):
            batch = self._placement.place(host.leaves)
        place_s, cpu_s = watch.lap()
        times = PlaceTimes(this_thread(), watch.began, place_s, cpu_s)
        self._listener.placed(times, jax.tree.leaves(batch))
        return Placed(batch, host._replace(leaves=[]), times)
