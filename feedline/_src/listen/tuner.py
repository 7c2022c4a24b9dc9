"""Carries what `Tuning` proposes from the thread that judges to the training thread, which takes it up."""

from __future__ import annotations

import logging
import math
import textwrap
import threading
import time
from collections.abc import Callable, Sequence

from feedline._src.bounds import Bounds
from feedline._src.listen.accounting import Accounting, BatchTimes
from feedline._src.listen.search import Tuning
from feedline._src.listen.verdict import Circumstances
from feedline._src.listen.window import Window
from feedline._src.options import Settings

_log = logging.getLogger("feedline")
_EVERY_S = 0.25
"""How often the batches since the last change are looked at."""
_LONGEST = 200
"""Characters of an error message that are told."""


class Tuner:
    """Looks at the accounts now and then, and holds the settings to change to.

    The threads that place batches call `look`. The training thread reads `proposal`, gives up its pipeline, and
    calls `changed`; until then there is no other proposal. So an interrupt in between makes it do the same again.

    Attributes:
      proposal: settings to change to; None: none.
      start: those that the feed began with, without workers that this tuner chose.
    """

    def __init__(self, bounds: Bounds, start: Settings) -> None:
        self.proposal: Settings | None = None
        self.start = start
        self._may_use_workers = "workers" in bounds.tunable
        self._tuning = Tuning(bounds, start, log=_tell)
        self._lock = threading.Lock()  # of _tuning. The training thread never takes it
        self._changed_at = -math.inf  # by the clock of the batches
        self._looked_at = -math.inf
        self._failed: str | None = None  # why workers failed, until _tuning knows it

    @property
    def history(self) -> Sequence[str]:
        """What was tried so far, and what came of it."""
        return tuple(self._tuning.history)

    @property
    def settled(self) -> bool:
        """Whether the search has ended, and its result is in use."""
        return self._tuning.settled and self.proposal is None

    def window(self, latest: Sequence[BatchTimes], idle_share: float | None = None) -> Window | None:
        """Of the latest batches, those since the settings changed; None if these do not suffice to judge by."""
        window = Window.of([batch for batch in latest if batch.taken > self._changed_at], idle_share)
        return window if window is not None and window.drained else None

    def look(self, accounting: Accounting, circumstances: Callable[[], Circumstances]) -> None:
        """Propose a change if the batches since the last one suffice to judge by, and ask for one."""
        now = time.perf_counter()
        if self.proposal is not None or now - self._looked_at < _EVERY_S or not self._lock.acquire(blocking=False):
            return
        try:
            self._looked_at = now
            how, failed = circumstances(), self._failed
            if failed is not None:
                self._tuning.give_up_workers(failed, how.settings)
                self._failed = None
            window = self.window(accounting.latest())
            proposal = None if window is None else self._tuning.propose(window, how)
            if self._failed is None and self.proposal is None:
                self.proposal = proposal
        finally:
            self._lock.release()

    def changed(self) -> None:
        """The proposal was taken up: what follows is made with it."""
        self._changed_at = time.perf_counter()
        self.proposal = None

    def does_without_workers(self, error: Exception) -> bool:
        """Whether `start` works after workers failed, since this tuner chose them."""
        if self._may_use_workers:
            self._failed = textwrap.shorten(f"{type(error).__name__}: {error}", _LONGEST)  # in one line
        return self._may_use_workers


def _tell(sentence: str) -> None:
    _log.info("tuning %s", sentence)
