"""`Run`: one pass of a feed from a cursor on. Loader, placement and prefetch are composed here, and only here."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from feedline._src.agreement.monitor import close_on_abort
from feedline._src.errors import warn
from feedline._src.loader.host_batch import HostBatch
from feedline._src.loader.random_access import LocalBatches, RandomAccess
from feedline._src.options import Reading, Settings
from feedline._src.order.schedule import Cursor
from feedline._src.placement.place import Placement
from feedline._src.prefetch.pipelines import HostIterator, Pipeline, Prefetcher, Readers, Synchronous
from feedline._src.prefetch.watch import Watch
from feedline._src.record import Listener, PlaceTimes, Stopwatch, this_thread
from feedline._src.runtime.exit import close_at_exit
from feedline._src.runtime.threads import annotation, begin_step

if TYPE_CHECKING:
    from feedline._src.agreement.in_step import InStep, LatestValues
    from feedline._src.agreement.replicas import ReplicaCheck
    from feedline._src.bounds import Bounds
    from feedline._src.loader.streams import Stream
    from feedline._src.rows.source import Source

_ODD = 2_654_435_761
"""Far from 0 modulo 2^31, so that places of neighbouring epochs are far apart."""
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


class Run(Generic[T]):
    """Batches read and placed ahead of the consumer, or with `prefetch=0` on its thread.

    One thread takes. The owner calls `start` once, `close` and `join` from any thread. `done` are the steps before
    the first batch, `steps` those of each delivery.
    """

    def __init__(
        self,
        batches: LocalBatches | HostIterator[HostBatch],
        place: Callable[[HostBatch], T],
        settings: Settings,
        watch: Watch,
        done: int = 0,
        steps: int = 1,
    ) -> None:
        prefetch, numbered = settings.prefetch, _Numbered(batches, done, steps)
        pipeline: Pipeline[T] | Synchronous[HostBatch, T]
        if isinstance(batches, LocalBatches) and prefetch:
            threads, ahead = max(1, settings.threads), settings.buffer + 1
            pipeline = Readers(numbered, place, prefetch, watch, threads=threads, ahead=ahead)
        elif prefetch:
            pipeline = Prefetcher(numbered, place, prefetch, watch)
        else:
            pipeline = Synchronous(numbered, place, watch)
        self._pipeline = pipeline
        self.close, self.join = pipeline.close, pipeline.join

    def start(self) -> None:
        """Start the threads."""
        self._pipeline.start()

    def take(self) -> T:
        """The next item; see `Pipeline.take`."""
        return self._pipeline.take()

    @property
    def waiting(self) -> int:
        return self._pipeline.waiting


def run_of(
    stages: Stages,
    after: Cursor,
    lanes: dict[str, Any] | None,
    listener: Listener | None = None,
    done: int = 0,
    place: Callable[[HostBatch], Placed] | None = None,
) -> Run[Placed]:
    """A run of the batches after a cursor."""
    access, settings = stages.access, stages.settings
    watch = Watch(stages.reading)
    batches: LocalBatches | HostIterator[HostBatch]
    if settings.workers and isinstance(access, RandomAccess):
        from feedline._src.loader.workers import WorkerBatches

        batches = workers = WorkerBatches(access, after, settings)
        watch.on_stall, watch.on_stop = workers.end_stuck_workers, workers.stop_waiting
    else:
        batches = access.open(after, lanes, settings, watch)
    if place is None:
        assert listener is not None
        place = Placer(stages, listener)
    return Run(batches, place, settings, watch, done, access.steps_per_call)


class _Numbered:
    """Announces the step of each batch to the annotations of a profile, read in parts or one after the other."""

    def __init__(self, batches: Any, done: int, steps: int) -> None:
        self._batches, self._done, self._steps = batches, done, steps
        self.close = batches.close
        if isinstance(batches, LocalBatches):
            self.parts, self.count = batches.parts, batches.count
            self.rows_of, self.end = batches.rows_of, batches.end

    def read(self, number: int, part: int) -> HostBatch | None:
        begin_step(self._done + (number + 1) * self._steps)
        found: HostBatch | None = self._batches.read(number, part)
        return found

    def __next__(self) -> HostBatch:
        begin_step(self._done + self._steps)
        batch: HostBatch = next(self._batches)
        self._done += self._steps
        return batch


def number_of_place(after: Cursor) -> int:
    """A number below 2^31 made of a place in the data. Different places share one with a chance of 2^-31.

    Example:
      >>> number_of_place(Cursor(0, 64)), number_of_place(Cursor(1, 64))
      (64, 506952177)
    """
    return (after.epoch * _ODD + after.position) % (1 << 31)


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


class Joinable(Protocol):
    @property
    def waiting(self) -> int: ...
    def close(self) -> None: ...
    def join(self, timeout_s: float, *, reads: bool = True) -> str | None: ...


class Runs:
    """The runs of a feed: the one in use, and those given up of which a thread may be alive."""

    def __init__(self) -> None:
        self.alive: list[Joinable] = []  # shared with the feed's finalizer

    @property
    def waiting(self) -> int:
        return sum(run.waiting for run in self.alive)

    def add(self, run: Joinable, *, workers: bool) -> None:
        """A run that is about to start: from now on `stop`, an abort and the interpreter's exit close it."""
        close_at_exit(run, workers=workers)
        close_on_abort(run)
        self.alive.append(run)

    def stop(self, timeout_s: float, *, reads: bool) -> str | None:
        """Close all runs, and wait for their threads: the name of one that is stuck."""
        deadline = time.monotonic() + timeout_s
        stuck = None
        for run in tuple(self.alive):
            run.close()
            left = run.join(max(0.0, deadline - time.monotonic()), reads=reads)
            stuck = stuck or left
            if not left:
                self._forget(run)
        return stuck

    def forget_ended(self, current: Joinable | None) -> None:
        """Let go of the runs given up whose reads have ended since, and of the memory they hold."""
        for run in tuple(self.alive):
            if run is not current:
                run.close()  # for the second time, unless an interrupt came before the first
                if run.join(0) is None:
                    self._forget(run)

    def _forget(self, run: Joinable) -> None:
        with contextlib.suppress(ValueError):  # another thread may be doing the same
            self.alive.remove(run)


def close_all(runs: list[Joinable]) -> None:
    """The finalizer of a feed that nobody closed: it must not wait."""
    for run in runs:
        run.close()


class Loops:
    """Warns, once a feed each, of loops that get less than a whole pass. Steps are batches delivered."""

    def __init__(self) -> None:
        self._began: int | None = None  # the step at which `iter` began to loop over this pass
        self._restored: tuple[int, Cursor] | None = None  # the latest state that was set
        self._warned: set[str] = set()

    def moved(self, restored: tuple[int, Cursor] | None = None) -> None:
        """The feed went elsewhere: by `set_state` to `restored`, or else by `seek`."""
        self._began, self._restored = None, restored

    def stopped(self) -> None:
        """`next` raised: at the end of the pass, or an error after which a loop goes on, as it should."""
        self._began = None

    def begins(self, step: int, cursor: Cursor, epochs: int | None) -> None:
        """`iter` was called: warn if it was before in this pass, and batches were taken since.

        A `next` before any `iter` says that the feed is meant as an iterator. And so is one without an end.
        """
        if self._began is None:
            self._began = step
        elif step > self._began and epochs is not None:
            self._warn(
                f"this loop goes on in the middle of a pass: {step - self._began} of its batches were taken since "
                "iter(feed) or a loop began it, and are not seen here. To begin the pass again, call "
                f"feed.seek({cursor.epoch // epochs * epochs}) before the loop; to go on without this warning, "
                "take batches by next(feed)"
            )

    def ended(self, step: int, cursor: Cursor, following: Cursor) -> None:
        """The pass is over, and the next one begins at `following`: warn if a loop since `set_state` got none."""
        if self._began is not None and self._restored == (step, cursor):
            self._warn(
                f"this loop gets no batch: the state was saved at the end of a pass, in epoch {cursor.epoch}, and "
                "the next loop begins the next pass. A loop over epochs around it must count the pass that is "
                "over, for epoch in range(feed.epoch, epochs), with feed.epoch read after set_state; or leave it "
                f"out, feed.seek({following.epoch}), and for epoch in range({following.epoch}, epochs)"
            )

    def _warn(self, message: str) -> None:
        kind = message[:15]
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)
