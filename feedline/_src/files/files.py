"""The files of a source, opened together: local files, or objects in a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from feedline._src.errors import FeedError
from feedline._src.files.cache import BLOCK_BYTES
from feedline._src.files.cached_range import blocks_of
from feedline._src.files.file import OPEN_FILES, File, Indices, LruCache, OpenFile, Version, digests_of
from feedline._src.files.store import Store, is_url

if TYPE_CHECKING:
    from feedline._src.files.remote import RemoteFile

T = TypeVar("T")
Place = tuple[int, Indices, Indices]
"""The number of a file, and the offsets and lengths of parts of that file."""


class Files(Sequence[File]):
    """Files by their numbers, each of one version. Thread-safe and picklable.

    Attributes:
      open_files: an LRU cache of open local files. Open indices of files count towards its limit.
      selected: int64[k]: for each row of the source, its row in the files; None: the same row.

    Args:
      paths: paths of local files, and addresses of objects; the versions of all objects are requested at once.
      versions: the expected versions; None: the present ones.
      places: for each local file its absolute path, for each object None. If None: where the paths lead now.

    Raises:
      The errors of `File`. FeedError: also if the store cannot be read.
    """

    selected: Indices | None = None

    def __init__(
        self,
        paths: Sequence[str],
        store: Store | None = None,
        versions: Sequence[Version] | None = None,
        places: Sequence[str | None] | None = None,
    ) -> None:
        self.paths, self._store = list(paths), store
        self.open_files: LruCache[OpenFile] = LruCache(OPEN_FILES)
        self._objects: dict[str, RemoteFile] = {}
        if urls := list(dict.fromkeys(path for path in self.paths if is_url(path))):
            from feedline._src.files.remote import open_objects

            try:
                self._objects = open_objects(urls, store or Store())
            except FileNotFoundError as error:
                if versions is None:
                    raise
                raise FeedError(f"an object must exist while a feed reads it: {error}", stage="read") from error
        nothing = [None] * len(paths)
        wanted = zip(self.paths, versions or nothing, places or nothing, strict=True)
        self._files = [self._file(*each) for each in wanted]

    def _file(self, path: str, version: Version | None, place: str | None) -> File:
        file = self._objects.get(path)
        if file is None:
            return File(path, version, self.open_files, place)
        if version is not None:
            version.compare(file.version, path)
        file.open_files = self.open_files
        return file

    @property
    def in_store(self) -> bool:
        """Whether any file is an object in a store, so that calls of `will_read` are useful."""
        return bool(self._objects)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, number: Any) -> Any:
        return self._files[number]

    def opened(self, number: int, open_file: Callable[[File], T]) -> T:
        """Return the result of `open_file` for a file. If the file changed, a FeedError replaces other errors."""
        try:
            return open_file(self._files[number])
        finally:
            self._files[number].check()

    def samples(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> list[list[bytes]]:
        """Return `File.samples` of each file, for its ranges. The samples of all objects are fetched at once."""
        finish = [file.start_samples(list(some)) for file, some in zip(self._files, ranges, strict=True)]
        return [samples() for samples in finish]

    @property
    def digests(self) -> list[list[Any]]:
        return digests_of(self._files)

    def fetch_whole(self) -> None:
        """Fetch all objects whole, for `File.with_path`. FeedError: also if the cache is too small for them."""
        if self._objects:
            from feedline._src.files.remote import fetch_whole

            fetch_whole(list(self._objects.values()))

    def will_read(self, places: Iterable[Place], ahead: int) -> bool:
        """Start fetching parts of objects in a store for the batch that is `ahead` batches after the current one.

        If it is too early (`Cache.is_too_early`), starts nothing and returns False; the caller asks again later.
        """
        wanted = [
            (file, blocks_of(offsets, np.minimum(offsets + lengths, file.size)))
            for number, offsets, lengths in places
            if (file := self._objects.get(self.paths[number])) is not None
        ]
        blocks = sum(len(some) for _, some in wanted)
        if blocks and wanted[0][0].cache.is_too_early(blocks * BLOCK_BYTES, ahead):
            return False
        for file, some in wanted:
            file.fetch(some)
        return True

    def close(self) -> None:
        """Close descriptors, and cancel requests in flight. A later read opens and fetches again."""
        self.open_files.clear()
        for file in self._objects.values():
            file.close()

    def __reduce__(self) -> Any:
        versions = [file.version for file in self._files]
        places = [None if file.in_store else file.place for file in self._files]
        return Files, (self.paths, self._store, versions, places)
