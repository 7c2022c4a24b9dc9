"""What a plan is made from, the options and the metadata of a source; and which options do not go together.

Also the leaves that feedline adds to those of the source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from feedline._src.options import BadRows, Order, Reading, Settings
from feedline._src.order.schedule import ENDLESS, BatchSizes, Remainder
from feedline._src.placement.place import row_spec, sharded_spec
from feedline._src.placement.plan import Indices, LeafPlan
from feedline._src.rows.source import OwnOrder, Source
from feedline._src.rows.spec import RowSpec

VALID = "valid"
"""The key of the boolean leaf that remainder "pad" and bad_rows "mask" add."""
PLACE = "place"
"""The key of the int32 leaf that with_place adds."""


class Asked(Protocol):
    """What a plan reads of `feedline.FeedOptions`, which says what each is."""

    @property
    def batch_size(self) -> int | BatchSizes: ...
    @property
    def first_batch_size(self) -> int: ...
    @property
    def sharding(self) -> Any: ...
    @property
    def order(self) -> Order | None: ...
    @property
    def epochs(self) -> int | None: ...
    @property
    def remainder(self) -> Remainder: ...
    @property
    def reading(self) -> Reading: ...
    @property
    def transform(self) -> Any: ...
    @property
    def steps_per_call(self) -> int: ...
    @property
    def with_place(self) -> bool: ...
    @property
    def tunable(self) -> frozenset[str]: ...
    def first_settings(self, default_threads: int) -> Settings: ...


@dataclasses.dataclass(frozen=True)
class SourceMetadata:
    """What is known of a source before its rows are read.

    Attributes:
      spec: of a row in the source.
      rows: of an epoch. None: unknown before the end of a stream, or without end.
      lanes: of a stream; 0: rows with random access.
      own_order: the order that it brings along.
      reads_columns: whether some columns of a leaf can be read alone.
      ragged: the numbers of the leaves whose axis 1 differs between batches, up to its size in `spec`.
      picklable: whether worker processes can open it again.
    """

    spec: RowSpec
    rows: int | None
    lanes: int = 0
    own_order: OwnOrder = ""
    reads_columns: bool = False
    ragged: tuple[int, ...] = ()
    picklable: bool = True

    @classmethod
    def of(cls, source: Source) -> SourceMetadata:
        """The metadata of rows with random access.

        Raises:
          ValueError: there are no rows.
          TypeError: a leaf is not an array of numbers.
        """
        rows = source.epoch_rows
        if rows < 1:
            raise ValueError(f"a source must have at least one row, {source.kind} has {rows}; check what wrote it")
        return cls(
            RowSpec.of(source.spec),
            rows if rows < ENDLESS else None,
            own_order=source.own_order,
            reads_columns=source.reads_columns,
            ragged=source.ragged_leaves,
            picklable=source.picklable,
        )


def check_options(asked: Asked, source: SourceMetadata) -> None:
    """Refuse options that do not go together with a kind of source.

    Raises:
      ValueError: the first reason.
    """
    for reason in refused_options(asked, source):
        raise ValueError(reason)


def refused_options(asked: Asked, source: SourceMetadata) -> Iterator[str]:
    """Why options do not go together with a kind of source, each with a change that works."""
    steps, own_order, ragged = asked.steps_per_call, source.own_order, source.ragged
    if not isinstance(asked.batch_size, int):
        yield from _refused_with_sizes(asked, source.lanes)
    if source.lanes:
        yield from _refused_with_a_stream(asked, source.lanes)
    if own_order.endswith("mixture") and asked.order is not None:
        yield (
            f"a mixture has an order of its own, got order={asked.order!r}; leave order=None, and give "
            "Mixture seed=..., or orders={name: Order(...)} for its sources"
        )
    if own_order == "endless mixture" and asked.epochs is not None:
        yield (
            f"an endless mixture has no epochs to count, got epochs={asked.epochs}; leave epochs=None, or "
            'give Mixture end="first_exhausted" or "all_exhausted"'
        )
    if own_order == "repeated" and asked.order is not None:
        yield (
            "a dataset after repeat() is one endless epoch, which no Order can shuffle; pass it without "
            "repeat() and let the feed's epochs repeat it, or shuffle it in Grain and leave order=None"
        )
    if ragged and asked.transform is not None:
        yield (
            "a transform must return one shape, and ragged leaves differ in length between batches; do this work "
            "in the jitted step, or before the rows are stored, and leave transform=None"
        )
    if ragged and steps > 1:
        yield (
            f"steps_per_call={steps} stacks batches of one shape, and ragged leaves differ in length between "
            "batches; leave steps_per_call=1"
        )
    if asked.reading.workers in (0, "auto") or source.lanes:
        return
    if steps > 1:
        yield f"steps_per_call={steps} needs threads that read; leave workers=0, or give steps_per_call=1"
    if not source.picklable:
        yield (
            "sources travel to worker processes as paths, and this one holds arrays in memory; "
            "use Reading(threads=...), or write a .npy and pass its path"
        )


def _refused_with_sizes(asked: Asked, lanes: int) -> Iterator[str]:
    found = "a stream" if lanes else ""
    if asked.steps_per_call > 1:
        found = found or f"steps_per_call={asked.steps_per_call}"
    if asked.tunable:
        found = found or f'"auto" for {", ".join(sorted(asked.tunable))}'
    if found:
        yield (
            "batch sizes that change need rows with random access, one step per call and settings that are given, "
            f"got {found}; leave that out, or, where the size is to change, build another feed and set_state of "
            "this one's state"
        )


def _refused_with_a_stream(asked: Asked, lanes: int) -> Iterator[str]:
    if asked.order is not None:
        yield "a stream has no other order than its own; shuffle the Grain dataset, and leave order=None"
    if asked.reading.workers not in (0, "auto"):
        yield "a stream brings its own workers: use dataset.mp_prefetch(...), and leave workers=0"
    if asked.steps_per_call > 1:
        yield "a stream has no random access, so its batches are delivered one by one; leave steps_per_call=1"
    if asked.remainder == "wrap" and lanes > 1:
        yield (
            f'remainder "wrap" needs one lane, since each ends at a place of its own, got {lanes}; repeat '
            'each lane in Grain (grain.experimental.RepeatIterDataset), or use remainder="drop" or "pad"'
        )


def batch_of_rows(out: RowSpec, batch_size: int, sharding: Any) -> Any:
    """The global batch without leaves of feedline's own: a tree of `jax.ShapeDtypeStruct` with shardings.

    Args:
      out: of a row, after a transform if there is one.

    Raises:
      TypeError, ValueError: `sharding` is no tree of shardings that fits, or cannot divide a leaf.
    """
    return sharded_spec(placed_rows(out), batch_size, sharding)


def placed_rows(out: RowSpec) -> Any:
    """The tree of a row in JAX's dtypes."""
    return out.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.placed_dtype) for leaf in out.leaves])


def adds_valid(asked: Asked) -> bool:
    """Whether the options ask for the leaf `valid`."""
    return asked.remainder == "pad" or asked.reading.bad_rows == "mask"


def with_own_leaves(batch: Any, batch_size: int, asked: Asked) -> Any:
    """The global batch with the leaves `valid` and `place`, if the options ask for them.

    Raises:
      ValueError: the batch is no dict, or has a leaf of that name.
    """
    if adds_valid(asked):
        asker = 'remainder="pad"' if asked.remainder == "pad" else 'Reading(bad_rows="mask")'
        batch = _with_leaf(batch, VALID, row_spec(batch, batch_size), asker)
    if asked.with_place:
        batch = _with_leaf(batch, PLACE, row_spec(batch, batch_size, np.int32), "with_place=True")
    return batch


def _with_leaf(batch: Any, name: str, leaf: jax.ShapeDtypeStruct, asker: str) -> dict[str, Any]:
    """The batch with a leaf of feedline's own in it, which the argument `asker` asks for."""
    # a plain dict: JAX flattens it in the order of its keys, but an OrderedDict, say, in another
    if type(batch) is not dict or name in batch or not all(isinstance(key, str) for key in batch):
        found = f"it has the keys {list(batch)}" if type(batch) is dict else f"it is a {type(batch).__name__}"
        found = "it is one array without a name" if isinstance(batch, jax.ShapeDtypeStruct) else found
        raise ValueError(
            f"{asker} adds a leaf {name!r}, so the batch must be a plain dict of strings without that key: "
            f'{found}. Name the arrays, as in {{"x": array}}, or leave {asker} out'
        )
    return {**batch, name: leaf}


def number_of(name: str, batch: Mapping[str, Any]) -> int:
    """How many leaves of a batch come before the leaf `name`."""
    return len(jax.tree.leaves([batch[key] for key in sorted(batch) if key < name]))


def reads_by_leaf(
    plans: Sequence[LeafPlan], rows: Indices, *, reads_columns: bool, transformed: bool, bad_rows: BadRows
) -> bool:
    """Whether a process reads of each leaf only its own rows and columns, or `rows` with all columns.

    Args:
      plans: what it supplies of each leaf.
      rows: the union of their rows.
    """
    # where a bad row is replaced, whoever supplies any of it must find it bad: all read it whole
    return is_cut(plans, rows) and reads_columns and not transformed and bad_rows == "raise"


def is_cut(plans: Sequence[LeafPlan], rows: Indices) -> bool:
    """Whether a process supplies less than all columns of `rows`."""
    return not all(plan.whole_columns and len(plan.rows) == len(rows) for plan in plans)
