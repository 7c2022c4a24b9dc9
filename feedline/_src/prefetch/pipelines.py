"""Prefetches placed batches: a bounded queue, the threads that fill it, and a synchronous variant.

Threads are daemons, so that a read that never returns cannot keep the interpreter from exiting. Threads that
Grain starts inside them inherit this.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from feedline._src.errors import FeedError
from feedline._src.prefetch.watch import Pending, Watch

_BRIEFLY_S = 0.5e-3
"""Seconds that a thread waits for a slot before it wakes another to read. Waking costs more than a short wait.

If the consumer is faster than the threads, a batch waits for a slot only while the previous one is being placed.
With 4 MB batches on two cores, a feed was 10 to 15 % faster with 0.5 ms than with 0; 2 ms was no better.
"""
_POLL_S = 0.01
INSIDE = (
    "the next batch is being made on this thread, so a transform, a source or a signal handler cannot ask for "
    "another batch; give it an iterator of its own"
)
H = TypeVar("H")
T = TypeVar("T")
H_co = TypeVar("H_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)
_log = logging.getLogger("feedline")


class Closed(Exception):
    """The pipeline was closed, and returns no more items."""


class Empty(Exception):
    """No item arrived within the timeout of `Handover.take`."""


class Run(Protocol[T_co]):
    """A pipeline, which makes placed batches ahead of the consumer, or on the consumer's thread.

    One thread calls `take`. The owner calls `start` once, and `close` and `join` from any thread.
    """

    @property
    def waiting(self) -> int:
        """Items that are ready to be taken."""

    def start(self) -> None:
        """Start the threads."""

    def take(self) -> T_co:
        """Wait for the next item, and return it.

        Raises:
          StopIteration: the source is exhausted. The value is that of the source's StopIteration.
          Closed: `close` was called before or during this call.
          StallError: for too long during this call, no stage advanced.
          Exception: the source or placing raised it, and all earlier items have been taken.
        """

    def close(self) -> None:
        """Stop, and drop all items. Idempotent; never waits."""

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """After `close`, wait for all threads except the calling one.

        Without `reads`, do not wait for threads inside a read by row index. A `Prefetcher` always waits for the
        thread of an iterator, since the next iterator may share its state.

        Returns:
          The name of a thread that is still in a read or a transfer; None if all threads have ended.
        """


class HostIterator(Protocol[H_co]):
    """An iterator of host batches. One thread at a time may call its methods."""

    def __next__(self) -> H_co: ...
    def close(self) -> None: ...


@runtime_checkable
class PartialBatches(Protocol[H_co]):
    """`count` host batches of `parts` parts each, read by any threads in any order."""

    @property
    def parts(self) -> int: ...
    @property
    def count(self) -> float: ...
    def read(self, number: int, part: int) -> H_co | None:
        """Read a part of batch `number`. The call that completes the batch returns it."""

    def rows_of(self, number: int, part: int) -> tuple[int, int, str | None] | None:
        """The number of rows of a part, the row index of the first row, and that row's file. None: not known."""

    def end(self) -> StopIteration:
        """The exception that the consumer raises after the last batch."""

    def close(self) -> None:
        """Called by each thread when it ends."""


class _OneByOne(Generic[H]):
    """The batches of an iterator as `PartialBatches`: one part each, read in order by one thread."""

    parts = 1
    count = math.inf

    def __init__(self, iterator: HostIterator[H]) -> None:
        self._iterator = iterator
        self._unclosed = [iterator]  # the thread that removes the iterator closes it

    def read(self, number: int, part: int) -> H:
        """Return the next batch. At the end and after an error, close the iterator before raising."""
        try:
            return next(self._iterator)
        except BaseException as last:
            try:
                self.close()
            except BaseException as error:
                if isinstance(last, StopIteration):
                    raise error from None
                last.add_note(f"feedline: closing the source failed, too: {error!r}")
            raise

    def rows_of(self, number: int, part: int) -> None:
        """Return None: the rows are not known."""

    def end(self) -> StopIteration:
        """Never called, since `read` raises the StopIteration of the iterator."""
        return StopIteration()

    def close(self) -> None:
        with contextlib.suppress(IndexError):
            self._unclosed.pop().close()


class Handover(Generic[T]):
    """A bounded, ordered queue of placed batches, from several threads to one consumer thread.

    Items are numbered from 0. Each number is put once, by any thread, in any order.

    Guarantees:

    1. Items are taken in the order of their numbers.
    2. Item k gets a slot once all but `depth` − 1 of the earlier items have been taken, and is made only then. So
       at most `depth` items exist that have not been taken.
    3. `finish` puts the last item: the end, or an error instead of item k. This item needs no slot, so it arrives
       even if all slots are in use.
    4. `close` wakes all waiting threads. After that, no item gets a slot, `take` raises `Closed`, and all items
       are dropped, including items that are put later.
    5. `close` may run anywhere, even in a finalizer that interrupts `put` or `take` on the same thread.

    `depth`: how many items may wait, at least 1.
    """

    _signal = queue.SimpleQueue[None]

    def __init__(self, depth: int) -> None:
        # Guarantee 5 needs SimpleQueue, whose put is reentrant. A semaphore contains a lock, and a finalizer
        # that runs while its own thread holds this lock would wait for ever.
        self._slotted = depth  # how many items have, or had, a slot; only the consumer changes it
        self._waiting: dict[int, queue.SimpleQueue[None]] = {}  # {item without a slot: wakes its thread}
        # what was put; close() adds a None to wake the consumer
        self._items: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()
        self._early: dict[int, tuple[int, T]] = {}  # items that arrived in `_items` before their turn
        self._next = 0  # the number of the item that is taken next
        self._finished = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of ready items, without the item of `finish`. Approximate, because other threads continue."""
        return 0 if self._closed else max(0, self._items.qsize() + len(self._early) - self._finished)

    @property
    def closed(self) -> bool:
        return self._closed

    def wait_for_slot(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until an item has a slot, for at most `timeout_s` if given. Only one thread may wait for an item.

        Returns:
          Whether the item may be made: it has a slot, and the hand-over is not closed.
        """
        if number >= self._slotted and not self._closed:
            # register before looking again, so that a slot or a close in between still wakes this thread
            woken = self._waiting[number] = self._signal()
            if number >= self._slotted and not self._closed:
                with contextlib.suppress(queue.Empty):
                    woken.get(timeout=timeout_s)
            self._waiting.pop(number, None)
        return number < self._slotted and not self._closed

    def put(self, number: int, item: T) -> None:
        """Hand over an item that has a slot, or the last item. Never waits; any thread may call it."""
        self._items.put((number, item))
        if self._closed:  # `close` may have emptied the queue before this item came: empty it again
            self.close()

    def finish(self, number: int, item: T) -> None:
        """Hand over the last item, which needs no slot: the end or an error. Never waits."""
        self._finished = True
        self.put(number, item)

    def take(self, timeout_s: float | None) -> T:
        """Wait for the next item, and return it. Called by the consumer.

        Raises:
          Empty: no item arrived within `timeout_s` seconds (None: wait for ever).
          Closed: the hand-over was closed, even if it still held items.
        """
        while not self._closed:
            entry = self._early.pop(self._next, None)
            if entry is not None:
                self._next += 1
                self._slotted += 1
                # only the waiting thread removes its entry. If the consumer removed it and were interrupted before
                # `put`, that thread would sleep for ever, because close() would not find it
                if (woken := self._waiting.get(self._slotted - 1)) is not None:
                    woken.put(None)
                return entry[1]
            try:
                entry = self._items.get(timeout=timeout_s)
            except queue.Empty:
                raise Empty from None
            if entry is not None:
                self._early[entry[0]] = entry
        self._early.clear()  # close() may have emptied it before the last entry was added
        raise Closed

    def close(self) -> None:
        """Wake all waiting threads, and drop the items. Idempotent, from any thread, never waits."""
        self._closed = True
        for woken in list(self._waiting.values()):
            woken.put(None)
        self._early.clear()
        while True:
            try:
                self._items.get_nowait()
            except queue.Empty:
                break
        self._items.put(None)


class _Last(NamedTuple):
    """The last item: an error, or the source's StopIteration with its value."""

    error: BaseException


def _placed(place: Callable[[H], T], host: H) -> T:
    try:
        return place(host)
    except StopIteration as error:  # it must not look like the end of the source
        raise RuntimeError("placing a batch raised StopIteration") from error


class _Thread(threading.Thread):
    """A daemon thread that can be joined again after an interrupt in `join`.

    Before Python 3.13, a `threading.Thread` counts as ended after an interrupt in its `join`.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._has_run = False

    def run(self) -> None:
        """Call the target."""
        try:
            super().run()
        finally:
            self._has_run = True

    def is_alive(self) -> bool:
        """Whether it was started, and its target has not returned."""
        return self.ident is not None and not self._has_run

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended, or for `timeout` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with contextlib.suppress(RuntimeError):  # another thread is still inside `self.start`
            super().join(timeout)
        while self.is_alive() and time.monotonic() < deadline:  # `super().join` may have returned too early
            time.sleep(_POLL_S)


class Prefetcher(Generic[H, T]):
    """Threads that read parts of batches in order, and place each batch once it has a slot.

    The thread that completes a batch places it. At most `threads` threads read at a time: while a thread waits for
    a slot, another thread reads. At most `ahead` batches are being read, or wait to be placed. At most `depth`
    placed batches wait for the consumer.
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
        self._batches = batches
        self._place = place
        self._watch = watch
        self._ahead = ahead
        self._handover: Handover[T | _Last] = Handover(depth)
        # (number, part), in the order in which they are read; a None ends a thread
        self._claims: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()  # a thread needs one to read
        for _ in range(threads):
            self._permits.put(None)
        # {thread inside a read: (batch, part, when the read began on the monotonic clock)}
        self._reading: dict[threading.Thread, tuple[int, int, float]] = {}
        method = weakref.WeakMethod(self._longest_read)
        watch.longest_read = lambda: None if (longest := method()) is None else longest()
        self._next = 0  # the batch to be read next; guarded by _lock
        self._lock = threading.Lock()
        self._closed = False
        self._one_by_one = isinstance(batches, _OneByOne)
        # `ahead` - 1 batches may wait for slots, each blocking a thread
        names = [f"feedline-read-{i}" for i in range(threads + ahead - 1)]
        self._threads = [_Thread(self._run, "feedline-place" if self._one_by_one else name) for name in names]

    @classmethod
    def of_iterator(
        cls, iterator: HostIterator[H], place: Callable[[H], T], depth: int, watch: Watch
    ) -> Prefetcher[H, T]:
        """A pipeline with one thread, which reads and places the batches of an iterator."""
        return cls(_OneByOne(iterator), place, depth, watch, threads=1, ahead=1)

    @property
    def waiting(self) -> int:
        """See `Run`."""
        return self._handover.waiting

    def start(self) -> None:
        """See `Run`."""
        self._watch.advanced("read")
        for _ in range(self._ahead):
            self._claim_next()
        handled = sys.exc_info()[1]  # the caller may be in an `except` block
        for started, thread in enumerate(self._threads):
            try:
                thread.start()
            except RuntimeError as error:
                if error.__context__ not in (None, handled):  # an interrupt made `start` fail to unlock
                    raise error.__context__ from None
                raise FeedError(
                    "a feed needs Reading.threads + Reading.buffer threads, and of these "
                    f"{len(self._threads)} only {started} could be started ({error}); use smaller numbers, or "
                    "raise the limit (ulimit -u, ulimit -v, or pids.max of the control group)",
                    stage="read",
                ) from error

    def take(self) -> T:
        """See `Run`."""
        waits = False
        try:
            item = self._handover.take(0)  # fast path, without bookkeeping
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
        if self._closed:  # `Runs` calls this with each batch, as long as one of the threads is stuck
            return
        self._watch.stop()
        self._handover.close()
        self._end_threads()
        for _ in self._threads:
            self._permits.put(None)
        self._closed = True  # last, so that after an interrupt, the next call repeats everything

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """See `Run`."""
        me, deadline = threading.current_thread(), time.monotonic() + timeout_s
        if me in self._reading:  # two threads that close the feed inside a transform would wait for each other
            return me.name
        reads = reads or self._one_by_one
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
                self._end_threads()

    def _end_threads(self) -> None:
        """End the threads once they have read all earlier claims."""
        for _ in self._threads:
            self._claims.put(None)

    def _run(self) -> None:
        self._permits.get()  # this thread keeps its permit, except while it waits for a slot
        while self._read_and_place():
            pass
        self._permits.put(None)
        try:
            self._batches.close()
        except BaseException:  # noqa: BLE001  from the user's iterator; only logged, since no `take` follows
            _log.warning("closing the source failed", exc_info=True)

    def _read_and_place(self) -> bool:
        """Read a part, and place the batch if the part completes it. False: this thread must end."""
        claim = self._claims.get()
        if claim is None or self._handover.closed:
            return False
        host = self._read(*claim)
        if host is None:
            return True
        if self._handover.wait_for_slot(claim[0], _BRIEFLY_S):
            self._place_and_put(claim[0], host)
        else:
            self._permits.put(None)  # another thread reads meanwhile
            self._place_and_put(claim[0], host)
            del host  # so that its memory is free while this thread waits
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
        self._handover.finish(number, _Last(error))
        self._end_threads()

    def _longest_read(self) -> Pending | None:
        reading = sorted(self._reading.values(), key=operator.itemgetter(2))
        if not reading or (rows := self._batches.rows_of(*reading[0][:2])) is None:
            return None
        return Pending(time.monotonic() - reading[0][2], *rows)


class Synchronous(Generic[H, T]):
    """Reads and places each item on the consumer's thread, inside `take`, so that a debugger can follow it."""

    waiting = 0

    def __init__(self, source: HostIterator[H], place: Callable[[H], T], watch: Watch) -> None:
        self._source = _OneByOne(source)
        self._place = place
        self._watch = watch
        self._closed = False
        self._inside = threading.Lock()  # held by `take`
        self._thread: threading.Thread | None = None  # the thread inside `take`

    def start(self) -> None:
        """Nothing to start."""

    def take(self) -> T:
        """See `Run`. Raises ValueError if this thread is inside `take` already."""
        if self._thread is threading.current_thread():
            raise ValueError(INSIDE)
        try:
            with self._inside:
                self._thread = threading.current_thread()
                if self._closed:
                    raise Closed
                self._watch.waits()
                self._watch.advanced("read")
                with self._watch.alarmed():
                    host = self._source.read(0, 0)
                    self._watch.advanced("place")
                    return _placed(self._place, host)
        finally:
            self._thread = None
            if self._closed:  # by another thread, or during this call
                self._source.close()

    def close(self) -> None:
        """See `Run`."""
        self._closed = True
        if not self._inside.locked():  # otherwise, `take` closes the source after unlocking
            self._source.close()

    def join(self, timeout_s: float, *, reads: bool = True) -> str | None:
        """See `Run`."""
        thread = self._thread
        if thread is None:
            return None
        if reads and thread is not threading.current_thread() and self._inside.acquire(timeout=timeout_s):
            self._inside.release()
            self._source.close()
            return None
        return thread.name
