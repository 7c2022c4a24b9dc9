"""Sources over datasets of Hugging Face: columns of numbers where Arrow has them, and rows with bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from feedline._src.errors import RowError
from feedline._src.files.file import check_may_open
from feedline._src.formats.hugging_face import (
    AnyColumn,
    FileColumn,
    HuggingFaceDataset,
    OpenDataset,
    columns_of,
    is_encoded,
    load_saved,
)
from feedline._src.formats.open_options import OpenOptions
from feedline._src.formats.table import Column
from feedline._src.order.epoch import Positions, RowOrder
from feedline._src.rows import digests
from feedline._src.rows.shards import Indices, Shards
from feedline._src.rows.source import Cut, EncodedSource, Indexed, Record, Rows, Source, indices_of
from feedline._src.sources.arrays import ArraySource

_LEAVE_OUT = (
    "leave such rows out, dataset.filter(lambda value: value is not None, input_columns=[{name!r}]), or the "
    "column, with columns=[...]"
)


def open_dataset(dataset: HuggingFaceDataset | str, options: OpenOptions) -> Source | EncodedSource:
    """The rows of a dataset, or of a saved folder: encoded ones if a chosen column has bytes, text or files.

    Raises:
      ValueError: an option other than columns, nulls, lists of different lengths, or what `OpenDataset` refuses.
      TypeError: a column holds neither numbers nor bytes.
    """
    if others := options.given() - {"columns"}:
        names = ", ".join(sorted(others))
        raise ValueError(f"a dataset of Hugging Face takes the option columns alone, got {names}; leave it out")
    found = OpenDataset(load_saved(dataset) if isinstance(dataset, str) else dataset, options)
    has_bytes = any(map(is_encoded, found.table.schema.types))
    return DatasetRecords(found) if has_bytes else DatasetRows(found)


class _Dataset(Indexed):
    """Rows of a dataset. Their identity does not depend on how it is cut into files and pieces.

    The fingerprint that `datasets` gives is no part of it: it differs between machines, by times of files.
    """

    def __init__(self, found: OpenDataset) -> None:
        self._found, self._rows = found, Shards([found.count])

    @property
    def identity(self) -> dict[str, Any]:
        """Names and types of the columns, and sampled rows."""
        hashed = hashlib.sha256()
        for row in self._found.sampled_rows.tolist():
            try:
                values = self._single(row)
            except RowError:  # on all machines, or the processes are told that their data differ
                values = b"a bad row"
            for value in values.values() if isinstance(values, Mapping) else [values]:
                data = value if isinstance(value, bytes) else np.asarray(value).tobytes()
                hashed.update(b"%d " % len(data) + data[: digests.SAMPLED_BYTES])
        columns = [list(column) for column in self._described()]
        return {"kind": "dataset", "rows": len(self), "columns": columns, "sampled": hashed.hexdigest()[:32]}

    def __len__(self) -> int:
        return self._found.count

    def __reduce__(self) -> Any:
        return type(self), (self._found,)


class DatasetRows(_Dataset, Source):
    """The rows of a dataset of numbers, which are copied from the memory of its table."""

    reads_columns = True

    def __init__(self, found: OpenDataset) -> None:
        super().__init__(found)
        self.picklable = bool(found.files)  # worker processes map them
        pieces = [
            {name: column for name, column in piece.items() if isinstance(column, Column)}
            for piece in columns_of(found.table)
        ]
        for name in found.table.column_names:
            _check_no_null(name, [piece[name] for piece in pieces], found)
        self._table = ArraySource([{name: column.values for name, column in piece.items()} for piece in pieces])
        self.spec = self._table.spec

    def read_cuts(self, rows: Rows | Indices, cuts: Sequence[Cut]) -> None:
        """See `Source`."""
        index = indices_of(rows)
        self._rows.check(index)
        with self._found.unchanged():
            self._table.read_cuts(self._found.rows_in_table(index), cuts)

    def read_ordered(self, order: RowOrder, epoch: int, positions: Positions, cuts: Sequence[Cut]) -> Indices:
        """See `Source`: one C call, unless the dataset has indices of its own, as after `shuffle` or `filter`."""
        if self._found.rows is not None:
            return super().read_ordered(order, epoch, positions, cuts)
        with self._found.unchanged():
            return self._table.read_ordered(order, epoch, positions, cuts)


def _check_no_null(name: str, columns: Sequence[Column], found: OpenDataset) -> None:
    """Refuse, with a ValueError, a column of numbers of which a row is null."""
    if all(column.null is None for column in columns):
        return
    null = np.concatenate([np.zeros(c.rows, np.bool_) if c.null is None else c.null for c in columns])
    rows = np.flatnonzero(null if found.rows is None else null[found.rows])
    if len(rows):
        raise ValueError(
            f"every column of a row must have a value, and {name!r} is null in {len(rows):,} of "
            f"{found.count:,} rows, the first of them row {rows[0]:,}; fill them with dataset.map "
            f"(docs/formats.md), or {_LEAVE_OUT.format(name=name)}"
        )


class DatasetRecords(_Dataset, EncodedSource):
    """An `EncodedSource` over a dataset some columns of which hold bytes, text or files. Reads are thread-safe.

    Raises:
      TypeError: a column holds neither bytes nor numbers.
      ValueError: a column has lists of different lengths.
    """

    instead = ", or leave columns of bytes and text out with open_source(dataset, columns=[...])"

    def __init__(self, found: OpenDataset) -> None:
        super().__init__(found)
        self._pieces = columns_of(found.table)
        self._piece_of_row = Shards([next(iter(piece.values())).rows for piece in self._pieces])
        self._names = tuple(self._pieces[0])
        self.fields = self._names if len(self._names) > 1 else None

    def records(self, rows: Indices) -> Sequence[Record]:
        """See `EncodedSource`: bytes, or of several columns dicts by name, numbers as NumPy scalars or arrays.

        Raises:
          IndexError: there is no such row.
          RowError: also a null, or a file that cannot be read.
          FeedError: also an image file that is gone.
        """
        self._rows.check(rows)
        found: list[dict[str, Any]] = [{} for _ in rows]
        with self._found.unchanged():
            for piece, local, offsets in self._piece_of_row.split(self._found.rows_in_table(rows)):
                places = np.arange(len(rows))[offsets]
                for name, column in self._pieces[piece].items():
                    for place, value in zip(
                        places.tolist(), _taken(name, column, local, rows[places]), strict=True
                    ):
                        found[place][name] = value
        return [row[self._names[0]] for row in found] if self.fields is None else found

    def file_of(self, row: int) -> Any:
        """The image file of a row that has its path; None: the row is in the table."""
        ((piece, local, _),) = self._piece_of_row.split(self._found.rows_in_table(np.array([row])))
        files = (column for column in self._pieces[piece].values() if isinstance(column, FileColumn))
        return next((path for column in files if (path := column.path_of(int(local[0])))), None)

    def _described(self) -> list[tuple[str, str]]:
        if self.fields is None:
            return [("row", "bytes")]
        return [(name, _form_of(column)) for name, column in self._pieces[0].items()]


def _form_of(column: AnyColumn) -> str:
    if isinstance(column, FileColumn) or column.ends is not None:
        return "bytes"
    return f"{column.values.dtype}{list(column.values.shape[1:])}"


def _taken(name: str, column: AnyColumn, local: Indices, rows: Indices) -> list[Any]:
    """The values of a column: the rows `local` of a piece, which are `rows` of the dataset."""
    bad, why, cause = 0, f"every column of a row must have a value, and {name!r} is null in this row", None
    if column.null is None or not (null := np.flatnonzero(column.null[local])).size:
        try:
            return column.take(local)
        except (OSError, MemoryError, ValueError) as error:
            check_may_open(error, "a column of the dataset")
            why, cause = f"column {name!r} of this dataset could not be read: {error}", error
    else:
        bad = int(null[0])
    raise RowError(
        f"{why}; take another row in its place, feedline.Reading(bad_rows='substitute'), or "
        f"{_LEAVE_OUT.format(name=name)}",
        stage="read",
        row=int(rows[bad]),
    ) from cause
