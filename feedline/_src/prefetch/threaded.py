"""What every pipeline with threads has: the hand-over of placed items, and the consumer's side of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from feedline._src.prefetch.handover import Empty, Handover
from feedline._src.prefetch.watch import Watch

H = TypeVar("H")
T = TypeVar("T")


class Last(NamedTuple):
    """The item after the last one: an error, or the StopIteration of the source, with its value."""

    error: BaseException


class ThreadedPipeline(Generic[T]):
    """At most `depth` placed items wait for the consumer, which calls `take`.

    The owner calls `start` once, and `close` from any thread, as often as it likes. Subclasses own the threads
    that fill the hand-over.

    Args:
      depth: items that may wait, at least 1.
      watch: told of progress; asked how long to wait.
    """

    def __init__(self, depth: int, watch: Watch) -> None:
        self._watch = watch
        self._handover: Handover[T | Last] = Handover(depth)

    @property
    def waiting(self) -> int:
        """Placed items that are ready."""
        return self._handover.waiting

    def start(self) -> None:
        """Start the threads."""
        raise NotImplementedError

    def take(self) -> T:
        """The next item.

        Raises:
          StopIteration: the source is exhausted; with the value that the source gave it.
          Closed: `close` was called, before or meanwhile.
          StallError: no stage advanced for too long while this waited.
          Exception: what the source or `place` raised, after all items before it.
        """
        waits = False
        try:
            item = self._handover.take(0)  # as a rule it is there: then nothing else is asked or noted
        except Empty:
            waits = True
        if waits:  # out of the handler: the traceback of an error or of Ctrl-C does not tell of `Empty`
            item = self._wait()
        if isinstance(item, Last):
            try:
                raise item.error
            finally:
                del item  # else the error, its traceback and this frame would keep each other, and the batch
        return item

    def _wait(self) -> T | Last:
        """The next item. Warns when it takes long, and raises when it takes too long."""
        self._watch.waits()
        while True:
            with contextlib.suppress(Empty):
                return self._handover.take(self._watch.patience_s())
            self._watch.warn_or_raise(self.waiting)

    def close(self) -> None:
        """Stop both sides. Does not wait; `join` does. Idempotent, from any thread, also in a finalizer."""
        self._watch.stop()
        self._handover.close()

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Wait for the threads of a pipeline that was closed, but not for the one that calls this.

        Without `reads`, threads that read rows by their index are not waited for either while they are inside a
        read. A stream is waited for, since the iterator that is started next may share state with this one.

        Returns:
          The name of a thread that is still busy with a read or a transfer. None: nothing more is read.
        """
        raise NotImplementedError


def placed(place: Callable[[H], T], host: H) -> T:
    """The placed `host`. A StopIteration from `place` is an error: it must not pass for the source's end."""
    try:
        return place(host)
    except StopIteration as error:
        raise RuntimeError("placing a batch raised StopIteration") from error
