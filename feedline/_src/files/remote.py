"""A file in a store: its blocks come through the cache on local disk, and once all are there they are mapped."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import io
import itertools
import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import (
    AHEAD,
    BLOCK_BYTES,
    LOCK,
    Cache,
    CacheFile,
    cache_of,
    close_evicted,
    in_folder,
    name_of,
    touched,
)
from feedline._src.files.client import Version
from feedline._src.files.fetcher import AT_ONCE, MOST, REQUEST_BYTES, Origin, fetcher, gathered, result_of
from feedline._src.files.file import Bytes, File, FileVersion, Indices, LruCache, T, place_in
from feedline._src.files.store import Store, Url
from feedline._src.native.library import library

_log = logging.getLogger("feedline")
OPEN_SEGMENTS = 64
_MOST_BLOCKS = REQUEST_BYTES // BLOCK_BYTES
"""Of a request: adjacent blocks are fetched together."""
_EVERY_S = 20.0
_TRIES = 100
_WHOLE_TRIES = 10
_FILES_AT_ONCE = 32
_LOOK_AGAIN_S = 0.1
SMALL_BYTES = 1 << 14
"""What a file object reads at once of headers."""
_CHECKED_SEGMENTS = 16
"""Of a mapped object at each read, which takes a system call for each."""
_EXACT_BYTES = 1 << 17
"""Up to this size, as of headers and footers, only these bytes are fetched, and not the blocks that hold them."""


_Read = Callable[[CacheFile, Sequence[int], Sequence[int], Indices, Indices], int]


class _Whole(NamedTuple):
    """The file of an object that was fetched whole, and its version when it was complete."""

    path: str
    file: CacheFile
    version: FileVersion

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written to it or truncated it."""
        return FileVersion.of(self.file.descriptor) == self.version

    @property
    def is_there(self) -> bool:
        """Whether it is intact, and every library can open it: HDF5 cannot once it is deleted."""
        return self.is_intact and os.fstat(self.file.descriptor).st_nlink > 0


class _Segment(NamedTuple):
    """A mapped file of the cache."""

    path: str
    id: bytes
    inode: int
    size: int

    @property
    def is_changed(self) -> bool:
        """Whether it was truncated, or another file lies at its path. One that was deleted stays readable."""
        try:
            now = os.stat(self.path)
        except OSError:
            return False
        return (now.st_ino, now.st_size) != (self.inode, self.size)


class RemoteFile(File):
    """A `File` that is an object in a store.

    Its blocks lie in segments of up to 64 MiB, each of which is a file of the cache. Which of them are there, with
    the right checksum, this process notes by the id of the file: another one at the same path has other blocks.

    Args:
      url, version: of the object.
      origin: of its bytes, which has compared the version.
      options: cache and patience.
      opened: the segments of a source that were used last, open.
    """

    in_store = True
    version: Version

    def __init__(
        self, url: Url, version: Version, origin: Origin, options: Store, opened: LruCache[CacheFile] | None = None
    ) -> None:
        self.name, self.version, self.size = str(url), version, version.size_bytes
        self._url, self._origin, self._options = url, origin, options
        self.cache = cache_of(options)
        self._opened: LruCache[CacheFile] = opened or LruCache(OPEN_SEGMENTS)
        close_evicted(self._opened)
        self._step = self.cache.segment_bytes
        self._segments = -(-self.size // self._step)
        self._known: dict[int, tuple[bytes, Any]] = {}
        """By segment, the id of its file, and which of its blocks are there."""
        self._lock = threading.RLock()  # a request may be done before its callback is added
        self._pending: dict[int, concurrent.futures.Future[None]] = {}
        """The requests that fetch a block. Guarded by _lock."""
        self._used: set[int] = set()
        """Segments that were read since the last maintenance."""
        self._maintained = time.monotonic()
        self._evictions = 0
        self._complete = 0
        """The segments before this one were complete."""
        self._mapped: tuple[Bytes, list[_Segment]] | None = None
        """The mapped object, and its files."""
        self._turn = itertools.count()
        self._whole: _Whole | None = None

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """See `File.read`."""
        pieces: list[dict[int, bytes]] = [{} for _ in offsets]

        def read(
            file: CacheFile, parts: Sequence[int], within: Sequence[int], starts: Indices, lengths: Indices
        ) -> int:
            found = file.read(starts, lengths)
            for part, at, data in zip(parts, within, found, strict=True):
                pieces[part][at] = data
            return sum(map(len, found))

        self._each(offsets, np.minimum(offsets + lengths, self.size), read)
        return [b"".join(some[at] for at in sorted(some)) for some in pieces]

    def read_rows(self, offsets: Indices, out: Bytes) -> None:
        """See `File.read_rows`. Adjacent rows are read at once."""
        length = out.shape[1]
        if len(offsets) and int(offsets.max()) + length > self.size:
            super().read_rows(offsets, out)  # raises
        firsts = np.append(0, np.flatnonzero(np.diff(offsets) != length) + 1)[: len(offsets)]  # of adjacent rows
        ends = np.append(firsts[1:], len(offsets))[: len(firsts)]
        rows = [out[first:end].reshape(-1) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]

        def read(
            file: CacheFile, parts: Sequence[int], within: Sequence[int], starts: Indices, lengths: Indices
        ) -> int:
            places = zip(parts, within, starts.tolist(), lengths.tolist(), strict=True)
            return sum(
                os.preadv(file.descriptor, [rows[part][at : at + size].data], start)
                for part, at, start, size in places
            )

        self._each(offsets[firsts], offsets[firsts] + length * (ends - firsts), read)

    def memory(self) -> Bytes | None:
        """See `File.memory`. None without the C library, whose gather survives what happens to mapped files."""
        self._maintain()
        if self._mapped is None and library() is not None and self._is_complete():
            self._mapped = self._map()
        return None if self._mapped is None else self._mapped[0]

    def path(self) -> str:
        """See `File.path`."""
        return self._fetched().path

    def with_path(self, use: Callable[[str], T]) -> T:
        """See `File.with_path`."""
        for _ in range(_WHOLE_TRIES):
            whole = self._fetched()  # stays open: its path is that of a descriptor
            try:
                found = use(whole.path)
            except Exception:
                if whole.is_there:
                    raise
                if self._whole is whole:
                    self._whole = None
            else:
                if whole.is_intact:
                    return found
        raise self._changed(_WHOLE_TRIES)

    def _fetched(self) -> _Whole:
        """The file of the whole object, which is fetched if there is none, or it was written to."""
        for _ in range(_WHOLE_TRIES):
            whole = self._whole
            if whole is not None and whole.is_intact:
                return whole
            fetch_whole([self])
        raise self._changed(_WHOLE_TRIES)

    def _changed(self, times: int) -> FeedError:
        return FeedError(
            "the files of a cache must stay as they are for as long as a read takes, and those of "
            f"{self.name} were changed {times} times; look for the program that writes to them",
            stage="read",
            file=self.name,
        )

    @property
    def has_path(self) -> bool:
        """See `File.has_path`."""
        return self._whole is not None and self._whole.is_intact

    def open(self, sequential: bool = False) -> BinaryIO:
        """See `File.open`."""
        return cast(BinaryIO, io.BufferedReader(_OpenObject(self, sequential), SMALL_BYTES))

    def samples(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """See `File.samples`."""
        return [result_of(future, self.name) for future in self.start_samples(ranges)]

    def start_samples(self, ranges: Sequence[tuple[int, int]]) -> list[concurrent.futures.Future[bytes]]:
        """Start the requests of `samples`; returns a future for each."""
        return [self._sampled(min(at, self.size), min(at + length, self.size)) for at, length in ranges]

    @property
    def stamp(self) -> str | None:
        """Its ETag; None of a weak one."""
        return None if self.version.nonce else self.version.tag

    def places_beside(self, suffix: str) -> list[str]:
        """See `File.places_beside`: in the cache folder."""
        return [place_in(self._options.folder, f"{self.name} {self.version.tag}", suffix)]

    def check(self) -> None:
        """Unmap the object, for later reads, if files of the cache are gone or truncated.

        Its version is compared whenever bytes are fetched.
        """
        self._maintained = 0.0
        self._maintain()

    def check_open(self) -> None:
        """Compare the sizes of up to 16 mapped segments in turn, and the id of one, which differs also if it was
        truncated and made as long again. `memory` is None afterwards if one was, and what was read from it may be
        wrong. `with_path` looks at a file that was fetched whole."""
        segments = () if self._mapped is None else self._mapped[1]
        if not segments:
            return
        turn = next(self._turn)
        one = segments[turn % len(segments)]
        if len(segments) > _CHECKED_SEGMENTS:
            segments = [segments[(turn * _CHECKED_SEGMENTS + i) % len(segments)] for i in range(_CHECKED_SEGMENTS)]
        is_lost = not touched(one.path, one.id) and os.path.exists(one.path)  # a deleted one stays readable
        if is_lost or any(segment.is_changed for segment in segments):
            self.check()

    def blocks_of(self, offsets: Indices, lengths: Indices) -> Indices:
        """The numbers of the blocks that hold some bytes, ascending."""
        stops = np.minimum(offsets + lengths, self.size)
        offsets, stops = offsets[stops > offsets], stops[stops > offsets]
        first, more = offsets // BLOCK_BYTES, (stops - 1) // BLOCK_BYTES - offsets // BLOCK_BYTES
        longest = int(more.max(initial=0))
        spread = np.minimum(np.arange(longest + 1), more[:, None]) + first[:, None]
        return np.unique(spread)

    def fetch(self, blocks: Indices) -> list[concurrent.futures.Future[None]]:
        """Start to fetch those of some ascending blocks that are not there. Returns the requests."""
        missing = [block for block in blocks.tolist() if not self._has(block)]
        futures: set[concurrent.futures.Future[None]] = set()
        with self._lock:
            pending = {block: self._pending[block] for block in missing if block in self._pending}
            pending = {block: future for block, future in pending.items() if not future.done()}
            futures.update(pending.values())
            for run in self._runs([block for block in missing if block not in pending]):
                future = fetcher().run(self._fetch(run))
                self._pending.update(dict.fromkeys(run, future))
                future.add_done_callback(functools.partial(self._done, run))
                futures.add(future)
        return list(futures)

    def comes(self, offset: int, length: int) -> bool:
        """Whether all blocks that hold some bytes are there, or are being fetched."""
        blocks = self.blocks_of(np.array([offset]), np.array([length])).tolist()
        return all(self._has(block) or block in self._pending for block in blocks)

    def read_on_from(self, offset: int) -> None:
        """Start to fetch the blocks that a reader of the whole object needs next."""
        first = offset // BLOCK_BYTES
        most = min(MOST, int(self.cache.limit_bytes * AHEAD) // BLOCK_BYTES)
        if len(self._pending) < AT_ONCE:
            self.fetch(np.arange(first, min(-(-self.size // BLOCK_BYTES), first + most)))

    def close(self) -> None:
        """Give up what is being fetched, and let the cache evict the file of `path`."""
        self._whole = None
        with self._lock:
            futures = set(self._pending.values())
        for future in futures:
            future.cancel()

    def __reduce__(self) -> Any:
        return _opened_again, (self.name, self._options, self.version)

    def _each(self, offsets: Indices, stops: Indices, read: _Read) -> None:
        """Call `read` with each file of the cache that has some of these parts, or pieces where segments meet.

        Args:
          read: (file, numbers of the parts, where in them the pieces lie, their offsets in the file, and lengths)
            → bytes read. Called again if somebody has truncated the file.
        """
        self._maintain()
        self._wait_for(self.blocks_of(offsets, stops - offsets))
        pieces: dict[int, list[tuple[int, int, int, int]]] = {}  # by segment: part, where in it, offset, length
        for part, (start, stop) in enumerate(zip(offsets.tolist(), stops.tolist(), strict=True)):
            at = start
            while at < stop:
                number, offset = divmod(at, self._step)
                length = min(stop - at, self._step - offset)
                pieces.setdefault(number, []).append((part, at - start, offset, length))
                at += length
        for number, some in pieces.items():
            parts, within, *places = zip(*some, strict=True)
            starts, lengths = np.array(places, np.int64)
            blocks = self.blocks_of(number * self._step + starts, lengths)
            for _ in range(_TRIES):
                file = self._segment(number)
                if not file.verified[blocks - number * self._step // BLOCK_BYTES].all():  # evicted since
                    self._wait_for(blocks)
                elif read(file, parts, within, starts, lengths) == lengths.sum() and file.is_intact:
                    break
                else:
                    self._drop(number, file)
            else:
                raise self._changed(_TRIES)
            self._used.add(number)

    def _wait_for(self, blocks: Indices) -> None:
        if all(map(self._has, blocks.tolist())):
            return
        fetcher().check_may_run()  # a fork would wait for ever for requests of its parent
        began = time.monotonic()
        try:
            for future in self.fetch(blocks):
                result_of(future, self.name)
        finally:
            fetcher().counts.wait_s += time.monotonic() - began

    def _has(self, block: int) -> bool:
        """Whether a block is there, as far as this process knows."""
        segment, within = divmod(block, self._step // BLOCK_BYTES)
        known = self._known.get(segment)
        return known is not None and bool(known[1][within])

    def _range(self, block: int) -> tuple[int, int]:
        return block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self.size)

    def _runs(self, blocks: Sequence[int]) -> Iterator[list[int]]:
        """Ascending blocks in runs of adjacent ones of one segment, none longer than a request."""
        per_segment = self._step // BLOCK_BYTES
        keys = ((block - i, block // per_segment) for i, block in enumerate(blocks))
        for _, run in itertools.groupby(zip(keys, blocks, strict=True), lambda pair: pair[0]):
            adjacent = [block for _, block in run]
            for start in range(0, len(adjacent), _MOST_BLOCKS):
                yield adjacent[start : start + _MOST_BLOCKS]

    def _is_complete(self) -> bool:
        """Whether all blocks are in the cache, as far as this process knows."""
        for number in range(self._complete, self._segments):
            known = self._known.get(number)
            if known is None or not known[1].all():
                return False
            self._complete = number
        return True

    def _segment(self, number: int) -> CacheFile:
        """The open file of a segment."""

        def opened() -> CacheFile:
            size = min(self._step, self.size - number * self._step)
            file = self.cache.open(self._segment_name(number), size)
            known = self._known.get(number)
            if known is not None and known[0] == file.id:
                file.verified = known[1]
            else:
                self._known[number] = file.id, file.verified
                self._complete = 0
            return file

        return self._opened.get((self.name, number), opened)

    def _segment_name(self, number: int) -> str:
        start, stop = number * self._step, min((number + 1) * self._step, self.size)
        return name_of(self.name, self.version.cache_tag, start, stop)

    def _drop(self, number: int, file: CacheFile) -> None:
        """Use another file for a segment from now on: this one is damaged, or has lost its name."""
        file.unlink()
        self._opened.discard((self.name, number), file)
        self._known.pop(number, None)
        self._complete = 0

    async def _fetch(self, run: list[int]) -> None:
        """Put adjacent blocks into the cache, unless they are there."""
        absent = await asyncio.to_thread(self._from_cache, run)
        for part in self._runs(absent):
            start, stop = self._range(part[0])[0], self._range(part[-1])[1]
            data = memoryview(await self._origin.fetch(self._url, self.version, start, stop))
            await asyncio.to_thread(self._keep, part, data)

    def _from_cache(self, run: list[int]) -> list[int]:
        """Compare the checksums of the blocks that the cache has. Returns the others."""
        file, first = self._writable(run[0])
        absent = [block for block in run if not file.has(block - first)]
        fetcher().counts.cached += len(run) - len(absent)
        return absent

    def _keep(self, run: list[int], data: memoryview) -> None:
        """Put blocks into the cache."""
        file, first = self._writable(run[0])
        begin = self._range(run[0])[0]
        for block in run:
            start, stop = self._range(block)
            self.cache.write(file, block - first, data[start - begin : stop - begin])

    def _writable(self, block: int) -> tuple[CacheFile, int]:
        """The file of a block's segment, and the number of the first block in it."""
        number = block * BLOCK_BYTES // self._step
        file = self._segment(number)
        if file.is_gone or not file.is_intact:
            self._drop(number, file)
            file = self._segment(number)
        return file, number * self._step // BLOCK_BYTES

    def _done(self, run: list[int], future: concurrent.futures.Future[None]) -> None:
        with self._lock:
            for block in run:
                if self._pending.get(block) is future:
                    del self._pending[block]

    def _maintain(self) -> None:
        """Every 20 s, and after an eviction: note in the cache what is in use, and give up files that are gone."""
        now, evictions = time.monotonic(), self.cache.evictions
        if now < self._maintained + _EVERY_S and evictions == self._evictions:
            return
        with self._lock:  # one thread
            if now < self._maintained + _EVERY_S and evictions == self._evictions:
                return
            late = now >= self._maintained + _EVERY_S
            self._maintained, self._evictions = now, evictions
            used, self._used = self._used, set()
        mapped = self._mapped
        segments = [] if mapped is None else mapped[1]
        lost = [i for i, segment in enumerate(segments) if not touched(segment.path, segment.id)]
        if lost:
            self._mapped = None
        if late or lost:
            self._opened.clear()  # those that are gone give back their space; others are opened again
        for number, known in list(self._known.items()):  # those that are gone have to be fetched
            path = self.cache.path(self._segment_name(number))
            there = touched(path, known[0]) if number in used else number not in lost and os.path.exists(path)
            if not there and self._known.get(number) is known:
                self._known.pop(number, None)
                self._complete = 0

    def _map(self) -> tuple[Bytes, list[_Segment]] | None:
        """All segments, mapped one behind the other, and their files; None if one is not there any more."""
        files: list[_Segment] = []

        def complete() -> Iterator[CacheFile]:
            for number in range(self._segments):
                file = self._segment(number)
                if not file.touch():
                    self._opened.discard((self.name, number), file)
                elif file.verified.all():
                    status = os.fstat(file.descriptor)
                    files.append(_Segment(file.path, file.id, status.st_ino, status.st_size))
                    yield file

        found = _mapped(complete(), self._step, self.size)
        return None if found is None or len(files) < self._segments else (found, files)

    def _sampled(self, start: int, stop: int) -> concurrent.futures.Future[bytes]:
        if not all(map(self._has, self.blocks_of(np.array([start]), np.array([stop - start])).tolist())):
            return fetcher().run(self._sample(start, stop))
        done: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        done.set_result(self.read(np.array([start]), np.array([stop - start]))[0])
        return done

    async def _sample(self, start: int, stop: int) -> bytes:
        async def piece(at: int) -> bytes:
            stops = min(at + REQUEST_BYTES, stop)
            return await cached(self.cache, self._origin, self._url, self.version, at, stops)

        return b"".join(await gathered(map(piece, range(start, stop, REQUEST_BYTES))))

    async def _fetch_whole(self, files: asyncio.Semaphore, requests: asyncio.Semaphore) -> None:
        """Fetch the object as one file, which stays in the cache for as long as this `File` does."""
        name = name_of(self.name, self.version.cache_tag, 0, self.size)
        async with files, _alone(self.cache.path(name) + LOCK):
            whole = await asyncio.to_thread(self.cache.open_whole, name, self.size)
            absent = np.flatnonzero(~whole.verified).tolist()
            fetcher().counts.cached += not absent

            async def part(run: list[int]) -> None:
                start, stop = self._range(run[0])[0], self._range(run[-1])[1]
                async with requests:  # as much is in memory as is being fetched
                    data = memoryview(await self._origin.fetch(self._url, self.version, start, stop))
                    for block in run:
                        at, end = self._range(block)
                        await asyncio.to_thread(self.cache.write, whole, block, data[at - start : end - start])

            await gathered(part(run) for run in self._runs(absent))
            whole.finish()
            of_descriptor = f"/proc/self/fd/{whole.descriptor}"
            path = of_descriptor if os.path.exists(of_descriptor) else whole.path
            self._whole = _Whole(path, whole, FileVersion.of(whole.descriptor))


def fetch_whole(files: Sequence[RemoteFile]) -> None:
    """Fetch all these objects, each as one file, so that they have a `path`.

    Several processes share the files: one fetches an object, while the others wait for it.

    Raises:
      FeedError: the store cannot be read, or the cache is too small for all of them.
    """
    absent = [file for file in files if not file.has_path]
    if not absent:
        return
    size, limit_bytes = sum(file.size for file in files), absent[0].cache.limit_bytes
    if size > limit_bytes:
        raise FeedError(
            "files of this format are opened by path, so the cache must hold all of them, and they have "
            f"{size} bytes where cache_bytes={limit_bytes}; raise cache_bytes of feedline.Store, or convert them "
            "to TFRecord, of which parts are read",
            stage="read",
            file=absent[0].name,
        )
    _log.info("%d objects, %d bytes in all, are fetched whole unless the cache has them", len(absent), size)
    slots = asyncio.Semaphore(_FILES_AT_ONCE), asyncio.Semaphore(AT_ONCE)
    started = [fetcher().run(file._fetch_whole(*slots)) for file in absent]
    try:
        for file, future in zip(absent, started, strict=True):
            result_of(future, file.name)
    except BaseException:
        for future in started:
            future.cancel()
        raise


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


async def cached(cache: Cache, origin: Origin, url: Url, version: Version, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of an object, from the cache, or else fetched and put there as a file."""
    if stop <= start:
        return b""
    name = name_of(str(url), version.cache_tag, start, stop)
    found = await asyncio.to_thread(cache.get, name, stop - start)
    if found is None:
        found = bytes(await origin.fetch(url, version, start, stop))
        await asyncio.to_thread(cache.put, name, found)
    else:
        fetcher().counts.cached += 1
    return found


def _opened_again(name: str, options: Store, version: Version) -> RemoteFile:
    (file,) = open_objects([name], options)
    version.check(file.version, name)
    return file


def open_objects(
    urls: Sequence[str], options: Store, opened: LruCache[CacheFile] | None = None
) -> list[RemoteFile]:
    """Objects of their present versions, which are all asked for at once: each alone would cost the latency.

    Raises:
      FileNotFoundError: there is no such object.
      FeedError: the store cannot be read.
    """
    cache_of(options)  # before requests
    parsed = [Url.parse(url) for url in urls]
    origins = [Origin(options.patience_s) for _ in parsed]
    asked = gathered(origin.sampled_version(url) for url, origin in zip(parsed, origins, strict=True))
    versions = fetcher().run(asked).result()
    return [
        RemoteFile(url, version, origin, options, opened)
        for url, version, origin in zip(parsed, versions, origins, strict=True)
    ]


class _OpenObject(io.RawIOBase):
    """Reads of an object, the small ones without the blocks that hold them. For one thread."""

    def __init__(self, file: RemoteFile, sequential: bool) -> None:
        self._file, self._sequential = file, sequential
        self._at = 0

    def readable(self) -> bool:
        """True: it is open for reading."""
        return True

    def seekable(self) -> bool:
        """True: the next read may begin anywhere."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Let the next read begin at `offset` from the start, from here or from the end. Returns where that is."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill `buffer` from here on, and go on behind it. Returns the number of bytes; 0 at the end."""
        at, wanted = self._at, len(buffer)
        if self._sequential:
            self._file.read_on_from(at)
        if self._sequential or wanted > _EXACT_BYTES or self._file.comes(at, wanted):
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


def _mapped(files: Iterable[CacheFile], step: int, size: int) -> Bytes | None:
    """Files mapped one behind the other, at distances of `step`, as `size` bytes. Views of them keep the mappings.

    None: this process has no addresses or no mappings left.
    """
    if size == 0:
        return np.zeros(0, np.uint8)
    libc, reserved = _libc(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, size, _PROT_NONE, reserved, -1, 0)
    if address == _FAILED:
        return None
    raw = (ctypes.c_char * size).from_address(address)
    weakref.finalize(raw, libc.munmap, address, size).atexit = False
    for i, file in enumerate(files):
        flags = mmap.MAP_SHARED | _MAP_FIXED
        if libc.mmap(address + i * step, file.size, mmap.PROT_READ, flags, file.descriptor, 0) == _FAILED:
            return None
    return np.frombuffer(memoryview(raw).toreadonly(), np.uint8)
