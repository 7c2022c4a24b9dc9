"""Listens to a feed: keeps accounts, warns once if training waits, tunes, limits bad rows, publishes times."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

import jax

from feedline._src.cluster.cores import own_cores
from feedline._src.errors import FeedError
from feedline._src.listen.accounts import Accounts
from feedline._src.listen.bad_rows import Quarantine
from feedline._src.listen.report import Report
from feedline._src.listen.statistics import Statistics
from feedline._src.listen.verdict import Circumstances, ProcessTimes, judge
from feedline._src.options import Settings
from feedline._src.record import BatchRecord, Counters
from feedline._src.run import Stages

if TYPE_CHECKING:
    from feedline._src.listen.tuning import Tuner

_log = logging.getLogger("feedline")
_WAITS_TOO_LONG, _WARN_AFTER_S = 0.2, 60.0  # a fifth of a minute: XProf calls this share "highly input-bound"
_JUDGE_EVERY_S = 0.25
_PUBLISH_EVERY_S = 5.0
_PUBLISHED_PER_S = 500  # by all processes together, so that thousands of processes each publish less often


class FeedListener(Accounts):
    """The accounts of one feed, with its reports, its tuning and the budget of bad rows.

    Attributes:
      tuner: searches for better settings; None: no setting is "auto".
    """

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages.ahead)
        self._stages = stages
        rows = None if stages.plan.lanes else len(stages.access.source)  # a mixture's epoch may have fewer rows
        self._quarantine = Quarantine(stages.reading, jax.process_index(), rows)
        self._judging = threading.Lock()
        self._minute = time.monotonic(), 0.0  # when this minute began, and `wait_s` at that time
        self._warned = False
        self._judged_at = self._published_at = time.monotonic()
        self.tuner: Tuner | None = None
        self._tunable: frozenset[str] = frozenset()
        if stages.bounds is not None:
            from feedline._src.listen.tuning import Tuner

            self.tuner, self._tunable = Tuner(stages.bounds, stages.settings), stages.bounds.tunable

    @property
    def proposal(self) -> Settings | None:
        """The settings to change to; None: keep the present ones."""
        return None if self.tuner is None else self.tuner.proposal

    def delivered(self, record: BatchRecord) -> None:
        """Record a batch that is about to be delivered. RowError: the feed's bad rows exceed the budget."""
        if record.bad:
            self._quarantine.enter(record.bad, own_rows=record.own_rows)
        self._records.append(record)

    def changed(self, stages: Stages) -> None:
        """Record that the feed continues with these stages and their settings."""
        bounds, self._stages = self._stages.bounds, stages
        self.restarted(stages.ahead)
        if self.tuner is not None:
            if stages.bounds is not None and stages.bounds != bounds:
                self.tuner = self.tuner.moved(stages.bounds, stages.settings)
            self.tuner.proposal = None

    def give_up_workers(self, error: Exception) -> Settings | None:
        """After workers failed: the settings to continue with; None: tuning did not choose the workers."""
        if self.tuner is None or not self._stages.settings.workers or "workers" not in self._tunable:
            return None
        self.tuner = self.tuner.without_workers(error)
        return self.tuner.proposal

    def statistics(self, counted: Counters, ready: int) -> Statistics:
        """A snapshot. `counted`: the counts of `next`; `ready`: how many batches wait to be delivered."""
        stages, staging = self._stages, self._stages.access.buffers.staging
        fetcher = sys.modules.get("feedline._src.files.fetcher")  # imported only with the first store
        counts = counted._asdict()
        del counts["own_rows"]
        return Statistics(
            **counts,
            **self.times(self.window()),
            ready=ready,
            threads=stages.settings.threads,
            workers=stages.settings.workers,
            restarts=stages.restarts.count,
            slabs=staging.mapped,
            host_bytes=staging.mapped_bytes,
            stores=None if fetcher is None else fetcher.counted(),
        )

    def report(self) -> Report | None:
        """What limits training; None if too few batches were delivered."""
        if (how := self._circumstances()) is None:
            return None
        processes = {}
        if (latest := self._stages.latest_values) is not None:
            with contextlib.suppress(FeedError):  # process 0 is gone: other calls report that
                processes = {process: ProcessTimes(*json.loads(text)) for process, text in latest.read().items()}
            processes[how.process] = ProcessTimes.of(how)
        return judge(how, [*processes.values()], () if self.tuner is None else tuple(self.tuner.history))

    def _circumstances(self, *, current: bool = False) -> Circumstances | None:
        """The measurements; None: too few batches were delivered. `current`: only of the present settings."""
        stages, tuner = self._stages, self.tuner
        if (window := self.window(current=current)) is None:
            return None
        return Circumstances(
            window,
            stages.settings,
            own_cores(),
            stream=bool(stages.plan.lanes),
            gil_wait_s=self.gil_wait_s(),
            may_use_workers=stages.access.for_workers is not None,
            process=jax.process_index(),
            found=self._tunable,
            searching=tuner is not None and not tuner.settled,
        )

    def _judge(self) -> None:
        # return at once if another thread is judging. As no thread waits for the lock, an interrupt is harmless
        if time.monotonic() - self._judged_at < _JUDGE_EVERY_S or not self._judging.acquire(blocking=False):
            return
        try:
            self._judged_at = time.monotonic()
            self._warn_if_waiting()
            self._publish()
            tuner = self.tuner
            if tuner is None or tuner.proposal is not None:  # `changed` resets the proposal once it is in use
                return
            if (how := self._circumstances(current=True)) is not None:
                tuner.look(how)
        finally:
            self._judging.release()

    def _warn_if_waiting(self) -> None:
        """Log the verdict, once, if the loop waited for more than a fifth of a minute."""
        now, (began, before_s) = time.monotonic(), self._minute
        if self._warned or now - began < _WARN_AFTER_S:
            return
        wait_s = self.sums()["wait_s"]
        self._minute = now, wait_s
        if wait_s - before_s <= _WAITS_TOO_LONG * (now - began):
            return
        report = self.report()
        if report is not None and report.bound not in ("compute", "loop"):
            self._warned = True
            _log.warning("%s; advice: %s. See feed.report() for details", report.verdict, report.advice)

    def _publish(self) -> None:
        """Publish the times of this process for the other processes, every few seconds."""
        every_s = max(_PUBLISH_EVERY_S, jax.process_count() / _PUBLISHED_PER_S)
        latest, now = self._stages.latest_values, time.monotonic()
        if latest is None or now - self._published_at < every_s or (how := self._circumstances()) is None:
            return
        self._published_at = now
        with contextlib.suppress(FeedError):  # process 0 is gone: other calls report that
            latest.publish(json.dumps(ProcessTimes.of(how)))
