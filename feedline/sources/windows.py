"""Windows of adjacent elements as rows: how a file of tokens becomes examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def windows(array: Array, length: int, stride: int) -> Array:
    """The view [n, length, …] of an array [m, …]: n = (m − length) // stride + 1, and 0 if m < length.

    Window i holds elements i·stride … i·stride + length − 1. Elements after the last whole window are left out.

    Example:
      >>> windows(np.arange(7), length=3, stride=2).tolist()
      [[0, 1, 2], [2, 3, 4], [4, 5, 6]]
    """
    if len(array) < length:
        return np.empty((0, length, *array.shape[1:]), array.dtype)
    sliding = np.lib.stride_tricks.sliding_window_view(array, length, axis=0)
    return np.moveaxis(sliding, -1, 1)[::stride]
