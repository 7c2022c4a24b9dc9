"""What is observed of a loop: where the training thread spends its time, who holds the GIL, and what grows."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from feedline._src.tools.doctor.inside.stacks import FETCH, INPUT, PLACE, Activity, activity, moves_data, user_line
from feedline._src.trainer.memory import MemoryWatch

Guarded = Callable[[str], contextlib.AbstractContextManager[None]]
_INTERVAL_S = 0.002
_LATE_S = 0.003
"""Longer waits mean that Python code is competing for the GIL (switch interval: 5 ms)."""
_THREADS_EVERY, _WRITE_EVERY = 250, 1000  # samples: about 0.5 s and 2 s
_PROFILED_STEPS, _MAX_EVENTS = 3, 100_000
_MOVED_BYTES = 256
_TICKS = os.sysconf("SC_CLK_TCK")


class Loop:
    """A loop, from the third call of the function that is taken for its step.

    Args:
      step: that function; its `calls` are counted.
      guarded: a context for the work of the sampler's thread, with a name for its failures.
      write: writes what was observed so far.
    """

    def __init__(self, step: Any, guarded: Guarded, write: Callable[[], None]) -> None:
        self.step = step
        self._memory = MemoryWatch(every=5, warm_up=10, on_growth="ignore")
        self._profile = StepProfile(guarded)
        self._sampler = Sampler(guarded, write)

    def before_step(self) -> None:
        """End what `after_step` began."""
        self._profile.end()

    def after_step(self) -> None:
        """Look at the memory, and profile what comes before the next step."""
        self._memory.after_step()
        self._profile.begin()

    def as_object(self) -> dict[str, Any]:
        """JSON values."""
        growths = self._memory.growths()
        return {
            "samples": self._sampler.as_object(self._profile),
            "memory": {
                "steps": self.step.calls,
                "growths": [{"text": str(growth), **growth._asdict()} for growth in growths],
                "allocators": [device.memory_stats() for device in jax.local_devices()],
            },
        }


class Sampler:
    """A daemon thread that looks at the main thread's stack every 2 ms, for as long as the process runs.

    The thread sees the stack only once it has got the GIL, which the main thread gives up when it begins to wait.
    So a sample that shows a wait counts only if the main thread has hardly used its processor since the sample
    before, and one that shows work only if the GIL came at once. Otherwise the main thread ran Python code.

    The record is written every two seconds: a process that is killed writes nothing at its end.
    """

    def __init__(self, guarded: Guarded, write: Callable[[], None]) -> None:
        self._guarded, self._write = guarded, write
        self._began = self._ended = time.perf_counter()
        self._samples = self._late = 0
        self._seen: Counter[Activity] = Counter()
        self._busy: dict[tuple[str, int], list[float]] = {}  # (name, id) → [first, last]
        self._lines: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
        self._main = threading.main_thread()
        self._clock = time.pthread_getcpuclockid(self._main.ident or 0)
        self._ran = time.clock_gettime(self._clock)
        self._thread = threading.Thread(target=self._run, name="feedline doctor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        own = Path(f"/proc/self/task/{threading.get_native_id()}")
        waited = thread_times(own)[1]
        while True:
            pause = _INTERVAL_S * random.uniform(0.5, 1.5)  # keeps no time with the loop
            wakes = time.perf_counter() + pause
            time.sleep(pause)
            now, ran = time.perf_counter(), time.clock_gettime(self._clock)
            with self._guarded("sampling"):  # before anything that gives up the GIL
                seen = activity(sys._current_frames().get(self._main.ident or 0))
                waited_before, waited = waited, thread_times(own)[1]
                is_late = now - wakes - (waited - waited_before) > _LATE_S
                is_idle = ran - self._ran < (now - self._ended) / 2
                if seen.kind and (is_idle if seen.kind in (FETCH, INPUT) else not is_late):
                    self._seen[seen] += 1
                self._late += is_late
                if self._samples % _THREADS_EVERY == 0:
                    self._look_at_threads()
            self._samples, self._ended, self._ran = self._samples + 1, now, ran
            if self._samples % _WRITE_EVERY == _THREADS_EVERY:
                self._write()

    def _look_at_threads(self) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread in (self._thread, self._main) or thread.native_id is None or thread.ident is None:
                continue
            key = (thread.name, thread.native_id)
            with contextlib.suppress(OSError, ValueError):  # it has ended
                seconds = sum(thread_times(Path(f"/proc/self/task/{thread.native_id}")))
                self._busy.setdefault(key, [seconds, seconds])[1] = seconds
                self._lines[key][user_line(frames.get(thread.ident))] += 1

    def as_object(self, profile: StepProfile) -> dict[str, Any]:
        """JSON values: shares of the samples for each line, and how busy the other threads of Python were."""
        samples, seconds = max(1, self._samples), max(1e-9, self._ended - self._began)
        return {
            "samples": self._samples,
            "seconds": seconds,
            "late_share": self._late / samples,
            "profiled_steps": profile.steps,
            "lines": [
                {
                    **seen._asdict(),
                    "samples": self._seen[seen],
                    "share": self._seen[seen] / samples,
                    "profiled_steps": profile.lines[seen],
                }
                for seen in sorted({*self._seen, *profile.lines}, key=lambda seen: -self._seen[seen])
            ],
            "threads": [
                {
                    "name": key[0],
                    "busy_share": (last - first) / seconds,
                    "line": max(self._lines[key], key=self._lines[key].__getitem__, default=""),
                }
                for key, (first, last) in list(self._busy.items())
            ],
        }


class StepProfile:
    """The lines between two calls of the step that fetch or place, from a profile of three steps.

    It finds what each step does, where samples of a short line are a matter of chance. A profile function of the
    user's is left alone. A loop with too much Python between two steps is not profiled any more.
    """

    def __init__(self, guarded: Guarded) -> None:
        self._guarded = guarded
        self.steps = 0
        self.lines: Counter[Activity] = Counter()
        self._seen: set[Activity] = set()
        self._events = 0
        self._overflowed = False

    def begin(self) -> None:
        """Profile this thread, after a call of the step."""
        if self.steps < _PROFILED_STEPS and not self._overflowed and sys.getprofile() is None:
            self._seen, self._events = set(), 0
            sys.setprofile(self._note)

    def end(self) -> None:
        """End the profile, before the next call."""
        if sys.getprofile() == self._note:
            sys.setprofile(None)
            self.steps += 1
            self.lines.update(self._seen)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        self._events += 1
        if self._events > _MAX_EVENTS:  # no step follows, or only after so much Python that a profile is too slow
            self._overflowed = True
            sys.setprofile(None)
        elif event == "call" and moves_data(frame):
            with self._guarded("profiling"):
                seen = activity(frame)
                if seen.kind == FETCH or (seen.kind == PLACE and host_bytes(dict(frame.f_locals))):
                    self._seen.add(seen)


def host_bytes(tree: Any) -> int:
    """Bytes of the NumPy arrays in a tree, but for small ones: scalars, learning rates."""
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, np.ndarray)]
    return sum(size for size in sizes if size >= _MOVED_BYTES)


def thread_times(task: Path) -> tuple[float, float]:
    """(ran, waited for a processor) of a thread, in seconds; the wait is 0 where the kernel does not report it.

    Args:
      task: its folder in /proc.
    """
    with contextlib.suppress(FileNotFoundError):
        ran_ns, waited_ns, _ = map(int, (task / "schedstat").read_text().split())
        return ran_ns / 1e9, waited_ns / 1e9
    fields = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS, 0.0
