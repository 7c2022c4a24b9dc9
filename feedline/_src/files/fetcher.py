"""All requests of a process: concurrent, retried after errors, hedged if they are slow, and counted."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
import logging
import math
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from feedline._src.errors import FeedError
from feedline._src.files.client import TransientError, UnreachableError, Version, client_of
from feedline._src.files.file import check_may_open
from feedline._src.files.store import Url
from feedline._src.runtime.exit import check_may_read, close_at_exit

_log = logging.getLogger("feedline")
T = TypeVar("T")
AT_ONCE = 64
"""Requests in flight. Half as many of twice the size would hold as much memory, and give half the bytes/s."""
REQUEST_BYTES = 1 << 22  # the largest request, and what one in flight takes of memory
MOST = 2 * AT_ONCE  # requests that wait or are in flight: more are not fetched ahead
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_UNREACHABLE_S = 10.0  # the most patience for a store that was never reached, whose address may be wrong
_WARN_AFTER_S, _WARN_EVERY_S = 5.0, 60.0
_DURATIONS, _FEWEST_DURATIONS = 256, 20
_LATE = 1.5  # × the 95th percentile: requests that share a link take almost the same time
_HEDGED = 0.1  # the largest share of hedged requests: a store that is slow as a whole must not get twice the load
_SHORTEST_HEDGE_S = 0.02


@dataclasses.dataclass
class Counts:
    """What was asked of stores by this process: `Statistics.stores`."""

    requests: int = 0  # of all kinds, the repeated ones among them
    fetched_bytes: int = 0
    retries: int = 0  # requests that were repeated after an error
    hedged: int = 0  # second requests, sent because the first took 1.5 times as long as 95 % of the others
    cached: int = 0  # blocks that were in the cache on local disk
    wait_s: float = 0.0  # for how long threads waited for requests, summed over threads


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
        self._slots: asyncio.Semaphore
        self._running: set[concurrent.futures.Future[Any]] = set()
        # of the thread only:
        self._durations: dict[int, collections.deque[float]] = {}  # of requests, by the logarithm of their size
        self._warned = -math.inf

    def run(self, request: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run a coroutine on the thread."""
        with self._lock:
            try:
                self.check_may_run()
            except FeedError:
                request.close()
                raise
            if self._loop is None:
                self._loop, self._slots = asyncio.new_event_loop(), asyncio.Semaphore(AT_ONCE)
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

    async def patiently(
        self, name: str, patience_s: float, size: int | None, request: Callable[[], Awaitable[T]]
    ) -> T:
        """What `request` returns, which is repeated while its errors are transient.

        Args:
          size: of the answer, in bytes; None: not known, so the request is not hedged.

        Raises:
          FeedError: errors, or no progress, for longer than `patience_s`; or no connection for 10 s before the
            first answer.
        """
        failing_since = None
        pause = _FIRST_PAUSE_S
        while True:
            try:
                async with self._slots:
                    began = time.monotonic()
                    return await self._hedged(size, request)
            except TransientError as error:
                failing_since = failing_since or began
                failing_s, reason = time.monotonic() - failing_since, str(error)
                limit_s, rule, remedy = patience_s, f"answer within patience_s={patience_s:g}", _WAIT
                if isinstance(error, UnreachableError):
                    limit_s = min(patience_s, _UNREACHABLE_S)
                    rule, remedy = "be reachable when it is opened", _FIND
            if failing_s >= limit_s:
                raise FeedError(
                    f"a store must {rule}, and {name} failed for {failing_s:.0f} s, at last with: {reason}; "
                    f"{remedy}",
                    stage="read",
                    file=name,
                )
            self.counts.retries += 1
            self._warn(failing_s, name, reason, limit_s)
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), limit_s - failing_s))
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _warn(self, failing_s: float, name: str, reason: str, limit_s: float) -> None:
        """Log, now and then, that a store is failing."""
        now = time.monotonic()
        if failing_s >= _WARN_AFTER_S and now >= self._warned + _WARN_EVERY_S:
            self._warned = now
            _log.warning(
                "a store has failed for %.0f s, and is asked again until it has failed for %g s: %s: %s",
                failing_s,
                limit_s,
                name,
                reason,
            )

    async def _hedged(self, size: int | None, request: Callable[[], Awaitable[T]]) -> T:
        """The first result of `request`, which is sent a second time if it takes much longer than others."""
        tasks = [self._asked(size, request)]
        try:
            done, _ = await asyncio.wait(tasks, timeout=self._late_after_s(size))
            if not done and self.counts.hedged < _HEDGED * self.counts.requests:
                self.counts.hedged += 1
                tasks.append(self._asked(size, request))
            waiting = set(tasks)
            while True:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
                if good or not waiting:
                    return (good or list(done))[0].result()  # raises the error of the last one
        finally:
            for task in tasks:
                task.cancel()

    def _asked(self, size: int | None, request: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        async def timed() -> T:
            self.counts.requests += 1
            began = time.monotonic()
            result = await request()
            if size is not None:
                durations = self._durations.setdefault(size.bit_length(), collections.deque(maxlen=_DURATIONS))
                durations.append(time.monotonic() - began)
                self.counts.fetched_bytes += size
            return result

        task = asyncio.ensure_future(timed())
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # so that none is logged
        return task

    def _late_after_s(self, size: int | None) -> float | None:
        durations = sorted(() if size is None else self._durations.get(size.bit_length(), ()))
        if len(durations) < _FEWEST_DURATIONS:
            return None
        return max(_SHORTEST_HEDGE_S, _LATE * durations[math.ceil(0.95 * len(durations)) - 1])

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


_WAIT = (
    "check the network and the store, or wait longer with feedline.Store(patience_s=...). The feed can be built "
    "again from its last state"
)
_FIND = "check the address, the network, and where the environment says that the store is (AWS_ENDPOINT_URL)"


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


async def gathered(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. If one fails, the others are cancelled. None goes on afterwards."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def version_of(url: Url, patience_s: float) -> Version:
    """The present version of an object. FileNotFoundError: there is none; FeedError: see `Fetcher.patiently`."""
    client = client_of(url.base)
    return await fetcher().patiently(str(url), patience_s, 0, lambda: client.version(url.key, patience_s))


async def fetch(url: Url, version: Version, start: int, stop: int, patience_s: float) -> bytes:
    """Bytes `start` to `stop` of a version of an object. Errors: see `version_of`; FeedError: it was replaced."""
    client = client_of(url.base)
    return await fetcher().patiently(
        str(url), patience_s, stop - start, lambda: client.get(url.key, start, stop, version, patience_s)
    )
