"""What the devices are still busy with: transfers of placed batches, and the steps of the training loop.

Both are found out on threads that do nothing else, and that wait until arrays are ready.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import math
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence

import jax

_AT_A_TIME = 2
"""Batches whose transfers are watched together: a batch is kept alive meanwhile."""
_LOOK_EVERY_S = 0.05
"""From the end of a look at the devices to the next one, on average, at the least."""
_LOOK_SHARE = 0.01
"""The share of the time that listing the arrays in use may take."""
_PLACED_LATELY = 8
"""Batches that may still be in transfer while the training loop waits: then hardly any is ahead of it."""


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


class Look:
    """What the devices did while the training loop waited for one batch.

    Attributes:
      asked: when the loop began to wait.
      seen: when the devices were looked at.
      idle: when they had done all that the loop had dispatched; None: not yet.
    """

    __slots__ = ("asked", "idle", "seen")

    def __init__(self, asked: float, seen: float, idle: float | None) -> None:
        self.asked, self.seen, self.idle = asked, seen, idle


class StepWatch:
    """Finds out, for some of the training loop's waits, for how long the devices still compute meanwhile.

    A loop that does not wait for its steps runs ahead of the devices. What they compute are arrays that are not
    ready yet, other than batches that are being placed. Each look has a thread, which ends with it.

    Args:
      report: called with each look, on its thread, as soon as it is known whether the devices compute.
    """

    def __init__(self, report: Callable[[Look], None]) -> None:
        self._report = report
        self._batches: collections.deque[list[weakref.ref[jax.Array]]] = collections.deque(maxlen=_PLACED_LATELY)
        self._due = 0.0  # when the next look is due; infinite during a look
        self._random = random.Random()  # not the module's own generator, which the user may have seeded

    def placed(self, arrays: Sequence[jax.Array]) -> None:
        """These arrays are a batch. Any thread may call it."""
        self._batches.append(list(map(weakref.ref, arrays)))

    def waits(self) -> None:
        """The training loop begins to wait for a batch. For the training thread."""
        asked = time.perf_counter()
        if asked >= self._due:
            self._due = math.inf
            with contextlib.suppress(RuntimeError):  # no further thread can be started: then nobody looks any more
                _thread.start_new_thread(self._look, (asked,))  # threading.Thread.start would wait for it

    def _look(self, asked: float) -> None:
        began = time.perf_counter()
        arrays = _computed([array() for batch in list(self._batches) for array in batch])
        look = Look(asked, began, None if arrays else asked)
        seconds = time.perf_counter() - began
        self._report(look)
        with contextlib.suppress(RuntimeError):  # donated or deleted meanwhile: the loop goes on
            jax.block_until_ready(arrays)
            look.idle = look.idle or time.perf_counter()
        pause_s = max(_LOOK_EVERY_S, seconds / _LOOK_SHARE) * self._random.uniform(0.5, 1.5)
        self._due = time.perf_counter() + pause_s


def _computed(placed: Sequence[jax.Array | None]) -> list[jax.Array]:
    """All arrays that are being computed, but those that were `placed`."""
    found, known = [], set(map(id, placed))
    for array in jax.live_arrays():
        with contextlib.suppress(RuntimeError):  # deleted meanwhile
            if id(array) not in known and not array.is_deleted() and not array.is_ready():
                found.append(array)
    return found
