"""Watches a running feed: keeps its accounts, warns once if training waits, and compares processes."""

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
from typing import TYPE_CHECKING

import jax

from feedline._src.cluster.cores import own_cores
from feedline._src.errors import FeedError
from feedline._src.observe.accounting import Accounting
from feedline._src.observe.devices import StepWatch
from feedline._src.observe.times import PlaceTimes
from feedline._src.observe.window import Window, times_of
from feedline._src.pipeline.access import RandomAccess, StreamAccess
from feedline._src.pipeline.forms import default_threads
from feedline._src.pipeline.stages import Stages
from feedline._src.statistics import Counters, Statistics

if TYPE_CHECKING:
    from feedline._src.observe.report import Report
    from feedline._src.observe.verdict import Circumstances, ProcessTimes, Reader
    from feedline._src.pipeline.tuner import Tuner

_log = logging.getLogger("feedline")
_WAITS_TOO_LONG = 0.2
"""The share of waiting of which a warning tells: XProf calls more "highly input-bound"."""
_WARN_AFTER_S = 60.0
_PUBLISH_EVERY_S = 5.0
_PUBLISHED_PER_S = 500
"""By all processes together: with thousands of them, each publishes more rarely."""


class Observing:
    """The accounts of one feed, and what follows from them. `placed` is called by the threads that place batches.

    It refers to no pipeline and to no feed, so that reference counting frees a dropped feed.

    Attributes:
      tuner: finds settings; None: all of them are given.
    """

    def __init__(self, stages: Stages, *, tunes: bool = True) -> None:
        self.accounting = Accounting(stages.ahead)
        self._steps = StepWatch(self.accounting.looked, self.accounting.glanced)
        self._stages = stages
        # (time, seconds waited until then) at some moments of the last minute
        self._past: collections.deque[tuple[float, float]] = collections.deque()
        self._warned = False
        self._judging = threading.Lock()
        self._failed = False
        self._waited_for_stores_s = (counted_of_stores() or {"wait_s": 0.0})["wait_s"]  # before this feed
        self._published_at = time.monotonic()
        self.tuner = _tuner(stages) if tunes else None

    def waits(self) -> None:
        """The training loop begins to wait. For the training thread."""
        self._steps.waits()

    def placed(self, times: PlaceTimes, arrays: Sequence[jax.Array]) -> None:
        """A batch was placed. Now and then, looks at the accounts."""
        self._steps.placed(arrays)
        if self.accounting.placed(times):
            self._warn_if_waiting()
            self._publish()
            if self.tuner is not None:
                self.tuner.look(self.accounting, self._circumstances)

    def failed(self) -> None:
        """An exception came from what only observes. Log the first one."""
        if not self._failed:
            self._failed = True
            _log.exception("feedline could not judge how its feed works")

    def transferred(self, began: float, ready_s: float) -> None:
        """Count a finished transfer; see `Accounting.transferred`."""
        self.accounting.transferred(began, ready_s)

    def changed(self, stages: Stages) -> None:
        """The loop goes on with the settings of `stages`."""
        self._stages = stages
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
            restarts=stages.access.restarts.count if isinstance(stages.access, RandomAccess) else 0,
            slabs=staging.mapped,
            host_bytes=staging.mapped_bytes,
            stores=counted_of_stores(),
        )

    def report(self) -> Report | None:
        """What limits training; None if too few batches were delivered."""
        from feedline._src.observe.verdict import judge

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
        from feedline._src.observe.verdict import Circumstances

        stages, settings = self._stages, self._stages.settings
        reader: Reader = "workers" if settings.workers else "threads"
        if not settings.prefetch:
            reader = "caller"
        elif isinstance(stages.access, StreamAccess):
            reader = "stream"
        return Circumstances(
            reader=reader,
            **settings._asdict(),
            cores=own_cores(),
            lock_wait_s=self.accounting.lock_wait_s(),
            may_use_workers=isinstance(stages.access, RandomAccess) and stages.access.may_use_workers,
            process=jax.process_index(),
            default_threads=default_threads(),
            searching=self.tuner is not None and not self.tuner.settled,
            store_wait=self._store_wait(),
            found=frozenset() if self.tuner is None or stages.bounds is None else stages.bounds.tunable,
        )

    def _store_wait(self) -> float:
        """The share of the time of reading in which threads waited for a store; 0 for rows that are in none."""
        access, stores = self._stages.access, counted_of_stores()
        if stores is None or not (isinstance(access, RandomAccess) and access.reader.tells_source):
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
        from feedline._src.observe.verdict import ProcessTimes

        found = {}
        with contextlib.suppress(FeedError):
            found = {process: ProcessTimes(**json.loads(text)) for process, text in latest.read().items()}
        own = self._own_times(window)
        return [*({**found, own.process: own}).values()]

    def _own_times(self, window: Window) -> ProcessTimes:
        from feedline._src.observe.verdict import ProcessTimes

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
    from feedline._src.pipeline.tuner import Tuner

    return Tuner(stages.bounds, stages.settings)


def counted_of_stores() -> dict[str, float] | None:
    """What this process counted of requests to stores; None: it read none."""
    fetcher = sys.modules.get("feedline._src.files.fetcher")  # which is imported with the first store
    return None if fetcher is None else fetcher.counted()
