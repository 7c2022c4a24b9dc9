"""The order of an epoch as the C code takes it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline.options import Blocks, Order
from feedline.order.blocks import Slots
from feedline.order.permutation import FEW, ROUNDS, explicit, grid, words

Indices = npt.NDArray[np.int64]
Positions = npt.NDArray[Any] | range
"""64-bit integers[k] of any strides, or a range of step 1."""
_Keys = tuple[np.uint64, ...]
_SHUFFLED, _BLOCKED = 1, 2


class _Network(ctypes.Structure):
    """`Network` of columns.c. Of n = 0: none."""

    _fields_ = (
        ("n", ctypes.c_uint64),
        ("a", ctypes.c_uint64),
        ("k", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("keys", ctypes.c_uint64 * ROUNDS),
    )

    @classmethod
    def of(cls, n: int, keys: _Keys) -> _Network:
        return cls(n, *grid(n), 0, (ctypes.c_uint64 * ROUNDS)(*map(int, keys[:ROUNDS])))


class EpochOrder(ctypes.Structure):
    """`Order` of columns.c: all that decides which row stands at which position of one epoch. Immutable."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("n", ctypes.c_uint64),
        ("table", ctypes.c_void_p),
        ("rows", _Network),
        ("block_table", ctypes.c_void_p),
        ("blocks", _Network),
        ("unusual", _Network * 2),
        ("unusual_window", ctypes.c_uint64 * 2),
        ("window_keys", ctypes.c_uint64 * 2),
        ("block_rows", ctypes.c_uint64),
        ("full", ctypes.c_uint64),
        ("window", ctypes.c_uint64),
        ("short_slot", ctypes.c_uint64),
        ("lacking", ctypes.c_uint64),
    )
    tables: tuple[Indices, ...] = ()
    """What `table` and `block_table` point to."""


@functools.lru_cache(maxsize=16)
def epoch_order(order: Order, n: int, epoch: int) -> EpochOrder:
    """Of an epoch of 1 ≤ n ≤ 2⁶² rows (without shuffling: n < 2⁶³)."""
    epochs = EpochOrder(n=n)
    if not order.shuffle:
        return epochs
    keys = words("order", order.seed, epoch)
    if isinstance(order.shuffle, Blocks):
        _set_blocks(epochs, order.shuffle, n, order.seed, epoch, keys)
    else:
        epochs.kind = _SHUFFLED
        _set_permutation(epochs, "table", "rows", n, keys)
    return epochs


def _set_blocks(epochs: EpochOrder, blocks: Blocks, n: int, seed: int, epoch: int, keys: _Keys) -> None:
    of_blocks = words("blocks", seed, epoch)
    slots = Slots.of(blocks, n, of_blocks)
    epochs.kind = _BLOCKED
    epochs.rows = _Network.of(slots.usual(n), keys)
    for i, (window, size) in enumerate(slots.unusual(n)):
        epochs.unusual[i], epochs.unusual_window[i] = _Network.of(size, keys), window
    epochs.window_keys = (ctypes.c_uint64 * 2)(*map(int, words("windows", seed, epoch)[:2]))
    _set_permutation(epochs, "block_table", "blocks", slots.full, of_blocks)
    epochs.block_rows, epochs.full, epochs.window = slots.rows, slots.full, slots.window
    epochs.short_slot, epochs.lacking = slots.short, slots.lacking


def _set_permutation(epochs: EpochOrder, table: str, network: str, n: int, keys: _Keys) -> None:
    """A table where n is small, as in `permuted`, else a network."""
    if n <= FEW:
        numbers = explicit(n, keys)
        epochs.tables = (*epochs.tables, numbers)
        setattr(epochs, table, numbers.ctypes.data)
    else:
        setattr(epochs, network, _Network.of(n, keys))


def rows_at(library: ctypes.CDLL, order: Order, n: int, epoch: int, positions: Positions) -> Indices:
    """The row at each position in [0, n), as `feedline.order.epoch.rows_at`."""
    rows = np.empty(len(positions), np.int64)
    bad = ctypes.c_int64()
    epochs = epoch_order(order, n, epoch)
    addressed = Addressed(positions)
    code = library.feedline_order(
        ctypes.byref(epochs), addressed.address, addressed.first, len(rows), rows.ctypes.data, ctypes.byref(bad)
    )
    if code:
        raise IndexError(f"positions must be in [0, {n}), got {bad.value} (code {code})")
    return rows


class Addressed:
    """Positions as C takes them, valid as long as this is alive.

    Attributes:
      address: of the integers; None: they are `first` and those that follow it.
    """

    __slots__ = ("_kept", "address", "first")

    def __init__(self, positions: Positions) -> None:
        if isinstance(positions, range):
            self.address, self.first = None, positions.start
        else:
            self._kept = np.ascontiguousarray(positions)  # C steps through memory, not through strides
            self.address, self.first = self._kept.ctypes.data, 0
