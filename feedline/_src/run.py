"""Composes loader, placement and prefetch: the stages of a feed, and pipelines (`Run`s) that begin at a cursor."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from feedline._src.agreement.monitor import close_on_abort
from feedline._src.loader.form import HostBatch
from feedline._src.loader.random_access import Access
from feedline._src.loader.restarts import Restarts
from feedline._src.options import Reading, Settings
from feedline._src.order.schedule import Cursor
from feedline._src.placement.place import Placed, Placement
from feedline._src.prefetch.pipelines import HostIterator, PartialBatches, Prefetcher, Run, Synchronous
from feedline._src.prefetch.watch import Watch
from feedline._src.record import PlaceTimes
from feedline._src.runtime.exit import close_at_exit
from feedline._src.runtime.threads import this_thread

if TYPE_CHECKING:
    from feedline._src.agreement.in_step import InStep, LatestValues
    from feedline._src.agreement.replicas import ReplicaCheck
    from feedline._src.bounds import Bounds
    from feedline._src.plan.plan import Plan
    from feedline._src.rows.source import Source

H = TypeVar("H")
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a feed for one batch size, with their settings.

    Attributes:
      plan: this process's plan.
      access: reads process-local batches.
      placement: makes global arrays of process-local batches.
      fingerprint: the state's fingerprint.
      reading: the user's `Reading`.
      settings: the settings in use.
      restarts: counts the worker processes that were replaced.
      bounds: the limits of tuned settings; None: no setting is tuned.
      check: compares batches between processes; None: not requested.
      latest_values, in_step: exchange values with other processes during training; None with one process.
    """

    plan: Plan
    access: Access
    placement: Placement
    fingerprint: dict[str, Any]
    reading: Reading
    settings: Settings
    restarts: Restarts
    bounds: Bounds | None = None
    check: ReplicaCheck | None = None
    latest_values: LatestValues | None = None
    in_step: InStep | None = None

    def tuned(self, settings: Settings) -> Stages:
        """Return these stages with other settings, and keep as many idle slabs as the next pipeline needs."""
        self.access.buffers.staging.keep(settings.host_batches_on_cpu_devices)  # as many as `build` keeps
        return dataclasses.replace(self, settings=settings)

    def reweighted(self, source: Source) -> Stages:
        """These stages with other weights of the mixture. The plan stays the same."""
        if source is self.access.source:
            return self
        order = source.order_for(None)
        access = dataclasses.replace(self.access, source=source, order=order)
        fingerprint = {**self.fingerprint, "order": {**self.fingerprint["order"], **order.as_json()}}
        return dataclasses.replace(self, access=access, fingerprint=fingerprint)

    def placer(self, on_placed: Callable[[PlaceTimes, Sequence[Any]], None]) -> Callable[[HostBatch], Placed]:
        """A function that checks and places a host batch, on any thread. `on_placed`: see `Placement.placed`."""
        return functools.partial(self.placement.placed, on_placed=on_placed, check=self.check)

    @property
    def ahead(self) -> int:
        """Maximum number of batches that are read before the first one is taken."""
        return self.settings.ahead(stream=bool(self.plan.lanes))


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The stages of each batch size, with the size's first step; and the source if the feed must close it."""

    by_step: tuple[tuple[int, Stages], ...]
    source: Source | None = None

    @functools.cached_property
    def changes(self) -> bool:
        """Whether there is more than one batch size."""
        return len(self.by_step) > 1

    @property
    def first(self) -> Stages:
        return self.by_step[0][1]

    def at(self, step: int) -> Stages:
        """The stages for the batch after `step` batches."""
        return next(stages for first, stages in reversed(self.by_step) if step >= first)

    def map(self, change: Callable[[Stages], Stages]) -> Sizes:
        """Change the stages of each size."""
        return dataclasses.replace(self, by_step=tuple((step, change(stages)) for step, stages in self.by_step))

    def close(self) -> None:
        """Close the source, if the feed opened it, and free idle memory. Called when all pipelines have ended."""
        for _, stages in self.by_step:
            stages.access.buffers.staging.close()
        if self.source is not None:
            self.source.close()


def run_of(
    stages: Stages, after: Cursor, lanes: dict[str, Any] | None, place: Callable[[HostBatch], Placed]
) -> Run[Placed]:
    """A pipeline for the batches after a cursor. `lanes`: the states of a stream's iterators at the cursor."""
    settings, watch = stages.settings, Watch(stages.reading)
    if settings.workers and (access := stages.access.for_workers) is not None:
        from feedline._src.loader.workers import WorkerBatches

        workers = WorkerBatches(access, after, settings, stages.restarts)
        watch.on_stall, watch.on_stop = workers.end_stuck_workers, workers.stop_waiting
        return run_over(workers, place, settings, watch)
    return run_over(stages.access.open(after, lanes, settings, watch), place, settings, watch)


def run_over(batches: HostIterator[H], place: Callable[[H], T], settings: Settings, watch: Watch) -> Run[T]:
    """A pipeline that places batches ahead of the consumer, or with `prefetch=0` on the consumer's thread."""
    if not settings.prefetch:
        return Synchronous(batches, place, watch)
    if isinstance(batches, PartialBatches):
        threads, ahead = max(1, settings.threads), settings.buffer + 1
        return Prefetcher(batches, place, settings.prefetch, watch, threads=threads, ahead=ahead)
    return Prefetcher.of_iterator(batches, place, settings.prefetch, watch)


class Runs:
    """The pipelines of a feed: the one in use, and abandoned ones whose threads may be alive."""

    def __init__(self) -> None:
        self.alive: list[Run[Placed]] = []
        self._process = os.getpid()

    @property
    def waiting(self) -> int:
        """Placed batches that are ready to be taken."""
        return sum(run.waiting for run in self.alive)

    def add(self, run: Run[Placed], *, workers: bool) -> None:
        """Register a pipeline before its start, so that `stop`, an abort and the interpreter's exit close it."""
        self.close()  # an interrupt may have left older ones open, and a stream's pipeline waits until they end
        close_at_exit(run, workers=workers)
        close_on_abort(run)
        self.alive.append(run)

    def close(self) -> None:
        """Close all pipelines, without waiting for threads. Also the finalizer of a feed that nobody closed."""
        if os.getpid() != self._process:
            return  # a forked process shares the pipes of workers with its parent
        for run in tuple(self.alive):
            run.close()

    def stop(self, timeout_s: float, *, reads: bool) -> str | None:
        """Close all pipelines and join their threads. Returns a stuck thread's name. `reads`: see `Run.join`."""
        runs, stuck, deadline = tuple(self.alive), None, time.monotonic() + timeout_s
        for run in runs:
            run.close()
        # a reading thread does not wait here: another pipeline's reading thread may be waiting for this one
        if (me := this_thread()) in [run.join(0) for run in runs]:
            return me
        for run in runs:
            stuck_here = run.join(max(0.0, deadline - time.monotonic()), reads=reads)
            stuck = stuck or stuck_here
            if stuck_here is None:
                self._remove(run)
        return stuck

    def remove_ended(self, current: Run[Placed] | None) -> None:
        """Release abandoned pipelines whose reads have ended, and the memory that they hold."""
        for run in tuple(self.alive):
            if run is not current:
                run.close()  # again, because an interrupt may have prevented the first call
                if run.join(0) is None:
                    self._remove(run)

    def _remove(self, run: Run[Placed]) -> None:
        with contextlib.suppress(ValueError):  # another thread may have removed it
            self.alive.remove(run)
