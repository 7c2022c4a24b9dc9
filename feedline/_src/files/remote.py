"""A file in a store: ranges of its bytes come through the cache on local disk."""

from __future__ import annotations

from typing import Any, BinaryIO

import numpy as np

from feedline._src.files.file import Bytes, File, Indices, place_in
from feedline._src.files.version import FileVersion
from feedline._src.stores.opening import RemoteObjects
from feedline._src.stores.options import Store
from feedline._src.stores.remote_object import RemoteObject, open_object
from feedline._src.stores.whole_files import WholeFiles


class RemoteFile(File):
    """A `File` that is an object in a store.

    Args:
      item: the object, open.
      options: cache and patience.
    """

    in_store = True

    def __init__(self, item: RemoteObject, options: Store) -> None:
        self.item = item
        self._options = options
        self.name, self.version, self.size = str(item.url), item.version, item.size
        self._whole: WholeFiles | None = None
        self._fetched: tuple[str, FileVersion] | None = None

    def fetched_to(self, path: str) -> None:
        """Note a local file of all bytes, which must not change until `check_open` was called the last time."""
        self._fetched = path, FileVersion.of(path)

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """See `File.read`."""
        residency = self.item._residency
        with residency.reading():
            parts = list(zip(offsets.tolist(), lengths.tolist(), strict=True))
            blocks = [self.item.blocks_of(*part) for part in parts if part[1] > 0]
            residency.wait_for(np.concatenate([np.zeros(0, np.int64), *blocks]))
            return [bytes(self.item.memory[at : at + length]) for at, length in parts]

    def memory(self) -> Bytes | None:
        """See `File.memory`."""
        return None

    def path(self) -> str:
        """See `File.path`."""
        if self._whole is None:
            whole = WholeFiles([self.name], self._options)
            self.item.version.check(whole.versions[0], self.name)
            self._whole = whole
            self.fetched_to(whole.paths[0])
        return self._whole.paths[0]

    @property
    def has_path(self) -> bool:
        """See `File.has_path`."""
        return self._whole is not None

    def open(self, sequential: bool = False) -> BinaryIO:
        """See `File.open`."""
        return open_object(self.item, sequential)

    def samples(self, ranges: list[tuple[int, int]]) -> list[bytes]:
        """See `File.samples`."""
        return self.item.samples(ranges)

    @property
    def stamp(self) -> str:
        """Its ETag; a weak one with a random number, so that nothing is taken for what was made of it before."""
        return self.item.version.cache_tag

    def places_beside(self, suffix: str) -> list[str]:
        """See `File.places_beside`: in the cache folder."""
        return [place_in(self._options.folder, f"{self.name} {self.stamp}", suffix)]

    def check(self) -> None:
        """Do nothing: the version is compared whenever bytes are fetched."""

    def check_open(self) -> None:
        """See `File.check_open`: of the file that `path` has returned."""
        if self._fetched is not None:
            path, version = self._fetched
            version.compare(FileVersion.of(path), self.name)

    def __reduce__(self) -> Any:
        return _opened_again, (self.name, self._options, self.version)


def _opened_again(name: str, options: Store, version: Any) -> RemoteFile:
    item = RemoteObjects([name], options).by_url[name]
    version.check(item.version, name)
    return RemoteFile(item, options)
