"""Streams that are read side by side as lanes, the reader of a lane, and the first item, which gives the spec."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import sys
import traceback
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, TypeGuard

import grain
import jax
import numpy as np
from absl import flags

from feedline._src.errors import FeedError
from feedline._src.options import checked_integer
from feedline._src.order.schedule import ENDLESS, Cursor
from feedline._src.rows.source import Indices, Source
from feedline._src.rows.spec import RowSpec
from feedline._src.rows.values import as_arrays, digest_of, write_record

MakeLane = Callable[[int, int], "grain.IterDataset[Any]"]
"""(lane, count) → the items of this lane."""
_TUPLE = "__tuple__"


@dataclasses.dataclass(frozen=True)
class Lanes:
    """A source of `count` streams that are read side by side: for packing, filters, mixtures.

    Lane l fills rows l·B/count … (l+1)·B/count − 1 of each batch of B rows with its own items, in their order.
    A process runs the lanes that fill its rows. Like files, the lanes are part of the data's definition, so their
    number does not depend on the number of processes.

    Attributes:
      make_lane: (lane, count) → `grain.IterDataset`. The items must depend on `lane` and `count` alone, so that
        each call and each process gets the same items. No two lanes may share an item.
      count: the number of lanes; it must divide the batch size. If it is a multiple of the number of shards of
        the batch axis, no lane runs in two processes.

    Example:
      >>> def make_lane(lane, count):  # every count-th number, filtered for even ones
      ...     return grain.MapDataset.range(lane, 1000, count).to_iter_dataset().filter(lambda x: x % 2 == 0)
      >>> [next(iter(make_lane(lane, 3))) for lane in range(3)]
      [0, 4, 2]
      >>> lanes = Lanes(make_lane, 3)
    """

    make_lane: MakeLane
    count: int

    def __post_init__(self) -> None:
        if not callable(self.make_lane):
            raise TypeError(
                f"Lanes takes a function (lane, count) -> grain.IterDataset, got {self.make_lane!r}; "
                "write Lanes(lambda lane, count: ..., count)"
            )
        object.__setattr__(self, "count", checked_integer("Lanes.count", self.count, at_least=1))

    @classmethod
    def of(cls, source: Lanes | grain.IterDataset[Any]) -> Lanes:
        """The lanes of a source. An `IterDataset` becomes a single lane."""
        return source if isinstance(source, Lanes) else cls(lambda lane, count: source, 1)

    def open(self, lane: int) -> Any:
        """An iterator over all items of a lane.

        Raises:
          TypeError: `make_lane` did not return an `IterDataset`.
        """
        dataset: Any = self.make_lane(lane, self.count)
        if not isinstance(dataset, grain.IterDataset):
            hint = "; call to_iter_dataset() on it" if isinstance(dataset, grain.MapDataset) else ""
            raise TypeError(
                f"make_lane must return a grain.IterDataset, got {type(dataset).__name__} for lane {lane}{hint}"
            )
        if not flags.FLAGS.is_parsed():  # as in a script that is not an absl app
            flags.FLAGS.mark_as_parsed()  # since Grain passes absl's flags to the workers of mp_prefetch
        return iter(dataset)


def is_stream(source: Any) -> TypeGuard[Lanes | grain.IterDataset[Any]]:
    """Whether a source has no random access."""
    return isinstance(source, grain.IterDataset | Lanes)


class FirstItem(Source):
    """A source for a stream. Its only row is the first item of the first lane that has an item.

    The item gives the spec, and fills rows for which no item is left. Its iterator is closed right away. Each
    pipeline opens the lanes again, on its own thread, so that Grain's threads end with the pipeline. So the item
    is read twice.

    Raises:
      ValueError: no lane has an item.
      FeedError: reading an item failed.
    """

    kind = "a stream"
    epoch_rows = ENDLESS
    shuffled = False

    def __init__(self, lanes: Lanes) -> None:
        for lane in range(lanes.count):
            iterator = lanes.open(lane)
            try:
                self.item = next(iterator)
                break
            except StopIteration as stop:
                if _raised_by_user_code(stop):
                    raise _lane_error(lane, 0, 0, stop) from stop
            except Exception as error:
                raise _lane_error(lane, 0, 0, error) from error
            finally:
                iterator.close()
        else:
            found = "an IterDataset" if lanes.count == 1 else f"{lanes.count} lanes"
            raise ValueError(f"a source must have at least one row, got {found} without an item")
        self._spec = RowSpec.of(as_arrays(self.item))
        self.spec = self._spec.structs
        self._lanes, self.lanes = lanes, lanes.count
        self.opened: list[Any] = []  # the `StreamBatches` that read the lanes, in the order of their creation
        self.format = "stream" if lanes.count == 1 else f"{lanes.count} lanes"

    def __len__(self) -> int:
        """1, for the first item; the length of the stream is not known."""
        return 1

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of the first item. Nothing else identifies a stream before it is read."""
        return {"kind": "stream", "first": digest_of(self.item)}

    def open_lane(self, index: int, after: Cursor, state: Any, last_epoch: int | None) -> Lane:
        """A reader of one lane. Arguments as in `Lane`."""
        return Lane(self._lanes, index, after, state, last_epoch)

    def read(self, rows: Indices, out: Any) -> None:
        for i in range(len(rows)):
            write_record(self.item, self._spec, jax.tree_util.tree_leaves(out), i)


class Lane:
    """Reads the items of one lane after the cursor `after`. One thread at a time may use it.

    Grain's iterator begins at `state`. Reading crosses the ends of epochs, and stops before epoch `last_epoch`.

    Attributes:
      epoch, position: of the next item.
      taken: items taken since the beginning of `after`'s epoch.
      ended: whether the lane is known to have no further item.
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
        self._items = self._read()

    def take(self, count: int) -> list[tuple[Any, int, int]]:
        """The next `count` items; fewer at the end. Of each: the record, its epoch, and its position there."""
        items = list(itertools.islice(self._items, count))
        self.taken += len(items)
        self.ended = len(items) < count
        return items

    def state(self) -> Any:
        """The state of Grain's iterator after the last item that was taken, with its tuples `marked`."""
        return marked(self._iterator.get_state())

    def empty_epoch(self) -> FeedError:
        """The error to raise if the epoch has no items."""
        return FeedError(f"every epoch of a stream must have items, and epoch {self.epoch} has none", stage="read")

    def close(self) -> None:
        """End Grain's iterator."""
        self._items.close()
        iterator, self._iterator = self._iterator, None  # if kept, Grain's finalizers print tracebacks at exit
        if iterator is not None:
            iterator.close()

    def _read(self) -> Generator[tuple[Any, int, int], None, None]:
        self._iterator = self._opened()
        while True:
            try:
                record = next(self._iterator)
            except StopIteration as stop:
                if _raised_by_user_code(stop):
                    raise self._failed(stop) from stop
                if self._last_epoch == self.epoch + 1:
                    return
                self._begin_epoch()
                continue
            except Exception as error:
                raise self._failed(error) from error
            item = record, self.epoch, self.position
            self.position += 1
            yield item

    def _begin_epoch(self) -> None:
        if self.position == 0:
            raise self.empty_epoch()
        self._iterator.close()
        self._state, self.epoch, self.position = None, self.epoch + 1, 0
        self._iterator = self._opened()

    def _opened(self) -> Any:
        try:
            iterator = self._lanes.open(self.index)
        except Exception as error:
            raise self._failed(error) from error
        if self._state is None:
            return iterator
        state = unmarked(self._state)
        try:
            if type(iterator).__module__.startswith("grain."):  # Grain itself would accept 1.5 as an index
                check_form(state, iterator.get_state())
            iterator.set_state(state)
        except Exception as error:
            iterator.close()
            if isinstance(error, OSError):  # a failed read, because Grain reads items again to restore packing
                raise self._failed(error) from error
            raise ValueError(
                f"lane {self.index} cannot go on from its state {repr(self._state)[:100]}: set_state of its "
                f"iterator raised {type(error).__name__}: {str(error).rstrip('.')}. Pass the state unchanged, to "
                "a feed over the dataset from which it was saved"
            ) from error
        return iterator

    def _failed(self, error: Exception) -> FeedError:
        return _lane_error(self.index, self.position, self.epoch, error)


def check_form(state: Any, fresh: Any, name: str = "it") -> None:
    """Refuse a state whose keys or types differ from those of a new Grain iterator's state.

    None is the state of an inner iterator that has not begun, or has ended. Elements of lists are not compared,
    because interleaving stores states of different forms in the same element over time.

    Raises:
      TypeError: the state differs.
    """
    if fresh is None or (state is None and isinstance(fresh, dict | list | tuple)):
        return
    kind = type(fresh)
    if type(state) is not kind and not (kind is int and isinstance(state, np.integer)):
        raise TypeError(f"{name} must be of type {kind.__name__}, and is {repr(state)[:100]}")
    if kind is dict and fresh:
        if state.keys() != fresh.keys():
            raise TypeError(
                f"{name} must have the keys {sorted(fresh, key=str)}, and has {sorted(state, key=str)}"
            )
        for key in fresh:
            check_form(state[key], fresh[key], key if name == "it" else f"{name}.{key}")


def marked(state: Any) -> Any:
    """Copy a state and mark its tuples, because JSON would turn them into lists, which Grain does not accept.

    Example:
      >>> marked({"slice": (2, 5), "index": [0]})
      {'slice': {'__tuple__': [2, 5]}, 'index': [0]}
    """
    if isinstance(state, dict):
        return {key: marked(value) for key, value in state.items()}
    if type(state) is list:
        return [marked(value) for value in state]
    if type(state) is tuple:
        return {_TUPLE: [marked(value) for value in state]}
    return copy.deepcopy(state)


def unmarked(state: Any) -> Any:
    """The inverse of `marked`.

    Example:
      >>> unmarked(marked({"slice": (2, 5), "index": [0]}))
      {'slice': (2, 5), 'index': [0]}
    """
    if isinstance(state, dict):
        if state.keys() == {_TUPLE}:
            return tuple(unmarked(value) for value in state[_TUPLE])
        return {key: unmarked(value) for key, value in state.items()}
    return [unmarked(value) for value in state] if type(state) is list else copy.deepcopy(state)


def _lane_error(lane: int, items: int, epoch: int, error: Exception) -> FeedError:
    """The error to raise if the next item of a lane cannot be read.

    Args:
      items: the number of items of this epoch that were read before the error.
    """
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, StopIteration):
        why = (
            "StopIteration, raised by a function of its dataset (it would look like the end of the lane); give "
            "next() a default in that function, or catch the StopIteration"
        )
    return FeedError(f"lane {lane} failed after {items} items of epoch {epoch} with {why}", stage="read")


def _raised_by_user_code(stop: StopIteration) -> bool:
    """Whether `stop` is an error: raised by a user's function (of a map, filter or source) that Grain called.

    A StopIteration from the `__next__` of an iterator, Grain's or the user's, is the end of a stream. From any
    other function, it is an error. Some of Grain's iterators catch this error and later raise a StopIteration of
    their own. If the error is not the `__cause__` of the new one, it is lost, and the result is False.
    """
    link: BaseException | None = stop
    while link is not None:
        frames = [frame for frame, _ in traceback.walk_tb(link.__traceback__)]
        # leaves out thread pools between Grain and the function
        frames = [frame for frame in frames if _package(frame) not in sys.stdlib_module_names]
        for caller, called in itertools.pairwise(frames):
            name = called.f_code.co_name.rpartition(".")[2]  # Cython's names are qualified
            if _package(caller) == "grain" and _package(called) != "grain" and name != "__next__":
                return True
        link = link.__cause__
    return False


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
