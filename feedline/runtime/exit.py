"""A feed that was never closed does not hold up the interpreter's exit."""

from __future__ import annotations

import concurrent.futures.thread
import functools
import os
import threading
import time
import weakref
from typing import Any, Protocol

from feedline.runtime.ending import stop_reads

_PATIENCE_S = 0.5
_PATIENCE_WITH_WORKERS_S = 10.0
"""Longer: their end is waited for by our thread, and Grain's own hooks must not meet it at that."""


class _Closable(Protocol):
    def close(self) -> None: ...
    def join(self, timeout_s: float) -> str | None: ...


_runs: weakref.WeakKeyDictionary[_Closable, float] = weakref.WeakKeyDictionary()
"""Open runs, and how long the exit may wait for each, in seconds."""


def close_at_exit(run: _Closable, *, workers: bool = False) -> None:
    """Have `run` closed when the interpreter exits, if it is still there then."""
    _register()
    _runs[run] = _PATIENCE_WITH_WORKERS_S if workers else _PATIENCE_S


@functools.cache
def _register() -> None:
    # atexit runs after the threads of executors were joined, which a stuck read never lets happen;
    # threading's own hook, that concurrent.futures (imported above) uses too, runs before, the newest first
    threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_runs.clear)  # they are the parent's, and so are their worker processes


def _close_all() -> None:
    stop_reads()
    runs = dict(_runs)
    for run in runs:
        run.close()
    began = time.monotonic()
    for run, patience_s in runs.items():
        run.join(max(0.0, began + patience_s - time.monotonic()))
    _forget_stuck_threads(began + _PATIENCE_S)


def _forget_stuck_threads(deadline: float) -> None:
    """Let the interpreter go while one of Grain's threads is stuck in a read.

    `concurrent.futures` joins every executor thread at exit, without a limit, daemon or not. One that is merely
    busy, with a batch that nobody wants any more, is waited for until `deadline`: CPython ends a thread that
    runs on into its finalisation wherever it stands, and the process aborts if that is inside C++ code.
    """
    joined: Any = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("grain-prefetch"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                joined.pop(thread, None)
