"""Which row stands at which position of an epoch: a pure function of (seed, epoch, position).

`rows_at` is a keyed permutation of the rows, so every process computes any part of any epoch's order
alone, in O(1) memory: see `permutation`, and `compiled` for orders that keep adjacent rows near each other.
`keys_at` gives each position a random number, `substitutes_at` rows that may replace a bad row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline._src.native.gather import rows_at_positions
from feedline._src.native.library import library
from feedline._src.options import Order
from feedline._src.order.compiled import EpochOrder, epoch_order
from feedline._src.order.permutation import LARGEST, hashed, words

Positions = NDArray[Any] | range
"""64-bit integers[k] with any strides, or a range of step 1."""


class RowOrder(Protocol):
    """Which row stands at which position of each epoch: of one source, or of a mixture."""

    @property
    def seed(self) -> int:
        """Of the keys of a transform, and of the rows that replace bad ones."""

    @property
    def rows(self) -> int:
        """Positions of an epoch."""

    @property
    def shown(self) -> Any:
        """What a feed shows as its order."""

    def rows_at(self, epoch: int, positions: Positions) -> NDArray[np.int64]:
        """int64[k]: the row index at each position, integers[k] or a range of step 1."""

    def struct(self, epoch: int, positions: Positions) -> EpochOrder | None:
        """What the C library needs for these positions; None where it cannot compute them."""

    def substitutes(self, epoch: int, position: int, row: int) -> NDArray[np.int64]:
        """The rows to try, in this order, in place of the bad row at a position."""

    def taken_before(self, epoch: int, position: int) -> tuple[Taken, ...]:
        """The rows of each source of a mixture, or of the one source, before a position of an epoch."""

    def as_json(self) -> dict[str, Any]:
        """JSON values, for a fingerprint."""


@dataclasses.dataclass(frozen=True)
class SingleOrder:
    """The `RowOrder` of one source with this number of rows: shuffled, in blocks, or as they are stored."""

    shown: Order
    rows: int

    @property
    def seed(self) -> int:
        return self.shown.seed

    def rows_at(self, epoch: int, positions: Positions) -> NDArray[np.int64]:
        return rows_at(self.shown, self.rows, epoch, positions)

    def struct(self, epoch: int, positions: Positions) -> EpochOrder | None:
        return epoch_order(self.shown, self.rows, epoch)

    def substitutes(self, epoch: int, position: int, row: int) -> NDArray[np.int64]:
        return substitutes_at(self.seed, self.rows, epoch, position)

    def taken_before(self, epoch: int, position: int) -> tuple[Taken, ...]:
        return (Taken("", 0, self, epoch * self.rows + position),)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self.shown)


class Taken(NamedTuple):
    """How many rows were taken of a source since the start of a run.

    Attributes:
      name: in a mixture, else "".
      first: the row index of its first row.
      order: its own.
      rows: how many, over all of its epochs.
    """

    name: str
    first: int
    order: SingleOrder
    rows: int


def rows_at(order: Order, n: int, epoch: int, positions: NDArray[np.integer[Any]] | range) -> NDArray[np.int64]:
    """The row at each position of an epoch: for every (seed, epoch) a bijection of [0, n).

    The order never changes, not between versions nor between machines: a run that resumes relies on it.

    Args:
      order: the seed, and how to shuffle.
      n: the number of rows; at most 2⁶² to shuffle them.
      epoch: below 2⁶⁴.
      positions: integers[k] in [0, n), in any order, with repeats; or a range of step 1.

    Returns:
      int64[k], a new array. Without shuffling, the positions.

    Raises:
      IndexError: a position is not in [0, n).

    Example:
      >>> rows_at(Order(seed=7), 6, epoch=0, positions=np.arange(6))
      array([4, 1, 0, 2, 3, 5])
      >>> rows_at(Order(seed=7), 10**15, epoch=3, positions=np.array([0, 10**15 - 1]))
      array([637444280427135,  60713028302490])
      >>> from feedline import Blocks
      >>> rows_at(Order(seed=1, shuffle=Blocks(rows=2, window=2)), 9, epoch=0, positions=np.arange(9))
      array([8, 4, 5, 6, 3, 7, 2, 0, 1])
    """
    if order.shuffle and n > LARGEST:
        raise ValueError(f"n, the number of rows to shuffle, must be at most 2^62, got {n}; split the source")
    if isinstance(positions, range):
        positions = np.arange(positions.start, positions.stop, positions.step)
    checked = _checked(positions, n)
    if n == 0 or not order.shuffle:
        return positions.astype(np.int64)
    struct = epoch_order(order, n, epoch)
    return struct.rows_by_numpy(checked) if library() is None else rows_at_positions(struct, checked)


def keys_at(seed: int, epoch: int, positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A random number for each position of an epoch, to seed its augmentation with.

    It depends only on (seed, epoch, position), not on the number of rows, and is independent of the order.
    Positions of one epoch never share a key.

    Args:
      seed: below 2⁶⁴.
      epoch: below 2⁶⁴.
      positions: integers[k] in [0, 2⁶³), in any order, with repeats.

    Returns:
      uint64[k], uniform over all 2⁶⁴ values.

    Raises:
      IndexError: a position is not in [0, 2⁶³).

    Example:
      >>> keys_at(seed=7, epoch=0, positions=np.arange(2))
      array([ 5934308537542988519, 10794454123149485347], dtype=uint64)
    """
    return hashed(_checked(positions, 1 << 63), words("keys", seed, epoch))


def substitutes_at(seed: int, n: int, epoch: int, position: int) -> NDArray[np.int64]:
    """The rows to try, in this order, in place of a bad row at a position of an epoch.

    Args:
      seed: below 2⁶⁴.
      n: the number of rows.
      epoch: below 2⁶⁴.
      position: in [0, 2⁶³).

    Returns:
      int64[16], each uniform over all rows, so they may repeat.

    Example:
      >>> substitutes_at(seed=7, n=100, epoch=0, position=3)[:4].tolist()
      [27, 49, 17, 49]
    """
    keys = words("spares", seed, epoch)
    first = hashed(_checked(np.array([position], np.int64), 1 << 63), keys)
    drawn = hashed(np.add(first, np.arange(16, dtype=np.uint64), dtype=np.uint64), keys)
    return (drawn % np.uint64(n)).astype(np.int64)


def _checked(positions: NDArray[np.integer[Any]], end: int) -> NDArray[np.uint64]:
    """The positions as 64-bit words: no copy if they are 64-bit integers already, so they must not be written."""
    wide = positions.astype(np.int64 if positions.dtype.kind == "i" else np.uint64, copy=False).view(np.uint64)
    if wide.size and wide.max() >= min(end, 1 << 63):  # one pass: as a word, a negative position is at least 2^63
        raise IndexError(
            f"positions must be in [0, {end}), got {positions.min()} to {positions.max()}; row p of a run is "
            "p % n of epoch p // n"
        )
    return wide
