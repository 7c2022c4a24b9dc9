"""Closes open feeds when the interpreter exits, so that they do not delay the exit."""

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

from feedline._src.runtime.ending import stop_reads

_log = logging.getLogger("feedline")
_PATIENCE_S = 0.5
_PATIENCE_WITH_WORKERS_S = 10.0
"""Longer, because a thread of the feed waits for its workers to end, and kills those that do not within 5 s."""
_TELL_AFTER_S = 10.0
"""Workers may take that long to end, which is no reason to warn."""
_PATIENCE_WITH_DEVICES_S = 60.0
"""Longer than a step of the devices takes. jax itself waits for that one when the process ends."""


class _Joinable(Protocol):
    def close(self) -> None: ...
    def join(self, timeout_s: float) -> str | None: ...


_open: weakref.WeakKeyDictionary[_Joinable, float] = weakref.WeakKeyDictionary()
"""Open pipelines and watches of devices, and how long the exit may wait for each, in seconds."""


def close_at_exit(pipeline: _Joinable, *, workers: bool = False, devices: bool = False) -> None:
    """Close a pipeline or a watch when the interpreter exits, unless it was garbage collected before."""
    _register()
    _open[pipeline] = _PATIENCE_WITH_DEVICES_S if devices else _PATIENCE_WITH_WORKERS_S if workers else _PATIENCE_S


@functools.cache
def _register() -> None:
    # atexit is too late: it runs after the threads of executors are joined, which a stuck read delays for ever.
    # threading's hooks run before, the newest first; concurrent.futures, imported above, has registered its own
    threading._register_atexit(_close_all)  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_open.clear)  # they belong to the parent, as do their worker processes


def _close_all() -> None:
    stop_reads()
    pipelines: dict[_Joinable, float] | None = None
    while pipelines is None:
        with contextlib.suppress(RuntimeError):  # another thread has added one
            pipelines = dict(_open)
    for pipeline in pipelines:
        with _logged():
            pipeline.close()
    began = time.monotonic()
    for pipeline, patience_s in pipelines.items():
        with _logged():
            _join(pipeline, began + patience_s, began + _TELL_AFTER_S)
    _forget_stuck_threads(began + _PATIENCE_S)


def _join(pipeline: _Joinable, deadline: float, tell_at: float) -> None:
    """Wait for its threads; say so if it takes long."""
    busy = pipeline.join(max(0.0, min(deadline, tell_at) - time.monotonic()))
    if busy is not None and deadline > tell_at:
        _log.warning(
            "the program ends once the thread %s does, which waits for a step of the devices; in %.0f s at the "
            "latest",
            busy,
            max(0.0, deadline - time.monotonic()),
        )
        pipeline.join(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """Log an error of closing, as of the user's own iterator, so that the other pipelines are closed, too."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        _log.warning("closing a feed at the end of the program failed: %r", error)


def _forget_stuck_threads(deadline: float) -> None:
    """Let the interpreter exit although one of Grain's threads is stuck in a read.

    `concurrent.futures` joins every executor thread at exit without a limit, daemon or not. This waits for each
    thread until `deadline`, since most are only busy with a last batch: CPython ends a thread that continues into
    its finalisation wherever the thread is, and the process aborts if that is inside C++ code.
    """
    joined: Any = getattr(concurrent.futures.thread, "_threads_queues", {})
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("grain-prefetch"):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                joined.pop(thread, None)
