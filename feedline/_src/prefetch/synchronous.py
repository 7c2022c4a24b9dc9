"""Reads and places each item when it is taken, on the consumer's thread: `prefetch=0`."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from feedline._src.prefetch.handover import INSIDE, Closed
from feedline._src.prefetch.prefetcher import HostIterator
from feedline._src.prefetch.threaded import placed
from feedline._src.prefetch.watch import Watch

H = TypeVar("H")
T = TypeVar("T")


class Synchronous(Generic[H, T]):
    """Has the methods of `Prefetcher` but no reading thread, so that a debugger can follow `take`.

    The consumer calls `take`. The owner calls `start` once and `close` any number of times.

    Args:
      source, place: as for `Prefetcher`.
      watch: makes the alarm that warns if `take` hangs.
    """

    waiting = 0

    def __init__(self, source: HostIterator[H], place: Callable[[H], T], watch: Watch) -> None:
        self._source = source
        self._unclosed = [source]  # whoever takes it out closes it: so it is closed once
        self._place = place
        self._watch = watch
        self._alarm = watch.alarm()
        self._closed = False
        self._inside: threading.Thread | None = None  # the thread that is inside `take`
        # an entry once it has left after `close`. An Event has a lock, which an interrupt might leave held
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Nothing to start."""

    def take(self) -> T:
        """Read and place the next item.

        Raises:
          StopIteration: the source is exhausted; it has the value of the source's StopIteration.
          Closed: `close` was called before.
          ValueError: this thread is inside `take` already.
          Exception: what the source or `place` raised.
        """
        if self._inside is threading.current_thread():
            raise ValueError(INSIDE)
        try:
            # set before the look at `_closed`, while `close` sets that before `join` looks at `_inside`: so `join`
            # waits for this read, or it does not begin
            self._inside = threading.current_thread()
            if self._closed:
                raise Closed
            self._watch.waits()
            with self._alarm:
                self._watch.advanced("read")
                host = next(self._source)
                self._watch.advanced("place")
                return placed(self._place, host)
        finally:
            self._inside = None
            if self._closed:
                self._left.put(None)
                self._close_source()

    def close(self) -> None:
        """Close the source, once no thread is inside it. Idempotent, from any thread, also in a signal handler."""
        self._alarm.close()
        self._closed = True
        if self._inside is None:
            self._close_source()

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Wait for another thread that is inside `take`; as `ThreadedPipeline.join`.

        The source of one that is stuck there is closed nevertheless.
        """
        deadline = time.monotonic() + timeout_s
        if reads and self._inside not in (None, threading.current_thread()):
            with contextlib.suppress(queue.Empty):
                self._left.get(timeout=timeout_s)
                self._left.put(None)  # for others that wait
            self._close_source()
        self._alarm.join(max(0.0, deadline - time.monotonic()))
        inside = self._inside
        return None if inside is None else inside.name

    def _close_source(self) -> None:
        with contextlib.suppress(IndexError):
            self._unclosed.pop().close()
