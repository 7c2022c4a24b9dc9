"""Which blocks of objects in a store the rows of arrays lie in."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feedline._src.rows import digests
from feedline._src.rows.shards import Indices, Shards
from feedline._src.stores.opening import RemoteObjects
from feedline._src.stores.remote_object import RemoteObject
from feedline._src.stores.residency import BLOCK_BYTES

Array = npt.NDArray[Any]


class _Place(NamedTuple):
    """Where a part lies: the object, the offset of its first row, and the size of a row, in bytes."""

    item: RemoteObject
    offset: int
    row_bytes: int


class _Leaf:
    """Where the rows of one leaf lie: for each part, the block and the byte in it where it begins, and its
    stride."""

    def __init__(self, parts: Sequence[Array], objects: Sequence[RemoteObject]) -> None:
        self._shards = Shards([len(part) for part in parts])
        self._first_block = np.zeros(len(parts), np.int64)
        self._start = np.zeros(len(parts), np.int64)
        self._stride = np.zeros(len(parts), np.int64)
        self._row_bytes = np.zeros(len(parts), np.int64)
        """0 for parts in memory, such as a compressed member of a `.npz`."""
        for i, part in enumerate(parts):
            place = _place(part, objects)
            if place is not None:
                self._first_block[i] = place.item.first_block
                self._start[i], self._stride[i], self._row_bytes[i] = (
                    place.offset,
                    part.strides[0],
                    place.row_bytes,
                )

    @property
    def is_remote(self) -> bool:
        """Whether any part lies in an object."""
        return bool(self._row_bytes.any())

    def blocks(self, rows: Indices) -> Indices:
        """The numbers of the blocks of some rows, with repeats."""
        shard = self._shards.of(rows)
        row_bytes = self._row_bytes.take(shard)
        start = self._start.take(shard) + (rows - self._shards.firsts.take(shard)) * self._stride.take(shard)
        first = start // BLOCK_BYTES
        more = (start + np.maximum(row_bytes, 1) - 1) // BLOCK_BYTES - first
        found: Indices = self._first_block.take(shard) + first
        if (row_bytes == 0).any():
            found, more = found[row_bytes > 0], more[row_bytes > 0]
        longest = int(more.max(initial=0))
        if longest == 0:
            return found
        spread = np.minimum(np.arange(longest + 1), more[:, None]) + found[:, None]
        return np.unique(spread).astype(np.int64, copy=False)


def _place(part: Array, objects: Sequence[RemoteObject]) -> _Place | None:
    """Where an array lies; None if it is no view of an object.

    Args:
      objects: by ascending address.
    """
    if len(part) == 0 or not objects:
        return None
    item = objects[max(0, bisect.bisect_right(objects, part.ctypes.data, key=lambda item: item.address) - 1)]
    if not item.address <= part.ctypes.data < item.address + item.size:
        return None
    low, high = np.lib.array_utils.byte_bounds(part[:1])
    return _Place(item, low - item.address, high - low)


class RemoteRows:
    """Makes the rows resident that a read of arrays in a store needs.

    Args:
      leaves: the parts of each leaf: arrays, of which some are views of objects.
      objects: of the store.
    """

    def __init__(self, leaves: Sequence[Sequence[Array]], objects: RemoteObjects) -> None:
        self._objects = objects
        self._residency = objects.residency
        self._ordered = sorted(
            (item for item in objects.by_url.values() if item.size), key=lambda item: item.address
        )
        self._leaves = [_Leaf(parts, self._ordered) for parts in leaves]

    @contextlib.contextmanager
    def present(self, leaves: Sequence[int], rows: Indices) -> Iterator[None]:
        """Within the `with` block, these rows of these leaves can be read.

        Raises:
          FeedError: they cannot be fetched.
        """
        with self._residency.reading():
            self._residency.wait_for(self._blocks(leaves, rows))
            yield

    @property
    def is_complete(self) -> bool:
        """Whether all rows can be read."""
        return self._residency.is_complete

    @contextlib.contextmanager
    def all_present(self) -> Iterator[bool]:
        """Whether all rows can be read within the `with` block."""
        with self._residency.reading():
            yield self._residency.is_complete

    def fetch_ahead(self, rows: Indices, ahead: int) -> bool:
        """Start to fetch rows that are read `ahead` batches later. Returns False if that is too early."""
        return self._residency.fetch_ahead(self._blocks(range(len(self._leaves)), rows), ahead)

    def digests(self, leaves: Sequence[Sequence[Array]], samples: int) -> list[list[Any]]:
        """As `digests.of_array` of each part of each leaf. Only the sampled rows are fetched, all at once."""
        places = [[_place(part, self._ordered) for part in parts] for parts in leaves]
        ranges = [
            (
                str(place.item.url),
                place.offset + row * part.strides[0],
                min(place.row_bytes, digests.SAMPLED_BYTES),
            )
            for parts, of_parts in zip(leaves, places, strict=True)
            for part, place in zip(parts, of_parts, strict=True)
            if place is not None and part[0, ...].flags.c_contiguous
            for row in digests.sampled(len(part), samples)
        ]
        found = self._objects.samples(ranges)

        def digest(part: Array, place: _Place | None) -> list[Any]:
            if place is None:
                return digests.of_array(part, samples)
            if not part[0, ...].flags.c_contiguous:
                with self._residency.reading():
                    low = place.item.first_block
                    self._residency.wait_for(np.arange(low, low + place.item.blocks))
                    return digests.of_array(part, samples)
            url, length = str(place.item.url), min(place.row_bytes, digests.SAMPLED_BYTES)

            def row_at(row: int) -> Array:
                return np.frombuffer(found[url, place.offset + row * part.strides[0], length], np.uint8)

            return digests.of_rows(part.dtype, part.shape, row_at, samples)

        return [
            [digest(part, place) for part, place in zip(parts, of_parts, strict=True)]
            for parts, of_parts in zip(leaves, places, strict=True)
        ]

    def _blocks(self, leaves: Sequence[int], rows: Indices) -> Indices:
        blocks = [self._leaves[leaf].blocks(rows) for leaf in leaves if self._leaves[leaf].is_remote]
        return np.concatenate([np.zeros(0, np.int64), *blocks])
