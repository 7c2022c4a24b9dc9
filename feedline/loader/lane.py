"""One lane from one place on: its items in their order, and where it ends."""

from __future__ import annotations

from typing import Any, NamedTuple

from feedline.errors import FeedError
from feedline.loader.lanes import Lanes
from feedline.loader.tuples import marked
from feedline.schedule import Cursor


class Item(NamedTuple):
    """A record, and where in its lane it came."""

    record: Any
    epoch: int
    position: int


class Lane:
    """Called and closed by one thread at a time.

    Args:
      lanes: where it comes from.
      index: which one.
      after: the epoch to begin in, and how many of its items came before.
      state: Grain's, saved there; None: the beginning of that epoch.
      last_epoch: before which it ends, running over the end of each epoch until then; None: never.

    Attributes:
      epoch, position: of its next item.
      taken: items that came before it, of `after`'s epoch and those that followed.
      ended: whether its end was met.
    """

    def __init__(self, lanes: Lanes, index: int, after: Cursor, state: Any, last_epoch: int | None) -> None:
        self.index = index
        self.epoch, self.position = after
        self.taken = after.position
        self.ended = False
        self._lanes = lanes
        self._last_epoch = last_epoch
        self._state = state
        self._iterator: Any = None

    def take(self, count: int) -> list[Item]:
        """The next `count` items; fewer at the end.

        Raises:
          FeedError: reading failed; it names the lane and the item.
        """
        taken: list[Item] = []
        while len(taken) < count and not self.ended:
            record = self._next()
            if not self.ended:
                taken.append(Item(record, self.epoch, self.position))
                self.position += 1
        self.taken += len(taken)
        return taken

    def state(self) -> Any:
        """Grain's, `marked`, after the last item that was taken, or at the end."""
        return marked(self._iterator.get_state())

    def close(self) -> None:
        """End Grain's iterator."""
        iterator, self._iterator = self._iterator, None  # let go now: at exit Grain's finalizers print tracebacks
        if iterator is not None:
            iterator.close()

    def _next(self) -> Any:
        """The next record, perhaps of a later epoch; None at the end."""
        while True:
            try:
                if self._iterator is None:
                    self._iterator = self._lanes.open(self.index, self._state)
                return next(self._iterator)
            except StopIteration:
                if self._last_epoch == self.epoch + 1:
                    self.ended = True
                    return None
            except Exception as error:
                raise FeedError(
                    f"lane {self.index} failed after {self.position} items of epoch {self.epoch} with "
                    f"{type(error).__name__}: {error}",
                    stage="read",
                ) from error
            if self.position == 0:
                raise FeedError(
                    f"every epoch of a stream must have items, and epoch {self.epoch} has none", stage="read"
                )
            self.close()
            self._state = None
            self.epoch, self.position = self.epoch + 1, 0
