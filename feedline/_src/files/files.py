"""The files of a source, opened at once: local files, or objects in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from feedline._src.files.file import File, Indices
from feedline._src.files.local import LocalFile
from feedline._src.files.open_files import OpenFiles
from feedline._src.stores.options import Store
from feedline._src.stores.urls import is_url

T = TypeVar("T")
Place = tuple[int, Indices, Indices]
"""The number of a file, and offsets and lengths of parts of it."""


class Files(Sequence[File]):
    """Files by their numbers, each of one version. Thread-safe, and it pickles.

    Args:
      paths: of local files, or addresses of objects, which are all asked for at once.
      store: how objects are read; None: `Store()`.
      versions: those that they must have; None: the present ones.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: one is a folder.
      FeedError: one has another version, or the store cannot be read.
    """

    def __init__(self, paths: Sequence[str], store: Store | None = None, versions: Any = None) -> None:
        self.paths, self._store = list(paths), store
        self._opened = OpenFiles()
        self._objects: Any = None
        wanted = [None] * len(paths) if versions is None else versions
        self._files: list[File] = []
        if self.paths and is_url(self.paths[0]):
            from feedline._src.files.remote import RemoteFile
            from feedline._src.stores.opening import RemoteObjects

            self._objects = RemoteObjects(self.paths, store or Store())
            for path, version in zip(self.paths, wanted, strict=True):
                item = self._objects.by_url[path]
                if version is not None:
                    version.check(item.version, path)
                self._files.append(RemoteFile(item, store or Store()))
        else:
            pairs = zip(self.paths, wanted, strict=True)
            self._files = [LocalFile(path, version, self._opened) for path, version in pairs]

    @property
    def in_store(self) -> bool:
        """Whether they are objects in a store, so that it pays to say what will be read."""
        return self._objects is not None

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: Any) -> Any:
        return self._files[number]

    def opened(self, number: int, open_file: Callable[[File], T]) -> T:
        """What `open_file` makes of a file, which must not change meanwhile: a change explains an error better."""
        file = self._files[number]
        try:
            found = open_file(file)
        except Exception:
            file.check()
            raise
        file.check()
        return found

    def will_read(self, places: Iterable[Place], ahead: int) -> bool:
        """Begin to fetch parts that are read `ahead` batches later, of objects in a store.

        Returns:
          False if that is too early: they would not fit into a quarter of the cache beside those of the batches
          until then, or enough is in flight. Nothing was begun, and the caller asks again later.
        """
        if self._objects is None:
            return True
        blocks = [np.zeros(0, np.int64)]
        for number, offsets, lengths in places:
            item = self._objects.by_url[self.paths[number]]
            parts = zip(offsets.tolist(), lengths.tolist(), strict=True)
            blocks += [item.blocks_of(*part) for part in parts if part[1] > 0]
        return bool(self._objects.residency.fetch_ahead(np.concatenate(blocks), ahead))

    def close(self) -> None:
        """Close descriptors, and give up what is being fetched. A later read opens and fetches again."""
        self._opened.close()
        if self._objects is not None:
            self._objects.close()

    def __reduce__(self) -> Any:
        return Files, (self.paths, self._store, [file.version for file in self._files])
