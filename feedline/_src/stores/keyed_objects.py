"""Objects below a prefix, which are found by their keys when they are read: some may not exist."""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

from feedline._src.stores.ahead import AHEAD, Ahead
from feedline._src.stores.cache import cache_of
from feedline._src.stores.client import Version
from feedline._src.stores.fetcher import fetcher
from feedline._src.stores.options import Store
from feedline._src.stores.origin import REQUEST_BYTES, Origin, cached, gathered
from feedline._src.stores.residency import result_of
from feedline._src.stores.urls import Url

T = TypeVar("T")
R = TypeVar("R")


class KeyedObjects:
    """Objects below a prefix. The version of each is asked once, and compared whenever a part of it is fetched.

    Args:
      prefix: of all keys, without a slash at its end.
      mark: the key, below the prefix, of an object that must be there with the version `mark_version`. Only then
        is another one known to be missing: a bucket that is gone has no objects either.
      options: cache and patience.
    """

    def __init__(self, prefix: Url, mark: str, mark_version: Version, options: Store) -> None:
        self._prefix, self._mark, self._mark_version = prefix, mark, mark_version
        self._cache = cache_of(options)
        self._origin = Origin(options.patience_s)
        self._versions: dict[str, Version | None] = {}
        """Of each object that was asked for, so that none changes unseen. The fetching thread alone uses this and
        the next two."""
        self._asking = Shared[Version | None]()
        self._getting = Shared[bytes]()
        self._fetched: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
        """What was fetched ahead last, and so is in the cache still. Guarded by _lock."""
        self._lock = threading.Lock()
        self._ahead = Ahead()

    def read(self, items: Sequence[T], get: Callable[[T], Awaitable[bytes | None]]) -> list[bytes | None]:
        """What `get` gives for each item, all at once. It runs on the fetching thread.

        Raises:
          FeedError: something cannot be fetched.
        """
        began = time.monotonic()
        started = []
        try:
            started = [fetcher().run(_called(get, item)) for item in items]
            return [result_of(future, self._prefix) for future in started]
        finally:
            for future in started:
                future.cancel()  # after an error, nobody waits for the others
            fetcher().counts.wait_s += time.monotonic() - began

    def fetch_ahead(
        self, items: Sequence[Any], get: Callable[[Any], Awaitable[bytes | None]], size: int, ahead: int
    ) -> bool:
        """Start to fetch items into the cache, where `read` finds them later. Returns False if that is too early.

        Args:
          size: about that many bytes are fetched for an item.
          ahead: so many batches later the items are read.
        """
        limit_bytes = self._cache.limit_bytes
        if self._ahead.is_too_early(len(items) * size, ahead, limit_bytes):
            return False
        most = int(limit_bytes * AHEAD) // max(1, size)
        for item in items:
            if item not in self._fetched:
                request = functools.partial(_dropped, get, item)
                self._ahead.fetch(item, request, functools.partial(self._note, item, most))
        return True

    def close(self) -> None:
        """Give up what is being fetched ahead."""
        self._ahead.close()

    async def size(self, key: str) -> int | None:
        """Of an object; None: there is none."""
        version = await self._version(key)
        return None if version is None else version.size_bytes

    async def part(self, key: str, start: int, stop: int) -> bytes:
        """Some bytes of an object that is there."""
        version = await self._version(key)
        if version is None:
            raise FileNotFoundError
        url = self._prefix.below(key)

        async def piece(at: int) -> bytes:
            stops = min(at + REQUEST_BYTES, stop)
            get = functools.partial(cached, self._cache, self._origin, url, version, at, stops)
            return await self._getting.once((key, at, stops), get)

        return b"".join(await gathered(map(piece, range(start, max(stop, start + 1), REQUEST_BYTES))))

    async def _version(self, key: str) -> Version | None:
        if key not in self._versions:
            self._versions[key] = await self._asking.once(key, functools.partial(self._asked_version, key))
        return self._versions[key]

    async def _asked_version(self, key: str) -> Version | None:
        try:
            return await self._origin.version(self._prefix.below(key))
        except FileNotFoundError:
            now = await self._origin.version(self._prefix.below(self._mark))
            self._mark_version.check(now, str(self._prefix.below(self._mark)))
            return None

    def _note(self, item: Hashable, most: int) -> None:
        """An item was fetched ahead."""
        with self._lock:
            self._fetched[item] = None
            while len(self._fetched) > most:
                self._fetched.popitem(last=False)


class Shared(Generic[T]):
    """Requests that several wait for. One that all of them gave up is cancelled. For the fetching thread."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, tuple[asyncio.Task[T], list[None]]] = {}
        """By key, the request, and a list with an element for each caller that waits for it."""

    async def once(self, key: Hashable, get: Callable[[], Awaitable[T]]) -> T:
        """What `get` returns, which is called once for all that wait for this key meanwhile."""
        if key not in self._tasks:
            self._tasks[key] = asyncio.ensure_future(_awaited(get())), []
        task, waiting = self._tasks[key]
        waiting.append(None)
        try:
            return await asyncio.shield(task)
        finally:
            waiting.pop()
            if not waiting:
                task.cancel()
            if (task.done() or not waiting) and self._tasks.get(key, (None,))[0] is task:
                del self._tasks[key]


async def _awaited(result: Awaitable[T]) -> T:
    return await result


async def _called(get: Callable[[T], Awaitable[R]], item: T) -> R:
    return await get(item)


async def _dropped(get: Callable[[T], Awaitable[Any]], item: T) -> None:
    await get(item)
