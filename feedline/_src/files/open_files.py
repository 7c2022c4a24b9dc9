"""Reads of parts of files, many in one call, with a bounded number of file descriptors."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.files.lru_cache import LruCache
from feedline._src.files.version import FileVersion, changed

Indices = npt.NDArray[np.int64]
_OPEN_FILES = 64
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
        self._cache: LruCache[OpenFile] = LruCache(_OPEN_FILES)

    def get(self, path: str, version: FileVersion | None, begins: bytes = b"") -> OpenFile:
        """The file at `path`. Arguments and errors are those of `OpenFile`."""
        return self._cache.get(path, lambda: OpenFile(path, version, begins))

    def close(self) -> None:
        """Close all files that are not being read; the others are closed after that."""
        self._cache.clear()


def unreadable(error: OSError | MemoryError, row: int, path: str) -> FeedError:
    """The error for a row whose file cannot be opened or read."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOENT, errno.ENOTDIR):
        return changed(path, f"it cannot be found any more ({os.strerror(number)})")
    if number in (errno.EMFILE, errno.ENFILE):
        return FeedError(
            f"up to {_OPEN_FILES} files of a source are open, and no more can be opened ({os.strerror(number)}); "
            "raise the limit (ulimit -n), or close other files",
            stage="read",
            file=path,
        )
    return RowError(
        f"the bytes of a row must be readable, and reading them failed: {error}; copy the file again, or take "
        "another row in its place with feedline.Reading(bad_rows='substitute')",
        stage="read",
        row=row,
        file=path,
    )
