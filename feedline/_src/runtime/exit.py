"""Stops long reads and closes open feeds when the interpreter exits, so that they do not delay or abort it.

While the interpreter finalises, CPython before 3.14 ends a daemon thread as soon as the thread takes the GIL, by
unwinding its stack. C++ code that forbids this aborts the process: "terminate called without an active exception".
So no thread may be inside a C++ library at that time.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

_log = logging.getLogger("feedline")
_GRACE_S = 0.5  # grace period for threads at exit
_GRACE_WITH_WORKERS_S = 10.0  # a thread of the feed waits for workers to end, and kills them after 5 s
_GRACE_WITH_DEVICES_S = 60.0  # longer than a step of the devices; jax itself waits for the step at exit
_WARN_AFTER_S = 10.0  # no shorter, because workers may take that long to end


class _Joinable(Protocol):
    def close(self) -> None: ...
    def join(self, timeout_s: float) -> str | None: ...


_exiting = threading.Event()
_open: weakref.WeakKeyDictionary[_Joinable, float] = weakref.WeakKeyDictionary()
"""Open pipelines and watches of devices, and how long the exit may wait for each, in seconds."""


def stop_reads() -> None:
    """From now on, make long reads stop before their next piece."""
    _exiting.set()


def exits() -> bool:
    """Whether the interpreter is exiting."""
    return _exiting.is_set()


def check_may_read() -> None:
    """End this thread if the interpreter is exiting. Called before each piece of a long read.

    Raises:
      SystemExit: the interpreter is exiting, and this is a daemon thread.
    """
    if _exiting.is_set() and threading.current_thread().daemon:
        raise SystemExit


def close_at_exit(pipeline: _Joinable, *, workers: bool = False, devices: bool = False) -> None:
    """Close a pipeline or a watch when the interpreter exits, unless it was garbage collected before."""
    _register()
    _open[pipeline] = _GRACE_WITH_DEVICES_S if devices else _GRACE_WITH_WORKERS_S if workers else _GRACE_S


@functools.cache
def _register() -> None:
    # atexit is too late: it runs after the threads of executors are joined, which a stuck read delays for ever.
    # Hooks of threading run earlier, the newest first. So this hook runs before the join, which is a hook that
    # concurrent.futures registered when it was imported above
    threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_open.clear)  # pipelines and workers belong to the parent


def _close_all() -> None:
    stop_reads()
    pipelines: dict[_Joinable, float] | None = None
    while pipelines is None:
        with contextlib.suppress(RuntimeError):  # another thread has added a pipeline
            pipelines = dict(_open)
    for pipeline in pipelines:
        with _logged():
            pipeline.close()
    began = time.monotonic()
    for pipeline, grace_s in pipelines.items():
        with _logged():
            _join(pipeline, began + grace_s, began + _WARN_AFTER_S)
    _forget_stuck_threads(began + _GRACE_S)


def _join(pipeline: _Joinable, deadline: float, warn_at: float) -> None:
    """Wait for the threads of a pipeline or a watch; log a warning if that takes long."""
    busy = pipeline.join(max(0.0, min(deadline, warn_at) - time.monotonic()))
    if busy is not None and deadline > warn_at:
        _log.warning(
            "the exit waits for the thread %s, which waits for a step of the devices; the program ends in %.0f s "
            "at the latest",
            busy,
            max(0.0, deadline - time.monotonic()),
        )
        pipeline.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log an error, which a user's iterator may raise in `close`, so that the other pipelines are closed, too."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        _log.warning("closing a feed at the end of the program failed: %r", error)


def _forget_stuck_threads(deadline: float) -> None:
    """Let the interpreter exit although one of Grain's threads is stuck in a read.

    `concurrent.futures` joins every executor thread at exit without a limit, daemon or not. This function waits
    for Grain's threads until `deadline`, since most of them are only busy with a last batch. While CPython
    finalises, it ends a thread that still runs. The process aborts if the thread is then inside C++ code.
    """
    joined: Any = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("grain-prefetch"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                joined.pop(thread, None)
