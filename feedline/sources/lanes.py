"""Streams as lanes: datasets that can only be read one item after the other, and what is known before they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import grain
import jax

from feedline.options import checked_integer
from feedline.rows.record_leaves import as_arrays, digest_of, write_record
from feedline.rows.spec import RowSpec
from feedline.sources.lane_errors import lane_error, raised_by_user_code

MakeLane = Callable[[int, int], "grain.IterDataset[Any]"]
"""(lane, count) → the items of that lane."""


@dataclasses.dataclass(frozen=True)
class Lanes:
    """A source of `count` streams that are read side by side: for packing, filters, mixtures.

    Lane l fills rows l·B/count … (l+1)·B/count − 1 of each batch of B rows, from its own items in their
    order. A process runs the lanes of which it owns a row, whatever the number of processes: the lanes
    are part of the data's definition, as files are.

    Attributes:
      make_lane: (lane, count) → `grain.IterDataset`. The same items each time it is called, in whatever
        process: cut by `lane` and `count`, never by the process index. Lanes share no item.
      count: of lanes; it divides the batch size. A multiple of the shards of the batch axis lets every
        process run only lanes of its own.

    Example:
      >>> def make_lane(lane, count):  # every count-th number, and of those the even ones
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
        """One stream is one lane."""
        return source if isinstance(source, Lanes) else cls(lambda lane, count: source, 1)

    def check_batch_size(self, batch_size: int) -> None:
        """Refuse a batch that the lanes cannot fill in equal parts.

        Raises:
          ValueError: it names sizes and counts that work.
        """
        if batch_size % self.count:
            below, above = (batch_size // self.count * self.count, -(-batch_size // self.count) * self.count)
            sizes = f"{below} or {above}" if below else f"{above}"
            most = next(n for n in range(min(self.count, batch_size), 0, -1) if batch_size % n == 0)
            raise ValueError(
                f"lanes fill equal parts of a batch, so their count must divide the batch size; got {self.count} "
                f"lanes for batches of {batch_size}. Batches of {sizes} would work, and so would {most} lanes"
            )

    def open(self, lane: int) -> Any:
        """An iterator of all of a lane's items.

        Raises:
          TypeError: `make_lane` gave something else than an `IterDataset`.
        """
        dataset: Any = self.make_lane(lane, self.count)
        if not isinstance(dataset, grain.IterDataset):
            hint = "; call to_iter_dataset() on it" if isinstance(dataset, grain.MapDataset) else ""
            raise TypeError(
                f"make_lane must return a grain.IterDataset, got {type(dataset).__name__} for lane {lane}{hint}"
            )
        return iter(dataset)


class FirstItem:
    """The first item of the first lane that has one: it gives the spec, and fills rows that no item is left for.

    The look is over when this is built: each run opens its lanes anew, on its own thread, so that
    Grain's threads belong to that one and end with it. The item is read once more for it.

    Raises:
      ValueError: no lane has an item.
      FeedError: reading one failed.
    """

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
        self.spec = RowSpec.of(as_arrays(self.item))

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of the item: all that is known of a stream before it is read."""
        return {"kind": "stream", "first": digest_of(self.item)}

    def read(self, out: Any) -> None:
        """Write the item to index 0 of each leaf of `out`."""
        write_record(self.item, self.spec, jax.tree_util.tree_leaves(out), 0)
