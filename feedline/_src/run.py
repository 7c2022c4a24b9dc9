"""`Run`: one pass of a feed from a cursor on. Loader, placement and prefetch are composed here, and only here."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar, cast

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.agreement.monitor import close_on_abort
from feedline._src.errors import warn
from feedline._src.loader.host_batch import HostBatch, Progress
from feedline._src.loader.random_access import LocalBatches, RandomAccess
from feedline._src.loader.staging import BatchBuffers
from feedline._src.options import Reading, Settings
from feedline._src.order.schedule import Cursor
from feedline._src.placement.place import Placement
from feedline._src.prefetch.pipelines import HostIterator, Pipeline, Prefetcher, Readers, Synchronous
from feedline._src.prefetch.watch import Watch
from feedline._src.record import Listener, PlaceTimes, Stopwatch, this_thread
from feedline._src.runtime.annotations import annotation, begin_step
from feedline._src.runtime.exit import close_at_exit

if TYPE_CHECKING:
    from feedline._src.agreement.in_step import InStep, LatestValues
    from feedline._src.agreement.replicas import ReplicaCheck
    from feedline._src.bounds import Bounds
    from feedline._src.order.epoch import RowOrder
    from feedline._src.rows.source import Source

_ODD = 2_654_435_761
"""Far from 0 modulo 2^31, so that places of neighbouring epochs are far apart."""
T = TypeVar("T")


class Access(Protocol):
    """How rows are reached: in any order, or one after the other as a stream. Opens batches after any cursor."""

    @property
    def buffers(self) -> BatchBuffers:
        """The memory in which batches are built."""

    @property
    def batch_size(self) -> int:
        """Rows in the global batch."""

    @property
    def local_rows(self) -> int:
        """Rows of a batch that this process supplies."""

    @property
    def order(self) -> RowOrder | None:
        """The order of the rows. None: a stream has its own."""

    @property
    def owners(self) -> tuple[tuple[int, ...], ...]:
        """Of a stream, for each lane the processes that read it."""

    @property
    def local_lanes(self) -> list[int]:
        """Of a stream, the lanes that this process reads."""

    @property
    def tells_source(self) -> bool:
        """Whether the source fetches rows before they are read."""

    @property
    def may_use_workers(self) -> bool:
        """Whether worker processes could read the source."""

    @property
    def restarted(self) -> int:
        """Workers that were replaced."""

    def open(
        self, after: Cursor, lanes: dict[str, Any] | None, settings: Settings, watch: Progress
    ) -> LocalBatches | HostIterator[HostBatch]:
        """The process-local batches after a cursor, where the iterators of a stream were at `lanes`."""

    def next_cursor(self, after: Cursor) -> Cursor:
        """Where the next batch starts, as far as that is known before it is read; `after` if the pass is over."""

    def next_pass(self, after: Cursor) -> Cursor:
        """Where the pass after that of `after` starts."""

    def steps_per_epoch(self) -> int:
        """Batches of an epoch. TypeError if that is unknown."""

    def deliveries(self) -> int:
        """How often a pass delivers. TypeError if that is unknown, or endless."""

    def check_cursor(self, cursor: Cursor) -> None:
        """Raise ValueError if the batches from there on cannot be delivered."""

    def rows_of(self, after: Cursor) -> npt.NDArray[np.int64]:
        """int64[batch_size]: the row indices of the next batch after `after`, -1 where it is padded."""

    def source_epochs(self, cursor: Cursor) -> dict[str, float] | None:
        """Of a mixture, how many epochs of each source stand before the cursor, by name; else None."""

    def lanes_for_state(self, lanes: dict[str, Any] | None) -> dict[str, Any]:
        """What a state holds of the iterators of a stream, which are at `lanes`."""


@dataclasses.dataclass(frozen=True)
class Stages:
    """What a feed of one batch size is made of, and the settings, which may be tuned.

    Attributes:
      access: how rows are reached.
      placement: where batches go.
      fingerprint: of the data, for states.
      reading: as the user gave it.
      settings: the numbers in use. `prefetch` 0: synchronous.
      check: of batches against those of other processes.
      latest_values: what the processes tell each other while they train; None if there is one process.
      in_step: compares what the processes take of the feed; None if there is one process.
      bounds: which settings may be found while the feed runs, and their limits; None: none.
      place_at: the number of the leaf `place` of a batch; None: it has none.
    """

    access: Access
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
    """The stages of each batch size, with the step from which on it holds; one for most feeds.

    Attributes:
      by_step: ascending; the first one from step 0 on.
      source: the source, if the feed opened it and so must close it.
    """

    by_step: tuple[tuple[int, Stages], ...]
    source: Source | None = None

    @property
    def changes(self) -> bool:
        """Whether there are several."""
        return len(self.by_step) > 1

    @property
    def first(self) -> Stages:
        """From step 0 on."""
        return self.by_step[0][1]

    def at(self, step: int) -> Stages:
        """The stages for the batch after `step` batches."""
        return next(stages for first, stages in reversed(self.by_step) if step >= first)

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

    One thread takes. The owner calls `start` once, `close` and `join` from any thread.

    Args:
      batches: host batches, which threads read in parts, or one after the other.
      place: host batch → item; any thread may call it.
      done: the steps before the first batch.
      steps: of each delivery.
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
        prefetch = settings.prefetch
        pipeline: Pipeline[T] | Synchronous[HostBatch, T]
        if isinstance(batches, LocalBatches) and prefetch:
            threads, ahead = max(1, settings.threads), settings.buffer + 1
            parts = _NumberedParts(batches, done, steps)
            pipeline = Readers(parts, place, prefetch, watch, threads=threads, ahead=ahead)
        else:
            items = _NumberedItems(batches, done, steps)
            pipeline = Prefetcher(items, place, prefetch, watch) if prefetch else Synchronous(items, place, watch)
        self._pipeline = pipeline
        self._workers = settings.workers > 0
        self.take, self.close, self.join = pipeline.take, pipeline.close, pipeline.join

    @property
    def waiting(self) -> int:
        """Placed batches that are ready."""
        return self._pipeline.waiting

    def start(self) -> None:
        """Start the threads."""
        self._pipeline.start()


def run_of(
    stages: Stages,
    after: Cursor,
    lanes: dict[str, Any] | None,
    listener: Listener | None = None,
    done: int = 0,
    place: Callable[[HostBatch], Placed] | None = None,
) -> Run[Placed]:
    """A run of the batches after a cursor.

    Args:
      done: the steps before the first of them.
      place: what places; None: the stages' own placement, of which `listener` is told.
    """
    access, settings = stages.access, stages.settings
    watch = Watch(stages.reading)
    batches: LocalBatches | HostIterator[HostBatch]
    if settings.workers and not access.owners:
        from feedline._src.loader.workers import WorkerBatches

        batches = workers = WorkerBatches(cast("RandomAccess", access), after, settings)
        watch.on_stall, watch.on_stop = workers.end_stuck_workers, workers.stop_waiting
    else:
        batches = access.open(after, lanes, settings, watch)
    if place is None:
        assert listener is not None
        place = Placer(stages, listener)
    return Run(batches, place, settings, watch, done, getattr(access, "steps_per_call", 1))


class _NumberedParts:
    """Batches that any threads read in parts, each with its step announced to the annotations of a profile."""

    def __init__(self, batches: LocalBatches, done: int, steps: int) -> None:
        self.parts, self.count = batches.parts, batches.count
        self.rows_of, self.end = batches.rows_of, batches.end
        self._batches, self._done, self._steps = batches, done, steps

    def read(self, number: int, part: int) -> HostBatch | None:
        """Read a part; the call that completes a batch returns it, on the thread that also places it."""
        begin_step(self._done + (number + 1) * self._steps)
        return self._batches.read(number, part)


class _NumberedItems:
    """Batches that one thread reads and places, with their steps announced to the annotations of a profile."""

    def __init__(self, batches: HostIterator[HostBatch], done: int, steps: int) -> None:
        self.close = batches.close
        self._batches, self._step, self._steps = batches, done, steps

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
    """A run, or what stands for one."""

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
        """Placed batches that are ready."""
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
    """Warns, once a feed each, of loops that get less than a whole pass. For one thread at a time.

    It knows where `iter` began to loop, and where `set_state` went to. Steps are batches delivered.
    """

    def __init__(self) -> None:
        self._began: int | None = None  # the step at which `iter` began to loop over this pass
        self._restored: tuple[int, Cursor] | None = None  # the latest state that was set
        self._warned_of_going_on = self._warned_of_an_empty_pass = False

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
        elif step > self._began and epochs is not None and not self._warned_of_going_on:
            self._warned_of_going_on = True
            warn(
                f"this loop goes on in the middle of a pass: {step - self._began} of its batches were taken since "
                "iter(feed) or a loop began it, and are not seen here. To begin the pass again, call "
                f"feed.seek({cursor.epoch // epochs * epochs}) before the loop; to go on without this warning, "
                "take batches by next(feed)"
            )

    def ended(self, step: int, cursor: Cursor, following: Cursor) -> None:
        """The pass is over, and the next one begins at `following`: warn if a loop since `set_state` got none."""
        empty = self._began is not None and self._restored == (step, cursor)
        if empty and not self._warned_of_an_empty_pass:
            self._warned_of_an_empty_pass = True
            warn(
                f"this loop gets no batch: the state was saved at the end of a pass, in epoch {cursor.epoch}, and "
                "the next loop begins the next pass. A loop over epochs around it must count the pass that is "
                "over, for epoch in range(feed.epoch, epochs), with feed.epoch read after set_state; or leave it "
                f"out, feed.seek({following.epoch}), and for epoch in range({following.epoch}, epochs)"
            )
