"""Files in a store: their blocks come through the cache on local disk, and once all are there they are mapped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import functools
import io
import itertools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.files.cache import AHEAD, BLOCK_BYTES, Cache, CacheFile, Verified, cache_of, name_of, touch
from feedline._src.files.client import Version
from feedline._src.files.fetcher import (
    AT_ONCE,
    MOST,
    REQUEST_BYTES,
    RemoteObject,
    fetcher,
    gathered,
    result_of,
    version_of,
)
from feedline._src.files.file import Bytes, Descriptor, File, FileVersion, Indices, OpenFile, T, place_in
from feedline._src.files.store import Store, Url
from feedline._src.native.library import library

_log = logging.getLogger("feedline")
_TRIES, _WHOLE_TRIES = 100, 10
_HEADER_BYTES = 1 << 14  # what a file object reads at once of headers
_EXACT_BYTES = 1 << 17  # up to this size, as of footers, only these bytes are fetched, and not their blocks
_SMALL_BYTES = 1 << 18  # a smaller object is fetched whole for its samples
_BLOCKS_A_REQUEST = REQUEST_BYTES // BLOCK_BYTES
_CHECKED_SEGMENTS = 16  # of a mapped object at each read, which takes a system call for each
_DOWNLOADS = 8  # whole objects that are downloaded at once, each by many requests


class CachedRange:
    """Bytes `start` to `stop` of a version of an object, which are kept in one file of the cache."""

    def __init__(self, cache: Cache, url: Url, version: Version, start: int, stop: int, patience_s: float) -> None:
        self._cache, self._url, self._version = cache, url, version
        self._start, self.size, self._patience_s = start, stop - start, patience_s
        self._name = name_of(str(url), version.tag, start, stop)
        self._verified = Verified.none(self.size)

    @property
    def path(self) -> str:
        return self._cache.path(self._name)

    @property
    def verified(self) -> npt.NDArray[np.bool_]:
        """bool[blocks]: which are in the cache as far as this process knows, without a look into the file."""
        if self._verified.id and not os.path.exists(self.path):
            self._verified = Verified.none(self.size)
        return self._verified.blocks

    def open(self) -> CacheFile:
        """The file of the cache, which is made if there is none."""
        file = self._cache.open(self._name, self.size, self._verified)
        self._verified = file.verified
        return file

    def is_there(self) -> bool:
        """Whether the cache has its file, which may lack some blocks."""
        return self._cache.has(self._name)

    def stored(self) -> bytes | None:
        """All bytes, if they are in the cache."""
        return self._cache.get(self._name, self.size) if self.size else b""

    async def all(self) -> bytes:
        """All bytes, from the cache, or else fetched and put there."""
        found = await asyncio.to_thread(self.stored)
        fetcher().counts.cached += found is not None
        if found is None:
            blocks = range(-(-self.size // BLOCK_BYTES))
            found = b"".join(await gathered(map(self._fetch, _requests(blocks))))
        return found

    async def fetch_missing(self, blocks: Sequence[int]) -> None:
        """Put adjacent blocks into the cache, unless they are there."""

        def find() -> list[int]:
            file = self.open()
            return [block for block in blocks if not file.has(block)]

        missing = await asyncio.to_thread(find)
        fetcher().counts.cached += len(blocks) - len(missing)
        for some in _requests(missing):
            await self._fetch(some)

    async def _fetch(self, blocks: Sequence[int]) -> bytes:
        """Fetch adjacent blocks, and put them into the cache."""
        at, end = blocks[0] * BLOCK_BYTES, min((blocks[-1] + 1) * BLOCK_BYTES, self.size)
        stored = RemoteObject(self._url, self._version, self._patience_s)
        data = await stored.fetch(self._start + at, self._start + end)

        def keep() -> None:
            file = self.open()
            for i, block in enumerate(blocks):
                self._cache.write(file, block, memoryview(data)[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])

        await asyncio.to_thread(keep)
        return data


def _requests(blocks: Iterable[int]) -> Iterator[list[int]]:
    """Ascending blocks, in runs of adjacent ones that one request fetches."""
    runs = itertools.groupby(enumerate(blocks), lambda each: (each[1] // _BLOCKS_A_REQUEST, each[1] - each[0]))
    return ([block for _, block in run] for _, run in runs)


class _Piece(NamedTuple):
    """A part that is read, or as much of it as lies in one segment."""

    part: int  # its number
    within: int  # where in the part the piece begins
    offset: int  # where in the segment
    length: int


_Read = Callable[[CacheFile, Sequence[_Piece], Indices, Indices], int]


class _Mapped(NamedTuple):
    """All bytes of an object, mapped, and path and version of each of its segments."""

    memory: Bytes
    segments: list[tuple[str, FileVersion]]


class RemoteFile(File):
    """A `File` that is an object in a store. It is cached in segments of up to 64 MiB, each a `CachedRange`."""

    in_store = True
    version: Version

    def __init__(self, url: Url, version: Version, options: Store) -> None:
        self.name, self.version, self.size = str(url), version, version.size_bytes
        self._url, self._options = url, options
        self.cache = cache_of(options)
        self._step = self.cache.segment_bytes
        self._blocks_a_segment = self._step // BLOCK_BYTES
        self._segments = [
            self._range(start, min(start + self._step, self.size)) for start in range(0, self.size, self._step)
        ]
        self._lock = threading.RLock()  # a request may be done before its callback is added
        self._pending: dict[int, concurrent.futures.Future[None]] = {}
        """The request for each block that is being fetched. Guarded by _lock."""
        self._mapped: _Mapped | None = None
        self._incomplete = 0
        """The number of a segment that lacked blocks when it was last looked at."""
        self._checks = itertools.count()
        self._whole: OpenFile | None = None
        self._download: concurrent.futures.Future[Any] | None = None

    def _range(self, start: int, stop: int) -> CachedRange:
        return CachedRange(self.cache, self._url, self.version, start, stop, self._options.patience_s)

    # --- read ---

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        parts: list[dict[int, bytes]] = [{} for _ in offsets]  # pieces by where in the part they begin

        def read(file: CacheFile, pieces: Sequence[_Piece], starts: Indices, lengths: Indices) -> int:
            found = file.read(starts, lengths)
            for piece, data in zip(pieces, found, strict=True):
                parts[piece.part][piece.within] = data
            return sum(map(len, found))

        self._each(offsets, np.minimum(offsets + lengths, self.size), read)
        return [b"".join(pieces[at] for at in sorted(pieces)) for pieces in parts]

    def read_rows(self, offsets: Indices, out: Bytes) -> None:
        length = out.shape[1]
        if len(offsets) and int(offsets.max()) + length > self.size:
            super().read_rows(offsets, out)  # raises
        firsts = np.append(0, np.flatnonzero(np.diff(offsets) != length) + 1)[: len(offsets)]  # of adjacent rows
        ends = np.append(firsts[1:], len(offsets))[: len(firsts)]
        rows = [out[first:end].reshape(-1) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]

        def read(file: CacheFile, pieces: Sequence[_Piece], *_: Indices) -> int:
            return sum(
                os.preadv(file.descriptor, [rows[part][within : within + length].data], offset)
                for part, within, offset, length in pieces
            )

        self._each(offsets[firsts], offsets[firsts] + length * (ends - firsts), read)

    def _each(self, offsets: Indices, stops: Indices, read: _Read) -> None:
        """Call `read` with each file of the cache that has some of these parts, once their blocks are there.

        `read` gets pieces, their offsets in the file and their lengths, and returns how many bytes it has read. It
        is called again if the file was truncated meanwhile.
        """
        self._wait_for(self.blocks_of(offsets, stops))
        pieces: dict[int, list[_Piece]] = {}
        for part, (start, stop) in enumerate(zip(offsets.tolist(), stops.tolist(), strict=True)):
            at = start
            while at < stop:
                number, offset = divmod(at, self._step)
                length = min(stop - at, self._step - offset)
                pieces.setdefault(number, []).append(_Piece(part, at - start, offset, length))
                at += length
        for number, some in pieces.items():
            starts = np.array([piece.offset for piece in some])
            lengths = np.array([piece.length for piece in some])
            first = number * self._blocks_a_segment
            blocks = self.blocks_of(number * self._step + starts, number * self._step + starts + lengths)
            for _ in range(_TRIES):
                file = self._segments[number].open()
                if not all(file.has(block - first) for block in blocks.tolist()):
                    self._wait_for(blocks)  # they were evicted
                elif read(file, some, starts, lengths) == lengths.sum() and file.is_intact:
                    break
            else:
                raise self._unstable(_TRIES)

    def _unstable(self, times: int) -> FeedError:
        return FeedError(
            "the files of a cache must stay as they are for as long as a read takes, and those of "
            f"{self.name} were changed {times} times; look for the program that writes to them",
            stage="read",
            file=self.name,
        )

    # --- fetch ---

    def blocks_of(self, offsets: Indices, stops: Indices) -> Indices:
        """The numbers of the blocks that hold some bytes, ascending."""
        stops = np.minimum(stops, self.size)
        offsets, stops = offsets[stops > offsets], stops[stops > offsets]
        first, last = offsets // BLOCK_BYTES, (stops - 1) // BLOCK_BYTES
        longest = int((last - first).max(initial=0))
        return np.unique(np.minimum(np.arange(longest + 1) + first[:, None], last[:, None]))

    def _by_segment(self, blocks: Iterable[int]) -> Iterator[tuple[int, list[int]]]:
        """For each segment that has some of these ascending blocks its number, and their numbers in it."""
        each = self._blocks_a_segment
        for number, some in itertools.groupby(blocks, lambda block: block // each):
            yield number, [block - number * each for block in some]

    def _missing(self, blocks: Indices) -> list[int]:
        """Those of some ascending blocks that are not there, as far as this process knows."""
        missing: list[int] = []
        for number, some in self._by_segment(blocks.tolist()):
            verified = self._segments[number].verified
            missing += [number * self._blocks_a_segment + block for block in some if not verified[block]]
        return missing

    def fetch(self, blocks: Indices) -> list[concurrent.futures.Future[None]]:
        """Start to fetch those of some ascending blocks that are not there. Returns the requests."""
        missing = self._missing(blocks)
        with self._lock:
            requests = {self._pending[block] for block in missing if block in self._pending}
            for number, some in self._by_segment(block for block in missing if block not in self._pending):
                for run in _requests(some):
                    request = fetcher().run(self._segments[number].fetch_missing(run))
                    of_object = [number * self._blocks_a_segment + block for block in run]
                    self._pending.update(dict.fromkeys(of_object, request))
                    request.add_done_callback(functools.partial(self._done, of_object))
                    requests.add(request)
        return list(requests)

    def _done(self, blocks: list[int], request: concurrent.futures.Future[None]) -> None:
        with self._lock:
            for block in blocks:
                if self._pending.get(block) is request:
                    del self._pending[block]

    def _wait_for(self, blocks: Indices) -> None:
        for request in self.fetch(blocks):
            result_of(request, self.name)

    def fetch_from(self, offset: int) -> None:
        """Start to fetch the blocks that a reader of the whole object needs next."""
        first = offset // BLOCK_BYTES
        most = min(MOST, int(self.cache.limit_bytes * AHEAD) // BLOCK_BYTES)
        if len(self._pending) < AT_ONCE:
            self.fetch(np.arange(first, min(-(-self.size // BLOCK_BYTES), first + most)))

    def is_near(self, start: int, stop: int) -> bool:
        """Whether all blocks that hold some bytes are there, or are being fetched."""
        missing = self._missing(self.blocks_of(np.array([start]), np.array([stop])))
        return all(block in self._pending for block in missing)

    def close(self) -> None:
        """Give up what is being fetched, and let the cache evict the file of `path`."""
        self._whole = None
        with self._lock:
            requests: set[concurrent.futures.Future[Any]] = set(self._pending.values())
        if self._download is not None:
            requests.add(self._download)
        for request in requests:
            request.cancel()

    # --- mapped ---

    def memory(self) -> Bytes | None:
        """See `File.memory`. None without the C library, whose gather survives what happens to mapped files."""
        if self._mapped is None and library() is not None and self._is_complete():
            self._mapped = self._map()
        return None if self._mapped is None else self._mapped.memory

    def _is_complete(self) -> bool:
        """Whether all blocks are in the cache, as far as this process knows."""
        count = len(self._segments)
        if count and not self._segments[self._incomplete].verified.all():
            return False
        incomplete = (number for number in range(count) if not self._segments[number].verified.all())
        found = next(incomplete, None)
        self._incomplete = found or 0
        return found is None

    def _map(self) -> _Mapped | None:
        """All segments, mapped one behind the other; None if one is gone, or no addresses or mappings are left."""
        if self.size == 0:
            return _Mapped(np.zeros(0, np.uint8), [])
        libc, segments = _libc(), []
        address = libc.mmap(None, self.size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address == _FAILED:
            return None
        raw = (ctypes.c_char * self.size).from_address(address)
        weakref.finalize(raw, libc.munmap, address, self.size).atexit = False
        for number, segment in enumerate(self._segments):
            file, flags = segment.open(), mmap.MAP_SHARED | _MAP_FIXED
            version = FileVersion.of(file.descriptor)
            place = address + number * self._step, file.size
            if (
                not file.verified.blocks.all()
                or libc.mmap(*place, mmap.PROT_READ, flags, file.descriptor, 0) == _FAILED
                or not file.is_intact
            ):
                return None
            segments.append((file.path, version))
        return _Mapped(np.frombuffer(memoryview(raw).toreadonly(), np.uint8), segments)

    def check(self) -> None:
        """Unmap the object if one of its segments was deleted or written to. Fetching compares the version."""
        if self._mapped is not None:
            self._check_segments(self._mapped.segments)

    def check_open(self) -> None:
        """Check up to 16 mapped segments, in turn. If one was deleted or written to, `memory` is None afterwards,
        and what was read from it may be wrong. `with_path` checks the file of a whole object."""
        mapped = self._mapped
        if mapped is not None:
            first = next(self._checks) * _CHECKED_SEGMENTS
            count = len(mapped.segments)
            self._check_segments(
                mapped.segments[(first + i) % count] for i in range(min(count, _CHECKED_SEGMENTS))
            )

    def _check_segments(self, segments: Iterable[tuple[str, FileVersion]]) -> None:
        for path, version in segments:
            with contextlib.suppress(FileNotFoundError):
                if touch(path) == version:
                    continue
            self._mapped = None

    # --- as a file object, and in samples ---

    def open(self, sequential: bool = False) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_OpenObject(self, sequential), _HEADER_BYTES))

    def start_samples(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], list[bytes]]:
        request = fetcher().run(self._samples(ranges))
        return lambda: result_of(request, self.name)

    async def _samples(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        if self.size <= _SMALL_BYTES:
            data = await self._range(0, self.size).all()
            return [data[at : at + length] for at, length in ranges]
        spans = [(min(at, self.size), min(at + length, self.size)) for at, length in ranges]
        return await gathered(self._range(*span).all() for span in spans)

    @property
    def stamp(self) -> str:
        return self.version.tag

    def places_beside(self, suffix: str) -> list[str]:
        return [place_in(self._options.folder, f"{self.name} {self.version.tag}", suffix)]

    # --- whole, for a library that opens files by path ---

    def path(self) -> str:
        return self._local().path

    def with_path(self, use: Callable[[str], T]) -> T:
        for _ in range(_WHOLE_TRIES):
            whole = self._local()
            try:
                found = use(whole.path)
            except Exception:
                if whole.is_at_its_path:
                    raise
            else:
                if whole.is_at_its_path:
                    return found
        raise self._unstable(_WHOLE_TRIES)

    def _local(self) -> OpenFile:
        """The whole file of the object, which is downloaded unless the cache has it."""
        whole = self._whole
        if whole is None or not whole.is_at_its_path:
            name = name_of(self.name, self.version.tag, 0, self.size)
            whole = self._whole = self.cache.whole(name, self.size, self._download_to)
        return whole

    def _download_to(self, file: Descriptor) -> None:
        at_once = asyncio.Semaphore(AT_ONCE)  # bounds the parts that wait for the disk

        async def part(start: int) -> None:
            async with at_once:
                stop = min(start + REQUEST_BYTES, self.size)
                data = await RemoteObject(self._url, self.version, self._options.patience_s).fetch(start, stop)
                write = functools.partial(file.write, memoryview(data), start)
                await asyncio.to_thread(self.cache.store, len(data), write)

        self._download = fetcher().run(gathered(map(part, range(0, self.size, REQUEST_BYTES))))
        result_of(self._download, self.name)


def fetch_whole(files: Sequence[RemoteFile]) -> None:
    """Make whole files of objects. FeedError: also if the cache is too small for all of them."""
    size, limit_bytes = sum(file.size for file in files), files[0].cache.limit_bytes
    if size > limit_bytes:
        raise FeedError(
            "files of this format are opened by path, so the cache must hold all of them, and they have "
            f"{size} bytes where cache_bytes={limit_bytes}; raise cache_bytes of feedline.Store, or convert "
            "them to TFRecord, of which parts are read",
            stage="read",
            file=files[0].name,
        )
    _log.info("%d objects, %d bytes in all, are downloaded unless the cache has them", len(files), size)
    with concurrent.futures.ThreadPoolExecutor(_DOWNLOADS) as threads:
        try:
            for _ in threads.map(RemoteFile.path, files):
                pass
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            for file in files:
                file.close()
            raise


def open_objects(urls: Sequence[str], options: Store) -> list[RemoteFile]:
    """Objects of their present versions, which are all asked for at once: each alone would cost the latency."""
    cache_of(options)  # before requests

    parsed = [Url.parse(url) for url in urls]
    versions = fetcher().run(gathered(version_of(url, options.patience_s) for url in parsed)).result()
    return [RemoteFile(*each, options) for each in zip(parsed, versions, strict=True)]


class _OpenObject(io.RawIOBase):
    """Reads of an object, the small ones without the blocks that hold them. For one thread."""

    def __init__(self, file: RemoteFile, sequential: bool) -> None:
        self._file, self._sequential, self._at = file, sequential, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        at, wanted = self._at, len(buffer)
        if self._sequential:
            self._file.fetch_from(at)
        if self._sequential or wanted > _EXACT_BYTES or self._file.is_near(at, at + wanted):
            (data,) = self._file.read(np.array([at]), np.array([wanted]))
        else:
            (data,) = self._file.samples([(at, wanted)])
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


_MAP_FIXED, _PROT_NONE = 0x10, 0  # of Linux and macOS; Python's mmap does not have them
_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    number, size = ctypes.c_int, ctypes.c_size_t
    libc.mmap.argtypes = (ctypes.c_void_p, size, number, number, number, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, size)
    return libc
