"""What the batches of a feed cost: the times of each stage, summed, and one by one for the latest batches.

The training thread appends one record a batch. The threads that place batches add the records up, and so does
whoever asks.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import operator
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from feedline._src.listen.devices import Look
from feedline._src.record import BatchRecord, PartTimes

_LATEST = 256
"""Batches whose times are kept one by one."""
_BATCHES_PER_GIL_SAMPLE = 4
"""Batches after which a placing thread measures how long it waits for the GIL."""
_GIL_SAMPLES = 64
_SETTLE_EVERY = 16
"""Batches after which a placing thread adds the records up."""
_MAX_RECORDS = 1 << 12
_CLAIM_TIMEOUT_S = 5.0
"""An older claim was left behind by an interrupt: adding up takes milliseconds."""
_BINS_PER_DOUBLING = 16
"""Of the histogram of waits: a percentile is exact to ±2.2 %."""
_SHORTEST_S = 1e-7
_GLANCES = 64
_MIN_GLANCES = 8
"""Fewer do not tell for what share of the time the devices are idle."""


class BatchTimes(NamedTuple):
    """The times of one delivered batch, in seconds.

    Attributes:
      taken: when the training loop got it.
      read_s, transform_s, stage_s, place_s: of the threads that made it, summed over them.
      read_cpu_s, host_cpu_s, place_cpu_s: their processor time; `host` is transform and stage.
      slot_s: for how long it waited in host memory until it might be placed.
      queued_s: for how long it then lay on the mesh until it was asked for.
      empty_s: for how long no batch was ready before it.
      wait_s: for how long the training loop waited for it.
      computed_s: for how long the devices still computed meanwhile; None: not observed.
      late_s: for how long its transfer went on after the loop had got it; None: not known.
      loop_s: the training loop's own time before it asked for this batch; None after a break.
      drained: whether all batches that were read ahead while the first step compiled were taken before it.
      parts: how each of its parts was made.
    """

    taken: float
    read_s: float
    transform_s: float
    stage_s: float
    place_s: float
    read_cpu_s: float
    host_cpu_s: float
    place_cpu_s: float
    slot_s: float
    queued_s: float
    empty_s: float
    wait_s: float
    late_s: float | None
    loop_s: float | None
    drained: bool
    computed_s: float | None = None
    parts: Sequence[PartTimes] = ()

    @property
    def put(self) -> float:
        """When it was placed."""
        return self.taken - self.queued_s

    @property
    def host_s(self) -> float:
        """Work on the host between reading and placing."""
        return self.transform_s + self.stage_s

    @property
    def cpu_s(self) -> float:
        """Processor time of all threads that made it."""
        return self.read_cpu_s + self.host_cpu_s + self.place_cpu_s


class Sums(NamedTuple):
    """Sums over all batches delivered, in seconds; the fields are those of `BatchTimes`."""

    read_s: float = 0.0
    transform_s: float = 0.0
    stage_s: float = 0.0
    place_s: float = 0.0
    read_cpu_s: float = 0.0
    host_cpu_s: float = 0.0
    place_cpu_s: float = 0.0
    slot_s: float = 0.0
    queued_s: float = 0.0
    empty_s: float = 0.0
    wait_s: float = 0.0
    loop_s: float = 0.0

    def plus(self, batch: BatchTimes) -> Sums:
        """These sums and one more batch."""
        loop_s = batch.loop_s or 0.0
        return Sums(*map(operator.add, self, (*batch[1:12], loop_s)))


class Waits:
    """A histogram of the times that the training loop waited, of constant size."""

    def __init__(self) -> None:
        self._bins: collections.Counter[int] = collections.Counter()
        self._count = 0
        self.max_s = 0.0

    def add(self, wait_s: float) -> None:
        """Count one wait."""
        wait_s = max(wait_s, _SHORTEST_S)
        self._bins[math.floor(math.log2(wait_s / _SHORTEST_S) * _BINS_PER_DOUBLING)] += 1
        self._count += 1
        self.max_s = max(self.max_s, wait_s)

    def percentile_s(self, share: float) -> float:
        """The wait that this share of the batches did not exceed, to ±2.2 %; 0 without a batch."""
        rank, below = math.ceil(share * self._count), 0
        for each in sorted(self._bins):
            below += self._bins[each]
            if below >= rank:
                return min(self.max_s, _SHORTEST_S * 2 ** ((each + 0.5) / _BINS_PER_DOUBLING))
        return 0.0


class Accounting:
    """Adds up what the batches of one feed cost.

    `told` and `interrupted` are for the training thread; the other methods may be called by any.

    Args:
      ahead: batches that may have been made before the first one is taken.
    """

    def __init__(self, ahead: int) -> None:
        # a number is the time of a break. Bounded, in case no thread adds them up
        self._records: collections.deque[BatchRecord | float] = collections.deque(maxlen=_MAX_RECORDS)
        self._claim: dict[str, tuple[int, float]] = {}  # the thread that changes what follows, and since when
        self._sums = Sums()
        self._waits = Waits()
        self._latest: collections.deque[BatchTimes] = collections.deque(maxlen=_LATEST)
        self._before: float | None = None  # when the batch before was taken; None after a break
        self._filling = ahead + 2  # batches that may still come that were made while the first steps compiled
        # of the latest transfers that were looked at: when placing began → the seconds until all arrays were ready
        self._ready_s: collections.OrderedDict[float, float] = collections.OrderedDict()
        self._looks: collections.deque[Look] = collections.deque(maxlen=_LATEST)
        self._glances: collections.deque[tuple[float, bool]] = collections.deque(maxlen=_LATEST)
        self._idle: collections.deque[bool] = collections.deque(maxlen=_GLANCES)  # in the loop's own time
        self._keep: Callable[[BatchRecord | float], None] | None = None
        self._placed = itertools.count()  # batches; atomic
        self._lock_waits_s: collections.deque[float] = collections.deque(maxlen=_GIL_SAMPLES)

    def told(self, record: BatchRecord) -> None:
        """A batch was taken."""
        self._records.append(record)

    def changed(self, ahead: int) -> None:
        """The loop goes on with other settings, with which `ahead` batches may be made ahead."""
        self._settle(0.1)
        self._filling = ahead + 2
        self.interrupted()

    def interrupted(self) -> None:
        """The loop over the batches ended, or goes on elsewhere: the time until the next `next` is not its own."""
        self._records.append(time.perf_counter())

    def placed(self) -> bool:
        """A batch was placed. Adds up the records if there are many. Returns whether it did."""
        if next(self._placed) % _BATCHES_PER_GIL_SAMPLE == 0:
            began = time.perf_counter()
            time.sleep(0)  # gives up the GIL, and takes it again
            self._lock_waits_s.append(time.perf_counter() - began)
        if len(self._records) < _SETTLE_EVERY:
            return False
        return self._settle(0.0)

    def transferred(self, began: float, ready_s: float) -> None:
        """All arrays of the batch whose placing began at `began` were ready `ready_s` seconds later."""
        self._ready_s[began] = ready_s
        while len(self._ready_s) > _LATEST:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._ready_s.popitem(last=False)

    def looked(self, look: Look) -> None:
        """What the devices do during a wait of the loop; its `idle` may be set later. Looks come in order."""
        self._looks.append(look)

    def glanced(self, at: float, idle: bool) -> None:
        """Whether the devices were idle at a random moment. Glances come in order."""
        self._glances.append((at, idle))

    def idle_share(self) -> float | None:
        """The share of the loop's own time in which the devices were idle, lately; None: not known."""
        self._settle(1.0)
        latest = self._idle.copy()
        return statistics.fmean(latest) if len(latest) >= _MIN_GLANCES else None

    def transfer_s(self) -> float | None:
        """Mean seconds from the start of placing until all arrays were ready, lately; None: not known yet."""
        latest = tuple(self._ready_s.copy().values())
        return sum(latest) / len(latest) if latest else None

    def sums(self) -> tuple[Sums, tuple[float, float, float]]:
        """Sums over all batches delivered; and of the waits the 50th and the 99th percentile and the longest."""
        self._settle(1.0)
        waits = self._waits
        return self._sums, (waits.percentile_s(0.5), waits.percentile_s(0.99), waits.max_s)

    def latest(self) -> list[BatchTimes]:
        """The latest batches, the oldest first."""
        self._settle(1.0)
        return list(self._latest)

    def keep_with(self, keep: Callable[[BatchRecord | float], None] | None) -> None:
        """From now on call `keep` with each record, in order; a number is the time of a break. None: no longer.

        Any thread may call it; `keep` is called by one thread at a time.

        Raises:
          ValueError: the records are kept already.
        """
        self._settle(1.0)  # what was delivered before
        if keep is not None and self._keep is not None:
            raise ValueError("this feed is being traced already; leave that context first")
        self._keep = keep

    def transfers(self) -> dict[float, float]:
        """Of the latest transfers: when placing began → the seconds until all arrays were ready."""
        return dict(self._ready_s.copy())

    def lock_wait_s(self) -> float:
        """How long a thread that gave up the GIL waits for it: the mean of the latest samples.

        The longest eighth is left out: on a busy machine some samples wait for a processor instead.
        """
        waits_s = sorted(self._lock_waits_s.copy())
        return statistics.fmean(waits_s[: len(waits_s) - len(waits_s) // 8] or [0.0])

    def _settle(self, timeout_s: float) -> bool:
        """Add up what was delivered. Gives up after the timeout: another thread is doing the same."""
        deadline = time.monotonic() + timeout_s
        while not self._claimed():
            if time.monotonic() >= deadline:
                return False
            time.sleep(1e-3)
        try:
            with contextlib.suppress(IndexError):  # an old claim was taken over, by a thread that does the same
                for _ in range(len(self._records)):
                    self._add(self._records.popleft())
        finally:
            self._claim.pop("claim", None)
        return True

    def _claimed(self) -> bool:
        """Whether this thread may add up. No lock: an interrupt could leave that held for ever."""
        mine = threading.get_ident(), time.monotonic()
        claim = self._claim.setdefault("claim", mine)
        if claim is not mine and (claim[0] == mine[0] or mine[1] - claim[1] > _CLAIM_TIMEOUT_S):
            self._claim["claim"] = claim = mine
        return claim is mine

    def _add(self, record: BatchRecord | float) -> None:
        keep = self._keep  # another thread may set it to None
        if keep is not None:
            keep(record)
        if isinstance(record, float):
            self._before = None
            return
        asked, taken, parts, placed, *_ = record
        put = placed.began + placed.place_s
        drained, self._filling = self._filling <= 0, self._filling - 1
        batch = BatchTimes(
            taken,
            sum(part.read_s for part in parts),
            sum(part.transform_s for part in parts),
            sum(part.stage_s for part in parts),
            placed.place_s,
            sum(part.read_cpu_s for part in parts),
            sum(part.host_cpu_s for part in parts),
            placed.place_cpu_s,
            slot_s=max(0.0, placed.began - max((part.ended for part in parts), default=placed.began)),
            queued_s=max(0.0, taken - put),
            empty_s=max(0.0, put - (asked if self._before is None else self._before)),
            wait_s=taken - asked,
            late_s=None
            if (ready_s := self._ready_s.get(placed.began)) is None
            else max(0.0, placed.began + ready_s - taken),
            loop_s=None if self._before is None else asked - self._before,
            drained=drained,
            computed_s=self._computed_s(asked, taken),
            parts=parts,
        )
        self._count_glances(asked, counts=drained)
        self._before = taken
        self._sums = self._sums.plus(batch)
        self._waits.add(batch.wait_s)
        self._latest.append(batch)

    def _count_glances(self, asked: float, *, counts: bool) -> None:
        """Keep the glances from when the batch before was taken until the loop asked for this one."""
        while self._glances and self._glances[0][0] < asked:
            at, idle = self._glances.popleft()
            if counts and self._before is not None and at >= self._before:
                self._idle.append(idle)

    def _computed_s(self, asked: float, taken: float) -> float | None:
        """For how long the devices computed while the loop waited for a batch, if anybody looked in time."""
        while self._looks and self._looks[0].asked < asked:
            self._looks.popleft()
        if not self._looks or self._looks[0].seen >= taken:
            return None
        idle = self._looks.popleft().idle
        return taken - asked if idle is None else min(idle, taken) - asked
