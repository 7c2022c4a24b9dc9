"""How the rows of a feed are reached: in any order, or one after the other as a stream. One contract for both."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from feedline._src import state as states
from feedline._src.loader.batch_reader import BatchReader
from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.host_batch import HostBatch
from feedline._src.loader.local_batches import LocalBatches
from feedline._src.loader.restarts import Restarts
from feedline._src.options import Settings
from feedline._src.order.epoch import RowOrder
from feedline._src.order.schedule import ENDLESS, Cursor
from feedline._src.prefetch.pipelines import HostIterator

if TYPE_CHECKING:
    from feedline._src.loader.worker_batches import WorkerBatches
    from feedline._src.streams.batches import StreamBatches
    from feedline._src.streams.partial_batches import StreamDefinition


class Progress(Protocol):
    """What the loader reports its progress to. It also says whether the pipeline was closed."""

    def advanced(self, stage: str) -> None: ...
    def stopped(self) -> bool: ...


class Access(Protocol):
    """Opens process-local batches after any cursor, and does the arithmetic on cursors."""

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
    def agrees_on_ends(self) -> bool:
        """Whether the processes agree on the ends of lanes while they read."""

    @property
    def order(self) -> RowOrder | None:
        """The order of the rows. None: a stream has its own."""

    def open(
        self, after: Cursor, lanes: dict[str, Any] | None, settings: Settings, watch: Progress
    ) -> LocalBatches | HostIterator[HostBatch]:
        """The process-local batches after the cursor `after`, where the iterators of a stream were at `lanes`."""

    def next_cursor(self, after: Cursor) -> Cursor:
        """Where the next batch starts, as far as that is known before it is read; `after` if the pass is over."""

    def next_pass(self, after: Cursor) -> Cursor:
        """Where the pass after that of `after` starts."""

    def steps_per_epoch(self) -> int:
        """Batches of an epoch. TypeError if that is unknown."""

    def deliveries(self) -> int:
        """How often a pass delivers a batch. TypeError if that is unknown, or endless."""

    def check_cursor(self, cursor: Cursor) -> None:
        """Raise ValueError if the batches from there on cannot be delivered."""

    def rows_of(self, after: Cursor) -> npt.NDArray[np.int64]:
        """int64[batch_size]: the row indices of the next batch after `after`, -1 where it is padded."""

    def check_position(self, position: int) -> None:
        """Raise ValueError if a feed cannot seek to this position of an epoch."""

    def source_epochs(self, cursor: Cursor) -> dict[str, float] | None:
        """Of a mixture, how many epochs of each source stand before the cursor, by name; else None."""

    def lanes_in(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """What a state holds of the iterators of a stream. ValueError if that is of other lanes."""

    def lanes_for_state(self, lanes: dict[str, Any] | None) -> dict[str, Any]:
        """The fields of a state that a stream needs, if its iterators are at `lanes`."""


@dataclasses.dataclass(frozen=True)
class RandomAccess:
    """Rows that can be read in any order: where batch k starts is arithmetic."""

    reader: BatchReader
    buffers: BatchBuffers
    restarts: Restarts
    steps_per_call: int = 1
    agrees_on_ends: ClassVar[bool] = False

    @property
    def order(self) -> RowOrder:
        """Of the rows."""
        return self.reader.order

    @property
    def batch_size(self) -> int:
        """Rows in the global batch."""
        return self.reader.schedule.batch_size

    @property
    def local_rows(self) -> int:
        """Rows of a batch that this process supplies."""
        return len(self.reader.form.rows)

    @property
    def may_use_workers(self) -> bool:
        """Whether worker processes could read the source."""
        return self.steps_per_call == 1 and self.reader.source.picklable

    def open(
        self, after: Cursor, lanes: dict[str, Any] | None, settings: Settings, watch: Progress
    ) -> LocalBatches | WorkerBatches:
        """The process-local batches after the cursor `after`: read by threads of this process, or by workers."""
        if settings.workers:
            from feedline._src.loader.worker_batches import WorkerBatches

            return WorkerBatches(self.reader, self.buffers, after, settings, self.restarts)
        # more threads than batches ahead share each batch
        parts = max(1, -(-settings.threads // settings.buffer))
        return LocalBatches(self.reader, self.buffers, after, parts, self.steps_per_call)

    def next_cursor(self, after: Cursor) -> Cursor:
        """Where the next batch starts; `after` itself if the pass is over."""
        schedule = self.reader.schedule
        return schedule.batch_at(after, 0) if schedule.batches_from(after) else after

    def next_pass(self, after: Cursor) -> Cursor:
        """Where the pass after that of `after` starts."""
        return self.reader.schedule.start_of_pass(self.reader.schedule.pass_of(after) + 1)

    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.reader.schedule.steps_per_epoch

    def deliveries(self) -> int:
        """Deliveries of a pass."""
        count = self.reader.schedule.batches_of_pass(0)
        if count == ENDLESS:
            raise TypeError("an endless feed has no length; give it epochs, or use feed.steps_per_epoch")
        return count // self.steps_per_call

    def check_cursor(self, cursor: Cursor) -> None:
        """The batches from there to the end of the pass must be a multiple of the steps per call."""
        self.source_epochs(cursor)  # refuses an epoch of a mixture that is too late
        for problem in self.reader.schedule.refused_steps(cursor, self.steps_per_call):
            raise ValueError(problem)

    def rows_of(self, after: Cursor) -> npt.NDArray[np.int64]:
        """The row indices of the next batch after `after`, -1 where padded; [steps, B] with several steps."""
        schedule = self.reader.schedule
        if not schedule.batches_from(after):  # of a "wrap" pass a few rows may be left, which no batch holds
            after = self.next_pass(after)
        self.check_cursor(after)
        offsets, rows = np.arange(schedule.batch_size), []
        for step in range(self.steps_per_call):
            start = schedule.batch_at(after, step)
            valid = schedule.positions(start, offsets).valid
            rows.append(np.where(valid, self.reader.locate(start, offsets), -1))
        return rows[0] if self.steps_per_call == 1 else np.stack(rows)

    def check_position(self, position: int) -> None:
        """At most the number of rows: there the epoch ends."""
        states.check_position(position, self.reader.schedule.rows)

    def source_epochs(self, cursor: Cursor) -> dict[str, float] | None:
        """Of a mixture, how many epochs of each source stand before the cursor, by name; else None."""
        return self.order.epochs_of(*cursor)

    def lanes_in(self, state: Mapping[str, Any]) -> None:
        """Nothing: the cursor says it all."""

    def lanes_for_state(self, lanes: dict[str, Any] | None) -> dict[str, Any]:
        """None: the cursor says it all."""
        return {"lanes": None}


@dataclasses.dataclass(frozen=True)
class StreamAccess:
    """A stream: what stands at a cursor is known only by reading up to it.

    Attributes:
      lanes: that this process reads.
      writers: of all lanes, which process saves each.
    """

    stream: StreamDefinition
    buffers: BatchBuffers
    lanes: list[str]
    writers: list[int]
    order: ClassVar[None] = None

    @property
    def batch_size(self) -> int:
        """Rows in the global batch."""
        return self.stream.batch_size

    @property
    def local_rows(self) -> int:
        """Rows of a batch that this process supplies."""
        return len(self.stream.form.rows)

    @property
    def agrees_on_ends(self) -> bool:
        """Unless each process reads every lane."""
        return self.stream.gather is not None

    def open(
        self, after: Cursor, lanes: dict[str, Any] | None, settings: Settings, watch: Progress
    ) -> StreamBatches:
        """The process-local batches that come after the cursor `after`, where the iterators were at `lanes`."""
        from feedline._src.streams.batches import StreamBatches

        return StreamBatches(self.stream, self.buffers, after, lanes, watch.advanced, watch.stopped)

    def next_cursor(self, after: Cursor) -> Cursor:
        """Where the next batch starts, as far as is known before it is read."""
        return after

    def next_pass(self, after: Cursor) -> Cursor:
        """Where the pass after that of `after` starts."""
        return Cursor(self.stream.end_of_pass(after) or after.epoch + 1, 0)

    def steps_per_epoch(self) -> int:
        """Unknown."""
        raise TypeError("a stream does not know its length before its end")

    def deliveries(self) -> int:
        """Unknown."""
        raise TypeError("a stream does not know its length before its end; bound the loop by zip(range(n), feed)")

    def rows_of(self, after: Cursor) -> npt.NDArray[np.int64]:
        """Unknown: a stream has no row indices."""
        raise TypeError("a stream has no row indices: its rows are known only by reading it")

    def check_cursor(self, cursor: Cursor) -> None:
        """Nothing: they are delivered one by one."""

    def check_position(self, position: int) -> None:
        """Only 0."""
        if position:
            raise ValueError(
                f"a stream can seek to the start of an epoch only, got position {position}; use set_state"
            )

    def source_epochs(self, cursor: Cursor) -> None:
        """Unknown: streams are mixed before feedline reads them."""

    def lanes_in(self, state: Mapping[str, Any]) -> dict[str, Any] | None:
        """The state of each lane that this process reads."""
        return states.check_lanes(state, len(self.writers), self.lanes)

    def lanes_for_state(self, lanes: dict[str, Any] | None) -> dict[str, Any]:
        """The state of each lane that this process reads, None before its first epoch; and who saves each lane."""
        return {"lanes": lanes or dict.fromkeys(self.lanes), "writers": self.writers}
