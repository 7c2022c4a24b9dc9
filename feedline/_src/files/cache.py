"""The cache on local disk: files with ranges of objects, shared by all processes and jobs of a host.

A *cache file* holds a range of bytes of one version of an object, and is named by a digest of address, version and
range. It is sparse, and filled in blocks of 2 MiB, in any order and by any process. First comes the data, then one
entry per block (a mark and its CRC-32, written after the block), then an id. So truncating a file destroys its id,
and a killed process leaves no mark for half a block. A file without an id, or with a wrong checksum, is deleted.
Files are opened for each read, so that a deleted one gives its space back.

A *whole file* is an object for a library that opens files by path, so nothing follows its data. A complete
one has the modification time `_COMPLETE_NS`, in 1970, which any write changes. Sources lock it while they use it,
and a locked file is not evicted.

The least recently used files are evicted first, by the time of access. It is set explicitly, since many file
systems do not keep it.
"""

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
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.files.fetcher import MOST, fetcher
from feedline._src.files.file import Descriptor, FileVersion, OpenFile, check_may_open, pread
from feedline._src.files.store import Store

T = TypeVar("T")
BLOCK_BYTES = 1 << 21  # larger ones delay the first shuffled batch on a slow link: each of its rows costs a block
AHEAD = 0.25  # the share of the cache for blocks that were fetched ahead and not read yet
_LARGEST_SEGMENT_BYTES = 1 << 26
_SEGMENTS = 32  # at least this number of cache files fits into a cache: each is evicted whole
_TRIES = 100  # then give up: another program deletes the folder each time just before a file is made in it
_ENTRY, _MARK = struct.Struct("<4sI"), b"here"  # mark, checksum
_MAGIC, _ID_BYTES = b"feedlin2", 16
_WHOLE, _PART, _LOCK = ".whole", ".part", ".lock"
_COMPLETE_NS = 10**9
_KEPT = 0.9  # the share of the limit that remains after an eviction, so that not every block causes one
_STORED = 1 / 32  # after storing this share of the limit, a process counts all files: others store blocks, too
_TOUCH_NS = 60 * 10**9  # an access within this time of the last one is not noted


def name_of(address: str, tag: str, start: int, stop: int) -> str:
    """The name of the file for a range of bytes of a version of an object."""
    return hashlib.sha256(f"2\n{address}\n{tag}\n{start}-{stop}".encode()).hexdigest()[:40]


def in_folder(folder: str, use: Callable[[], T]) -> T:
    """Call `use`, which needs the folder, and return its result. The folder is made as often as it is missing."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # the latter is of os.makedirs
            os.makedirs(folder, exist_ok=True)
            return use()
    raise FileNotFoundError(errno.ENOENT, "the folder is deleted again and again, or a file lies there", folder)


class Verified(NamedTuple):
    """Blocks of the cache file with this id that are known to be right: written or compared by this process."""

    id: bytes
    blocks: npt.NDArray[np.bool_]

    @classmethod
    def none(cls, size: int, id: bytes = b"") -> Verified:
        return cls(id, np.zeros(-(-size // BLOCK_BYTES), bool))


class CacheFile(Descriptor):
    """An open cache file with `size` bytes of data.

    Args:
      verified: what this process knew of the file of this name; it is dropped if this is another file.
    """

    def __init__(self, path: str, descriptor: int, size: int, verified: Verified | None = None) -> None:
        super().__init__(descriptor)
        self.path, self.size = path, size
        self._id_at = size + _ENTRY.size * -(-size // BLOCK_BYTES)
        self.verified = Verified.none(size, self._read_id())
        if verified is not None and verified.id == self.verified.id:
            self.verified = verified

    def _read_id(self) -> bytes:
        found = os.pread(self.descriptor, _ID_BYTES, self._id_at)
        return found if len(found) == _ID_BYTES and found.startswith(_MAGIC) else b""

    def begin(self) -> None:
        """Give a new file its length and its id."""
        os.ftruncate(self.descriptor, self.size)
        id = _MAGIC + secrets.token_bytes(_ID_BYTES - len(_MAGIC))
        os.pwrite(self.descriptor, id, self._id_at)
        self.verified = Verified.none(self.size, id)

    @property
    def is_intact(self) -> bool:
        """Whether nobody has truncated it. If so, what was read before is right."""
        return self.verified.id != b"" and self._read_id() == self.verified.id

    def block(self, block: int) -> bytes | None:
        """A block that is there with the right checksum. If that is wrong, the file is deleted."""
        entry = os.pread(self.descriptor, _ENTRY.size, self.size + _ENTRY.size * block)
        if entry[: len(_MARK)] != _MARK:
            return None
        start = block * BLOCK_BYTES
        data = pread(self.descriptor, min(BLOCK_BYTES, self.size - start), start)
        if entry != _ENTRY.pack(_MARK, zlib.crc32(data)):
            self.unlink()
            return None
        self.verified.blocks[block] = True
        return data

    def has(self, block: int) -> bool:
        return bool(self.verified.blocks[block]) or self.block(block) is not None

    def write_block(self, block: int, data: memoryview) -> None:
        """Write a block, then its entry."""
        self.write(data, block * BLOCK_BYTES)
        os.pwrite(self.descriptor, _ENTRY.pack(_MARK, zlib.crc32(data)), self.size + _ENTRY.size * block)
        self.verified.blocks[block] = True

    def unlink(self) -> None:
        """Delete the file, unless another one lies at its path."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                os.unlink(self.path)


class Cache:
    """A folder of files with a size limit. Thread-safe, and safe with other processes.

    All methods raise a FeedError if the folder cannot be written, or too many files are open.

    Args:
      limit_bytes: of all files; None: half of the sum of the free space and the cache's present size. A process
        may exceed it by a thirty-second.
    """

    def __init__(self, folder: str, limit_bytes: int | None) -> None:
        self._folder = os.path.join(folder, "blocks")
        with self._checked():
            free = in_folder(self._folder, functools.partial(shutil.disk_usage, self._folder)).free
            self.limit_bytes = (free + self._size()) // 2 if limit_bytes is None else limit_bytes
        fitting = 1 << (self.limit_bytes // _SEGMENTS).bit_length() >> 1
        self.segment_bytes = min(_LARGEST_SEGMENT_BYTES, max(BLOCK_BYTES, fitting))
        self._uncounted: float = self.limit_bytes
        """About how many bytes this process has stored since it counted the files; at first more than allowed."""

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name[:2], name)

    def find(self, name: str, size: int, verified: Verified | None = None) -> CacheFile | None:
        """The cache file of this name; None: there is none."""
        path = self.path(name)
        with self._checked():
            try:
                found = CacheFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), size, verified)
            except FileNotFoundError:
                return None
            touch(found.descriptor)
        if found.verified.id:
            return found
        found.unlink()
        return None

    def open(self, name: str, size: int, verified: Verified | None = None) -> CacheFile:
        """The cache file of this name, which is made if there is none."""
        found = self.find(name, size, verified)
        if found is None:
            path, flags = self.path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            with self._checked():
                descriptor = in_folder(os.path.dirname(path), lambda: os.open(path, flags, 0o600))
                found = CacheFile(path, descriptor, size, verified)
                if not found.verified.id:  # with an id, another process has just made it
                    self._with_space(found.begin)
        return found

    def write(self, file: CacheFile, block: int, data: memoryview) -> None:
        """Write a block of a file, and evict others if need be."""
        self.store(len(data), lambda: file.write_block(block, data))

    def get(self, name: str, size: int) -> bytes | None:
        """All bytes of a cache file; None if some of them are not there."""
        file = self.find(name, size)
        if file is None:
            return None
        parts = [file.block(block) for block in range(len(file.verified.blocks))]
        return b"".join(part for part in parts if part is not None) if None not in parts else None

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, which is then in use."""
        try:
            touch(self.path(name))
        except FileNotFoundError:
            return False
        return True

    def is_too_early(self, needed_bytes: int, ahead: int) -> bool:
        """Whether a batch that needs these bytes `ahead` batches later should not be fetched yet.

        The link is busy enough, or the batches until then exceed a quarter of the cache, and could be evicted
        before they are read.
        """
        return (ahead + 1) * needed_bytes > self.limit_bytes * AHEAD or fetcher().in_flight >= MOST

    # --- whole files ---

    def whole(self, name: str, size: int, download: Callable[[Descriptor], None]) -> OpenFile:
        """The whole file of an object, locked while it is open. One process downloads it, while others wait.

        Args:
          download: writes all bytes to an open file.

        Raises:
          FeedError: also if there is no room for it beside other locked files.
        """
        path = self.path(name) + _WHOLE
        with self._checked():
            for _ in range(_TRIES):
                if (found := _find_whole(path, size)) is not None:
                    return found
                self._make_whole(path, size, download)
            raise FileNotFoundError(errno.ENOENT, "files are deleted again and again", path)

    def _make_whole(self, path: str, size: int, download: Callable[[Descriptor], None]) -> None:
        lock_path, flags = path + _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        lock = Descriptor(in_folder(os.path.dirname(path), lambda: os.open(lock_path, flags, 0o600)))
        # not a lock of the file itself, which the first process keeps locked for as long as it uses it
        fcntl.flock(lock.descriptor, fcntl.LOCK_EX)  # that of a killed process is released
        if not _lies_at(lock_path, lock) or os.path.exists(path):  # another process has made the file meanwhile
            return
        part = f"{path}.{secrets.token_hex(4)}{_PART}"
        try:
            self._make_room(size)
            file = Descriptor(in_folder(os.path.dirname(path), lambda: os.open(part, flags, 0o600)))
            fcntl.flock(file.descriptor, fcntl.LOCK_EX)  # an eviction leaves it alone
            download(file)
            os.utime(file.descriptor, ns=(time.time_ns(), _COMPLETE_NS))
            with contextlib.suppress(FileNotFoundError):  # it was deleted
                os.rename(part, path)
        finally:
            for left in (part, lock_path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(left)
            # at once: the traceback of an error keeps the descriptor open for as long as somebody has the error
            fcntl.flock(lock.descriptor, fcntl.LOCK_UN)

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

    # --- the limit ---

    def store(self, size: int, write: Callable[[], None]) -> None:
        """Call `write`, which adds these bytes to a file, and evict files if need be."""
        with self._checked():
            self._with_space(write)
            self._uncounted += size
            if self._uncounted > self.limit_bytes * _STORED:
                self._uncounted = 0
                self._evict(self.limit_bytes)

    def _with_space(self, write: Callable[[], None]) -> None:
        """Call `write`. While the disk is full, half of the cache is evicted, as long as there is any."""
        while True:
            try:
                return write()
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                size = self._size()
                if self._evict(size // 2) >= size:
                    raise

    def _size(self) -> int:
        return sum(size for _, size, _ in self._found())

    def _found(self) -> Iterator[tuple[float, int, str]]:
        """Time of the last use, space on the disk, and path of each file. Other programs may delete them."""
        with contextlib.suppress(FileNotFoundError):
            for folder in list(os.scandir(self._folder)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for entry in os.scandir(folder):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            yield max(status.st_atime, status.st_mtime), status.st_blocks * 512, entry.path

    def _evict(self, limit: int) -> int:
        """Delete the least recently used files, unless all fit into the limit. Returns the bytes that remain."""
        lock_path = os.path.join(self._folder, "lock")
        with in_folder(self._folder, lambda: open(lock_path, "a")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process at a time
            found = sorted(self._found())
            size = sum(each for _, each, _ in found)
            wanted = limit if size <= limit else limit * _KEPT
            for _, each, path in found:
                if size <= wanted:
                    break
                if _delete(path):
                    size -= each
        return size

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            check_may_open(error, self._folder)
            raise FeedError(
                f"what is read from a store is kept in a cache on local disk, and {self._folder} cannot be "
                f"written ({error.strerror}); set FEEDLINE_CACHE, or feedline.Store(cache=...), to a folder of "
                "your own on a disk with space",
                stage="read",
                file=self._folder,
            ) from error


_caches: weakref.WeakValueDictionary[tuple[str, int | None], Cache] = weakref.WeakValueDictionary()


def cache_of(options: Store) -> Cache:
    """The cache of a source. Sources with the same folder and limit share one, since each counts the files."""
    key = options.folder, options.cache_bytes
    return _caches.get(key) or _caches.setdefault(key, Cache(*key))


def touch(file: int | str) -> FileVersion:
    """Note that a file is in use, so that it is not evicted soon. Returns its version, which stays the same."""
    status, now = os.stat(file), time.time_ns()
    if now - max(status.st_atime_ns, status.st_mtime_ns) > _TOUCH_NS:
        os.utime(file, ns=(now, status.st_mtime_ns))
    return FileVersion(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _find_whole(path: str, size: int) -> OpenFile | None:
    """The complete whole file at a path, locked while it is open. A file that somebody wrote to is deleted."""
    try:
        file = OpenFile(path)
    except FileNotFoundError:
        return None
    fcntl.flock(file.descriptor, fcntl.LOCK_SH)  # an eviction holds the lock for a moment only
    if not _lies_at(path, file):
        return None
    if (file.version.size_bytes, file.version.modified_ns) != (size, _COMPLETE_NS):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return None
    touch(file.descriptor)
    return file


def _lies_at(path: str, file: Descriptor) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.stat(path), os.fstat(file.descriptor))
    return False


def _delete(path: str) -> bool:
    """Delete a file, unless it is a whole one that a process has locked. Returns whether it is gone."""
    try:
        with contextlib.ExitStack() as stack:
            if path.endswith((_WHOLE, _PART, _LOCK)):
                fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:  # it is locked, or belongs to another user
        return False
    return True
