"""Rows with random access: any thread, or a worker process, reads any part of any batch after any cursor.

A *delivery* is one batch, or `steps_per_call` batches that are delivered at once. Deliveries are numbered from 0
after an origin, and each is read in parts.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError, WorkerError
from feedline._src.loader.form import Cuts, HostBatch, LocalForm, Progress
from feedline._src.loader.staging import BatchBuffers, Buffers
from feedline._src.options import Settings
from feedline._src.order.epoch import RowOrder, Taken
from feedline._src.order.schedule import ENDLESS, Cursor, Schedule
from feedline._src.placement.plan import Indices
from feedline._src.record import PartTimes
from feedline._src.rows.bad_rows import BadRow, check_concerns_a_row
from feedline._src.rows.source import Cut, Source
from feedline._src.rows.spec import cast_into
from feedline._src.runtime.threads import JaxSettings, Stopwatch, annotation, this_thread

_log = logging.getLogger("feedline")
_MAX_ANNOUNCED = (
    1 << 8
)  # the most deliveries announced to the source in advance: each costs as much as the order of its rows


class _Part(NamedTuple):
    """Some rows of the batch at `start`, and the leaves that are read of them.

    Attributes:
      offsets: ascending rows of the global batch.
      here: the rows of `buffers` that are written.
      indices: the row indices; None until the rows have been read.
    """

    start: Cursor
    offsets: Indices
    cuts: Cuts
    buffers: Buffers
    here: slice
    indices: Any = None

    def some(self, some: slice) -> _Part:
        """Adjacent rows of this part, whose indices are known."""
        return self._replace(offsets=self.offsets[some], indices=self.indices[some], here=self._there(some))

    def targets(self, some: slice) -> list[Cut]:
        """Where adjacent rows of this part are written as they are read."""
        there = self._there(some)
        return [(i, columns, self.buffers.read[i][there]) for i, columns in self.cuts]

    def _there(self, some: slice) -> slice:
        return slice(self.here.start + some.start, self.here.start + some.stop)


class _Result(NamedTuple):
    """How a part was made, and its bad rows."""

    times: PartTimes
    bad: list[BadRow]


class Restarts:
    """Counts the replaced workers of a feed, of which there may be `limit`."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit

    @property
    def left(self) -> bool:
        return self.count < self._limit

    def use(self, error: WorkerError) -> None:
        """Count a worker that is to be replaced, and log why it ended."""
        if not self.left:
            if self._limit:
                error.add_note(
                    f"feedline: Reading(restart={self._limit}) has replaced {self.count} workers of this feed "
                    "already; find what ends them, or raise restart"
                )
            raise error
        self.count += 1
        _log.warning("%s. It is replaced (restart %d of %d)", error.message, self.count, self._limit)


@dataclasses.dataclass(frozen=True)
class RandomAccess:
    """Which rows each batch holds, and how a part of one is read. The arithmetic on cursors is pure.

    The order determines which row stands at which position, the schedule which positions a batch holds, and the
    form which part of them this process supplies.
    """

    source: Source
    order: RowOrder
    schedule: Schedule
    form: LocalForm
    buffers: BatchBuffers
    restarts: Restarts
    steps_per_call: int = 1
    settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread)
    owners: ClassVar[tuple[tuple[int, ...], ...]] = ()
    local_lanes: ClassVar[list[int]] = []

    @property
    def batch_size(self) -> int:
        return self.schedule.batch_size

    def with_weights(self, weights: Mapping[str, float], position: int) -> RandomAccess:
        """See `Source`."""
        return self._reading(self.source.with_weights(weights, position))

    def with_weights_of(self, order: Any, position: int) -> RandomAccess:
        """See `Source`."""
        source = self.source.with_weights_of(order, position)
        return self if source is self.source else self._reading(source)

    def _reading(self, source: Source) -> RandomAccess:
        return dataclasses.replace(self, source=source, order=source.order_for(None))

    @property
    def may_use_workers(self) -> bool:
        return self.steps_per_call == 1 and self.source.picklable

    @property
    def restarted(self) -> int:
        return self.restarts.count

    @property
    def tells_source(self) -> bool:
        return self.source.will_read is not None

    @property
    def local_rows(self) -> int:
        return len(self.form.rows)

    def open(
        self, after: Cursor, lanes: dict[str, Any] | None, settings: Settings, watch: Progress
    ) -> LocalBatches:
        """The process-local batches after a cursor, read by threads of this process."""
        # more threads than batches ahead share each batch
        return LocalBatches(self, after, max(1, -(-settings.threads // settings.buffer)))

    def next_cursor(self, after: Cursor) -> Cursor:
        """Where the next batch starts; `after` itself if the pass is over."""
        return self.schedule.batch_at(after, 0) if self.schedule.batches_from(after) else after

    def next_pass(self, after: Cursor) -> Cursor:
        return self.schedule.start_of_pass(self.schedule.pass_of(after) + 1)

    def steps_per_epoch(self) -> int:
        return self.schedule.steps_per_epoch

    def deliveries(self) -> int:
        """How often a pass delivers. TypeError if it is endless."""
        count = self.schedule.batches_of_pass(0)
        if count == ENDLESS:
            raise TypeError("an endless feed has no length; give it epochs, or use feed.steps_per_epoch")
        return count // self.steps_per_call

    def check_cursor(self, cursor: Cursor) -> None:
        """ValueError if the number of batches left in the pass is no multiple of the steps per call."""
        self.taken_before(cursor)  # refuses an epoch of a mixture that is too late
        for problem in self.schedule.refused_steps(cursor, self.steps_per_call):
            raise ValueError(problem)

    def rows_of(self, after: Cursor) -> npt.NDArray[np.int64]:
        """The row indices of the next batch after `after`, -1 where padded; [steps, B] with several steps."""
        if not self.schedule.batches_from(after):  # a "wrap" pass may leave a few rows
            after = self.next_pass(after)
        self.check_cursor(after)
        offsets, rows = np.arange(self.batch_size), []
        for step in range(self.steps_per_call):
            start = self.schedule.batch_at(after, step)
            rows.append(np.where(self.schedule.positions(start, offsets).valid, self.locate(start, offsets), -1))
        return rows[0] if self.steps_per_call == 1 else np.stack(rows)

    def taken_before(self, cursor: Cursor) -> tuple[Taken, ...]:
        return self.order.taken_before(*cursor)

    def tokens_of(self, rows: Indices) -> Indices | None:
        return self.source.tokens_of(rows)

    def lanes_for_state(self, lanes: dict[str, Any] | None) -> dict[str, Any]:
        return {"lanes": None}

    def locate(self, start: Cursor, offsets: Indices) -> Indices:
        """int64[k], read-only: the row index of each of these rows, ascending, of the batch at `start`."""
        index = np.empty(len(offsets), np.int64)
        for epoch, some, positions in self.schedule.positions_by_epoch(start, offsets):
            index[some] = self.order.rows_at(epoch, positions)
        index.flags.writeable = False
        return index

    def padded_length(self, start: Cursor) -> int | None:
        """The length of the ragged leaves of the batch at `start`, the same in each process; None: it has none."""
        if not self.form.ragged:
            return None
        return self.source.padded_length(self.locate(start, np.arange(self.batch_size)))

    def tell_source(self, start: Cursor, ahead: int) -> bool:
        """Tell the source that the batch at `start` is read in `ahead` batches. False: that is too early."""
        will_read = self.source.will_read
        if will_read is None:
            return True
        return all(will_read(self.locate(start, offsets), ahead) for offsets, _ in self.form.reads)

    def rows_of_part(self, start: Cursor, part: int, parts: int) -> tuple[int, int, str | None]:
        """Of the part that `fill` reads, the number of rows, the first row index, and its file, if known."""
        offsets, _ = self.form.reads[0]
        rows = self.locate(start, offsets[_share(offsets, part, parts)])
        return len(rows), int(rows[0]), self.source.file_of(int(rows[0]))

    def fill(self, start: Cursor, part: int, parts: int, buffers: Buffers) -> _Result:
        """Write a part of the batch at `start` into its `buffers`: number `part` of `parts` equal ones."""
        watch, bad = Stopwatch(), []
        read_s = read_cpu_s = transform_s = finish_s = finish_cpu_s = 0.0
        with self.settings.applied():
            for offsets, cuts in self.form.reads:
                here = _share(offsets, part, parts)
                of_read = _Part(start, offsets[here], cuts, buffers, here)
                try:
                    with annotation("read"):
                        of_read = self._read(of_read)
                    wall_s, cpu_s = watch.lap()
                    read_s, read_cpu_s = read_s + wall_s, read_cpu_s + cpu_s
                    transform_s += self._finish(of_read)
                    wall_s, cpu_s = watch.lap()
                    finish_s, finish_cpu_s = finish_s + wall_s, finish_cpu_s + cpu_s
                except RowError as error:
                    bad += self._replace_bad(of_read, error)
                    wall_s, cpu_s = watch.lap()
                    read_s, read_cpu_s = read_s + wall_s, read_cpu_s + cpu_s
        times = PartTimes(
            this_thread(), watch.began, read_s, transform_s, finish_s - transform_s, read_cpu_s, finish_cpu_s
        )
        return _Result(times, bad)

    def _read(self, part: _Part) -> _Part:
        """Read the rows of a part. Returns it with their indices.

        Unknown indices are computed and read in one call for each epoch.
        """
        try:
            if part.indices is not None:
                at = self.form.rows_at(self.schedule.positions(part.start, part.offsets), part.indices)
                self.source.read_cuts(at, part.targets(slice(0, len(part.offsets))))
                return part
            found = [
                self.source.read_ordered(self.order, epoch, positions, part.targets(some))
                for epoch, some, positions in self.schedule.positions_by_epoch(part.start, part.offsets)
            ]
        except FeedError:
            raise
        except Exception as error:  # of any type: a StopIteration would look like the end of the feed
            rows = self._indices(part)
            which = "this row" if len(rows) == 1 else f"{len(rows)} rows, the first of them {rows[0]},"
            raise RowError(
                f"{self.source.kind} failed to read {which} with {type(error).__name__}: {error}", stage="read"
            ) from error
        indices = found[0] if len(found) == 1 else np.concatenate(found)
        indices.flags.writeable = False
        return part._replace(indices=indices)

    def _indices(self, part: _Part) -> Indices:
        found: Indices = self.locate(part.start, part.offsets) if part.indices is None else part.indices
        return found

    def _finish(self, part: _Part) -> float:
        """Transform and cast the rows that were read. Returns the seconds in the transform."""
        buffers, here, form = part.buffers, part.here, self.form
        if buffers.direct:
            return 0.0
        if form.by_leaf:
            for i, _ in part.cuts:
                read, placed = buffers.read[i], buffers.leaves[i]
                if placed is not read:
                    with annotation("stage"):
                        cast_into(placed[here], read[here], form.spec.leaves[i], part.indices)
            return 0.0
        whole, watch = [leaf[here] for leaf in buffers.read], Stopwatch()
        if form.transform is not None:
            positions = self.schedule.positions(part.start, part.offsets)
            whole = form.transformed(form.transform, whole, positions, part.indices)
        transform_s, _ = watch.lap()
        with annotation("stage"):
            form.write(whole, buffers.leaves, here, part.indices)
        return transform_s

    def _replace_bad(self, failed: _Part, error: RowError) -> list[BadRow]:
        """Write a part again whose read failed with `error`, with a substitute for each bad row."""
        part = failed._replace(indices=self._indices(failed))
        positions = self.schedule.positions(part.start, part.offsets)

        def write(here: _Part) -> None:
            self._finish(self._read(here))

        def write_substitute(i: int, failure: RowError) -> int:
            epoch, position, row = int(positions.epoch[i]), int(positions.position[i]), int(part.indices[i])
            candidates = self.order.substitutes(epoch, position, row).tolist()
            for candidate in candidates:
                try:
                    write(part.some(slice(i, i + 1))._replace(indices=np.array([candidate])))
                except RowError as again:
                    check_concerns_a_row(again)
                else:
                    return int(candidate)
            none = RowError(
                f"another row must replace a bad one, and all {len(candidates)} that were drawn are bad, too; "
                f"repair the source. The first bad row: {failure.message}",
                stage="read",
                file=failure.file,
            )
            none.locate(row, epoch, position)
            raise none from failure

        return self.form.replaced(
            lambda some: write(part.some(some)), write_substitute, positions, part.indices, part.offsets, error
        )


def _share(offsets: Indices, part: int, parts: int) -> slice:
    return slice(len(offsets) * part // parts, len(offsets) * (part + 1) // parts)


class LocalBatches:
    """The process-local batches from `origin` to the end of the pass. Any thread may read any part, each once.

    It is also an iterator, for one thread.

    Args:
      parts: of a batch, at most.
      every: only one of this many deliveries is read here, the others by other worker processes.
    """

    def __init__(self, access: RandomAccess, origin: Cursor, parts: int = 1, every: int = 1) -> None:
        self._of_batch = min(parts, *(len(plan.rows) for plan in access.form.plans))
        self.parts = access.steps_per_call * self._of_batch
        self.count = access.schedule.batches_from(origin) // access.steps_per_call
        self._access = access
        self._origin = origin
        self._every = every
        self._lock = threading.Lock()
        self._announcing = threading.Lock()
        self._announced = 0  # the first delivery that the source does not know of; held by _announcing
        # each delivery with missing parts: its memory, and the parts read so far; held by _lock
        self._partial: dict[int, tuple[Buffers, dict[int, _Result | Exception]]] = {}
        self._next = 0  # of the iterator

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of rows that the end of the pass leaves out."""
        if self._next == self.count:
            raise self.end()
        read = [self.read(self._next, part) for part in range(self.parts)]
        self._next += 1
        (batch,) = [batch for batch in read if batch is not None]
        return batch

    def close(self) -> None:
        """Nothing to close."""

    def read(self, number: int, part: int) -> HostBatch | None:
        """Read a part of delivery `number`. The call that completes it returns it, or raises its error."""
        access = self._access
        if access.tells_source:
            self._announce(number)
        step, of_batch = divmod(part, self._of_batch)
        start, watch = self._start(number, step), Stopwatch()
        with annotation("stage"), self._lock:
            if number not in self._partial:
                self._partial[number] = access.buffers.lease(access.padded_length(start)), {}
            buffers, results = self._partial[number]
        lease_s, lease_cpu_s = watch.lap()
        result: _Result | Exception
        try:
            of_step = buffers if access.steps_per_call == 1 else buffers.of_step(step)
            times, bad = access.fill(start, of_batch, self._of_batch, of_step)
            stage_s, host_cpu_s = times.stage_s + lease_s, times.host_cpu_s + lease_cpu_s
            result = _Result(times._replace(began=watch.began, stage_s=stage_s, host_cpu_s=host_cpu_s), bad)
        except Exception as error:  # noqa: BLE001  raised below, once all parts are done
            result = error
        with self._lock:
            results[part] = result
            if len(results) < self.parts:
                return None
            del self._partial[number]
        in_order = [results[i] for i in range(self.parts)]
        filled = []
        for result in in_order:
            if isinstance(result, Exception):
                raise result  # of the lowest-numbered part that failed, not the earliest
            filled.append(result)
        return self._completed(number, buffers, filled)

    def _completed(self, number: int, buffers: Buffers, filled: list[_Result]) -> HostBatch:
        schedule, form, steps = self._access.schedule, self._access.form, self._access.steps_per_call
        after = schedule.after(self._start(number, -1)) if number else self._origin
        rows = dropped_rows = 0
        bad: list[BadRow] = []
        masks = []
        for step in range(steps):
            start = self._start(number, step)
            of_step = filled[step * self._of_batch : (step + 1) * self._of_batch]
            found = sorted(row for each in of_step for row in each.bad)
            bad += found
            rows += schedule.real_rows(start)
            dropped_rows += schedule.dropped_rows(after, start)
            if form.mask is not None:
                masks.append(form.mask_of(schedule.positions(start, form.mask).valid, found))
            after = schedule.after(start)
        leaves = buffers.leaves
        if masks:
            leaves = form.with_mask(leaves, masks[0] if steps == 1 else np.stack(masks))
        return HostBatch(leaves, after, None, rows, dropped_rows, [each.times for each in filled], bad)

    def rows_of(self, number: int, part: int) -> tuple[int, int, str | None]:
        """Of a part: the number of its rows, the row index of the first, and the file of that row, if known."""
        step, of_batch = divmod(part, self._of_batch)
        return self._access.rows_of_part(self._start(number, step), of_batch, self._of_batch)

    def end(self) -> StopIteration:
        """The end of the pass. Its value is the number of rows left out after the last batch."""
        last = self._access.schedule.after(self._start(self.count, -1)) if self.count else self._origin
        return StopIteration(self._access.schedule.dropped_rows(last, None))

    def _announce(self, number: int) -> None:
        """Announce the rows of deliveries from `number` on to a source that fetches rows, until it has enough."""
        access = self._access
        if not self._announcing.acquire(blocking=False):
            return
        try:
            self._announced = max(self._announced, number)
            while self._announced < min(self.count, number + _MAX_ANNOUNCED):
                starts = [self._start(self._announced, step) for step in range(access.steps_per_call)]
                if not all(access.tell_source(start, self._announced - number) for start in starts):
                    return
                self._announced += self._every
        finally:
            self._announcing.release()

    def _start(self, number: int, step: int) -> Cursor:
        return self._access.schedule.batch_at(self._origin, number * self._access.steps_per_call + step)
