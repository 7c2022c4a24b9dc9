"""Parts of objects in the cache."""

from __future__ import annotations

import asyncio
import os

from feedline._src.files.client import Version
from feedline._src.files.fetcher import fetcher
from feedline._src.files.origin import Origin
from feedline._src.files.store import Url
from feedline._src.stores.cache import BlockCache, name_of


async def cached(cache: BlockCache, origin: Origin, url: Url, version: Version, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of an object, from the cache, or else fetched by `Origin.fetch` and put there."""
    if stop <= start:
        return b""
    name = name_of(str(url), version.cache_tag, start, stop)
    found = await asyncio.to_thread(bytes_in, cache, name, stop - start)
    if found is None:
        found = bytes(await origin.fetch(url, version, start, stop))
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
