"""The memory limit: how fast this machine gathers shuffled rows if it does nothing else, with NumPy and with C."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

CopyRows = Callable[[npt.NDArray[np.int64], npt.NDArray[Any]], object]
"""(indices, out) → copies row indices[i] to out[i], for each i."""

_BUFFERS = 6
"""As many batches as a feed keeps in memory. With only two, the processor's cache would be measured."""


def numpy_gather(rows: npt.NDArray[Any]) -> CopyRows:
    """The fastest gather in NumPy: `np.take`."""
    # mode="clip" avoids the temporary array that "raise" makes
    return lambda indices, out: np.take(rows, indices, axis=0, out=out, mode="clip")


def fastest_gather(rows: npt.NDArray[Any]) -> CopyRows:
    """The fastest gather known: feedline's own in C, as a feed calls it. Without the C library: `np.take`."""
    from feedline._src.native.gather import RowGather  # imported here: another version of feedline may lack it

    if not RowGather.can_gather([rows]):
        return numpy_gather(rows)
    gather, whole = RowGather([rows]), (slice(None),) * (rows.ndim - 1)
    return lambda indices, out: gather.read(indices, whole, out)


class MemoryLimit:
    """Threads that copy rows into a ring of buffers, in a precomputed order.

    They place no batch, and do not wait for each other. A feed of the same rows has to do more than this.
    """

    def __init__(
        self,
        rows: npt.NDArray[Any],
        batch_size: int,
        threads: int,
        gather: Callable[[npt.NDArray[Any]], CopyRows] = numpy_gather,
    ) -> None:
        self._gather = gather(rows)
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
            buffer[...] = 0  # allocates its pages before the measurement

    def rate(self, seconds: float) -> float:
        """Rows per second, over all threads."""
        turns, copied = itertools.count(), []
        began = time.perf_counter()

        def copy() -> None:
            mine = 0
            while not mine or time.perf_counter() - began < seconds:
                turn = next(turns)
                indices = self._batches[turn % len(self._batches)]
                self._gather(indices, self._ring[turn % _BUFFERS])
                mine += len(indices)
            copied.append(mine)

        threads = [threading.Thread(target=copy) for _ in range(self._threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(copied) / (time.perf_counter() - began)


def filler(size: int) -> npt.NDArray[np.uint8]:
    """Random uint8[size]; the same 16 MiB repeat."""
    part = np.random.default_rng(0).integers(256, size=1 << 24, dtype=np.uint8)
    flat = np.empty(size, np.uint8)
    for start in range(0, size, len(part)):
        flat[start : start + len(part)] = part[: size - start]
    return flat
