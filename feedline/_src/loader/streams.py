"""Reads batches from streams, whose rows can only be read one after the other.

With L lanes, batch k of B rows contains items k·B/L … (k+1)·B/L − 1 of each lane, on any topology. A process reads
the lanes that fill its rows, in windows of a few batches. After each window, the processes exchange which of their
lanes have ended. Only then are the leaf `valid` and the number of rows without padding known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, ProcessError, RowError, as_arguments
from feedline._src.loader.form import HostBatch, Progress
from feedline._src.loader.random_access import Access, PartClock, PartWriter
from feedline._src.options import Settings
from feedline._src.order.schedule import BatchPositions, Cursor
from feedline._src.plan.plan import Plan
from feedline._src.plan.shardings import Indices
from feedline._src.rows.values import write_record
from feedline._src.runtime.threads import annotation


class GatherReports(Protocol):
    """Returns all processes' distinct reports on a window. See `agreement.all_gather`."""

    def __call__(self, name: str, value: Any, failed: bool, stopped: Callable[[], bool], /) -> list[Any]: ...


@dataclasses.dataclass(frozen=True)
class Stream(Access):
    """The definition of a stream's batches, and the arithmetic on its cursors.

    A cursor's position counts the items of all lanes together.

    Attributes:
      source: a `FirstItem`, which opens the lanes. Its item replaces bad items, and fills rows without an item;
        every process has it.
      plan: its `remainder` determines where an epoch ends. "drop": with the shortest lane; items left in other
        lanes are read only to count them. "pad": with the longest lane. "wrap", for one lane: batches cross its
        end. The plan's `settings.buffer` is the number of batches in a window.
      gather: exchanges the ends of lanes with the other processes; None: this process reads every lane.
    """

    source: Any
    plan: Plan
    epochs: int | None
    gather: GatherReports | None = None

    @property
    def items(self) -> int:
        """Items of each lane in a batch."""
        return self.plan.batch_size // self.plan.lanes

    def exists(self, offset: int, ends: Mapping[int, int]) -> bool:
        """Whether a batch exists after `offset` items of each lane. `ends`: {ended lane: number of its items}."""
        if self.plan.remainder == "pad":
            return len(ends) < self.plan.lanes or offset < max(ends.values())
        return not ends or offset + self.items <= min(ends.values())

    def real(self, offset: int, ends: Mapping[int, int]) -> npt.NDArray[np.int64]:
        """Return int64[lanes]: the number of items of each lane in the batch after `offset` items of each lane."""
        counts = np.full(self.plan.lanes, self.items, np.int64)
        for lane, items in ends.items():
            counts[lane] = min(max(items - offset, 0), self.items)
        return counts

    def end_of_pass(self, after: Cursor) -> int | None:
        return None if self.epochs is None else (after.epoch // self.epochs + 1) * self.epochs

    def open(self, after: Cursor, lanes: Any, settings: Settings, watch: Progress) -> StreamBatches:
        return StreamBatches(self, after, lanes or {}, watch)

    def next_pass(self, after: Cursor) -> Cursor:
        return Cursor(self.end_of_pass(after) or after.epoch + 1, 0)


class Report(NamedTuple):
    """The ends of lanes and the failure that one process, or all processes together, found in a window.

    `ends`: {ended lane: number of its items}. `failed_at`: the number of items of each lane before the batch that
    could not be read; None: no failure. `why`: the arguments of the error that the other processes raise.
    """

    ends: dict[int, int]
    failed_at: int | None = None
    why: dict[str, Any] = {}  # noqa: RUF012

    def to_json(self) -> list[Any]:
        return [list(self.ends.items()), self.failed_at, self.why]

    @classmethod
    def merged(cls, reports: list[Any]) -> Report:
        """Merge the reports of all processes. The result has the earliest failure."""
        ends = {lane: items for lane_ends, _, _ in reports for lane, items in lane_ends}
        failures = [(at, why) for _, at, why in reports if at is not None]
        return cls(ends, *min(failures, key=lambda failure: failure[0], default=(None, {})))

    @property
    def error(self) -> FeedError:
        if self.failed_at is not None:
            return ProcessError(**self.why)
        return FeedError(
            "a lane must give the same items each time it is opened, and one lane gave fewer than before",
            stage="read",
        )


class StreamBatches:
    """An iterator of the process-local batches of a stream. One thread at a time may call `next` or `close`.

    After an error or an interrupt in `next`, it can only be closed.
    """

    def __init__(self, stream: Stream, after: Cursor, states: Mapping[str, Any], watch: Progress) -> None:
        self._stream = stream
        self._watch = watch
        self._wraps = stream.plan.remainder == "wrap"
        self._epoch, self._last_epoch = after.epoch, stream.end_of_pass(after)
        # items of each lane before the next batch, from the start of the epoch in which the lanes were opened
        self._offset = after.position // stream.plan.lanes
        self._dropped = 0  # items left out since the previous batch
        self._lanes: list[Any] = []
        self._batches = self._read(states)
        self._opener = threading.current_thread()
        self._reader: threading.Thread | None = None  # feedline's thread that reads and closes this iterator
        stream.source.opened.append(self)

    def __next__(self) -> HostBatch:
        """The next batch. The value of StopIteration is the number of items left out at the end of the pass."""
        with self._stream.jax_settings.applied():
            return next(self._batches)

    def close(self) -> None:
        """End Grain's iterators."""
        try:
            self._batches.close()
            self._close_lanes()
        finally:
            with contextlib.suppress(ValueError):  # it was closed before
                self._stream.source.opened.remove(self)

    def _close_lanes(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _wait_for_abandoned(self) -> None:
        """Wait for the threads of earlier iterators that were closed during a read, for example by an interrupt.

        The iterators of a lane may share state, so only one thread at a time may read from them.
        """
        me = threading.current_thread()
        if me is not self._opener:
            self._reader = me
        # `_reader` is set first, so if a thread stops the watch and then finds no `_reader`, nothing is read here
        if self._watch.stopped():
            raise FeedError("the feed was closed", stage="read")
        for other in itertools.takewhile(lambda other: other is not self, tuple(self._stream.source.opened)):
            if other._reader not in (None, me):
                other._reader.join()

    def _read(self, states: Mapping[str, Any]) -> Generator[HostBatch, None, int]:
        """Yield the batches. Returns the number of items left out at the end of the pass."""
        self._wait_for_abandoned()
        while self._epoch != self._last_epoch:
            after = Cursor(self._epoch, self._offset)
            last_epoch = self._last_epoch if self._wraps else self._epoch + 1
            self._lanes = [
                self._stream.source.open_lane(lane, after, states.get(str(lane)), last_epoch)
                for lane in self._stream.form.part.lanes
            ]
            ends = None
            while ends is None:
                batches, ends, failure = self._read_window()
                while batches:
                    yield batches.popleft()  # this frame does not keep the batch, so its memory can be reused
                if failure is not None:
                    try:
                        raise failure
                    finally:
                        del failure  # otherwise its traceback and this frame keep each other and batches alive
            following = self._end_epoch(ends)
            self._close_lanes()
            self._epoch, self._offset, states = following, 0, {}
        return self._dropped

    def _read_window(self) -> tuple[deque[HostBatch], dict[int, int] | None, Exception | None]:
        """Read this process's part of a window, and agree with the other processes on which batches exist.

        Returns:
          The existing batches; {ended lane: number of its items} if the epoch ends after these batches, else None;
          and the error to raise after them, or None.
        """
        size, of_window = self._stream.items, self._stream.plan.settings.buffer
        # windows begin at the same batches on all processes
        left = of_window - self._offset // size % of_window
        window = range(self._offset, self._offset + left * size, size)
        place = f"{self._epoch}/{window.start % size}/{window.start // size // of_window}"
        partial_batches, failure = self._read_partial_batches(window)
        report = self._agreed(place, failure, window.start + len(partial_batches) * size)
        batches: deque[HostBatch] = deque()
        for offset, partial in itertools.zip_longest(window, partial_batches):
            exists = self._stream.exists(offset, report.ends)
            if not exists and report.failed_at is None:
                return batches, report.ends, None
            # even a failure after the last batch is raised, because the lane that failed has not reported its end
            if not exists or offset == report.failed_at or partial is None:
                return batches, None, failure or report.error
            batches.append(self._completed(partial, offset, report.ends))
            self._offset, self._dropped = offset + size, 0
        return batches, None, None

    def _read_partial_batches(self, window: range) -> tuple[list[HostBatch], Exception | None]:
        """Read this process's part of batches until a lane ends or a read fails. Returns them, and the failure."""
        found: list[HostBatch] = []
        try:
            for offset in window:
                after = Cursor(self._epoch, (offset + window.step) * self._stream.plan.lanes)
                partial = self._read_partial(after)
                if partial is None:
                    break
                found.append(partial)
                self._watch.advanced("read")
        except Exception as error:  # noqa: BLE001  reported to the other processes, and raised after these batches
            return found, error
        return found, None

    def _read_partial(self, after: Cursor) -> HostBatch | None:
        """Read the next items of this process's lanes as a batch. None if a lane has too few and is not padded."""
        clock, stream, form, first = PartClock(), self._stream, self._stream.form, self._lanes[0]
        with annotation("read"):
            taken = {lane.index: lane.take(stream.items) for lane in self._lanes}
        if stream.plan.remainder != "pad" and any(len(items) < stream.items for items in taken.values()):
            return None
        filler = [(stream.source.item, after.epoch, 0)]
        items = []
        ((rows, cuts),) = form.part.calls
        for row in rows.tolist():
            of_lane = taken[row // stream.items] or filler
            items.append(of_lane[row % stream.items % len(of_lane)])  # padding repeats items of the lane
        records, epochs, in_lane = zip(*items, strict=True)
        positions = BatchPositions(
            np.array(epochs, np.int64),
            np.array(in_lane, np.int64) * stream.plan.lanes + rows // stream.items,
            np.ones(len(items), bool),
        )
        buffers, first_item = stream.buffers.lease(), stream.source.item
        bad = _StreamPart(form, rows, cuts, buffers, 0, clock, first_item, list(records), positions).write()
        return HostBatch(
            leaves=buffers.leaves,
            after=Cursor(first.epoch, first.position) if self._wraps else after,
            lanes={str(lane.index): lane.state() for lane in self._lanes},
            rows=0,
            dropped_rows=0,
            parts=[clock.times()],
            bad=bad,
        )

    def _completed(self, partial: HostBatch, offset: int, ends: Mapping[int, int]) -> HostBatch:
        """Complete the batch after `offset` items of each lane, once the ends of all lanes are known."""
        form, items, real = self._stream.form, self._stream.items, self._stream.real(offset, ends)
        # padding repeats items, which must not be counted again
        bad = [row for row in partial.bad if row.at % items < real[row.at // items]]
        leaves = partial.leaves
        if (rows := form.part.own_rows) is not None:
            leaves = form.with_own(leaves, form.valid(rows % items < real[rows // items], bad), partial.after)
        return partial._replace(leaves=leaves, rows=int(real.sum()), dropped_rows=self._dropped, bad=bad)

    def _agreed(self, place: str, failure: Exception | None, read: int) -> Report:
        """Exchange and merge the reports on the window `place`. `read`: items of each lane before a failure."""
        mine, gather = Report({lane.index: lane.taken for lane in self._lanes if lane.ended}), self._stream.gather
        if failure is not None:
            why = {"stage": "read", "process": jax.process_index(), **as_arguments(failure)}
            mine = mine._replace(failed_at=read, why=why)
        if gather is None:
            return mine
        self._watch.advanced("agree")
        return Report.merged(gather(place, mine.to_json(), failure is not None, self._watch.stopped))

    def _end_epoch(self, ends: dict[int, int]) -> int:
        """Count the items that the epoch leaves out. Returns the epoch that follows."""
        following = self._epoch + 1
        if self._wraps:
            self._dropped += ends[0] - self._offset
            return self._last_epoch or following
        if self._offset == 0 and not any(ends.values()):
            raise self._lanes[0].empty_epoch()
        if self._offset == 0:
            lane, items = min(ends.items(), key=lambda end: end[1])
            raise FeedError(
                f'remainder "drop" drops a partial batch, and epoch {self._epoch} of lane {lane} has only {items} '
                f"items; a batch of {self._stream.plan.batch_size} needs {self._stream.items} of each lane. Use a "
                'smaller batch, or remainder="pad"',
                stage="read",
            )
        if self._stream.plan.remainder == "drop":
            self._dropped += sum(self._read_out().values()) - self._offset * self._stream.plan.lanes
        return following

    def _read_out(self) -> dict[int, int]:
        """Read the remaining items to count them. Returns {lane: number of its items in this epoch}."""
        failure: Exception | None = None
        try:
            for lane in self._lanes:
                while lane.take(1):
                    self._watch.advanced("read")
        except Exception as error:  # noqa: BLE001  raised below
            failure = error
        report = self._agreed(f"{self._epoch}/rest", failure, self._offset)
        if report.failed_at is not None:
            try:
                raise failure or report.error
            finally:
                del failure  # otherwise it forms a cycle with its traceback
        return report.ends


@dataclasses.dataclass(eq=False)
class _StreamPart(PartWriter):
    """Writes items as the rows of a batch. Positions replace row indices, which a stream does not have."""

    first_item: Any
    records: list[Any]
    positions: BatchPositions

    def _indices(self) -> Indices:
        return self.positions.position

    def _positions(self, some: slice) -> BatchPositions:
        return self.positions.part(some)

    def _read(self, some: slice, index: Indices | None) -> Indices:
        for i in range(some.start, some.stop):
            try:
                write_record(self.records[i], self.form.spec, self.buffers.read, i)
            except (TypeError, ValueError, OverflowError) as error:
                message = f"every item must have the form of the first: {error}"
                raise RowError(message, stage="read", row=int(self.positions.position[i])) from error
        return self.positions.position[some]

    def _substitute(self, i: int, index: int, failure: RowError) -> int:
        """Replace a bad item by the stream's first item."""
        self.records[i] = self.first_item
        try:
            self._write(slice(i, i + 1), None)
        except RowError as again:
            again.locate(index, int(self.positions.epoch[i]), index)
            raise
        return 0
