"""Computes which row is at which position of an epoch, as a pure function of (seed, epoch, position).

`rows_at` is a keyed permutation of the rows, so every process computes any part of any epoch's order by itself, in
O(1) memory: see `permutation`. An `EpochOrder` contains the parameters of one epoch's order, from which C and
NumPy compute the same rows. `keys_at` returns a random number for each position, `substitutes_at` the rows that
may replace a bad row.

*The blocked order* shuffles blocks of adjacent rows, then the rows inside each window of blocks. *Block positions*
number the blocks of an epoch in their shuffled order. Window w consists of the block positions from w·window to
(w + 1)·window − 1. A permutation keyed by (seed, epoch, w) shuffles the positions inside window w. Dividing a
shuffled position by the rows of a block gives a block position and an offset in the block, and so the row.

*The short block.* If `Blocks.rows` does not divide n, the source's last block is short, and all rows after it in
the epoch have lower positions than after a full block. So no row can be computed until the block position of the
short block is known. With a permutation of all blocks, finding it would require the inverse permutation. Instead,
the block position of the short block is drawn first, and a permutation of the full blocks fills the other block
positions, which gives the same distribution. Since the rows of a window are shuffled, only the window of the short
block matters. The short block is the last block of its window, so that the window's positions have no gap.

*Padded positions* count rows as if all blocks were full, so that division gives block position and offset.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from feedline._src.native.gather import rows_at_positions
from feedline._src.native.library import library
from feedline._src.options import Blocks, Order
from feedline._src.order.permutation import FEW, LARGEST, ROUNDS, explicit, feistel, grid, hashed, words

_SHUFFLED, _BLOCKED = 1, 2
_CHUNK = 1 << 13  # positions at a time: enough to amortise NumPy calls, few enough to stay in the cache
Positions = NDArray[Any] | range
"""64-bit integers[k] with any strides, or a range of step 1."""


class RowOrder(Protocol):
    """The order of one source or of a mixture: which row is at which position of each epoch."""

    @property
    def seed(self) -> int:
        """The seed of a transform's keys, and of the substitutes for bad rows."""

    @property
    def rows(self) -> int:
        """The number of positions in an epoch."""

    @property
    def shown(self) -> Any:
        """The value of `Feed.order`."""

    def rows_at(self, epoch: int, positions: Positions) -> NDArray[np.int64]:
        """int64[k]: the row index at each of these positions."""

    def struct(self, epoch: int, positions: Positions) -> EpochOrder | None:
        """The parameters from which C computes the rows at these positions; None: NumPy must compute them."""

    def substitutes(self, epoch: int, position: int, row: int) -> NDArray[np.int64]:
        """The rows to try, in this order, instead of the bad row at a position."""

    def taken_before(self, epoch: int, position: int) -> tuple[Taken, ...]:
        """How many rows of each source come before a position of an epoch. Only a mixture has several sources."""

    def as_json(self) -> dict[str, Any]:
        """The order as JSON values, for a fingerprint."""


@dataclasses.dataclass(frozen=True)
class SingleOrder:
    """The `RowOrder` of one source with `rows` rows: shuffled, shuffled in blocks, or as stored."""

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
    """How many rows of a source were taken since epoch 0 began.

    Attributes:
      name: the source's name in a mixture, else "".
      first: the row index that the source's first row has in the mixture, else 0.
      order: the source's own order.
      rows: the number of rows taken, over all epochs of the source.
    """

    name: str
    first: int
    order: SingleOrder
    rows: int


def rows_at(order: Order, n: int, epoch: int, positions: NDArray[np.integer[Any]] | range) -> NDArray[np.int64]:
    """The row at each position of an epoch: for every (seed, epoch) a bijection of [0, n).

    The order is the same in all versions and on all machines: a run that resumes relies on this.

    Args:
      order: the seed, and how to shuffle.
      n: the number of rows; at most 2⁶² if they are shuffled.
      epoch: below 2⁶⁴.
      positions: integers[k] in [0, n), in any order, repeats allowed; or a range.

    Returns:
      int64[k], a new array. Without shuffling, the positions.

    Raises:
      IndexError: a position is not in [0, n).

    Example:
      >>> rows_at(Order(seed=7), 6, epoch=0, positions=np.arange(6))
      array([4, 1, 0, 2, 3, 5])
      >>> rows_at(Order(seed=7), 10**15, epoch=3, positions=np.array([0, 10**15 - 1]))
      array([637444280427135,  60713028302490])
      >>> rows_at(Order(seed=1, shuffle=Blocks(rows=2, window=2)), 9, epoch=0, positions=np.arange(9))
      array([8, 4, 5, 6, 3, 7, 2, 0, 1])
    """
    if order.shuffle and n > LARGEST:
        raise ValueError(f"n, the number of rows to shuffle, must be at most 2^62, got {n}; split the source")
    positions = as_indices(positions)
    checked = _checked(positions, n)
    if n == 0 or not order.shuffle:
        return positions.astype(np.int64)
    struct = epoch_order(order, n, epoch)
    return struct.rows_by_numpy(checked) if library() is None else rows_at_positions(struct, checked)


def keys_at(seed: int, epoch: int, positions: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    """A random number for each position of an epoch, as a seed for augmenting its row.

    The number depends only on (seed, epoch, position), not on the number of rows, and is independent of the order.
    Positions of one epoch never share a key.

    Args:
      seed: below 2⁶⁴.
      epoch: below 2⁶⁴.
      positions: integers[k] in [0, 2⁶³), in any order, repeats allowed.

    Returns:
      uint64[k], uniform over all 2⁶⁴ values.

    Raises:
      IndexError: a position is not in [0, 2⁶³).

    Example:
      >>> keys_at(seed=7, epoch=0, positions=np.arange(2))
      array([ 5934308537542988519, 10794454123149485347], dtype=uint64)
    """
    return hashed(_checked(as_indices(positions), 1 << 63), words("keys", seed, epoch))


def substitutes_at(seed: int, n: int, epoch: int, position: int) -> NDArray[np.int64]:
    """The rows to try, in this order, instead of a bad row at a position of an epoch.

    Args:
      seed: below 2⁶⁴.
      n: the number of rows.
      epoch: below 2⁶⁴.
      position: in [0, 2⁶³).

    Returns:
      int64[16], each drawn uniformly from all rows, so rows may repeat.

    Example:
      >>> substitutes_at(seed=7, n=100, epoch=0, position=3)[:4].tolist()
      [27, 49, 17, 49]
    """
    keys = words("spares", seed, epoch)
    first = hashed(_checked(np.array([position], np.int64), 1 << 63), keys)
    drawn = hashed(np.add(first, np.arange(16, dtype=np.uint64), dtype=np.uint64), keys)
    return (drawn % np.uint64(n)).astype(np.int64)


def as_indices(positions: NDArray[np.integer[Any]] | range) -> NDArray[np.int64]:
    """int64[k]: the positions; perhaps the given array itself."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return np.asarray(positions, np.int64)


def _checked(positions: NDArray[np.int64], end: int) -> NDArray[np.uint64]:
    """The positions as 64-bit words in the same memory. IndexError: a position is not in [0, end)."""
    wide = positions.view(np.uint64)
    if wide.size and wide.max() >= min(end, 1 << 63):  # one pass, since a negative position is a word ≥ 2^63
        raise IndexError(
            f"positions must be in [0, {end}), got {positions.min()} to {positions.max()}; counted over all "
            "epochs, row p is at position p % n of epoch p // n"
        )
    return wide


# --- one epoch as a struct, for C and for NumPy ---


class Network(ctypes.Structure):
    """`Network` of columns.c: a permutation of [0, n). Unused if n is 0."""

    _fields_ = (
        ("n", ctypes.c_uint64),
        ("a", ctypes.c_uint64),
        ("k", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("keys", ctypes.c_uint64 * ROUNDS),
    )

    @classmethod
    def of(cls, n: int, keys: Sequence[np.uint64]) -> Network:
        """The network of [0, n) with the first `ROUNDS` of these keys, which come from `words`."""
        return cls(n, *grid(n), 0, (ctypes.c_uint64 * ROUNDS)(*map(int, keys[:ROUNDS])))

    def __call__(self, indices: NDArray[np.uint64], tweaks: NDArray[np.uint32] | None = None) -> NDArray[np.int64]:
        """The permutation at these indices. With `tweaks`, it is a network for any n: see `feistel`."""
        keys = [np.uint64(key) for key in self.keys]
        if tweaks is None and self.n <= FEW:
            return explicit(self.n, *keys[:2]).take(indices.view(np.int64))
        return feistel(self.n, keys, indices, tweaks)


class EpochOrder(ctypes.Structure):
    """`Order` of columns.c: the parameters of one epoch's order. Never changed once it is built.

    The padded positions of block position b begin at b · `block_rows`.

    Attributes:
      kind: as stored (0), shuffled (1), blocked (2), or a mixture (3).
      n: the number of rows in the epoch.
      table: if shuffled with few rows, the whole permutation; else NULL.
      rows: if shuffled, the permutation of all rows; if blocked, the permutation inside each regular window.
      block_table, blocks: the permutation of the full blocks, as a table if they are few, and as a network.
      irregular, irregular_window: permutations and numbers of the windows with fewer rows: the window with the
        short block, and the last window.
      window_keys: the keys of the tweaks. A tweak is a number that selects the permutation inside a window.
      block_rows: rows of a full block.
      full: the number of full blocks.
      window: blocks in a window; the last window may have fewer.
      short_block: the block position of the short block; unused if no block is short.
      lacking: by how many rows the short block is shorter than a full one.
      mixed: for a mixture, see `order/mixture.py`.
    """

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("n", ctypes.c_uint64),
        ("table", ctypes.c_void_p),
        ("rows", Network),
        ("block_table", ctypes.c_void_p),
        ("blocks", Network),
        ("irregular", Network * 2),
        ("irregular_window", ctypes.c_uint64 * 2),
        ("window_keys", ctypes.c_uint64 * 2),
        ("block_rows", ctypes.c_uint64),
        ("full", ctypes.c_uint64),
        ("window", ctypes.c_uint64),
        ("short_block", ctypes.c_uint64),
        ("lacking", ctypes.c_uint64),
        ("mixed", ctypes.c_void_p),
    )
    rows: Network
    blocks: Network
    keeps_alive: tuple[Any, ...] = ()
    """The objects that `table`, `block_table` and `mixed` point to."""

    def rows_by_numpy(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The row at each position of an epoch of one source, as the C library computes it."""
        rows = np.empty(positions.shape, np.int64)
        for start in range(0, positions.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            rows[part] = self._chunk_by_numpy(positions[part])
        return rows

    def _chunk_by_numpy(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        if self.kind == _SHUFFLED:
            return self.rows(positions)
        if self.kind != _BLOCKED:
            return positions.astype(np.int64)
        padded = self._moved_in_windows(self._padded(positions))
        block_positions = padded // np.uint64(self.block_rows)
        offsets = padded - block_positions * np.uint64(self.block_rows)
        rows = self._blocks_at(block_positions)
        rows *= self.block_rows
        rows += offsets.view(np.int64)
        return rows

    def _padded(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        if not self.lacking:
            return positions
        end_of_short_block = (self.short_block + 1) * self.block_rows - self.lacking
        return positions + np.where(positions >= end_of_short_block, np.uint64(self.lacking), np.uint64(0))

    def _moved_in_windows(self, padded: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The padded positions, each moved inside its window.

        A window's tweak is computed by multiply-shift, so the tweaks of any two windows below 2³² are independent
        (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without
        primes", STACS 1996).
        """
        span = np.uint64(self.window * self.block_rows)
        window = padded // span
        inside = padded - window * span  # faster than a division with remainder
        factor, term = map(np.uint64, self.window_keys)
        tweaks = ((window * factor + term) >> 32).astype(np.uint32)
        moved = self.rows(inside, tweaks)
        for network, number in zip(self.irregular, self.irregular_window, strict=True):
            here = np.flatnonzero(window == number) if network.n else ()
            if len(here):
                moved[here] = network(inside[here], tweaks[here])
        return window * span + moved.view(np.uint64)

    def _blocks_at(self, block_positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The number of the block at each block position."""
        if not self.lacking:
            return self.blocks(block_positions)
        rank = block_positions - (block_positions > self.short_block)
        block = self.blocks(np.minimum(rank, np.uint64(self.full - 1)))
        block[block_positions == self.short_block] = self.full
        return block


@functools.lru_cache(maxsize=64)
def epoch_order(order: Order, n: int, epoch: int) -> EpochOrder:
    """The struct for an epoch of 1 ≤ n ≤ 2⁶² rows (without shuffling: n < 2⁶³)."""
    struct = EpochOrder(n=n)
    keys = words("order", order.seed, epoch)
    if isinstance(order.shuffle, Blocks):
        struct.kind = _BLOCKED
        _set_blocks(struct, order.shuffle, words("blocks", order.seed, epoch))
        struct.rows = Network.of(min(struct.window * struct.block_rows, n), keys)
        for i, (window, size) in enumerate(_irregular_windows(struct)):
            struct.irregular[i], struct.irregular_window[i] = Network.of(size, keys), window
        struct.window_keys = (ctypes.c_uint64 * 2)(*map(int, words("windows", order.seed, epoch)[:2]))
    elif order.shuffle:
        struct.kind, struct.rows = _SHUFFLED, Network.of(n, keys)
        if n <= FEW:
            struct.keeps_alive = (explicit(n, *keys[:2]),)
            struct.table = struct.keeps_alive[0].ctypes.data
    return struct


def _set_blocks(struct: EpochOrder, blocks: Blocks, keys: Sequence[np.uint64]) -> None:
    """Set the sizes and the permutation of the blocks, and draw the block position of the short block."""
    struct.block_rows = rows = min(blocks.rows, struct.n)
    full, rest = divmod(struct.n, rows)
    struct.full, struct.blocks = full, Network.of(full, keys)
    if full <= FEW:
        struct.keeps_alive = (explicit(full, *keys[:2]),)
        struct.block_table = struct.keeps_alive[0].ctypes.data
    count = full + bool(rest)
    struct.window = window = min(blocks.window, count)
    if rest:
        drawn = int(keys[-1]) * count >> 64  # from a word that the blocks' permutation does not use
        struct.short_block = min((drawn // window + 1) * window - 1, full)
        struct.lacking = rows - rest


def _irregular_windows(struct: EpochOrder) -> list[tuple[int, int]]:
    """(number, rows) of each window that has fewer rows than `struct.rows` permutes."""
    window, count = struct.window, struct.full + bool(struct.lacking)
    found = []
    for number in sorted({(count - 1) // window, *([struct.short_block // window] if struct.lacking else [])}):
        first, end = number * window, min((number + 1) * window, count)
        lacking = struct.lacking if first <= struct.short_block < end else 0
        size = (end - first) * struct.block_rows - lacking
        if size != min(window * struct.block_rows, struct.n):
            found.append((number, size))
    return found
