"""`CachedRange`: bytes of an object, kept in one file of the cache, and fetched in blocks of 2 MiB.

The file is sparse; any process may fill any block, in any order. The file holds first the data, then one entry per
block (a mark and the block's CRC-32, written after the block), then an id. So truncating a file destroys its id,
and a killed process leaves no mark for a half-written block. A file without an id, or with a wrong checksum, is
deleted. Files are opened for each read, and closed after it, so that deleting a file frees its space.

A library that opens files by path needs a *whole file*: a complete cache file, renamed and truncated
after the data. Its modification time is set to 1970, so that any later write is noticed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import os
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.files.cache import BLOCK_BYTES, Cache, in_folder, touch, try_lock
from feedline._src.files.client import RemoteObject
from feedline._src.files.fetcher import REQUEST_BYTES, InFlight, fetcher, gathered, result_of
from feedline._src.files.file import Bytes, Descriptor, Indices, OpenFile, T, Version, pread

_ENTRY, _MARK = struct.Struct("<4sI"), b"here"  # mark, checksum
_MAGIC, _ID_BYTES = b"feedlin2", 16
_BLOCKS_A_REQUEST = REQUEST_BYTES // BLOCK_BYTES
_TRIES = 100  # before giving up, if another program changes the files of the cache during each read
_LOCK_POLL_S = 0.05
_WHOLE_NS = 10**9  # the modification time of whole files


class CacheFile(Descriptor):
    """An open cache file with `size` bytes of data.

    Attributes:
      id: the random id that the file had when it was opened; b"" if the file was new or truncated.
      verified: bool[blocks]: the blocks that this process has written to the file with this id, or compared with
        their checksums.
    """

    def __init__(self, path: str, descriptor: int, size: int) -> None:
        super().__init__(descriptor)
        self.path, self.size = path, size
        self.verified = np.zeros(-(-size // BLOCK_BYTES), bool)
        self._id_at = size + _ENTRY.size * len(self.verified)
        self.id = self._read_id()

    def _read_id(self) -> bytes:
        found = os.pread(self.descriptor, _ID_BYTES, self._id_at)
        return found if len(found) == _ID_BYTES and found.startswith(_MAGIC) else b""

    def begin(self) -> None:
        """Write the id of a new file. This also sets the file's length."""
        self.id = _MAGIC + secrets.token_bytes(_ID_BYTES - len(_MAGIC))
        os.pwrite(self.descriptor, self.id, self._id_at)

    @property
    def is_intact(self) -> bool:
        """Whether the file still has its id. If so, it was not truncated, and data read before is correct."""
        return self.id != b"" and self._read_id() == self.id

    def block(self, block: int) -> bytes | None:
        """Read a block. None: it is not stored, or its checksum is wrong; in that case the file is deleted."""
        entry = os.pread(self.descriptor, _ENTRY.size, self.size + _ENTRY.size * block)
        if entry[: len(_MARK)] != _MARK:
            return None
        start = block * BLOCK_BYTES
        data = pread(self.descriptor, min(BLOCK_BYTES, self.size - start), start)
        if entry != _ENTRY.pack(_MARK, zlib.crc32(data)):
            self.delete()
            return None
        self.verified[block] = True
        return data

    def has(self, block: int) -> bool:
        return bool(self.verified[block]) or self.block(block) is not None

    def write_block(self, block: int, data: memoryview) -> None:
        """Write a block, then its entry."""
        self.write(data, block * BLOCK_BYTES)
        os.pwrite(self.descriptor, _ENTRY.pack(_MARK, zlib.crc32(data)), self.size + _ENTRY.size * block)
        self.verified[block] = True

    def delete(self) -> None:
        """Delete the file, unless another file is at its path by now."""
        with contextlib.suppress(OSError):
            if self.lies_at(self.path):
                os.unlink(self.path)


class CachedRange:
    """Bytes `start` to `stop` of one version of an object. Thread-safe. For errors, see `Cache`."""

    def __init__(self, cache: Cache, stored: RemoteObject, start: int, stop: int) -> None:
        self._cache, self._object, self._start, self.size = cache, stored, start, stop - start
        text = f"2\n{stored.url}\n{stored.version.stamp}\n{start}-{stop}"
        self.path = cache.path(hashlib.sha256(text.encode()).hexdigest()[:40])
        self.blocks = range(-(-self.size // BLOCK_BYTES))
        self._requests: InFlight[int, None] = InFlight()  # by block
        self.forget()

    def forget(self) -> None:
        """Mark all blocks as not verified.

        `_verified` holds the id of the file that was opened last, and this file's verified blocks. The id is
        needed because a thread may have a deleted file open while another thread opens the new file.
        """
        self._verified = b"", np.zeros(len(self.blocks), bool)

    @property
    def verified(self) -> npt.NDArray[np.bool_]:
        """bool[blocks]: True for blocks that are known to be in the cache. Does not open the file."""
        if self._verified[0] and not os.path.exists(self.path):
            self.forget()
        return self._verified[1]

    # --- the file ---

    def find(self) -> CacheFile | None:
        """Open the cache file. None if there is none, or if it has no id."""
        with self._cache.checked(), contextlib.suppress(FileNotFoundError):
            found = CacheFile(self.path, os.open(self.path, os.O_RDWR | os.O_CLOEXEC), self.size)
            touch(found.descriptor)
            if found.id:
                return self._recognized(found)
            found.delete()
        self.forget()
        return None

    def open(self) -> CacheFile:
        """Open the cache file, and create it if there is none."""
        found, folder = self.find(), os.path.dirname(self.path)
        while found is None:
            found = self._cache.store(0, lambda: in_folder(folder, self._create)) or self.find()
        return self._recognized(found)

    def _create(self) -> CacheFile | None:
        """Create the cache file. None: another thread or process has just created it.

        The file gets its id before it appears at its path, since a file without an id is deleted as damaged.
        """
        new = f"{self.path}.{secrets.token_hex(4)}"
        file = CacheFile(new, os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), self.size)
        try:
            file.begin()
            os.link(new, self.path)
        except FileExistsError:
            return None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS):  # no hard links on this disk
                raise
            os.rename(new, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
        file.path = self.path
        return file

    def _recognized(self, file: CacheFile) -> CacheFile:
        """Return `file`. If it is the file that was opened last, keep what is known of its blocks."""
        id, verified = self._verified
        if id == file.id:
            file.verified = verified
        else:
            self._verified = file.id, file.verified
        return file

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """Read parts, which must end within the range. Blocks that are not in the cache are fetched."""
        return self._read(blocks_of(offsets, offsets + lengths), lambda file: file.read(offsets, lengths))

    def read_rows(self, offsets: Indices, places: Indices, out: Bytes) -> bool:
        """Read rows of one size, as `Descriptor.read_rows` does. Blocks that are not in the cache are fetched."""
        blocks = blocks_of(offsets, offsets + out.shape[1])
        return self._read(blocks, lambda file: file.read_rows(offsets, places, out))

    def _read(self, blocks: Indices, use: Callable[[CacheFile], T]) -> T:
        """Return `use(file)` for the cache file with these blocks. Tries again if it was truncated meanwhile."""
        for _ in range(_TRIES):
            file = self.find()
            if file is not None and all(map(file.has, blocks.tolist())):
                found = use(file)
                if file.is_intact:
                    return found
            del file  # close it before fetching again, since a deleted file frees its space once it is closed
            self.fetch_all(blocks.tolist())
        raise self.unstable(_TRIES)

    def unstable(self, times: int) -> FeedError:
        """The error if cache files are changed again and again, or evicted because the cache is too small."""
        return FeedError(
            "the files of a cache must stay as they are during a read, and those of "
            f"{self._object.url} were changed or evicted {times} times; raise cache_bytes of feedline.Store, or "
            "look for the program that writes to them",
            stage="read",
            file=str(self._object.url),
        )

    def write(self, blocks: Sequence[int], data: bytes) -> None:
        """Write adjacent blocks, and evict other files if necessary."""
        file, view = self.open(), memoryview(data)
        for i, block in enumerate(blocks):
            part = view[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]
            self._cache.store(len(part), functools.partial(file.write_block, block, part))

    def whole(self, cancelled: threading.Event | None = None) -> OpenFile:
        """Return the object's whole file, which is not evicted while it is open. The range must cover the object.

        One process of the host fetches the file, and the others wait. FeedError: also if the cache has no room
        for it beside other locked files. FeedError or CancelledError: `cancelled` was set meanwhile.
        """
        path = f"{self.path}.whole"
        for _ in range(_TRIES):
            with self._cache.checked(), contextlib.suppress(FileNotFoundError):
                whole = OpenFile(path)
                fcntl.flock(whole.descriptor, fcntl.LOCK_SH)
                whole.version = Version.of(whole.descriptor)  # read under the lock, since `_make_whole` changes it
                if whole.is_at_its_path and whole.version[:2] == (self.size, _WHOLE_NS):
                    touch(whole.descriptor)
                    return whole
                os.unlink(path)  # somebody wrote to it
            file = self.open()
            try:
                if not try_lock(file.descriptor):  # another process or thread fetches it
                    while not try_lock(file.descriptor, fcntl.LOCK_SH):
                        fetcher().check_may_run()  # raises an error at exit, which must not wait
                        if cancelled is not None and cancelled.is_set():
                            raise concurrent.futures.CancelledError
                        time.sleep(_LOCK_POLL_S)
                elif file.lies_at(self.path) and not os.path.exists(path):  # another process may have made `path`
                    self._make_whole(file, path, cancelled)
            finally:  # closing also unlocks it, but a stored exception's traceback may keep it open
                fcntl.flock(file.descriptor, fcntl.LOCK_UN)
        raise self.unstable(_TRIES)

    def _make_whole(self, file: CacheFile, path: str, cancelled: threading.Event | None) -> None:
        """Fetch all blocks, and turn the cache file into a whole file, unless somebody has deleted it."""
        self._cache.make_room(self.size - os.fstat(file.descriptor).st_blocks * 512)
        try:
            self.fetch_all(self.blocks, cancelled)
        finally:
            self.cancel()  # so that an interrupt of this thread also stops its requests
        if file.lies_at(self.path) and all(map(file.has, self.blocks)) and file.is_intact:
            with self._cache.checked(), contextlib.suppress(FileNotFoundError):
                os.rename(self.path, path)  # first, since at its old path, a file without an id is deleted
                os.ftruncate(file.descriptor, self.size)
                os.utime(file.descriptor, ns=(time.time_ns(), _WHOLE_NS))

    # --- fetch ---

    def fetch(self, blocks: Iterable[int]) -> list[concurrent.futures.Future[None]]:
        """Start fetching these ascending blocks, except blocks that are known to be in the cache.

        Returns the requests, including earlier ones for blocks that are already in flight.
        """
        verified = self.verified
        missing = [block for block in blocks if not verified[block]]
        requests = self._requests.start(
            missing, lambda new: [(run, self._fetch_missing(run)) for run in _requests(new)]
        )
        return list(dict.fromkeys(requests.values()))

    def fetch_all(self, blocks: Iterable[int], cancelled: threading.Event | None = None) -> None:
        """Fetch these ascending blocks, and wait for them. FeedError: also if `cancelled` is already set."""
        requests = self.fetch(blocks)
        if cancelled is not None and cancelled.is_set():  # it may have been set before these requests began
            self.cancel()
        for request in requests:
            result_of(request, self._object.url)

    def is_near(self, block: int) -> bool:
        """Whether a block is known to be in the cache, or is in flight."""
        return bool(self.verified[block]) or block in self._requests

    def cancel(self) -> None:
        """Cancel the requests in flight."""
        self._requests.cancel()

    async def _fetch_missing(self, blocks: Sequence[int]) -> None:
        """Fetch adjacent blocks into the cache, except blocks that another process has stored already."""

        def find() -> list[int]:
            file = self.open()
            return [block for block in blocks if not file.has(block)]

        missing = await asyncio.to_thread(find)
        fetcher().counts.cached += len(blocks) - len(missing)
        for some in _requests(missing):
            await self._fetch(some)

    def read_all(self) -> bytes | None:
        """Read all bytes from the cache. None if the cache lacks some of them."""
        if self.size == 0:
            return b""
        file = self.find()
        parts = [] if file is None else [part for part in map(file.block, self.blocks) if part is not None]
        is_there = len(parts) == len(self.blocks)
        fetcher().counts.cached += len(parts) if is_there else 0
        return b"".join(parts) if is_there else None

    async def all(self) -> bytes:
        """Return all bytes, from the cache if it has all of them. Otherwise fetch and store them."""
        found = await asyncio.to_thread(self.read_all)
        if found is None:
            found = b"".join(await gathered(map(self._fetch, _requests(self.blocks))))
        return found

    async def _fetch(self, blocks: Sequence[int]) -> bytes:
        """Fetch adjacent blocks, store them in the cache, and return their bytes."""
        at, end = blocks[0] * BLOCK_BYTES, min((blocks[-1] + 1) * BLOCK_BYTES, self.size)
        data = await self._object.fetch(self._start + at, self._start + end)
        await asyncio.to_thread(self.write, blocks, data)
        return data


def blocks_of(starts: Indices, stops: Indices) -> Indices:
    """Return the ascending numbers of all blocks that overlap bytes `starts[i]` to `stops[i]` for any i."""
    starts, stops = starts[stops > starts], stops[stops > starts]
    first, last = starts // BLOCK_BYTES, (stops - 1) // BLOCK_BYTES
    longest = int((last - first).max(initial=0))
    return np.unique(np.minimum(np.arange(longest + 1) + first[:, None], last[:, None]))


def _requests(blocks: Iterable[int]) -> Iterator[list[int]]:
    """Split ascending blocks into lists of adjacent blocks; one request fetches each list."""
    runs = itertools.groupby(enumerate(blocks), lambda each: (each[1] // _BLOCKS_A_REQUEST, each[1] - each[0]))
    return ([block for _, block in run] for _, run in runs)
