"""Files or objects in a store by their numbers, with the versions that they must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from feedline._src.files.client import Version
from feedline._src.files.store import Store, is_url
from feedline._src.files.version import FileVersion
from feedline._src.formats.open_options import OpenOptions
from feedline._src.stores.opening import RemoteObjects
from feedline._src.stores.whole_files import WholeFiles

T = TypeVar("T")
Versions = Sequence[FileVersion | Version | None]
_WHOLE = (".array_record", ".arrayrecord", ".arrow", ".feather", ".h5", ".hdf5")
"""Formats whose libraries read local files: objects are fetched whole into the cache."""


class VersionedFiles:
    """Files on local disk, or objects in a store, by their numbers.

    Attributes:
      paths: of the files, or addresses of the objects.
      versions: that they must have; None of a directory.
      in_store: whether they are objects in a store of which parts are fetched.

    Args:
      store: how objects are read.
      versions: by default, the present ones.
      folders: addresses are those of folders, which are no objects.
    """

    def __init__(
        self, paths: Sequence[str], store: Store | None, versions: Versions | None = None, folders: bool = False
    ) -> None:
        self.paths = paths
        remote = is_url(paths[0]) and not folders and (versions is None or versions[0] is not None)
        whole = remote and paths[0].endswith(_WHOLE)
        self.in_store = remote and not whole
        self._objects = RemoteObjects(paths, store or Store()) if self.in_store else None
        self._whole = WholeFiles(paths, store or Store()) if whole else None
        self._fetched = [] if self._whole is None else [FileVersion.of(path) for path in self._whole.paths]
        self.versions = self._present_versions() if versions is None else versions
        if self._whole is not None:
            for path, version, now in zip(paths, self.versions, self._whole.versions, strict=True):
                assert isinstance(version, Version)
                version.check(now, path)

    @classmethod
    def of(
        cls, paths: Sequence[str], store: Store | None, versions: Versions | VersionedFiles | None
    ) -> VersionedFiles:
        """Files that may be open already."""
        return versions if isinstance(versions, VersionedFiles) else cls(paths, store, versions)

    def __getitem__(self, number: int) -> Any:
        """A path, an object of which parts are fetched, or the address of a folder."""
        if self._whole is not None:
            return Path(self._whole.paths[number])
        path = self.paths[number]
        if self._objects is not None:
            return self._objects.by_url[path]
        return path if is_url(path) else Path(path)

    def opened(self, number: int, open_file: Callable[[Any, OpenOptions], T], options: OpenOptions) -> T:
        """What `open_file` makes of a file. It must not change meanwhile; errors name it as the user did."""
        self.check(number)
        file = self[number]
        try:
            found = open_file(file, options)
        except (ValueError, TypeError) as error:
            if self._whole is None or str(file) not in str(error):
                raise
            raise type(error)(str(error).replace(str(file), self.paths[number])) from error
        self.check(number)
        return found

    def check(self, number: int) -> None:
        """Refuse a file that was changed, with a FeedError. Fetching a block of an object does so, too."""
        version, path = self.versions[number], self.paths[number]
        if isinstance(version, FileVersion):
            version.check(path)
        elif self._whole is not None:  # a file of the cache
            self._fetched[number].compare(FileVersion.of(self._whole.paths[number]), path)
        elif version is not None and self._objects is not None:
            version.check(self._objects.by_url[path].version, path)

    def check_open(self, number: int) -> None:
        """Refuse a file that was written to while it stays open: see `FileVersion.check_open`."""
        version = self.versions[number]
        if isinstance(version, FileVersion):
            version.check_open(self.paths[number])
        elif self._whole is not None:
            self.check(number)

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

    def close(self) -> None:
        """Give up what is being fetched. Whole files stay until `release`, since they may be read again."""
        if self._objects is not None:
            self._objects.close()

    def release(self) -> None:
        """Let the cache evict whole files, which must not be read any more. Else they stay while this is alive."""
        if self._whole is not None:
            self._whole.close()

    def _present_versions(self) -> Versions:
        if self._objects is not None:
            return [self._objects.by_url[path].version for path in self.paths]
        if self._whole is not None:
            return self._whole.versions
        return [
            FileVersion.of(path) if Path(path).is_file() else None for path in self.paths
        ]  # opening reports it
