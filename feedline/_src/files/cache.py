"""The cache on local disk: files with bytes of objects, shared by all processes and jobs of a host.

A file holds a range of one version of an object, and is named by a digest of address, version and range. It is
sparse, and filled by blocks of 2 MiB in any order, by any process. Behind the bytes lie an entry of 8 bytes for
each block (a mark and its CRC-32, written after the block) and, at the very end, an id. So whoever truncates a
file destroys its id, and a process that was killed leaves no mark for half a block.

A file without its id, or with a block whose checksum is wrong, is deleted and begun anew. Eviction deletes files
that were not used for the longest time; the time of modification says when that was. Anybody may delete files, or
the folder, at any time: what is open stays readable.

A library that opens files by path gets a whole object in a file without anything behind it, whose entries lie in
another file. Whoever uses it holds a lock of it, and a locked file is not evicted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import secrets
import shutil
import struct
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.fetcher import MOST, fetcher
from feedline._src.files.file import Descriptor, LruCache, check_may_open, pread
from feedline._src.files.store import Store

T = TypeVar("T")
BLOCK_BYTES = 1 << 21
"""A row of a shuffled batch costs a block the first time: larger ones delay the first batch on a slow link."""
AHEAD = 0.25
"""The share of the cache that batches fill which were fetched and not read yet."""
_LARGEST_SEGMENT_BYTES = 1 << 26
_SEGMENTS = 32
"""The least number of segments that fit into a cache: each is evicted whole."""
_TRIES = 100
"""Who deletes a folder may do so again and again, each time just before a file is made in it."""
_ENTRY = struct.Struct("<4sI")  # mark, checksum
_MARK = b"here"
_END = struct.Struct("<8s8s")  # magic, id
_MAGIC = b"feedlin2"
_WHOLE, _ENTRIES = ".whole", ".blocks"
LOCK = ".lock"
"""Of a file that a process holds while it fetches a whole object."""
_OLD_S = 3600.0
"""A temporary file, or a lock that nobody holds, that is older was left by a process that was killed."""
_KEPT = 0.9
"""The share of the limit that remains after an eviction, so that not every block that is stored causes one."""
_STORED = 1 / 32
"""The share of the limit after which a process counts the files again: others store blocks, too."""
_NAMELESS_S = 1.0
_MAKING = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC


def name_of(address: str, tag: str, start: int, stop: int) -> str:
    """The name of the file for a range of bytes of a version of an object."""
    return hashlib.sha256(f"2\n{address}\n{tag}\n{start}-{stop}".encode()).hexdigest()[:40]


def in_folder(folder: str, use: Callable[[], T]) -> T:
    """What `use` returns, which needs the folder. It is made, once more if somebody deletes it meanwhile."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # the latter is of os.makedirs
            os.makedirs(folder, exist_ok=True)
            return use()
    os.makedirs(folder, exist_ok=True)
    return use()


class CacheFile(Descriptor):
    """An open file of the cache. Thread-safe.

    Args:
      path: where it lies, if nobody has deleted it.
      descriptor: of the bytes.
      size: of the bytes.
      entries: the path of a file for the entries, which is made if need be; None: they lie behind the bytes.

    Attributes:
      id: of the file, which no other file has.
      verified: for each block, whether this process has compared its checksum, or written it.
    """

    def __init__(self, path: str, descriptor: int, size: int, entries: str | None = None) -> None:
        super().__init__(descriptor)
        self.path, self.size = path, size
        self._beside = None if entries is None else Descriptor(os.open(entries, _MAKING, 0o600))
        self._entries = descriptor if self._beside is None else self._beside.descriptor
        self._entries_at = size if self._beside is None else 0
        self._end_at = self._entries_at + _ENTRY.size * -(-size // BLOCK_BYTES)
        self.verified = np.zeros(-(-size // BLOCK_BYTES), bool)
        self._opened = time.monotonic()
        self.id = os.pread(self._entries, _END.size, self._end_at)

    @property
    def is_intact(self) -> bool:
        """Whether nobody has truncated it: what was read before is right."""
        return self.is_begun and os.pread(self._entries, _END.size, self._end_at) == self.id

    @property
    def is_begun(self) -> bool:
        """Whether it had an id when it was opened."""
        return len(self.id) == _END.size and self.id.startswith(_MAGIC)

    @property
    def is_gone(self) -> bool:
        """Whether it was evicted, or somebody deleted it.

        That is not looked at in its first second: a folder that is deleted all the time would keep a read that
        needs several blocks from ever ending.
        """
        return time.monotonic() > self._opened + _NAMELESS_S and os.fstat(self.descriptor).st_nlink == 0

    def begin(self) -> None:
        """Make it as large as it will be, and give it an id."""
        os.ftruncate(self.descriptor, self.size)
        self.id = _END.pack(_MAGIC, secrets.token_bytes(8))
        os.pwrite(self._entries, self.id, self._end_at)

    def has(self, block: int) -> bool:
        """Whether a block is there, with the right checksum. If that is wrong, the file is deleted."""
        if self.verified[block]:
            return True
        entry = os.pread(self._entries, _ENTRY.size, self._entries_at + _ENTRY.size * block)
        if entry[: len(_MARK)] != _MARK:
            return False
        start = block * BLOCK_BYTES
        data = pread(self.descriptor, min(BLOCK_BYTES, self.size - start), start)
        if entry != _ENTRY.pack(_MARK, zlib.crc32(data)):
            self.unlink()
            return False
        self.verified[block] = True
        return True

    def contents(self) -> bytes | None:
        """All bytes; None: not all blocks are there. If a checksum is wrong, the file is deleted."""
        found = pread(self.descriptor, self._end_at, 0)
        data, entries = found[: self.size], found[self.size :]
        parts = [memoryview(data)[at : at + BLOCK_BYTES] for at in range(0, self.size, BLOCK_BYTES)]
        if entries == b"".join(_ENTRY.pack(_MARK, zlib.crc32(part)) for part in parts):
            return data
        if entries.count(_MARK) == len(parts):
            self.unlink()
        return None

    def has_no_damage(self) -> bool:
        """Whether the checksums of all blocks that are there are right."""
        for block in range(len(self.verified)):
            self.has(block)
        return os.fstat(self.descriptor).st_nlink > 0

    def write(self, block: int, data: memoryview) -> None:
        """Write a block, then its entry. OSError: the disk is full."""
        entry, at = _ENTRY.pack(_MARK, zlib.crc32(data)), block * BLOCK_BYTES
        while data:
            count = os.pwrite(self.descriptor, data, at)
            data, at = data[count:], at + count
        os.pwrite(self._entries, entry, self._entries_at + _ENTRY.size * block)
        self.verified[block] = True

    def finish(self) -> None:
        """Close the file of the entries. Called once all blocks are there."""
        self._beside = None

    def unlink(self) -> None:
        """Delete the file, unless another one lies at its path."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                os.unlink(self.path)

    def touch(self) -> bool:
        """Note that the file is in use. Returns whether the cache still has it."""
        return touched(self.path, self.id)


class Cache:
    """A folder of files with a size limit. Thread-safe, and safe with other processes.

    Args:
      folder: is created. Only its subfolder "blocks" is used.
      limit_bytes: of all files; None: half of the space that is free or that the cache has already. A process may
        exceed it by a thirty-second.

    Attributes:
      limit_bytes: of all files, as the disk counts them.
      segment_bytes: the most bytes of one file, except for whole objects.
      evictions: how many files this process has deleted.

    Raises:
      FeedError: the folder cannot be written.
    """

    def __init__(self, folder: str, limit_bytes: int | None) -> None:
        self._folder = os.path.join(folder, "blocks")
        self._lock = threading.Lock()
        try:
            free = in_folder(self._folder, functools.partial(shutil.disk_usage, self._folder)).free
            if limit_bytes is None:
                limit_bytes = (free + self._size()) // 2
        except OSError as error:
            raise self._unusable(error) from error
        self.limit_bytes = limit_bytes
        fitting = 1 << (limit_bytes // _SEGMENTS).bit_length() >> 1
        self.segment_bytes = min(_LARGEST_SEGMENT_BYTES, max(BLOCK_BYTES, fitting))
        self.evictions = 0
        self._uncounted: float = limit_bytes
        """Bytes that this process stored since it counted the files; at first more than is allowed. Held by
        _lock."""

    def path(self, name: str) -> str:
        """Where the file lies."""
        return os.path.join(self._folder, name[:2], name)

    def find(self, name: str, size: int) -> CacheFile | None:
        """The file of this name; None: there is none, or it is that of another user.

        Raises:
          FeedError: too many files are open.
        """
        path = self.path(name)
        try:
            found = CacheFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), size)
            if found.is_begun:
                os.utime(found.descriptor)
                return found
        except OSError as error:
            check_may_open(error, path)
            return None
        found.unlink()
        return None

    def open(self, name: str, size: int) -> CacheFile:
        """The file of this name, which is made if need be. Where it cannot have its name, it has none.

        Raises:
          FeedError: it cannot be written.
        """
        found = self.find(name, size)
        if found is not None:
            return found
        path = self.path(name)
        folder = os.path.dirname(path)

        def make() -> CacheFile:
            descriptor, temporary = in_folder(folder, lambda: tempfile.mkstemp(dir=folder, suffix=".tmp"))
            file = CacheFile(path, descriptor, size)
            try:
                file.begin()
                with contextlib.suppress(OSError):  # another process was faster; it has no links; …
                    os.link(temporary, path)
            finally:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
            return file

        try:
            made = self._with_space(make)
        except OSError as error:
            raise self._unusable(error) from error
        return self.find(name, size) or made

    def write(self, file: CacheFile, block: int, data: Any) -> None:
        """Write a block of a file, and evict others if need be.

        Raises:
          FeedError: it cannot be written.
        """
        view = memoryview(data).cast("B")
        try:
            self._with_space(lambda: file.write(block, view))
            with self._lock:
                self._uncounted += len(view)
                count = self._uncounted > self.limit_bytes * _STORED
                if count:
                    self._uncounted = 0
            if count:
                self._evict(self.limit_bytes)
        except OSError as error:
            raise self._unusable(error) from error

    def is_too_early(self, needed_bytes: int, ahead: int) -> bool:
        """Whether what is needed `ahead` batches later should not be fetched yet.

        It is too early while enough is being fetched to keep the link busy, and where the batches until then would
        not fit into a quarter of the cache, which could evict blocks before they are read.

        Args:
          needed_bytes: of a batch.
        """
        return (ahead + 1) * needed_bytes > self.limit_bytes * AHEAD or fetcher().in_flight >= MOST

    def get(self, name: str, size: int) -> bytes | None:
        """All bytes of a file; None: they are not there."""
        file = self.find(name, size)
        return None if file is None else file.contents()

    def put(self, name: str, data: bytes) -> None:
        """Store all bytes of a file. Errors as of `write`."""
        file = self.open(name, len(data))
        for start in range(0, len(data), BLOCK_BYTES):
            self.write(file, start // BLOCK_BYTES, memoryview(data)[start : start + BLOCK_BYTES])

    def has(self, name: str) -> bool:
        """Whether the cache has a file, which is then noted to be in use."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name))
            return True
        return False

    def open_whole(self, name: str, size: int) -> CacheFile:
        """A file of exactly `size` bytes, which stays in the cache while it is open. For one process at a time.

        Raises:
          FeedError: it cannot be written, or there is no room beside files that are in use.
        """
        path = self.path(name) + _WHOLE

        def opened() -> CacheFile:
            file = CacheFile(path, os.open(path, _MAKING, 0o600), size, path + _ENTRIES)
            fcntl.flock(file.descriptor, fcntl.LOCK_SH)  # an eviction holds it for a moment only
            if not os.path.samestat(os.stat(path), os.fstat(file.descriptor)):
                raise FileNotFoundError  # it was deleted before it was locked: once more
            return file

        try:
            file = in_folder(os.path.dirname(path), opened)
            status = os.fstat(file.descriptor)
            if status.st_size != size or not file.is_intact or not file.has_no_damage():
                for each in (path, path + _ENTRIES):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(each)
                file = in_folder(os.path.dirname(path), opened)
                self._make_room(size)
                self._with_space(file.begin)
                if size and hasattr(os, "posix_fallocate"):  # others count it, and a full disk is seen
                    self._with_space(functools.partial(os.posix_fallocate, file.descriptor, 0, size))
            else:
                os.utime(file.descriptor, ns=(time.time_ns(), status.st_mtime_ns))
        except OSError as error:
            raise self._unusable(error) from error
        return file

    def _make_room(self, size: int) -> None:
        kept = self._evict(max(0, self.limit_bytes - size))
        if kept + size > self.limit_bytes:
            raise FeedError(
                f"a file that a library opens by path is kept whole in the cache, and {size} bytes beside the "
                f"{kept} in use are more than its cache_bytes={self.limit_bytes}; raise cache_bytes of "
                "feedline.Store, or use another folder for the cache",
                stage="read",
                file=self._folder,
            )

    def _with_space(self, write: Callable[[], T]) -> T:
        """What `write` returns. While the disk is full, half of the cache is evicted, as long as there is any."""
        while True:
            evictions = self.evictions
            try:
                return write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._evict(self._size() // 2)
                if self.evictions == evictions:
                    raise

    def _size(self) -> int:
        return sum(size for _, size, _ in self._found())

    def _found(self) -> Iterator[tuple[float, int, str]]:
        """When it was used, the space that it takes, and the path of each file.

        Entries beside a file are part of it, and their few bytes do not count: files that fill the limit fit.
        """
        folders: list[os.DirEntry[str]] = []
        with contextlib.suppress(FileNotFoundError):  # somebody deletes the cache
            folders = list(os.scandir(self._folder))
        for folder in folders:
            found: dict[str, tuple[float, int]] = {}
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        if entry.name.endswith(_ENTRIES):
                            found.setdefault(entry.path.removesuffix(_ENTRIES), (status.st_mtime, 0))
                            continue
                        # the time of modification of a whole file says whether it was written to
                        used = status.st_atime if entry.name.endswith(_WHOLE) else status.st_mtime
                        found[entry.path] = used, status.st_blocks * 512
            for path, (used, size) in found.items():
                yield used, size, path

    def _evict(self, limit: int) -> int:
        """Delete the files that were not used for the longest time, unless all fit, and close them.

        Returns:
          The size of those that are left.
        """
        lock_path = os.path.join(self._folder, "lock")
        with in_folder(self._folder, lambda: open(lock_path, "a")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time; the lock of a killed process is gone
            found = sorted(self._found())
            size = sum(each for _, each, _ in found)
            old = time.time() - _OLD_S
            left, before = limit if size <= limit else limit * _KEPT, self.evictions
            for used, each, path in found:
                helps = path.endswith((".tmp", LOCK))
                if ((helps and used < old) or (not helps and size > left)) and _deleted(path):
                    size -= each
                    self.evictions += 1
        if self.evictions > before:
            with _opened_lock:
                opened = list(_opened)
            for some in opened:
                some.clear()
        return size

    def _unusable(self, error: OSError) -> FeedError:
        check_may_open(error, self._folder)
        return FeedError(
            f"what is read from a store is kept in a cache on local disk, and {self._folder} cannot be written "
            f"({error.strerror}); set FEEDLINE_CACHE, or feedline.Store(cache=...), to a folder on a disk with "
            f"space",
            stage="read",
            file=self._folder,
        )


_opened: weakref.WeakSet[LruCache[CacheFile]] = weakref.WeakSet()
_opened_lock = threading.Lock()


def close_evicted(opened: LruCache[CacheFile]) -> None:
    """Let each eviction of this process drop these open files, since those that it deletes would take space on.

    Others are opened again. A thread that reads a file keeps it open.
    """
    with _opened_lock:
        _opened.add(opened)


_caches: weakref.WeakValueDictionary[tuple[str, int | None], Cache] = weakref.WeakValueDictionary()


def cache_of(options: Store) -> Cache:
    """The cache of a source. Sources with the same folder and limit share one, since each counts the files.

    Raises:
      FeedError: the folder cannot be written.
    """
    key = options.folder, options.cache_bytes
    return _caches.get(key) or _caches.setdefault(key, Cache(*key))


def touched(path: str, id: bytes) -> bool:
    """Whether the file with this id lies at `path`, as long as it was, which is then noted to be in use."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        file.seek(-len(id), os.SEEK_END)
        if file.read() == id:
            os.utime(file.fileno())
            return True
    return False


def _deleted(path: str) -> bool:
    """Delete a file, a whole one with its entries, unless a process has locked it. Returns whether it is gone."""
    try:
        if not path.endswith((_WHOLE, LOCK)):
            os.unlink(path)
            return True
        with open(path, "ab") as file:  # makes it, where entries were left alone: nobody can use them meanwhile
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.stat(path), os.fstat(file.fileno())):
                return False  # it was made anew
            if path.endswith(_WHOLE):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path + _ENTRIES)
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:  # it is locked, or belongs to another user
        return False
    return True
