"""Which threads are inside a source, so that it is closed only when none is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Reads:
    """The reads of one source that are under way. Any thread may read, and any may `end` the reads.

    A read enters itself first and then looks whether reads have ended; `end` says so first and then looks who is
    inside. So each read either is seen by `end` or does not begin. There is no lock: an interrupt might leave it
    held.
    """

    def __init__(self) -> None:
        self._inside: dict[threading.Thread, None] = {}
        self._ended = False
        self._one_left = threading.Event()

    def run(self, read: Callable[[], T]) -> T:
        """What `read` returns.

        Raises:
          ValueError: reads have ended.
        """
        me = threading.current_thread()
        try:
            self._inside[me] = None
            if self._ended:
                raise ValueError("the feed is closed")
            return read()
        finally:
            self._inside.pop(me, None)
            if self._ended:
                self._one_left.set()

    def end(self, timeout_s: float) -> str | None:
        """Let no further read begin, and wait for those of other threads. Idempotent.

        Returns:
          The name of a thread that is still inside.
        """
        me, deadline = threading.current_thread(), time.monotonic() + timeout_s
        self._ended = True
        while True:
            self._one_left.clear()  # before the look: who leaves after it sets the event again
            others = [thread.name for thread in list(self._inside) if thread is not me]
            if not others:
                return None
            if not self._one_left.wait(max(0.0, deadline - time.monotonic())):
                return others[0]
