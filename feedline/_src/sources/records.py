"""Records: elements of a `grain.MapDataset`. Each is written directly into the batch."""

from __future__ import annotations

import sys
from typing import Any

import grain
import jax

from feedline._src.errors import FeedError, RowError
from feedline._src.rows.bad_rows import check_concerns_a_row
from feedline._src.rows.source import Indices, OwnOrder, Rows, Source
from feedline._src.rows.spec import RowSpec
from feedline._src.rows.values import as_arrays, digest_of, write_record


class RecordSource(Source):
    """A `Source` over a Grain dataset. The dataset decodes and augments; feedline determines the order.

    With one reading thread, a decoder may use the same buffer for all elements: each is written before the next
    one is read.

    Args:
      shuffled: whether the default order is shuffled. Pass True if the dataset only wraps a user's object.

    `read` also accepts indices epoch·n + row, with n = len(dataset), so that Grain's random maps differ by epoch.

    Raises:
      ValueError: the dataset is empty.
      RowError: the first element cannot be read, or is None.

    Example:
      >>> import numpy as np
      >>> source = RecordSource(grain.MapDataset.range(5).map(lambda i: {"x": np.float32(i)}))
      >>> out = {"x": np.empty(2, np.float32)}
      >>> source.read(np.array([4, 1]), out)
      >>> out["x"].tolist()
      [4.0, 1.0]
    """

    format = "records"
    positioned = True

    def __init__(self, dataset: grain.MapDataset[Any], shuffled: bool = False) -> None:
        self._dataset, self.shuffled = dataset, shuffled
        self.own_order: OwnOrder = "repeated" if len(dataset) == sys.maxsize else ""
        if len(dataset) == 0:
            raise ValueError("a source must have at least one row, got a MapDataset of length 0")
        self._sampled_rows = sorted({0, len(dataset) // 2, len(dataset) - 1})
        self._spec = RowSpec.of(as_arrays(self._element(0)))
        self.spec = self._spec.structs

    @property
    def identity(self) -> dict[str, Any]:
        """Digests of the first, the middle and the last element; None for an element that cannot be read."""
        digests: list[str | None] = []
        for row in self._sampled_rows:
            try:
                digests.append(digest_of(self._element(row)))
            except RowError as error:
                check_concerns_a_row(error)
                digests.append(None)
        return {"kind": "records", "length": len(self), "sampled": digests}

    def check_rows(self) -> None:
        """See `Indexed.check_rows`. Reads the sampled elements, since a filter may have left None there."""
        for row in self._sampled_rows:
            self._element(row)

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: Indices, out: Any) -> None:
        """Write element rows[i] to index i of each leaf of `out`."""
        targets = jax.tree_util.tree_leaves(out)
        for i, index in enumerate(rows.tolist()):
            record = self._element(index)
            try:
                write_record(record, self._spec, targets, i)
            except (TypeError, ValueError, OverflowError) as error:
                raise self._bad_row(index, f"every record must have the form of the first: {error}") from error

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """Read index epoch·n + row of the dataset, so that the dataset's random maps differ between epochs."""
        n, last = len(self), int(rows.epoch.max())
        if (last + 1) * n > 1 << 63:
            raise FeedError(
                f"a Grain dataset is read at the index epoch × {n} + row, which must be below 2^63, got epoch "
                f"{last}; seek to an earlier epoch",
                stage="read",
            )
        self.read(rows.epoch * n + rows.index, out)

    def _element(self, index: int) -> Any:
        try:
            record = self._dataset[index]
        except Exception as error:
            name = type(error).__name__
            raise self._bad_row(index, f"the dataset failed on this row with {name}: {error}") from error
        if record is None:
            raise self._bad_row(
                index,
                "a MapDataset must have an element at every index, and a filter or another step left None "
                "here; a filter changes the number of rows, so filter a stream: pass dataset.to_iter_dataset() "
                "instead",
            )
        return record

    def _bad_row(self, index: int, message: str) -> RowError:
        return RowError(message, stage="read", row=index % len(self))
