"""What one process holds of global batches, and the batches put together from all processes. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from feedline.audit.digest import Digests, Ranges, row_digests
from feedline.order.schedule import Remainder

State = dict[str, Any]


class Difference(Exception):
    """The first place where a layout is not as it must be."""

    def __init__(self, found: str, **where: Any) -> None:
        super().__init__(found)
        self.where = where
        """The numbers of the batch and of the row in it, and the name of the leaf, as far as there is one."""


class Piece(NamedTuple):
    """One device's part of one leaf: the digests of rows from `first` on, over some columns."""

    first: int
    columns: Ranges
    digests: Digests


class Settings(NamedTuple):
    """What the feed was built with. `rows` is None for a stream."""

    rows: int | None
    batch_size: int
    remainder: Remainder
    epochs: int | None
    transformed: bool


class Census(NamedTuple):
    """In how many epochs each row comes once, but for those `left_out` of each; and what was not shown.

    `compared` delivered rows were the source's own.
    """

    epochs: int
    left_out: int
    compared: int
    not_shown: str


@dataclasses.dataclass(frozen=True)
class Held:
    """What one process held in one layout.

    Attributes:
      names: of the leaves.
      forms: shape and dtype of a row of each.
      batches: [batch][leaf][device].
      states: step, epoch and position that the feed told after each batch.
      taken: batches before these, of the layout that it resumed.
      census: of the layout that all others are compared with.
    """

    settings: Settings
    names: list[str]
    forms: list[tuple[tuple[int, ...], np.dtype[Any]]]
    batches: list[list[list[Piece]]]
    states: list[State]
    taken: int
    seconds: float
    census: Census | Difference | None = None


class Refused(NamedTuple):
    """Why a layout cannot be run with this feed, in the feed's words."""

    why: str


class Failed(NamedTuple):
    """The last line of the traceback of a process that raised."""

    line: str


def pieces_of(array: Any, leaf: int) -> list[Piece]:
    """The parts of a `jax.Array` on this process's devices: by its own shards, not by a plan of feedline's."""
    found = []
    for shard in array.addressable_shards:
        (first, _), *columns = (
            part.indices(size)[:2] for part, size in zip(shard.index, array.shape, strict=True)
        )
        values = np.asarray(shard.data)
        found.append(Piece(first, tuple(columns), row_digests(values, leaf, array.shape[1:], tuple(columns))))
    return found


def whole(processes: Sequence[Held]) -> Digests:
    """uint64[batch, row, leaf]: the digest of each row of each global batch.

    Raises:
      Difference: two devices hold different values of the same part, a part is on none, or the processes
        disagree on the feed's options or states.
    """
    one = processes[0]
    for process, other in enumerate(processes):
        if (other.settings, other.states) != (one.settings, one.states):
            raise Difference(f"process {process} and process 0 disagree on the feed's options or states")
    rows = one.settings.batch_size
    digests = np.empty((len(one.batches), rows, len(one.names)), np.uint64)
    for batch, leaf in np.ndindex(len(one.batches), len(one.names)):
        pieces = [piece for held in processes for piece in held.batches[batch][leaf]]
        try:
            digests[batch, :, leaf] = joined(pieces, rows, one.forms[leaf][0])
        except Difference as found:
            where = {"batch": one.taken + batch, "leaf": one.names[leaf]}
            raise Difference(str(found), **{**found.where, **where}) from None
    return digests


def joined(pieces: Sequence[Piece], rows: int, shape: tuple[int, ...]) -> Digests:
    """The digest of each whole row of a leaf.

    Raises:
      Difference: replicas differ, or a part of a row is missing.
    """
    parts: dict[Ranges, tuple[Digests, Any]] = {}
    for piece in pieces:
        digests, known = parts.setdefault(piece.columns, (np.zeros(rows, np.uint64), np.zeros(rows, bool)))
        here = slice(piece.first, piece.first + len(piece.digests))
        wrong = known[here] & (digests[here] != piece.digests)
        if wrong.any():
            row = piece.first + int(wrong.argmax())
            raise Difference("two devices hold different values of the same part of it", row=row)
        digests[here], known[here] = piece.digests, True
    sizes = {columns: math.prod(stop - start for start, stop in columns) for columns in parts}
    covered = sum(known * sizes[columns] for columns, (_, known) in parts.items())
    missing = covered != math.prod(shape)
    if missing.any():
        raise Difference("a part of it is on no device", row=int(missing.argmax()))
    total: Digests = np.sum([digests for digests, _ in parts.values()], axis=0, dtype=np.uint64)
    return total
