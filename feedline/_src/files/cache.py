"""The cache on local disk: a folder with a size limit, shared by all processes and jobs of a host.

The least recently used files are evicted first; locked files are not evicted. The cache sets the access time of
each file itself, since many file systems do not update it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from feedline._src.errors import FeedError
from feedline._src.files.fetcher import MOST, fetcher
from feedline._src.files.file import Version, check_may_open
from feedline._src.files.store import Store

T = TypeVar("T")
BLOCK_BYTES = 1 << 21  # each row of the first shuffled batch costs a block, so larger blocks delay that batch
AHEAD = 0.25  # the share of the cache for blocks that were fetched ahead and have not been read yet
_LARGEST_PIECE_BYTES = 1 << 26
_PIECES = 32  # a piece (one file of an object) is evicted whole: at most 1/32 of the limit, or one block
_TRIES = 100  # attempts, in case another program keeps deleting the folder before a file is created in it
_KEPT = 0.9  # an eviction leaves this share of the limit, so that not every stored block causes an eviction
_STORED = 1 / 32  # after storing this share of the limit, a process measures all files, since others store, too
_TOUCH_NS = 60 * 10**9  # an access is recorded only if the last recorded one is longer ago than this


def in_folder(folder: str, use: Callable[[], T]) -> T:
    """Make sure that the folder exists, and return `use()`. Tries again if the folder is deleted meanwhile."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # os.makedirs raises FileExistsError
            os.makedirs(folder, exist_ok=True)
            return use()
    raise FileNotFoundError(errno.ENOENT, "the folder is deleted again and again, or a file has its name", folder)


class Cache:
    """A folder of files with a size limit. Several threads and processes may use it at once.

    Methods that use the folder raise a FeedError if it cannot be written, or if too many files are open.

    Args:
      limit_bytes: the size limit of all files together; None: half of the sum of the free space and the cache's
        present size. Each process may exceed the limit by 1/32 of it.
    """

    def __init__(self, folder: str, limit_bytes: int | None) -> None:
        self._folder = os.path.join(folder, "blocks")
        with self.checked():
            free = in_folder(self._folder, functools.partial(shutil.disk_usage, self._folder)).free
            self.limit_bytes = (free + self._size()) // 2 if limit_bytes is None else limit_bytes
        fitting = 1 << (self.limit_bytes // _PIECES).bit_length() >> 1
        self.piece_bytes = min(_LARGEST_PIECE_BYTES, max(BLOCK_BYTES, fitting))
        self._uncounted: float = self.limit_bytes
        """About how many bytes this process has stored since it last measured all files; at first the limit, so
        that the first call of `store` measures them."""

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name[:2], name)

    def is_too_early(self, needed_bytes: int, ahead: int) -> bool:
        """Whether fetching `needed_bytes` is too early for the batch `ahead` batches after the current one.

        It is too early if enough requests are in flight. It is also too early if all batches up to that one would
        fill more than a quarter of the cache, since their blocks could be evicted before they are read.
        """
        return (ahead + 1) * needed_bytes > self.limit_bytes * AHEAD or fetcher().in_flight >= MOST

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Turn an OSError raised in the `with` block into a FeedError that names the folder."""
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

    # --- the limit ---

    def make_room(self, needed_bytes: int) -> None:
        """Evict files until a file of `needed_bytes` fits. FeedError: locked files take too much of the space."""
        with self.checked():
            kept = self._evict(max(0, self.limit_bytes - needed_bytes))
        if kept + needed_bytes > self.limit_bytes:
            raise FeedError(
                f"a file that a library opens by path is kept whole in the cache, and {needed_bytes} bytes do not "
                f"fit beside the {kept} bytes in use, with cache_bytes={self.limit_bytes}; raise cache_bytes of "
                "feedline.Store, or use another folder for the cache",
                stage="read",
                file=self._folder,
            )

    def store(self, size: int, write: Callable[[], T]) -> T:
        """Return `write()`, which adds `size` bytes to a file, and evict files beyond the limit. If the disk is
        full, evict half of the cache and call `write` again, until nothing is left to evict.
        """
        with self.checked():
            while True:
                try:
                    found = write()
                    break
                except OSError as error:
                    held = self._size()
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._evict(held // 2) >= held:
                        raise
            self._uncounted += size
            if self._uncounted > self.limit_bytes * _STORED:
                self._uncounted = 0
                self._evict(self.limit_bytes)
        return found

    def _size(self) -> int:
        return sum(size for _, size, _ in self._found())

    def _found(self) -> Iterator[tuple[float, int, str]]:
        """Yield each file's time of last use, bytes on disk and path. Skips files that are deleted meanwhile."""
        with contextlib.suppress(FileNotFoundError):
            for folder in list(os.scandir(self._folder)):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    for entry in os.scandir(folder):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            yield max(status.st_atime, status.st_mtime), status.st_blocks * 512, entry.path

    def _evict(self, limit: int) -> int:
        """Delete the least recently used files until at most `limit` bytes are left. Returns the bytes left."""
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


_caches: weakref.WeakValueDictionary[tuple[str, int | None], Cache] = weakref.WeakValueDictionary()


def cache_of(options: Store) -> Cache:
    """The cache of a folder and a limit. All sources share it, since each new cache measures all files."""
    key = options.folder, options.cache_bytes
    return _caches.get(key) or _caches.setdefault(key, Cache(*key))


def touch(file: int | str) -> Version:
    """Record a use of a file, so that it is not evicted soon. Returns the file's version, which stays the same."""
    status, now = os.stat(file), time.time_ns()
    if now - max(status.st_atime_ns, status.st_mtime_ns) > _TOUCH_NS:
        os.utime(file, ns=(now, status.st_mtime_ns))
    return Version(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))


def try_lock(descriptor: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Try to lock a file, without waiting. Returns whether that succeeded."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return True
    return False


def _delete(path: str) -> bool:
    """Delete a file, unless it is locked. Returns whether it is gone."""
    try:
        with open(path, "rb") as file:
            if not try_lock(file.fileno()):
                return False
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:  # it belongs to another user
        return False
    return True
