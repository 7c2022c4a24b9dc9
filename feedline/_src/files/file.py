"""`File`: the bytes of one version of a local file. Also versions, an LRU cache of open files, and errors."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import mmap
import multiprocessing
import os
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.files.store import Store
from feedline._src.native.library import library
from feedline._src.rows import digests

T = TypeVar("T")
Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
OPEN_FILES = 64
_MERGED_BYTES, _MERGED_GAP_BYTES, _MERGED_PART_BYTES = 1 << 22, 1 << 12, 1 << 15
"""The largest merged read, gap and part, in bytes. Merging saves system calls, but copies each part once more."""


class Version(NamedTuple):
    """Values that change when a file or an object is replaced or written to.

    Attributes:
      stamp: of a local file, the modification time in ns; of an object, the strong ETag, or else the date of its
        last modification, or "" if it has neither. An object's stamp is equal on all machines.
      inode: the device and the inode number of a local file.
    """

    size_bytes: int
    stamp: int | str
    inode: tuple[int, int] | None = None

    @classmethod
    def of(cls, file: str | int) -> Version:
        """The present version of a local file, given by path or by open descriptor. OSError: there is no file."""
        found = os.stat(file)
        return cls(found.st_size, found.st_mtime_ns, (found.st_dev, found.st_ino))

    def check(self, path: str) -> None:
        """Raise a FeedError if the local file at `path` was replaced, deleted or written to."""
        try:
            self.compare(Version.of(path), path)
        except OSError as error:
            raise changed(path, f"it cannot be found any more ({error.strerror})") from error

    def compare(self, now: Version | None, name: str) -> None:
        """If `now` is another version, or None (no such file), raise a FeedError that says what differs."""
        if now == self:
            return
        if now is None:
            found = "it cannot be found any more"
        elif now.size_bytes != self.size_bytes:
            found = f"its size changed from {self.size_bytes} to {now.size_bytes} bytes"
        elif now.inode != self.inode:
            found = "it was replaced by another file"
        else:
            found = "it was written to" if self.inode else f"its ETag changed from {self.stamp} to {now.stamp}"
        raise changed(name, found)

    def check_strong(self, name: str) -> None:
        """Raise a FeedError if the object could be replaced unnoticed."""
        if not self.stamp:
            raise FeedError(
                "an object must have a version, so that a replacement is noticed: a strong ETag, or a date of "
                f"modification that is a minute old; and {name} has neither. If it was just written, wait a "
                "minute and open it again; otherwise copy it to a store with strong ETags, or download it",
                stage="read",
                file=name,
            )


class File:
    """Bytes of one version of a local file, or of an object in a store (`RemoteFile`). Thread-safe.

    Attributes:
      name: its path or address as the user gave it, for errors.
      version: the version that is read.
      open_files: the open files of the source, in an LRU cache; also the open indices of these files.

    Args:
      version: the expected version; None: the present one.
      opened: the `open_files` of the source; None: an LRU cache of its own.
      place: the absolute path, since a process may change its working directory; None: where `name` leads now.

    Raises:
      FileNotFoundError, OSError, ValueError: see `opening`.
      FeedError: the file has another version.
    """

    in_store = False
    name: str
    size: int
    version: Version
    open_files: LruCache[OpenFile]

    def __init__(
        self,
        name: str,
        version: Version | None = None,
        opened: LruCache[OpenFile] | None = None,
        place: str | None = None,
    ) -> None:
        self.name, self.place = name, place or absolute(name)
        if version is None:
            with opening(Path(name)) as file:
                version = Version.of(file.fileno())
        else:
            version.check(self.place)
        self.version = version
        self.size = version.size_bytes
        self.open_files = opened or LruCache(OPEN_FILES)
        self._memory: Bytes | None = None

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """The bytes at each offset, fewer at the end of the file. Parts may overlap, and be in any order.

        FeedError: the file was changed or deleted, or its store cannot be read. OSError: the disk cannot be read.
        MemoryError: a part is too large.
        """
        file = self.open_files.get(self.place, lambda: OpenFile(self.place, self.version))
        found = file.read(offsets, lengths)
        file.check()
        return found

    def read_rows(self, offsets: Indices, out: Bytes) -> None:
        """Write the bytes at offsets[i] to out[i]; `out` is a contiguous uint8[k, row bytes].

        Errors: see `read`. FeedError: also if the file ends before a row does."""
        length = out.shape[1]
        # adjacent rows are read at once
        firsts = np.append(0, np.flatnonzero(np.diff(offsets) != length) + 1)[: len(offsets)]
        ends = np.append(firsts[1:], len(offsets))[: len(firsts)]
        runs = self.read(offsets[firsts], (ends - firsts) * length)
        for first, end, data in zip(firsts.tolist(), ends.tolist(), runs, strict=True):
            rows = out[first:end].reshape(-1)
            if len(data) != len(rows):
                raise changed(self.name, f"it ends {len(rows) - len(data)} bytes too early")
            rows[:] = np.frombuffer(data, np.uint8)

    def memory(self) -> Bytes | None:
        """All bytes as mapped memory, read-only. None for an object while the cache lacks some of its bytes.

        If another process truncates the mapped file, a read beyond its new end raises SIGBUS. The gather in C
        survives that. Other code must call `check_open` before it reads this memory, and accept the risk that the
        file is truncated after this check.
        """
        if self._memory is None:
            try:
                file = OpenFile(self.place, self.version)
                mapped: Any = mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ) if self.size else b""
            except OSError as error:
                check_may_open(error, self.name)
                raise
            self._memory = np.frombuffer(mapped, np.uint8)
        return self._memory

    def with_path(self, use: Callable[[str], T]) -> T:
        """Call `use` with the path of a local file that has all bytes, and return the result. Errors: see `read`.

        An object is fetched whole, and stays in the cache until this `File` is closed or garbage collected. If its
        cache file is deleted or changed meanwhile, `use` is called again, with a new str object for the same path.
        """
        return use(self.place)

    def open(self, sequential: bool = False) -> BinaryIO:
        """Open the bytes as a file object for one thread. `sequential`: fetch an object ahead of the reads."""
        opened = OpenFile(self.place, self.version)
        return os.fdopen(os.dup(opened.descriptor), "rb")

    def samples(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """Read each (offset, length), for headers and digests. A large object is not fetched whole."""
        return self.start_samples(ranges)()

    def start_samples(self, ranges: list[tuple[int, int]]) -> Callable[[], list[bytes]]:
        """Start fetching `samples`. Returns a function that waits for the samples and returns them."""

        def read() -> list[bytes]:
            file = OpenFile(self.place, self.version)  # closed at once, since a source may have many files
            return [pread(file.descriptor, length, offset) for offset, length in ranges]

        return read

    def places_beside(self, suffix: str) -> list[str]:
        """Return paths for a file that is derived from this one, the best path first. Each may be unwritable.
        A path beside this file has a hidden name, so that globs and folders of files leave it out.
        """
        folder, name = os.path.split(self.place)
        beside = os.path.join(folder, f".{name}{suffix}")
        return [beside, place_in(Store().folder, os.path.abspath(self.place), suffix)]

    def check(self) -> None:
        """Raise a FeedError if another version is at the path now. For an object, fetching checks the version."""
        self.version.check(self.place)

    def check_open(self) -> None:
        """Raise a FeedError if the file was written to or truncated. A replacement by another file is no error:
        the old file is still open or mapped."""
        with contextlib.suppress(OSError):
            now = Version.of(self.place)
            if now.inode == self.version.inode:
                self.version.compare(now, self.place)


def digests_of(files: Sequence[File]) -> list[list[Any]]:
    """Return each file's size and a digest of samples: JSON values that identify its contents, not its path.

    The samples of all objects are fetched at once.
    """
    finish = [file.start_samples(digests.samples_of_file(file.size)) for file in files]
    return [digests.of_samples(file.size, samples()) for file, samples in zip(files, finish, strict=True)]


def place_in(folder: str, name: str, suffix: str) -> str:
    """Return a path in a cache folder for a file that is derived from the file or object `name`."""
    return os.path.join(folder, "index", f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}{suffix}")


def absolute(path: str) -> str:
    """Make a path absolute. Keeps "..", since `link/..` is the parent of the folder to which the link leads."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


# --- open files ---


class Descriptor:
    """An open file, closed once nothing refers to it, since threads may still read a file that a cache evicted."""

    nbytes = 1  # so that an LruCache counts files

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]  # at exit, `os` may be gone
        if hasattr(self, "descriptor"):
            close(self.descriptor)

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """See `File.read`. Small parts close to each other are read by one system call."""
        order = np.argsort(offsets, kind="stable")
        starts, ends = offsets[order], (offsets + lengths)[order]
        bounds = _bounds_of_runs(starts, ends)
        parts = [b""] * len(order)
        numbers, starts, ends = order.tolist(), starts.tolist(), ends.tolist()
        for first, stop in itertools.pairwise(bounds):
            offset = starts[first]
            block = pread(self.descriptor, max(ends[first:stop]) - offset, offset)
            if stop - first == 1:
                parts[numbers[first]] = block
                continue
            view = memoryview(block)
            for i in range(first, stop):
                parts[numbers[i]] = bytes(view[starts[i] - offset : ends[i] - offset])
        return parts

    def read_rows(self, offsets: Indices, places: Indices, out: Bytes) -> bool:
        """Write the bytes at offsets[i] to out[places[i]], in C without the GIL. False if a row could not be read.

        `out` is a contiguous uint8[k, row bytes].
        """
        compiled, count = library(), len(offsets)
        assert compiled is not None
        pointers = offsets.ctypes.data, places.ctypes.data, count, out.shape[1], out.ctypes.data
        return bool(compiled.feedline_read(self.descriptor, *pointers) == count)

    def lies_at(self, path: str) -> bool:
        """Whether `path` leads to this file, which another process may have deleted or replaced."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(path), os.fstat(self.descriptor))
        return False

    def write(self, data: memoryview, offset: int) -> None:
        while data:
            count = os.pwrite(self.descriptor, data, offset)
            data, offset = data[count:], offset + count


class OpenFile(Descriptor):
    """An open file. FeedError: `version` is given, and the file has another one."""

    def __init__(self, path: str, version: Version | None = None) -> None:
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self.path, self.version = path, version or Version.of(self.descriptor)
        if version is not None:
            self.check()

    def check(self) -> None:
        """Raise a FeedError if the file was written to or truncated: what was read before may be wrong."""
        self.version.compare(Version.of(self.descriptor), self.path)

    @property
    def is_at_its_path(self) -> bool:
        """Whether the file is unchanged and still at its path."""
        with contextlib.suppress(OSError):
            return Version.of(self.path) == self.version
        return False


def _bounds_of_runs(starts: Indices, ends: Indices) -> list[int]:
    """Split ascending parts into runs, each read by one call. Returns bounds, from 0 to the number of parts."""
    gaps = starts[1:] - np.maximum.accumulate(ends)[:-1]
    windows, are_small = starts // _MERGED_BYTES, ends - starts <= _MERGED_PART_BYTES
    are_merged = (gaps <= _MERGED_GAP_BYTES) & (np.diff(windows) == 0) & are_small[1:] & are_small[:-1]
    return sorted({0, *(np.flatnonzero(~are_merged) + 1).tolist(), len(starts)})


def pread(descriptor: int, length: int, offset: int) -> bytes:
    """The bytes at `offset`; fewer at the end of the file. Loops, since os.pread reads at most 2 GiB at once."""
    parts = [os.pread(descriptor, length, offset)]
    while parts[-1] and (read := sum(map(len, parts))) < length:
        parts.append(os.pread(descriptor, length - read, offset + read))
    return parts[0] if len(parts) == 1 else b"".join(parts)


Value = TypeVar("Value", bound=Any)


class LruCache(Generic[Value]):
    """Keeps the most recently used values, up to `limit_bytes` in all (by their `nbytes`), but at least one.

    Thread-safe: if several threads ask for the same key at the same time, its value is read once.

    Example:
      >>> cache = LruCache(limit_bytes=1000)
      >>> cache.get("a", lambda: np.zeros(500, np.uint8)).nbytes
      500
      >>> cache.get("a", lambda: 1 / 0).nbytes  # cached: the function is not called
      500
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: dict[Hashable, tuple[threading.Lock, list[Value]]] = {}
        """Least recently used first. Each entry is a lock for reading the value, and a list that is empty until it
        holds the value. Guarded by _lock."""
        self._bytes = 0
        """The size of all values in _entries. Guarded by _lock."""
        self._process = os.getpid()  # last: a thread that sees the new number also finds the new lock

    def get(self, key: Hashable, read: Callable[[], Value]) -> Value:
        """Return the cached value of `key`, or else the result of `read`. Exceptions of `read` are not cached."""
        if self._process != os.getpid():  # after a fork, a thread that only the parent has may hold a lock
            LruCache.__init__(self, self._limit_bytes)
        with self._lock:
            entry = self._entries[key] = self._entries.pop(key) if key in self._entries else (threading.Lock(), [])
        reading, values = entry
        with reading:
            if not values:
                value = read()
                with self._lock:
                    values.append(value)
                    if self._entries.get(key) is entry:  # otherwise it was cleared meanwhile
                        self._bytes += value.nbytes
                        self._evict(keep=key)
            return values[0]

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self._bytes = 0

    def _evict(self, keep: Hashable) -> None:
        while self._bytes > self._limit_bytes:
            held = (key for key, (_, values) in self._entries.items() if values and key != keep)
            if (oldest := next(held, keep)) == keep:
                return
            self._bytes -= self._entries.pop(oldest)[1][0].nbytes


# --- errors ---


@contextlib.contextmanager
def opening(path: Path) -> Iterator[BinaryIO]:
    """Open the file at `path` for the length of a `with` block.

    FileNotFoundError: there is no file. Other OSErrors, also of the block, name the file. ValueError: it is a
    folder, or not a regular file (opening a pipe would wait for its writer). FeedError: too many files are open.
    """
    try:
        if not path.is_file() and path.exists() and not path.is_dir():
            raise irregular(path)
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}; check the path") from None
    except IsADirectoryError:
        files = f"{path}/*{path.suffix}"
        raise ValueError(f"{path} is a folder; pass a glob of files: open_source({files!r})") from None
    except OSError as error:
        check_may_open(error, str(path))
        if error.filename is None:  # a read in the block raised it
            error.filename = str(path)
        raise


def changed(path: str, found: str) -> FeedError:
    """The error for a file that changed while it was in use; `found` says how."""
    hint = ""
    if multiprocessing.parent_process() is not None:
        hint = (
            ". A worker process imports your script again: put code that writes the file under `if __name__ == "
            '"__main__":`'
        )
    return FeedError(
        f"a file must not change while a feed reads it, and {found} since the source was opened. Write new data "
        f"to a new path, and build a new feed{hint}",
        stage="read",
        file=path,
    )


def irregular(path: str | Path) -> ValueError:
    """The error for a pipe, a socket or a device in place of a file."""
    return ValueError(
        f"rows are read from regular files, in any order, and {path} is a pipe, a socket or a device; write its "
        "output to a file, or yield it from a stream (docs/sources.md#streams)"
    )


def check_may_open(error: Exception, path: str) -> None:
    """If `error` says that no more files can be opened, raise a FeedError, since no row is bad."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        raise FeedError(
            f"files are opened when they are read, and no more can be opened ({os.strerror(error.errno)}); raise "
            "the limit (ulimit -n), or close other files",
            stage="read",
            file=path,
        ) from error


def unreadable(error: OSError | MemoryError, row: int, path: str) -> FeedError:
    """The error for a row whose file cannot be opened or read."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOENT, errno.ENOTDIR):
        return changed(path, f"it cannot be found any more ({os.strerror(number)})")
    check_may_open(error, path)
    return RowError(
        f"the bytes of a row must be readable, and reading them failed: {error}; copy the file again, or take "
        "another row in its place with feedline.Reading(bad_rows='substitute')",
        stage="read",
        row=row,
        file=path,
    )
