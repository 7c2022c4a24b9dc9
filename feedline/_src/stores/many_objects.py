"""Any number of objects, of which each is read whole or in parts: of one, nothing is held but its version."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from feedline._src.files.client import Version
from feedline._src.files.fetcher import fetcher, result_of
from feedline._src.files.origin import REQUEST_BYTES, Origin
from feedline._src.files.store import Store, Url
from feedline._src.stores.ahead import Ahead
from feedline._src.stores.cache import cache_of, name_of
from feedline._src.stores.old_cached import bytes_in, cached


class Part(NamedTuple):
    """Bytes `start` to `stop` of an object."""

    url: Url
    version: Version
    start: int
    stop: int


def whole(url: Url, version: Version) -> Part:
    """All bytes of an object."""
    return Part(url, version, 0, version.size_bytes)


class ManyObjects:
    """Parts of objects, which become files of the cache as they are, up to 4 MiB each. Thread-safe.

    Args:
      options: cache and patience.
      origin: that of another process that reads the same objects.

    Attributes:
      origin: of the bytes.
    """

    def __init__(self, options: Store, origin: Origin | None = None) -> None:
        self._cache = cache_of(options)
        self.origin = origin or Origin(options.patience_s)
        self._ahead = Ahead()

    def versions(self, urls: Sequence[Url]) -> list[Version | None]:
        """The present versions of objects, all asked at once; None: the store says that there is no such object.

        Raises:
          FeedError: the store cannot be read.
        """
        started = [fetcher().run(self.origin.version(url)) for url in urls]
        found: list[Version | None] = []
        for future in started:
            try:
                found.append(future.result())
            except FileNotFoundError:
                found.append(None)
        return found

    def read(self, parts: Sequence[Part]) -> list[bytes]:
        """The bytes of each part, fetched all at once where the cache does not have them.

        Raises:
          FeedError: an object was changed or deleted, or cannot be fetched.
        """
        pieces = [list(_pieces(part)) for part in parts]
        found: dict[Part, Any] = {}
        started: list[Any] = []
        try:
            for piece in (piece for of_part in pieces for piece in of_part):
                found[piece] = self._start(piece, started)
            if any(not isinstance(data, bytes) for data in found.values()):
                began = time.monotonic()
                try:
                    found = {piece: self._result(piece, data, started) for piece, data in found.items()}
                finally:
                    fetcher().counts.wait_s += time.monotonic() - began
        finally:
            for request in started:
                request.cancel()  # after an error, nobody waits for the others
        return [
            found[of_part[0]] if len(of_part) == 1 else b"".join(found[piece] for piece in of_part)
            for of_part in pieces
        ]

    def fetch_ahead(self, parts: Sequence[Part], ahead: int) -> bool:
        """Start to fetch parts that are read `ahead` batches later. Returns False if that is too early."""
        needed_bytes = sum(part.stop - part.start for part in parts)
        if self._ahead.is_too_early(needed_bytes, ahead, self._cache.limit_bytes):
            return False
        for piece in (piece for part in parts for piece in _pieces(part)):
            if not self._cache.touch(name := _name(piece)):
                self._ahead.fetch(name, functools.partial(self._kept, piece))
        return True

    def close(self) -> None:
        """Give up what is being fetched."""
        self._ahead.close()

    def _start(self, piece: Part, started: list[Any]) -> Any:
        """The bytes of a piece if the cache has them; else a request, which is in `started` if it is a new one."""
        name = _name(piece)
        pending = self._ahead.get(name)
        if pending is None and (data := bytes_in(self._cache, name, piece.stop - piece.start)) is not None:
            return data
        if pending is None:
            started.append(fetcher().run(self._cached(piece)))
            return started[-1]
        return pending

    def _result(self, piece: Part, found: Any, started: list[Any]) -> bytes:
        while not isinstance(found, bytes):
            data = result_of(found, piece.url)
            found = self._start(piece, started) if data is None else data  # what was fetched ahead is in the cache
        return found

    async def _cached(self, piece: Part) -> bytes:
        return await cached(self._cache, self.origin, *piece)

    async def _kept(self, piece: Part) -> None:
        await self._cached(piece)


def _name(piece: Part) -> str:
    return name_of(str(piece.url), piece.version.cache_tag, piece.start, piece.stop)


def _pieces(part: Part) -> Iterator[Part]:
    """A part in pieces, none larger than a request."""
    for start in range(part.start, max(part.stop, part.start + 1), REQUEST_BYTES):
        yield part._replace(start=start, stop=min(start + REQUEST_BYTES, part.stop))
