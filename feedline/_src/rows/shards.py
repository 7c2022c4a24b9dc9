"""Maps each row to its shard: here, one of the files, groups or sources whose rows follow one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


class Shards:
    """Rows 0 … n − 1, divided into consecutive shards: shard i has the next `lengths[i]` rows.

    Args:
      lengths: how many rows each shard has, 0 or more.

    Example:
      >>> shards = Shards([3, 0, 2])
      >>> len(shards), shards.of(np.array([4, 0, 3])).tolist()
      (5, [2, 0, 2])
      >>> [(shard, rows.tolist(), offsets) for shard, rows, offsets in shards.split(np.array([4, 0, 3]))]
      [(0, [0], slice(1, 2, None)), (2, [1, 0], array([0, 2]))]
    """

    def __init__(self, lengths: Sequence[int] | Indices) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.ends = np.cumsum(self.lengths, dtype=np.int64)
        self.firsts: Indices = self.ends - self.lengths

    def __len__(self) -> int:
        return int(self.ends[-1])

    def of(self, rows: Indices) -> Indices:
        """int64[k]: the shard of each row.

        Raises:
          IndexError: one of these rows does not exist.
        """
        # as uint64, negative rows are huge, so one maximum detects rows below and above the range
        if len(rows) and int(rows.astype(np.int64, copy=False).view(np.uint64).max()) >= len(self):
            raise IndexError(f"rows are 0 to {len(self) - 1}, got {rows.min()} to {rows.max()}")
        if len(self.ends) == 1:
            return np.zeros(len(rows), np.int64)
        return np.searchsorted(self.ends, rows, side="right")

    def split(self, rows: Indices) -> Iterator[tuple[int, Indices, slice | Indices]]:
        """Yield (shard, row numbers within the shard, offsets in `rows`) for each shard that occurs, ascending.

        Adjacent offsets are yielded as a slice, so rows can be read directly into a slice of an output array.
        """
        shard = self.of(rows)
        for one, offsets in offsets_by_label(shard, len(self.ends)):
            yield one, rows[offsets] - self.firsts[one], offsets


def offsets_by_label(labels: Indices, count: int) -> Iterator[tuple[int, slice | Indices]]:
    """Yield (label, its offsets in `labels`) for each label that occurs, ascending; adjacent offsets as a slice.

    Args:
      labels: int64[k], each 0 … count − 1.

    Example:
      >>> list(offsets_by_label(np.array([7, 2, 2, 7]), 8))
      [(2, slice(1, 3, None)), (7, array([0, 3]))]
    """
    if len(labels) == 0:
        return
    narrow = labels.astype(np.uint16) if count < 1 << 16 else labels  # NumPy sorts uint16 in linear time
    offsets = np.argsort(narrow, kind="stable")
    ordered = labels.take(offsets)
    cuts = np.flatnonzero(np.diff(ordered)) + 1
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(labels)], strict=True):
        here = offsets[start:stop]
        adjacent = here[-1] - here[0] == stop - start - 1  # `here` ascends, because the sort is stable
        yield int(ordered[start]), slice(int(here[0]), int(here[-1]) + 1) if adjacent else here
