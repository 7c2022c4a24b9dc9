"""Measures how long a thread waits for the interpreter's lock (GIL), and which threads of Python compute."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from feedline._src.tools.doctor.inside.lines import user_line

_SLEEP_S, _PAUSE_S = 0.001, 0.02
_LATE_S = 0.003
"""A thread that computes in Python gives the lock up every 5 ms, so that others wait about that long."""
_BUSY_EVERY = 25
_MOST_DELAYS = 100_000
_TICKS = os.sysconf("SC_CLK_TCK")


class Probe:
    """A thread that sleeps for a millisecond, again and again, and notes how late it goes on.

    It is a daemon, which ends with the process. Only it writes to the values here; another thread reads them.
    """

    def __init__(self) -> None:
        self._delays: list[float] = []
        self._busy: dict[tuple[str, int], list[float]] = {}  # (name, id) → [first, last] of `busy_seconds`
        self._lines: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._began = self._ended = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="feedline doctor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rounds, task = 0, Path(f"/proc/self/task/{threading.get_native_id()}")
        while True:
            time.sleep(_PAUSE_S)
            waited, began = waiting_seconds(task), time.perf_counter()
            time.sleep(_SLEEP_S)
            self._ended = time.perf_counter()
            if len(self._delays) < _MOST_DELAYS:
                waited = waiting_seconds(task) - waited  # for a processor, which is not the lock
                self._delays.append(max(0.0, self._ended - began - _SLEEP_S - waited))
            rounds += 1
            if rounds % _BUSY_EVERY == 1:
                self._look_at_threads()

    def _look_at_threads(self) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread is self._thread or thread.native_id is None or thread.ident is None:
                continue
            key = (thread.name, thread.native_id)
            with contextlib.suppress(OSError, ValueError):  # it has ended
                seconds = busy_seconds(Path(f"/proc/self/task/{thread.native_id}"))
                self._busy.setdefault(key, [seconds, seconds])[1] = seconds
                if thread.ident in frames:
                    self._lines[key][user_line(frames[thread.ident])] += 1

    def as_object(self) -> dict[str, Any]:
        """JSON values."""
        delays, main = sorted(self._delays), threading.main_thread().native_id
        seconds = max(1e-9, self._ended - self._began)
        return {
            "seconds": seconds,
            "samples": len(delays),
            "p90_ms": delays[9 * len(delays) // 10] * 1e3 if delays else None,
            "late_share": sum(delay > _LATE_S for delay in delays) / max(1, len(delays)),
            "threads": [
                {
                    "name": name,
                    "main": native_id == main,
                    "busy_share": (last - first) / seconds,
                    "line": self._line_of((name, native_id)),
                }
                for (name, native_id), (first, last) in list(self._busy.items())
            ],
        }

    def _line_of(self, thread: tuple[str, int]) -> str:
        """Where the thread was seen most often."""
        seen = list(self._lines[thread].items())
        return max(seen, key=lambda item: item[1])[0] if seen else ""


def waiting_seconds(task: Path) -> float:
    """How long a thread was ready to run and waited for a processor; 0 where the kernel does not say."""
    schedule = task / "schedstat"
    return int(schedule.read_text().split()[1]) / 1e9 if schedule.exists() else 0.0


def busy_seconds(task: Path) -> float:
    """How long a thread ran or waited for a processor: what it would have used of a processor of its own.

    Args:
      task: its folder in /proc.
    """
    schedule = task / "schedstat"
    if schedule.exists():
        running_ns, waiting_ns, _ = map(int, schedule.read_text().split())
        return (running_ns + waiting_ns) / 1e9
    fields = (task / "stat").read_text().rpartition(")")[2].split()  # without it: only how long it ran
    return (int(fields[11]) + int(fields[12])) / _TICKS
