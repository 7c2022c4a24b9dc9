"""The cache on local disk: a folder with a size limit, shared by all processes and jobs of a host.

Its files hold ranges of objects (`CachedRange`), or are *whole files*: an object for a library that opens files by
path. A complete whole file has the modification time `_COMPLETE_NS`, in 1970, which any write changes. A process
locks it exclusively while it downloads it, and shared while it uses it; a locked file is not evicted.

The least recently used files are evicted first, by the time of access. It is set explicitly, since many file
systems do not keep it.
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
from pathlib import Path
from typing import TypeVar

from feedline._src.errors import FeedError
from feedline._src.files.fetcher import MOST, fetcher
from feedline._src.files.file import Descriptor, FileVersion, OpenFile, check_may_open
from feedline._src.files.store import Store

T = TypeVar("T")
BLOCK_BYTES = 1 << 21  # larger ones delay the first shuffled batch on a slow link: each of its rows costs a block
AHEAD = 0.25  # the share of the cache for blocks that were fetched ahead and not read yet
_LARGEST_SEGMENT_BYTES = 1 << 26
_SEGMENTS = 32  # at least this number of cache files fits into a cache: each is evicted whole
_TRIES = 100  # then give up: another program deletes the folder each time just before a file is made in it
_WHOLE = ".whole"
_COMPLETE_NS = 10**9
_KEPT = 0.9  # the share of the limit that remains after an eviction, so that not every block causes one
_STORED = 1 / 32  # after storing this share of the limit, a process counts all files: others store blocks, too
_TOUCH_NS = 60 * 10**9  # an access within this time of the last one is not noted


def in_folder(folder: str, use: Callable[[], T]) -> T:
    """Call `use`, which needs the folder, and return its result. The folder is made as often as it is missing."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError, FileExistsError):  # the latter is of os.makedirs
            os.makedirs(folder, exist_ok=True)
            return use()
    raise FileNotFoundError(errno.ENOENT, "the folder is deleted again and again, or a file lies there", folder)


class Cache:
    """A folder of files with a size limit. Thread-safe, and safe with other processes.

    All methods raise a FeedError if the folder cannot be written, or too many files are open.

    Args:
      limit_bytes: of all files; None: half of the sum of the free space and the cache's present size. A process
        may exceed it by a thirty-second.
    """

    def __init__(self, folder: str, limit_bytes: int | None) -> None:
        self._folder = os.path.join(folder, "blocks")
        with self.checked():
            free = in_folder(self._folder, functools.partial(shutil.disk_usage, self._folder)).free
            self.limit_bytes = (free + self._size()) // 2 if limit_bytes is None else limit_bytes
        fitting = 1 << (self.limit_bytes // _SEGMENTS).bit_length() >> 1
        self.segment_bytes = min(_LARGEST_SEGMENT_BYTES, max(BLOCK_BYTES, fitting))
        self._uncounted: float = self.limit_bytes
        """About how many bytes this process has stored since it counted the files; at first more than allowed."""

    def path(self, name: str) -> str:
        return os.path.join(self._folder, name[:2], name)

    def is_too_early(self, needed_bytes: int, ahead: int) -> bool:
        """Whether a batch that needs these bytes `ahead` batches later should not be fetched yet.

        The link is busy enough, or the batches until then exceed a quarter of the cache, and could be evicted
        before they are read.
        """
        return (ahead + 1) * needed_bytes > self.limit_bytes * AHEAD or fetcher().in_flight >= MOST

    @contextlib.contextmanager
    def checked(self) -> Iterator[None]:
        """Turn an OSError of the block into a FeedError that names the folder."""
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

    # --- whole files ---

    def whole(self, name: str, size: int, download: Callable[[Descriptor], None]) -> OpenFile:
        """The whole file of an object, locked while it is open. One process downloads it, while others wait.

        Args:
          download: writes all bytes to an open file.

        Raises:
          FeedError: also if there is no room for it beside other locked files.
        """
        path, flags = self.path(name) + _WHOLE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        with self.checked():
            for _ in range(_TRIES):
                file = Descriptor(in_folder(os.path.dirname(path), lambda: os.open(path, flags, 0o600)))
                is_ours = _lock_alone(file.descriptor) and file.lies_at(path)
                if is_ours and not _is_complete(FileVersion.of(file.descriptor), size):
                    self._download(path, file, size, download)
                fcntl.flock(file.descriptor, fcntl.LOCK_SH)  # waits while another process downloads it
                if file.lies_at(path):
                    opened = OpenFile(path, descriptor=os.dup(file.descriptor))
                    if _is_complete(opened.version, size):
                        touch(file.descriptor)
                        return opened
                    Path(path).unlink(
                        missing_ok=True
                    )  # another process was killed while it downloaded, or somebody wrote to the file
            raise FileNotFoundError(errno.ENOENT, "files are deleted again and again", path)

    def _download(self, path: str, file: Descriptor, size: int, download: Callable[[Descriptor], None]) -> None:
        """Fill an exclusively locked file, which may hold what a killed process left."""
        try:
            os.ftruncate(file.descriptor, 0)
            self._make_room(size)
            download(file)
            os.utime(file.descriptor, ns=(time.time_ns(), _COMPLETE_NS))
        except BaseException:
            Path(path).unlink(missing_ok=True)
            # at once: the traceback of an error keeps the descriptor open for as long as somebody has the error
            fcntl.flock(file.descriptor, fcntl.LOCK_UN)
            raise

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
        with self.checked():
            self.with_space(write)
            self._uncounted += size
            if self._uncounted > self.limit_bytes * _STORED:
                self._uncounted = 0
                self._evict(self.limit_bytes)

    def with_space(self, write: Callable[[], None]) -> None:
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


def _is_complete(version: FileVersion, size: int) -> bool:
    """Whether a whole file was downloaded to its end, and nobody has written to it since."""
    return (version.size_bytes, version.modified_ns) == (size, _COMPLETE_NS)


def _lock_alone(descriptor: int) -> bool:
    """Lock a file exclusively, unless somebody has locked it. Returns whether it is locked now."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _delete(path: str) -> bool:
    """Delete a file, unless it is a whole one that a process has locked. Returns whether it is gone."""
    try:
        with contextlib.ExitStack() as stack:
            if path.endswith(_WHOLE) and not _lock_alone(stack.enter_context(open(path, "rb")).fileno()):
                return False
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:  # it belongs to another user
        return False
    return True
