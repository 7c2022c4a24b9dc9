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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, BinaryIO, cast

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import (
    AHEAD,
    BLOCK_BYTES,
    Cache,
    CacheFile,
    cache_of,
    in_folder,
    name_of,
    touched,
)
from feedline._src.files.client import Version, client_of
from feedline._src.files.fetcher import (
    AT_ONCE,
    MOST,
    REQUEST_BYTES,
    fetch,
    fetcher,
    gathered,
    result_of,
    version_of,
)
from feedline._src.files.file import Bytes, File, Indices, OpenFile, T, place_in
from feedline._src.files.store import Store, Url
from feedline._src.native.library import library

_log = logging.getLogger("feedline")
_TRIES, _WHOLE_TRIES = 100, 10
_HEADER_BYTES = 1 << 14  # what a file object reads at once of headers
_EXACT_BYTES = 1 << 17  # up to this size, as of footers, only these bytes are fetched, and not their blocks
_CHECKED_SEGMENTS = 16  # of a mapped object at each read, which takes a system call for each
_Piece = tuple[int, int, int, int]
"""The number of a part that is read, where in it the piece lies, its offset in its segment, and its length."""
_Read = Callable[[CacheFile, Sequence[_Piece], Indices, Indices], int]


class RemoteFile(File):
    """A `File` that is an object in a store. Its blocks lie in segments of up to 64 MiB, each a file of the
    cache."""

    in_store = True
    version: Version

    def __init__(self, url: Url, version: Version, options: Store) -> None:
        self.name, self.version, self.size = str(url), version, version.size_bytes
        self._url, self._options = url, options
        self.cache = cache_of(options)
        self._step = self.cache.segment_bytes
        self._segments = [self._name(at, at + self._step) for at in range(0, self.size, self._step)]
        self._lock = threading.RLock()  # a request may be done before its callback is added
        self._pending: dict[int, concurrent.futures.Future[None]] = {}
        """The requests that fetch a block. Guarded by _lock."""
        self._incomplete = self._segments[-1] if self._segments else ""
        """A segment that was not complete when that was last asked; "" if all were."""
        self._mapped: tuple[Bytes, list[tuple[str, bytes, int]]] | None = None
        """The mapped object, and of its segments names, ids and sizes of files."""
        self._seen = -1
        """`Cache.turn` when the mapped segments were last known to be there."""
        self._checks = itertools.count()
        self._whole: OpenFile | None = None
        self._making: IO[str] | None = None
        """The lock on what `_whole` will be, since `begin_whole`."""

    def _name(self, start: int, stop: int) -> str:
        return name_of(self.name, self.version.tag, start, min(stop, self.size))

    # --- read ---

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        parts: list[dict[int, bytes]] = [{} for _ in offsets]

        def read(file: CacheFile, pieces: Sequence[_Piece], starts: Indices, lengths: Indices) -> int:
            found = file.read(starts, lengths)
            for (part, within, _, _), data in zip(pieces, found, strict=True):
                parts[part][within] = data
            return sum(map(len, found))

        self._each(offsets, np.minimum(offsets + lengths, self.size), read)
        return [b"".join(some[at] for at in sorted(some)) for some in parts]

    def read_rows(self, offsets: Indices, out: Bytes) -> None:
        length = out.shape[1]
        if len(offsets) and int(offsets.max()) + length > self.size:
            super().read_rows(offsets, out)  # raises
        firsts = np.append(0, np.flatnonzero(np.diff(offsets) != length) + 1)[: len(offsets)]  # of adjacent rows
        ends = np.append(firsts[1:], len(offsets))[: len(firsts)]
        rows = [out[first:end].reshape(-1) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]

        def read(file: CacheFile, pieces: Sequence[_Piece], *_: Indices) -> int:
            return sum(
                os.preadv(file.descriptor, [rows[part][within : within + size].data], at)
                for part, within, at, size in pieces
            )

        self._each(offsets[firsts], offsets[firsts] + length * (ends - firsts), read)

    def _each(self, offsets: Indices, stops: Indices, read: _Read) -> None:
        """Call `read` with each file of the cache that has some of these parts, or pieces where segments meet.

        `read` gets pieces, their offsets in the file and their lengths, and returns how many bytes it has read. It
        is called again if somebody has truncated the file.
        """
        self.cache.maintain()
        self._wait_for(self.blocks_of(offsets, stops))
        pieces: dict[int, list[_Piece]] = {}
        for part, (start, stop) in enumerate(zip(offsets.tolist(), stops.tolist(), strict=True)):
            at = start
            while at < stop:
                number, offset = divmod(at, self._step)
                length = min(stop - at, self._step - offset)
                pieces.setdefault(number, []).append((part, at - start, offset, length))
                at += length
        for number, some in pieces.items():
            starts, lengths = np.array(list(zip(*some, strict=True))[2:], np.int64)
            begin = number * self._step
            blocks = self.blocks_of(begin + starts, begin + starts + lengths)
            for _ in range(_TRIES):
                file = self._segment(number)
                if not file.verified[blocks - begin // BLOCK_BYTES].all():  # evicted since
                    self._wait_for(blocks)
                elif read(file, some, starts, lengths) == lengths.sum() and file.is_intact:
                    break
                else:
                    self.cache.drop(self._segments[number], file)
            else:
                raise self._unstable(_TRIES)

    def _segment(self, number: int) -> CacheFile:
        return self.cache.segment(self._segments[number], min(self._step, self.size - number * self._step))

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

    def _has(self, block: int) -> bool:
        """Whether a block is there, as far as this process knows."""
        segment, within = divmod(block, self._step // BLOCK_BYTES)
        known = self.cache.known.get(self._segments[segment])
        return known is not None and bool(known[1][within])

    def fetch(self, blocks: Indices) -> list[concurrent.futures.Future[None]]:
        """Start to fetch those of some ascending blocks that are not there. Returns the requests."""
        missing = [block for block in blocks.tolist() if not self._has(block)]
        with self._lock:
            running = {block: future for block, future in self._pending.items() if not future.done()}
            futures = {running[block] for block in missing if block in running}
            for run in self._runs([block for block in missing if block not in running]):
                future = fetcher().run(self._fetch(run))
                self._pending.update(dict.fromkeys(run, future))
                future.add_done_callback(functools.partial(self._done, run))
                futures.add(future)
        return list(futures)

    def _done(self, run: list[int], future: concurrent.futures.Future[None]) -> None:
        with self._lock:
            for block in run:
                if self._pending.get(block) is future:
                    del self._pending[block]

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

    def read_on_from(self, offset: int) -> None:
        """Start to fetch the blocks that a reader of the whole object needs next."""
        first = offset // BLOCK_BYTES
        most = min(MOST, int(self.cache.limit_bytes * AHEAD) // BLOCK_BYTES)
        if len(self._pending) < AT_ONCE:
            self.fetch(np.arange(first, min(-(-self.size // BLOCK_BYTES), first + most)))

    def _runs(self, blocks: Iterable[int]) -> Iterator[list[int]]:
        """Ascending blocks in runs of adjacent ones of one request and one segment."""
        request, segment = REQUEST_BYTES // BLOCK_BYTES, self._step // BLOCK_BYTES
        runs = itertools.groupby(blocks, lambda block: (block // request, block // segment))
        return (list(run) for _, run in runs)

    async def _fetch(self, run: list[int]) -> None:
        """Put adjacent blocks into the cache, unless they are there."""
        number = run[0] * BLOCK_BYTES // self._step
        first = number * self._step // BLOCK_BYTES

        def writable() -> CacheFile:
            file = self._segment(number)
            if not file.is_intact:
                self.cache.drop(self._segments[number], file)
                file = self._segment(number)
            return file

        def find() -> list[int]:
            file = writable()
            return [block for block in run if not file.has(block - first)]

        def keep(part: list[int], data: memoryview) -> None:
            for i, block in enumerate(part):
                self.cache.write(writable(), block - first, data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])

        absent = await asyncio.to_thread(find)
        fetcher().counts.cached += len(run) - len(absent)
        for part in self._runs(absent):
            start, stop = part[0] * BLOCK_BYTES, min((part[-1] + 1) * BLOCK_BYTES, self.size)
            data = await fetch(self._url, self.version, start, stop, self._options.patience_s)
            await asyncio.to_thread(keep, part, memoryview(data))

    def close(self) -> None:
        """Give up what is being fetched, and let the cache evict the file of `path`."""
        self._whole = None
        if self._making is not None:
            self._making.close()
            self._making = None
        with self._lock:
            futures = set(self._pending.values())
        for future in futures:
            future.cancel()
        self.cache.opened.clear()

    # --- mapped ---

    def memory(self) -> Bytes | None:
        """See `File.memory`. None without the C library, whose gather survives what happens to mapped files."""
        self.cache.maintain()
        if self._mapped is None:
            if library() is not None and self._is_complete():
                self._mapped, self._seen = self._map(), -1
        elif self._seen != self.cache.turn:
            self._seen = self.cache.turn
            self.check()
        return None if self._mapped is None else self._mapped[0]

    def _is_complete(self) -> bool:
        """Whether all blocks are in the cache, as far as this process knows."""

        def is_incomplete(segment: str) -> bool:
            known = self.cache.known.get(segment)
            return known is None or not known[1].all()

        if not self._incomplete or not is_incomplete(self._incomplete):
            self._incomplete = next(filter(is_incomplete, self._segments), "")
        return not self._incomplete

    def _map(self) -> tuple[Bytes, list[tuple[str, bytes, int]]] | None:
        """All segments, mapped one behind the other; None if one is gone, or no addresses or mappings are left."""
        if self.size == 0:
            return np.zeros(0, np.uint8), []
        libc, segments = _libc(), []
        address = libc.mmap(None, self.size, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if address == _FAILED:
            return None
        raw = (ctypes.c_char * self.size).from_address(address)
        weakref.finalize(raw, libc.munmap, address, self.size).atexit = False
        for number, name in enumerate(self._segments):
            file, flags = self._segment(number), mmap.MAP_SHARED | _MAP_FIXED
            if not touched(file.path, file.id):
                self.cache.drop(name)
                return None
            place = address + number * self._step, file.size
            if not file.verified.all() or libc.mmap(*place, mmap.PROT_READ, flags, file.descriptor, 0) == _FAILED:
                return None
            segments.append((name, file.id, os.fstat(file.descriptor).st_size))
        return np.frombuffer(memoryview(raw).toreadonly(), np.uint8), segments

    def check(self) -> None:
        """Note that mapped segments are in use; unmap them if one is gone or truncated. Fetching compares the
        version."""
        mapped = self._mapped
        for name, id, _ in () if mapped is None else mapped[1]:
            if not touched(self.cache.path(name), id):
                self.cache.drop(name)
                self._mapped = None

    def check_open(self) -> None:
        """Compare the sizes of up to 16 mapped segments in turn, and the id of one, which differs also if it was
        truncated and made as long again. `memory` is None afterwards if one was, and what was read from it may be
        wrong. `with_path` looks at a file that was fetched whole."""
        mapped = self._mapped
        if mapped is None or not mapped[1]:
            return
        turn, count = next(self._checks), len(mapped[1])
        first = turn if count <= _CHECKED_SEGMENTS else turn * _CHECKED_SEGMENTS
        for number in range(min(count, _CHECKED_SEGMENTS)):
            name, id, size = mapped[1][(first + number) % count]
            path = self.cache.path(name)
            with contextlib.suppress(FileNotFoundError):  # a deleted one stays readable
                if os.path.getsize(path) != size or (number == 0 and not touched(path, id)):
                    self.check()

    # --- as a file object, and in samples ---

    def open(self, sequential: bool = False) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_OpenObject(self, sequential), _HEADER_BYTES))

    def start_samples(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], list[bytes]]:
        def begin(at: int, length: int) -> Callable[[], bytes]:
            start, stop = min(at, self.size), min(at + length, self.size)
            if self.comes(start, stop, pending=False):
                return lambda: self.read(np.array([start]), np.array([stop - start]))[0]
            future = fetcher().run(cached(self.cache, self._options, self._url, self.version, start, stop))
            return lambda: result_of(future, self.name)

        begun = [begin(*each) for each in ranges]
        return lambda: [finish() for finish in begun]

    def comes(self, start: int, stop: int, pending: bool = True) -> bool:
        """Whether all blocks that hold some bytes are there, or are being fetched."""
        blocks = self.blocks_of(np.array([start]), np.array([stop])).tolist()
        return all(self._has(block) or (pending and block in self._pending) for block in blocks)

    @property
    def stamp(self) -> str:
        return self.version.tag

    def places_beside(self, suffix: str) -> list[str]:
        return [place_in(self._options.folder, f"{self.name} {self.version.tag}", suffix)]

    # --- whole, for a library that opens files by path ---

    def path(self) -> str:
        return self._fetched().path

    def with_path(self, use: Callable[[str], T]) -> T:
        for _ in range(_WHOLE_TRIES):
            whole = self._fetched()  # stays open: its path is that of a descriptor
            try:
                found = use(whole.path)
            except Exception:
                if whole.is_intact and os.fstat(whole.descriptor).st_nlink:  # HDF5 cannot open a deleted one
                    raise
                if self._whole is whole:
                    self._whole = None
            else:
                if whole.is_intact:
                    return found
        raise self._unstable(_WHOLE_TRIES)

    @property
    def has_path(self) -> bool:
        whole = self._whole
        return whole is not None and whole.is_intact

    def find_whole(self) -> bool:
        """Whether the cache has the whole object, whose file is then held open."""
        if not self.has_path:
            self._whole = self.cache.find_whole(self._name(0, self.size), self.size)
        return self._whole is not None

    def begin_whole(self) -> bool:
        """Begin to fetch the whole object. False: another process does so."""
        lock = self._lock_of_whole()
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return False
        if self.find_whole():
            lock.close()
        else:
            self._making = lock
            self.read_on_from(0)
        return True

    def _lock_of_whole(self) -> IO[str]:
        path = self.cache.path(self._name(0, self.size)) + ".lock"
        return in_folder(os.path.dirname(path), lambda: open(path, "a"))

    def _fetched(self) -> OpenFile:
        """The file of the whole object, which is made if there is none: by one process, while others wait."""
        whole = self._whole
        if whole is not None and whole.is_intact:
            return whole
        name = self._name(0, self.size)
        with self._making or self._lock_of_whole() as lock:
            self._making = None
            fcntl.flock(lock, fcntl.LOCK_EX)  # that of a killed process is gone
            whole = self.cache.find_whole(name, self.size)
            if whole is None:
                with self.open(sequential=True) as source:
                    whole = self.cache.make_whole(name, self.size, source)
                for number, segment in enumerate(self._segments):
                    self.cache.drop(segment, self._segment(number))
        self._whole = whole
        return whole


def fetch_whole(files: Sequence[RemoteFile]) -> None:
    """Make files of whole objects, fetched ahead. FeedError: also if the cache is too small for all of them."""
    absent = [file for file in files if not file.find_whole()]
    size, limit_bytes = sum(file.size for file in files), files[0].cache.limit_bytes
    if absent and size > limit_bytes:
        raise FeedError(
            "files of this format are opened by path, so the cache must hold all of them, and they have "
            f"{size} bytes where cache_bytes={limit_bytes}; raise cache_bytes of feedline.Store, or convert "
            "them to TFRecord, of which parts are read",
            stage="read",
            file=absent[0].name,
        )
    if absent:
        _log.info("%d objects, %d bytes in all, are fetched whole", len(absent), sum(file.size for file in absent))
    begun = 0
    try:
        for number, file in enumerate(absent):
            while begun < len(absent) and (
                begun <= number
                or not file.cache.is_too_early(sum(each.size for each in absent[number : begun + 1]), 0)
            ):
                if not absent[begun].begin_whole():
                    break  # so that a process that waits for another one has begun no file
                begun += 1
            begun = max(begun, number + 1)
            file.path()
    except BaseException:
        for file in absent:
            file.close()
        raise


def pieces_of(address: str, version: Version, start: int, stop: int) -> list[tuple[str, int, int]]:
    """Bytes of an object as files of the cache of up to 4 MiB: name, start and stop of each."""
    starts = range(start, stop, REQUEST_BYTES)
    ends = [min(at + REQUEST_BYTES, stop) for at in starts]
    return [(name_of(address, version.tag, *part), *part) for part in zip(starts, ends, strict=True)]


async def cached(cache: Cache, options: Store, url: Url, version: Version, start: int, stop: int) -> bytes:
    """Bytes `start` to `stop` of an object, from the cache, or else fetched and put there."""

    async def piece(name: str, start: int, stop: int) -> bytes:
        found = await asyncio.to_thread(cache.get, name, stop - start)
        fetcher().counts.cached += found is not None
        if found is None:
            found = await fetch(url, version, start, stop, options.patience_s)
            await asyncio.to_thread(cache.put, name, found)
        return found

    return b"".join(await gathered(piece(*each) for each in pieces_of(str(url), version, start, stop)))


def open_objects(urls: Sequence[str], options: Store) -> list[RemoteFile]:
    """Objects of their present versions, which are all asked for at once: each alone would cost the latency."""
    cache_of(options)  # before requests

    async def version(url: Url) -> Version:
        try:
            return await version_of(url, options.patience_s)
        except FileNotFoundError:
            await client_of(url.base).check_bucket(options.patience_s)
            raise

    parsed = [Url.parse(url) for url in urls]
    versions = fetcher().run(gathered(map(version, parsed))).result()
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
            self._file.read_on_from(at)
        if self._sequential or wanted > _EXACT_BYTES or self._file.comes(at, at + wanted):
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
