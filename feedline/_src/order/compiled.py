"""The order of an epoch as the structs of the C library, which computes the same rows as NumPy."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.options import Blocks, Order
from feedline._src.order.blocks import BlockLayout
from feedline._src.order.permutation import FEW, ROUNDS, explicit, grid, words

_Keys = tuple[np.uint64, ...]
_SHUFFLED, _BLOCKED, _MIXED = 1, 2, 3


class _Network(ctypes.Structure):
    """`Network` of columns.c. It is unused if n is 0."""

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
    """`Order` of columns.c: everything that determines the order of one epoch. Not changed once it is made."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("n", ctypes.c_uint64),
        ("table", ctypes.c_void_p),
        ("rows", _Network),
        ("block_table", ctypes.c_void_p),
        ("blocks", _Network),
        ("irregular", _Network * 2),
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


class MixedSource(ctypes.Structure):
    """`MixedSource` of columns.c: a source of a mixture, and some epochs of its own order."""

    _fields_ = (
        ("epochs", ctypes.c_void_p),
        ("first_epoch", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("before", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("first_row", ctypes.c_uint64),
    )
    keeps_alive: Any = None
    """What `epochs` points to."""

    @classmethod
    def of(
        cls, order: Order, epochs: range, *, length: int, before: int, step: int, first_row: int
    ) -> MixedSource:
        """The source with these epochs of its order."""
        each = [epoch_order(order, length, epoch) for epoch in epochs]
        array = (EpochOrder * len(each))(*each)
        source = cls(ctypes.addressof(array), epochs.start, len(each), length, before, step, first_row)
        source.keeps_alive = each, array
        return source


class _Mixed(ctypes.Structure):
    """`Mixed` of columns.c: some positions of a mixture."""

    _fields_ = (
        ("source", ctypes.c_void_p),
        ("rank", ctypes.c_void_p),
        ("places", ctypes.c_uint64),
        ("start", ctypes.c_uint64),
        ("sources", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


def mixed_order(
    n: int, start: int, source: npt.NDArray[np.int32], rank: npt.NDArray[np.int64], sources: Sequence[MixedSource]
) -> EpochOrder:
    """The struct for ascending positions of a mixture, from `start` on and below n. The sources have their epochs.

    Args:
      source, rank: the source at each place of a table, and how many of its rows stand before that place.
    """
    array = (MixedSource * len(sources))(*sources)
    mixed = _Mixed(source.ctypes.data, rank.ctypes.data, len(source), start, ctypes.addressof(array), len(sources))
    struct = EpochOrder(kind=_MIXED, n=n, mixed=ctypes.addressof(mixed))
    struct.keeps_alive = (mixed, array, sources, source, rank)
    return struct


@functools.lru_cache(maxsize=64)
def epoch_order(order: Order, n: int, epoch: int) -> EpochOrder:
    """The struct for an epoch of 1 ≤ n ≤ 2⁶² rows (without shuffling: n < 2⁶³)."""
    struct = EpochOrder(n=n)
    if not order.shuffle:
        return struct
    keys = words("order", order.seed, epoch)
    if not isinstance(order.shuffle, Blocks):
        struct.kind = _SHUFFLED
        _set_permutation(struct, "table", "rows", n, keys)
        return struct
    block_keys = words("blocks", order.seed, epoch)
    layout = BlockLayout.of(order.shuffle, n, block_keys)
    struct.kind = _BLOCKED
    struct.rows = _Network.of(layout.regular_rows(n), keys)
    for i, (window, size) in enumerate(layout.irregular_windows(n)):
        struct.irregular[i], struct.irregular_window[i] = _Network.of(size, keys), window
    struct.window_keys = (ctypes.c_uint64 * 2)(*map(int, words("windows", order.seed, epoch)[:2]))
    _set_permutation(struct, "block_table", "blocks", layout.full, block_keys)
    struct.block_rows, struct.full, struct.window = layout.rows, layout.full, layout.window
    struct.short_block, struct.lacking = layout.short, layout.lacking
    return struct


def _set_permutation(struct: EpochOrder, table: str, network: str, n: int, keys: _Keys) -> None:
    """Set a table if n is small, as in `permuted`, else a network."""
    if n <= FEW:
        numbers = explicit(n, keys)
        struct.keeps_alive = (numbers,)
        setattr(struct, table, numbers.ctypes.data)
    else:
        setattr(struct, network, _Network.of(n, keys))
