"""The source of records: elements of a `grain.MapDataset`, each written directly into the batch."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
import numpy.typing as npt

from feedline._src.errors import FeedError, RowError
from feedline._src.rows.bad_rows import check_concerns_a_row
from feedline._src.rows.record_leaves import (
    as_arrays,
    digest_of,
    share_memory,
    write_record,
    write_uniform_records,
)
from feedline._src.rows.row_source import Rows
from feedline._src.rows.source import OwnOrder, Source
from feedline._src.rows.spec import RowSpec

_RECORDS_AT_ONCE = 64
"""Records that are requested from Grain in one call, and so are in memory beside the batch."""


class RecordSource(Source):
    """A `RowSource` over a Grain dataset, which decodes and augments; feedline determines the order.

    Args:
      shuffled: whether the order is shuffled by default, as for objects that are no Grain dataset.

    Row indices may be epoch·n + row, so that Grain's own random maps differ between epochs.

    Raises:
      ValueError: the dataset is empty.
      RowError: its first element cannot be read, or is None.

    Example:
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
        first = self._element(0)
        self._spec = RowSpec.of(as_arrays(first))
        self._at_once = 1 if self._may_reuse_memory(first) else _RECORDS_AT_ONCE
        self.spec = self._spec.tree([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._spec.leaves])

    @property
    def identity(self) -> dict[str, Any]:
        """Digests of the first, the middle and the last element."""
        return self._identity(allow_bad_rows=False)

    def identity_allowing_bad_rows(self) -> dict[str, Any]:
        """As `identity`, but with None for an element that cannot be read."""
        return self._identity(allow_bad_rows=True)

    def _identity(self, allow_bad_rows: bool) -> dict[str, Any]:
        n, sampled = len(self._dataset), list[str | None]()
        for i in sorted({0, n // 2, n - 1}):
            try:
                sampled.append(digest_of(self._element(i)))
            except RowError as error:
                if not allow_bad_rows:
                    raise
                check_concerns_a_row(error)
                sampled.append(None)
        return {"kind": "records", "length": n, "sampled": sampled}

    def _may_reuse_memory(self, first: Any) -> bool:
        """Whether the last element lies in the memory of the first: a decoder may use one buffer for all."""
        try:
            return share_memory(first, self._element(len(self._dataset) - 1))
        except (RowError, TypeError, ValueError):
            return True  # unknown

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: npt.NDArray[np.int64], out: Any) -> None:
        """Write element rows[i] to index i of each leaf of `out`."""
        targets = jax.tree_util.tree_leaves(out)
        indices = rows.tolist()
        for start in range(0, len(indices), self._at_once):
            records = tuple(self._elements(indices[start : start + self._at_once]))
            if not write_uniform_records(records, self._spec, targets, start):
                self._write_one_by_one(records, indices, targets, start)

    def read_positioned(self, rows: Rows, out: Any) -> None:
        """As `read`, of other elements in each epoch, for the dataset's own random maps."""
        n, last = len(self._dataset), int(rows.epoch.max())
        if (last + 1) * n > 1 << 63:
            raise FeedError(
                f"a Grain dataset is read at the index epoch × {n} + row, which has to be below 2^63; epoch "
                f"{last} is too late; seek to an earlier epoch",
                stage="read",
            )
        self.read(rows.epoch * n + rows.index, out)

    def _write_one_by_one(
        self, records: Sequence[Any], indices: list[int], targets: list[Any], start: int
    ) -> None:
        for i, record in enumerate(records, start):
            try:
                write_record(record, self._spec, targets, i)
            except (TypeError, ValueError, OverflowError) as error:
                raise RowError(
                    f"every record must have the form of the first: {error}",
                    stage="read",
                    row=indices[i] % len(self._dataset),
                ) from error

    def _elements(self, indices: list[int]) -> Iterable[Any]:
        """The elements, requested in one call, which saves a sixth of Grain's time; one by one if that fails.

        Grain's method for this is private, so it may be missing. After an error, reading one by one finds the
        row that is to blame.
        """
        try:
            records = self._dataset._getitems(indices)
        except Exception:  # noqa: BLE001
            return map(self._element, indices)
        whole = len(records) == len(indices) and all(record is not None for record in records)
        return records if whole else map(self._element, indices)

    def _element(self, index: int) -> Any:
        row = index % len(self._dataset)
        try:
            record = self._dataset[index]
        except Exception as error:
            raise RowError(
                f"the dataset failed on this row with {type(error).__name__}: {error}", stage="read", row=row
            ) from error
        if record is None:
            filter_name = next(_filters(self._dataset), "a transformation")
            raise RowError(
                f"a MapDataset must have an element at every index, and {filter_name} left None here; a filter "
                "changes the number of rows, so filter a stream: pass dataset.to_iter_dataset() instead",
                stage="read",
                row=row,
            )
        return record


def _filters(dataset: Any) -> Iterator[str]:
    """The filters that a dataset applies, the last one first."""
    if "Filter" in type(dataset).__name__:
        yield str(dataset)
    for parent in getattr(dataset, "parents", ()):
        yield from _filters(parent)
