"""Reading threads that place what they read: there is no other thread between the source and the consumer."""

from __future__ import annotations

import math
import operator
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from feedline._src.prefetch.threaded import Last, ThreadedPipeline, placed
from feedline._src.prefetch.watch import Pending, Watch

_BRIEFLY_S = 0.5e-3
"""How long a thread waits for a slot before it gives up its permit: to wake another thread costs more than that.

While the consumer is the faster side, a batch lacks its slot only because the one before it is still being placed.
With 4 MB batches on two cores a feed was 10 to 15 % faster with 0.5 ms than with 0; 2 ms were no better.
"""
H = TypeVar("H")
H_co = TypeVar("H_co", covariant=True)
T = TypeVar("T")


class PartialBatches(Protocol[H_co]):
    """Host batches that are read in parts, by any threads and in any order."""

    @property
    def parts(self) -> int:
        """Of each batch."""

    @property
    def count(self) -> int:
        """How many batches there are."""

    def read(self, number: int, part: int) -> H_co | None:
        """Read a part of batch `number`. The call that completes the batch returns it."""

    def rows_of(self, number: int, part: int) -> tuple[int, int, str | None]:
        """Of a part: the number of its rows, the row index of the first, and the file of that row, if known."""

    def end(self) -> StopIteration:
        """What tells the consumer that all batches have been delivered."""


class Readers(ThreadedPipeline[T], Generic[H, T]):
    """Threads that read parts of batches in order; one that completes a batch waits for its slot and places it.

    At most `threads` of them read at a time. The others wait for the slots of batches that were read ahead, and
    then place these. At most `ahead` batches are being read, or wait to be placed: once one has been handed over,
    one more may be read.

    Args:
      batches: what is read.
      place: host batch → item; runs on several threads at a time.
      depth, watch: as for `ThreadedPipeline`.
      threads: at least 1.
      ahead: at least 1.
    """

    def __init__(
        self,
        batches: PartialBatches[H],
        place: Callable[[H], T],
        depth: int,
        watch: Watch,
        *,
        threads: int,
        ahead: int,
    ) -> None:
        super().__init__(depth, watch)
        self._batches = batches
        self._place = place
        self._ahead = ahead
        # (number, part), in the order in which they are read; a None ends a thread
        self._claims: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()  # a thread needs one to read
        for _ in range(threads):
            self._permits.put(None)
        # the threads that are inside a read: of which part, and since when on the monotonic clock
        self._reading: dict[threading.Thread, tuple[int, int, float]] = {}
        method = weakref.WeakMethod(self._longest_read)
        watch.longest_read = lambda: None if (longest := method()) is None else longest()
        self._next = 0  # the number of the batch that may be read next; held by _lock
        self._lock = threading.Lock()
        self._failed: float = math.inf  # the number of a batch that failed: none after it is needed
        # All batches ahead but one may wait for their slots, each with a thread. Daemon threads: a read that never
        # returns must not keep the interpreter from its exit
        self._threads = [
            threading.Thread(target=self._run, name=f"feedline-read-{i}", daemon=True)
            for i in range(threads + ahead - 1)
        ]

    def start(self) -> None:
        """Start the threads."""
        self._watch.advanced("read")
        for _ in range(self._ahead):
            self._go_on()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """See `ThreadedPipeline.close`."""
        super().close()
        for _ in self._threads:
            self._claims.put(None)
            self._permits.put(None)

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """See `ThreadedPipeline.join`."""
        me, deadline = threading.current_thread(), time.monotonic() + timeout_s
        if me in self._reading:  # two threads that close the feed in a transform would wait for each other
            return me.name
        for thread in self._threads:
            awaited = thread is not me and (reads or thread not in self._reading)
            if awaited and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        return next((thread.name for thread in self._threads if thread.is_alive()), None)

    def _go_on(self) -> None:
        """Let the threads read one more batch. After the last one they end, and the end is handed over."""
        with self._lock:
            number = self._next
            self._next += 1
            if number < self._batches.count:
                for part in range(self._batches.parts):
                    self._claims.put((number, part))
            elif number == self._batches.count:
                self._handover.finish(number, Last(self._batches.end()))
                for _ in self._threads:
                    self._claims.put(None)

    def _run(self) -> None:
        self._permits.get()  # kept, but while this thread waits for a slot
        while self._read_and_place():
            pass
        self._permits.put(None)

    def _read_and_place(self) -> bool:
        """Read a part. If that completes the batch, place it once it has a slot. Returns whether to go on."""
        claim = self._claims.get()
        # all batches before one that failed are being read, or have been
        if claim is None or self._handover.closed or claim[0] >= self._failed:
            return False
        host = self._read(*claim)
        if host is None:
            return True
        if self._handover.wait_for_slot(claim[0], _BRIEFLY_S):
            self._place_and_put(claim[0], host)
        else:
            self._permits.put(None)  # another thread reads meanwhile
            self._place_and_put(claim[0], host)
            del host  # not kept while this thread waits to read again
            self._permits.get()
        return True

    def _read(self, number: int, part: int) -> H | None:
        me = threading.current_thread()
        self._reading[me] = number, part, time.monotonic()
        try:
            return self._batches.read(number, part)
        except BaseException as error:  # noqa: BLE001  raised in the consumer, with this traceback
            self._fail(number, error)
            return None
        finally:
            del self._reading[me]
            self._watch.advanced("read")

    def _longest_read(self) -> Pending | None:
        reading = sorted(self._reading.values(), key=operator.itemgetter(2))
        if not reading:
            return None
        number, part, began = reading[0]
        return Pending(time.monotonic() - began, *self._batches.rows_of(number, part))

    def _place_and_put(self, number: int, host: H) -> None:
        try:
            if self._handover.wait_for_slot(number):
                self._watch.advanced("place")
                self._handover.put(number, placed(self._place, host))
                self._watch.advanced("read")
                self._go_on()
        except BaseException as error:  # noqa: BLE001
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        self._failed = min(self._failed, number)  # if two threads fail at once, the higher number at worst
        self._handover.finish(number, Last(error))
