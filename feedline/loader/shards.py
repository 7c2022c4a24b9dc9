"""Which shard each row lies in, where shards follow each other. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_BUCKETS_A_SHARD = 4
_STEPS = 4


class Shards:
    """Rows 0 … n − 1, of which each shard has the next `lengths[i]`.

    Args:
      lengths: rows of each shard, 0 or more.

    Example:
      >>> shards = Shards([3, 0, 2])
      >>> len(shards), shards.of(np.array([4, 0, 3])).tolist()
      (5, [2, 0, 2])
      >>> [(shard, rows.tolist(), places) for shard, rows, places in shards.split(np.array([4, 0, 3]))]
      [(0, [0], slice(1, 2, None)), (2, [1, 0], array([0, 2]))]
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.ends = np.cumsum(lengths, dtype=np.int64)
        self.firsts = self.ends - np.asarray(lengths, np.int64)
        # A binary search costs 30 to 60 ns a row, more than copying it. A table of equal buckets says where to
        # begin, and a few comparisons end it, unless so many tiny shards share a bucket that a search is faster
        self._bucket = max(1, len(self) // (_BUCKETS_A_SHARD * len(self.ends)))
        starts = np.arange(0, len(self), self._bucket, dtype=np.int64)
        self._table = np.searchsorted(self.ends, starts, side="right")
        self._searches = bool((np.diff(self._table) > _STEPS).any())

    def __len__(self) -> int:
        return int(self.ends[-1])

    def check(self, rows: Indices) -> None:
        """Raise IndexError if there is no such row."""
        # as unsigned words negative ones are the greatest: one pass
        if len(rows) and int(rows.astype(np.int64, copy=False).view(np.uint64).max()) >= len(self):
            raise IndexError(f"rows are 0 to {len(self) - 1}, got {rows.min()} to {rows.max()}")

    def of(self, rows: Indices) -> Indices:
        """int64[k]: the shard of each row.

        Raises:
          IndexError: there is no such row.
        """
        self.check(rows)
        if len(self.ends) == 1:
            return np.zeros(len(rows), np.int64)
        if self._searches:
            return np.searchsorted(self.ends, rows, side="right")
        shard = self._table.take(rows // self._bucket)
        while (beyond := rows >= self.ends.take(shard)).any():
            shard += beyond
        return shard

    def split(self, rows: Indices) -> Iterator[tuple[int, Indices, slice | Indices]]:
        """For each shard that has some of `rows`, ascending: (shard, rows counted in it, their places in `rows`).

        Places are a slice where they are adjacent, so that what is read may be written straight there.
        """
        shard = self.of(rows)
        for one, places in places_by(shard, len(self.ends)):
            yield one, rows[places] - self.firsts[one], places


def places_by(labels: Indices, count: int) -> Iterator[tuple[int, slice | Indices]]:
    """For each label that occurs, ascending: its places, ascending; a slice where they are adjacent.

    Args:
      labels: int64[k], each 0 … count − 1.

    Example:
      >>> list(places_by(np.array([7, 2, 2, 7]), 8))
      [(2, slice(1, 3, None)), (7, array([0, 3]))]
    """
    if len(labels) == 0:
        return
    if (labels == labels[0]).all():
        yield int(labels[0]), slice(0, len(labels))
        return
    narrow = labels.astype(np.uint16) if count < 1 << 16 else labels  # 16 bits: sorted in linear time
    places = np.argsort(narrow, kind="stable")
    ordered = labels.take(places)
    cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(labels)], strict=True):
        here = places[start:stop]
        adjacent = here[-1] - here[0] == stop - start - 1  # ascending: the sort is stable
        yield int(ordered[start]), slice(int(here[0]), int(here[-1]) + 1) if adjacent else here
