"""Files or objects in a store by their numbers, with the versions that they must keep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from feedline._src.sources.formats.file_version import FileVersion
from feedline._src.stores.client import Version
from feedline._src.stores.opening import RemoteObjects
from feedline._src.stores.options import Store
from feedline._src.stores.urls import is_url

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
