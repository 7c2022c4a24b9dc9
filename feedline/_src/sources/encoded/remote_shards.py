"""Files of records in a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from feedline._src.rows.shards import Indices
from feedline._src.sources.formats.open_options import OpenOptions
from feedline._src.stores.opening import RemoteObjects
from feedline._src.stores.options import Store
from feedline._src.stores.remote_object import RemoteObject
from feedline._src.stores.residency import BLOCK_BYTES
from feedline._src.stores.urls import is_url


class RemoteParts:
    """An object as `OpenFile`, for parts whose blocks are present.

    Args:
      item: the object.
    """

    def __init__(self, item: RemoteObject) -> None:
        self._item = item

    def check(self) -> None:
        """Do nothing: the version is compared whenever a block is fetched."""

    def read(self, offsets: Indices, lengths: Indices) -> list[bytes]:
        """As of an `OpenFile`."""
        memory = self._item.memory
        return [
            bytes(memory[at : at + length]) for at, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
        ]


class RemoteShards:
    """The objects of a source of records.

    Attributes:
      objects: open.
    """

    def __init__(self, paths: Sequence[str], options: OpenOptions) -> None:
        self.objects = RemoteObjects(paths, options.store or Store())

    @classmethod
    def of(cls, paths: Sequence[str], options: OpenOptions) -> RemoteShards | None:
        """The objects, if the paths are addresses in a store."""
        return cls(paths, options) if is_url(paths[0]) else None

    def parts(self, path: str) -> RemoteParts:
        """An object whose parts are read."""
        return RemoteParts(self.objects.by_url[path])

    @contextlib.contextmanager
    def present(self, places: Iterable[tuple[str, Indices]]) -> Iterator[None]:
        """Within the `with` block, these parts can be read.

        Args:
          places: addresses, and int64[k, 2], the offset and length of parts of each.

        Raises:
          FeedError: they cannot be fetched.
        """
        with self.objects.residency.reading():
            self.objects.residency.wait_for(self._blocks(places))
            yield

    def fetch_ahead(self, places: Iterable[tuple[str, Indices]], ahead: int) -> bool:
        """Start to fetch parts that are read `ahead` batches later. Returns False if that is too early."""
        return self.objects.residency.fetch_ahead(self._blocks(places), ahead)

    def _blocks(self, places: Iterable[tuple[str, Indices]]) -> Indices:
        found = [np.zeros(0, np.int64)]
        for path, parts in places:
            item = self.objects.by_url[path]
            offset, length = parts[parts[:, 1] > 0].T
            first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
            longest = int((last - first).max(initial=0))
            spread = np.minimum(first[:, None] + np.arange(longest + 1), last[:, None])
            found.append(item.first_block + np.unique(spread))
        return np.concatenate(found)
