"""`RecentReport`: the report of a feed, made anew so rarely that it takes at most 1 % of the time."""

from __future__ import annotations

import logging
import time

from feedline._src.observe.report import Report

_log = logging.getLogger("feedline")
_AT_LEAST_S = 1.0
_TIMES_ITS_COST = 100
"""Half a millisecond; some 50 ms where input limits training, and settings are compared by simulation."""


class RecentReport:
    """Keeps the latest report of one feed, for what shows it again and again. One thread at a time may call it.

    It never raises: what only observes must not end training.

    Example:
      >>> RecentReport().of(object()) is None  # it has no report
      True
    """

    def __init__(self) -> None:
        self._report: Report | None = None
        self._again_at_s = 0.0
        self._failed = False

    def of(self, feed: object) -> Report | None:
        """The latest report; None if there is none yet, or none by enough batches to judge by."""
        if self._failed or time.monotonic() < self._again_at_s or not hasattr(feed, "report"):
            return self._report
        began = time.monotonic()
        try:
            report = feed.report()
            self._report = report if report.drained else None
        except ValueError:  # too few batches
            self._report = None
        except Exception:  # noqa: BLE001  see the class
            self._report, self._failed = None, True
            _log.exception("feedline could not judge how its feed works")
        ended = time.monotonic()
        self._again_at_s = ended + max(_AT_LEAST_S, _TIMES_ITS_COST * (ended - began))
        return self._report
