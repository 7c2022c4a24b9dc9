"""What one process observed of the global batches, and what all processes observed together. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from feedline._src.order.schedule import Remainder
from feedline._src.tools.audit.digest import Digests, Ranges, row_digests

State = dict[str, Any]


class Difference(Exception):
    """The first difference between a layout and what it must be."""

    def __init__(self, found: str, **where: Any) -> None:
        super().__init__(found)
        self.where = where
        """Number of the "batch", number of the "row" in the batch, name of the "leaf": those that are known."""


class ShardDigests(NamedTuple):
    """The digests of one device's shard of one leaf: rows from `first` on, over `columns`.

    `shape` is that of a whole row in this batch, which differs between batches if the leaf is ragged.
    """

    first: int
    columns: Ranges
    digests: Digests
    shape: tuple[int, ...] = ()


class Settings(NamedTuple):
    """Options with which the feed was built. `rows` is None for a stream."""

    rows: int | None
    batch_size: int
    remainder: Remainder
    epochs: int | None
    transformed: bool


class Coverage(NamedTuple):
    """What the row indices of whole epochs, and the source, say about the rows.

    Attributes:
      epochs: the number of epochs in which each row occurs exactly once, except for the rows left out.
      left_out: rows that each epoch leaves out.
      compared: delivered rows that had the values of the source.
      not_shown: what could not be checked, with the reason.
      source_epochs: of the sources of a mixture, instead of `epochs`: of how many epochs, each row occurs once.
    """

    epochs: int
    left_out: int
    compared: int
    not_shown: str
    source_epochs: int = 0


@dataclasses.dataclass(frozen=True)
class Observed:
    """What one process observed in one layout.

    Attributes:
      names: names of the leaves.
      row_specs: shape and dtype of a row of each leaf.
      batches: [batch][leaf][device].
      states: step, epoch and position of the feed's state after each batch.
      first_batch: number of the first batch, counted in batches of the feed's own size; 0 unless it was resumed.
      coverage: set in the layout with which all others are compared.
    """

    settings: Settings
    names: list[str]
    row_specs: list[tuple[tuple[int, ...], np.dtype[Any]]]
    batches: list[list[list[ShardDigests]]]
    states: list[State]
    first_batch: int
    seconds: float
    coverage: Coverage | Difference | None = None


class Refused(NamedTuple):
    """This feed cannot run in the layout; `reason` is the feed's error message."""

    reason: str


class Crashed(NamedTuple):
    """A process raised; `line` is the last line of the traceback."""

    line: str


def shard_digests(array: Any, leaf: int) -> list[ShardDigests]:
    """Digests of the shards of a `jax.Array` on this process's devices, without using feedline's plan."""
    found = []
    for shard in array.addressable_shards:
        (first, _), *columns = (
            part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)
        )
        shape, values = array.shape[1:], np.asarray(shard.data)
        digests = row_digests(values, leaf, shape, tuple(columns))
        found.append(ShardDigests(first, tuple(columns), digests, shape))
    return found


def global_digests(processes: Sequence[Observed]) -> Digests:
    """uint64[batch, row, leaf]: the digest of each row of each global batch.

    Raises:
      Difference: two devices hold different values of the same part, a part is on no device, or the processes
        disagree on the feed's options or states.
    """
    one = processes[0]
    for process, other in enumerate(processes):
        if (other.settings, other.states) != (one.settings, one.states):
            raise Difference(f"process {process} and process 0 disagree on the feed's options or states")
    rows = one.settings.batch_size
    digests = np.empty((len(one.batches), rows, len(one.names)), np.uint64)
    for batch, leaf in np.ndindex(len(one.batches), len(one.names)):
        shards = [shard for observed in processes for shard in observed.batches[batch][leaf]]
        try:
            digests[batch, :, leaf] = combined_digests(shards, rows)
        except Difference as found:
            where = {"batch": one.first_batch + batch, "leaf": one.names[leaf]}
            raise Difference(str(found), **{**found.where, **where}) from None
    return digests


def combined_digests(shards: Sequence[ShardDigests], rows: int) -> Digests:
    """The digest of each whole row of a leaf.

    Raises:
      Difference: replicas differ, or a part of a row is missing.
    """
    parts: dict[Ranges, tuple[Digests, Any]] = {}
    for shard in shards:
        digests, known = parts.setdefault(shard.columns, (np.zeros(rows, np.uint64), np.zeros(rows, bool)))
        here = slice(shard.first, shard.first + len(shard.digests))
        wrong = known[here] & (digests[here] != shard.digests)
        if wrong.any():
            row = shard.first + int(wrong.argmax())
            raise Difference("two devices hold different values of the same part of it", row=row)
        digests[here], known[here] = shard.digests, True
    sizes = {columns: math.prod(stop - start for start, stop in columns) for columns in parts}
    covered = sum(known * sizes[columns] for columns, (_, known) in parts.items())
    missing = covered != math.prod(shards[0].shape)
    if missing.any():
        raise Difference("a part of it is on no device", row=int(missing.argmax()))
    total: Digests = np.sum([digests for digests, _ in parts.values()], axis=0, dtype=np.uint64)
    return total
