"""`Run`: one pass of a feed from a cursor on. Loader, placement and prefetch are composed here, and only here."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np

from feedline._src.agreement.monitor import close_on_abort
from feedline._src.loader.form import HostBatch
from feedline._src.loader.random_access import LocalBatches, RandomAccess
from feedline._src.options import Reading, Settings
from feedline._src.order.schedule import Cursor
from feedline._src.placement.place import Placement
from feedline._src.prefetch.pipelines import HostIterator, Prefetcher, Run, Synchronous
from feedline._src.prefetch.watch import Watch
from feedline._src.record import Listener, PlaceTimes
from feedline._src.runtime.exit import close_at_exit
from feedline._src.runtime.threads import Stopwatch, annotation, this_thread

if TYPE_CHECKING:
    from feedline._src.agreement.in_step import InStep, LatestValues
    from feedline._src.agreement.replicas import ReplicaCheck
    from feedline._src.bounds import Bounds
    from feedline._src.loader.streams import Stream
    from feedline._src.rows.source import Source

_EPOCH_FACTOR = 2_654_435_761  # odd and far from 0 modulo 2^31: places of neighbouring epochs are far apart
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Stages:
    """What a feed of one batch size is made of, and the settings, which may be tuned.

    What is None is not there: `check` compares batches with other processes, `latest_values` and `in_step` are
    what processes tell each other, `bounds` are of settings that are "auto", `place_at` is the number of the leaf
    `place`.
    """

    access: RandomAccess | Stream
    placement: Placement
    fingerprint: dict[str, Any]
    reading: Reading
    settings: Settings
    check: ReplicaCheck | None = None
    latest_values: LatestValues | None = None
    in_step: InStep | None = None
    bounds: Bounds | None = None
    place_at: int | None = None

    def tuned(self, settings: Settings) -> Stages:
        """These stages with other settings, for the next run, with the idle host buffers that it needs."""
        ahead = settings._replace(buffer=1) if self.access.owners else settings
        self.access.buffers.staging.keep(ahead.host_batches_on_cpu_devices)  # as many as `build` keeps
        return dataclasses.replace(self, settings=settings)

    @property
    def ahead(self) -> int:
        """Deliveries that may have been made before the first one is taken."""
        _, workers, buffer, prefetch = self.settings
        if not prefetch:
            return 0
        return prefetch + 1 + (buffer if not workers else workers * (max(1, buffer // workers) + 1))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The stages of each batch size, with the step from which on it holds; and a source that the feed closes."""

    by_step: tuple[tuple[int, Stages], ...]
    source: Source | None = None

    @property
    def changes(self) -> bool:
        return len(self.by_step) > 1

    @property
    def first(self) -> Stages:
        return self.by_step[0][1]

    def at(self, step: int) -> Stages:
        """The stages for the batch after `step` batches."""
        return next(stages for first, stages in reversed(self.by_step) if step >= first)

    def reweighted(self, change: Callable[[RandomAccess | Stream], RandomAccess | Stream]) -> Sizes:
        """Change the weights of the mixture; what is read where, and placed where, stays."""
        by_step = []
        for step, stages in self.by_step:
            access = change(stages.access)
            if access.order is not None:
                order = {**stages.fingerprint["order"], **access.order.as_json()}
                stages = dataclasses.replace(
                    stages, access=access, fingerprint={**stages.fingerprint, "order": order}
                )
            by_step.append((step, stages))
        return dataclasses.replace(self, by_step=tuple(by_step))

    def close(self) -> None:
        """Close the source, if it is ours, and let go of idle memory. All runs have ended."""
        for _, stages in self.by_step:
            stages.access.buffers.staging.close()
        if self.source is not None:
            self.source.close()


class Placed(NamedTuple):
    """A global batch on the mesh, the host batch without its leaves, and how it was placed."""

    batch: Any
    metadata: HostBatch
    times: PlaceTimes


def run_of(
    stages: Stages, after: Cursor, lanes: dict[str, Any] | None, place: Callable[[HostBatch], Placed]
) -> Run[Placed]:
    """A run of the batches after a cursor. `lanes`: the states of a stream's iterators there."""
    access, settings = stages.access, stages.settings
    watch = Watch(stages.reading)
    if settings.workers and isinstance(access, RandomAccess):
        from feedline._src.loader.workers import WorkerBatches

        workers = WorkerBatches(access, after, settings)
        watch.on_stall, watch.on_stop = workers.end_stuck_workers, workers.stop_waiting
        return run_over(workers, place, settings, watch)
    return run_over(access.open(after, lanes, settings, watch), place, settings, watch)


def run_over(
    batches: LocalBatches | HostIterator[HostBatch],
    place: Callable[[HostBatch], T],
    settings: Settings,
    watch: Watch,
) -> Run[T]:
    """Place host batches ahead of the consumer, or with `prefetch=0` on its thread."""
    if not settings.prefetch:
        return Synchronous(batches, place, watch)
    if isinstance(batches, LocalBatches):
        threads, ahead = max(1, settings.threads), settings.buffer + 1
        return Prefetcher(batches, place, settings.prefetch, watch, threads=threads, ahead=ahead)
    return Prefetcher.of_iterator(batches, place, settings.prefetch, watch)


def number_of_place(after: Cursor) -> int:
    """A number below 2^31 made of a place in the data. Different places share one with a chance of 2^-31.

    Example:
      >>> number_of_place(Cursor(0, 64)), number_of_place(Cursor(1, 64))
      (64, 506952177)
    """
    return (after.epoch * _EPOCH_FACTOR + after.position) % (1 << 31)


class Placer:
    """Checks and places a host batch, and notes how long that took. Any thread may call it."""

    def __init__(self, stages: Stages, listener: Listener) -> None:
        self._placement, self._check, self._place_at = stages.placement, stages.check, stages.place_at
        self._listener = listener

    def __call__(self, host: HostBatch) -> Placed:
        leaves = host.leaves
        if self._place_at is not None:
            shape = self._placement.plans[self._place_at].local_shape
            place = np.full(shape, number_of_place(host.after), np.int32)
            leaves = [*leaves[: self._place_at], place, *leaves[self._place_at :]]
        if self._check is not None:
            self._check(leaves, host.after)
        watch = Stopwatch()
        with annotation("place"):
            batch = self._placement.place(leaves)
        place_s, cpu_s = watch.lap()
        times = PlaceTimes(this_thread(), watch.began, place_s, cpu_s)
        self._listener.placed(times, jax.tree.leaves(batch))
        return Placed(batch, host._replace(leaves=[]), times)


class Runs:
    """The runs of a feed: the one in use, and abandoned ones with a thread that may still be alive."""

    def __init__(self) -> None:
        self._alive: list[Run[Placed]] = []

    @property
    def waiting(self) -> int:
        """Placed batches that are ready to be taken."""
        return sum(run.waiting for run in self._alive)

    @property
    def several(self) -> bool:
        """Whether an abandoned run may be alive beside the one in use."""
        return len(self._alive) > 1

    def add(self, run: Run[Placed], *, workers: bool) -> None:
        """Register a run before it starts: from now on `stop`, an abort and the interpreter's exit close it."""
        close_at_exit(run, workers=workers)
        close_on_abort(run)
        self._alive.append(run)

    def close(self) -> None:
        """Close all runs without waiting for their threads: the finalizer of a feed that nobody closed."""
        for run in tuple(self._alive):
            run.close()

    def stop(self, timeout_s: float, *, reads: bool) -> str | None:
        """Close all runs, and wait for their threads. Returns the name of one that is stuck."""
        deadline = time.monotonic() + timeout_s
        stuck = None
        for run in tuple(self._alive):
            run.close()
            stuck_here = run.join(max(0.0, deadline - time.monotonic()), reads=reads)
            stuck = stuck or stuck_here
            if stuck_here is None:
                self._remove(run)
        return stuck

    def remove_ended(self, current: Run[Placed] | None) -> None:
        """Release abandoned runs whose reads have ended by now, and the memory that they hold."""
        for run in tuple(self._alive):
            if run is not current:
                run.close()  # for the second time, unless an interrupt came before the first
                if run.join(0) is None:
                    self._remove(run)

    def _remove(self, run: Run[Placed]) -> None:
        with contextlib.suppress(ValueError):  # another thread may have removed it
            self._alive.remove(run)
