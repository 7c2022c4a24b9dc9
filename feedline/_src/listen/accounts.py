"""Adds up what the batches of a feed cost, and keeps the times of the latest batches, by which the feed is judged.

The training thread only appends one record per batch. Threads that place batches, and threads that read the sums,
add up the records.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
import math
import operator
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from feedline._src.listen.devices import Glance, StepWatch, TransferWatch
from feedline._src.record import BatchRecord, PlaceTimes

_log = logging.getLogger("feedline")
_LATEST = 256  # batches whose times are kept one by one
_ADD_UP_EVERY = 16  # when this many records wait, a thread that places batches adds them up
_MAX_RECORDS = 1 << 12  # the most records that wait to be added up; beyond that, the oldest are dropped
_SAMPLES, _MIN_GLANCES = 64, 4  # the latest 64 GIL waits and `Glance`s are kept; a share needs 4 glances
_PAUSE_FACTOR, _BATCHES_PER_PAUSE = 20, 50  # a pause: a `loop_s` over 20 × the median, in at most 1 of 50 batches
Entry = BatchRecord | float
"""The record of a batch; or a break: the time when the loop ended or the feed moved."""


class BatchTimes(NamedTuple):
    """The times of one delivered batch, in seconds. The fields before `taken` are also summed over all batches."""

    read_s: float  # these four: summed over the threads that made the batch
    transform_s: float
    stage_s: float
    place_s: float
    read_cpu_s: float  # these three: processor time; `host` is transform plus stage
    host_cpu_s: float
    place_cpu_s: float
    wait_s: float  # how long the training loop waited for this batch
    loop_s: float  # the loop's own time before it asked for this batch; 0 after a break
    taken: float  # when the training loop got the batch
    late_s: float | None  # how long the batch's transfer continued after `taken`; None: not known

    @property
    def host_s(self) -> float:
        return self.transform_s + self.stage_s

    @property
    def cpu_s(self) -> float:
        """Processor time of all threads that made the batch."""
        return self.read_cpu_s + self.host_cpu_s + self.place_cpu_s


_SUMMED = BatchTimes._fields[: BatchTimes._fields.index("taken")]


class Accounts:
    """What the batches of an iterator cost. Accounts hold no reference to a feed or a pipeline.

    The training thread calls `delivered` and `interrupted`, which only append. Any thread may call the other
    methods. `ahead`: how many batches may be ready before the first one is taken. The sums include these batches
    and two more that are made while the step compiles. But the feed is not judged by them, because their waits do
    not show its speed.
    """

    def __init__(self, ahead: int) -> None:
        self._records: collections.deque[Entry] = collections.deque(maxlen=_MAX_RECORDS)
        self._adding = threading.RLock()  # reentrant: a signal handler may add up records, too
        self._sums = (0.0,) * len(_SUMMED)
        self._max_wait_s = 0.0
        self._latest: collections.deque[BatchTimes] = collections.deque(maxlen=_LATEST)
        self._before: float | None = None  # when the previous batch was taken; None after a break
        self._filling = ahead + 2  # how many of the next batches are not judged
        self._restarted_at = -math.inf
        # for each glance in the loop's own time: (whether the devices were idle, `loop_s` of the batch)
        self._idle: collections.deque[tuple[bool, float]] = collections.deque(maxlen=_SAMPLES)
        # for each glance in `next`: whether the devices computed
        self._computing: collections.deque[bool] = collections.deque(maxlen=_SAMPLES)
        self._recorder: Callable[[Entry], None] | None = None
        self._transfers: collections.deque[tuple[float, float]] = collections.deque(maxlen=_LATEST)
        self._glances: collections.deque[Glance] = collections.deque(maxlen=_LATEST)
        self._gil_waits_s: collections.deque[float] = collections.deque(maxlen=_SAMPLES)
        self._watch_step = StepWatch(self._glances.append)  # no method of `self`, to avoid a reference cycle
        self._watch_transfer = TransferWatch(self._transfers.append)
        self._failed = False

    def delivered(self, record: BatchRecord) -> None:
        """Record a batch that is about to be delivered."""
        self._records.append(record)

    def interrupted(self) -> None:
        """Record that the loop ended or the feed moved, so the next `loop_s` is 0."""
        self._records.append(time.perf_counter())

    def restarted(self, ahead: int) -> None:
        """Record that the feed continues with other settings. `ahead`: as in `Accounts`, with these settings."""
        self._add_up()
        self._filling = ahead + 2
        self._restarted_at = time.perf_counter()
        self.interrupted()

    def placed(self, times: PlaceTimes, arrays: Sequence[Any]) -> None:
        """Record that a batch was placed. If at least 16 records wait, add them up and judge the feed."""
        try:
            if all(array.is_ready() for array in arrays):
                self._transfers.append((times.began, times.place_s))
            else:
                self._watch_transfer(arrays, times.began)
            self._watch_step.placed(arrays)
            if len(self._records) >= _ADD_UP_EVERY:
                self._add_up(timeout_s=0)
                self._judge()
        except Exception:  # noqa: BLE001  a fault in a listener must not end training
            if not self._failed:
                self._failed = True
                _log.exception("feedline could not judge how its feed works")

    def _judge(self) -> None:
        """Hook for subclasses: a thread that places batches calls it after it has added up records."""

    def gil_wait_s(self) -> float:
        """How long a thread that released the GIL waits to get it back: the median of the latest samples."""
        return statistics.median(self._gil_waits_s.copy() or [0.0])

    def transfers(self) -> dict[float, float]:
        """The latest transfers: {time at which placing began: seconds until all arrays were ready}."""
        return dict(self._transfers.copy())

    def sums(self) -> dict[str, float]:
        """The sums over all batches, by field of `BatchTimes`."""
        self._add_up()
        return dict(zip(_SUMMED, self._sums, strict=True))

    def times(self, window: Window | None) -> dict[str, Any]:
        """The times of `Statistics`, by field, with the `au` and the `wait_share` of `window`."""
        sums, transfers = self.sums(), self.transfers()
        waits = sorted(batch.wait_s for batch in self._latest.copy()) or [0.0]
        return {
            **sums,
            "wait_p50_s": statistics.median_low(waits),
            "wait_p99_s": waits[math.ceil(0.99 * len(waits)) - 1],
            "wait_max_s": self._max_wait_s,
            "transfer_s": statistics.fmean(transfers.values()) if transfers else None,
            "au": window and window.au,
            "wait_share": window and window.wait_share,
        }

    def window(self, *, current: bool = False) -> Window | None:
        """The latest batches, by which the feed is judged; None if no two were taken without a break.

        The window contains the batches since the last `restarted`. If no two of them were taken without a break,
        it also contains earlier batches, unless `current` is true. A rare pause, such as an evaluation, counts as
        a median time. Time in `next` while the devices still computed counts as the loop's own.
        """
        self._add_up()
        latest: Sequence[BatchTimes] = self._latest.copy()
        since = [batch for batch in latest if batch.taken > self._restarted_at]
        if current or any(batch.loop_s for batch in since):
            latest = since
        if not any(batch.loop_s for batch in latest):
            return None
        longest_s = _longest_s(latest)
        usual_s = longest_s / _PAUSE_FACTOR
        loops_s = [usual_s if batch.loop_s > longest_s else batch.loop_s for batch in latest]
        idle_share = _share([idle for idle, loop_s in self._idle.copy() if loop_s <= longest_s])
        computing_share = _share(self._computing.copy()) or 0.0
        batches = []
        for batch, loop_s in zip(latest, loops_s, strict=True):
            computing_s = computing_share * batch.wait_s
            batches.append(batch._replace(wait_s=batch.wait_s - computing_s, loop_s=loop_s + computing_s))
        return Window(batches, None if idle_share is None else idle_share * statistics.fmean(loops_s))

    def record_with(self, recorder: Callable[[Entry], None] | None) -> None:
        """From now on, call `recorder` with each entry, in order, on one thread at a time. None: stop recording.

        ValueError: there is a recorder already.
        """
        self._add_up()  # the records so far go to the previous recorder, if there is one
        if recorder is not None and self._recorder is not None:
            raise ValueError("this feed is being traced already; leave that context first")
        self._recorder = recorder

    def _add_up(self, timeout_s: float = 1.0) -> None:
        """Add up the waiting records, unless another thread holds the lock for longer than `timeout_s`.

        After an interrupt, the training thread may hold the lock for ever. Because of the timeout, no other thread
        hangs. If a signal handler calls this method while it runs, each record is still added up once.
        """
        if self._adding.acquire(timeout=timeout_s):
            try:
                transfers = self.transfers()
                with contextlib.suppress(IndexError):
                    for _ in range(len(self._records)):
                        self._add(self._records.popleft(), transfers)
            finally:
                self._adding.release()

    def _add(self, entry: Entry, transfers: Mapping[float, float]) -> None:
        if (recorder := self._recorder) is not None:  # read once, since another thread may end a trace
            recorder(entry)
        if isinstance(entry, float):
            self._before = None
            return
        before, self._before = self._before, entry.taken
        parts, placed = entry.parts, entry.placed
        ready_s = transfers.get(placed.began)
        batch = BatchTimes(
            read_s=sum(part.read_s for part in parts),
            transform_s=sum(part.transform_s for part in parts),
            stage_s=sum(part.stage_s for part in parts),
            place_s=placed.place_s,
            read_cpu_s=sum(part.read_cpu_s for part in parts),
            host_cpu_s=sum(part.host_cpu_s for part in parts),
            place_cpu_s=placed.place_cpu_s,
            wait_s=entry.taken - entry.asked,
            loop_s=0.0 if before is None else entry.asked - before,
            taken=entry.taken,
            late_s=None if ready_s is None else max(0.0, placed.began + ready_s - entry.taken),
        )
        self._sums = tuple(map(operator.add, self._sums, batch[: len(_SUMMED)]))
        self._max_wait_s = max(self._max_wait_s, batch.wait_s)
        judged = self._filling <= 0
        self._filling -= 1
        if judged:
            self._latest.append(batch)
        while self._glances and self._glances[0].at < entry.taken:
            glance = self._glances.popleft()
            self._gil_waits_s.append(glance.gil_wait_s)
            if judged and glance.at >= entry.asked:
                self._computing.append(glance.computes)
            elif judged and before is not None and glance.at >= before:
                self._idle.append((glance.idle, batch.loop_s))


@dataclasses.dataclass(frozen=True)
class Window:
    """Batches that the training loop took one after the other. Names with `_s` are means per batch, in seconds.

    Attributes:
      batches: the oldest first; at least one.
      idle_s: the part of the loop's own time in which the devices computed nothing; None: not known.
    """

    batches: Sequence[BatchTimes]
    idle_s: float | None = None

    def mean(self, field: str) -> float:
        """The mean of a field of `BatchTimes`."""
        return statistics.fmean(getattr(batch, field) for batch in self.batches)

    @functools.cached_property
    def loop_s(self) -> float:
        """The training loop's own time."""
        return self.mean("loop_s")

    @functools.cached_property
    def wait_s(self) -> float:
        """How long the training loop waits for a batch."""
        return self.mean("wait_s")

    @functools.cached_property
    def late_s(self) -> float:
        """How long the transfer of a batch continued after the loop had got the batch; 0 if not known."""
        return statistics.fmean([batch.late_s for batch in self.batches if batch.late_s is not None] or [0.0])

    @property
    def ended(self) -> float:
        """When the loop got the latest batch."""
        return self.batches[-1].taken

    @property
    def period_s(self) -> float:
        """The time of a step of the training loop."""
        return self.loop_s + self.wait_s

    @property
    def wait_share(self) -> float:
        """Share of the time in which the loop waited for a batch, or a step waited for its batch's transfer."""
        return min(1.0, (self.wait_s + self.late_s) / self.period_s) if self.period_s else 0.0

    @property
    def au(self) -> float:
        """Accelerator utilisation, 0 to 1. An `idle_s` that is not known counts as 0."""
        return max(0.0, 1 - self.wait_share - (self.idle_s or 0.0) / self.period_s) if self.period_s else 1.0


def _share(samples: Collection[bool]) -> float | None:
    return statistics.fmean(samples) if len(samples) >= _MIN_GLANCES else None


def _longest_s(batches: Sequence[BatchTimes]) -> float:
    """The limit of the loop's own time, above which a step is a pause; infinite if long times are frequent."""
    times = [batch.loop_s for batch in batches if batch.loop_s]
    longest_s = _PAUSE_FACTOR * statistics.median(times or [0.0])
    pauses = sum(time_s > longest_s for time_s in times)
    # frequent long times are no pauses: they occur in a loop that fetches the loss only every tenth step
    return longest_s if pauses <= max(1, len(batches) // _BATCHES_PER_PAUSE) else math.inf
