"""Batches of lanes: rows that can only be had one after the other, with Grain's own state.

Batch k holds items k·B/L … (k+1)·B/L − 1 of each of the L lanes, so that it is the same on any
topology. A process reads the lanes of which it owns a row. If there are lanes that it does not read,
it learns from the others where they end.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from feedline.errors import FeedError, ProcessError, as_arguments
from feedline.loader.buffers import BatchBuffers
from feedline.loader.loaded import HostBatch
from feedline.order.schedule import Cursor
from feedline.streams import drafts as drafting
from feedline.streams.drafts import StreamRecipe
from feedline.streams.ends import Told
from feedline.streams.lane import Lane

_CHANGED = "a lane must give the same items each time that it is made, and one gave fewer than before"


class StreamBatches:
    """An iterator of the process-local batches of a stream. Called and closed by one thread at a time.

    Args:
      recipe: what a batch holds.
      buffers: where it is built.
      after: the epoch to begin in, and how many items of its lanes came before.
      states: of the lanes there; None: the beginning of that epoch.
      advanced: called with what happens now: "read", or "agree" while other processes are waited for.
      stopped: whether to give up such a wait.
    """

    def __init__(
        self,
        recipe: StreamRecipe,
        buffers: BatchBuffers,
        after: Cursor,
        states: Mapping[str, Any] | None,
        advanced: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._recipe = recipe
        self._share = recipe.share
        self._buffers = buffers
        self._advanced = advanced
        self._stopped = stopped
        self._last_epoch = recipe.end_of_pass(after)
        # items of each lane that came before the next batch to be read, in the epoch where its lanes began
        self._offset = after.position // recipe.lanes.count
        self._epoch = after.epoch
        with recipe.settings.stated():
            self._lanes = self._opened(states or {})
        self._ready: collections.deque[HostBatch] = collections.deque()
        self._over: dict[int, int] | None = None  # the ends of the epoch, once no further batch of it exists
        self._failure: Exception | None = None  # comes after the batches that are ready
        self._dropped = 0  # items left out since the batch before

    def __next__(self) -> HostBatch:
        """The next batch. StopIteration carries the number of items that the end of the pass left out."""
        with self._recipe.settings.stated():
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
        """This process's lanes from here on."""
        after = Cursor(self._epoch, self._offset)
        last_epoch = self._last_epoch if self._recipe.remainder == "wrap" else self._epoch + 1
        return [
            Lane(self._recipe.lanes, lane, after, states.get(str(lane)), last_epoch)
            for lane in self._recipe.local_lanes
        ]

    def _window(self) -> range:
        """The offsets of the batches that are left of this window: all processes cut windows alike."""
        size = self._share.items
        left = self._recipe.window - self._offset // size % self._recipe.window
        return range(self._offset, self._offset + left * size, size)

    def _read_window(self) -> None:
        """Read this process's part of a window, and learn from the others how much of it there is."""
        window = self._window()
        place = f"{self._epoch}/{window.start % window.step}/{window.start // window.step // self._recipe.window}"
        drafts, failure = self._drafts(window)
        told = self._agreed(place, failure, window.start + len(drafts) * window.step)
        for offset, draft in itertools.zip_longest(window, drafts):
            exists = self._share.exists(offset, told.ends)
            if not exists and told.failed_at is None:
                self._over = told.ends
                break
            # a failure beyond the end counts as well: where that lane ends is not known yet
            if not exists or offset == told.failed_at or draft is None:
                self._failure = failure or _failure_of(told)
                break
            self._ready.append(drafting.whole(self._recipe, draft, offset, told.ends, self._dropped))
            self._offset, self._dropped = offset + window.step, 0
        del failure  # else its traceback and this frame would keep each other, and the drafts

    def _drafts(self, window: range) -> tuple[list[HostBatch], Exception | None]:
        """This process's part of the window's batches up to the end of a lane or a failure, and that failure."""
        drafts: list[HostBatch] = []
        try:
            for offset in window:
                after = Cursor(self._epoch, (offset + window.step) * self._share.lanes)
                draft = drafting.draft(self._recipe, self._buffers, self._lanes, after)
                if draft is None:
                    break
                drafts.append(draft)
                self._advanced("read")
        except Exception as error:
            if self._recipe.gather is None:
                raise
            return drafts, error  # the others are told
        return drafts, None

    def _agreed(self, place: str, failure: Exception | None, read: int) -> Told:
        """What all processes say of a place; this one has `read` so many items of each lane, and failed or not."""
        mine = Told({lane.index: lane.taken for lane in self._lanes if lane.ended})
        gather = self._recipe.gather
        if gather is None:
            return mine
        if failure is not None:
            why = {"stage": "read", "process": jax.process_index(), **as_arguments(failure)}
            mine = dataclasses.replace(mine, failed_at=read, why=why)
        self._advanced("agree")
        return Told.joined(gather(place, mine.plain(), failure is not None, self._stopped))

    def _end_epoch(self, ends: dict[int, int]) -> None:
        """Count what the epoch leaves out, and begin the next one."""
        following = self._epoch + 1
        if self._recipe.remainder == "wrap":
            self._dropped += ends[0] - self._offset
            following = self._last_epoch or following
        elif self._offset == 0:
            raise FeedError(self._why_no_batch(ends), stage="read")
        elif self._recipe.remainder == "drop":
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
            f'for batches of {self._recipe.batch_size}{of_each}; use a smaller batch, or remainder="pad"'
        )

    def _read_out(self) -> dict[int, int]:
        """How many items each lane has in this epoch: what is left is read to be counted."""
        failure: Exception | None = None
        try:
            for lane in self._lanes:
                while lane.take(1):
                    self._advanced("read")
        except Exception as error:
            if self._recipe.gather is None:
                raise
            failure = error
        told = self._agreed(f"{self._epoch}/rest", failure, self._offset)
        if told.failed_at is not None:
            raise failure or _failure_of(told)
        return told.ends


def _failure_of(told: Told) -> FeedError:
    """Why there is no further batch, where this process has none of its own to say."""
    return FeedError(_CHANGED, stage="read") if told.failed_at is None else ProcessError(**told.why)
