"""One lane from one place on: its items in their order, and where it ends."""

from __future__ import annotations

from typing import Any, NamedTuple

from feedline.errors import FeedError
from feedline.order.schedule import Cursor
from feedline.sources.lane_errors import lane_error, raised_by_user_code
from feedline.sources.lanes import Lanes
from feedline.streams.tuples import difference, marked, unmarked


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
        self._must_have_ended = False  # by its state, which otherwise contradicts the place

    def take(self, count: int) -> list[Item]:
        """The next `count` items; fewer at the end.

        Raises:
          FeedError: reading failed; it names the lane and the item.
          ValueError: it cannot go on from its state.
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
            if self._iterator is None:
                self._iterator = self._opened()
            try:
                record = next(self._iterator)
            except StopIteration as stop:
                if raised_by_user_code(stop):
                    raise self._failed(stop) from stop
            except Exception as error:
                raise self._failed(error) from error
            else:
                if self._must_have_ended:
                    raise self._cannot_go_on(
                        f"{self.position} items were taken from it, which are more than its index, and it has not "
                        "ended"
                    )
                return record
            if self._last_epoch == self.epoch + 1:
                self.ended = True
                return None
            if self.position == 0:
                raise FeedError(
                    f"every epoch of a stream must have items, and epoch {self.epoch} has none", stage="read"
                )
            self.close()
            self._state, self._must_have_ended = None, False
            self.epoch, self.position = self.epoch + 1, 0

    def _opened(self) -> Any:
        """Its iterator, at `_state`."""
        try:
            iterator = self._lanes.open(self.index)
        except Exception as error:
            raise self._failed(error) from error
        if self._state is not None:
            try:
                self._restore(iterator)
            except Exception:
                iterator.close()
                raise
        return iterator

    def _restore(self, iterator: Any) -> None:
        """Set an iterator that was just made to `_state`."""
        state = unmarked(self._state)
        try:
            # Grain takes numbers of any type, and counts on from 1.5
            wrong = difference(state, iterator.get_state()) if _is_grains(iterator) else None
            if wrong is None:
                iterator.set_state(state)
        except OSError as error:  # packing reads again what it had read
            raise self._failed(error) from error
        except Exception as error:
            told = f"set_state of its iterator raised {type(error).__name__}: {str(error).rstrip('.')}"
            raise self._cannot_go_on(told) from error
        if wrong is not None:
            raise self._cannot_go_on(wrong)
        self._must_have_ended = _counts(iterator, self._state) and self._state["next_index"] < self.position

    def _cannot_go_on(self, why: str) -> ValueError:
        told = repr(self._state)[:100]
        return ValueError(
            f"lane {self.index} cannot go on from its state {told}: {why}. Pass a state unchanged, and to a feed "
            "over the dataset that it was saved from"
        )

    def _failed(self, error: Exception) -> FeedError:
        return lane_error(self.index, self.position, self.epoch, error)


def _counts(iterator: Any, state: Any) -> bool:
    """Whether a state is the index of the next element, of which each gives one item or none: Grain's own are."""
    return isinstance(state, dict) and state.keys() == {"next_index"} and _is_grains(iterator)


def _is_grains(iterator: Any) -> bool:
    """Whether all of an iterator, down to the elements, is Grain's and none of it the user's."""
    parents = getattr(iterator, "_parents", None)  # private: where it is gone, nothing is said
    return type(iterator).__module__.startswith("grain.") and parents is not None and all(map(_is_grains, parents))
