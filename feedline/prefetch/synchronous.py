"""The prefetcher's contract without a thread: each item is read and placed when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from feedline.prefetch.handover import Closed
from feedline.prefetch.prefetcher import HostIterator
from feedline.prefetch.threaded import placed
from feedline.prefetch.watch import Watch

H = TypeVar("H")
T = TypeVar("T")


class Synchronous(Generic[H, T]):
    """For debugging: `take` reads and places on the caller's thread, so that a debugger can follow it.

    The consumer calls `take`; the owner `start` once and `close` as often as it likes.

    Args:
      source, place: as for `Prefetcher`.
      watch: gives the alarm that warns of a `take` that hangs.
    """

    waiting = 0

    def __init__(self, source: HostIterator[H], place: Callable[[H], T], watch: Watch) -> None:
        self._source = source
        self._place = place
        self._watch = watch
        self._alarm = watch.alarm()
        self._closed = False

    def start(self) -> None:
        """Nothing to start."""

    def take(self) -> T:
        """The next item, made now.

        Raises:
          StopIteration: the source is exhausted; with the value that the source gave it.
          Closed: `close` was called before.
          Exception: what the source or `place` raised.
        """
        if self._closed:
            raise Closed
        with self._alarm:
            self._watch.advanced("read")
            host = next(self._source)
            self._watch.advanced("place")
            return placed(self._place, host)

    def close(self) -> None:
        """Close the source. Idempotent."""
        self._alarm.close()  # each time: an interrupt may have come before it
        if not self._closed:
            self._closed = True
            self._source.close()

    def join(self, timeout_s: float) -> str | None:
        """Wait for the thread of the alarm, which reads nothing: so none is named as stuck."""
        self._alarm.join(timeout_s)
        return None
