"""The files of a source, opened at once: local files, or objects in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from feedline._src.files.file import File, Indices
from feedline._src.files.local import LocalFile
from feedline._src.files.open_files import OpenFiles
from feedline._src.rows import digests
from feedline._src.stores.options import Store
from feedline._src.stores.urls import is_url

T = TypeVar("T")
Place = tuple[int, Indices, Indices]
"""The number of a file, and offsets and lengths of parts of it."""


class Files(Sequence[File]):
    """Files by their numbers, each of one version. Thread-safe, and it pickles.

    Attributes:
      paths: as given.
      open_files: local files that were read last, open; also indices of these files, within one bound.

    Args:
      paths: of local files, and addresses of objects, which are all asked for at once.
      store: how objects are read; None: `Store()`.
      versions: those that they must have; None: the present ones.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: one is a folder.
      FeedError: one has another version, or the store cannot be read.
    """

    def __init__(self, paths: Sequence[str], store: Store | None = None, versions: Any = None) -> None:
        self.paths, self._store = list(paths), store
        self.open_files = OpenFiles()
        self._objects: Any = None
        self._whole: Any = None
        if urls := [path for path in self.paths if is_url(path)]:
            from feedline._src.stores.opening import RemoteObjects

            self._objects = RemoteObjects(urls, store or Store())
        self._items: list[Any] = [self._objects.by_url[path] if is_url(path) else None for path in self.paths]
        """The object of each file; None if it lies on local disk."""
        wanted = [None] * len(paths) if versions is None else versions
        self._files: list[File] = [self._file(*each) for each in zip(self.paths, self._items, wanted, strict=True)]

    def _file(self, path: str, item: Any, version: Any) -> File:
        if item is None:
            return LocalFile(path, version, self.open_files)
        from feedline._src.files.remote import RemoteFile

        if version is not None:
            version.check(item.version, path)
        return RemoteFile(item, self._store or Store())

    @property
    def in_store(self) -> bool:
        """Whether any of them is an object in a store, so that it pays to say what will be read."""
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

    def samples(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> list[list[bytes]]:
        """For each file the bytes of its (offset, length), as of `File.samples`: of all objects at once."""
        each = list(zip(self._files, self._items, ranges, strict=True))
        started = [[] if item is None else item.start_samples(some) for _, item, some in each]
        return [
            file.samples(list(some)) if item is None else [item.result(future) for future in futures]
            for (file, item, some), futures in zip(each, started, strict=True)
        ]

    @property
    def digests(self) -> list[list[Any]]:
        """The `File.digest` of each: of all objects at once."""
        ranges = [digests.samples_of_file(file.size) for file in self._files]
        found = zip(self._files, self.samples(ranges), strict=True)
        return [digests.of_samples(file.size, samples) for file, samples in found]

    def local_paths(self) -> list[str]:
        """The `File.path` of each, all fetched at once.

        Raises:
          FeedError: also if the cache is too small for all of them.
        """
        if self._objects is not None and self._whole is None:
            from feedline._src.stores.whole_files import WholeFiles

            far: list[Any] = [
                file for file, item in zip(self._files, self._items, strict=True) if item is not None
            ]
            whole = WholeFiles([file.name for file in far], self._store or Store())
            for file, version, path in zip(far, whole.versions, whole.paths, strict=True):
                file.version.check(version, file.name)
                file.fetched_to(path)
            self._whole = whole
        fetched = iter(self._whole.paths if self._whole is not None else ())
        return [
            path if item is None else next(fetched) for path, item in zip(self.paths, self._items, strict=True)
        ]

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
            item, parts = self._items[number], zip(offsets.tolist(), lengths.tolist(), strict=True)
            if item is not None:
                blocks += [item.blocks_of(*part) for part in parts if part[1] > 0]
        return bool(self._objects.residency.fetch_ahead(np.concatenate(blocks), ahead))

    def close(self) -> None:
        """Close descriptors, give up what is being fetched, and let the cache evict what was fetched whole.

        A later read opens and fetches again.
        """
        self.open_files.close()
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.close()
        if self._objects is not None:
            self._objects.close()

    def __reduce__(self) -> Any:
        return Files, (self.paths, self._store, [file.version for file in self._files])
