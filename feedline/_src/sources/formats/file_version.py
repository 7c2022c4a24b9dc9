"""Versions of files and of objects in stores, which detect that one was replaced or written to meanwhile."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.stores.client import Version
from feedline._src.stores.opening import RemoteObjects
from feedline._src.stores.options import Store
from feedline._src.stores.urls import is_url


class FileVersion(NamedTuple):
    """What changes when a file is replaced or written to, as plain integers that can be sent to worker processes.

    Example:
      >>> import tempfile
      >>> from pathlib import Path
      >>> path = Path(tempfile.mkdtemp()) / "rows.bin"
      >>> _ = path.write_bytes(bytes(4))
      >>> version = FileVersion.of(path)
      >>> version.check(path)  # unchanged: nothing happens
      >>> _ = path.write_bytes(bytes(8))
      >>> try:
      ...     version.check(path)
      ... except FeedError as error:
      ...     print(error.stage, error.message.split(" since")[0])
      read a file must not change while a feed reads it, and it has 8 bytes and had 4
    """

    device: int
    inode: int
    size_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileVersion:
        """The version of the file at `path` now. OSError if there is none."""
        return cls._from(os.stat(path))

    @classmethod
    def of_open(cls, descriptor: int) -> FileVersion:
        """The version of an open file, even if its path is another file by now."""
        return cls._from(os.fstat(descriptor))

    @classmethod
    def _from(cls, found: os.stat_result) -> FileVersion:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def check(self, path: str | os.PathLike[str]) -> None:
        """Refuse a file that was replaced, deleted or written to since this version was taken.

        Raises:
          FeedError: it changed; the message says whether its size, its time or the file itself differs.
        """
        try:
            now = FileVersion.of(path)
        except OSError as error:
            raise changed(path, f"it cannot be found any more ({error.strerror})") from error
        self.compare(now, path)

    def check_open(self, path: str | os.PathLike[str]) -> None:
        """As `check`, for a file that is open or mapped: it may be replaced, since its reader keeps the old one.

        Raises:
          FeedError: it was written to or truncated.
        """
        try:
            now = os.stat(path)
        except OSError:
            return
        if (now.st_dev, now.st_ino) == (self.device, self.inode):
            self.compare(FileVersion._from(now), path)

    def compare(self, now: FileVersion, path: str | os.PathLike[str]) -> None:
        """Refuse a file whose version is `now` another one. FeedError says what differs."""
        if now == self:
            return
        if now.size_bytes != self.size_bytes:
            found = f"it has {now.size_bytes} bytes and had {self.size_bytes}"
        elif (now.device, now.inode) != (self.device, self.inode):
            found = "another file lies at its path"
        else:
            found = "it was written to"
        raise changed(path, found)


def changed(path: str | os.PathLike[str], found: str) -> FeedError:
    """The error for a file that changed while it was in use; `found` says how."""
    hint = ""
    if multiprocessing.parent_process() is not None:
        hint = (
            ". A worker process imports your script again: what writes the file must stand under `if __name__ == "
            '"__main__":`'
        )
    return FeedError(
        f"a file must not change while a feed reads it, and {found} since the source was opened. Write new data "
        f"to a new path, and build a new feed{hint}",
        stage="read",
        file=os.fspath(path),
    )


Versions = Sequence[FileVersion | Version | None]


class VersionedFiles:
    """Files on local disk, or objects in a store, by their numbers.

    Attributes:
      paths: of the files, or addresses of the objects.
      versions: that they must have; None of a directory.
      in_store: whether they lie in a store.

    Args:
      store: how objects are read.
      versions: by default, the present ones.
      folders: addresses are those of folders, which are no objects.
    """

    def __init__(
        self, paths: Sequence[str], store: Store | None, versions: Versions | None = None, folders: bool = False
    ) -> None:
        self.paths = paths
        self.in_store = is_url(paths[0]) and not folders
        self._objects = RemoteObjects(paths, store or Store()) if self.in_store else None
        self.versions = self._present_versions() if versions is None else versions

    def __getitem__(self, number: int) -> Any:
        """A path, an object, or the address of a folder."""
        path = self.paths[number]
        if self._objects is not None:
            return self._objects.by_url[path]
        return path if is_url(path) else Path(path)

    def check(self, number: int) -> None:
        """Refuse a file that was changed, with a FeedError. Fetching a block of an object does so, too."""
        version, path = self.versions[number], self.paths[number]
        if isinstance(version, FileVersion):
            version.check(path)
        elif version is not None and self._objects is not None:
            version.check(self._objects.by_url[path].version, path)

    def check_open(self, number: int) -> None:
        """As `check`, of a file that stays open: see `FileVersion.check_open`."""
        version = self.versions[number]
        if isinstance(version, FileVersion):
            version.check_open(self.paths[number])

    def fetch_ahead(self, extents: Iterable[tuple[int, tuple[int, int]]], ahead: int) -> bool:
        """Start to fetch bytes that are read `ahead` batches later. Returns False if that is too early.

        Args:
          extents: the number of a file, and an (offset, length) in it.
        """
        assert self._objects is not None
        blocks = [np.zeros(0, np.int64)]
        for number, extent in extents:
            blocks.append(self._objects.by_url[self.paths[number]].blocks_of(*extent))
        return self._objects.residency.fetch_ahead(np.concatenate(blocks), ahead)

    def begin(self) -> None:
        """Start to fetch the first block of each object, since files are opened one after the other."""
        if self._objects is not None:
            for item in self._objects.by_url.values():
                item.fetch(range(min(1, item.blocks)))

    def are_here(self, extents: Iterable[tuple[int, tuple[int, int]]]) -> bool:
        """Whether bytes of objects can be read without waiting for the store. Arguments as of `fetch_ahead`."""
        assert self._objects is not None
        return all(self._objects.by_url[self.paths[number]].is_here(*extent) for number, extent in extents)

    def close(self) -> None:
        """Give up what is being fetched."""
        if self._objects is not None:
            self._objects.close()

    def _present_versions(self) -> Versions:
        if self._objects is not None:
            return [self._objects.by_url[path].version for path in self.paths]
        return [
            FileVersion.of(path) if Path(path).is_file() else None for path in self.paths
        ]  # opening reports it
