"""Lanes: streams that are read side by side; the first item, which gives a stream its spec; errors of lanes."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeGuard

import grain
import jax
from absl import flags

from feedline._src.errors import FeedError
from feedline._src.options import checked_integer
from feedline._src.order.schedule import ENDLESS
from feedline._src.rows.source import Indices, Source
from feedline._src.rows.spec import RowSpec
from feedline._src.rows.values import as_arrays, digest_of, write_record

MakeLane = Callable[[int, int], "grain.IterDataset[Any]"]
"""(lane, count) → the items of this lane."""


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
                if raised_by_user_code(stop):
                    raise lane_error(lane, 0, 0, stop) from stop
            except Exception as error:
                raise lane_error(lane, 0, 0, error) from error
            finally:
                iterator.close()
        else:
            found = "an IterDataset" if lanes.count == 1 else f"{lanes.count} lanes"
            raise ValueError(f"a source must have at least one row, got {found} without an item")
        self._spec = RowSpec.of(as_arrays(self.item))
        self.spec = self._spec.structs
        self.opener, self.lanes = lanes, lanes.count
        self.opened: list[Any] = []  # the `StreamBatches` that read the lanes, in the order of their creation
        self.format = "stream" if lanes.count == 1 else f"{lanes.count} lanes"

    def __len__(self) -> int:
        """1, for the first item; the length of the stream is not known."""
        return 1

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of the first item. Nothing else identifies a stream before it is read."""
        return {"kind": "stream", "first": digest_of(self.item)}

    def read(self, rows: Indices, out: Any) -> None:
        for i in range(len(rows)):
            write_record(self.item, self._spec, jax.tree_util.tree_leaves(out), i)


def lane_error(lane: int, items: int, epoch: int, error: Exception) -> FeedError:
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


def raised_by_user_code(stop: StopIteration) -> bool:
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
