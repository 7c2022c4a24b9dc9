"""Follows Grain's worker processes, and ends them in bounded time.

Grain's names used here are private. Without them, ending takes Grain's own time, and a worker that exits with 0 or
is stopped counts as a stall: then tests/runtime/test_exit.py and test_restarts.py fail.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

END_S = 5.0
"""How long workers may take to end by themselves."""


class GrainWorkers:
    """The worker processes that read one dataset.

    Attributes:
      awaited: those that once let Grain wait for a batch for more than a second.
      pids: the process ids of all.
      unwanted: whether nobody wants their batches any more. A thread that waits for one then ends them.
    """

    def __init__(self) -> None:
        self.unwanted: Callable[[], bool] = lambda: False
        self.pids: list[int] = []
        self.awaited: set[Any] = set()
        self._stops: dict[Any, Any] = {}  # for each process, the event that asks it to end

    def started(self, process: Any, stop: Any) -> None:
        """Note a worker, and the event that asks it to end."""
        self._stops[process] = stop
        self.pids.append(process.pid)

    def end(self) -> None:
        """End all of them: ask them, wait for `END_S` seconds, and kill those that live, as stopped ones do.

        Grain alone asks one after the other, and waits for 25 s for each.
        """
        stops, self._stops = self._stops, {}  # events are semaphores, which shall go with Grain's iterator
        for stop in stops.values():
            stop.set()
        deadline = time.monotonic() + END_S
        for process in stops:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()


_workers: weakref.WeakKeyDictionary[Any, GrainWorkers] = weakref.WeakKeyDictionary()
"""The workers of each dataset."""


def workers_of(dataset: Any) -> GrainWorkers:
    """The workers that read this dataset."""
    return _workers.setdefault(dataset, GrainWorkers())


@functools.cache
def follow() -> None:
    """Let `workers_of` know Grain's workers from now on, and let Grain notice one that ended with exit code 0.

    Grain's iterator waits for such a worker for ever. One that failed puts its error into the queue and then ends
    with 0, so the queue must be empty as well.
    """
    try:
        from grain._src.python.dataset.transformations import process_prefetch

        iterator_class: Any = process_prefetch.ProcessPrefetchDatasetIterator
        start_prefetch, failed = iterator_class.start_prefetch, iterator_class._process_failed
    except (ImportError, AttributeError):
        return

    def start(iterator: Any) -> None:  # called for each element
        before = iterator._prefetch_process
        start_prefetch(iterator)
        process = iterator._prefetch_process
        if process is not before and (workers := _workers_behind(iterator)) is not None:
            workers.started(process, iterator._prefetch_should_stop)

    def process_failed(iterator: Any) -> bool:
        workers = _workers_behind(iterator)
        if workers is None:
            return bool(failed(iterator))
        process = iterator._prefetch_process
        workers.awaited.add(process)
        if workers.unwanted():
            workers.end()
        code = None if process is None else process.exitcode
        return code is not None and (code != 0 or iterator._buffer.empty())

    iterator_class.start_prefetch = start
    iterator_class._process_failed = process_failed


def _workers_behind(iterator: Any) -> GrainWorkers | None:
    """The workers of an iterator of Grain; None: it does not read a dataset that `workers_of` was asked for."""
    dataset = iterator._iter_parent
    while len(dataset.parents) == 1:
        (dataset,) = dataset.parents
    return _workers.get(dataset)
