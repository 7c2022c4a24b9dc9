"""The columnar source of a Hugging Face dataset: numbers where Arrow has them, in memory or mapped from files."""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from feedline._src.formats.open_options import OpenOptions
from feedline._src.placement.plan import Columns
from feedline._src.rows.encoded_source import EncodedRows
from feedline._src.rows.indexed import IndexedSource
from feedline._src.rows.shards import Indices
from feedline._src.sources.arrays import ArraySource
from feedline._src.sources.hugging_face.columns import trees_of
from feedline._src.sources.hugging_face.dataset import HuggingFaceDataset, OpenDataset
from feedline._src.sources.hugging_face.records import DatasetRecords, has_bytes


def open_dataset(dataset: HuggingFaceDataset, options: OpenOptions) -> IndexedSource | EncodedRows:
    """The rows of a `datasets.Dataset`: encoded ones if a chosen column has bytes, text or files.

    Raises:
      ValueError: an option other than columns, nulls, lists of different lengths, or what `OpenDataset` refuses.
      TypeError: a column holds neither numbers nor bytes.
    """
    if others := options.given() - {"columns"}:
        names = ", ".join(sorted(others))
        raise ValueError(f"a dataset of Hugging Face takes the option columns alone, got {names}; leave it out")
    found = OpenDataset(dataset, options)
    if has_bytes(found.table.schema):
        return DatasetRecords(found)
    columns = DatasetColumns(found)
    return columns if found.rows is None else SelectedRows(columns)


class DatasetColumns(ArraySource):
    """All rows of the table of a dataset, as views of its memory."""

    def __init__(self, found: OpenDataset) -> None:
        trees, nulls = trees_of(found.table)
        for name, null in nulls.items():
            _check_no_null(name, null if found.rows is None else null[found.rows])
        super().__init__(trees)
        self.found = found
        self._opened.versions.update(found.versions)
        self._files_to_check = itertools.cycle(found.versions.items())

    @property
    def identity(self) -> dict[str, Any]:
        """Dtypes, shapes, and sampled rows, however the dataset is cut into files and pieces."""
        return _identity(self, self.found.sampled_rows)

    @property
    def picklable(self) -> bool:
        """Whether worker processes can map the files of the dataset."""
        return bool(self.found.versions)

    def __reduce__(self) -> Any:
        return DatasetColumns, (self.found,)


class SelectedRows(IndexedSource):
    """The rows of a dataset that was shuffled, filtered or selected from: some rows of a table, in another order.

    Args:
      columns: all rows of the table.
    """

    def __init__(self, columns: DatasetColumns) -> None:
        self._columns = columns
        self.spec = columns.spec

    @property
    def identity(self) -> dict[str, Any]:
        """Dtypes, shapes, and sampled rows: those of a copy of these rows are the same."""
        return _identity(self, self._columns.found.sampled_rows)

    @property
    def picklable(self) -> bool:
        """Whether worker processes can map the files of the dataset."""
        return self._columns.picklable

    def __len__(self) -> int:
        return len(self._columns.found)

    def read(self, rows: Indices, out: Any) -> None:
        """Write row rows[i] to index i of each leaf of `out`. FeedError: a file was written to or truncated."""
        self._columns.read(self._columns.found.rows_in_table(rows), out)

    def read_leaf(self, leaf: int, rows: Indices, columns: Columns, out: npt.NDArray[Any]) -> None:
        """Write the `columns` of rows[i] of one leaf to out[i], which has the leaf's dtype; errors as `read`."""
        self._columns.read_leaf(leaf, self._columns.found.rows_in_table(rows), columns, out)

    def close(self) -> None:
        """Do nothing: the dataset belongs to the user."""

    def __reduce__(self) -> Any:
        return SelectedRows, (self._columns,)


def _identity(source: IndexedSource, rows: Indices) -> dict[str, Any]:
    """The fingerprint that `datasets` gives is no part of it: it differs between machines, by times of files."""
    sampled = {name: np.empty((len(rows), *leaf.shape), leaf.dtype) for name, leaf in source.spec.items()}
    source.read(rows, sampled)
    columns = {
        name: [leaf.dtype.str, list(leaf.shape[1:]), hashlib.sha256(leaf.tobytes()).hexdigest()[:32]]
        for name, leaf in sampled.items()
    }
    return {"kind": "dataset", "rows": len(source), "columns": columns}


def _check_no_null(name: str, null: npt.NDArray[np.bool_]) -> None:
    rows = np.flatnonzero(null)
    if len(rows):
        raise ValueError(
            f"every column of a row must have a value, and {name!r} is null in {len(rows):,} of {len(null):,} "
            f"rows, the first of them row {rows[0]:,}; leave them out, dataset.filter(lambda value: value is not "
            f"None, input_columns=[{name!r}]), fill them with dataset.map (docs/hugging_face.md), or leave the "
            "column out with columns=[...]"
        )
