"""Reads batches of rows with random access: any thread or worker process can read any part of any batch.

A *delivery* is one batch, or `steps_per_call` batches that are delivered at once. Deliveries are numbered from 0;
delivery 0 begins at a cursor, the *origin*. A delivery is read in parts. `Access` and `PartWriter`, which writes a
part, are also the base classes of `streams.py`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.loader.form import HostBatch, LocalForm, Progress
from feedline._src.loader.staging import BatchBuffers, Buffers
from feedline._src.options import Settings
from feedline._src.order.epoch import RowOrder
from feedline._src.order.schedule import BatchPositions, Cursor, Schedule
from feedline._src.plan.plan import Cuts
from feedline._src.plan.shardings import Indices
from feedline._src.record import PartTimes
from feedline._src.rows.bad_rows import BadRow, check_concerns_a_row, find_bad_rows, raise_located
from feedline._src.rows.source import Cut, Source, WillRead
from feedline._src.runtime.threads import JaxSettings, Stopwatch, annotation, this_thread

# at most this many deliveries are announced in advance, because computing their row indices takes time
_MAX_ANNOUNCED = 1 << 8


class PartClock:
    """Sums the time that one thread spends on each stage of a part."""

    def __init__(self) -> None:
        self._watch = Stopwatch()
        self._wall_s = {"read": 0.0, "transform": 0.0, "stage": 0.0}
        self._cpu_s = dict(self._wall_s)

    def lap(self, stage: Literal["read", "transform", "stage"]) -> None:
        """Add the time since the last call, or since the start, to a stage."""
        wall_s, cpu_s = self._watch.lap()
        self._wall_s[stage] += wall_s
        self._cpu_s[stage] += cpu_s

    def times(self) -> PartTimes:
        """The sums so far."""
        cpu_s = self._cpu_s
        return PartTimes(
            this_thread(), self._watch.began, **{f"{stage}_s": wall_s for stage, wall_s in self._wall_s.items()},
            read_cpu_s=cpu_s["read"], host_cpu_s=cpu_s["transform"] + cpu_s["stage"],
        )  # fmt: skip


@dataclasses.dataclass(eq=False)
class PartWriter:
    """Writes adjacent rows of a process-local batch into the batch's memory, and replaces bad rows by substitutes.

    Subclasses read the rows. Not thread-safe.

    Attributes:
      offsets: int64[k], ascending: the offsets of these rows in the global batch.
      cuts: the leaves to read, and their columns.
      first: the index in `buffers` of the first of these rows.
    """

    form: LocalForm
    offsets: Indices
    cuts: Cuts
    buffers: Buffers
    first: int
    clock: PartClock

    def _read(self, some: slice, index: Indices | None) -> Indices:
        """Read some of the rows into `buffers.read`. Returns their row indices; in a stream, their positions.

        Args:
          index: the row indices, if they are known.

        Raises:
          RowError: a row cannot be read.
        """
        raise NotImplementedError

    def _indices(self) -> Indices:
        """The row indices of all rows. Called after a failed read, to read the rows again."""
        raise NotImplementedError

    def _positions(self, some: slice) -> BatchPositions:
        raise NotImplementedError

    def _substitute(self, i: int, index: int, failure: RowError) -> int:
        """Write a substitute for row i, whose row index is `index`. Returns the row index of the substitute."""
        raise NotImplementedError

    def write(self) -> list[BadRow]:
        """Write all rows. Returns the bad rows, each of which was replaced by a substitute.

        Raises:
          RowError: a row is bad, and was not replaced.
        """
        try:
            self._write(slice(0, len(self.offsets)), None)
        except RowError as error:
            return self._replace_bad(error)
        return []

    def _write(self, some: slice, index: Indices | None) -> None:
        """Read, transform, cast and cut some of the rows, and write them into the leaves to place."""
        with annotation("read"):
            index = self._read(some, index)
        self.clock.lap("read")
        form, (read, leaves) = self.form, self.buffers
        if not form.part.changed:  # all leaves were read into the memory from which they are placed
            return
        here = self._here(some)
        changed = {i: read[i][here] for i, _ in self.cuts if i in form.part.changed}
        if form.transform is not None:
            rows = form.rows_at(self._positions(some), index)
            changed = dict(enumerate(form.transformed(form.transform, list(changed.values()), rows)))
            self.clock.lap("transform")
        with annotation("stage"):
            form.write(changed, leaves, here, index)
        self.clock.lap("stage")

    def _replace_bad(self, error: RowError) -> list[BadRow]:
        """Write all rows again, with substitutes for bad rows. With `bad_rows="raise"`, raise a RowError."""
        index, positions, bad = self._indices(), self._positions(slice(0, len(self.offsets))), []

        def write(some: slice) -> None:
            self._write(some, index[some])

        if self.form.bad_rows == "raise":
            raise_located(write, positions, index, error)
        for i, failure in find_bad_rows(write, index, error):
            failure.locate(int(index[i]), int(positions.epoch[i]), int(positions.position[i]))
            substitute = self._substitute(i, int(index[i]), failure)
            if positions.valid[i]:  # padding repeats rows, which must not be counted again
                bad.append(BadRow.of(failure, int(self.offsets[i]), substitute))
        self.clock.lap("read")
        return bad

    def _here(self, some: slice) -> slice:
        """The slice of `buffers` for some of the rows of this part."""
        return slice(self.first + some.start, self.first + some.stop)


@dataclasses.dataclass(frozen=True)
class Access:
    """How a feed reads its rows. The defaults are those of a stream. The arithmetic on cursors is pure.

    Attributes:
      source, order: of a stream, its first item, and the order in which its items come.
      jax_settings: JAX's settings of the thread that builds the feed.
    """

    source: Source
    order: RowOrder
    form: LocalForm
    buffers: BatchBuffers
    jax_settings: JaxSettings = dataclasses.field(default_factory=JaxSettings.of_this_thread, kw_only=True)

    def open(self, after: Cursor, lanes: Mapping[str, Any] | None, settings: Settings, watch: Progress) -> Any:
        """The process-local batches after a cursor. `lanes`: the states of a stream's iterators at the cursor."""
        raise NotImplementedError

    @property
    def for_workers(self) -> RandomAccess | None:
        """This access, if worker processes can read by it; else None."""
        return None

    @property
    def shown_order(self) -> Any:
        """The value of `Feed.order`."""
        return None

    def check_cursor(self, cursor: Cursor, lanes: Mapping[str, Any] | None = None) -> None:
        """Raise ValueError if no batch can start at a cursor. `lanes`: as in `open`."""
        if cursor.position and lanes is None:
            raise ValueError(
                f"a stream can seek to the start of an epoch only, got position {cursor.position}; use set_state"
            )

    def next_cursor(self, after: Cursor) -> Cursor:
        """The cursor at which the next batch starts; `after` itself if this is unknown, or the pass is over."""
        return after

    def next_pass(self, after: Cursor) -> Cursor:
        """The cursor at which the next pass starts."""
        raise NotImplementedError

    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch. TypeError: it is unknown."""
        raise TypeError("a stream does not know its length before its end, so steps per epoch are unknown")

    def rows_of(self, after: Cursor) -> Indices:
        """The row indices of the batch after a cursor, -1 for padding; [steps, B] with several steps per call."""
        raise TypeError("a stream has no row indices: its rows are known only by reading it")


@dataclasses.dataclass(frozen=True)
class RandomAccess(Access):
    """Computes which rows each batch contains, and reads parts of batches.

    The schedule maps a batch to positions, the order maps positions to rows, and the form selects this process's
    part of the batch.
    """

    schedule: Schedule
    steps_per_call: int = 1

    @property
    def for_workers(self) -> RandomAccess | None:
        return self if self.steps_per_call == 1 and self.source.picklable else None

    @property
    def shown_order(self) -> Any:
        return self.order.shown

    def open(self, after: Cursor, lanes: Any, settings: Settings, watch: Progress) -> LocalBatches:
        # with more threads than `buffer`, batches are divided into parts, so that all threads work
        return LocalBatches(self, after, max(1, -(-settings.threads // settings.buffer)))

    def next_cursor(self, after: Cursor) -> Cursor:
        return self.schedule.batch_at(after, 0) if self.schedule.batches_from(after) else after

    def next_pass(self, after: Cursor) -> Cursor:
        return self.schedule.start_of_pass(self.schedule.pass_of(after) + 1)

    def steps_per_epoch(self) -> int:
        return self.schedule.steps_per_epoch

    def check_cursor(self, cursor: Cursor, lanes: Mapping[str, Any] | None = None) -> None:
        self.order.taken_before(*cursor)  # raises if 2^63 rows or more of a mixture's source precede the cursor
        for problem in self.schedule.refused_steps(cursor, self.steps_per_call):
            raise ValueError(problem)

    def rows_of(self, after: Cursor) -> Indices:
        if not self.schedule.batches_from(after):  # the pass is over, though a "wrap" pass may have rows left
            after = self.next_pass(after)
        self.check_cursor(after)
        offsets, rows = np.arange(self.schedule.batch_size), []
        for step in range(self.steps_per_call):
            start = self.schedule.batch_at(after, step)
            rows.append(np.where(self.schedule.positions(start, offsets).valid, self.locate(start, offsets), -1))
        return rows[0] if self.steps_per_call == 1 else np.stack(rows)

    def locate(self, start: Cursor, offsets: Indices) -> Indices:
        """Return int64[k], read-only: the row indices at ascending offsets in the batch that starts at `start`."""
        index = np.empty(len(offsets), np.int64)
        for epoch, some, positions in self.schedule.positions_by_epoch(start, offsets):
            index[some] = self.order.rows_at(epoch, positions)
        index.flags.writeable = False
        return index

    def padded_length(self, start: Cursor) -> int | None:
        """The length of ragged leaves in the batch at `start`, equal on all processes. None: no leaf is ragged."""
        if not self.form.ragged:
            return None
        return self.source.padded_length(self.locate(start, np.arange(self.schedule.batch_size)))

    def fill(
        self, start: Cursor, part: int, parts: int, buffers: Buffers, clock: PartClock | None = None
    ) -> list[BadRow]:
        """Write part `part` of `parts` of the batch at `start` into `buffers`. Returns its bad rows."""
        clock, bad = clock or PartClock(), []
        with self.jax_settings.applied():
            for offsets, cuts in self.form.part.calls:
                here = _share(offsets, part, parts)
                bad += _RandomPart(self.form, offsets[here], cuts, buffers, here.start, clock, self, start).write()
        return bad


@dataclasses.dataclass(eq=False)
class _RandomPart(PartWriter):
    """A part of the batch at `start`."""

    access: RandomAccess
    start: Cursor

    def _indices(self) -> Indices:
        return self.access.locate(self.start, self.offsets)

    def _positions(self, some: slice) -> BatchPositions:
        return self.access.schedule.positions(self.start, self.offsets[some])

    def _read(self, some: slice, index: Indices | None) -> Indices:
        """Without `index`, `some` is all rows: one call per epoch computes the indices and reads the rows."""
        access = self.access
        try:
            if index is not None:
                access.source.read_cuts(self.form.rows_at(self._positions(some), index), self._targets(some))
                return index
            found = [
                access.source.read_ordered(access.order, epoch, positions, self._targets(of_epoch))
                for epoch, of_epoch, positions in access.schedule.positions_by_epoch(self.start, self.offsets)
            ]
        except FeedError:
            raise
        except Exception as error:  # of any type, because a StopIteration would look like the end of the feed
            index = self._indices() if index is None else index
            which = "this row" if len(index) == 1 else f"{len(index)} rows, the first of them {index[0]},"
            raise RowError(
                f"{access.source.kind} failed to read {which} with {type(error).__name__}: {error}", stage="read"
            ) from error
        index = found[0] if len(found) == 1 else np.concatenate(found)
        index.flags.writeable = False
        return index

    def _targets(self, some: slice) -> list[Cut]:
        here = self._here(some)
        return [(i, columns, self.buffers.read[i][here]) for i, columns in self.cuts]

    def _substitute(self, i: int, index: int, failure: RowError) -> int:
        """Replace a bad row by the first good row among the order's substitutes."""
        here = slice(i, i + 1)
        at = self._positions(here)
        place = int(at.epoch[0]), int(at.position[0])
        candidates = self.access.order.substitutes(*place, index)
        for candidate in candidates:
            try:
                self._write(here, np.array([candidate]))
            except RowError as error:
                check_concerns_a_row(error)
            else:
                return int(candidate)
        none = RowError(
            f"another row must replace a bad one, and all {len(candidates)} that were drawn are bad, too; "
            f"repair the source. The first bad row: {failure.message}",
            stage="read",
            file=failure.file,
        )
        none.locate(index, *place)
        raise none from failure


def _share(offsets: Indices, part: int, parts: int) -> slice:
    return slice(len(offsets) * part // parts, len(offsets) * (part + 1) // parts)


class _Part(NamedTuple):
    """A part of a delivery that was read without an error."""

    times: PartTimes
    bad: list[BadRow]


class LocalBatches:
    """The process-local batches from `origin` to the end of the pass.

    Any thread may `read` any part, each part once. As an iterator, it is for one thread.

    Args:
      parts: the maximum number of parts of a batch.
      every: this process reads every `every`-th delivery; other worker processes read the rest.
    """

    def __init__(self, access: RandomAccess, origin: Cursor, parts: int = 1, every: int = 1) -> None:
        self._parts_per_batch = min(parts, *(len(plan.rows) for plan in access.form.part.of_rows))
        self.parts = access.steps_per_call * self._parts_per_batch
        self.count = access.schedule.batches_from(origin) // access.steps_per_call
        self._access = access
        self._origin = origin
        self._every = every
        self._lock = threading.Lock()
        self._announcing = threading.Lock()
        self._announced = 0  # the first delivery that was not announced to the source; guarded by _announcing
        # {incomplete delivery: (its memory, its finished parts)}; guarded by _lock
        self._partial: dict[int, tuple[Buffers, dict[int, _Part | Exception]]] = {}
        self._next = 0  # the delivery that the iterator returns next

    def __next__(self) -> HostBatch:
        """The next delivery. The value of StopIteration is the number of rows left out at the end of the pass."""
        if self._next == self.count:
            raise self.end()
        read = [self.read(self._next, part) for part in range(self.parts)]
        self._next += 1
        (batch,) = [batch for batch in read if batch is not None]
        return batch

    def close(self) -> None:
        """Nothing to close."""

    def read(self, number: int, part: int) -> HostBatch | None:
        """Read a part of delivery `number`. The call that completes a delivery returns it, or raises its error."""
        access = self._access
        if (will_read := access.source.will_read) is not None:
            self._announce(number, will_read)
        step, part_of_batch = divmod(part, self._parts_per_batch)
        start, clock = self._start(number, step), PartClock()
        with annotation("stage"), self._lock:
            if number not in self._partial:
                self._partial[number] = access.buffers.lease(access.padded_length(start)), {}
            buffers, made = self._partial[number]
        clock.lap("stage")
        of_step = buffers if access.steps_per_call == 1 else buffers.of_step(step)
        try:
            bad = access.fill(start, part_of_batch, self._parts_per_batch, of_step, clock)
            found: _Part | Exception = _Part(clock.times(), bad)
        except Exception as error:  # noqa: BLE001  raised below, once all parts are done
            found = error
        try:
            with self._lock:
                made[part] = found
                if len(made) < self.parts:
                    return None
                del self._partial[number]
            parts = []
            for _, found in sorted(made.items(), key=lambda item: item[0]):
                if isinstance(found, Exception):
                    raise found  # the error of the failed part with the lowest number, not the first in time
                parts.append(found)
        finally:
            del found, made  # otherwise an error, its traceback and this frame form a cycle and keep the memory
        return self._completed(number, buffers, parts)

    def _completed(self, number: int, buffers: Buffers, parts: list[_Part]) -> HostBatch:
        schedule, form, steps = self._access.schedule, self._access.form, self._access.steps_per_call
        after = self._cursor_before(number)
        rows = dropped_rows = 0
        bad: list[BadRow] = []
        masks = []
        for step in range(steps):
            start = self._start(number, step)
            of_step = parts[step * self._parts_per_batch : (step + 1) * self._parts_per_batch]
            bad_here = sorted(row for each in of_step for row in each.bad)
            bad += bad_here
            rows += schedule.real_rows(start)
            dropped_rows += schedule.dropped_rows(after, start)
            if form.part.own_rows is not None:
                masks.append(form.valid(schedule.positions(start, form.part.own_rows).valid, bad_here))
            after = schedule.after(start)
        leaves = buffers.leaves
        if masks:
            leaves = form.with_own(leaves, masks[0] if steps == 1 else np.stack(masks), after)
        return HostBatch(leaves, after, None, rows, dropped_rows, [each.times for each in parts], bad)

    def rows_of(self, number: int, part: int) -> tuple[int, int, str | None]:
        """The number of rows of a part, the row index of the first row, and the file of that row, if known."""
        step, part_of_batch = divmod(part, self._parts_per_batch)
        offsets, _ = self._access.form.part.calls[0]
        here = _share(offsets, part_of_batch, self._parts_per_batch)
        rows = self._access.locate(self._start(number, step), offsets[here])
        return len(rows), int(rows[0]), self._access.source.file_of(int(rows[0]))

    def end(self) -> StopIteration:
        """The end of the pass. Its value is the number of rows left out after the last batch."""
        return StopIteration(self._access.schedule.dropped_rows(self._cursor_before(self.count), None))

    def _announce(self, number: int, will_read: WillRead) -> None:
        """Announce the rows of deliveries from `number` on, for the source to fetch, while it accepts more."""
        access = self._access
        if not self._announcing.acquire(blocking=False):
            return
        try:
            self._announced = max(self._announced, number)
            while self._announced < min(self.count, number + _MAX_ANNOUNCED):
                for step in range(access.steps_per_call):
                    start = self._start(self._announced, step)
                    for offsets, _ in access.form.part.calls:
                        if not will_read(access.locate(start, offsets), self._announced - number):
                            return
                self._announced += self._every
        finally:
            self._announcing.release()

    def _start(self, number: int, step: int) -> Cursor:
        """The cursor at which batch `step` of delivery `number` starts."""
        return self._access.schedule.batch_at(self._origin, number * self._access.steps_per_call + step)

    def _cursor_before(self, number: int) -> Cursor:
        """The cursor after the last batch before delivery `number`; at an epoch's end, still in that epoch."""
        return self._access.schedule.after(self._start(number, -1)) if number else self._origin
