"""The order of one epoch as a struct, from which the C library and NumPy compute the same rows.

*The blocked order* shuffles blocks of adjacent rows, then the rows inside each window of blocks. An epoch is a
sequence of blocks. Its block positions w·window to (w + 1)·window form window w. A position lies in one window; a
permutation of that window's positions, keyed by (seed, epoch, w), moves it inside the window. The block position
and the offset in the block that it then has give the row. All of this is a closed form, in O(1) memory.

*The short block.* Where `rows` does not divide n, the last block is short, and all positions behind it in the
epoch come earlier by the rows that it lacks. So its block position must be known before a position can be looked
up. That would be the inverse of the blocks' permutation at the last block. Here the position of the short block is
drawn first instead, and a permutation of the full blocks fills the other block positions, which gives the same
distribution and needs no inverse. As the rows of a window are shuffled, it only matters in which window the short
block lies. It takes the last block position there, so that the positions in a window have no gap.

*Padded positions* count rows as if all blocks were full, so that division gives block position and offset.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline._src.options import Blocks, Order
from feedline._src.order.permutation import FEW, ROUNDS, explicit, feistel, grid, permuted, words

_SHUFFLED, _BLOCKED = 1, 2
_CHUNK = 1 << 13  # positions at a time: many for each NumPy call, but all arrays stay in the cache


class Network(ctypes.Structure):
    """`Network` of columns.c: a permutation of [0, n). It is unused if n is 0."""

    _fields_ = (
        ("n", ctypes.c_uint64),
        ("a", ctypes.c_uint64),
        ("k", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("keys", ctypes.c_uint64 * ROUNDS),
    )

    @classmethod
    def of(cls, n: int, keys: Sequence[np.uint64]) -> Network:
        """The network with these keys, `words`."""
        return cls(n, *grid(n), 0, (ctypes.c_uint64 * ROUNDS)(*map(int, keys[:ROUNDS])))

    @property
    def key_words(self) -> list[np.uint64]:
        """The keys as NumPy computes with them."""
        return [np.uint64(key) for key in self.keys]


class EpochOrder(ctypes.Structure):
    """`Order` of columns.c: everything that determines the order of one epoch. Not changed once it is made.

    Block position b has the padded positions from b · `block_rows` on.

    Attributes:
      kind: as stored, shuffled, blocked, or a mixture.
      n: rows of the epoch.
      table: of a shuffled order with few rows its whole permutation; else NULL.
      rows: the permutation of all rows, or of the positions of a regular window.
      block_table, blocks: the permutation of the full blocks, in one of the two ways.
      irregular, irregular_window: the permutations and numbers of windows with fewer rows than others: that of the
        short block, and the last one.
      window_keys: of the tweaks that select the permutation of each window.
      block_rows: rows of a full block.
      full: the number of full blocks.
      window: blocks in a window; the last window may have fewer.
      short_block: the block position of the short block; unused if no block is short.
      lacking: rows by which the short block is shorter than a full one.
      mixed: of a mixture; see `order/mixture.py`.
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
    keeps_alive: tuple[Any, ...] = ()
    """What `table`, `block_table` and `mixed` point to."""

    def rows_by_numpy(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The row at each position of an epoch of one source, as the C library computes it."""
        rows = np.empty(positions.shape, np.int64)
        for start in range(0, positions.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            rows[part] = self._chunk_by_numpy(positions[part])
        return rows

    def _chunk_by_numpy(self, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        if self.kind == _SHUFFLED:
            return permuted(self.n, self.rows.key_words, positions)
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

        The tweak of a window is drawn by multiply-shift, so those of any two windows below 2³² are independent
        (Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without
        primes", STACS 1996).
        """
        span = np.uint64(self.window * self.block_rows)
        window = padded // span
        inside = padded - window * span  # faster than a division with remainder
        factor, term = map(np.uint64, self.window_keys)
        tweaks = ((window * factor + term) >> 32).astype(np.uint32)
        moved = feistel(self.rows.n, self.rows.key_words, inside, tweaks)
        for network, number in zip(self.irregular, self.irregular_window, strict=True):
            here = np.flatnonzero(window == number) if network.n else ()
            if len(here):
                moved[here] = feistel(network.n, network.key_words, inside[here], tweaks[here])
        return window * span + moved.view(np.uint64)

    def _blocks_at(self, block_positions: NDArray[np.uint64]) -> NDArray[np.int64]:
        """The block at each position: a permutation of the full blocks, the short block at its own position."""
        keys = self.blocks.key_words
        if not self.lacking:
            return permuted(self.full, keys, block_positions)
        rank = block_positions - (block_positions > self.short_block)
        block = permuted(self.full, keys, np.minimum(rank, np.uint64(self.full - 1)))
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
    """Set the sizes and the permutation of the blocks, and draw the place of the short one."""
    struct.block_rows = rows = min(blocks.rows, struct.n)
    full, rest = divmod(struct.n, rows)
    struct.full, struct.blocks = full, Network.of(full, keys)
    if full <= FEW:
        struct.keeps_alive = (explicit(full, *keys[:2]),)
        struct.block_table = struct.keeps_alive[0].ctypes.data
    count = full + bool(rest)
    struct.window = window = min(blocks.window, count)
    if rest:
        drawn = int(keys[-1]) * count >> 64  # by a word that the permutation of the blocks does not use
        struct.short_block = min((drawn // window + 1) * window - 1, full)
        struct.lacking = rows - rest


def _irregular_windows(struct: EpochOrder) -> list[tuple[int, int]]:
    """(window, rows) of each window with fewer rows than `struct.rows` permutes."""
    window, count = struct.window, struct.full + bool(struct.lacking)
    found = []
    for number in sorted({(count - 1) // window, *([struct.short_block // window] if struct.lacking else [])}):
        first, end = number * window, min((number + 1) * window, count)
        lacking = struct.lacking if first <= struct.short_block < end else 0
        size = (end - first) * struct.block_rows - lacking
        if size != min(window * struct.block_rows, struct.n):
            found.append((number, size))
    return found
