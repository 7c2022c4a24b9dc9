"""The memory limit: how fast this machine can gather shuffled rows at all, with everything else left out."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

_BUFFERS = 6
"""As many batches as a feed has on their way. Two would stay in the cache, and measure that."""


class MemoryLimit:
    """Threads that copy rows into a ring of buffers by `np.take`, in an order that was computed before.

    Nothing is placed, nothing handed over, nothing waits. A feed on the same rows does this and the rest.

    Args:
      rows: the source, [n, …].
      batch_size: rows of a batch, at most n.
      threads: as many as the feed reads with.

    Example:
      >>> limit = MemoryLimit(np.zeros((1000, 8), np.uint8), batch_size=100, threads=1)
      >>> limit.rate(0.01) > 0
      True
    """

    def __init__(self, rows: npt.NDArray[Any], batch_size: int, threads: int) -> None:
        self._rows = rows
        self._threads = threads
        count = len(rows) // batch_size
        order = np.random.default_rng(0).permutation(len(rows))[: count * batch_size]
        self._batches = order.reshape(count, batch_size)
        size = batch_size * rows[0].nbytes
        self._ring = [
            np.frombuffer(mmap.mmap(-1, size), rows.dtype).reshape(batch_size, *rows.shape[1:])
            for _ in range(_BUFFERS)
        ]
        for buffer in self._ring:
            buffer[...] = 0  # its pages exist before it is measured

    def rate(self, seconds: float) -> float:
        """Rows per second, over all threads."""
        turns, copied = itertools.count(), []
        began = time.perf_counter()

        def copy() -> None:
            mine = 0
            while not mine or time.perf_counter() - began < seconds:
                turn = next(turns)
                indices = self._batches[turn % len(self._batches)]
                # mode="clip" spares the temporary that "raise" makes beside `out`
                np.take(self._rows, indices, axis=0, out=self._ring[turn % _BUFFERS], mode="clip")
                mine += len(indices)
            copied.append(mine)

        threads = [threading.Thread(target=copy) for _ in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(copied) / (time.perf_counter() - began)
