"""The blocked order: blocks of adjacent rows are shuffled, then the rows inside each window of blocks.

An epoch is a sequence of blocks. Its block positions w·window to (w + 1)·window form window w. A position lies in
one window; a permutation of that window's positions, keyed by (seed, epoch, w), moves it inside the window. The
block position and the offset in the block that it then has give the row. All of this is a closed form, in O(1)
memory.

*The short block.* Where `rows` does not divide n, the last block is short, and all positions behind it in the
epoch come earlier by the rows that it lacks. So its block position must be known before a position can be looked
up. That would be the inverse of the blocks' permutation at the last block. Here the position of the short block is
drawn first instead, and a permutation of the full blocks fills the other block positions, which gives the same
distribution and needs no inverse. As the rows of a window are shuffled, it only matters in which window the short
block lies. It takes the last block position there, so that the positions in a window have no gap.

*Padded positions* count rows as if all blocks were full, so that division gives block position and offset.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from feedline._src.options import Blocks
from feedline._src.order.permutation import CHUNK, ROUNDS, feistel, permuted, words

_PART = CHUNK // 2  # positions at a time: half a chunk, since there are twice as many arrays


def blocked(blocks: Blocks, n: int, seed: int, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rows, int64[k], at these positions of an epoch of 1 ≤ n ≤ 2⁶² rows.

    Example:
      >>> blocked(Blocks(rows=2, window=2), 9, seed=1, epoch=0, positions=np.arange(9, dtype=np.uint64))
      array([8, 4, 5, 6, 3, 7, 2, 0, 1])
    """
    keys = words("blocks", seed, epoch)
    layout = BlockLayout.of(blocks, n, keys)
    rows = np.empty(positions.shape, np.int64)
    for start in range(0, positions.size, _PART):
        part = slice(start, start + _PART)
        padded = _shuffled_in_windows(layout, n, seed, epoch, layout.padded(positions[part]))
        block_positions = padded // layout.rows
        rows[part] = padded - block_positions * layout.rows
        rows[part] += _blocks_at(layout, keys, block_positions) * layout.rows
    return rows


@dataclasses.dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of one epoch lie. Block position b has the padded positions from b·rows on.

    Attributes:
      rows: in a full block.
      full: the number of full blocks.
      count: the number of all blocks.
      window: blocks in a window; the last window may have fewer.
      short: the block position of the short block; `count` if no block is short.
      lacking: rows by which the short block is shorter than a full one.
    """

    rows: int
    full: int
    count: int
    window: int
    short: int
    lacking: int

    @classmethod
    def of(cls, blocks: Blocks, n: int, keys: tuple[np.uint64, ...]) -> BlockLayout:
        """The layout of an epoch of n rows. `keys` are the `words` of its blocks."""
        rows = min(blocks.rows, n)
        full, rest = divmod(n, rows)
        if not rest:
            return cls(rows, full, full, min(blocks.window, full), full, 0)
        window = min(blocks.window, full + 1)
        drawn = int(keys[-1]) * (full + 1) >> 64  # a word that the permutation of the blocks does not use
        last_of_window = min((drawn // window + 1) * window - 1, full)
        return cls(rows, full, full + 1, window, last_of_window, rows - rest)

    def padded(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """The padded position of each position."""
        if not self.lacking:
            return positions
        end = (self.short + 1) * self.rows - self.lacking
        return positions + np.where(positions >= end, np.uint64(self.lacking), np.uint64(0))

    def regular_rows(self, n: int) -> int:
        """The rows of a regular window."""
        return min(self.window * self.rows, n)

    def irregular_windows(self, n: int) -> list[tuple[int, int]]:
        """(window, rows) of each window with fewer rows: that of the short block, and the last one."""
        windows = sorted({self.short // self.window, (self.count - 1) // self.window})
        return [(window, size) for window in windows if 0 < (size := self._size(window)) != self.regular_rows(n)]

    def _size(self, window: int) -> int:
        first, end = window * self.window, min((window + 1) * self.window, self.count)
        return (end - first) * self.rows - (self.lacking if first <= self.short < end else 0)


def _shuffled_in_windows(
    layout: BlockLayout, n: int, seed: int, epoch: int, padded: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The padded positions, each moved inside its window."""
    span = layout.window * layout.rows
    window = padded // span
    inside = padded - window * span
    tweaks = _tweaks(window, words("windows", seed, epoch))
    keys = words("order", seed, epoch)[:ROUNDS]
    moved = feistel(layout.regular_rows(n), keys, inside, tweaks)
    for irregular, size in layout.irregular_windows(n):
        here = np.flatnonzero(window == irregular)
        if here.size:
            moved[here] = feistel(size, keys, inside[here], tweaks[here])
    window *= span
    window += moved.view(np.uint64)
    return window


def _tweaks(window: NDArray[np.uint64], keys: tuple[np.uint64, ...]) -> NDArray[np.uint32]:
    """A random word for each window, by multiply-shift: the words of any two windows below 2³² are independent.

    Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without
    primes", STACS 1996.
    """
    word = window * keys[0]
    word += keys[1]
    word >>= 32
    return word.astype(np.uint32)


def _blocks_at(
    layout: BlockLayout, keys: tuple[np.uint64, ...], block_positions: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """The block at each block position: a permutation of the full blocks, the short block at its own position."""
    if not layout.lacking:
        return permuted(layout.full, keys, block_positions)
    rank = block_positions - (block_positions > layout.short)
    block = permuted(layout.full, keys, np.minimum(rank, layout.full - 1))
    block[block_positions == layout.short] = layout.full
    return block
