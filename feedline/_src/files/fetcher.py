"""The thread that runs and counts all requests of this process to stores."""

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
"""The most requests in flight, besides hedges. Half as many, twice as large: the same memory, half the bytes/s."""
REQUEST_BYTES = 1 << 22  # the largest request; each one in flight takes this much memory
MOST = 2 * AT_ONCE  # once this many requests wait or are in flight, nothing more is fetched ahead


@dataclasses.dataclass
class Counts:
    """The requests of this process: `Statistics.stores`."""

    requests: int = 0  # of all kinds, including retries
    fetched_bytes: int = 0
    retries: int = 0  # requests that were repeated after an error
    hedged: int = 0  # second requests, sent because the first took over 1.5 × the 95th percentile of earlier ones
    cached: int = 0  # blocks that were in the cache on local disk
    wait_s: float = 0.0  # time for which threads waited for requests, summed over threads


class Fetcher:
    """Runs requests on one thread, which the first request starts.

    Any thread may call `run`. The thread is a daemon; when the interpreter exits, `runtime.exit` calls `close`,
    because obstore aborts the process if an answer arrives while the interpreter finalises.
    """

    def __init__(self) -> None:
        self.counts = Counts()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # set under _lock
        self._closed = self._forked = False
        self._thread: threading.Thread | None = None
        self._running: set[concurrent.futures.Future[Any]] = set()
        self.slots: asyncio.Semaphore
        """A request in flight, with its hedge, holds this semaphore once. Only the fetcher's thread uses it."""

    def run(self, request: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the fetcher's thread."""
        with self._lock:
            try:
                self.check_may_run()
                loop = self._loop or self._start()
            except BaseException:
                request.close()
                raise
            future = asyncio.run_coroutine_threadsafe(request, loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _start(self) -> asyncio.AbstractEventLoop:
        loop, self.slots = asyncio.new_event_loop(), asyncio.Semaphore(AT_ONCE)
        self._thread = threading.Thread(target=_run, args=[loop], name="feedline-fetch", daemon=True)
        self._thread.start()
        close_at_exit(self)
        self._loop = loop  # last, so that if the thread cannot start, the next request tries again
        return loop

    def check_may_run(self) -> None:
        """Raise a FeedError while the interpreter exits, or in a forked child whose parent had read a store."""
        if self._closed:
            raise FeedError("no object can be read while the interpreter exits", stage="read")
        if self._forked:
            raise FeedError(
                "the threads that read stores do not survive a fork, and the parent of this process had read "
                'a store before it forked; start this one with multiprocessing.get_context("spawn")',
                stage="read",
            )

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def close(self) -> None:
        """Cancel all requests, and refuse later ones."""
        with self._lock:
            self._closed = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    def join(self, timeout_s: float) -> str | None:
        """Wait for the thread. Returns the thread's name if it is still alive."""
        if self._thread is None:
            return None
        self._thread.join(timeout_s)
        return self._thread.name if self._thread.is_alive() else None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run requests until `Fetcher.close`, and then cancel them."""
    loop.run_forever()
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    # 0.05 s more, so that the last answers arrive while the loop exists
    loop.run_until_complete(asyncio.wait([loop.create_task(asyncio.sleep(0.05)), *tasks]))
    loop.close()


_this = Fetcher()


def fetcher() -> Fetcher:
    """Return the fetcher of this process."""
    return _this


def counted() -> dict[str, float] | None:
    """The fields of `Counts` by name; None if no store was read."""
    counts = vars(fetcher().counts)
    return dict(counts) if any(counts.values()) else None


def _forked() -> None:
    """Refuse requests in a forked child if the parent made any, since threads do not survive a fork."""
    global _this
    used = _this._loop is not None or _this._forked
    _this = Fetcher()
    _this._forked = used


os.register_at_fork(after_in_child=_forked)


def result_of(request: concurrent.futures.Future[T], name: object) -> T:
    """Wait for the result of a request. Errors of a store or the disk become a FeedError, never a bad row."""
    fetcher().check_may_run()  # a forked child would wait for ever for requests of its parent
    began = time.monotonic()
    try:
        return request.result()
    except FeedError:
        raise
    except FileNotFoundError:
        found = "it no longer exists; put it back, or build a new feed over the objects that exist"
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
    """Requests in flight, by key. Threads that need the same data share one request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, since a callback added to a finished request is called at once
        self._requests: dict[K, concurrent.futures.Future[T]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._requests

    def start(
        self, keys: Sequence[K], begin: Callable[[list[K]], Iterable[tuple[list[K], Coroutine[Any, Any, T]]]]
    ) -> dict[K, concurrent.futures.Future[T]]:
        """Return the request for each key, and start requests for keys that are not in flight. `begin` gets these
        keys, and returns pairs: some of the keys, and the coroutine that fetches them."""
        if not keys:
            return {}
        fetcher().check_may_run()  # in a forked child, a thread of the parent may hold the lock
        with self._lock:
            # a finished request remains here until the fetcher's thread has called `_done`
            found = {key: each for key in keys if (each := self._requests.get(key)) and not each.done()}
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
        """Cancel all requests."""
        with self._lock:
            requests = set(self._requests.values())
        for request in requests:
            request.cancel()


async def gathered(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all requests. If one fails, the others are cancelled. No request outlives this call."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
