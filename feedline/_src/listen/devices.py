"""What the devices are still busy with: transfers of placed batches, and the steps of the training loop.

Both are found out on threads that do nothing else.
"""

from __future__ import annotations

import _thread
import collections
import contextlib
import math
import queue
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from feedline._src.runtime.ending import exits
from feedline._src.runtime.exit import close_at_exit

_MAX_WATCHED = 2
"""Batches whose transfers are watched at a time, and so kept alive."""
_MEAN_INTERVAL_S = 0.05
"""Mean time from the end of a look at the devices, or from a glance, to the next one, at the least."""
_MAX_LISTING_SHARE = 0.01
"""Share of the time that listing the live arrays may take."""
_PLACED_LATELY = 8
"""Batches that may still be in transfer while the training loop waits: then hardly any is ahead of it."""
_GAPS = 32
"""Latest times between two batches. A glance comes within the longest, so that no part of the loop is left out."""
_MAX_GAP_S = 60.0
_WATCHED_S = 1e-3
"""For how long a glance measures the processor time of this process."""


class TransferWatch:
    """Reports when the arrays of a batch are ready. Any thread may call it; it never waits.

    A batch that is ready at once, as on the CPU backend, needs no thread. Of others at most two are looked at
    at a time, so that no more memory is kept alive; further ones are left out. The thread starts with the first
    such batch and ends when the watch is garbage collected.

    Args:
      report: called with the `began` of a batch and the seconds since then.
    """

    def __init__(self, report: Callable[[float, float], None]) -> None:
        self._transfers = _Transfers(report)
        self._free = self._transfers.free
        self._start = threading.Lock()  # taken once, and never released
        # as close() does, but in C: an interrupt in a finalizer of Python code would be printed and lost
        weakref.finalize(self, self._transfers.watched.put, None).atexit = False

    def __call__(self, arrays: Sequence[jax.Array], began: float) -> None:
        """Report on this batch, if fewer than two others are being looked at."""
        if self._free.acquire(blocking=False):
            if self._start.acquire(blocking=False):
                self._transfers.start()
            self._transfers.add(arrays, began)


class _Transfers:
    """The thread of a `TransferWatch`. It holds no reference to the watch, so that a dropped one ends it.

    Owned by the watch, which closes it, and closed at exit: a thread that is inside jax when the interpreter has
    ended aborts the process.
    """

    def __init__(self, report: Callable[[float, float], None]) -> None:
        self.free = threading.Semaphore(_MAX_WATCHED)
        self._report = report
        self.watched: queue.SimpleQueue[tuple[Sequence[jax.Array], float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="feedline-transfers", daemon=True)

    def start(self) -> None:
        close_at_exit(self, devices=True)
        self._thread.start()

    def add(self, arrays: Sequence[jax.Array], began: float) -> None:
        self.watched.put((arrays, began))

    def close(self) -> None:
        """End the thread, without waiting for that. Any thread or a finalizer may call it."""
        self.watched.put(None)

    def join(self, timeout_s: float) -> str | None:
        """Wait for the thread, after `close`. Returns its name if it is still alive."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return self._thread.name if self._thread.is_alive() else None

    def _run(self) -> None:
        while (entry := self.watched.get()) is not None:
            if exits():
                return
            arrays, began = entry
            with contextlib.suppress(RuntimeError):  # the step has donated the batch: then it was ready before
                jax.block_until_ready(arrays)
                self._report(began, time.perf_counter() - began)
            del entry, arrays
            self.free.release()


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
    """Finds out when the devices compute what the training loop has dispatched.

    A step that is being computed has arrays that are not ready yet and are no batch. They are listed

    - in a *look*, which begins when the loop begins to wait for a batch, and lasts until the devices are idle: a
      loop that does not wait for its steps runs ahead of them;
    - at a *glance*, which comes at a random moment and does not last: the share of glances that find none is the
      share of the time in which the devices are idle, whatever the loop does meanwhile.

    Each has a thread, which ends with it. At exit the interpreter waits for a thread that is inside jax: it would
    abort the process.

    Args:
      report: called with each look, on its thread, as soon as it is known whether the devices compute.
      glanced: called with the time of each glance, and whether the devices were idle.
    """

    def __init__(
        self, report: Callable[[Look], None], glanced: Callable[[float, bool], None] = lambda at, idle: None
    ) -> None:
        self._report = report
        self._glanced = glanced
        self._batches: collections.deque[list[weakref.ref[jax.Array]]] = collections.deque(maxlen=_PLACED_LATELY)
        self._due = 0.0  # when the next look or glance is due; infinite during a look
        self._listing_s = 0.0  # how long the latest listing of arrays took
        self._random = random.Random()  # not the module's own generator, which the user may have seeded
        self._looking = threading.Lock()  # held by the thread of a look
        self._placed_at: float | None = None
        self._gaps: collections.deque[float] = collections.deque(maxlen=_GAPS)
        self._glancing = threading.Lock()  # held by the thread of a glance while it is inside jax
        self._awaited = threading.Semaphore()  # taken from when a glance is due until it was made
        self._client: Any = jax  # of the devices on which batches lie, once one was placed
        close_at_exit(self, devices=True)

    def close(self) -> None:
        """No-op: a look that has begun ends by itself, and none begins when the interpreter exits."""

    def join(self, timeout_s: float) -> str | None:
        """Wait for the threads that are inside jax. Returns the name of one that is still busy."""
        deadline = time.monotonic() + timeout_s
        for held in (self._looking, self._glancing):
            if not held.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return "feedline-look"
            held.release()
        return None

    def placed(self, arrays: Sequence[jax.Array]) -> None:
        """These arrays are a batch. Any thread may call it."""
        self._batches.append(list(map(weakref.ref, arrays)))
        now = time.perf_counter()
        if self._placed_at is None:
            self._client = next(iter(arrays[0].devices())).client
        else:
            self._gaps.append(min(now - self._placed_at, _MAX_GAP_S))
        self._placed_at = now
        if self._gaps and now >= self._due and self._awaited.acquire(blocking=False):
            self._due = now + self._pause_s()
            with contextlib.suppress(RuntimeError):  # as in `waits`
                _thread.start_new_thread(self._glance, (self._random.random() * max(self._gaps.copy()),))

    def _pause_s(self) -> float:
        """From one look or glance to the next."""
        return max(_MEAN_INTERVAL_S, self._listing_s / _MAX_LISTING_SHARE) * self._random.uniform(0.5, 1.5)

    def _glance(self, delay_s: float) -> None:
        time.sleep(delay_s)
        with self._glancing:
            if not exits():
                at = time.perf_counter()
                idle = not self._computed() and (self._client.platform != "cpu" or _runs_no_compiled_code())
                self._glanced(at, idle)
        self._awaited.release()

    def waits(self) -> None:
        """The training loop begins to wait for a batch. For the training thread."""
        asked = time.perf_counter()
        if asked >= self._due:
            self._due = math.inf
            with contextlib.suppress(RuntimeError):  # no further thread can be started: then nobody looks any more
                _thread.start_new_thread(self._look, (asked,))  # threading.Thread.start would wait for it

    def _look(self, asked: float) -> None:
        with self._looking:
            if not exits():
                self._look_at_devices(asked)

    def _look_at_devices(self, asked: float) -> None:
        began = time.perf_counter()
        arrays = self._computed()
        look = Look(asked, began, None if arrays else asked)
        self._report(look)
        with contextlib.suppress(RuntimeError):  # donated or deleted meanwhile: the loop goes on
            jax.block_until_ready(arrays)
            look.idle = look.idle or time.perf_counter()
        self._due = time.perf_counter() + self._pause_s()

    def _computed(self) -> list[jax.Array]:
        """All arrays that are being computed, but the batches that were placed lately."""
        began = time.perf_counter()
        placed = [array() for batch in list(self._batches) for array in batch]
        found, known = [], set(map(id, placed))
        for array in self._client.live_arrays():
            with contextlib.suppress(RuntimeError):  # deleted meanwhile
                if id(array) not in known and not array.is_deleted() and not array.is_ready():
                    found.append(array)
        self._listing_s = time.perf_counter() - began
        return found


def _runs_no_compiled_code() -> bool:
    """Whether the threads of this process sleep, or one of them runs Python. When in doubt, False.

    The CPU backend computes some programs in the call that dispatches them, as elementwise ones or those with
    LAPACK or callbacks. These have no arrays until they are done.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    time.sleep(_WATCHED_S)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    python_held_the_gil = seconds > _WATCHED_S + 0.9 * sys.getswitchinterval()
    return cpu_s < (1.5 if python_held_the_gil else 0.5) * seconds
