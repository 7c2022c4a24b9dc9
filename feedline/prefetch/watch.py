"""The watchdog: time in which the consumer waits and no stage advances. It needs no thread of its own."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback

from feedline.errors import StallError
from feedline.options import Reading

_log = logging.getLogger("feedline")


class Watch:
    """Says how long a wait may still last, warns once it was long, and raises when it was too long.

    `advanced` and `stopped` are called by every stage, from any thread, `stop` by the owner, from anywhere; the
    rest by the waiting consumer alone.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        # one tuple, replaced whole: readers never see the stage of one moment with the time of another
        self._last = ("start", time.monotonic())
        self._waiting_since = 0.0
        self._warned = False
        self._stopped = False

    def stop(self) -> None:
        """The owner stopped: a stage that waits for other processes need not go on waiting."""
        self._stopped = True

    def stopped(self) -> bool:
        """Whether it did."""
        return self._stopped

    def advanced(self, stage: str) -> None:
        """A stage got something done and `stage` is what happens now: "read", "agree", "place" or "wait"."""
        self._last = (stage, time.monotonic())

    def waits(self) -> None:
        """The consumer begins to wait."""
        self._waiting_since = time.monotonic()
        self._warned = False

    def patience_s(self) -> float:
        """Seconds until the next warning or error is due, from now; 0 once it is."""
        return max(0.0, self._limit_s() - self._still_s(self._last[1]))

    def complain(self, waiting: int) -> None:
        """Warn or raise, if that is due: a stage may have advanced since `patience_s` was asked.

        Args:
          waiting: items that lie ready in the hand-over, for the message.

        Raises:
          StallError: after `Reading.stall_error_s`.
        """
        stage, at = self._last
        still_s = self._still_s(at)
        if still_s < self._limit_s():
            return
        found = (
            f'no stage has advanced for {still_s:.0f} s while the training loop waits; the last was "{stage}", '
            f"{waiting} batches after the next one are placed"
        )
        if still_s >= self._reading.stall_error_s:
            raise StallError(
                f"a batch must come within Reading.stall_error_s = {self._reading.stall_error_s:g} s: {found}. "
                f"Look at the stacks that were logged; if such reads are normal, raise that limit",
                stage=stage,
            )
        self._warned = True
        _log.warning("%s. Stacks of all threads:\n%s", found, stacks())

    def _still_s(self, advanced_at: float) -> float:
        """Seconds in which the consumer waited and nothing advanced."""
        return time.monotonic() - max(self._waiting_since, advanced_at)

    def _limit_s(self) -> float:
        """How many of them are allowed before the next warning or error."""
        error_s = self._reading.stall_error_s
        return error_s if self._warned else min(self._reading.stall_warning_s, error_s)


def stacks() -> str:
    """The stack of every thread of this process, by name."""
    frames = sys._current_frames()
    return "\n".join(
        f"-- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
