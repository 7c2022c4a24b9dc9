"""The thread that runs all requests of a process to stores, and counts them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from feedline._src.errors import FeedError
from feedline._src.files.file import check_may_open
from feedline._src.runtime.exit import check_may_read, close_at_exit

K = TypeVar("K")
T = TypeVar("T")
AT_ONCE = 64
"""Requests in flight. Half as many of twice the size would hold as much memory, and give half the bytes/s."""
REQUEST_BYTES = 1 << 22  # the largest request, and what one in flight takes of memory
MOST = 2 * AT_ONCE  # requests that wait or are in flight: more are not fetched ahead


@dataclasses.dataclass
class Counts:
    """The requests of this process: `Statistics.stores`."""

    requests: int = 0  # of all kinds, including retries
    fetched_bytes: int = 0
    retries: int = 0  # requests that were repeated after an error
    hedged: int = 0  # second requests, sent because the first took 1.5 times as long as 95 % of the others
    cached: int = 0  # blocks that were in the cache on local disk
    wait_s: float = 0.0  # time for which threads waited for requests, summed over threads


class Fetcher:
    """Runs requests on one thread, which starts with the first of them.

    Any thread calls `run`. The thread is a daemon; when the interpreter exits, `runtime.exit` calls `close`,
    because obstore ends the process with an abort if an answer arrives while the interpreter finalises.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # set under _lock
        self._closed = self._forked = False
        self._thread: threading.Thread | None = None
        self._running: set[concurrent.futures.Future[Any]] = set()
        self.slots: asyncio.Semaphore
        """One for each request in flight. Of the thread only."""

    def run(self, request: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the thread."""
        with self._lock:
            try:
                self.check_may_run()
            except FeedError:
                request.close()
                raise
            if self._loop is None:
                self._loop, self.slots = asyncio.new_event_loop(), asyncio.Semaphore(AT_ONCE)
                self._thread = threading.Thread(target=self._run, name="feedline-fetch", daemon=True)
                self._thread.start()
                close_at_exit(self)
            future = asyncio.run_coroutine_threadsafe(request, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def check_may_run(self) -> None:
        """Raise a FeedError at the exit of the interpreter, and in a fork, where no request would ever end."""
        if self._closed:
            raise FeedError("no object can be read while the interpreter exits", stage="read")
        if self._forked:
            raise FeedError(
                "the threads that read stores do not survive a fork, and this process was forked from one "
                'that had read one; start it by multiprocessing.get_context("spawn")',
                stage="read",
            )

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        assert self._loop is not None
        self._loop.run_forever()
        for task in (tasks := asyncio.all_tasks(self._loop)):
            task.cancel()
        self._loop.run_until_complete(asyncio.wait([self._loop.create_task(asyncio.sleep(0.05)), *tasks]))
        self._loop.close()  # the last answers have arrived

    def close(self) -> None:
        """Cancel all requests. Later ones are refused."""
        with self._lock:
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self, timeout_s: float) -> str | None:
        """Wait for the thread. Returns its name if it is still alive."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        return self._thread.name if self._thread.is_alive() else None


@functools.cache
def fetcher() -> Fetcher:
    return Fetcher()


def counted() -> dict[str, float] | None:
    """The `Counts` by name; None: no store was read."""
    counts = vars(fetcher().counts)
    return dict(counts) if any(counts.values()) else None


def _forked() -> None:
    """Refuse requests in a forked child, which has neither our thread nor those of obstore."""
    used = fetcher()._loop is not None or fetcher()._forked
    fetcher.cache_clear()
    fetcher()._forked = used


os.register_at_fork(after_in_child=_forked)


def result_of(request: concurrent.futures.Future[T], name: object) -> T:
    """Wait for the result of a request. Errors of a store and of the disk are a FeedError, never a bad row."""
    fetcher().check_may_run()  # a fork would wait for ever for requests of its parent
    began = time.monotonic()
    try:
        return request.result()
    except FeedError:
        raise
    except FileNotFoundError:
        found = "it is not there any more; put it back, or build a new feed over what is there"
    except concurrent.futures.CancelledError:
        check_may_read()
        found = "its source was closed during a read"
    except OSError as error:
        check_may_open(error, str(name))
        found = f"reading it failed: {error}"
    finally:
        fetcher().counts.wait_s += time.monotonic() - began
    raise FeedError(
        f"an object must stay readable while a feed reads it, and {found}", stage="read", file=str(name)
    )


class InFlight(Generic[K, T]):
    """Requests in flight by what they fetch, so that what several threads need is fetched once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a request may be done before its callback is added
        self._requests: dict[K, concurrent.futures.Future[T]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._requests

    def start(
        self, keys: Sequence[K], begin: Callable[[list[K]], Iterable[tuple[list[K], Coroutine[Any, Any, T]]]]
    ) -> dict[K, concurrent.futures.Future[T]]:
        """The requests for these keys. Those that are not in flight are the coroutines that `begin` returns for
        their keys, each with the keys that it fetches."""
        with self._lock:
            found = {key: self._requests[key] for key in keys if key in self._requests}
            for some, coroutine in begin([key for key in dict.fromkeys(keys) if key not in found]):
                request = fetcher().run(coroutine)
                started = dict.fromkeys(some, request)
                self._requests |= started
                found |= started
                request.add_done_callback(functools.partial(self._done, some))
        return found

    def _done(self, keys: list[K], request: concurrent.futures.Future[T]) -> None:
        with self._lock:
            for key in keys:
                if self._requests.get(key) is request:
                    del self._requests[key]

    def cancel(self) -> None:
        """Give up all requests."""
        with self._lock:
            requests = set(self._requests.values())
        for request in requests:
            request.cancel()


async def gathered(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. If one fails, the others are cancelled. None goes on afterwards."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
