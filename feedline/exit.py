"""A feed that was never closed does not hold up the interpreter's exit."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import Protocol

_PATIENCE_S = 1.0


class _Closable(Protocol):
    def close(self) -> None: ...
    def join(self, timeout_s: float) -> str | None: ...


_runs: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(run: _Closable) -> None:
    """Have `run` closed when the interpreter exits, if it is still there then."""
    _register()
    _runs.add(run)


@functools.cache
def _register() -> None:
    # atexit runs after the threads of executors were joined, which a stuck read never lets happen;
    # threading's own hook, that concurrent.futures uses too, runs before, and the newest first.
    import concurrent.futures.thread  # noqa: F401  it must register before us

    threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _close_all() -> None:
    from feedline.loader.reading import forget_stuck_threads

    runs = list(_runs)
    for run in runs:
        run.close()
    deadline = time.monotonic() + _PATIENCE_S
    for run in runs:
        run.join(max(0.0, deadline - time.monotonic()))
    forget_stuck_threads()
