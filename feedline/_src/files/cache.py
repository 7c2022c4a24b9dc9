"""The cache on local disk: files with bytes of objects, shared by all processes and jobs of a host.

A file holds a range of one version of an object, and is named by a digest of address, version and range. It is
sparse, and filled by blocks of 2 MiB in any order, by any process. Behind the bytes lie an entry of 8 bytes for
each block (a mark and its CRC-32, written after the block) and, at the very end, an id. So whoever truncates a
file destroys its id, and a process that was killed leaves no mark for half a block. A file without its id, or with
a block whose checksum is wrong, is deleted and begun anew. Anybody may delete files: what is open stays readable.

A library that opens files by path gets a whole object in a file with nothing behind its bytes. Its time of
modification is a checksum of them. Whoever uses it holds a lock on it, and a locked file is not evicted."""

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
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError
from feedline._src.files.fetcher import MOST, fetcher
from feedline._src.files.file import Descriptor, FileVersion, LruCache, OpenFile, check_may_open, pread
from feedline._src.files.store import Store

T = TypeVar("T")
BLOCK_BYTES = 1 << 21  # larger ones delay the first shuffled batch on a slow link: each of its rows costs a block
AHEAD = 0.25  # the share of the cache for blocks that were fetched ahead and not read yet
OPEN_FILES = 128
_LARGEST_SEGMENT_BYTES = 1 << 26
_SEGMENTS = 32  # the least number of segments that fit into a cache: each is evicted whole
_TRIES = 100  # who deletes a folder may do so again and again, each time just before a file is made in it
_ENTRY, _MARK = struct.Struct("<4sI"), b"here"  # mark, checksum
_MAGIC, _ID_BYTES = b"feedlin2", 16
_WHOLE, _UNFINISHED = ".whole", ".tmp"
_OLD_S = 3600.0  # an unfinished file that is older was left by a process that was killed
_KEPT = 0.9  # the share of the limit that remains after an eviction, so that not every block causes one
_STORED = 1 / 32  # the share of the limit after which a process counts the files again: others store blocks, too
_EVERY_S = 20.0


def name_of(address: str, tag: str, start: int, stop: int) -> str:
    """The name of the file for a range of bytes of a version of an object."""
    return hashlib.sha256(f"2\n{address}\n{tag}\n{start}-{stop}".encode()).hexdigest()[:40]


def in_folder(folder: str, use: Callable[[], T]) -> T:
    """What `use` returns, which needs the folder. It is made, once more if somebody deletes it meanwhile."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # the latter is of os.makedirs
            os.makedirs(folder, exist_ok=True)
            return use()
    raise FileNotFoundError(errno.ENOENT, "somebody deletes the folder, or a file lies there", folder)


class CacheFile(Descriptor):
    """An open file of the cache. `id` is of this very file, or b""; `verified`, bool[blocks], says which blocks
    this process has written, or compared with their checksums.
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

    @property
    def is_intact(self) -> bool:
        """Whether nobody has truncated it: what was read before is right."""
        return self.id != b"" and self._read_id() == self.id

    def begin(self) -> None:
        os.ftruncate(self.descriptor, self.size)
        self.id = _MAGIC + secrets.token_bytes(_ID_BYTES - len(_MAGIC))
        os.pwrite(self.descriptor, self.id, self._id_at)

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
        self.verified[block] = True
        return data

    def has(self, block: int) -> bool:
        return bool(self.verified[block]) or self.block(block) is not None

    def write(self, block: int, data: memoryview) -> None:
        """Write a block, then its entry."""
        _pwrite(self.descriptor, data, block * BLOCK_BYTES)
        os.pwrite(self.descriptor, _ENTRY.pack(_MARK, zlib.crc32(data)), self.size + _ENTRY.size * block)
        self.verified[block] = True

    def unlink(self) -> None:
        """Delete the file, unless another one lies at its path."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.descriptor)):
                os.unlink(self.path)


class Cache:
    """A folder of files with a size limit. Thread-safe, and safe with other processes.

    All methods raise a FeedError if the folder cannot be written, or too many files are open.

    Args:
      limit_bytes: of all files; None: half of the space that is free or that the cache has already. A process may
        exceed it by a thirty-second.

    Attributes:
      evictions: how many files this process has deleted.
      turn: changes whenever files may have been found to be gone.
      opened: the segments that were read last.
      known: of each segment that was open, its id and `CacheFile.verified`, which outlast its descriptor.
    """

    def __init__(self, folder: str, limit_bytes: int | None) -> None:
        self._folder = os.path.join(folder, "blocks")
        self._lock = threading.Lock()
        with self._checked():
            free = in_folder(self._folder, functools.partial(shutil.disk_usage, self._folder)).free
            self.limit_bytes = (free + self._size()) // 2 if limit_bytes is None else limit_bytes
        fitting = 1 << (self.limit_bytes // _SEGMENTS).bit_length() >> 1
        self.segment_bytes = min(_LARGEST_SEGMENT_BYTES, max(BLOCK_BYTES, fitting))
        self.evictions = self.turn = 0
        self.opened: LruCache[CacheFile] = LruCache(OPEN_FILES)
        self.known: dict[str, tuple[bytes, npt.NDArray[np.bool_]]] = {}
        self._uncounted: float = self.limit_bytes
        """Bytes that this process stored since it counted the files; at first more than allowed. Held by _lock."""
        self._maintained = time.monotonic()

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name[:2], name)

    def segment(self, name: str, size: int) -> CacheFile:
        """The open file of this name, which is made if need be, and stays open."""
        file = self.opened.get(name, lambda: self.open(name, size))
        id, verified = self.known.get(name, (b"", None))
        if verified is not file.verified:
            if verified is not None and id == file.id:
                file.verified |= verified
            self.known[name] = file.id, file.verified
        return file

    def drop(self, name: str, file: CacheFile | None = None) -> None:
        """Forget a segment that is gone, or delete the file of one that is damaged."""
        if file is not None:
            file.unlink()
        self.opened.clear()
        self.known.pop(name, None)
        self.turn += 1

    def maintain(self) -> None:
        """Every 20 s: forget segments that are gone, and open the others again, which notes that they are in
        use."""
        with self._lock:
            if time.monotonic() < self._maintained + _EVERY_S:
                return
            self._maintained = time.monotonic()
        self.opened.clear()
        for name in list(self.known):
            if not os.path.exists(self.path(name)):
                self.known.pop(name, None)
        self.turn += 1

    def find(self, name: str, size: int) -> CacheFile | None:
        """The file of this name; None: there is none, or it is that of another user."""
        path = self.path(name)
        try:
            found = CacheFile(path, os.open(path, os.O_RDWR | os.O_CLOEXEC), size)
            if found.id:
                os.utime(found.descriptor)
                return found
        except OSError as error:
            check_may_open(error, path)
            return None
        found.unlink()
        return None

    def open(self, name: str, size: int) -> CacheFile:
        """The file of this name, which is made if need be. Where it cannot have its name, it has none."""
        path = self.path(name)

        def make() -> CacheFile:
            descriptor, temporary = self._temporary(path)
            file = CacheFile(path, descriptor, size)
            try:
                file.begin()
                with contextlib.suppress(OSError):  # another process was faster; it has no links; …
                    os.link(temporary, path)
            finally:
                _deleted(temporary)
            return file

        found = self.find(name, size)
        if found is None:
            with self._checked():
                made = self._with_space(make)
            found = self.find(name, size) or made
        return found

    def _temporary(self, path: str) -> tuple[int, str]:
        folder = os.path.dirname(path)
        return in_folder(folder, lambda: tempfile.mkstemp(dir=folder, suffix=_UNFINISHED))

    def write(self, file: CacheFile, block: int, data: Any) -> None:
        """Write a block of a file, and evict others if need be."""
        view = memoryview(data).cast("B")
        self._store(len(view), lambda: file.write(block, view))

    def get(self, name: str, size: int) -> bytes | None:
        """All bytes of a file; None: they are not there."""
        file = self.find(name, size)
        parts: list[Any] = [] if file is None else [file.block(block) for block in range(len(file.verified))]
        return None if file is None or None in parts else b"".join(parts)

    def put(self, name: str, data: bytes) -> None:
        file = self.open(name, len(data))
        for start in range(0, len(data), BLOCK_BYTES):
            self.write(file, start // BLOCK_BYTES, memoryview(data)[start : start + BLOCK_BYTES])

    def has(self, name: str) -> bool:
        """Whether the cache has a file, which is then noted to be in use."""
        with contextlib.suppress(OSError):
            os.utime(self.path(name))
            return True
        return False

    def is_too_early(self, needed_bytes: int, ahead: int) -> bool:
        """Whether a batch that needs so many bytes `ahead` batches later should not be fetched yet.

        The link is busy enough, or the batches until then, in a quarter of the cache, could be evicted before they
        are read.
        """
        return (ahead + 1) * needed_bytes > self.limit_bytes * AHEAD or fetcher().in_flight >= MOST

    def find_whole(self, name: str, size: int) -> OpenFile | None:
        """The file of a whole object, which is not evicted while it is open; None: there is none."""
        path, checksum = self.path(name) + _WHOLE, 0
        with self._checked():
            try:
                file = OpenFile(path)
            except FileNotFoundError:
                return None
            fcntl.flock(file.descriptor, fcntl.LOCK_SH)  # an eviction holds it for a moment only
            for at in range(0, size, BLOCK_BYTES):
                checksum = zlib.crc32(pread(file.descriptor, BLOCK_BYTES, at), checksum)
            is_whole = (file.version.size_bytes, file.version.modified_ns) == (size, _time_of(checksum))
            if not is_whole or not os.fstat(file.descriptor).st_nlink:
                return None
            os.utime(file.descriptor, ns=(time.time_ns(), file.version.modified_ns))
        return _by_descriptor(file)

    def make_whole(self, name: str, size: int, source: BinaryIO) -> OpenFile:
        """A new file of a whole object, read from `source`. FeedError: also if there is no room beside others."""
        path, checksum = self.path(name) + _WHOLE, 0
        with self._checked():
            kept = self._evict(max(0, self.limit_bytes - size))
            if kept + size > self.limit_bytes:
                raise FeedError(
                    f"a file that a library opens by path is kept whole in the cache, and {size} bytes beside the "
                    f"{kept} in use are more than its cache_bytes={self.limit_bytes}; raise cache_bytes of "
                    "feedline.Store, or use another folder for the cache",
                    stage="read",
                    file=self._folder,
                )
            descriptor, temporary = self._temporary(path)
            file = OpenFile(path, descriptor=descriptor)
            try:
                for at in range(0, size, BLOCK_BYTES):
                    data = source.read(BLOCK_BYTES)
                    checksum = zlib.crc32(data, checksum)
                    self._store(len(data), functools.partial(_pwrite, descriptor, memoryview(data), at))
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                os.utime(descriptor, ns=(time.time_ns(), _time_of(checksum)))
                file.version = FileVersion.of(descriptor)
                with contextlib.suppress(FileNotFoundError):  # somebody has deleted it: it has no path then
                    os.rename(temporary, path)
                return _by_descriptor(file)
            finally:
                _deleted(temporary)

    def _store(self, size: int, write: Callable[[], None]) -> None:
        with self._checked():
            self._with_space(write)
            with self._lock:
                self._uncounted += size
                count = self._uncounted > self.limit_bytes * _STORED
                if count:
                    self._uncounted = 0
            if count:
                self._evict(self.limit_bytes)

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
        """When it was used, the space that it takes, and the path of each file; an unfinished one counts as empty.
        Somebody may delete them."""
        with contextlib.suppress(FileNotFoundError):
            for folder in list(os.scandir(self._folder)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for entry in os.scandir(folder):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            used = status.st_atime if entry.name.endswith(_WHOLE) else status.st_mtime
                            space = 0 if entry.name.endswith(_UNFINISHED) else status.st_blocks * 512
                            yield used, space, entry.path

    def _evict(self, limit: int) -> int:
        """Delete the least recently used files, unless all fit. Returns the size of whole files that stay."""
        lock_path, before, kept = os.path.join(self._folder, "lock"), self.evictions, 0
        with in_folder(self._folder, lambda: open(lock_path, "a")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time; the lock of a killed process is gone
            found = sorted(self._found())
            size = sum(each for _, each, _ in found)
            left, old = limit if size <= limit else limit * _KEPT, time.time() - _OLD_S
            for used, each, path in found:
                unwanted = used < old if path.endswith(_UNFINISHED) else size > left
                if unwanted and _deleted(path):
                    size -= each
                    self.evictions += 1
                    self.known.pop(os.path.basename(path), None)
                elif path.endswith(_WHOLE):
                    kept += each
        if self.evictions > before:
            self.opened.clear()
            self.turn += 1
        return kept

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            check_may_open(error, self._folder)
            raise FeedError(
                f"what is read from a store is kept in a cache on local disk, and {self._folder} cannot be "
                f"written ({error.strerror}); set FEEDLINE_CACHE, or feedline.Store(cache=...), to a folder on a "
                "disk with space",
                stage="read",
                file=self._folder,
            ) from error


_caches: weakref.WeakValueDictionary[tuple[str, int | None], Cache] = weakref.WeakValueDictionary()


def cache_of(options: Store) -> Cache:
    """The cache of a source. Sources with the same folder and limit share one, since each counts the files."""
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


def _pwrite(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, at)
        data, at = data[count:], at + count


def _by_descriptor(file: OpenFile) -> OpenFile:
    """Let its path lead to this very file even if another takes its place, where the system has such paths."""
    path = f"/proc/self/fd/{file.descriptor}"
    file.path = path if os.path.exists(path) else file.path
    return file


def _time_of(checksum: int) -> int:
    """The time of modification of a whole file, in ns: whole seconds before 2038."""
    return (checksum >> 2) * 10**9


def _deleted(path: str) -> bool:
    """Delete a file, unless it is a whole one that a process has locked. Returns whether it is gone."""
    try:
        with contextlib.ExitStack() as stack:
            if path.endswith(_WHOLE):
                fcntl.flock(stack.enter_context(open(path, "rb")), fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:  # it is locked, or belongs to another user
        return False
    return True
