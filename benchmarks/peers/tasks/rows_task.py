"""The task of the benchmark of rows: one file of bytes, of which each row is a slice."""

import dataclasses

import jax
import numpy as np
from task import Task


@dataclasses.dataclass(frozen=True)
class Rows(Task):
    """Rows of one size.

    Attributes:
      file: .npy with uint8[bytes], the same for every peer.
      row_bytes: bytes in a row; rows follow each other without gaps.
    """

    file: str
    row_bytes: int

    @property
    def spec(self):
        """The shape and dtype of a batch."""
        return jax.ShapeDtypeStruct((self.batch_rows, self.row_bytes), np.uint8)

    def __len__(self):
        return len(self.load(mapped=True))

    def load(self, mapped=False):
        """uint8[rows, row_bytes] in this process's memory, or mapped from the file."""
        flat = np.load(self.file, mmap_mode="r" if mapped else None)
        rows = len(flat) // (self.row_bytes * self.batch_rows) * self.batch_rows
        return flat[: rows * self.row_bytes].reshape(rows, self.row_bytes)

    def compare(self, batches, limit):
        """Compare batches with the rows of the file. `limit` is the number of batches to expect; None: all rows.

        A row is found by its first eight bytes, which are random, and compared as a whole.
        """
        rows = self.load()
        heads = np.ascontiguousarray(rows[:, :8]).view(np.uint64).ravel()
        by_head = np.argsort(heads)
        sorted_heads = heads[by_head]
        wrong, indices = 0, []
        for batch in batches:
            got = np.asarray(batch)
            found = np.searchsorted(sorted_heads, np.ascontiguousarray(got[:, :8]).view(np.uint64).ravel())
            index = by_head[np.minimum(found, len(rows) - 1)]
            wrong += int((rows[index] != got).any(axis=1).sum())
            indices.append(index)
        expected = len(rows) if limit is None else min(len(rows), limit * self.batch_rows)
        return self.report(np.concatenate(indices), wrong, expected)
