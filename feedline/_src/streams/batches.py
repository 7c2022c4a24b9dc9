"""An iterator of the process-local batches of a stream, over its epochs.

Batch k holds items k·B/L … (k+1)·B/L − 1 of each of the L lanes, so that it is the same on any
topology. A process reads the lanes that fill a row it supplies. It learns from the other processes where the
lanes end that it does not read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from feedline._src.errors import FeedError, ProcessError, as_arguments
from feedline._src.loader.buffers import BatchBuffers
from feedline._src.loader.host_batch import HostBatch
from feedline._src.order.schedule import Cursor
from feedline._src.streams.ends import WindowReport
from feedline._src.streams.lane import Lane
from feedline._src.streams.partial_batches import StreamDefinition, completed, read_partial_batch

_CHANGED = "a lane must give the same items each time that it is made, and one gave fewer than before"


class StreamBatches:
    """An iterator of the process-local batches of a stream. Called and closed by one thread at a time.

    Args:
      stream: determines the batches.
      buffers: the memory in which they are built.
      after: the cursor before the first batch; its position counts the items of all lanes together.
      states: the states of the lanes' iterators there; None: the beginning of that epoch.
      advanced: called with the current stage: "read", or "agree" during a wait for other processes.
      stopped: whether to give up such a wait.
    """

    def __init__(
        self,
        stream: StreamDefinition,
        buffers: BatchBuffers,
        after: Cursor,
        states: Mapping[str, Any] | None,
        advanced: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._stream = stream
        self._share = stream.share
        self._buffers = buffers
        self._advanced = advanced
        self._stopped = stopped
        self._last_epoch = stream.end_of_pass(after)
        # items of each lane before the next batch to be read, since the epoch in which the lanes were opened
        self._offset = after.position // stream.lanes.count
        self._epoch = after.epoch
        with stream.settings.applied():
            self._lanes = self._opened(states or {})
        self._ready: collections.deque[HostBatch] = collections.deque()
        self._over: dict[int, int] | None = None  # the lane ends of the epoch, once it has no further batch
        self._failure: Exception | None = None  # raised after the batches that are ready
        self._dropped = 0  # items left out since the previous batch

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of items that the end of the pass left out."""
        with self._stream.settings.applied():
            return self._next()

    def _next(self) -> HostBatch:
        while not self._ready:
            failure, self._failure = self._failure, None
            if failure is not None:
                try:
                    raise failure
                finally:
                    del failure  # as in _read_window
            if self._over is not None:
                self._end_epoch(self._over)
            if self._epoch == self._last_epoch:
                raise StopIteration(self._dropped)
            self._read_window()
        return self._ready.popleft()

    def close(self) -> None:
        """End Grain's iterators."""
        self._ready.clear()
        for lane in self._lanes:
            lane.close()

    def _opened(self, states: Mapping[str, Any]) -> list[Lane]:
        """This process's lanes, from the current epoch and offset on."""
        after = Cursor(self._epoch, self._offset)
        last_epoch = self._last_epoch if self._stream.remainder == "wrap" else self._epoch + 1
        return [
            Lane(self._stream.lanes, lane, after, states.get(str(lane)), last_epoch)
            for lane in self._stream.local_lanes
        ]

    def _window(self) -> range:
        """The offsets of the remaining batches of this window. The windows are the same on all processes."""
        size = self._share.items
        left = self._stream.window - self._offset // size % self._stream.window
        return range(self._offset, self._offset + left * size, size)

    def _read_window(self) -> None:
        """Read this process's part of a window, and agree with the others on which of its batches exist."""
        window = self._window()
        place = f"{self._epoch}/{window.start % window.step}/{window.start // window.step // self._stream.window}"
        partial_batches, failure = self._read_partial_batches(window)
        report = self._agreed(place, failure, window.start + len(partial_batches) * window.step)
        for offset, partial in itertools.zip_longest(window, partial_batches):
            exists = self._share.exists(offset, report.ends)
            if not exists and report.failed_at is None:
                self._over = report.ends
                break
            # a failure after the last batch counts as well: the lane that failed has not reported its end
            if not exists or offset == report.failed_at or partial is None:
                self._failure = failure or _failure_of(report)
                break
            self._ready.append(completed(self._stream, partial, offset, report.ends, self._dropped))
            self._offset, self._dropped = offset + window.step, 0
        del failure  # else its traceback and this frame would keep each other, and the partial batches

    def _read_partial_batches(self, window: range) -> tuple[list[HostBatch], Exception | None]:
        """The window's partial batches up to the end of a lane or a failure, and that failure."""
        partial_batches: list[HostBatch] = []
        try:
            for offset in window:
                after = Cursor(self._epoch, (offset + window.step) * self._share.lanes)
                partial = read_partial_batch(self._stream, self._buffers, self._lanes, after)
                if partial is None:
                    break
                partial_batches.append(partial)
                self._advanced("read")
        except Exception as error:
            if self._stream.gather is None:
                raise
            return partial_batches, error  # reported to the other processes
        return partial_batches, None

    def _agreed(self, place: str, failure: Exception | None, read: int) -> WindowReport:
        """The merged report of all processes on `place`. This process has read `read` items of each lane."""
        mine = WindowReport({lane.index: lane.taken for lane in self._lanes if lane.ended})
        gather = self._stream.gather
        if gather is None:
            return mine
        if failure is not None:
            why = {"stage": "read", "process": jax.process_index(), **as_arguments(failure)}
            mine = dataclasses.replace(mine, failed_at=read, why=why)
        self._advanced("agree")
        return WindowReport.merged(gather(place, mine.to_json(), failure is not None, self._stopped))

    def _end_epoch(self, ends: dict[int, int]) -> None:
        """Count the items that the epoch leaves out, and begin the next one."""
        following = self._epoch + 1
        if self._stream.remainder == "wrap":
            self._dropped += ends[0] - self._offset
            following = self._last_epoch or following
        elif self._offset == 0:
            raise FeedError(self._why_no_batch(ends), stage="read")
        elif self._stream.remainder == "drop":
            self._dropped += sum(self._read_out().values()) - self._offset * self._share.lanes
        self.close()
        self._epoch, self._offset, self._over = following, 0, None
        self._lanes = self._opened({})

    def _why_no_batch(self, ends: dict[int, int]) -> str:
        if not any(ends.values()):
            return f"every epoch of a stream must have items, and epoch {self._epoch} has none"
        lane = min(ends, key=lambda lane: ends[lane])
        whose = "of the stream" if self._share.lanes == 1 else f"of lane {lane}"
        of_each = "" if self._share.lanes == 1 else f", {self._share.items} of each lane"
        return (
            f'remainder "drop" drops a partial batch, and epoch {self._epoch} {whose} has only {ends[lane]} items '
            f'for batches of {self._stream.batch_size}{of_each}; use a smaller batch, or remainder="pad"'
        )

    def _read_out(self) -> dict[int, int]:
        """The number of items of each lane in this epoch. Reads the remaining items to count them."""
        failure: Exception | None = None
        try:
            for lane in self._lanes:
                while lane.take(1):
                    self._advanced("read")
        except Exception as error:
            if self._stream.gather is None:
                raise
            failure = error
        report = self._agreed(f"{self._epoch}/rest", failure, self._offset)
        if report.failed_at is not None:
            raise failure or _failure_of(report)
        return report.ends


def _failure_of(report: WindowReport) -> FeedError:
    """The error to raise where this process had no failure of its own."""
    return FeedError(_CHANGED, stage="read") if report.failed_at is None else ProcessError(**report.why)
