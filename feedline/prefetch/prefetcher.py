"""Placed batches ahead of the consumer: placed by the thread that read them, or by one that waits for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from feedline.prefetch.handover import Closed, Empty, Handover
from feedline.prefetch.watch import Watch

H = TypeVar("H")
T = TypeVar("T")
_log = logging.getLogger("feedline")
H_co = TypeVar("H_co", covariant=True)


_AT_ONCE_S = 0.5e-3
"""What placing may take for the thread that read the batch to do it: some times what it costs to wake another
thread. Where placing copies, reading goes on beside it."""
_POLL_S = 1e-3


class HostIterator(Protocol[H_co]):
    """What is prefetched: an iterator that the placement thread alone calls and closes.

    It gives None in the place of an item that it offered, and that was taken.
    """

    def __next__(self) -> H_co | None: ...
    def close(self) -> None: ...


Offer = Callable[[int, H], bool]
"""Called by a thread that has item k ready, whatever became of those before it: whether it was taken at once.
Of each item once, before the iterator gives it."""


class _Last(NamedTuple):
    """What ends the items: an error, or the StopIteration of the source, with its value."""

    error: BaseException


class _Placing(Generic[H, T]):
    """Who places what. The source refers to it, but it to no source, so a run needs no garbage collector."""

    def __init__(self, place: Callable[[H], T], handover: Handover[T | _Last], watch: Watch) -> None:
        self._place = place
        self._handover = handover
        self._watch = watch
        self._took_s = 0.0  # the last time
        self._under_way: dict[threading.Thread, None] = {}  # threads that are inside `offer`

    def placed(self, host: H) -> T:
        """The placed `host`, on the thread that calls this."""
        self._watch.advanced("place")
        began = time.perf_counter()
        item = placed(self._place, host)
        self._took_s = time.perf_counter() - began
        return item

    def offer(self, number: int, host: H) -> bool:
        """Place an item that this thread has read, and hand it over, if it has a slot and that is done at once."""
        me = threading.current_thread()
        self._under_way[me] = None  # before it is asked whether there is a slot: after close() and join() none is
        try:
            if self._took_s > _AT_ONCE_S or not self._handover.has_slot(number):
                return False
            item: T | _Last
            try:
                item = self.placed(host)
            except BaseException as error:  # noqa: BLE001  Grain would keep its traceback, which keeps the batch
                item = _Last(error)
            self._handover.put(number, item)
            self._watch.advanced("read")
            del item, host  # an error's traceback holds this frame
            return True
        finally:
            del self._under_way[me]

    def join(self, deadline: float) -> str | None:
        """Wait for the other threads that offer. The name of one that is still busy."""
        me = threading.current_thread()
        while others := [thread for thread in list(self._under_way) if thread is not me]:
            if time.monotonic() >= deadline:
                return others[0].name
            time.sleep(_POLL_S)
        return None


class Prefetcher(Generic[H, T]):
    """At most `depth` placed items wait for the consumer.

    Who does what: the consumer calls `take`; the owner calls `start` once and `close` from any
    thread, as often as it likes. An item that is ready when it has a slot is placed by the thread that offers it,
    if that takes no longer than to wake another one. All else is placed by the placement thread, which alone calls
    and closes the source.

    Args:
      open_source: given a function to offer items to, the host batches, in order.
      place: host batch → item; runs on several threads at a time if several offer.
      depth: items that may wait, at least 1.
      watch: told of progress; asked how long to wait.
    """

    def __init__(
        self, open_source: Callable[[Offer[H]], HostIterator[H]], place: Callable[[H], T], depth: int, watch: Watch
    ) -> None:
        self._watch = watch
        self._handover: Handover[T | _Last] = Handover(depth)
        self._placing = _Placing(place, self._handover, watch)
        self._source = open_source(self._placing.offer)
        # daemon: a read that never returns must not keep the interpreter, and Grain's threads inherit it
        self._thread = threading.Thread(target=self._run, name="feedline-place", daemon=True)

    @property
    def waiting(self) -> int:
        """Placed items that are ready."""
        return self._handover.waiting

    def start(self) -> None:
        """Start the placement thread."""
        self._thread.start()

    def take(self) -> T:
        """The next item.

        Raises:
          StopIteration: the source is exhausted; with the value that the source gave it.
          Closed: `close` was called, before or meanwhile.
          StallError: no stage advanced for too long while this waited.
          Exception: what the source or `place` raised, after all items before it.
        """
        self._watch.waits()
        while True:
            try:
                item = self._handover.take(self._watch.patience_s())
            except Empty:
                self._watch.complain(self.waiting)
                continue
            if isinstance(item, _Last):
                try:
                    raise item.error
                finally:
                    del item  # else the error, its traceback and this frame would keep each other, and the batch
            return item

    def close(self) -> None:
        """Stop both sides. Does not wait; `join` does. Idempotent, from any thread."""
        self._watch.stop()
        self._handover.close()

    def join(self, timeout_s: float) -> str | None:
        """Wait for the placement thread, and for those that are placing what they read.

        It does not wait for the thread that calls it.

        Returns:
          The name of a thread that is still busy, stuck in a read or a transfer.
        """
        deadline = time.monotonic() + timeout_s
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            return self._thread.name
        return self._placing.join(deadline)

    def _run(self) -> None:
        last: BaseException
        number = 0
        try:
            while not self._handover.closed and self._produce(number):
                number += 1
            last = Closed()
        except BaseException as error:  # noqa: BLE001  raised in the consumer, with this traceback
            last = error
        try:
            self._source.close()
        except BaseException as error:  # noqa: BLE001
            if isinstance(last, StopIteration):
                last = error
            elif isinstance(last, Closed):
                _log.warning("closing the source failed", exc_info=error)  # nobody takes it any more
            else:
                last.add_note(f"feedline: closing the source failed, too: {error!r}")
        self._handover.finish(number, _Last(last))
        del last  # its traceback holds this frame

    def _produce(self, number: int) -> bool:
        """Wait for the next item, and place it if nobody did. False: closed. StopIteration: the source's."""
        self._watch.advanced("read")
        host = next(self._source)
        self._watch.advanced("wait")  # for a slot: the consumer is the slow one
        if not self._handover.wait_for_slot():
            return False
        if host is not None:
            self._handover.put(number, self._placing.placed(host))
        return True


def placed(place: Callable[[H], T], host: H) -> T:
    """The placed `host`. A StopIteration from `place` is an error: it must not pass for the source's end."""
    try:
        return place(host)
    except StopIteration as error:
        raise RuntimeError("placing a batch raised StopIteration") from error
