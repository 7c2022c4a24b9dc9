"""The blocked order: blocks of adjacent rows are shuffled, then the rows inside each window of blocks.

Each slot of an epoch holds a block, and slots w·window to (w + 1)·window are window w. A position belongs to
the window that it falls into; a permutation of this window's places, keyed by (seed, epoch, w), moves it to
the place whose slot and offset say the row. All of it is a closed form, in O(1) memory.

*The short block.* Where `rows` does not divide n, the last block is short, and all positions after it come
earlier by what it lacks. So its slot must be known before a position is looked up: it is the inverse of the
blocks' permutation at the last block. Here it is drawn first instead, and the full blocks fill the other
slots by a permutation of their own, which gives the same distribution and needs no inverse. As a window's rows
are shuffled, only the window of that slot matters. The short block takes the last slot there, so that the
places of a window have no hole.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from feedline.options import Blocks
from feedline.order.permutation import CHUNK, ROUNDS, feistel, permuted, words

_PART = CHUNK // 2  # positions at a time: there are more arrays of them


def blocked(blocks: Blocks, n: int, seed: int, epoch: int, positions: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rows, int64[k], at these positions of an epoch of 1 ≤ n ≤ 2⁶² rows.

    Example:
      >>> blocked(Blocks(rows=2, window=2), 9, seed=1, epoch=0, positions=np.arange(9, dtype=np.uint64))
      array([8, 4, 5, 6, 3, 7, 2, 0, 1])
    """
    keys = words("blocks", seed, epoch)
    slots = Slots.of(blocks, n, keys)
    rows = np.empty(positions.shape, np.int64)
    for start in range(0, positions.size, _PART):
        part = slice(start, start + _PART)
        places = _shuffled_in_windows(slots, n, seed, epoch, slots.places(positions[part]))
        slot = places // slots.rows
        rows[part] = places - slot * slots.rows
        rows[part] += _block_in(slots, keys, slot) * slots.rows
    return rows


@dataclasses.dataclass(frozen=True)
class Slots:
    """The slots of one epoch. Slot s has the places from s·rows on.

    Attributes:
      rows: in a full block.
      full: how many blocks are full.
      count: of all slots, and of all blocks.
      window: slots in a window; the last window may have fewer.
      short: the slot of the short block, and `count` where no block is short.
      lacking: rows that the short block has less than a full one.
    """

    rows: int
    full: int
    count: int
    window: int
    short: int
    lacking: int

    @classmethod
    def of(cls, blocks: Blocks, n: int, keys: tuple[np.uint64, ...]) -> Slots:
        """Those of an epoch of n rows. `keys` are the `words` of its blocks."""
        rows = min(blocks.rows, n)
        full, rest = divmod(n, rows)
        if not rest:
            return cls(rows, full, full, min(blocks.window, full), full, 0)
        window = min(blocks.window, full + 1)
        drawn = int(keys[-1]) * (full + 1) >> 64  # a word that the permutation of the blocks does not use
        last_of_window = min((drawn // window + 1) * window - 1, full)
        return cls(rows, full, full + 1, window, last_of_window, rows - rest)

    def places(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Positions count rows, places count as if all blocks were full."""
        if not self.lacking:
            return positions
        end = (self.short + 1) * self.rows - self.lacking
        return positions + np.where(positions >= end, np.uint64(self.lacking), np.uint64(0))

    def usual(self, n: int) -> int:
        """How many rows stand in a window, as a rule."""
        return min(self.window * self.rows, n)

    def unusual(self, n: int) -> list[tuple[int, int]]:
        """The windows with another number of rows, and that number: that of the short block, and the last one."""
        windows = sorted({self.short // self.window, (self.count - 1) // self.window})
        return [(window, size) for window in windows if 0 < (size := self._size(window)) != self.usual(n)]

    def _size(self, window: int) -> int:
        first, end = window * self.window, min((window + 1) * self.window, self.count)
        return (end - first) * self.rows - (self.lacking if first <= self.short < end else 0)


def _shuffled_in_windows(
    slots: Slots, n: int, seed: int, epoch: int, places: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Each place moved inside its window."""
    span = slots.window * slots.rows
    window = places // span
    inside = places - window * span
    tweaks = _tweaks(window, words("windows", seed, epoch))
    keys = words("order", seed, epoch)[:ROUNDS]
    moved = feistel(slots.usual(n), keys, inside, tweaks)
    for unusual, size in slots.unusual(n):
        here = np.flatnonzero(window == unusual)
        if here.size:
            moved[here] = feistel(size, keys, inside[here], tweaks[here])
    window *= span
    window += moved.view(np.uint64)
    return window


def _tweaks(window: NDArray[np.uint64], keys: tuple[np.uint64, ...]) -> NDArray[np.uint32]:
    """A random word for each window: multiply-shift, by which any two windows below 2³² have independent ones.

    Dietzfelbinger, "Universal hashing and k-wise independent random variables via integer arithmetic without
    primes", STACS 1996.
    """
    word = window * keys[0]
    word += keys[1]
    word >>= 32
    return word.astype(np.uint32)


def _block_in(slots: Slots, keys: tuple[np.uint64, ...], slot: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The block in each slot. The full ones stand in the order of a permutation, the short one in its slot."""
    if not slots.lacking:
        return permuted(slots.full, keys, slot)
    rank = slot - (slot > slots.short)
    block = permuted(slots.full, keys, np.minimum(rank, slots.full - 1))
    block[slot == slots.short] = slots.full
    return block
