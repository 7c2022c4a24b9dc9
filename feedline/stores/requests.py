"""Ranges of bytes of objects, from the cache or from the store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from feedline.stores.cache import BlockCache, name_of
from feedline.stores.client import Version, client_of
from feedline.stores.fetcher import fetcher
from feedline.stores.urls import Url

T = TypeVar("T")
REQUEST_BYTES = 1 << 22
"""The largest request, and what one in flight takes of memory."""


async def gathered(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. If one fails, the others are cancelled. None goes on afterwards."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fetched(url: Url, version: Version, start: int, stop: int, patience_s: float) -> Any:
    """Bytes `start` to `stop` of an object of this version, from the store, as a buffer.

    Raises:
      FileNotFoundError: there is no such object any more.
      FeedError: it has another version, or cannot be read for `patience_s`.
    """
    client = client_of(url.base)
    return await fetcher().patiently(
        str(url), patience_s, stop - start, lambda: client.get(url.key, start, stop, version)
    )


async def cached(cache: BlockCache, url: Url, version: Version, start: int, stop: int, patience_s: float) -> bytes:
    """As `fetched`, from the cache if it has these bytes. Else they are put there."""
    if stop <= start:
        return b""
    name = name_of(str(url), version.tag, start, stop)
    found = await asyncio.to_thread(bytes_in, cache, name, stop - start)
    if found is None:
        found = bytes(await fetched(url, version, start, stop, patience_s))
        await asyncio.to_thread(_store, cache, name, found)
    return found


def _store(cache: BlockCache, name: str, data: bytes) -> None:
    os.close(cache.store(name, data))


def bytes_in(cache: BlockCache, name: str, length: int) -> bytes | None:
    """A block of the cache; None if the cache does not have it."""
    descriptor = cache.open(name, length)
    if descriptor is None:
        return None
    fetcher().counts.cached += 1
    try:
        return os.pread(descriptor, length, 0)
    finally:
        os.close(descriptor)


async def version_of(url: Url, patience_s: float) -> Version:
    """The present version of an object. Raises FileNotFoundError or FeedError."""
    client = client_of(url.base)
    return await fetcher().patiently(str(url), patience_s, 0, lambda: client.version(url.key))
