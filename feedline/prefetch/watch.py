"""The watchdog: time in which the consumer waits and no stage advances.

Where other threads make the batches, the waiting consumer itself looks at the time. Where the caller's own thread
makes them, an `Alarm` looks for it, on a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator

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

    def alarm(self) -> Alarm:
        """For a caller that reads and places itself: warns in its place, once for each item."""

        def told() -> str:
            stage, at = self._last
            return (
                f"no stage has advanced for {time.monotonic() - at:.0f} s while `next` makes a batch itself; the "
                f'last was "{stage}"'
            )

        return Alarm(self._reading.stall_warning_s, told)

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


class _Block:
    """When the block under way began, on the monotonic clock; None: there is none."""

    began: float | None = None


class Alarm:
    """A context, for any number of blocks, that warns with the stack of every thread if one takes too long.

    For what the caller's own thread does: that cannot look at the time, nor be made to raise, while it hangs. One
    thread looks instead. It starts with the first block, wakes only when a warning may be due, and ends with
    `close` or when the alarm is dropped. So a further block costs no more than two assignments.

    Args:
      after_s: seconds.
      told: asked for the first sentence of the warning.
    """

    def __init__(self, after_s: float, told: Callable[[], str]) -> None:
        self._block = _Block()
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()
        weakref.finalize(self, self._closed.put, None).atexit = False
        self._thread = threading.Thread(
            target=_warn, args=(self._block, self._closed, after_s, told), name="feedline-alarm", daemon=True
        )

    def __enter__(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._block.began = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self._block.began = None

    def close(self) -> None:
        """End the thread. Does not wait; `join` does. Idempotent, from anywhere, also a finalizer."""
        self._closed.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread of an alarm that was closed."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)


@contextlib.contextmanager
def alarmed(after_s: float, told: Callable[[], str]) -> Iterator[None]:
    """An `Alarm` for one block, whose thread has ended when the block has."""
    alarm = Alarm(after_s, told)
    try:
        with alarm:
            yield
    finally:
        alarm.close()
        alarm.join()


def _warn(block: _Block, closed: queue.SimpleQueue[None], after_s: float, told: Callable[[], str]) -> None:
    warned_of, wait_s = None, after_s
    while True:
        try:
            return closed.get(timeout=wait_s)
        except queue.Empty:
            began = block.began
        wait_s = after_s  # no block that begins from here on is due earlier
        if began is not None and began != warned_of:
            left_s = began + after_s - time.monotonic()
            if left_s > 0:
                wait_s = left_s
            else:
                warned_of = began
                _log.warning("%s. Stacks of all threads:\n%s", told(), stacks())


def stacks() -> str:
    """The stack of every thread of this process, by name."""
    frames = sys._current_frames()
    return "\n".join(
        f"-- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
