"""`File`: the bytes of one version of a file or object."""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from feedline._src.files.client import Version
from feedline._src.files.version import FileVersion, changed
from feedline._src.rows import digests

T = TypeVar("T")
Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class File(abc.ABC):
    """Bytes of one version. All methods are thread-safe, and it pickles: the other process opens the same version.

    Attributes:
      name: its path or address as the user gave it, for errors.
      size: in bytes.
      version: what changes when it is replaced or written to.
      in_store: whether it is an object in a store.
    """

    in_store = False
    name: str
    size: int
    version: FileVersion | Version

    @abc.abstractmethod
    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """The bytes at each offset, fewer where the file ends. Parts may overlap, in any order.

        Raises:
          FeedError: it was changed, deleted, or its store cannot be read.
          OSError, MemoryError: of the disk; a part is too large.
        """

    def read_rows(self, offsets: Indices, out: Bytes) -> None:
        """Write the bytes at offsets[i] to out[i], a contiguous uint8[k, row bytes]. Errors as of `read`.

        Raises:
          FeedError: also if the file ends before a row does.
        """
        length = out.shape[1]
        for row, data in zip(out, self.read(offsets, np.full(len(offsets), length)), strict=True):
            if len(data) != length:
                raise changed(self.name, f"it ends {length - len(data)} bytes too early")
            row[:] = np.frombuffer(data, np.uint8)

    @abc.abstractmethod
    def memory(self) -> Bytes | None:
        """All bytes as mapped memory, read-only; None if they must be read by `read`.

        Of a store: None until the cache has all of them, and again once it has not. What was returned stays
        readable while it is referred to. Another process may truncate what is mapped: a read beyond the end is
        SIGBUS, so only the gather in C, which survives it, may read this memory, or code that calls `check_open`
        before and accepts what is left of that danger for the user's own local files.
        """

    @abc.abstractmethod
    def path(self) -> str:
        """A local path of all bytes, for a library that opens files by path. An object is fetched whole, and stays
        in the cache while this `File` is referred to. Errors as of `read`."""

    @abc.abstractmethod
    def with_path(self, use: Callable[[str], T]) -> T:
        """What `use` returns of the `path`. It is called again, with a new file, if the file of the cache was
        written to, or if it fails and that was deleted; the str is another one for each such file.
        Errors as of `read`."""

    @property
    @abc.abstractmethod
    def has_path(self) -> bool:
        """Whether all bytes lie on a local disk, so that `path` fetches nothing."""

    @abc.abstractmethod
    def open(self, sequential: bool = False) -> BinaryIO:
        """A file object of the bytes, for one thread.

        Args:
          sequential: most of it is read, from its start to its end: an object is fetched ahead.
        """

    @abc.abstractmethod
    def samples(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """The bytes of some (offset, length), for headers and digests. Of an object only these are fetched, at
        once."""

    @property
    @abc.abstractmethod
    def stamp(self) -> int | str | None:
        """What differs between versions of the same size, and is equal on all machines: a time, or an ETag.

        None: nothing does, so that what was made of the file before may be of another version.
        """

    @abc.abstractmethod
    def places_beside(self, suffix: str) -> list[str]:
        """Paths at which to keep a file that is made of this one once, the best first. Any may be unwritable."""

    @abc.abstractmethod
    def check(self) -> None:
        """Refuse, with a FeedError, a file at whose path is another version now. Fetching from a store does so."""

    def check_open(self) -> None:
        """Refuse, with a FeedError, a file that was written to or truncated. It is open or mapped, and may have
        been replaced: the old one stays open."""
        self.check()

    @property
    def digest(self) -> list[Any]:
        """JSON values that identify the contents, without a path: the size, and a digest of sampled bytes."""
        return digests.of_samples(self.size, self.samples(digests.samples_of_file(self.size)))


def place_in(folder: str, name: str, suffix: str) -> str:
    """The path of a file that is made once of what `name` names, in a cache folder."""
    return os.path.join(folder, "index", f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}{suffix}")
