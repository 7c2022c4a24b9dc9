"""The watchdog: warns, and then raises, when the consumer waits long and no stage advances.

If other threads make the batches, the waiting consumer itself checks the time. If the consumer's own thread makes
them, `alarmed` checks the time on another thread.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

from feedline._src.errors import StallError
from feedline._src.options import Reading

_log = logging.getLogger("feedline")
_SUSPENDED_S = 1.0
"""A wait that ends this many seconds late shows that the process was stopped, say by `scontrol suspend`."""


class Pending(NamedTuple):
    """A read that has not returned: age, number of rows, row index of the first row, and the file of this row."""

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
      on_stall: called before an error is raised, with the limit in seconds. It kills the worker that hangs, and
        returns whether this worker will be replaced; if so, the wait continues.
      on_stop: called by `stop`, to end a thread's wait for workers.
      longest_read: returns the oldest pending read, if it is known.

    Args:
      reading: the options with the limits.
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
        """Make stages stop waiting for other processes. Called when the pipeline is closed."""
        self._stopped = True
        if self.on_stop is not None:
            self.on_stop()

    def stopped(self) -> bool:
        return self._stopped

    def advanced(self, stage: str) -> None:
        """Note progress. `stage` is what happens next: "read", "agree" or "place"."""
        self._last = (stage, time.monotonic())

    def waits(self) -> None:
        """Note that the consumer begins to wait."""
        self._waiting_since = time.monotonic()
        self._warned = False

    def alarmed(self) -> contextlib.AbstractContextManager[None]:
        """A context for the consumer while it reads and places an item itself. Logs a warning if this hangs."""

        def message() -> str:
            stage, at = self._last
            return (
                f"no stage has advanced for {time.monotonic() - at:.0f} s while `next` makes a batch itself; the "
                f'last stage was "{stage}"'
            )

        return alarmed(self._reading.stall_warning_s, message)

    def patience_s(self) -> float:
        """Seconds from now until the next warning or error is due; 0 if it is due already."""
        patience_s = max(0.0, self._limit_s() - self._still_s(self._last[1]))
        self._due = time.monotonic() + patience_s
        return patience_s

    def warn_or_raise(self, waiting: int) -> None:
        """Warn or raise, unless a stage has advanced since `patience_s` was called."""
        if time.monotonic() > self._due + _SUSPENDED_S:
            self._waiting_since = time.monotonic()
        stage, at = self._last
        still_s, error_s = self._still_s(at), self._reading.stall_error_s
        if still_s < self._limit_s():
            return
        found = (
            f"no stage has advanced for {still_s:.0f} s while the training loop waits; the last stage was "
            f'"{stage}", and {waiting} later batches are ready'
        )
        pending = None
        if self.longest_read is not None:
            with contextlib.suppress(Exception):  # it asks the source, which may be closing or faulty
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
        """Seconds for which the consumer has waited and no stage has advanced."""
        return time.monotonic() - max(self._waiting_since, advanced_at)

    def _limit_s(self) -> float:
        """The value of `_still_s` at which the next warning or error is due."""
        error_s = self._reading.stall_error_s
        return error_s if self._warned else min(self._reading.stall_warning_s, error_s)


@contextlib.contextmanager
def alarmed(after_s: float, message: Callable[[], str]) -> Iterator[None]:
    """Log the stacks of all threads if the `with` block takes longer than `after_s`."""
    over = queue.SimpleQueue[None]()

    def alarm() -> None:
        try:
            over.get(timeout=after_s)
        except queue.Empty:
            _log.warning("%s. Stacks of all threads:\n%s", message(), stacks())

    try:
        try:
            # no Timer or Thread, because an interrupt in `start` or `cancel` can leave its lock held for ever
            _thread.start_new_thread(alarm, ())
            yield
        finally:
            over.put(None)
    finally:  # again, because an interrupt may come right before the first call
        over.put(None)


def stacks() -> str:
    """The stack of every thread of this process, by name."""
    frames = sys._current_frames()
    return "\n".join(
        f"-- {thread.name}\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in threading.enumerate()
        if thread.ident in frames
    )
