"""Follows Grain's worker processes, and ends them in bounded time.

Names of Grain and multiprocessing that are used here are private. Without Grain's, ending takes Grain's own time,
and a worker that exits with 0 or is stopped counts as a stall: tests/runtime/test_exit.py and test_restarts.py
fail.

A worker that is stopped or killed may hold a lock that it shares with this process: it takes two of them for each
element. So this process waits for such a lock for a limited time only, and gives Grain other locks once the worker
is dead.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

END_S = 5.0
"""How long workers may take to end by themselves."""
_LOCK_S = 0.5
"""How long a worker that runs may hold a lock: much less."""


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
        self._iterators: dict[Any, weakref.ReferenceType[Any]] = {}  # of Grain, for each process

    def started(self, process: Any, iterator: Any) -> None:
        """Note a worker, and the iterator of Grain that takes from it."""
        self._iterators[process] = weakref.ref(iterator)
        self.pids.append(process.pid)

    def end(self) -> None:
        """End all of them: ask them, wait for `END_S` seconds, and kill those that live, as stopped ones do.

        Grain alone asks one after the other, and waits for 25 s for each.
        """
        references, self._iterators = self._iterators, {}
        iterators = {process: reference() for process, reference in references.items()}
        deadline = time.monotonic() + END_S
        for iterator in iterators.values():
            if iterator is not None:
                _ask_to_end(iterator._prefetch_should_stop)
        for process in iterators:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
        for process, iterator in iterators.items():
            process.join(END_S)
            if iterator is not None:
                _give_locks(iterator, process)


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
            workers.started(process, iterator)

    def process_failed(iterator: Any) -> bool:
        workers, process = _workers_behind(iterator), iterator._prefetch_process
        if workers is None or process is None:
            return bool(failed(iterator))
        workers.awaited.add(process)
        if workers.unwanted():
            workers.end()
        _give_locks(iterator, process)
        code = process.exitcode
        return code is not None and (code != 0 or iterator._buffer.empty())

    iterator_class.start_prefetch = start
    iterator_class._process_failed = process_failed


def _ask_to_end(stop: Any) -> None:
    """As `stop.set()` of an event that no process waits for, without the wait for a lock that is held for ever."""
    if stop._cond.acquire(timeout=_LOCK_S):
        stop._flag.acquire(False)  # else it would count further with each call
        stop._flag.release()
        stop._cond.release()


def _give_locks(iterator: Any, process: Any) -> None:
    """Give an iterator of Grain other locks if its worker was killed: it may have held those that they share."""
    if (process.exitcode or 0) < 0:
        iterator._prefetch_should_stop = iterator._process_ctx.Event()
        iterator._set_state_request_count = iterator._process_ctx.Value("i", 0)


def _workers_behind(iterator: Any) -> GrainWorkers | None:
    """The workers of an iterator of Grain; None: it does not read a dataset that `workers_of` was asked for."""
    dataset = iterator._iter_parent
    while len(dataset.parents) == 1:
        (dataset,) = dataset.parents
    return _workers.get(dataset)
