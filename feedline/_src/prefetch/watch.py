"""The watchdog: warns, and then raises, when the consumer waits long and no stage advances.

If other threads make the batches, the waiting consumer itself checks the time. If the caller's own thread makes
them, an `Alarm` checks it on a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

from feedline._src.errors import StallError
from feedline._src.options import Reading

_log = logging.getLogger("feedline")
_SUSPENDED_S = 1.0
"""A wait that overruns its timeout by this much means that the process was stopped, as by `scontrol suspend`."""


class Pending(NamedTuple):
    """A read that has not returned: its age, its number of rows, the index of the first, and that row's file."""

    seconds: float
    rows: int
    first: int
    file: str | None

    def __str__(self) -> str:
        file = "" if self.file is None else f" of {self.file}"
        return (
            f"a read of {self.rows} rows, the first of them row {self.first}{file}, began {self.seconds:.0f} s ago"
        )


class Watch:
    """Measures how long the consumer has waited without progress; warns first, and later raises.

    Every stage calls `advanced` and `stopped`, from any thread; the owner calls `stop`, from any thread. Only the
    waiting consumer calls the other methods.

    Attributes:
      on_stall: called before an error, with its limit in seconds: ends what hangs, and returns whether it will be
        replaced, so that the wait goes on.
      on_stop: called by `stop`, to end a thread's wait for other processes.
      longest_read: returns the oldest pending read, if it is known.

    Args:
      reading: its limits.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        # one tuple, replaced as a whole, so that its stage and its time always belong together
        self._last = ("start", time.monotonic())
        self._waiting_since = 0.0
        self._due = math.inf  # when the consumer's current wait times out
        self._warned = False
        self._stopped = False
        self.on_stall: Callable[[float], bool] | None = None
        self.on_stop: Callable[[], None] | None = None
        self.longest_read: Callable[[], Pending | None] | None = None

    def stop(self) -> None:
        """End the waits of stages for other processes. Called when the owner stops."""
        self._stopped = True
        if self.on_stop is not None:
            self.on_stop()

    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def advanced(self, stage: str) -> None:
        """Note progress. `stage` is what happens next: "read", "agree", "place" or "wait"."""
        self._last = (stage, time.monotonic())

    def waits(self) -> None:
        """Note that the consumer begins to wait."""
        self._waiting_since = time.monotonic()
        self._warned = False

    def alarm(self) -> Alarm:
        """An alarm for a caller that reads and places itself. It warns once for each item."""

        def message() -> str:
            stage, at = self._last
            return (
                f"no stage has advanced for {time.monotonic() - at:.0f} s while `next` makes a batch itself; the "
                f'last was "{stage}"'
            )

        return Alarm(self._reading.stall_warning_s, message)

    def patience_s(self) -> float:
        """Seconds until the next warning or error is due, from now; 0 once it is."""
        patience_s = max(0.0, self._limit_s() - self._still_s(self._last[1]))
        self._due = time.monotonic() + patience_s
        return patience_s

    def warn_or_raise(self, waiting: int) -> None:
        """Warn or raise, if that is still due: a stage may have advanced since `patience_s` was called.

        Stacks are logged before an error, even if its limit is the lower one. If the process was stopped
        meanwhile, the count restarts: the other threads stood still, too.

        Args:
          waiting: items that are ready in the hand-over, for the message.

        Raises:
          StallError: after `Reading.stall_error_s`.
        """
        if time.monotonic() > self._due + _SUSPENDED_S:
            self._waiting_since = time.monotonic()
        stage, at = self._last
        still_s, error_s = self._still_s(at), self._reading.stall_error_s
        if still_s < self._limit_s():
            return
        found = (
            f'no stage has advanced for {still_s:.0f} s while the training loop waits; the last was "{stage}", '
            f"{waiting} batches after the next one are placed"
        )
        pending = None
        if self.longest_read is not None:
            with contextlib.suppress(Exception):  # it asks the source, which may be closing or at fault
                pending = self.longest_read()
        if pending is not None:
            found += f"; {pending}"
        if still_s >= error_s and self.on_stall is not None and self.on_stall(error_s):
            self._warned = False
            self.advanced(stage)
            return
        if not self._warned:
            self._warned = True
            _log.warning("%s. Stacks of all threads:\n%s", found, stacks())
        if still_s >= error_s:
            raise StallError(
                f"a batch must come within Reading.stall_error_s = {error_s:g} s: {found}. "
                f"Look at the stacks that were logged; if such reads are normal, raise that limit",
                stage=stage,
                row=None if pending is None else pending.first,
                file=None if pending is None else pending.file,
            )

    def _still_s(self, advanced_at: float) -> float:
        """Seconds in which the consumer waited and nothing advanced."""
        return time.monotonic() - max(self._waiting_since, advanced_at)

    def _limit_s(self) -> float:
        """The limit of such seconds before the next warning or error."""
        error_s = self._reading.stall_error_s
        return error_s if self._warned else min(self._reading.stall_warning_s, error_s)


class _Block:
    """When the current block of an alarm began, on the monotonic clock; None outside of blocks."""

    began: float | None = None


class Alarm:
    """A context that logs the stacks of all threads if its block takes too long. It may be entered many times.

    For work on the caller's own thread, which cannot check the time while it hangs. Another thread does: it starts
    with the first block, wakes only when a warning may be due, and ends with `close` or when the alarm is garbage
    collected. So each further block costs only two assignments.

    Args:
      after_s: the seconds after which it warns.
      message: returns the first sentence of the warning.
    """

    def __init__(self, after_s: float, message: Callable[[], str]) -> None:
        self._block = _Block()
        self._closed: queue.SimpleQueue[None] = queue.SimpleQueue()
        weakref.finalize(self, self._closed.put, None).atexit = False
        self._thread = threading.Thread(
            target=_warn, args=(self._block, self._closed, after_s, message), name="feedline-alarm", daemon=True
        )

    def __enter__(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
        self._block.began = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self._block.began = None

    def close(self) -> None:
        """End the thread without waiting. Idempotent; any thread or a finalizer may call it."""
        self._closed.put(None)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the thread to end, after `close`."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)


@contextlib.contextmanager
def alarmed(after_s: float, message: Callable[[], str]) -> Iterator[None]:
    """An `Alarm` for one block. Its thread has ended when the block is left."""
    alarm = Alarm(after_s, message)
    try:
        with alarm:
            yield
    finally:
        alarm.close()
        alarm.join()


def _warn(block: _Block, closed: queue.SimpleQueue[None], after_s: float, message: Callable[[], str]) -> None:
    warned_of, wait_s = None, after_s
    while True:
        with contextlib.suppress(queue.Empty):
            return closed.get(timeout=wait_s)
        began, wait_s = block.began, after_s  # no later block is due earlier
        if began is not None and began != warned_of:
            left_s = began + after_s - time.monotonic()
            if left_s > 0:
                wait_s = left_s
            else:
                warned_of = began
                _log.warning("%s. Stacks of all threads:\n%s", message(), stacks())


def stacks() -> str:
    """The stack of every thread of this process, by name."""
    frames = sys._current_frames()
    return "\n".join(
        f"-- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
