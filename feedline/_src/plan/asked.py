"""The inputs of a plan: a feed's options, and a source's metadata. And the combinations that a feed refuses.

Only this module refuses combinations of options; docs/guarantees.md has a table of them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from feedline._src.options import (
    MAX_AHEAD,
    MAX_COUNT,
    Auto,
    Limits,
    Order,
    Reading,
    Settings,
    checked_integer,
    checked_setting,
)
from feedline._src.order.schedule import ENDLESS, REMAINDERS, BatchSizes, Cursor, Remainder, Schedule
from feedline._src.plan.shardings import as_shardings, batch_axis_sharding, shards_of
from feedline._src.rows.source import OwnOrder, Rows, Source
from feedline._src.rows.spec import RowSpec
from feedline._src.rows.values import is_batched

VALID = "valid"
"""The key of the boolean leaf that remainder "pad" and bad_rows "mask" add."""
PLACE = "place"
"""The key of the int32 leaf that with_place adds."""
Transform = Callable[[Any, Rows], Any]
"""(batch, rows) → batch: trees of NumPy arrays. Row i of the result must depend only on row i of the batch.

Several threads call it at once, each with some rows of a batch. When the feed is built, it is called twice with
the first row, to infer the spec of the result and to compare the two results.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedOptions:
    """The fields of `feedline.FeedOptions`, and all checks that need no source."""

    source: Any
    batch_size: int | BatchSizes
    sharding: Any
    _: dataclasses.KW_ONLY
    order: Order | None = None
    epochs: int | None = None
    remainder: Remainder = "drop"
    reading: Reading = Reading()  # noqa: RUF009  frozen
    transform: Transform | None = None
    prefetch: int | Auto = 2
    steps_per_call: int = 1
    with_place: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        if self.remainder not in REMAINDERS:
            raise ValueError(f"remainder must be one of {REMAINDERS}, got {self.remainder!r}")
        if self.order is not None and not isinstance(self.order, Order):
            raise TypeError(f"order must be a feedline.Order or None, got {self.order!r}")
        if not isinstance(self.reading, Reading):
            raise TypeError(f"reading must be a feedline.Reading, got {self.reading!r}")
        given = (self.reading.threads, self.reading.workers, self.reading.buffer, self.prefetch)
        if self.reading.limits != Limits() and "auto" not in given:
            raise ValueError(
                'Reading.limits holds for settings that are "auto", and none is; leave it out, or use '
                'threads="auto", workers="auto", buffer="auto" or prefetch="auto"'
            )
        if self.transform is not None and not callable(self.transform):
            raise TypeError(f"transform must be a function (batch, rows) -> batch, got {self.transform!r}")
        if not isinstance(self.with_place, bool):
            raise TypeError(f"with_place must be True or False, got {self.with_place!r}")
        if not isinstance(self.name, str | None):
            raise TypeError(f"name must be a string or None, got {self.name!r}")
        epochs = self.epochs
        checked = {
            "batch_size": _checked_sizes(self.batch_size),
            "sharding": as_shardings(self.sharding),
            "epochs": None if epochs is None else checked_integer("epochs", epochs, at_least=1, at_most=MAX_COUNT),
            "prefetch": checked_setting("prefetch", self.prefetch, at_least=0, at_most=MAX_AHEAD),
            "steps_per_call": checked_integer(
                "steps_per_call", self.steps_per_call, at_least=1, at_most=MAX_AHEAD
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def sizes(self) -> BatchSizes:
        """(first step, batch size) of each batch size, by ascending steps."""
        return ((0, self.batch_size),) if isinstance(self.batch_size, int) else self.batch_size

    @property
    def own_leaves(self) -> dict[str, tuple[str, Any]]:
        """{name: (the argument that requests it, its dtype)} for the leaves that feedline adds to the batch."""
        leaves: dict[str, tuple[str, Any]] = {}
        if self.remainder == "pad" or self.reading.bad_rows == "mask":
            asker = 'remainder="pad"' if self.remainder == "pad" else 'Reading(bad_rows="mask")'
            leaves[VALID] = asker, np.bool_
        if self.with_place:
            leaves[PLACE] = "with_place=True", np.int32
        return leaves

    @property
    def tunable(self) -> frozenset[str]:
        """The fields of `Settings` that are tuned while the feed runs. Empty if `prefetch` is 0."""
        if not self.prefetch:
            return frozenset()
        given = {name: getattr(self.reading, name) for name in ("threads", "workers", "buffer")}
        return frozenset(name for name, value in {**given, "prefetch": self.prefetch}.items() if value == "auto")

    def first_settings(self, default_threads: int) -> Settings:
        """The settings to begin with: the defaults for "auto". `threads` is 0 with workers or without prefetch."""
        prefetch = type(self).prefetch if self.prefetch == "auto" else self.prefetch
        workers = 0 if self.reading.workers == "auto" else self.reading.workers
        threads = self.reading.threads
        if not prefetch or workers:
            threads = 0
        elif threads is None or threads == "auto":
            threads = default_threads
        else:
            threads = max(1, threads)
        buffer = Reading.buffer if self.reading.buffer == "auto" else self.reading.buffer
        assert isinstance(buffer, int)
        assert isinstance(prefetch, int)
        return Settings(threads, workers, buffer, prefetch)


@dataclasses.dataclass(frozen=True)
class SourceMetadata:
    """What is known of a source before its rows are read.

    Attributes:
      spec: the spec of a row.
      rows: the number of rows in an epoch. None: an epoch has no end, or a stream's end is not known yet.
      lanes: the number of lanes of a stream; 0: rows with random access.
      own_order: the kind of order that the source imposes; "": none.
      reads_columns: whether the source can read some columns of a leaf without the others.
      ragged: the indices of the ragged leaves; `spec` has the largest size of their axis 1.
      picklable: whether worker processes can open the source again.
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
        """The metadata of a source, or of the first item of a stream."""
        rows = source.epoch_rows
        if rows < 1:
            raise ValueError(
                f"a source must have at least one row, and {source.kind} has {rows}; check what wrote it"
            )
        return cls(
            RowSpec.of(source.spec),
            rows if rows < ENDLESS else None,
            source.lanes,
            own_order=source.own_order,
            reads_columns=source.reads_columns,
            ragged=source.ragged_leaves,
            picklable=source.picklable,
        )


def refused(options: CheckedOptions, source: SourceMetadata) -> Iterator[str]:
    """Yield reasons why options do not combine with each other or the source, each with a change that works."""
    steps, own_order = options.steps_per_call, source.own_order
    if not isinstance(options.batch_size, int):
        found = "a stream" if source.lanes else f"steps_per_call={steps}" if steps > 1 else ""
        if options.tunable:
            found = found or f'"auto" for {", ".join(sorted(options.tunable))}'
        if found:
            yield (
                'batch sizes that change need rows with random access, one step per call and no setting "auto", '
                f"got {found}; leave that out, or, at the step where the size changes, build another feed and "
                "call its set_state with the state of this one"
            )
    if source.lanes:
        yield from _refused_with_a_stream(options, source.lanes)
    if own_order == "mixture" and options.order is not None:
        yield (
            f"a mixture has an order of its own, got order={options.order!r}; leave order=None, and give "
            "Mixture seed=..., or orders={name: Order(...)} for its sources"
        )
    if own_order == "mixture" and source.rows is None and options.epochs is not None:
        yield (
            f"an endless mixture has no epochs to count, got epochs={options.epochs}; leave epochs=None, or "
            'give Mixture end="first_exhausted" or "all_exhausted"'
        )
    if own_order == "repeated" and options.order is not None:
        yield (
            "a dataset after repeat() is one endless epoch, which no Order can shuffle; pass it without "
            "repeat() and let the feed's epochs repeat it, or shuffle it in Grain and leave order=None"
        )
    if source.ragged and options.transform is not None:
        yield (
            "a transform must return one shape, and ragged leaves differ in length between batches; do this work "
            "in the jitted step, or before the rows are stored, and leave transform=None"
        )
    if source.ragged and steps > 1:
        yield (
            f"steps_per_call={steps} stacks batches of one shape, and ragged leaves differ in length between "
            "batches; leave steps_per_call=1"
        )
    for sharding in jax.tree.leaves(options.sharding) if steps > 1 else ():
        if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
            yield (
                f"steps_per_call={steps} adds an axis to the batch, which only a NamedSharding can describe, got "
                f"{sharding}; leave steps_per_call=1, or give a NamedSharding"
            )
    if options.reading.workers not in (0, "auto") and not source.lanes:
        if steps > 1:
            yield f"steps_per_call={steps} needs threads that read; leave workers=0, or give steps_per_call=1"
        if not source.picklable:
            yield (
                "sources travel to worker processes as paths, and this one holds arrays in memory; "
                "use Reading(threads=...), or write a .npy and pass its path"
            )


def refused_sizes(options: CheckedOptions, source: SourceMetadata, multiple: int, shards: int) -> Iterator[str]:
    """Yield reasons why a batch size does not fit the sharding, the lanes or the rows. See `multiple_of`."""
    for size in dict.fromkeys(size for _, size in options.sizes):
        if size % multiple:
            rule = f"{shards} shards of the batch axis"
            if multiple != shards:
                rule += f" and of the {source.lanes} lanes, so of {multiple}"
            near = " or ".join(f"{n:,}" for n in next_sizes(size, multiple))
            yield f"the batch size must be a multiple of the {rule}, got {size:,}; {near} would work"
        if source.rows is not None:
            yield from _refused_rows(source.rows, size, multiple, options)


def refused_layout(
    options: CheckedOptions, source: SourceMetadata, leaves: Sequence[jax.ShapeDtypeStruct], apart: bool
) -> Iterator[str]:
    """Yield reasons why options do not combine with what lies on each process.

    Args:
      leaves: the leaves of a global batch, without those that feedline adds.
      apart: whether processes read different lanes.
    """
    for i in source.ragged if options.transform is None else ():
        shards = shards_of(leaves[i].sharding, len(leaves[i].shape))[1]
        if shards > 1:
            yield (
                f"{source.spec.leaves[i].name}: a sharding must not split axis 1 of a ragged leaf, whose size "
                f"differs between batches, and {leaves[i].sharding} splits it into {shards}; shard the batch axis "
                'alone, as PartitionSpec("data") does'
            )
    if apart and "prefetch" in options.tunable:
        yield (
            "processes that read different lanes agree on the ends of lanes in windows of `prefetch` batches, "
            'so prefetch must be the same on all and cannot be "auto"; give a number, such as prefetch=2'
        )


def _refused_with_a_stream(options: CheckedOptions, lanes: int) -> Iterator[str]:
    if options.order is not None:
        yield "a stream has no other order than its own; shuffle the Grain dataset, and leave order=None"
    if options.reading.workers not in (0, "auto"):
        yield "a stream brings its own workers: use dataset.mp_prefetch(...), and leave workers=0"
    if options.steps_per_call > 1:
        yield "a stream has no random access, so its batches are delivered one by one; leave steps_per_call=1"
    if options.remainder == "wrap" and lanes > 1:
        yield (
            f'remainder "wrap" needs one lane, since each ends at a different step, got {lanes}; repeat '
            'each lane in Grain (grain.experimental.RepeatIterDataset), or use remainder="drop" or "pad"'
        )


def _refused_rows(rows: int, size: int, multiple: int, options: CheckedOptions) -> Iterator[str]:
    remainder, epochs, steps = options.remainder, options.epochs, options.steps_per_call
    # "wrap" fills a batch from several epochs; an endless feed fills a batch of any size
    available = rows if remainder == "drop" else rows * (epochs or size)
    if remainder != "pad" and available < size:
        fitting = available // multiple * multiple
        smaller = f"a batch size of at most {fitting:,}" if fitting else "fewer shards of the batch axis"
        batched = "leave batch() of the dataset out, " if is_batched(options.source) else ""
        yield (
            f'remainder "{remainder}" drops a batch that is not full, and {available:,} '
            f"{'row' if available == 1 else 'rows'} cannot fill one of {size:,}; {batched}use "
            f'{smaller}, or remainder="pad"'
        )
    elif steps > 1:
        yield from Schedule(rows, size, remainder, epochs).refused_steps(Cursor(0, 0), steps)


def next_sizes(batch_size: int, multiple: int) -> list[int]:
    """The next smaller (unless it is 0) and the next larger batch size that is a multiple of `multiple`.

    Example:
      >>> next_sizes(64, 8), next_sizes(65, 8), next_sizes(3, 8)
      ([56, 72], [64, 72], [8])
    """
    below = (batch_size - 1) // multiple * multiple
    above = batch_size // multiple * multiple + multiple
    return [below, above] if below else [above]


def with_own_leaves(batch: Any, batch_size: int, options: CheckedOptions) -> Any:
    """Add the leaves `valid` and `place` to the spec of a global batch, if the options request them."""
    for name, (asker, dtype) in options.own_leaves.items():
        # a plain dict, because JAX flattens it by sorted keys, but an OrderedDict, say, in the order of insertion
        if type(batch) is not dict or name in batch or not all(isinstance(key, str) for key in batch):
            found = f"it has the keys {list(batch)}" if type(batch) is dict else f"it is a {type(batch).__name__}"
            found = "it is one array without a name" if isinstance(batch, jax.ShapeDtypeStruct) else found
            raise ValueError(
                f"{asker} adds a leaf {name!r}, so the batch must be a plain dict whose keys are other strings: "
                f'{found}. Name the arrays, as in {{"x": array}}, or leave {asker} out'
            )
        sharding = batch_axis_sharding(jax.tree.leaves(batch)[0].sharding)
        batch = {**batch, name: jax.ShapeDtypeStruct((batch_size,), dtype, sharding=sharding)}
    return batch


def _checked_sizes(given: Any) -> int | BatchSizes:
    if not isinstance(given, list | tuple):
        return checked_integer("batch_size", given, at_least=1, at_most=MAX_COUNT)
    if not given or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in given):
        raise TypeError(
            "batch_size must be an integer, or (first step, batch size) pairs as in [(0, 256), (1000, 512)], got "
            f"{given!r}"
        )
    steps = [checked_integer("batch_size: the first step of a size", step, at_least=0) for step, _ in given]
    if steps[0] != 0 or any(b <= a for a, b in itertools.pairwise(steps)):
        raise ValueError(
            f"batch_size: sizes must begin at ascending steps, the first at 0, got {steps}; sort them"
        )
    sizes = [checked_integer("batch_size", size, at_least=1, at_most=MAX_COUNT) for _, size in given]
    return tuple(zip(steps, sizes, strict=True))
