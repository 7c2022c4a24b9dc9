"""The bounded hand-over of placed batches, which several threads produce, to one consuming thread.

Items are numbered from 0. Each number is put once, by any thread, in any order.

Guarantees:

1. Items are taken in the order of their numbers.
2. Item k has a slot once all but `depth` − 1 of the items before it were taken, and is made only then. So no
   more than `depth` exist that were not taken.
3. `finish` is an item like the others, with the number after the last, but needs no slot: so an error arrives
   even when all slots are taken.
4. `close` wakes all sides. After it no item has a slot, `take` raises `Closed`, and items that are put later
   are dropped, too.
5. `close` may run anywhere, also in a finalizer that interrupts one of the sides.
"""

from __future__ import annotations

import contextlib
import queue
from typing import Generic, TypeVar

T = TypeVar("T")
INSIDE = (
    "the next batch is being made on this thread, so a transform, a source or a signal handler cannot ask for "
    "another one; give it an iterator of its own"
)


class Closed(Exception):
    """The owner stopped: nothing more comes, and nobody waits for more."""


class Empty(Exception):
    """Nothing was ready within the time that `take` was given."""


class Handover(Generic[T]):
    """See the module's guarantees. Owned by the one that makes it, who also closes it.

    Args:
      depth: items that may wait, at least 1.
    """

    _signal = queue.SimpleQueue[None]

    def __init__(self, depth: int) -> None:
        # Guarantee 5 asks for SimpleQueue, whose put is reentrant. A semaphore has a lock inside, and a
        # finalizer that runs while its own thread holds that lock would wait for ever.
        self._slotted = depth  # how many items have, or had, a slot; the consumer alone changes it
        self._waiting: dict[int, queue.SimpleQueue[None]] = {}  # wakes the thread of each item without a slot
        # what was put; close() adds a None to wake the consumer
        self._items: queue.SimpleQueue[tuple[int, T] | None] = queue.SimpleQueue()
        self._early: dict[int, tuple[int, T]] = {}  # what came out of it before its turn
        self._next = 0  # the number of the item that is taken next
        self._finished = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """Items that are ready to be taken, without the last one: a hint, since all sides move on."""
        return 0 if self._closed else max(0, self._items.qsize() + len(self._early) - self._finished)

    @property
    def closed(self) -> bool:
        return self._closed

    def wait_for_slot(self, number: int, timeout_s: float | None = None) -> bool:
        """Wait until this item may be made; with a timeout, at most that long. One thread a number.

        Returns:
          Whether it may be made. False: not yet, or closed.
        """
        if number >= self._slotted and not self._closed:
            # register before looking again, so that a slot or a close in between still wakes us
            woken = self._waiting[number] = self._signal()
            if number >= self._slotted and not self._closed:
                with contextlib.suppress(queue.Empty):
                    woken.get(timeout=timeout_s)
            self._waiting.pop(number, None)
        return number < self._slotted and not self._closed

    def put(self, number: int, item: T) -> None:
        """Hand over an item that has a slot, or the last. Never waits; any thread may call it."""
        self._items.put((number, item))
        if self._closed:  # perhaps after the other side had emptied the queue: empty it again
            self.close()

    def finish(self, number: int, item: T) -> None:
        """Hand over the last item, which needs no slot: the end or an error. Never waits."""
        self._finished = True
        self.put(number, item)

    def take(self, timeout_s: float | None) -> T:
        """The next item, waiting for it. Called by the consumer.

        Raises:
          Empty: nothing came in `timeout_s` seconds (None: wait for ever).
          Closed: the hand-over was closed, whatever it still held.
        """
        while not self._closed:
            entry = self._early.pop(self._next, None)
            if entry is not None:
                self._next += 1
                self._slotted += 1
                # the thread removes its entry: an interrupt here would leave it asleep, and unknown to close()
                if (woken := self._waiting.get(self._slotted - 1)) is not None:
                    woken.put(None)
                return entry[1]
            try:
                entry = self._items.get(timeout=timeout_s)
            except queue.Empty:
                raise Empty from None
            if entry is not None:
                self._early[entry[0]] = entry
        self._early.clear()  # close() may have emptied it before the last entry came
        raise Closed

    def close(self) -> None:
        """Wake all sides and let go of the items. Idempotent, from any thread, never waits."""
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
