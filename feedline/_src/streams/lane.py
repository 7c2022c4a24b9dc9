"""Reads the items of one lane, from a cursor on."""

from __future__ import annotations

from typing import Any, NamedTuple

from feedline._src.errors import FeedError
from feedline._src.order.schedule import Cursor
from feedline._src.sources.lanes import Lanes, lane_error, raised_by_user_code
from feedline._src.streams.tuples import difference, marked, unmarked


class Item(NamedTuple):
    """A record, with its epoch and its position in the lane."""

    record: Any
    epoch: int
    position: int


class Lane:
    """The items of one lane. Called and closed by one thread at a time.

    Args:
      lanes: makes the lane.
      index: the number of the lane.
      after: the epoch to begin in, and how many items of the lane came before.
      state: the state of Grain's iterator there; None: the beginning of that epoch.
      last_epoch: the lane ends before this epoch, and continues over the ends of earlier ones; None: never.

    Attributes:
      epoch, position: of the next item.
      taken: items taken since the beginning of `after`'s epoch.
      ended: whether the end of the lane was reached.
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
        self._must_have_ended = False  # by its state, which else contradicts its position

    def take(self, count: int) -> list[Item]:
        """The next `count` items; fewer at the end.

        Raises:
          FeedError: reading failed; it names the lane and the item.
          ValueError: the lane cannot continue from its state.
        """
        items: list[Item] = []
        while len(items) < count and not self.ended:
            record = self._next()
            if not self.ended:
                items.append(Item(record, self.epoch, self.position))
                self.position += 1
        self.taken += len(items)
        return items

    def state(self) -> Any:
        """The state of Grain's iterator after the last item that was taken, with tuples `marked`."""
        return marked(self._iterator.get_state())

    def close(self) -> None:
        """End Grain's iterator."""
        iterator, self._iterator = self._iterator, None  # not kept: Grain's finalizers print tracebacks at exit
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
        """A new iterator of the lane, at `_state`."""
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
        """Set a new iterator to `_state`."""
        state = unmarked(self._state)
        try:
            # Grain accepts numbers of any type, and would continue to count from 1.5
            wrong = difference(state, iterator.get_state()) if _is_grains(iterator) else None
            if wrong is None:
                iterator.set_state(state)
        except OSError as error:  # to restore packing, Grain reads items again
            raise self._failed(error) from error
        except Exception as error:
            why = f"set_state of its iterator raised {type(error).__name__}: {str(error).rstrip('.')}"
            raise self._cannot_go_on(why) from error
        if wrong is not None:
            raise self._cannot_go_on(wrong)
        self._must_have_ended = _counts(iterator, self._state) and self._state["next_index"] < self.position

    def _cannot_go_on(self, why: str) -> ValueError:
        state = repr(self._state)[:100]
        return ValueError(
            f"lane {self.index} cannot go on from its state {state}: {why}. Pass a state unchanged, and to a feed "
            "over the dataset that it was saved from"
        )

    def _failed(self, error: Exception) -> FeedError:
        return lane_error(self.index, self.position, self.epoch, error)


def _counts(iterator: Any, state: Any) -> bool:
    """Whether a state is the index of the next element, and each element gives one item or none, as in Grain."""
    return isinstance(state, dict) and state.keys() == {"next_index"} and _is_grains(iterator)


def _is_grains(iterator: Any) -> bool:
    """Whether an iterator and all its parents are Grain's own, and none is the user's."""
    parents = getattr(iterator, "_parents", None)  # private: without it the answer is False
    return type(iterator).__module__.startswith("grain.") and parents is not None and all(map(_is_grains, parents))
