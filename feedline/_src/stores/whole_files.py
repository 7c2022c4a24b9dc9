"""Objects as whole files on local disk, for libraries that open files by path only."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from feedline._src.errors import FeedError
from feedline._src.files.client import Version
from feedline._src.files.fetcher import AT_ONCE, fetcher, result_of
from feedline._src.files.origin import REQUEST_BYTES, Origin, gathered
from feedline._src.files.store import Store, Url
from feedline._src.stores.cache import BlockCache, cache_of, in_folder, name_of

_log = logging.getLogger("feedline")
_LOOK_AGAIN_S = 0.1
_FILES_AT_ONCE = 32
"""Each has two files open while it is fetched."""
T = TypeVar("T")


class WholeFiles:
    """Objects as files of the cache, where they stay until `close`. They are fetched when this is built.

    Several processes share them: one fetches an object, while the others wait for it.

    Attributes:
      paths: of the files, in the order of `urls`: of their descriptors where the system has such paths, since
        somebody may delete the folder of the cache.
      versions: of the objects.

    Args:
      urls: their addresses.
      options: cache and patience.

    Raises:
      FileNotFoundError: there is no such object.
      FeedError: the store cannot be read, or the cache is too small for all of them.
    """

    def __init__(self, urls: Sequence[str], options: Store) -> None:
        cache = cache_of(options)
        parsed = [Url.parse(url) for url in urls]
        origins = [Origin(options.patience_s) for _ in parsed]
        asked = gathered(origin.sampled_version(url) for url, origin in zip(parsed, origins, strict=True))
        self.versions: list[Version] = fetcher().run(asked).result()
        size = sum(version.size_bytes for version in dict(zip(urls, self.versions, strict=True)).values())
        if size > cache.limit_bytes:
            raise FeedError(
                "files of this format are opened by path, so the cache must hold all of them, and they have "
                f"{size} bytes where cache_bytes={cache.limit_bytes}; raise cache_bytes of feedline.Store, or "
                "convert them to TFRecord, of which parts are read",
                stage="read",
                file=urls[0],
            )
        _log.info("%d objects, %d bytes in all, are fetched whole unless the cache has them", len(urls), size)
        slots = asyncio.Semaphore(_FILES_AT_ONCE), asyncio.Semaphore(AT_ONCE)
        self._kept = _Descriptors()
        weakref.finalize(self, self._kept.close).atexit = False
        started = [
            fetcher().run(_opened(cache, origin, url, version, slots, self._kept))
            for origin, url, version in zip(origins, parsed, self.versions, strict=True)
        ]
        try:
            self.paths = [result_of(future, url) for future, url in zip(started, parsed, strict=True)]
        except BaseException:
            for future in started:
                future.cancel()
            self.close()
            raise

    def close(self) -> None:
        """Let the files be evicted. One that is open stays readable."""
        self._kept.close()


class _Descriptors:
    """Of the files that must stay. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[int] | None = []

    def keep(self, descriptor: int) -> None:
        """Keep it open until `close`; close it now if that was called."""
        with self._lock:
            if self._kept is not None:
                self._kept.append(descriptor)
                return
        os.close(descriptor)

    def close(self) -> None:
        """Close them all, and those that come later."""
        with self._lock:
            kept, self._kept = self._kept, None
        for descriptor in kept or ():
            os.close(descriptor)


async def _opened(
    cache: BlockCache,
    origin: Origin,
    url: Url,
    version: Version,
    slots: tuple[asyncio.Semaphore, asyncio.Semaphore],
    kept: _Descriptors,
) -> str:
    """The path of an object as a file, whose descriptor is kept.

    Args:
      slots: for the objects that have files open meanwhile, and for the requests.
    """
    name = name_of(str(url), version.cache_tag, 0, version.size_bytes)
    async with slots[0], _alone(cache.path(name) + ".lock"):
        found = await _in_thread(cache.open_whole, name, version.size_bytes, undo=_close_found)
        if found is not None:
            fetcher().counts.cached += 1
            path, descriptor = found
        else:
            descriptor, temporary = await _in_thread(cache.begin_whole, name, version.size_bytes, undo=_drop)
            try:
                await _fetch(origin, url, version, slots[1], descriptor)
                path = await _in_thread(cache.finish_whole, name, descriptor, temporary)
            except BaseException:
                _drop((descriptor, temporary))
                raise
        kept.keep(descriptor)
    of_descriptor = f"/proc/self/fd/{descriptor}"
    return of_descriptor if os.path.exists(of_descriptor) else path


async def _in_thread(function: Callable[..., T], *arguments: Any, undo: Callable[[T], object] | None = None) -> T:
    """Call a function in a thread. A cancellation waits for the thread, since it uses a descriptor.

    Args:
      undo: is called with the result if that is not returned because of a cancellation.
    """
    # no task: when the interpreter exits, all tasks are cancelled, and the thread goes on
    future = asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *arguments))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):  # a second one
                await asyncio.wait([future])
        if future.exception() is None and undo is not None:
            undo(future.result())
        raise


def _close_found(found: tuple[str, int] | None) -> None:
    if found is not None:
        os.close(found[1])


def _drop(begun: tuple[int, str]) -> None:
    descriptor, temporary = begun
    os.close(descriptor)
    with contextlib.suppress(OSError):
        os.unlink(temporary)


async def _fetch(origin: Origin, url: Url, version: Version, slots: asyncio.Semaphore, descriptor: int) -> None:
    """Write all bytes of an object to a file."""

    async def part(start: int) -> None:
        stop = min(start + REQUEST_BYTES, version.size_bytes)
        async with slots:  # as much is in memory as is being fetched
            data = await origin.fetch(url, version, start, stop)
            await _in_thread(_write, descriptor, memoryview(data).cast("B"), start)

    await gathered(map(part, range(0, version.size_bytes, REQUEST_BYTES)))


def _write(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, start)
        data, start = data[count:], start + count


@contextlib.asynccontextmanager
async def _alone(path: str) -> AsyncIterator[None]:
    """Within the `with` block, no other process has the lock. That of a killed process is gone."""
    with in_folder(os.path.dirname(path), lambda: open(path, "a")) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_LOOK_AGAIN_S)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)  # who waits for it looks into the cache first
