"""Blocks of objects on local disk, shared by all processes and jobs of a host.

A block is one file: its bytes, and after them a trailer with their length and checksum (after them, because the
bytes are mapped into memory, and a mapping starts where the file does). Its name is a digest of the address, the
version and the range of bytes, so that a replaced object has other files. It is written under another name and
renamed, so that it appears whole whatever is killed meanwhile. The time of modification of a file says when it
was last used. Anybody may delete the folder at any time: it is made again, and what is in use stays readable by
its descriptors.

A library that opens files by path gets an object as a whole file, whose checksum is part of its name. Whoever uses
it holds a lock of it, and a locked file is not deleted."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import mmap
import os
import shutil
import struct
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from feedline._src.errors import FeedError
from feedline._src.files.store import Store

T = TypeVar("T")
_TRIES = 100
"""Who deletes a folder may do so again and again, each time just before a file is made in it."""
_WHOLE = ".whole"
_READ_BYTES = 1 << 20
_TRAILER = struct.Struct("<8sQI")  # magic, length, checksum
_MAGIC = b"feedline"
_OLD_S = 3600.0
"""A temporary file that is older was left by a process that was killed."""
_KEPT = 0.9
"""The share of the limit that remains after an eviction, so that not every block that is stored causes one."""
_STORED = 1 / 32
"""The share of the limit after which a process counts the files again: others store blocks, too."""


def name_of(address: str, tag: str, start: int, stop: int) -> str:
    """The name of the file for a range of bytes of a version of an object."""
    return hashlib.sha256(f"{address}\n{tag}\n{start}-{stop}".encode()).hexdigest()[:40]


def in_folder(folder: str, use: Callable[[], T]) -> T:
    """What `use` returns, which needs the folder. It is made, once more if somebody deletes it meanwhile."""
    for _ in range(_TRIES - 1):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # the latter is of os.makedirs
            os.makedirs(folder, exist_ok=True)
            return use()
    os.makedirs(folder, exist_ok=True)
    return use()


class BlockCache:
    """A folder of blocks with a size limit. Thread-safe, and safe with other processes.

    Args:
      folder: is created. Only its subfolder "blocks" is used.
      limit_bytes: of all blocks; None: half of the space that is free or that the cache has already. A process may
        exceed it by a thirty-second and a block.

    Attributes:
      limit_bytes: of all blocks.
      evictions: how many blocks this process has deleted.

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
        self.evictions = 0
        self._uncounted: float = limit_bytes
        """Bytes that this process stored since it counted the files; at first more than is allowed. Held by
        _lock."""

    def open(self, name: str, length: int) -> int | None:
        """A descriptor of the block, whose checksum is right; None if it must be fetched."""
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return None  # there is none, or it is that of another user
        try:
            if self._is_whole(descriptor, length):
                os.utime(descriptor)
                return descriptor
        except (OSError, ValueError):
            pass  # unreadable: it is fetched again
        os.close(descriptor)
        with contextlib.suppress(OSError):
            os.unlink(self.path(name))
        return None

    def store(self, name: str, data: Any) -> int:
        """Write a block, and return a descriptor of it: it may be evicted at once, and stays readable by that.

        Raises:
          FeedError: it cannot be written.
        """
        try:
            try:
                descriptor = self._write(name, data)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._evict(self._size() // 2)  # others filled the disk
                descriptor = self._write(name, data)
        except OSError as error:
            raise self._unusable(error) from error
        with self._lock:
            self._uncounted += len(data)
            count = self._uncounted > self.limit_bytes * _STORED
            if count:
                self._uncounted = 0
        if count:
            try:
                self._evict(self.limit_bytes)
            except OSError as error:
                os.close(descriptor)
                raise self._unusable(error) from error
        return descriptor

    def open_whole(self, name: str, length: int) -> tuple[str, int] | None:
        """The path of a whole file, and a descriptor that keeps it there while it is open; None: there is none."""
        folder = os.path.dirname(self.path(name))
        names: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = os.listdir(folder)
        for found in names:
            if not (found.startswith(f"{name}-") and found.endswith(_WHOLE)):
                continue
            path = os.path.join(folder, found)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # an eviction holds it for a moment only
                if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
                    raise OSError  # it was deleted before it was locked
                checksum = int(found.removeprefix(f"{name}-").removesuffix(_WHOLE), 16)
                status = os.fstat(descriptor)
                if status.st_size == length and _checksum(descriptor) == checksum:
                    os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
                    return path, descriptor
                os.unlink(path)  # damaged
            except (OSError, ValueError):
                pass
            os.close(descriptor)
        return None

    def begin_whole(self, name: str, length: int) -> tuple[int, str]:
        """A descriptor and the temporary path of a file of `length` bytes, which is to be written.

        Raises:
          FeedError: it cannot be written, or there is no room beside files that are in use.
        """
        kept = self._evict(max(0, self.limit_bytes - length))
        if kept + length > self.limit_bytes:
            raise FeedError(
                f"a file that a library opens by path is kept whole in the cache, and {length} bytes beside the "
                f"{kept} in use are more than its cache_bytes={self.limit_bytes}; raise cache_bytes of "
                "feedline.Store, or use another folder for the cache",
                stage="read",
                file=self._folder,
            )
        folder = os.path.dirname(self.path(name))
        try:
            descriptor, temporary = _temporary(folder)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            if length and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, length)  # so that others count it, and a full disk is seen
        except OSError as error:
            os.close(descriptor)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise self._unusable(error) from error
        return descriptor, temporary

    def finish_whole(self, name: str, descriptor: int, temporary: str) -> str:
        """Give a file its name once it is written. The descriptor keeps it there while it is open."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            path = f"{self.path(name)}-{_checksum(descriptor):08x}{_WHOLE}"
            with contextlib.suppress(FileNotFoundError):  # somebody deleted the cache: the descriptor is left
                os.replace(temporary, path)
        except OSError as error:
            raise self._unusable(error) from error
        return path

    def touch(self, name: str) -> bool:
        """Note that a block is in use. Returns whether the cache has it."""
        try:
            os.utime(self.path(name))
        except OSError:
            return False
        return True

    def has(self, name: str) -> bool:
        """Whether the cache has the block."""
        return os.path.exists(self.path(name))

    def path(self, name: str) -> str:
        """Where the block lies."""
        return os.path.join(self._folder, name[:2], name)

    def _is_whole(self, descriptor: int, length: int) -> bool:
        if os.fstat(descriptor).st_size != length + _TRAILER.size:
            return False
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as view:
            magic, stored, checksum = _TRAILER.unpack(view[length:])
            with view[:length] as data:
                return bool((magic, stored, checksum) == (_MAGIC, length, zlib.crc32(data)))

    def _write(self, name: str, data: Any) -> int:
        place = self.path(name)
        descriptor, temporary = _temporary(os.path.dirname(place))
        try:
            trailer = _TRAILER.pack(_MAGIC, len(data), zlib.crc32(data))
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(descriptor, view) :]
            os.write(descriptor, trailer)
            with contextlib.suppress(FileNotFoundError):  # somebody deleted the cache: the descriptor is left
                os.replace(temporary, place)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        return descriptor

    def _files(self) -> Iterator[os.DirEntry[str]]:
        folders: list[os.DirEntry[str]] = []
        with contextlib.suppress(FileNotFoundError):  # somebody deletes the cache
            folders = list(os.scandir(self._folder))
        for folder in folders:
            with contextlib.suppress(FileNotFoundError):
                if folder.is_dir():
                    yield from os.scandir(folder)

    def _size(self) -> int:
        return sum(size for _, size, _ in self._found())

    def _found(self) -> list[tuple[float, int, str]]:
        """When it was used, size and path of each file."""
        found = []
        for entry in self._files():
            with contextlib.suppress(FileNotFoundError):
                status = entry.stat()
                # the time of modification of a whole file says whether it was written to
                used = status.st_atime if entry.name.endswith(_WHOLE) else status.st_mtime
                found.append((used, status.st_size, entry.path))
        return found

    def _evict(self, limit: int) -> int:
        """Delete the blocks that were not used for the longest time, unless all fit.

        Returns:
          The size of those that are left.
        """
        lock_path = os.path.join(self._folder, "lock")
        with in_folder(self._folder, lambda: open(lock_path, "a")) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time; the lock of a killed process is gone
            found = self._found()
            size = sum(each for _, each, _ in found)
            old = time.time() - _OLD_S
            left = limit if size <= limit else limit * _KEPT
            for used, each, path in sorted(found):
                abandoned = path.endswith(".tmp")
                if (abandoned and used < old) or (not abandoned and size > left):
                    if not _deleted(path):
                        continue
                    size -= each
                    self.evictions += 1
        return size

    def _unusable(self, error: OSError) -> FeedError:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return FeedError(
                "what is read from a store is kept in files on local disk, and no more can be opened "
                f"({error.strerror}); raise the limit (ulimit -n), or close other files",
                stage="read",
                file=self._folder,
            )
        return FeedError(
            f"what is read from a store is kept in a cache on local disk, and {self._folder} cannot be written "
            f"({error.strerror}); set FEEDLINE_CACHE, or feedline.Store(cache=...), to a folder on a disk with "
            f"space",
            stage="read",
            file=self._folder,
        )


_caches: weakref.WeakValueDictionary[tuple[str, int | None], BlockCache] = weakref.WeakValueDictionary()


def cache_of(options: Store) -> BlockCache:
    """The cache of a source. Sources with the same folder and limit share one, since each counts the files.

    Raises:
      FeedError: the folder cannot be written.
    """
    key = options.folder, options.cache_bytes
    return _caches.get(key) or _caches.setdefault(key, BlockCache(*key))


def _temporary(folder: str) -> tuple[int, str]:
    """A descriptor and the path of a new file."""
    return in_folder(folder, lambda: tempfile.mkstemp(dir=folder, suffix=".tmp"))


def _deleted(path: str) -> bool:
    """Delete a file, unless it is a whole one that a process uses. Returns whether it is gone."""
    try:
        if not path.endswith(_WHOLE):
            os.unlink(path)
            return True
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:  # it is locked, or belongs to another user
        return False
    return True


def _checksum(descriptor: int) -> int:
    """Of all bytes of a file."""
    checksum = at = 0
    while data := os.pread(descriptor, _READ_BYTES, at):
        checksum, at = zlib.crc32(data, checksum), at + len(data)
    return checksum
