"""Items of an iterator, placed ahead of the consumer by one thread: for streams and worker processes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from feedline._src.prefetch.handover import Closed
from feedline._src.prefetch.threaded import Last, ThreadedPipeline, placed
from feedline._src.prefetch.watch import Watch

H = TypeVar("H")
T = TypeVar("T")
H_co = TypeVar("H_co", covariant=True)
_log = logging.getLogger("feedline")


class HostIterator(Protocol[H_co]):
    """What is prefetched: an iterator that one thread alone calls and closes."""

    def __next__(self) -> H_co: ...
    def close(self) -> None: ...


class Prefetcher(ThreadedPipeline[T], Generic[H, T]):
    """A placement thread takes each item from an iterator, places it when it has a slot, and hands it over.

    Args:
      source: the host batches, in order; the placement thread alone calls and closes it.
      place: host batch → item.
      depth, watch: as for `ThreadedPipeline`.
    """

    def __init__(self, source: HostIterator[H], place: Callable[[H], T], depth: int, watch: Watch) -> None:
        super().__init__(depth, watch)
        self._source = source
        self._place = place
        # daemon: a read that never returns must not keep the interpreter, and Grain's threads inherit it
        self._thread = threading.Thread(target=self._run, name="feedline-place", daemon=True)

    def start(self) -> None:
        """Start the placement thread."""
        self._thread.start()

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """See `ThreadedPipeline.join`, which says why `reads` makes no difference."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._thread.name if self._thread.is_alive() else None

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
        self._handover.finish(number, Last(last))
        del last  # its traceback holds this frame

    def _produce(self, number: int) -> bool:
        """Read the next item and place it when it has a slot. False: closed. StopIteration: the source's."""
        self._watch.advanced("read")
        host = next(self._source)
        self._watch.advanced("wait")  # for a slot: the consumer is the slow one
        if not self._handover.wait_for_slot(number):
            return False
        self._watch.advanced("place")
        self._handover.put(number, placed(self._place, host))
        return True
