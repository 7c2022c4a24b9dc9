"""Observes what the devices are busy with: transfers of placed batches, and the steps of the training loop."""

from __future__ import annotations

import _thread
import collections
import concurrent.futures
import contextlib
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from feedline._src.runtime.exit import close_at_exit, exits

_MAX_WATCHED = 2  # batches whose transfers are watched at a time; watching keeps a batch alive
_MEAN_INTERVAL_S = 0.05  # between two glances; longer if listing the live arrays takes long
_MAX_LISTING_SHARE = 0.01  # the maximum share of the time that goes into listing live arrays
_IN_TRANSFER = 8  # how many of the latest placed batches may still be in transfer
_GLANCE_FOR_S = 30.0  # glances stop when no batch has been placed for this long
_MEASURED_S = 1e-3  # how long a glance measures the processor time of this process


class TransferWatch:
    """Reports when the arrays of a batch are ready, as (`began`, seconds since `began`). A call never waits.

    At most two batches are watched at a time, because a watched batch is kept in memory; other batches are not
    reported. A thread starts with the first batch, and ends when the watch is garbage collected.
    """

    def __init__(self, report: Callable[[tuple[float, float]], None]) -> None:
        self._report = report
        self._free = threading.Semaphore(_MAX_WATCHED)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "feedline-transfers")  # joined at exit

    def __call__(self, arrays: Sequence[jax.Array], began: float) -> None:
        if self._free.acquire(blocking=False):
            with contextlib.suppress(RuntimeError):  # the interpreter exits, or can start no further thread
                self._thread.submit(_wait, self._free, self._report, arrays, began)


def _wait(
    free: threading.Semaphore,
    report: Callable[[tuple[float, float]], None],
    arrays: Sequence[jax.Array],
    began: float,
) -> None:
    try:
        with contextlib.suppress(RuntimeError):  # the step has donated the batch, which was ready before that
            jax.block_until_ready(arrays)
            report((began, time.perf_counter() - began))
    finally:
        free.release()


class Glance(NamedTuple):
    """What one look at the devices found.

    Attributes:
      computes: whether arrays other than batches were being computed.
      idle: not `computes`, and on CPU devices also no compiled code was running.
      gil_wait_s: how long the glancing thread waited for the GIL.
    """

    at: float
    computes: bool
    idle: bool
    gil_wait_s: float = 0.0


class StepWatch:
    """Estimates the share of the time in which the devices are idle, by glances at random moments.

    While a step is computed, its results are arrays that are not ready and belong to no batch. If a glance finds
    no array of this kind, the devices are idle. As long as batches are placed, a thread glances, and passes each
    `Glance` to `report`. The thread has only a weak reference to the watch, and ends when the watch is collected.
    """

    def __init__(self, report: Callable[[Glance], None]) -> None:
        self._report = report
        self._batches: collections.deque[list[weakref.ref[jax.Array]]] = collections.deque(maxlen=_IN_TRANSFER)
        self._placed_at = 0.0
        self._listing_s = 0.0  # how long the latest listing of arrays took
        self._start = threading.Lock()  # acquired once, by the thread that starts the glances
        self._glancing = threading.Lock()  # held while the thread is inside jax
        self._client: Any = None  # jax's client for the devices of the batches
        close_at_exit(self, devices=True)

    def close(self) -> None:
        """No-op: glances stop by themselves when the interpreter exits."""

    def join(self, timeout_s: float) -> str | None:
        """Wait until the thread is outside jax, where it cannot abort the exit. Returns its name on timeout."""
        if not self._glancing.acquire(timeout=timeout_s):
            return "feedline-glance"
        self._glancing.release()
        return None

    def placed(self, arrays: Sequence[jax.Array]) -> None:
        """Record that these arrays are a batch. The first call starts the glances. Any thread may call it."""
        self._batches.append(list(map(weakref.ref, arrays)))
        self._placed_at = time.perf_counter()
        if self._start.acquire(blocking=False):
            self._client = next(iter(arrays[0].devices())).client
            with contextlib.suppress(RuntimeError):  # if no thread can be started, there are no glances
                _thread.start_new_thread(_glance_on, (weakref.ref(self),))

    def glance(self) -> float:
        """Look at the devices, if a batch was placed recently. Returns the mean seconds until the next glance."""
        with self._glancing:
            began = time.perf_counter()
            if began - self._placed_at < _GLANCE_FOR_S and not exits():
                time.sleep(0)  # releases the GIL, and waits to get it back
                at = time.perf_counter()
                computes = self._computes()
                on_cpu = self._client.platform == "cpu"
                idle = not computes and not (on_cpu and _runs_compiled_code())
                self._report(Glance(at, computes, idle, gil_wait_s=at - began))
        return max(_MEAN_INTERVAL_S, self._listing_s / _MAX_LISTING_SHARE)

    def _computes(self) -> bool:
        """Whether any array is being computed, apart from the latest placed batches."""
        began = time.perf_counter()
        placed = [array() for batch in list(self._batches) for array in batch]  # kept, so that no `id` is reused
        batches = set(map(id, placed))
        found = False
        for array in self._client.live_arrays():
            with contextlib.suppress(RuntimeError):  # deleted meanwhile
                found |= id(array) not in batches and not array.is_deleted() and not array.is_ready()
        self._listing_s = time.perf_counter() - began
        return found


def _glance_on(reference: weakref.ref[StepWatch]) -> None:
    """Glance at random moments until the watch is garbage collected or the interpreter exits."""
    draw = random.Random()  # not the module's own generator, which the user may have seeded
    pause_s = _MEAN_INTERVAL_S
    while not exits():
        time.sleep(pause_s * draw.uniform(0.5, 1.5))
        if (watch := reference()) is None:
            return
        pause_s = watch.glance()
        del watch


def _runs_compiled_code() -> bool:
    """Whether threads of this process keep a processor busy with something other than Python. If in doubt, True.

    The CPU backend computes some programs, such as elementwise ones, or programs with LAPACK or callbacks, inside
    the call that dispatches them. Until the program is done, it has no output arrays.
    """
    began, cpu_began = time.perf_counter(), time.process_time()
    time.sleep(_MEASURED_S)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    python_held_the_gil = seconds > _MEASURED_S + 0.9 * sys.getswitchinterval()
    return cpu_s >= (1.5 if python_held_the_gil else 0.5) * seconds
