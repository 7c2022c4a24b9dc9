"""Files on local disk: many parts read in one call, by a bounded number of descriptors; and their errors."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from feedline._src.errors import FeedError, RowError
from feedline._src.files.file import Bytes, File, Indices, T, place_in
from feedline._src.files.lru_cache import LruCache
from feedline._src.files.store import Store
from feedline._src.files.version import FileVersion, changed

OPEN_FILES = 64
_MERGED_BYTES = 1 << 22
_MERGED_GAP_BYTES = 1 << 12
_MERGED_PART_BYTES = 1 << 15
"""Reads are merged up to 4 MiB, over gaps of up to 4 KiB, for parts of up to 32 KiB: a merged read saves a system
call for each part and copies each part once more, which costs more for large parts."""


class Descriptor:
    """An open file, closed once nobody refers to it: a thread may still read a file that left a cache of them.

    Args:
      descriptor: of the file, which is closed.
    """

    nbytes = 1  # LruCache counts files

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]  # `os` is gone at the end
        if hasattr(self, "descriptor"):
            close(self.descriptor)

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """The bytes at each offset, fewer where the file ends. Parts close to each other are read at once.

        Args:
          offsets, lengths: int64[k], 0 or more, in any order; parts may overlap.

        Raises:
          OSError: of the disk.
          MemoryError: a part is too large.
        """
        parts = [b""] * len(offsets)
        starts, sizes = offsets.tolist(), lengths.tolist()
        for run in _runs(offsets, lengths):
            first = starts[run[0]]
            block = pread(self.descriptor, max(starts[i] + sizes[i] for i in run) - first, first)
            if len(run) == 1:
                parts[run[0]] = block
                continue
            view = memoryview(block)
            for i in run:
                parts[i] = bytes(view[starts[i] - first : starts[i] - first + sizes[i]])
        return parts


class OpenFile(Descriptor):
    """An open file of one version.

    Args:
      path: of the file.
      version: that it must have; None: any.
      begins: its first bytes.

    Raises:
      FeedError: it has another version, or other first bytes.
      OSError: it cannot be opened.
    """

    def __init__(self, path: str, version: FileVersion | None, begins: bytes = b"") -> None:
        super().__init__(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._path = path
        self._version = version or FileVersion.of_open(self.descriptor)
        self.check()
        if pread(self.descriptor, len(begins), 0) != begins:
            raise changed(path, "it begins with other bytes")

    def check(self) -> None:
        """Refuse a file that was written to or truncated. Called after a read, whose bytes may be wrong else."""
        self._version.compare(FileVersion.of_open(self.descriptor), self._path)


def _runs(offsets: Indices, lengths: Indices) -> Iterator[list[int]]:
    """The numbers of the parts that are read at once, ascending by offset."""
    order = np.argsort(offsets, kind="stable")
    starts, ends = offsets[order].tolist(), (offsets + lengths)[order].tolist()
    run: list[int] = []
    first = stop = 0
    for i, start, end in zip(order.tolist(), starts, ends, strict=True):
        small = end - start <= _MERGED_PART_BYTES
        if run and not (small and start - stop <= _MERGED_GAP_BYTES and end - first <= _MERGED_BYTES):
            yield run
            run = []
        if not run:
            first = stop = start
        run.append(i)
        stop = max(stop, end)
    if run:
        yield run


def pread(descriptor: int, length: int, offset: int) -> bytes:
    """The bytes at `offset`; fewer at the end of the file. A single call reads at most 2 GiB."""
    parts = [os.pread(descriptor, length, offset)]
    while parts[-1] and (read := sum(map(len, parts))) < length:
        parts.append(os.pread(descriptor, length - read, offset + read))
    return parts[0] if len(parts) == 1 else b"".join(parts)


class OpenFiles:
    """The files that were used last, open. Thread-safe."""

    def __init__(self) -> None:
        self._cache: LruCache[OpenFile] = LruCache(OPEN_FILES)

    def get(self, path: str, version: FileVersion | None, begins: bytes = b"") -> OpenFile:
        """The file at `path`. Arguments and errors are those of `OpenFile`."""
        return self._cache.get(path, lambda: OpenFile(path, version, begins))

    def discard(self, path: str, file: OpenFile) -> None:
        """Open the file at `path` anew when it is read next."""
        self._cache.discard(path, file)

    def close(self) -> None:
        """Close all files that are not being read; the others are closed after that."""
        self._cache.clear()


class LocalFile(File):
    """A `File` on local disk.

    Args:
      name: its path, for errors.
      version: that it must have; None: the present one.
      opened: of the files of one source, those that were used last, open.
      place: its absolute path, by which it is accessed: a process may change its working directory, and worker
        processes may have another one. None: where `name` leads now.

    Raises:
      FileNotFoundError, OSError: it cannot be opened.
      ValueError: it is a folder.
      FeedError: it has another version.
    """

    def __init__(
        self,
        name: str,
        version: FileVersion | None = None,
        opened: OpenFiles | None = None,
        place: str | None = None,
    ) -> None:
        self.name, self.place = name, place or absolute(name)
        if version is None:
            with opening(Path(name)) as file:
                version = FileVersion.of_open(file.fileno())
        else:
            version.check(self.place)
        self.version: FileVersion = version
        self.size = version.size_bytes
        self._opened = opened or OpenFiles()
        self._memory: Bytes | None = None

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """See `File.read`."""
        file = self._opened.get(self.place, self.version)
        found = file.read(offsets, lengths)
        file.check()
        return found

    def memory(self) -> Bytes:
        """All bytes, mapped when this is called first. One descriptor stays open."""
        if self._memory is None:
            with opening(Path(self.place)) as file:
                self.version.compare(FileVersion.of_open(file.fileno()), self.place)
                mapped: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else b""
                self._memory = np.frombuffer(mapped, np.uint8)
        return self._memory

    def path(self) -> str:
        """Its own path, absolute."""
        return self.place

    def with_path(self, use: Callable[[str], T]) -> T:
        """What `use` returns of the `path`. Changes are noticed by `check` and `check_open`."""
        return use(self.place)

    @property
    def has_path(self) -> bool:
        """True: nothing is fetched."""
        return True

    def open(self, sequential: bool = False) -> BinaryIO:
        """The file, open. Errors as of `File.check`."""
        file = open(self.place, "rb")  # noqa: SIM115  # the caller closes it
        try:
            self.version.compare(FileVersion.of_open(file.fileno()), self.place)
        except BaseException:
            file.close()
            raise
        return file

    def samples(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """See `File.samples`."""
        with self.open() as file:
            return [pread(file.fileno(), length, offset) for offset, length in ranges]

    @property
    def stamp(self) -> int:
        """Its time of modification in ns."""
        return self.version.modified_ns

    def places_beside(self, suffix: str) -> list[str]:
        """See `File.places_beside`. The name is hidden, so that globs and folders of files leave it out."""
        folder, name = os.path.split(self.place)
        beside = os.path.join(folder, f".{name}{suffix}")
        return [beside, place_in(Store().folder, os.path.abspath(self.place), suffix)]

    def check(self) -> None:
        """See `File.check`."""
        self.version.check(self.place)

    def check_open(self) -> None:
        """See `File.check_open`."""
        self.version.check_open(self.place)

    def __reduce__(self) -> Any:
        return LocalFile, (self.name, self.version, None, self.place)


def absolute(path: str) -> str:
    """The path from the root. It keeps "..", since `link/..` lies above the folder that the link names."""
    return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)


@contextlib.contextmanager
def opening(path: Path) -> Iterator[BinaryIO]:
    """Open the file at `path` for the length of a `with` block.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is a folder, or no regular file: opening a pipe would wait for who writes to it.
      FeedError: this process has too many open files.
      OSError: the disk fails, also inside the block. It names the file.
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
        if error.filename is None:  # of a read inside the block
            error.filename = str(path)
        raise


def irregular(path: str | Path) -> ValueError:
    """The error for a pipe, a socket or a device in place of a file."""
    return ValueError(
        f"rows are read from regular files, in any order, and {path} is a pipe, a socket or a device; write what "
        "it gives to a file, or yield it from a stream (docs/streams.md)"
    )


def check_may_open(error: Exception, path: str) -> None:
    """Tell an `error` of reading the file at `path` from a bad row: no more files could be opened.

    Raises:
      FeedError: that is what `error` says.
    """
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
