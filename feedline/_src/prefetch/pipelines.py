"""A `Run` in three ways: reading threads, one thread over an iterator, or the caller's own thread.

Threads are daemons, so that a read that never returns cannot keep the interpreter from exiting; threads that
Grain starts in them inherit that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from feedline._src.prefetch.handover import INSIDE, Closed, Empty, Handover
from feedline._src.prefetch.watch import Pending, Watch

_BRIEFLY_S = 0.5e-3
"""How long a thread waits for a slot before it gives up its permit: waking another thread costs more than that.

While the consumer is the faster side, a batch lacks its slot only because the one before it is still being placed.
With 4 MB batches on two cores a feed was 10 to 15 % faster with 0.5 ms than with 0; 2 ms were no better.
"""
H = TypeVar("H")
T = TypeVar("T")
H_co = TypeVar("H_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)
_log = logging.getLogger("feedline")


class Run(Protocol[T_co]):
    """Placed batches, made ahead of the consumer or on its thread.

    One thread takes. The owner calls `start` once, and `close` and `join` from any thread.
    """

    @property
    def waiting(self) -> int:
        """Items that are ready to be taken."""

    def start(self) -> None:
        """Start the threads."""

    def take(self) -> T_co:
        """The next item.

        Raises:
          StopIteration: the source is exhausted; with the source's value.
          Closed: `close` was called, before or meanwhile.
          StallError: no stage advanced for too long while this waited.
          Exception: what the source or placing raised, after all items before it.
        """

    def close(self) -> None:
        """Stop, and drop all items. Idempotent; never waits."""

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """Wait for the threads after `close`, except the calling one.

        Without `reads`, threads inside a read by row index are not waited for. A stream's thread always is, since
        the next iterator may share state with this one.

        Returns:
          The name of a thread that is still in a read or a transfer. None: nothing more is read.
        """


class HostIterator(Protocol[H_co]):
    """Host batches in order, for one thread, which also closes it."""

    def __next__(self) -> H_co: ...
    def close(self) -> None: ...


class PartialBatches(Protocol[H_co]):
    """`count` host batches of `parts` parts each, read by any threads in any order."""

    @property
    def parts(self) -> int: ...
    @property
    def count(self) -> int: ...
    def read(self, number: int, part: int) -> H_co | None:
        """Read a part of batch `number`. The call that completes the batch returns it."""

    def rows_of(self, number: int, part: int) -> tuple[int, int, str | None]:
        """Of a part: the number of rows, the row index of the first, and its file, if known."""

    def end(self) -> StopIteration:
        """What tells the consumer that all batches have been delivered."""


class _Last(NamedTuple):
    """The item after the last one: an error, or the source's StopIteration with its value."""

    error: BaseException


class _Threaded(Generic[T]):
    """At most `depth` placed items, at least one, wait for the consumer. Subclasses fill the hand-over."""

    def __init__(self, depth: int, watch: Watch) -> None:
        self._watch = watch
        self._handover: Handover[T | _Last] = Handover(depth)

    @property
    def waiting(self) -> int:
        return self._handover.waiting

    def take(self) -> T:
        """See `Run`."""
        waits = False
        try:
            item = self._handover.take(0)  # the usual case: nothing else is asked or noted
        except Empty:
            waits = True
        if waits:  # outside of the handler, so that no traceback mentions `Empty`
            self._watch.waits()
            while waits:
                with contextlib.suppress(Empty):
                    item = self._handover.take(self._watch.patience_s())
                    break
                self._watch.warn_or_raise(self.waiting)
        if isinstance(item, _Last):
            try:
                raise item.error
            finally:
                del item  # breaks the cycle of the error, its traceback and this frame, which holds the batch
        return item

    def close(self) -> None:
        """See `Run`."""
        self._watch.stop()
        self._handover.close()


def _placed(place: Callable[[H], T], host: H) -> T:
    try:
        return place(host)
    except StopIteration as error:  # it must not pass for the source's end
        raise RuntimeError("placing a batch raised StopIteration") from error


class Prefetcher(_Threaded[T], Generic[H, T]):
    """One thread takes each host batch from an iterator, and places it once it has a slot: streams, workers."""

    def __init__(self, source: HostIterator[H], place: Callable[[H], T], depth: int, watch: Watch) -> None:
        super().__init__(depth, watch)
        self._source = source
        self._place = place
        self._thread = threading.Thread(target=self._run, name="feedline-place", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return self._thread.name if self._thread.is_alive() else None

    def _run(self) -> None:
        last: BaseException = Closed()
        number = 0
        try:
            while not self._handover.closed and self._produce(number):
                number += 1
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
        """Read and place one item. False: closed. StopIteration: the source's."""
        self._watch.advanced("read")
        host = next(self._source)
        self._watch.advanced("wait")  # for a slot: the consumer is the slow one
        if not self._handover.wait_for_slot(number):
            return False
        self._watch.advanced("place")
        self._handover.put(number, _placed(self._place, host))
        return True


class Readers(_Threaded[T], Generic[H, T]):
    """Threads that read parts of batches in order; one that completes a batch waits for its slot and places it.

    At most `threads` of them read at a time; the others wait for the slots of batches that were read ahead, and
    then place these. At most `ahead` batches are being read, or wait to be placed.
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
        # threads inside a read: of which part, and since when on the monotonic clock
        self._reading: dict[threading.Thread, tuple[int, int, float]] = {}
        method = weakref.WeakMethod(self._longest_read)
        watch.longest_read = lambda: None if (longest := method()) is None else longest()
        self._next = 0  # the batch that may be read next; held by _lock
        self._lock = threading.Lock()
        self._failed: float = math.inf  # the number of a batch that failed: none after it is needed
        # all batches ahead but one may wait for their slots, each with a thread
        self._threads = [
            threading.Thread(target=self._run, name=f"feedline-read-{i}", daemon=True)
            for i in range(threads + ahead - 1)
        ]

    def start(self) -> None:
        self._watch.advanced("read")
        for _ in range(self._ahead):
            self._claim_next()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        super().close()
        for _ in self._threads:
            self._claims.put(None)
            self._permits.put(None)

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        me, deadline = threading.current_thread(), time.monotonic() + timeout_s
        if me in self._reading:  # two threads that close the feed in a transform would wait for each other
            return me.name
        for thread in self._threads:
            if thread is not me and (reads or thread not in self._reading) and thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        return next((thread.name for thread in self._threads if thread.is_alive()), None)

    def _claim_next(self) -> None:
        """Let the threads read one more batch. After the last one, hand over the end."""
        with self._lock:
            number = self._next
            self._next += 1
            if number < self._batches.count:
                for part in range(self._batches.parts):
                    self._claims.put((number, part))
            elif number == self._batches.count:
                self._handover.finish(number, _Last(self._batches.end()))
                for _ in self._threads:
                    self._claims.put(None)

    def _run(self) -> None:
        self._permits.get()  # kept, except while this thread waits for a slot
        while self._read_and_place():
            pass
        self._permits.put(None)

    def _read_and_place(self) -> bool:
        """Read a part, and place the batch if that completes it. False: this thread ends."""
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

    def _place_and_put(self, number: int, host: H) -> None:
        try:
            if self._handover.wait_for_slot(number):
                self._watch.advanced("place")
                self._handover.put(number, _placed(self._place, host))
                self._watch.advanced("read")
                self._claim_next()
        except BaseException as error:  # noqa: BLE001
            self._fail(number, error)

    def _fail(self, number: int, error: BaseException) -> None:
        self._failed = min(self._failed, number)  # if two threads fail at once, the higher number at worst
        self._handover.finish(number, _Last(error))

    def _longest_read(self) -> Pending | None:
        reading = sorted(self._reading.values(), key=operator.itemgetter(2))
        if not reading:
            return None
        number, part, began = reading[0]
        return Pending(time.monotonic() - began, *self._batches.rows_of(number, part))


class Synchronous(Generic[H, T]):
    """Reads and places each item on the consumer's thread, inside `take`, so that a debugger can follow it."""

    waiting = 0

    def __init__(self, source: HostIterator[H], place: Callable[[H], T], watch: Watch) -> None:
        self._source = source
        self._unclosed = [source]  # whoever takes it out closes it: so it is closed once
        self._place = place
        self._watch = watch
        self._closed = False
        self._inside: threading.Thread | None = None  # the thread that is inside `take`
        # an entry once it has left after `close`. An Event has a lock, which an interrupt might leave held
        self._left: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        """Nothing to start."""

    def take(self) -> T:
        """See `Run`; ValueError if this thread is inside it already."""
        if self._inside is threading.current_thread():
            raise ValueError(INSIDE)
        try:
            # set before the look at `_closed`, while `close` sets that before `join` looks at `_inside`: so `join`
            # waits for this read, or it does not begin
            self._inside = threading.current_thread()
            if self._closed:
                raise Closed
            self._watch.waits()
            self._watch.advanced("read")
            with self._watch.alarmed():
                host = next(self._source)
                self._watch.advanced("place")
                return _placed(self._place, host)
        finally:
            self._inside = None
            if self._closed:
                self._left.put(None)
                self._close_source()

    def close(self) -> None:
        self._closed = True
        if self._inside is None:
            self._close_source()

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        if reads and self._inside not in (None, threading.current_thread()):
            with contextlib.suppress(queue.Empty):
                self._left.get(timeout=timeout_s)
                self._left.put(None)  # for others that wait
            self._close_source()
        inside = self._inside
        return None if inside is None else inside.name

    def _close_source(self) -> None:
        with contextlib.suppress(IndexError):
            self._unclosed.pop().close()
