"""Keeps track of the reads under way, so that a source is closed only when no thread is reading it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Reads:
    """The reads of one source that are under way. Any thread may read, and any may `end` the reads.

    A read registers its thread first and then checks whether reads have ended; `end` sets that flag first and then
    looks at the registered threads. So each read is either seen by `end` or does not begin. There is no lock,
    because an interrupt might leave it held.
    """

    def __init__(self) -> None:
        self._reading: dict[threading.Thread, None] = {}
        self._ended = False
        self._one_left = threading.Event()

    def run(self, read: Callable[[], T]) -> T:
        """Call `read` and return its result.

        Raises:
          ValueError: reads have ended.
        """
        me = threading.current_thread()
        try:
            self._reading[me] = None
            if self._ended:
                raise ValueError("the feed is closed")
            return read()
        finally:
            self._reading.pop(me, None)
            if self._ended:
                self._one_left.set()

    def end(self, timeout_s: float) -> str | None:
        """Refuse further reads, and wait for those of other threads to end. Idempotent.

        Returns:
          The name of a thread that is still reading after `timeout_s`; None: no thread is.
        """
        me, deadline = threading.current_thread(), time.monotonic() + timeout_s
        self._ended = True
        while True:
            self._one_left.clear()  # before the threads are listed: one that ends later sets the event again
            others = [thread.name for thread in list(self._reading) if thread is not me]
            if not others:
                return None
            if not self._one_left.wait(max(0.0, deadline - time.monotonic())):
                return others[0]
