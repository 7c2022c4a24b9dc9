"""Finds out when the transfers of placed batches end, on a thread of its own."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import jax

_AT_A_TIME = 2
"""Batches that are looked at together: while it is looked at, a batch is kept alive."""


class TransferWatch:
    """Reports when the arrays of a batch are ready. Any thread may call it; it never waits.

    A batch that is ready at once, as on the CPU backend, needs no thread. Of others at most two are looked at
    at a time, so that no more memory is kept alive; further ones are left out. The thread starts with the first
    such batch and ends when the watch is garbage collected.

    Args:
      report: called with the `began` of a batch and the seconds since then.
    """

    def __init__(self, report: Callable[[float, float], None]) -> None:
        self._watched: queue.SimpleQueue[tuple[Sequence[jax.Array], float] | None] = queue.SimpleQueue()
        self._free = threading.Semaphore(_AT_A_TIME)
        self._thread = threading.Thread(
            target=_watch, args=(self._watched, self._free, report), name="feedline-transfers", daemon=True
        )
        self._start = threading.Lock()  # taken once, and never released
        weakref.finalize(self, self._watched.put, None).atexit = False

    def __call__(self, arrays: Sequence[jax.Array], began: float) -> None:
        """Report on this batch, if fewer than two others are being looked at."""
        if self._free.acquire(blocking=False):
            if self._start.acquire(blocking=False):
                self._thread.start()
            self._watched.put((arrays, began))


def _watch(
    watched: queue.SimpleQueue[tuple[Sequence[jax.Array], float] | None],
    free: threading.Semaphore,
    report: Callable[[float, float], None],
) -> None:
    while (entry := watched.get()) is not None:
        arrays, began = entry
        with contextlib.suppress(RuntimeError):  # the step has donated the batch: then it was ready before
            jax.block_until_ready(arrays)
            report(began, time.perf_counter() - began)
        del entry, arrays
        free.release()
