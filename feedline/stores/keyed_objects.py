"""Objects below a prefix, which are found by their keys when they are read: some may not exist."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, TypeVar

from feedline.stores.cache import BlockCache
from feedline.stores.client import Version
from feedline.stores.fetcher import AT_ONCE, fetcher
from feedline.stores.options import Store
from feedline.stores.requests import REQUEST_BYTES, cached, version_of
from feedline.stores.residency import AHEAD, result_of
from feedline.stores.urls import Url

T = TypeVar("T")


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
        self._cache = BlockCache(options.folder, options.cache_bytes)
        self._patience_s = options.patience_s
        self._once: dict[Hashable, asyncio.Task[Any]] = {}
        """What was asked already, or is being asked. Used by the fetching thread only."""
        self._fetched: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
        """What was fetched ahead last, and so is in the cache still. Guarded by _lock."""
        self._lock = threading.Lock()
        self._pending: dict[Hashable, concurrent.futures.Future[Any]] = {}
        """What is being fetched ahead. Guarded by _lock."""

    def url(self, key: str) -> Url:
        """The address of an object."""
        return below(self._prefix, key)

    def read(self, items: Sequence[T], get: Callable[[T], Awaitable[bytes | None]]) -> list[bytes | None]:
        """What `get` gives for each item, all at once. It runs on the fetching thread.

        Raises:
          FeedError: something cannot be fetched.
        """
        began = time.monotonic()
        try:
            started = [fetcher().run(_awaited(get(item))) for item in items]
            return [result_of(future, self._prefix) for future in started]
        finally:
            fetcher().counts.wait_s += time.monotonic() - began

    def fetch_ahead(
        self, items: Sequence[Any], get: Callable[[Any], Awaitable[bytes | None]], size: int, ahead: int
    ) -> bool:
        """As `read`, without waiting, so that the cache has the bytes. Returns False if that is too early.

        Args:
          size: about that many bytes are fetched for an item.
          ahead: so many batches later the items are read.
        """
        if (ahead + 1) * len(items) * size > self._cache.limit_bytes * AHEAD:
            return False
        if len(self._pending) >= 2 * AT_ONCE:
            return False
        most = int(self._cache.limit_bytes * AHEAD) // max(1, size)
        for item in items:
            with self._lock:
                if item in self._pending or item in self._fetched:
                    continue
                future = self._pending[item] = fetcher().run(_dropped(get(item)))
            future.add_done_callback(functools.partial(self._done, item, most))
        return True

    def close(self) -> None:
        """Give up what is being fetched ahead."""
        with self._lock:
            futures = list(self._pending.values())
        for future in futures:
            future.cancel()

    async def size(self, key: str) -> int | None:
        """Of an object; None: there is none."""
        version = await self._version(key)
        return None if version is None else version.size_bytes

    async def part(self, key: str, start: int, stop: int) -> bytes:
        """Some bytes of an object that is there."""
        version = await self._version(key)
        if version is None:
            raise FileNotFoundError
        url = self.url(key)

        async def piece(at: int) -> bytes:
            stops = min(at + REQUEST_BYTES, stop)
            get = functools.partial(cached, self._cache, url, version, at, stops, self._patience_s)
            return await self.once((key, at, stops), get, keep=False)

        return b"".join(await asyncio.gather(*map(piece, range(start, max(stop, start + 1), REQUEST_BYTES))))

    async def once(self, key: Hashable, get: Callable[[], Awaitable[T]], keep: bool = True) -> T:
        """What `get` returns, which is called once for all that wait for this key.

        Args:
          keep: later callers get the same, too.
        """
        task: asyncio.Task[T] | None = self._once.get(key)
        if task is None:
            task = self._once[key] = asyncio.ensure_future(_awaited(get()))
            task.add_done_callback(functools.partial(self._forget, key, keep))
        return await asyncio.shield(task)  # others wait for it, too

    def _forget(self, key: Hashable, keep: bool, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None or not keep:
            self._once.pop(key, None)

    async def _version(self, key: str) -> Version | None:
        return await self.once(("version", key), lambda: self._asked_version(key))

    async def _asked_version(self, key: str) -> Version | None:
        try:
            return await version_of(self.url(key), self._patience_s)
        except FileNotFoundError:
            now = await version_of(self.url(self._mark), self._patience_s)
            self._mark_version.check(now, str(self.url(self._mark)))
            return None

    def _done(self, item: Hashable, most: int, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            del self._pending[item]
            if not future.cancelled() and future.exception() is None:
                self._fetched[item] = None
                while len(self._fetched) > most:
                    self._fetched.popitem(last=False)


def below(prefix: Url, key: str) -> Url:
    """The address of an object below a prefix."""
    return Url(prefix.base, f"{prefix.key}/{key}" if prefix.key else key)


async def _awaited(result: Awaitable[T]) -> T:
    return await result


async def _dropped(result: Awaitable[Any]) -> None:
    await result
