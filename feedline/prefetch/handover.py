"""The bounded hand-over of placed batches from one producing thread to one consuming thread.

Guarantees:

1. Items are taken in the order they were put.
2. No more than `depth` items exist between `reserve` and `take`: a slot is reserved before an item
   is made, and freed when the consumer takes it.
3. `finish` is an item like the others: it arrives after all that were put before it, and needs no
   slot, so an error arrives even when all slots are taken.
4. `close` wakes both sides. After it `reserve` returns False, `take` raises `Closed`, and no item is
   kept, one that is put later included.
5. `close` may run anywhere, also in a finalizer that interrupts one of the two sides.
"""

from __future__ import annotations

import queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Closed(Exception):
    """The owner stopped: nothing more comes, and nobody waits for more."""


class Empty(Exception):
    """Nothing was ready within the time that `take` was given."""


class Handover(Generic[T]):
    """See the module's guarantees. Owned by the one that makes it, who also closes it.

    Args:
      depth: items that may wait, at least 1.
    """

    def __init__(self, depth: int) -> None:
        # Guarantee 5 asks for SimpleQueue, whose put is reentrant. A semaphore has a lock inside, and a
        # finalizer that runs while its own thread holds that lock would wait for ever.
        # one entry for each free slot: depth − (items reserved, put and not yet taken);
        # close() adds one to wake the producer
        self._slots: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._slots.put(None)
        # what take() gives, oldest first; close() adds a None to wake the consumer
        self._items: queue.SimpleQueue[tuple[T, bool] | None] = queue.SimpleQueue()
        self._finished = False
        self._closed = False

    @property
    def waiting(self) -> int:
        """Items that are ready to be taken, but the last: a hint, since both sides move on."""
        return 0 if self._closed else max(0, self._items.qsize() - self._finished)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def reserve(self) -> bool:
        """Wait for a slot, for the item that is made next. Called by the producer. False: closed."""
        if not self._closed:
            self._slots.get()
        return not self._closed

    def put(self, item: T) -> None:
        """Hand over the item that a slot was reserved for. Never waits."""
        self._add((item, True))

    def finish(self, item: T) -> None:
        """Hand over the last item, which needs no slot: the end or an error. Never waits."""
        self._finished = True
        self._add((item, False))

    def take(self, timeout_s: float | None) -> T:
        """The oldest item, waiting for it. Called by the consumer.

        Raises:
          Empty: none came in `timeout_s` seconds (None: wait for ever).
          Closed: the hand-over was closed, whatever it still held.
        """
        if self._closed:
            raise Closed
        try:
            entry = self._items.get(timeout=timeout_s)
        except queue.Empty:
            raise Empty from None
        if entry is None or self._closed:  # closing drops items: this one need not be the oldest any more
            raise Closed
        item, has_slot = entry
        if has_slot:
            self._slots.put(None)
        return item

    def close(self) -> None:
        """Wake both sides and let go of the items. Idempotent, from any thread, never waits."""
        self._closed = True
        self._slots.put(None)
        while True:
            try:
                self._items.get_nowait()
            except queue.Empty:
                break
        self._items.put(None)

    def _add(self, entry: tuple[T, bool]) -> None:
        self._items.put(entry)
        if self._closed:  # perhaps after the other side had emptied the queue: empty it again
            self.close()
