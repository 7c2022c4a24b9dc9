"""Listens to a feed: accounts, one warning if training waits, tuning, bad rows, and what processes publish."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from feedline._src.bounds import default_threads
from feedline._src.cluster.cores import own_cores
from feedline._src.errors import FeedError
from feedline._src.listen.accounting import Accounting
from feedline._src.listen.bad_rows import Quarantine
from feedline._src.listen.devices import StepWatch, TransferWatch
from feedline._src.listen.statistics import Counters, Statistics
from feedline._src.listen.window import Window, times_of
from feedline._src.options import Settings
from feedline._src.record import BatchRecord, PlaceTimes
from feedline._src.run import Stages

if TYPE_CHECKING:
    from feedline._src.listen.report import Report
    from feedline._src.listen.tuner import Tuner
    from feedline._src.listen.verdict import Circumstances, ProcessTimes, Reader

_log = logging.getLogger("feedline")
_WAITS_TOO_LONG = 0.2
"""The share of waiting of which a warning tells: XProf calls more "highly input-bound"."""
_WARN_AFTER_S = 60.0
_PUBLISH_EVERY_S = 5.0
_PUBLISHED_PER_S = 500
"""By all processes together: with thousands of them, each publishes more rarely."""


class BatchListener:
    """Keeps the accounts of an iterator of batches. A `Listener`.

    It holds no reference to a feed or a pipeline, so that reference counting frees a dropped feed.
    """

    def __init__(self, ahead: int) -> None:
        self.accounting = Accounting(ahead)
        self._steps = StepWatch(self.accounting.looked, self.accounting.glanced)
        self._transfers = TransferWatch(self.accounting.transferred)
        self._failed = False
        self.waits = self._steps.waits
        self.interrupted = self.accounting.interrupted

    @property
    def proposal(self) -> Settings | None:
        """None: the settings stay."""
        return None

    def placed(self, times: PlaceTimes, arrays: Sequence[Any]) -> None:
        """A batch was placed. Now and then, looks at the accounts."""
        try:
            if all(array.is_ready() for array in arrays):
                self.accounting.transferred(times.began, times.place_s)
            else:
                self._transfers(arrays, times.began)
            self._steps.placed(arrays)
            if self.accounting.placed():
                self._judge()
        except Exception:  # noqa: BLE001  a fault in what only listens must not end training
            if not self._failed:
                self._failed = True
                _log.exception("feedline could not judge how its feed works")

    def told(self, record: BatchRecord) -> None:
        """A batch is about to be delivered."""
        self.accounting.told(record)

    def _judge(self) -> None:
        """Some batches were added up."""


class FeedListener(BatchListener):
    """All that follows from the accounts of one feed.

    Attributes:
      tuner: finds settings; None: all of them are given.
    """

    def __init__(self, stages: Stages, *, tunes: bool = True) -> None:
        super().__init__(stages.ahead)
        self._stages = stages
        process, rows = jax.process_index(), stages.fingerprint["rows"]
        self._quarantine = Quarantine(stages.reading, stages.access.local_rows, process, rows)
        # (time, seconds waited until then) at some moments of the last minute
        self._past: collections.deque[tuple[float, float]] = collections.deque()
        self._warned = False
        self._judging = threading.Lock()
        self._waited_for_stores_s = (counted_of_stores() or {"wait_s": 0.0})["wait_s"]  # before this feed
        self._published_at = time.monotonic()
        self.tuner = _tuner(stages) if tunes else None

    @property
    def proposal(self) -> Settings | None:
        """What the tuner proposes."""
        return None if self.tuner is None else self.tuner.proposal

    def told(self, record: BatchRecord) -> None:
        """A batch is about to be delivered. RowError if its bad rows exceed the budget."""
        if record.bad:
            self._quarantine.enter(record.bad, batches=record.batches)
        self.accounting.told(record)

    def _judge(self) -> None:
        self._warn_if_waiting()
        self._publish()
        if self.tuner is not None:
            self.tuner.look(self.accounting, self._circumstances)

    def changed(self, stages: Stages) -> None:
        """The loop goes on with the settings of `stages`."""
        self._stages = stages
        self._quarantine.rows = stages.access.local_rows
        self.accounting.changed(stages.ahead)
        if self.tuner is not None:
            self.tuner.changed()

    def statistics(self, counted: Counters, ready: int, steps_per_call: int) -> Statistics:
        """A snapshot. `counted`: what `next` counted itself; `ready`: batches that wait to be delivered."""
        stages, staging = self._stages, self._stages.access.buffers.staging
        return Statistics(
            **counted._asdict(),
            **times_of(self.accounting, self._window()),
            placed_bytes=counted.batches * stages.placement.local_bytes // steps_per_call,
            ready=ready,
            threads=stages.settings.threads,
            workers=stages.settings.workers,
            restarts=stages.access.restarted,
            slabs=staging.mapped,
            host_bytes=staging.mapped_bytes,
            stores=counted_of_stores(),
        )

    def report(self) -> Report | None:
        """What limits training; None if too few batches were delivered."""
        from feedline._src.listen.verdict import judge

        window = self._window()
        tuning = () if self.tuner is None else tuple(self.tuner.history)
        return None if window is None else judge(window, self._circumstances(), self._processes(window), tuning)

    def _window(self) -> Window | None:
        """The latest batches; if there are enough of them, those since the settings changed."""
        latest = self.accounting.latest()
        idle_share = self.accounting.idle_share()
        since = None if self.tuner is None else self.tuner.window(latest, idle_share)
        return since or Window.of(latest, idle_share)

    def _circumstances(self) -> Circumstances:
        from feedline._src.listen.verdict import Circumstances

        stages, settings = self._stages, self._stages.settings
        reader: Reader = "workers" if settings.workers else "threads"
        if not settings.prefetch:
            reader = "caller"
        elif stages.access.owners:
            reader = "stream"
        return Circumstances(
            reader=reader,
            **settings._asdict(),
            cores=own_cores(),
            lock_wait_s=self.accounting.lock_wait_s(),
            may_use_workers=stages.access.may_use_workers,
            process=jax.process_index(),
            default_threads=default_threads(),
            searching=self.tuner is not None and not self.tuner.settled,
            store_wait=self._store_wait(),
            found=frozenset() if self.tuner is None or stages.bounds is None else stages.bounds.tunable,
        )

    def _store_wait(self) -> float:
        """The share of the time of reading in which threads waited for a store; 0 for rows that are in none."""
        access, stores = self._stages.access, counted_of_stores()
        if stores is None or not access.tells_source:
            return 0.0
        waited_s = stores["wait_s"] - self._waited_for_stores_s  # by other feeds of this process, too
        return min(1.0, waited_s / max(1e-9, self.accounting.sums()[0].read_s))

    def _warn_if_waiting(self) -> None:
        """Log the verdict, once, if the loop waited for more than a fifth of the last minute."""
        # a thread that comes meanwhile leaves it to the one inside; nobody waits, so an interrupt does no harm
        if self._warned or not self._judging.acquire(blocking=False):
            return
        try:
            self._warn_if_it_waits_too_long()
        finally:
            self._judging.release()

    def _warn_if_it_waits_too_long(self) -> None:
        now, (sums, _) = time.monotonic(), self.accounting.sums()
        self._past.append((now, sums.wait_s))
        while len(self._past) > 1 and now - self._past[1][0] >= _WARN_AFTER_S:
            self._past.popleft()
        began, wait_s = self._past[0]
        if now - began >= _WARN_AFTER_S and sums.wait_s - wait_s > _WAITS_TOO_LONG * (now - began):
            report = self.report()
            if report is not None and report.bound not in ("compute", "loop"):
                self._warned = True
                _log.warning("%s; advice: %s. feed.report() tells more", report.verdict, report.advice)

    def _publish(self) -> None:
        """Tell the other processes, every few seconds, how long the stages of this one take."""
        latest, now = self._stages.latest_values, time.monotonic()
        if latest is None or now - self._published_at < _publish_every_s(jax.process_count()):
            return
        self._published_at = now
        window = self._window()
        if window is not None:
            with contextlib.suppress(FeedError):  # process 0 is gone: other calls report that
                latest.publish(json.dumps(dataclasses.asdict(self._own_times(window))))

    def _processes(self, window: Window) -> list[ProcessTimes]:
        """The latest times of all processes; of this one as they are now. Empty if it is the only one."""
        latest = self._stages.latest_values
        if latest is None:
            return []
        from feedline._src.listen.verdict import ProcessTimes

        found = {}
        with contextlib.suppress(FeedError):
            found = {process: ProcessTimes(**json.loads(text)) for process, text in latest.read().items()}
        own = self._own_times(window)
        return [*({**found, own.process: own}).values()]

    def _own_times(self, window: Window) -> ProcessTimes:
        from feedline._src.listen.verdict import ProcessTimes

        how = self._circumstances()
        return ProcessTimes(
            how.process,
            window.mean("read_s"),
            window.mean("host_s"),
            window.mean("place_s"),
            window.wait_s,
            window.loop_s,
            how.readers,
        )


def _publish_every_s(processes: int) -> float:
    return max(_PUBLISH_EVERY_S, processes / _PUBLISHED_PER_S)


def _tuner(stages: Stages) -> Tuner | None:
    """What finds the settings that are "auto"; None if none is."""
    if stages.bounds is None:
        return None
    from feedline._src.listen.tuner import Tuner

    return Tuner(stages.bounds, stages.settings)


def counted_of_stores() -> dict[str, float] | None:
    """What this process counted of requests to stores; None: it read none."""
    fetcher = sys.modules.get("feedline._src.files.fetcher")  # which is imported with the first store
    return None if fetcher is None else fetcher.counted()
