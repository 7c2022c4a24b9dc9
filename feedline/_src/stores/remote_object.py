"""An object in a store as memory, whose blocks are fetched and mapped when a read needs them; and as a file."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import io
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from typing import BinaryIO, TypeVar, cast

import numpy as np
import numpy.typing as npt

from feedline._src.files.client import Version
from feedline._src.files.fetcher import AT_ONCE, fetcher, result_of
from feedline._src.files.origin import REQUEST_BYTES, Origin, gathered
from feedline._src.files.store import Url
from feedline._src.stores.address_space import AddressSpace
from feedline._src.stores.ahead import AHEAD
from feedline._src.stores.cache import name_of
from feedline._src.stores.old_cached import cached
from feedline._src.stores.residency import BLOCK_BYTES, Residency

T = TypeVar("T")
_MOST_BLOCKS = REQUEST_BYTES // BLOCK_BYTES
"""Of a request: adjacent blocks are fetched together."""


class RemoteObject:
    """An object of one version. Thread-safe.

    Attributes:
      url, version: of the object.
      memory: its bytes, of which those may be read whose blocks are resident.
      blocks: how many it has.
      first_block: the number of its first block among all blocks of the source.

    Args:
      origin: of its bytes, which has compared its version.
      residency: the cache and the mapped blocks, of the source that it belongs to.
    """

    def __init__(self, url: Url, version: Version, origin: Origin, residency: Residency) -> None:
        self.url = url
        self.version = version
        self._origin = origin
        self._residency = residency
        self._space = AddressSpace(version.size_bytes)
        self.blocks = -(-version.size_bytes // BLOCK_BYTES)
        self.first_block, self._present = residency.add(self, self.blocks)
        self._lock = threading.RLock()  # a request may be done before its callback is added
        self._pending: dict[int, concurrent.futures.Future[None]] = {}
        """The requests that fetch a block. One that has mapped it already is removed when the block is retired, as
        it will not map it again. Guarded by _lock, as is the number of requests:"""
        self._requests = 0

    def __str__(self) -> str:
        return str(self.url)

    @property
    def size(self) -> int:
        """In bytes."""
        return self.version.size_bytes

    @property
    def address(self) -> int:
        """Where its bytes are in memory."""
        return self._space.address

    @property
    def fetching(self) -> int:
        """How many requests for blocks are under way."""
        return self._requests

    @property
    def memory(self) -> memoryview:
        """All bytes, read-only."""
        return self._space.bytes

    def fetch(self, blocks: Sequence[int]) -> list[concurrent.futures.Future[None]]:
        """Start to fetch those of some ascending blocks that are not there. Returns the requests."""
        futures: set[concurrent.futures.Future[None]] = set()
        with self._lock:
            missing = [block for block in blocks if not self._present[block]]
            # one that is done was evicted since
            pending = {block: self._pending[block] for block in missing if block in self._pending}
            pending = {block: future for block, future in pending.items() if not future.done()}
            futures.update(pending.values())
            for run in _runs([block for block in missing if block not in pending]):
                future = fetcher().run(self._fetch(run))
                self._pending.update(dict.fromkeys(run, future))
                self._requests += 1
                future.add_done_callback(functools.partial(self._done, run))
                futures.add(future)
        return list(futures)

    def blocks_of(self, offset: int, length: int) -> npt.NDArray[np.int64]:
        """The numbers, among all blocks of the source, of those that hold some bytes."""
        first, stop = max(0, offset // BLOCK_BYTES), -(-min(offset + length, self.size) // BLOCK_BYTES)
        return self.first_block + np.arange(first, stop)

    def comes(self, offset: int, length: int) -> bool:
        """Whether all blocks that hold some bytes are there, or are being fetched."""
        blocks = (self.blocks_of(offset, length) - self.first_block).tolist()
        return all(self._present[block] or block in self._pending for block in blocks)

    def read(self, offset: int, length: int) -> bytes:
        """Some bytes, by whole blocks; fewer at the end of the object."""
        stop = min(offset + length, self.size)
        if stop <= offset:
            return b""
        with self._residency.reading():
            self._residency.wait_for(self.blocks_of(offset, stop - offset))
            return bytes(self.memory[offset:stop])

    def read_on_from(self, offset: int) -> None:
        """Start to fetch the blocks that a reader of the whole object needs next."""
        first = offset // BLOCK_BYTES
        most = min(2 * AT_ONCE, int(self._residency.cache.limit_bytes * AHEAD) // BLOCK_BYTES)
        if self.fetching < AT_ONCE:
            self.fetch(range(first, min(self.blocks, first + most)))

    def samples(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of some (offset, length), each fetched alone, all at once: for headers and digests."""
        return [self.result(future) for future in self.start_samples(ranges)]

    def result(self, future: concurrent.futures.Future[T]) -> T:
        """The result of a request, as `result_of`."""
        return result_of(future, self.url)

    def start_samples(self, ranges: Sequence[tuple[int, int]]) -> list[concurrent.futures.Future[bytes]]:
        """Start the requests of `samples`; returns a future for each."""
        clipped = [(min(offset, self.size), min(offset + length, self.size)) for offset, length in ranges]
        return [fetcher().run(self._sample(start, stop)) for start, stop in clipped]

    def name(self, block: int) -> str:
        """Of the file of a block in the cache."""
        return name_of(str(self.url), self.version.cache_tag, *self._range(block))

    def retire(self, block: int) -> None:
        """Later reads do not find the block, and fetch it again."""
        with self._lock:
            self._residency.note(self.first_block + block, present=False)
            self._pending.pop(block, None)  # the request may still fetch others, but has mapped this one

    def unmap(self, block: int) -> None:
        """Let go of the file of a retired block, unless it is there again."""
        with self._lock:
            if not self._present[block]:
                start, stop = self._range(block)
                self._space.unmap(start, stop - start)

    def cancel(self) -> None:
        """Give up what is being fetched."""
        with self._lock:
            futures = set(self._pending.values())
        for future in futures:
            future.cancel()

    def _range(self, block: int) -> tuple[int, int]:
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size)

    async def _fetch(self, run: list[int]) -> None:
        """Make adjacent blocks present, from the cache or from the store."""
        absent = await asyncio.to_thread(self._from_cache, run)
        for part in _runs(absent):
            start, stop = self._range(part[0])[0], self._range(part[-1])[1]
            data = memoryview(await self._origin.fetch(self.url, self.version, start, stop))
            await asyncio.to_thread(self._keep, part, data)

    def _done(self, run: list[int], future: concurrent.futures.Future[None]) -> None:
        with self._lock:
            self._requests -= 1
            for block in run:
                if self._pending.get(block) is future:
                    del self._pending[block]

    async def _sample(self, start: int, stop: int) -> bytes:
        async def piece(at: int) -> bytes:
            stops = min(at + REQUEST_BYTES, stop)
            return await cached(self._residency.cache, self._origin, self.url, self.version, at, stops)

        return b"".join(await gathered(map(piece, range(start, stop, REQUEST_BYTES))))

    def _from_cache(self, run: list[int]) -> list[int]:
        """Map the blocks that the cache has. Returns the others."""
        absent = []
        for block in run:
            start, stop = self._range(block)
            descriptor = self._residency.cache.open(self.name(block), stop - start)
            if descriptor is None:
                absent.append(block)
            else:
                fetcher().counts.cached += 1
                self._map(block, descriptor)
        return absent

    def _keep(self, run: list[int], data: memoryview) -> None:
        """Store blocks in the cache, and map them."""
        first = self._range(run[0])[0]
        for block in run:
            start, stop = self._range(block)
            self._map(block, self._residency.cache.store(self.name(block), data[start - first : stop - first]))

    def _map(self, block: int, descriptor: int) -> None:
        start, stop = self._range(block)
        try:
            with self._lock:
                self._space.map(start, stop - start, descriptor)
                self._residency.note(self.first_block + block, present=True)
        finally:
            os.close(descriptor)


def _runs(blocks: Sequence[int]) -> Iterator[list[int]]:
    """Ascending blocks in runs of adjacent ones, none longer than a request."""
    for _, run in itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
        adjacent = [block for _, block in run]
        for start in range(0, len(adjacent), _MOST_BLOCKS):
            yield adjacent[start : start + _MOST_BLOCKS]


SMALL_BYTES = 1 << 14
"""What is read at once of headers."""
_EXACT_BYTES = 1 << 17
"""Up to this size, as of headers and footers, only these bytes are fetched, and not the blocks that hold them."""


class RemoteFile(io.RawIOBase):
    """Reads of an object, the small ones without the blocks that hold them. For one thread.

    Args:
      item: the object. The file does not own it.
      sequential: most of it is read, from its start to its end: blocks are fetched ahead.
    """

    def __init__(self, item: RemoteObject, sequential: bool = False) -> None:
        self._item = item
        self._sequential = sequential
        self._at = 0

    def readable(self) -> bool:
        """True: it is open for reading."""
        return True

    def seekable(self) -> bool:
        """True: the next read may begin anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Let the next read begin at `offset` from the start, from here or from the end. Returns where that is."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._item.size}[whence]
        return self._at

    def tell(self) -> int:
        """Where the next read begins."""
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` from here on, and go on behind it. Returns the number of bytes; 0 at the end."""
        data = self._read(len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read(self, wanted: int) -> bytes:
        if self._sequential:
            self._item.read_on_from(self._at)
        elif wanted <= _EXACT_BYTES and not self._item.comes(self._at, wanted):
            return self._item.samples([(self._at, wanted)])[0]
        return self._item.read(self._at, wanted)


def open_object(item: RemoteObject, sequential: bool = False) -> BinaryIO:
    """An object as a buffered file. Arguments are those of a `RemoteFile`."""
    return cast(BinaryIO, io.BufferedReader(RemoteFile(item, sequential), SMALL_BYTES))
