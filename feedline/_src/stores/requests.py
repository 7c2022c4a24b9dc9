"""Ranges of bytes of objects, from the cache or from the store."""

from __future__ import annotations

import asyncio
import os

from feedline._src.stores.cache import BlockCache, name_of
from feedline._src.stores.client import Version
from feedline._src.stores.fetcher import fetcher
from feedline._src.stores.origin import Origin
from feedline._src.stores.urls import Url

REQUEST_BYTES = 1 << 22
"""The largest request, and what one in flight takes of memory."""


async def cached(cache: BlockCache, origin: Origin, url: Url, version: Version, start: int, stop: int) -> bytes:
    """As `Origin.fetch`, from the cache if it has these bytes. Else they are put there."""
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
