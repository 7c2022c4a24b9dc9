"""A single C call that finds the rows at some positions and copies them into all leaves of a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from feedline.native.gather import Copy
from feedline.order.compiled import EpochOrder, Indices, Positions, PositionsPointer


def fill(library: ctypes.CDLL, epoch: EpochOrder, positions: Positions, copies: Sequence[Copy]) -> Indices:
    """Copy the rows at some positions of an epoch into all leaves of a batch.

    Args:
      copies: one for each leaf, for as many rows as there are positions (see `Segments.copy`).

    Returns:
      int64[k]: the row at each position.

    Raises:
      IndexError: there is no such position, or no such row.
    """
    rows = np.empty(len(positions), np.int64)
    bad = ctypes.c_int64()
    pointer = PositionsPointer(positions)
    code = library.feedline_fill(
        ctypes.byref(epoch),
        pointer.address,
        pointer.first,
        len(positions),
        rows.ctypes.data,
        (Copy * len(copies))(*copies),
        len(copies),
        ctypes.byref(bad),
    )
    if code:
        raise IndexError(f"positions and rows must be in [0, {epoch.n}), got {bad.value} (code {code})")
    return rows
